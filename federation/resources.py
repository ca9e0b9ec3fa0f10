"""A machine's resources used by work, measured by a named method."""

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass

from federation.messages import UNKNOWN_ENERGY, Energy, Resources
from federation.protocols import Clock

_RSS_UNIT_BYTES = 1024  # Of ``ru_maxrss``, on Linux.


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageMeter:
    """A method of measuring.

    Attributes:
        method: Its name in messages and events.
        cpu_seconds: CPU time so far; None if the method has none.
        peak_memory_bytes: Most memory held at once so far, likewise.
        energy: What the machine has taken so far; None if that is not reported.
    """

    method: str
    cpu_seconds: Callable[[], float] | None = None
    peak_memory_bytes: Callable[[], int] | None = None
    energy: Callable[[], Energy] | None = None


def _peak_memory_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT_BYTES


# For one site or aggregator in a process of its own; its children are not included.
PROCESS = UsageMeter(
    method="process",
    cpu_seconds=time.process_time,
    peak_memory_bytes=_peak_memory_bytes,
)
# For sites that share a process: the thread that works, without helper threads of
# libraries. Memory cannot be divided among them.
THREAD = UsageMeter(method="thread", cpu_seconds=time.thread_time)
# Where only the clock counts: in virtual time, and where children do the work.
CLOCK = UsageMeter(method="clock")


class Usage:
    """What has been used since this was made, by the thread that made it."""

    def __init__(self, clock: Clock, meter: UsageMeter) -> None:
        """Begin to measure."""
        self._clock = clock
        self._meter = meter
        self._start = clock.monotonic()
        self._cpu_start = _read(meter.cpu_seconds)
        self._energy_start = meter.energy() if meter.energy else UNKNOWN_ENERGY

    def so_far(self) -> Resources:
        """Return the resources used so far."""
        cpu, start = _read(self._meter.cpu_seconds), self._cpu_start
        memory, energy = self._meter.peak_memory_bytes, self._meter.energy
        return Resources(
            busy_seconds=self._clock.monotonic() - self._start,
            cpu_seconds=None if cpu is None or start is None else cpu - start,
            peak_memory_bytes=None if memory is None else memory(),
            method=self._meter.method,
            energy=energy and _between(self._energy_start, energy()),
        )


def _read(seconds: Callable[[], float] | None) -> float | None:
    return None if seconds is None else seconds()


def _between(before: Energy, after: Energy) -> Energy:
    """What was taken from one count to another."""
    joules = _less(after.joules, before.joules)
    if joules is None:
        return UNKNOWN_ENERGY
    grams = _less(after.grams, before.grams)
    return Energy(joules=joules, grams=grams, method=after.method)


def _less(
    ends: tuple[float, float] | None, others: tuple[float, float] | None
) -> tuple[float, float] | None:
    if ends is None or others is None:
        return None
    low = max(0.0, ends[0] - others[0])
    return low, max(low, ends[1] - others[1])  # Rounding may bring them out of order.
