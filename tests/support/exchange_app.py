"""The aggregator's side of ``benchmarks/deployed.py``, in a ServerApp's process."""

import os
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from cloud_adapters.flower import runtime as flower_runtime
from cloud_adapters.flower.grid import SUPERLINK_POLL_SECONDS, Delivery, FlowerGrid
from cloud_adapters.flower.handshake import Attendance
from cloud_adapters.storage.disk.store import LocalStore
from cloud_adapters.transport.frames import INLINE, THRESHOLD_BYTES, Frames
from federation.clock import SystemClock
from federation.ids import RunId, SiteId
from federation.mapped import give_back
from federation.messages import (
    FailureKind,
    RoundTask,
    SiteFailure,
    SiteUpdate,
    TaskKind,
)
from federation.rounds.gather import exchange
from federation.vectors import chunks

RUN = RunId("run-1")
MB = 1 << 20


class NamesCall:
    """Believes every node that says a name."""

    question = b"who is there?"
    absent: Mapping[SiteId, str] = MappingProxyType({})

    def site_of(self, answer: bytes) -> SiteId:
        """Take it at its word."""
        return SiteId(answer.decode())

    def move_on(self) -> bool:
        """There is nothing else to ask."""
        return False


def rounds(
    api: Grid,
    *,
    sites: list[str],
    num_floats: int,
    num_rounds: int,
    folder: str,
    threshold_bytes: int = THRESHOLD_BYTES,
) -> dict[str, Any]:
    """Send a model to all sites and wait for their answers, a number of times.

    Args:
        api: Flower's.
        sites: Those that answer.
        num_floats: Of the model.
        num_rounds: How often it is sent.
        folder: Has the store for what is larger than the threshold; empty for none.
        threshold_bytes: See ``Frames``.

    Returns:
        Seconds of each round, what was wrong with an answer, and this process's
        number and peaks of memory.
    """
    frames = INLINE
    if folder:
        store, scratch = LocalStore(Path(folder) / "store"), Path(folder) / "scratch"
        frames = Frames(store=store, scratch=scratch, threshold_bytes=threshold_bytes)
    names = [SiteId(name) for name in sites]
    grid = FlowerGrid(
        flower_runtime.over(api),
        names,
        clock=SystemClock(),
        attendance=Attendance(handshake=NamesCall()),
        delivery=Delivery(frames=frames, poll_seconds=SUPERLINK_POLL_SECONDS),
    )
    weights_d = np.arange(num_floats, dtype=np.float32)
    seconds: list[float] = []
    wrong: list[str] = []
    for index in range(1, num_rounds + 1):
        begin = time.perf_counter()
        tasks = [_task(name, index, weights_d) for name in names]
        # One after the other, as they are added up: not all are in memory.
        wrong.extend(
            str(reply.message)[:500]
            for reply in exchange(grid, tasks, deadline_seconds=600.0)
            if not _is_right(reply.message, weights_d)
        )
        seconds.append(time.perf_counter() - begin)
    if folder:
        frames.end_run(RUN, names)
    return {"seconds": seconds, "wrong": wrong, **memory()}


def fedavg(api: Grid, *, num_floats: int, num_rounds: int) -> dict[str, Any]:
    """The same with Flower's own grid and strategy, and apps in its own nodes.

    Returns:
        Seconds of each round.
    """
    ends: list[float] = []
    num_nodes = len(list(api.get_node_ids()))
    strategy = FedAvg(
        fraction_evaluate=0.0,
        min_train_nodes=num_nodes,
        min_available_nodes=num_nodes,
    )
    weights = ArrayRecord({"w": Array(np.arange(num_floats, dtype=np.float32))})
    strategy.start(
        api,
        weights,
        num_rounds=num_rounds,
        evaluate_fn=lambda *_: ends.append(time.perf_counter()),
    )
    return {"seconds": [after - before for before, after in pairwise(ends)]}


def detect(api: Grid, *, sites: list[str], deaf: str) -> float:
    """Give all sites a task, and wait for the failure of one that never answers.

    Returns:
        When it was found, in seconds since 1970.
    """
    names = [SiteId(name) for name in sites]
    clock = SystemClock()
    grid = FlowerGrid(
        flower_runtime.over(api),
        names,
        clock=clock,
        attendance=Attendance(handshake=NamesCall()),
        delivery=Delivery(poll_seconds=SUPERLINK_POLL_SECONDS),
    )
    tasks = [_task(name, 1, np.zeros(1, dtype=np.float32)) for name in names]
    for reply in exchange(grid, tasks, deadline_seconds=600.0):
        if reply.message.site == deaf:
            assert isinstance(reply.message, SiteFailure)
            assert reply.message.kind is FailureKind.DISCONNECTED
            return clock.now()
    raise AssertionError(f"{deaf} was not among the replies")


def process(_: Grid) -> int:
    """Number of the process."""
    return os.getpid()


def _task(site: SiteId, index: int, weights_d: Any) -> RoundTask:
    return RoundTask(
        run_id=RUN,
        round_index=index,
        site=site,
        kind=TaskKind.TRAIN,
        layout_digest="ab" * 32,
        weights_d=weights_d,
        integers_m=np.zeros(0, dtype=np.int64),
        evaluate=False,
        evaluate_after=False,
    )


def _is_right(answer: object, weights_d: Any) -> bool:
    """Look at every value, a part at a time, as an aggregator does."""
    if not isinstance(answer, SiteUpdate) or answer.delta_d.size != weights_d.size:
        return False
    for piece in chunks(weights_d.size, MB):
        if not np.array_equal(answer.delta_d[piece], weights_d[piece]):
            return False
        give_back(answer.delta_d[piece])
    return True


def memory(process: str = "self") -> dict[str, float]:
    """Peak of resident memory, and memory of one's own that is in use, in MiB."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    found = dict(line.split(":", 1) for line in lines)
    peak, own = (int(found[name].split()[0]) / 1024 for name in ("VmHWM", "RssAnon"))
    return {"peak_mb": peak, "own_mb": own}
