"""What every grid is asked in ``tests/contract/test_grid.py``, and what comes of it."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from support import toy_sites

from federation.clock import SystemClock
from federation.ids import SiteId, TaskId
from federation.messages import (
    FailureKind,
    Reply,
    RoundTask,
    SecureStep,
    SecureTask,
    SiteFailure,
    Task,
    TaskKind,
)
from federation.protocols import Grid
from federation.rounds.gather import exchange

SITES = [SiteId(name) for name in ("delta", "alpha-bad", "charlie", "bravo")]
# The script asks none of these; see ``support.flower_story``.
FAULTY = [SiteId(name) for name in ("honest", "dies", "raises", "lies", "unbuilt")]
EVERY_SITE = [*SITES, *FAULTY]
JOB_TEXT = 'name = "toy"  # \u00fc\n'
# A busy machine fails no test.
PATIENT_SECONDS = 600.0

WEIGHTS_D = np.array([1.5, -0.0, np.inf, -np.inf, 1e-45, 3.4e38, 0.1], dtype=np.float32)
NAN_BITS = np.array([0x7FC00001, 0xFFC0FFFF], dtype=np.uint32).view(np.float32)
TASK = RoundTask(
    run_id="run-1",
    round_index=1,
    site=SITES[0],
    kind=TaskKind.TRAIN,
    layout_digest="ab" * 32,
    weights_d=np.concatenate([WEIGHTS_D, NAN_BITS]),
    integers_m=np.array([-(2**63), 2**62, 0], dtype=np.int64),
    evaluate=True,
    evaluate_after=False,
)


def tasks(sites: list[SiteId] = SITES, **fields: Any) -> list[RoundTask]:
    """One task for each site."""
    return [replace(TASK, site=site, **fields) for site in sites]


def secure_tasks(step: SecureStep, round_index: int) -> list[SecureTask]:
    """One step of secure aggregation for each site."""
    return [
        SecureTask(
            run_id="run-1",
            round_index=round_index,
            site=site,
            step=step,
            body=b"\0for " + site.encode(),
        )
        for site in SITES
    ]


@dataclass
class Played:
    """What came of the script."""

    train: list[Reply]
    again: list[Reply]
    evaluate: list[Reply]
    reverse: list[Reply]
    some: list[Reply]
    none: list[Reply]
    setup: list[Reply]
    masked: list[Reply]
    failing: list[Reply]
    after_break: list[Reply]
    hanging: list[Reply]
    after_hanging: list[Reply]
    sent: list[TaskId]
    overlapping: list[Reply]
    too_early: list[Reply]
    withdrawn: list[Reply]
    withdrawn_bytes: dict[TaskId, int]
    again_bytes: dict[TaskId, int]
    nothing: list[Reply]


def until_free(
    send: Callable[[Sequence[Task]], list[Reply]], tasks: Sequence[Task]
) -> list[Reply]:
    """Ask again while a site is busy with what it hung in."""
    while True:
        replies = send(tasks)
        failures = [r.message for r in replies if isinstance(r.message, SiteFailure)]
        if all(failure.kind is not FailureKind.BUSY for failure in failures):
            return replies
        SystemClock().sleep(0.05)


def play(grid: Grid) -> Played:
    """Send the script's tasks; a site hangs while a file is there."""
    hold = Path(os.environ[toy_sites.HOLD])

    def send(tasks: Sequence[Task], seconds: float = PATIENT_SECONDS) -> list[Reply]:
        return list(exchange(grid, tasks, deadline_seconds=seconds))

    def receive_all() -> list[Reply]:
        found: list[Reply] = []
        while replies := grid.receive():
            found += replies
        return found

    def send_and_leave() -> None:
        replies = exchange(
            grid, tasks(round_index=50), deadline_seconds=PATIENT_SECONDS
        )
        next(iter(replies))
        replies.close()  # type: ignore[attr-defined]

    train = send(tasks())
    begin = SystemClock().monotonic()
    again = send(tasks())
    # Ample for those that do not hang.
    deadline = max(1.0, 10 * (SystemClock().monotonic() - begin))
    evaluate = send(tasks(round_index=2, kind=TaskKind.EVALUATE))
    reverse, some = send(tasks(SITES[::-1])), send(tasks(SITES[1:3]))
    none = send([])
    setup = send(secure_tasks(SecureStep.ADVERTISE, 0))
    masked = send(tasks(round_index=3, secure=b"\0contract\xff"))
    failing = send(tasks(round_index=toy_sites.FAILING_ROUND))
    send_and_leave()
    after_break = send(tasks(round_index=51))
    hold.touch()
    # Returns while the site hangs, or never.
    hanging = send(tasks(round_index=toy_sites.HANGING_ROUND), deadline)
    hold.unlink()
    after_hanging = until_free(send, tasks(round_index=toy_sites.HANGING_ROUND + 1))
    sent = [*grid.send(tasks(round_index=60), deadline_seconds=PATIENT_SECONDS)]
    sent += grid.send(tasks(round_index=61), deadline_seconds=PATIENT_SECONDS)
    overlapping = receive_all()
    hold.touch()
    hanging_ids = grid.send(
        tasks([SITES[1]], round_index=toy_sites.HANGING_ROUND),
        deadline_seconds=PATIENT_SECONDS,
    )
    too_early = [*grid.receive(timeout_seconds=0.1)]
    left_ids = grid.send(tasks(round_index=62), deadline_seconds=PATIENT_SECONDS)
    closed = [*hanging_ids, *left_ids[:2]]
    withdrawn_bytes, again_bytes = grid.withdraw(closed), grid.withdraw(closed)
    hold.unlink()
    withdrawn = receive_all()
    return Played(
        sent=sent,
        overlapping=overlapping,
        too_early=too_early,
        withdrawn=withdrawn,
        withdrawn_bytes={**withdrawn_bytes},
        again_bytes={**again_bytes},
        nothing=[*grid.receive()],
        train=train,
        again=again,
        evaluate=evaluate,
        reverse=reverse,
        some=some,
        none=none,
        setup=setup,
        masked=masked,
        failing=failing,
        after_break=after_break,
        hanging=hanging,
        after_hanging=after_hanging,
    )
