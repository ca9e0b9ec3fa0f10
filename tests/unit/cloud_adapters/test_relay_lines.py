"""Tasks and replies of sites behind relays, as a coordinator sees them."""

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from cloud_adapters.transport.relay_lines import RelayLines, fewest_nodes, nodes_of
from federation.errors import ProtocolError, WireError
from federation.ids import RunId, SiteId, TaskId
from federation.messages import (
    FailureKind,
    RelayedTasks,
    Reply,
    RoundTask,
    SiteFailure,
    SiteMessage,
    SiteUpdate,
    Task,
    TaskKind,
)
from federation.rounds.failures import failure
from federation.wire import frame as wire
from federation.wire.relayed import (
    answers_in,
    down_frames,
    down_frames_in,
    up_answers,
    with_models,
)

A, B, C, EAST = SiteId("a"), SiteId("b"), SiteId("c"), SiteId("east")
MODEL = np.arange(8, dtype=np.float32)
NO_INTEGERS = np.zeros(0, np.int64)


def task(site: SiteId, model: Any = MODEL, **changes: Any) -> RoundTask:
    made = RoundTask(
        run_id=RunId("run"),
        round_index=1,
        site=site,
        kind=TaskKind.TRAIN,
        layout_digest="00" * 32,
        weights_d=model,
        integers_m=NO_INTEGERS,
        evaluate=False,
        evaluate_after=False,
    )
    return replace(made, **changes)


def update(site: SiteId, values: Any = MODEL[:0]) -> SiteUpdate:
    return SiteUpdate(
        run_id=RunId("run"),
        round_index=1,
        site=site,
        layout_digest="00" * 32,
        delta_d=values,
        integers_m=NO_INTEGERS,
        num_examples=3,
        num_steps=1,
        training=None,
        evaluation=None,
        evaluation_after=None,
        phases=(),
    )


@dataclass
class Script:
    """Lines that answer with what a test says."""

    sent: list[Task | RelayedTasks] = field(default_factory=list)
    replies: deque[deque[Reply]] = field(default_factory=deque)
    withdrawn: list[TaskId] = field(default_factory=list)

    def send(
        self, tasks: Sequence[Task | RelayedTasks], *, deadline_seconds: float
    ) -> Sequence[TaskId]:
        assert deadline_seconds > 0
        self.sent += tasks
        return [TaskId(100 + index) for index in range(len(tasks))]

    def receive(self, timeout_seconds: float | None = None) -> deque[Reply]:
        assert timeout_seconds is None or timeout_seconds >= 0
        return self.replies.popleft() if self.replies else deque()

    def withdraw(self, task_ids: Collection[TaskId]) -> Mapping[TaskId, int]:
        self.withdrawn += task_ids
        return dict.fromkeys(task_ids, 7)

    def returned(
        self, sites: Collection[SiteId], round_index: int
    ) -> Collection[SiteId]:
        assert round_index >= 0
        return [site for site in sites if site == C]

    def say(self, number: int, *messages: SiteMessage) -> None:
        """Bring a reply to the task of this number."""
        reply = Reply(
            task_id=TaskId(100 + number),
            message=messages[0],
            asked_seconds=0.0,
            answered_seconds=1.0,
            bytes_down=21,
            bytes_up=11,
            following=messages[1:],
        )
        self.replies.append(deque([reply]))


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def lines(script: Script) -> RelayLines:
    """Sent are tasks for all sites: c's is number 0 of the lines, the relay's 1."""
    found = RelayLines(script, {EAST: [A, B]})
    assert [*found.send([task(A), task(B), task(C)], deadline_seconds=1)] == [0, 1, 2]
    return found


def test_relay_is_asked_last_and_at_one_go(script: Script, lines: RelayLines):
    alone, together = script.sent
    assert (alone.site, together.site) == (C, EAST)
    assert isinstance(together, RelayedTasks)
    assert [each.site for each in together.tasks] == [A, B]
    # Of sites behind a relay only the relay knows.
    assert [*lines.returned([A, C], 2)] == [C, A]


def test_sum_becomes_an_answer_of_each_site(script: Script, lines: RelayLines):
    total = update(EAST, MODEL)
    script.say(1, total, update(A), update(B))
    script.say(0, update(C, MODEL))
    first, second = lines.receive()
    assert (first.task_id, second.task_id) == (0, 1)
    assert first.through is second.through is not None
    assert first.through.sites == (A, B)
    assert first.through.update == total
    # The first bears the rest of what cannot be divided.
    assert (first.bytes_down, first.bytes_up) == (11, 6)
    assert (second.bytes_down, second.bytes_up) == (10, 5)
    assert second.inside_down == wire.encoded_size(task(B))
    assert second.inside_up == wire.encoded_size(update(B, MODEL))
    (alone,) = lines.receive()
    assert (alone.task_id, alone.through, alone.inside_up) == (2, None, 0)


def test_answer_that_is_no_part_of_the_sum_stands_alone(
    script: Script, lines: RelayLines
):
    crashed = failure(update(B), FailureKind.CRASHED, "no memory")
    script.say(1, update(EAST, MODEL), update(A), crashed)
    first, second = lines.receive()
    assert first.through is not None
    assert first.through.sites == (A,)
    assert (second.message, second.through) == (crashed, None)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (FailureKind.DISCONNECTED, FailureKind.UNREACHABLE),
        (FailureKind.DEADLINE, FailureKind.DEADLINE),
    ],
)
def test_lost_relay_is_the_absence_of_its_sites(
    script: Script, lines: RelayLines, kind: FailureKind, told: FailureKind
):
    """They still have their keys: of them nothing is known to have ended."""
    script.say(1, failure(update(EAST), kind, "is gone"))
    found = lines.receive()
    for site, reply in zip((A, B), found, strict=True):
        assert isinstance(reply.message, SiteFailure)
        assert (reply.message.site, reply.message.kind) == (site, told)
        assert reply.message.message == "relay 'east' is gone"
        assert (reply.inside_down, reply.inside_up) == (0, 0)


