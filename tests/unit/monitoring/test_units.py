"""Numbers read well at every size."""

import pytest

from monitoring.units import (
    format_bytes,
    format_delta,
    format_duration,
)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (301_234, "301.2 kB"),
        (999_960, "1.0 MB"),
        (5e15, "5000.0 TB"),
    ],
)
def test_bytes(size: float, expected: object):
    assert expected == format_bytes(size)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.0, "0.0 s"),
        (0.012, "12 ms"),
        (0.84, "0.8 s"),
        (9.97, "10 s"),
        (59.7, "1 min 00 s"),
        (185, "3 min 05 s"),
        (7500, "2 h 05 min"),
        (300_000, "3 d 11 h"),
    ],
)
def test_durations(seconds: float, expected: object):
    assert expected == format_duration(seconds)


@pytest.mark.parametrize(
    ("delta", "expected"),
    [(0.0, "0"), (1e-4, "1e-04"), (2.51e-6, "2.6e-06"), (0.3, "3e-01")],
)
def test_deltas_are_rounded_up(delta: float, expected: str):
    """A bound stays a bound, and a round number stays round."""
    assert expected == format_delta(delta)
