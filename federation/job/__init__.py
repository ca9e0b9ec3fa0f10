"""The job file: its keys, what they may be, and what of them decides."""
