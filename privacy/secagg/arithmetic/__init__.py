"""Sums in a ring: sealing, headers, shares."""
