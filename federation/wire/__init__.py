"""Bytes between the parties."""
