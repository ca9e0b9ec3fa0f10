"""The archive of runs."""
