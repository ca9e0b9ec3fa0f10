"""The job file: its keys, their values, and which of them decide what is computed."""
