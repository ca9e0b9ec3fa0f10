"""Search for the keys of a job that train best: ``crossfed tune``."""
