"""What every clock promises."""

import pytest

from federation.clock import SystemClock, VirtualClock
from federation.protocols import Clock


@pytest.fixture(params=[SystemClock, VirtualClock])
def clock(request: pytest.FixtureRequest) -> Clock:
    """One clock of each kind."""
    return request.param()


def test_monotonic_never_goes_backwards(clock: Clock):
    """Later readings are not smaller."""
    readings = [clock.monotonic() for _ in range(100)]
    assert readings == sorted(readings)


@pytest.mark.parametrize("seconds", [0.0, 0.01])
def test_sleep_lasts_at_least_as_long_as_asked(clock: Clock, seconds: float):
    """Both readings show the wait; one tick of the date's clock is forgiven."""
    now, start = clock.now(), clock.monotonic()
    clock.sleep(seconds)
    assert clock.monotonic() - start >= seconds
    assert clock.now() - now >= seconds - 0.005


def test_negative_sleep_is_refused(clock: Clock):
    """Nobody can wait for the past."""
    with pytest.raises(ValueError, match=r"sleep|negative"):
        clock.sleep(-0.5)


def test_readings_are_plain_floats(clock: Clock):
    """They go into JSON as they are."""
    assert type(clock.now()) is float
    assert type(clock.monotonic()) is float