@pytest.mark.parametrize(
    "messages",
    [
        [update(EAST, MODEL), update(A)],
        [update(A), update(B), update(C)],
        [update(EAST, MODEL), update(B), update(A)],
        [failure(update(A), FailureKind.CRASHED, "x"), update(A)],
    ],
)
def test_answers_of_others_are_invalid(
    script: Script, lines: RelayLines, messages: Sequence[SiteMessage]
):
    """Too few, too many, in another order, or one twice."""
    script.say(1, *messages)
    kinds = {getattr(each.message, "kind", None) for each in lines.receive()}
    assert kinds == {FailureKind.INVALID}


def test_sum_must_be_an_update():
    with pytest.raises(ProtocolError, match="a SiteFailure as its sum"):
        up_answers(
            [failure(update(EAST), FailureKind.CRASHED, "x"), update(A)],
            relay=EAST,
            sites=[A],
        )


def test_relay_is_awaited_until_its_last_task_is_closed(
    script: Script, lines: RelayLines
):
    assert lines.withdraw([TaskId(0)]) == {}
    assert script.withdrawn == []
    script.say(1, update(EAST, MODEL), update(A), update(B))
    assert [reply.task_id for reply in lines.receive()] == [1]


@pytest.mark.parametrize("total", [[update(EAST, MODEL)], []], ids=["sum", "none"])
def test_late_answer_of_a_relay_is_dropped(
    script: Script, lines: RelayLines, total: Sequence[SiteMessage]
):
    """It came when its round had gone on; the lines say nothing of it again."""
    closed = lines.withdraw([TaskId(0), TaskId(1), TaskId(2)])
    assert {*script.withdrawn} == {100, 101}
    assert sum(closed.values()) == 14, "those of a relay's tasks are with one of them"
    script.say(1, *total, update(A), update(B))
    assert not lines.receive()


def test_site_that_was_not_in_the_handshake_is_not_asked(script: Script):
    """Its relay may reach it by now, also if the aggregator has revoked it."""
    lines = RelayLines(script, {EAST: [A, B]}, absent=[A, C], now=lambda: 7.0)
    lines.send([task(A), task(B), task(C)], deadline_seconds=1)
    alone, together = script.sent
    assert isinstance(together, RelayedTasks)
    assert [each.site for each in together.tasks] == [B]
    assert alone.site == C  # The lines know that it has no node.
    (reply,) = lines.receive()
    assert (reply.task_id, reply.asked_seconds, reply.bytes_down) == (0, 7.0, 0)
    assert isinstance(reply.message, SiteFailure)
    assert (reply.message.site, reply.message.kind) == (A, FailureKind.UNREACHABLE)
    script.say(1, update(EAST, MODEL), update(B))
    assert [each.task_id for each in lines.receive()] == [1]
    assert [*lines.returned([A, B], 2)] == [B]
    (again,) = lines.send([task(A)], deadline_seconds=1)
    lines.withdraw([again])
    assert not lines.receive()


def test_model_travels_once():
    """And again only where a site's is another one."""
    other = MODEL + 1
    tasks = [task(A), task(B), task(C, other, changed_to="11" * 32)]
    frames = down_frames(tasks)
    assert [each.weights_d.size for each in frames if isinstance(each, RoundTask)] == [
        8,
        0,
        8,
    ]
    data = b"".join(map(wire.encode_bytes, frames))
    found = with_models(down_frames_in(data, limit=3))
    for one, wanted in zip(found, tasks, strict=True):
        assert isinstance(one, RoundTask)
        assert one.site == wanted.site
        assert one.weights_d.tobytes() == wanted.weights_d.tobytes()


def test_frames_of_strangers_are_refused():
    data = wire.encode_bytes(task(A))
    with pytest.raises(WireError, match="more than 1 messages"):
        down_frames_in(data * 2, limit=1)
    with pytest.raises(WireError, match="declares"):
        down_frames_in(data + data[:-1], limit=2)
    with pytest.raises(WireError, match="too few"):
        down_frames_in(data[:10], limit=2)
    with pytest.raises(ProtocolError, match=r"RoundTask in place .*an answer"):
        answers_in(data, limit=1)
    with pytest.raises(ProtocolError, match=r"SiteUpdate in place .*a task"):
        down_frames_in(wire.encode_bytes(update(A)), limit=1)
    for read in (down_frames_in, answers_in):
        with pytest.raises(ProtocolError, match="without a"):
            read(b"", limit=1)


def test_few_nodes_can_be_many_sites():
    """Of five sites two may be missing: the one without a relay, or a whole cloud."""
    relays = {EAST: [A, B]}
    sites = [A, B, C, SiteId("d"), SiteId("e")]
    assert nodes_of(sites, relays) == {C: 1, "d": 1, "e": 1, EAST: 2}
    assert [fewest_nodes(sites, relays, n) for n in (5, 4, 3, 2)] == [4, 3, 2, 1]
