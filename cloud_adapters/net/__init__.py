"""Ports, loopback and TLS."""
