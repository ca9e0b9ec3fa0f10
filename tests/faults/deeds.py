"""What is done to a victim. When a deed returns, the world is whole again."""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from faults import disks, jobs, store_process
from faults.cells import Cell, Deed, Victim
from faults.testbed import Testbed, pause
from support.deployment import command_of, descendants, is_alive, wait_for

# Whoever looks after a machine starts what has died after a moment.
AGAIN_SECONDS = 1.0
_PROGRAMS = {
    Victim.COORDINATOR: "flwr-serverapp",
    Victim.SUPERLINK: "flower-superlink",
    Victim.PROXY: "nginx: ",
}


def strike(cell: Cell, bed: Testbed, seconds: float) -> None:
    """Do a cell's deed; what lasts, lasts so many seconds."""
    _DEEDS[cell.deed](cell.victim, bed, seconds)


def processes(victim: Victim, bed: Testbed) -> list[int]:
    """Processes of a victim."""
    deployment = bed.deployment
    if victim is Victim.STORE:
        assert bed.store is not None
        return [bed.store.pid]
    site = deployment.processes[jobs.STRUCK].pid
    if victim is Victim.SITE:
        return [site]
    if victim is Victim.RANK:
        return [pid for pid in descendants(site) if "rank_process" in command_of(pid)]
    family = descendants(deployment.processes["aggregator"].pid)
    return [pid for pid in family if _PROGRAMS[victim] in command_of(pid)]


def _kill(victim: Victim, bed: Testbed, seconds: float) -> None:
    _end(victim, bed, signal.SIGKILL)


def _restart(victim: Victim, bed: Testbed, seconds: float) -> None:
    _end(victim, bed, signal.SIGTERM)


def _end(victim: Victim, bed: Testbed, number: signal.Signals) -> None:
    """End a victim; what its supervisor does not start again, start again."""
    struck = _struck(victim, bed)
    for pid in struck:
        os.kill(pid, number)
    if victim is Victim.SITE:
        bed.deployment.processes.pop(jobs.STRUCK).wait(60)
        pause(AGAIN_SECONDS)
        bed.deployment.start_site(jobs.STRUCK)
    elif victim is Victim.STORE:
        assert bed.store is not None
        bed.store.wait(60)
        pause(AGAIN_SECONDS)
        bed.start_store()
    else:
        wait_for(lambda: not any(map(is_alive, struck)), f"the end of {victim}", 60)


def _freeze(victim: Victim, bed: Testbed, seconds: float) -> None:
    struck = _struck(victim, bed)
    for pid in struck:
        os.kill(pid, signal.SIGSTOP)
    try:
        pause(seconds)
    finally:
        for pid in filter(is_alive, struck):
            os.kill(pid, signal.SIGCONT)


def _cut(victim: Victim, bed: Testbed, seconds: float) -> None:
    hosts: Sequence[str] = jobs.SITES if victim is Victim.PROXY else [jobs.STRUCK]
    if victim is Victim.STORE:
        pull, plug = bed.pull_store, bed.plug_store
    else:
        pull = lambda: [bed.net.pull(host) for host in hosts]  # noqa: E731
        plug = lambda: [bed.net.plug(host) for host in hosts]  # noqa: E731
    with _between(pull, plug):
        pause(seconds)


def _fill(victim: Victim, bed: Testbed, seconds: float) -> None:
    if victim is Victim.STORE:
        full, room = store_process.FULL, store_process.ROOM
        with _between(lambda: bed.signal_store(full), lambda: bed.signal_store(room)):
            pause(seconds)
        return
    folder = bed.disk_of(victim)
    with _between(lambda: disks.fill(folder), lambda: disks.clear(folder)):
        pause(seconds)


@contextmanager
def _between(begin: Callable[[], object], end: Callable[[], object]) -> Iterator[None]:
    try:
        begin()
        yield
    finally:
        end()


def _struck(victim: Victim, bed: Testbed) -> list[int]:
    """The processes that a deed ends or freezes: of several ranks one."""
    found = sorted(processes(victim, bed))
    assert found, f"no process of the {victim} runs"
    return found[-1:] if victim is Victim.RANK else found


_DEEDS: dict[Deed, Callable[[Victim, Testbed, float], None]] = {
    Deed.KILL: _kill,
    Deed.FREEZE: _freeze,
    Deed.CUT: _cut,
    Deed.LONG_CUT: _cut,
    Deed.FULL: _fill,
    Deed.RESTART: _restart,
}
