"""The audit of a job: its runs, and what they show."""
