"""What is done to a victim. When a deed returns, the world is whole again."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from faults import disks, jobs, store_process
from faults.cells import Cell, Deed, Victim
from faults.rig import STORE, Rig, pause
from support.deployment import command_of, descendants, is_alive, wait_for

# Whoever looks after a machine starts what has died after a moment.
AGAIN_SECONDS = 1.0
_PROGRAMS = {
    Victim.COORDINATOR: "coordinator_process",
    Victim.SUPERLINK: "superlink_process",
    Victim.PROXY: "nginx: ",
}

# Whose cables are pulled to part a victim from everybody.
_BEHIND: dict[Victim, Sequence[str]] = {
    Victim.PROXY: jobs.SITES,
    Victim.SITE: (jobs.STRUCK,),
    Victim.STORE: (STORE,),
}


def strike(cell: Cell, rig: Rig) -> None:
    """Do a cell's deed; what lasts, lasts as long as the cell says."""
    _DEEDS[cell.deed](cell.victim, rig, cell.seconds)


def processes(victim: Victim, rig: Rig) -> list[int]:
    """Processes of a victim."""
    deployment = rig.deployment
    if victim is Victim.STORE:
        assert rig.store is not None
        return [rig.store.pid]
    site = deployment.processes[jobs.STRUCK].pid
    if victim is Victim.SITE:
        return [site]
    if victim is Victim.RANK:
        return [pid for pid in descendants(site) if "rank_process" in command_of(pid)]
    family = descendants(deployment.processes["aggregator"].pid)
    return [pid for pid in family if _PROGRAMS[victim] in command_of(pid)]


def _kill(victim: Victim, rig: Rig, seconds: float) -> None:
    _end(victim, rig, signal.SIGKILL)


def _restart(victim: Victim, rig: Rig, seconds: float) -> None:
    _end(victim, rig, signal.SIGTERM)


def _end(victim: Victim, rig: Rig, number: signal.Signals) -> None:
    """End a victim; what its supervisor does not start again, start again."""
    struck = _struck(victim, rig)
    for pid in struck:
        with contextlib.suppress(ProcessLookupError):  # Its parent has ended it.
            os.kill(pid, number)
    if victim is Victim.SITE:
        rig.deployment.processes.pop(jobs.STRUCK).wait(60)
        pause(AGAIN_SECONDS)
        rig.deployment.start_site(jobs.STRUCK)
    elif victim is Victim.STORE:
        assert rig.store is not None
        rig.store.wait(60)
        pause(AGAIN_SECONDS)
        rig.start_store()
    else:
        wait_for(lambda: not any(map(is_alive, struck)), f"the end of {victim}", 60)


def _freeze(victim: Victim, rig: Rig, seconds: float) -> None:
    struck = _struck(victim, rig)
    for pid in struck:
        os.kill(pid, signal.SIGSTOP)
    try:
        pause(seconds)
    finally:
        for pid in filter(is_alive, struck):
            os.kill(pid, signal.SIGCONT)


def _cut(victim: Victim, rig: Rig, seconds: float) -> None:
    hosts = _BEHIND[victim]
    with _between(lambda: rig.net.pull(hosts), lambda: rig.net.plug(hosts)):
        pause(seconds)


def _fill(victim: Victim, rig: Rig, seconds: float) -> None:
    if victim is Victim.STORE:
        full, room = store_process.FULL, store_process.ROOM
        with _between(lambda: rig.signal_store(full), lambda: rig.signal_store(room)):
            pause(seconds)
        return
    folder = rig.disk_of(victim)
    with _between(lambda: disks.fill(folder), lambda: disks.clear(folder)):
        pause(seconds)


@contextmanager
def _between(begin: Callable[[], object], end: Callable[[], object]) -> Iterator[None]:
    try:
        begin()
        yield
    finally:
        end()


def _struck(victim: Victim, rig: Rig) -> list[int]:
    """The processes that a deed ends or freezes: of several ranks one."""
    found = sorted(processes(victim, rig))
    assert found, f"no process of the {victim} runs"
    return found[-1:] if victim is Victim.RANK else found


_DEEDS: dict[Deed, Callable[[Victim, Rig, float], None]] = {
    Deed.KILL: _kill,
    Deed.FREEZE: _freeze,
    Deed.CUT: _cut,
    Deed.LONG_CUT: _cut,
    Deed.FULL: _fill,
    Deed.RESTART: _restart,
}
