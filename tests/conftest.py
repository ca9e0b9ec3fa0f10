"""What holds for every test."""

from hypothesis import settings

# The same examples in every run, and no wall clock: a busy machine fails no test.
settings.register_profile("crossfed", deadline=None, derandomize=True)
settings.load_profile("crossfed")
