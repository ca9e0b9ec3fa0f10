"""A site's work on a task that has come from elsewhere, within its time.

What goes wrong in it becomes a failure that quotes no record, and a site that is about
to leave says so in place of an answer.
"""

import logging
import math
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from cloud_adapters.transport.frame_references import PackedFrame, inline
from federation.errors import ProtocolError, outside_of, system_errors
from federation.ids import RunId, SiteId
from federation.messages import (
    FailureKind,
    LeaveReason,
    RoundTask,
    SecureAnswer,
    SecureTask,
    SiteFailure,
    SiteMessage,
    Task,
)
from federation.protocols import Buffer
from federation.rounds.failures import failure, no_answer, still_working
from federation.vectors import Layout
from federation.wire import frame as wire

# Between looks whether the site is about to leave.
LOOK_SECONDS = 0.2

_LOG = logging.getLogger(__name__)

# What this process is busy with; a run that hangs does not hold another one up.
_working: dict[tuple[SiteId, RunId], tuple[threading.Thread, int]] = {}
_lock = threading.Lock()


class Agent(Protocol):
    """A long-lived site: ``deploy.site_host.agent``."""

    def introduce(self, sealed: bytes) -> bytes:
        """Answer a proposal."""
        ...

    def answer(self, task: Task) -> SiteMessage:
        """Answer a task."""
        ...

    def layout(self, run_id: RunId) -> Layout:
        """Layout of a run's model."""
        ...


Leaves = Callable[[], LeaveReason | None]


def stays() -> None:
    """Never leave."""


def answer_frame(
    agent: Agent,
    frame: Buffer,
    seconds: float,
    *,
    leaves: Leaves = stays,
    leaves_after: Leaves = stays,
) -> tuple[bytes, bool]:
    """Answer a task that has not come through Flower; see ``agent_app``.

    Args:
        agent: The site.
        frame: The task.
        seconds: How long the answer may take.
        leaves: Why the site is about to leave.
        leaves_after: Why it leaves after this task.

    Returns:
        The frame of the answer, and whether a second try would give the same: a
        failure may have passed by then.

    Raises:
        ProtocolError: It is no task.
    """
    task = wire.decode(frame)
    if not isinstance(task, RoundTask | SecureTask):
        raise ProtocolError(f"a {type(task).__name__} in place of a task")

    lasts: list[bool] = []

    def work() -> PackedFrame:
        answer = agent.answer(task)
        lasts.append(not isinstance(answer, SiteFailure))
        return inline(noticed(answer, leaves, leaves_after))

    packed = within(seconds, task, work, leaves)
    return packed.frame, any(lasts)


def noticed(answer: SiteMessage, leaves: Leaves, leaves_after: Leaves) -> SiteMessage:
    """Note in an answer that the site leaves, if it does by now."""
    if isinstance(answer, SiteFailure) and (why := leaves()) is not None:
        # It has failed because it leaves, and may be back before the round is over.
        return replace(answer, kind=FailureKind.LEAVING, message=why.value)
    reason = leaves() or leaves_after()
    if reason is None or isinstance(answer, SecureAnswer | SiteFailure):
        return answer
    return replace(answer, leaving=reason)


def end_work() -> None:
    """Wait for the work on tasks that have been answered by a leave notice."""
    for thread, _ in [*_working.values()]:
        thread.join()


def _crashed(
    task: Task, error: BaseException, reason: LeaveReason | None
) -> SiteFailure:
    """Report an error without quoting records, or that the site leaves."""
    if reason is not None:
        return failure(task, FailureKind.LEAVING, reason.value)
    text = outside_of(error)
    # What may quote a record stays in the site's own log, whose reader has to act.
    if any(system_errors(error)) or text == f"{type(error).__name__}: {error}":
        _LOG.warning("a task failed: %s", error)
    else:
        _LOG.warning("a task failed", exc_info=error)
    return failure(task, FailureKind.CRASHED, text)


def within(
    seconds: float,
    task: Task,
    work: Callable[[], PackedFrame],
    leaves: Leaves = stays,
) -> PackedFrame:
    """Answer within a time, in a thread, so that a hanging site frees its process."""
    answers: list[PackedFrame] = []

    def do() -> None:
        try:
            answers.append(work())
        except BaseException as error:  # noqa: BLE001 -- it would only end this thread
            answers.append(inline(_crashed(task, error, leaves())))

    with _lock:
        key = (task.site, task.run_id)
        earlier = _working.get(key)
        if earlier is not None and earlier[0].is_alive():
            text = still_working(earlier[1])
            return inline(failure(task, FailureKind.BUSY, text))
        for ended in [
            each for each, (one, _) in _working.items() if not one.is_alive()
        ]:
            del _working[ended]
        thread = threading.Thread(target=do, name="crossfed-site", daemon=True)
        _working[key] = (thread, task.round_index)
        thread.start()
    num_looks = math.ceil(seconds / LOOK_SECONDS)
    for _ in range(num_looks):
        thread.join(timeout=seconds / num_looks)
        if not thread.is_alive():
            return answers[0]
        if (reason := leaves()) is not None:
            return inline(failure(task, FailureKind.LEAVING, reason.value))
    text = no_answer(seconds)
    return inline(failure(task, FailureKind.DEADLINE, text))
