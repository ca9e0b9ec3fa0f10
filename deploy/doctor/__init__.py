"""Finds what is wrong with a host, a site or a store, and how to fix it."""
