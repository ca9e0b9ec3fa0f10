"""The command line, the wiring and the entry points."""
