"""What work takes of a machine: measured by a method that has a name."""

import threading

from federation.clock import VirtualClock
from federation.messages import UNKNOWN_ENERGY, Energy
from federation.resources import PROCESS, THREAD, Usage, UsageMeter


def test_usage_counts_from_its_beginning():
    """CPU time is a difference; memory is the most that the process ever held."""
    clock, cpu = VirtualClock(100.0), iter((7.0, 9.5))
    meter = UsageMeter(
        method="process",
        cpu_seconds=lambda: next(cpu),
        peak_memory_bytes=lambda: 2**30,
    )
    usage = Usage(clock, meter)
    clock.sleep(4.0)
    used = usage.so_far()
    assert (used.busy_seconds, used.cpu_seconds) == (4.0, 2.5)
    assert (used.peak_memory_bytes, used.method) == (2**30, "process")


def test_energy_is_that_between_two_counts():
    """A range stays one, whatever rounding does; what is unknown stays unknown."""
    counts = [
        Energy(joules=(10.0, 12.0), grams=(1.0, 2.0), method="model"),
        Energy(joules=(15.0, 16.9), grams=(1.5, 2.75), method="RAPL"),
    ]
    found = list[Energy | None]()
    for first, second in (counts, [counts[0], UNKNOWN_ENERGY], [UNKNOWN_ENERGY] * 2):
        meter = UsageMeter(method="process", energy=iter([first, second]).__next__)
        found.append(Usage(VirtualClock(), meter).so_far().energy)
    assert found == [
        Energy(joules=(5.0, 5.0), grams=(0.5, 0.75), method="RAPL"),
        *[UNKNOWN_ENERGY] * 2,
    ]
    assert Usage(VirtualClock(), PROCESS).so_far().energy is None


def test_sites_of_one_process_are_told_apart_by_their_threads():
    """What another thread computes is in the process's time alone."""
    clock = VirtualClock()
    own, process = Usage(clock, THREAD), Usage(clock, PROCESS)
    worker = threading.Thread(target=lambda: sum(range(2_000_000)))
    worker.start()
    worker.join()
    thread_seconds, seconds = own.so_far().cpu_seconds, process.so_far().cpu_seconds
    assert thread_seconds is not None
    assert seconds is not None
    assert thread_seconds < seconds / 2
    assert (process.so_far().peak_memory_bytes or 0) > 2**20
