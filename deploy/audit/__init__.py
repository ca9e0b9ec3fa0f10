"""The audit of a job: its runs, and their findings."""
