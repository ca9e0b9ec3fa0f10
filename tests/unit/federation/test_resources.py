"""What work takes of a machine: measured by a method that has a name."""

import threading

from federation.clock import VirtualClock
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
