"""A clock that moves only when it is told to."""

import pytest

from federation.clock import VirtualClock


def test_virtual_clock_starts_where_it_is_told():
    """Tests choose the date."""
    clock = VirtualClock(start=100.0)
    assert (clock.now(), clock.monotonic()) == (100.0, 100.0)


def test_virtual_clock_moves_exactly_by_what_is_slept():
    """Sleeping takes no time, but time passes."""
    clock = VirtualClock()
    clock.sleep(3600)
    clock.sleep(0.5)
    assert clock.now() == 3600.5


def test_virtual_clock_stands_still_otherwise():
    """Looking at it does not move it."""
    clock = VirtualClock()
    assert clock.now() == clock.now()


def test_virtual_clock_does_not_run_backwards():
    """A negative time is a mistake of the caller."""
    with pytest.raises(ValueError, match=r"cannot sleep -1\.0 s"):
        VirtualClock().sleep(-1.0)
