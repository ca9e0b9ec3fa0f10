"""From a job to the parts that run it."""
