"""Loss against time on lines of a width, computed from the bytes that rows have sent.

Nothing here is measured in seconds. A step takes the same stated time at all sites. In
a round a site first receives and then trains and sends, over a line of its own. In a
synchronous step it trains and takes part in a ring, whose two directions are used
together. Latency, and the time for encoding, masking and adding up, are left out: a
synchronous run waits for a line's delay at every step, so this favours it.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate

from exchanges import ring_bytes
from results import Result

NUM_SITES = 4
_MBIT = 1e6 / 8  # Bytes per second.


def seconds(row: Result, *, mbit: float, step_seconds: float) -> float:
    """Time that a row's run takes.

    Args:
        row: Of ``measure.py``.
        mbit: Width of each site's line in each direction, in Mbit/s.
        step_seconds: Of a site.
    """
    trains = row["steps"] * step_seconds
    if row["bytes_from"] == "formula":
        sent = row["steps"] * ring_bytes(row["parameters"], NUM_SITES)
    else:
        sent = (row["bytes_up"] + row["bytes_down"]) / NUM_SITES
    return float(trains + sent / (mbit * _MBIT))


def course(
    row: Result, *, mbit: float, step_seconds: float
) -> list[tuple[float, float]]:
    """Seconds at the end of each round, or window of steps, and its training loss.

    Empty for a row that was measured before rows told their course.
    """
    losses: Sequence[float] = row.get("course_losses", ())
    ends = accumulate(
        steps * step_seconds + sent / (mbit * _MBIT)
        for steps, sent in zip(_steps(row), _sent(row), strict=False)
    )
    return list(zip(ends, losses, strict=False))


def _steps(row: Result) -> Iterator[int]:
    """Steps of each round or window; the last may have fewer."""
    left, most = row["steps"], row.get("course_steps", 1)
    while left > 0:
        yield min(left, most)
        left -= most


def _sent(row: Result) -> Iterator[float]:
    """Bytes that one after another go over a site's line in each of them."""
    if row["bytes_from"] == "formula":
        one = ring_bytes(row["parameters"], NUM_SITES)
        yield from (steps * one for steps in _steps(row))
        return
    both = zip(row.get("course_up", ()), row.get("course_down", ()), strict=True)
    yield from ((up + down) / NUM_SITES for up, down in both)
