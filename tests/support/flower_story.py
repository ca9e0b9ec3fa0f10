"""A run on Flower's simulation engine: what is asked of every grid, then misfortune.

Ray takes seconds to start: what a run leaves, and how it ends, is told by the run that
``tests/contract/test_grid.py`` looks at, too.
"""

import contextlib
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import grid_script, toy_sites
from support.grid_script import EVERY_SITE, FAULTY, JOB_TEXT, Played

from cloud_adapters.flower.simulation import import_flower, run_on_flower_simulation
from federation.clock import SystemClock
from federation.ids import SiteId
from federation.messages import Reply, RoundTask, SiteUpdate, TaskKind
from federation.protocols import Grid
from federation.rounds.gather import exchange

PATIENCE = 30  # Seconds.


def ask(
    grid: Grid, round_index: int, *, wanted: Callable[[SiteId], bool] = bool
) -> dict[SiteId, Reply]:
    """Send a task to every faulty site that is wanted; return their replies.

    On a busy machine, late replies to tasks that the script withdrew may come, too.
    """
    tasks = [
        RoundTask(
            run_id="run-1",
            round_index=round_index,
            site=site,
            kind=TaskKind.TRAIN,
            layout_digest="ab" * 32,
            weights_d=np.ones(3, dtype=np.float32),
            integers_m=np.empty(0, dtype=np.int64),
            evaluate=False,
            evaluate_after=False,
        )
        for site in FAULTY
        if wanted(site)
    ]
    replies = exchange(grid, tasks, deadline_seconds=PATIENCE)
    asked = {task.site for task in tasks}
    return {r.message.site: r for r in replies if r.message.site in asked}


def children() -> set[str]:
    """Processes that this one has started and that still live."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # It has ended since.
            about = (process / "stat").read_text().rpartition(")")[2].split()
            if int(about[1]) == os.getpid():
                found.add((process / "cmdline").read_text())
    return found


def surroundings() -> dict[str, Any]:
    """What a run must leave as it was."""
    import_flower()  # Which sets variables of its own, once a process.
    return {
        "environment": dict(os.environ),
        "children": children(),
        "threads": {t for t in threading.enumerate() if not t.daemon},
        "signals": [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)],
        "folders": {p.name for p in Path(tempfile.gettempdir()).glob("crossfed-*")},
        "flower": (Path.home() / ".flwr").exists(),
    }


@contextmanager
def own_temporary_folder() -> Iterator[None]:
    """See one's own files and no other process's; the path must be short."""
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        tempfile.tempdir = folder
        try:
            yield
        finally:
            tempfile.tempdir = before


@dataclass(frozen=True, kw_only=True)
class Story:
    """What came of a run.

    Attributes:
        played: Of the script of every grid.
        rounds: Replies of the faulty sites in the first round, and in the last.
        error: What the run raised.
        before: What a run must leave as it was; see ``surroundings``.
        after: The same when the run had ended.
    """

    played: Played
    rounds: list[dict[SiteId, Reply]]
    error: RuntimeError
    before: dict[str, Any]
    after: dict[str, Any]


def tell() -> Story:
    """Run the script, two rounds with faulty sites, then an error in the server.

    Sites hang while the file is there that the environment names.
    """
    played: list[Played] = []
    rounds: list[dict[SiteId, Reply]] = []

    def server(grid: Grid) -> None:
        played.append(grid_script.play(grid))
        # A task that waits behind one that kills its process may go with it.
        first = ask(grid, 1, wanted=lambda site: site != "dies")
        rounds.append(first | ask(grid, 1, wanted=lambda site: site == "dies"))
        for _ in range(PATIENCE):  # Its new process takes a while to start.
            again = ask(grid, 2, wanted=lambda site: site == "dies")
            if isinstance(again[SiteId("dies")].message, SiteUpdate):
                break
            time.sleep(1)
        rounds.append(ask(grid, 3))
        raise RuntimeError("from the server")

    with own_temporary_folder():
        before = surroundings()
        with pytest.raises(RuntimeError) as caught:
            run_on_flower_simulation(
                server,
                toy_sites.faulty_site,
                sites=EVERY_SITE,
                job_text=JOB_TEXT,
                clock=SystemClock(),
                workers=2,
            )
        after = surroundings()
    assert played, caught.value
    return Story(
        played=played[0],
        rounds=rounds,
        error=caught.value,
        before=before,
        after=after,
    )
