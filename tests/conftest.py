"""What holds for every test."""

import pytest
from hypothesis import settings

# The same examples in every run, and no wall clock: a busy machine fails no test.
settings.register_profile("crossfed", deadline=None, derandomize=True)
settings.load_profile("crossfed")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Ray starts in one worker at a time: two of it would see each other's files."""
    if item.get_closest_marker("flower"):
        item.add_marker(pytest.mark.xdist_group("flower"))
