"""The grid over Flower, and the site's app, against a Flower made of two dicts."""

import importlib.util
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from support import toy_sites

from cloud_adapters.flower import simulation as flower_simulation
from cloud_adapters.flower.facts import Connected
from cloud_adapters.storage.retry import Retry
from deploy.aggregator_host import run_queue
from federation.clock import VirtualClock
from federation.errors import FederationError, ProtocolError, SiteError
from federation.ids import RunId, SiteId
from federation.messages import (
    FailureKind,
    LeaveReason,
    Reply,
    RoundTask,
    SecureAnswer,
    SecureStep,
    SecureTask,
    SiteFailure,
    SiteUpdate,
    TaskKind,
)
from federation.rounds.failures import failure
from federation.rounds.gather import exchange as exchange_over
from federation.wire import frame as wire

if importlib.util.find_spec("flwr") is None:
    pytest.skip("the flower extra is not installed", allow_module_level=True)
flower_simulation.import_flower()

from flwr.app import ConfigRecord, Error, Message, RecordDict  # noqa: E402
from flwr.supercore.inflatable.inflatable_object import (  # noqa: E402
    get_all_nested_objects,
)
from flwr.supercore.task_identity import TaskIdentity  # noqa: E402

from cloud_adapters.flower import (  # noqa: E402
    grid as flower_grid,
    presence as flower_presence,
    questions as flower_questions,
    site as flower_site,
)
from cloud_adapters.flower.grid import (  # noqa: E402
    Delivery,
    FlowerGrid,
)
from cloud_adapters.flower.handshake import Attendance  # noqa: E402
from cloud_adapters.flower.private.messages import NodeInfo  # noqa: E402
from cloud_adapters.transport.frame_references import PackedFrame  # noqa: E402
from cloud_adapters.transport.redelivery import Inbox, is_given_up  # noqa: E402

pytestmark = pytest.mark.flower

SITES = [SiteId("one"), SiteId("two"), SiteId("three")]
TASK = RoundTask(
    run_id="run-1",
    round_index=1,
    site=SITES[0],
    kind=TaskKind.TRAIN,
    layout_digest="ab" * 32,
    weights_d=np.ones(4, dtype=np.float32),
    integers_m=np.zeros(1, dtype=np.int64),
    evaluate=False,
    evaluate_after=False,
)


SECURE_TASK = SecureTask(
    run_id="run-1",
    round_index=0,
    site=SITES[0],
    step=SecureStep.ADVERTISE,
    body=b"contract",
)
JOB_NUMBERS = itertools.count()


class FakeFlower:
    """Nodes that answer when they are told to."""

    def __init__(self, handler_for: Any = toy_sites.echo_site) -> None:
        self.nodes = [30, 10, 20]
        self.silent: set[int] = set()  # nodes that do not answer for now
        self.spoilt: dict[int, Any] = {}  # node: what comes in place of its answer
        self.stray: list[Message] = []  # replies that nobody waits for
        self.full = False
        self.sent: list[Message] = []
        self.pushes: list[int] = []  # how many messages each call had
        self._open: dict[str, Message] = {}
        self._app = flower_site.client_app(handler_for)
        self._inboxes: dict[int, Inbox[RecordDict]] = defaultdict(Inbox)

    def get_node_ids(self) -> list[int]:
        return self.nodes

    def push_messages(self, messages: list[Message]) -> Iterator[str]:
        self.pushes.append(len(messages))
        for message in messages:
            if self.full:
                yield ""
            else:
                name = f"m{len(self.sent)}"
                message.metadata.__dict__["_message_id"] = name
                self.sent.append(message)
                self._open[name] = message
                yield name

    def pull_messages(self, ids: list[str]) -> list[Message]:
        asked = [self._open[i] for i in ids if i in self._open]
        replies = [self._reply(m) for m in asked if node_of(m) not in self.silent]
        return [*replies, *self.stray]

    def _reply(self, message: Message) -> Message:
        del self._open[message.metadata.message_id]
        inbox = self._inboxes[node_of(message)]
        known = flower_site.reply_at_once(message, inbox)
        if known is not None:
            return known
        spoilt = self.spoilt.get(node_of(message))
        if spoilt is not None and message.metadata.message_type != "query":
            return Message(spoilt, reply_to=message)
        reply = self._app(message, None)
        if reply.has_content():
            inbox.keep(message.metadata.group_id, reply.content)
        return reply


def node_of(message: Message) -> int:
    """Which node a message is for."""
    return message.metadata.dst_node_id


@pytest.fixture
def flower() -> FakeFlower:
    """A Flower run of three nodes."""
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    return FakeFlower()


@pytest.fixture
def clock() -> VirtualClock:
    """A clock that nobody waits for."""
    return VirtualClock()


def make_grid(
    flower: FakeFlower,
    clock: VirtualClock,
    *,
    ordered: bool = False,
    workers: int | None = None,
    asks_again: bool = False,
    stopped: Callable[[], bool] = lambda: False,
    **attendance: Any,
) -> FlowerGrid:
    """Make a grid of three sites."""
    return FlowerGrid(
        flower,
        SITES,
        clock=clock,
        attendance=Attendance(**attendance),
        delivery=Delivery(
            job_text="job", ordered=ordered, workers=workers, asks_again=asks_again
        ),
        stopped=stopped,
    )


def exchange(grid: FlowerGrid, seconds: float = 5.0, **fields: Any) -> list[Reply]:
    """Send every site a task."""
    tasks = [replace(TASK, site=site, **fields) for site in SITES]
    return list(exchange_over(grid, tasks, deadline_seconds=seconds))


def kinds(replies: list[Reply]) -> dict[str, str]:
    """Who failed how."""
    return {
        r.message.site: str(getattr(r.message, "kind", "answered")) for r in replies
    }


def test_sites_get_nodes_in_ascending_order(flower: FakeFlower, clock: VirtualClock):
    """Whatever order Flower lists them in."""
    exchange(make_grid(flower, clock))
    assert [node_of(message) for message in flower.sent[-3:]] == [10, 20, 30]


def test_message_says_what_flower_needs(flower: FakeFlower, clock: VirtualClock):
    """Its kind, its round, when it may be forgotten, and the job beside it."""
    exchange(make_grid(flower, clock), round_index=7, kind=TaskKind.EVALUATE)
    metadata = flower.sent[-1].metadata
    assert metadata.message_type == "evaluate"
    assert metadata.group_id.startswith("7-")
    assert metadata.ttl == 2 * (5.0 + 60.0)
    about = flower.sent[-1].content.config_records["about"]
    expected = {"site": "three", "job": "job", "deadline_seconds": 5.0}
    assert {name: about[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("extra", "num_objects"), [(0, 2), (1, 5)], ids=["config record", "array"]
)
def test_small_content_is_few_objects(extra: int, num_objects: int):
    """Flower makes two requests for each."""
    frame = bytes(flower_site.SMALL_BYTES + extra)
    content = flower_site.pack(frame, site=SITES[0], job_text="", deadline_seconds=1.0)
    assert flower_site.unpack(content) == frame
    assert len(get_all_nested_objects(content)) == num_objects
    bare = flower_site.pack_bytes(frame)
    assert flower_site.unpack_bytes(bare) == frame
    with pytest.raises(ProtocolError, match=r"crossfed\.bytes"):
        flower_site.unpack_bytes(content)


def test_secure_step_is_a_message_of_training(flower: FakeFlower, clock: VirtualClock):
    """Flower knows no kind of its own for it."""
    (reply,) = exchange_over(
        make_grid(flower, clock, ordered=True), [SECURE_TASK], deadline_seconds=5.0
    )
    metadata = flower.sent[-1].metadata
    assert metadata.message_type == "train"
    assert isinstance(reply.message, SecureAnswer)
    assert reply.message.body == b"tcartnoc"
    assert reply.bytes_down == wire.encoded_size(SECURE_TASK)
    assert reply.bytes_up == wire.encoded_size(reply.message)


def test_late_nodes_are_waited_for(flower: FakeFlower, clock: VirtualClock):
    """Until there are as many as sites."""
    flower.nodes = [1]
    real_sleep = clock.sleep

    def sleep(seconds: float) -> None:
        real_sleep(seconds)
        flower.nodes = [1, 2, 3]

    clock.sleep = sleep
    make_grid(flower, clock)


def test_too_few_nodes_are_an_error(flower: FakeFlower, clock: VirtualClock):
    """The message tells how many are there."""
    flower.nodes = [1]
    with pytest.raises(SiteError, match="only 1 of 3 Flower nodes"):
        make_grid(flower, clock, connect_seconds=2.0)
    assert clock.now() == pytest.approx(2.0, abs=0.1)


def test_silent_node_is_an_error(flower: FakeFlower, clock: VirtualClock):
    """A node that is connected and does not answer is found before the first round."""
    flower.silent = {20}
    with pytest.raises(SiteError, match=r"1 Flower nodes .*not answer"):
        make_grid(flower, clock, connect_seconds=2.0)


def test_node_that_cannot_run_a_site_is_an_error(
    flower: FakeFlower, clock: VirtualClock
):
    """Its reason is in the message, without the traceback."""
    reason = "Traceback ...\nException occurred. Message: No module named 'deploy'"
    flower._app = lambda message, _: Message(Error(1, reason), reply_to=message)
    with pytest.raises(SiteError, match="cannot run a site: No module named 'deploy'"):
        make_grid(flower, clock)


def test_ended_flower_is_an_error(flower: FakeFlower, clock: VirtualClock):
    """Nobody waits for answers that cannot come."""
    grid = make_grid(flower, clock, stopped=lambda: True)
    flower.silent = {20}
    assert not grid.receive(0)
    with pytest.raises(FederationError, match="Flower has stopped"):
        grid.receive(9.0)  # Busy sites are to be asked again after that.
    with pytest.raises(FederationError, match="Flower has stopped"):
        exchange(grid)


def test_unordered_replies_come_as_they_land(flower: FakeFlower, clock: VirtualClock):
    """A slow site does not hold up the others."""
    grid = make_grid(flower, clock)
    flower.silent = {10}
    replies = exchange(grid)
    assert [r.message.site for r in replies] == ["two", "three", "one"]
    assert kinds(replies)["one"] == FailureKind.DEADLINE
    assert replies[-1].answered_seconds == pytest.approx(5.0, abs=0.2)


def test_ordered_replies_come_in_the_order_of_the_tasks(
    flower: FakeFlower, clock: VirtualClock
):
    """A slow site holds up those behind it."""
    grid = make_grid(flower, clock, ordered=True)
    flower.silent = {10}
    replies = exchange(grid)
    assert [r.message.site for r in replies] == SITES


def test_order_is_given_up_for_memory(
    flower: FakeFlower, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
):
    """All answers are out at once, and large ones are not held back."""
    monkeypatch.setattr(flower_questions, "MAX_AHEAD_BYTES", 2 * TASK.weights_d.nbytes)
    grid = make_grid(flower, clock, ordered=True)
    flower.silent = {10}
    assert [r.message.site for r in exchange(grid)] == ["two", "three", "one"]


def test_shared_processes_limit_what_is_out(flower: FakeFlower, clock: VirtualClock):
    """One task in work and one behind it; the rest waits here."""
    grid = make_grid(flower, clock, workers=1)
    flower.silent = {10, 20, 30}
    before = len(flower.sent)
    replies = exchange(grid, seconds=1.0)
    assert list(kinds(replies).values()) == [FailureKind.DEADLINE] * 3
    assert clock.now() == pytest.approx(2 * 2 * (1.0 + 2.0), abs=0.2)
    assert len(flower.sent) - before == 3


def test_few_answers_are_held_back(
    flower: FakeFlower, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
):
    """Where one holds up many, memory bounds how many tasks go out behind it."""
    monkeypatch.setattr(flower_questions, "MAX_AHEAD_BYTES", 0)
    grid = make_grid(flower, clock, ordered=True, workers=1)
    flower.silent = {10}
    before = len(flower.sent)
    tasks = [replace(TASK, site=site) for site in SITES]
    replies = exchange_over(grid, tasks, deadline_seconds=1.0)
    assert next(replies).message.kind is FailureKind.DEADLINE
    assert len(flower.sent) - before == 2
    assert [reply.message.site for reply in replies] == SITES[1:]


def test_stray_reply_is_ignored(flower: FakeFlower, clock: VirtualClock):
    """A second answer to a greeting is nobody's."""
    grid = make_grid(flower, clock)
    flower.stray = [Message(RecordDict(), reply_to=flower.sent[0])]
    assert len(exchange(grid)) == 3


def test_late_answer_is_handed_on_in_a_later_exchange(
    flower: FakeFlower, clock: VirtualClock
):
    """The round it belongs to is written in it."""
    grid = make_grid(flower, clock)
    flower.silent = {10}
    exchange(grid)
    flower.silent = set()
    replies = exchange(grid, round_index=2)
    assert sorted(r.message.round_index for r in replies) == [1, 2, 2, 2]


def test_late_failure_is_dropped(flower: FakeFlower, clock: VirtualClock):
    """It has been counted when the deadline passed."""
    grid = make_grid(flower, clock)
    flower.silent, flower.spoilt = {10}, {10: Error(5, "gone")}
    exchange(grid)
    flower.silent, flower.spoilt = set(), {}
    assert len(exchange(grid, round_index=2)) == 4  # This one was an update.
    flower.silent, flower.spoilt = {10}, {10: Error(5, "gone")}
    exchange(grid, round_index=3)
    flower.silent = set()
    assert len(exchange(grid, round_index=4)) == 3


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (0, FailureKind.UNREACHABLE),
        (2, FailureKind.CRASHED),
        (5, FailureKind.DISCONNECTED),
        (8, FailureKind.CRASHED),
    ],
)
def test_error_reply_is_a_failure(
    flower: FakeFlower, clock: VirtualClock, code: int, kind: FailureKind
):
    """Flower's codes tell a lost node from a crashed app."""
    grid = make_grid(flower, clock)
    flower.spoilt = {10: Error(code, "first line\nsecond")}
    reply = exchange(grid)[0]
    assert (reply.message.kind, reply.bytes_up) == (kind, 0)
    assert reply.message.message == f"Flower error {code}: first line second"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (RecordDict(), "without a frame"),
        (RecordDict({"frame": ConfigRecord({"bytes": b""})}), "without a frame"),
        (flower_site.pack_frame(PackedFrame(frame=b"")), "too few"),
        (flower_site.pack_frame(PackedFrame(frame=b"x" * 90)), "do not start like"),
        (
            flower_site.pack_frame(PackedFrame(frame=wire.encode_bytes(TASK))),
            "answered for 'one'",
        ),
        (
            flower_site.pack_frame(PackedFrame(frame=wire.encode_bytes(SECURE_TASK))),
            "answered for 'one'",
        ),
    ],
)
def test_unreadable_answer_is_invalid(
    flower: FakeFlower, clock: VirtualClock, content: RecordDict, text: str
):
    """A node can send anything; it counts as this site's failure."""
    grid = make_grid(flower, clock)
    flower.spoilt = {10: content}
    message = exchange(grid)[0].message
    assert isinstance(message, SiteFailure)
    assert message.kind is FailureKind.INVALID
    assert text in message.message


def test_node_may_speak_for_its_own_site_only(flower: FakeFlower, clock: VirtualClock):
    """The site in the answer is that of the question."""
    grid = make_grid(flower, clock)
    stolen = toy_sites.echo_site(SITES[1], "job").handle(TASK)
    flower.spoilt = {
        10: flower_site.pack_frame(PackedFrame(frame=wire.encode_bytes(stolen)))
    }
    reply = exchange(grid)[0]
    assert (reply.message.site, reply.message.kind) == ("one", FailureKind.INVALID)
    assert reply.bytes_up == wire.encoded_size(stolen)


def test_refused_message_is_a_failure(flower: FakeFlower, clock: VirtualClock):
    """Flower may not take a message for a node that has gone."""
    grid = make_grid(flower, clock)
    flower.full = True
    assert set(kinds(exchange(grid)).values()) == {FailureKind.UNREACHABLE}


@pytest.mark.parametrize("workers", [None, 3])
@pytest.mark.parametrize("ordered", [True, False])
def test_tasks_of_two_rounds_may_be_open(
    flower: FakeFlower, clock: VirtualClock, *, ordered: bool, workers: int | None
):
    """A site that is silent in one of them holds up no answer to the other."""
    grid = make_grid(flower, clock, ordered=ordered, workers=workers)
    flower.silent = {10}
    first = grid.send([replace(TASK, site=site) for site in SITES], deadline_seconds=9)
    second = grid.send(
        [replace(TASK, site=site, round_index=2) for site in SITES[1:]],
        deadline_seconds=600,
    )
    found = [*grid.receive(timeout_seconds=1.0)]
    answered = {reply.task_id for reply in found}
    assert answered == {*second} | (set() if ordered else {*first[1:]})
    while replies := grid.receive():
        found += replies
    assert sorted(reply.task_id for reply in found) == sorted([*first, *second])
    assert kinds(found[-3:] if ordered else found)["one"] == FailureKind.DEADLINE


def test_withdrawn_task_is_not_waited_for(flower: FakeFlower, clock: VirtualClock):
    """Its answer is late when it comes, and what has not gone out never does."""
    grid = make_grid(flower, clock, ordered=True, workers=1)
    flower.silent = {10, 20}
    ids = grid.send([replace(TASK, site=site) for site in SITES], deadline_seconds=600)
    num_sent = len(flower.sent)
    closed = grid.withdraw(ids[:2])
    assert [*closed] == [*ids[:2]]
    assert min(closed.values()) > 0
    flower.silent = set()
    found: list[Reply] = []
    while replies := grid.receive():
        found += replies
    assert {reply.task_id for reply in found} == {*ids}  # Two of them are late.
    assert {r.bytes_down for r in found if r.task_id in closed} == {0}
    assert len(flower.sent) == num_sent + 1
    flower.silent = {10}
    grid.withdraw(grid.send([TASK], deadline_seconds=600))
    assert not grid.receive()


@pytest.mark.parametrize("is_withdrawn", [True, False])
def test_next_task_tells_which_ones_were_given_up(
    flower: FakeFlower, clock: VirtualClock, *, is_withdrawn: bool
):
    """Without a message for it; a task that is still open is never given up."""
    grid = make_grid(flower, clock)
    flower.silent = {10}
    ids = grid.send([replace(TASK, site=site) for site in SITES], deadline_seconds=600)
    if is_withdrawn:
        grid.withdraw(ids)
    later = TASK.round_index + 1
    grid.send([replace(TASK, round_index=later)], deadline_seconds=600)
    mine = [m for m in flower.sent if m.metadata.dst_node_id == 10][-2:]
    first, second = (message.metadata.group_id for message in mine)
    assert second.startswith(f"{later}-")
    assert is_given_up(first, second) is is_withdrawn


def test_unknown_site_is_a_mistake(flower: FakeFlower, clock: VirtualClock):
    """The caller asked for a site that the job does not have."""
    with pytest.raises(ValueError, match="no sites \\['zoe'\\]"):
        make_grid(flower, clock).send(
            [replace(TASK, site=SiteId("zoe"))], deadline_seconds=1.0
        )


class Beating(FakeFlower):
    """Nodes that send heartbeats, until the test has them stop.

    Attributes:
        last: Time of the last heartbeat of a node that has stopped.
        left: Nodes that took leave.
        names: What each node says that it is.
    """

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self.last: dict[int, float] = {}
        self.left: set[int] = set()
        self.let_in: dict[int, str] = {}
        self.names = {10: "two", 20: "one", 30: "three"}
        self._clock = clock
        self._work = self._app
        self._app = self._answer

    def get_nodes(self) -> list[NodeInfo]:
        """As Flower: a node is listed for two intervals after its last heartbeat."""
        now = self._clock.now()
        beats = {node: self.last.get(node, now) for node in self.nodes}
        return [
            NodeInfo(
                node_id=node,
                heartbeat_interval=10.0,
                online_until=beat + 20.0,
                last_activated_at=self.let_in.get(node, "first"),
            )
            for node, beat in beats.items()
            if now < beat + 20.0 and node not in self.left
        ]

    def _answer(self, message: Message, context: Any) -> Message:
        if message.metadata.message_type != "query":
            return self._work(message, context)
        name = self.names[node_of(message)]
        return Message(flower_site.pack_bytes(name.encode()), reply_to=message)


class NamesRead:
    """A handshake that believes every name."""

    question = b"who?"
    absent: Mapping[SiteId, str] = MappingProxyType({})

    def site_of(self, answer: bytes) -> SiteId:
        return SiteId(answer.decode())

    def move_on(self) -> bool:
        return False


@pytest.fixture
def beating(flower: FakeFlower, clock: VirtualClock) -> Beating:
    """A Flower run of three nodes with heartbeats."""
    clock.sleep(1000.0)  # Long after the epoch, so that a heartbeat can be old.
    return Beating(clock)


def test_tasks_go_to_the_nodes_that_the_handshake_names(
    beating: Beating, clock: VirtualClock
):
    """Whatever their numbers."""
    replies = exchange(make_grid(beating, clock, handshake=NamesRead()))
    assert [node_of(message) for message in beating.sent[-3:]] == [20, 10, 30]
    assert set(kinds(replies).values()) == {"answered"}


def test_site_that_was_never_there_fails_each_round(
    beating: Beating, clock: VirtualClock
):
    """Without a wait, and without a message to anybody."""
    beating.nodes = [10, 20]
    grid = make_grid(
        beating, clock, handshake=NamesRead(), required=2, connect_seconds=30.0
    )
    before, sent = clock.now(), len(beating.sent)
    found = kinds(exchange(grid))
    assert found == {
        "one": "answered",
        "two": "answered",
        "three": FailureKind.UNREACHABLE,
    }
    assert clock.now() - before < 1.0
    assert len(beating.sent) - sent == 2


def stop_beating(beating: Beating, clock: VirtualClock, node: int) -> None:
    """Have a node say nothing more, from now on."""
    beating.silent.add(node)
    beating.last[node] = clock.now()


def test_node_whose_heart_stops_is_not_waited_for(
    beating: Beating, clock: VirtualClock
):
    """Not for the round's deadline: a site that was killed is known in seconds."""
    grid = make_grid(beating, clock, handshake=NamesRead())
    stop_beating(beating, clock, 20)
    before = clock.now()
    replies = exchange(grid, seconds=600.0)
    assert kinds(replies)["one"] == FailureKind.DISCONNECTED
    assert "its heartbeats have stopped" in replies[-1].message.message
    assert 12.0 <= clock.now() - before < 15.0


def test_node_that_beats_has_until_its_deadline(beating: Beating, clock: VirtualClock):
    """It may be at work for an hour."""
    grid = make_grid(beating, clock, handshake=NamesRead())
    beating.silent = {20}
    before = clock.now()
    assert kinds(exchange(grid, seconds=600.0))["one"] == FailureKind.DEADLINE
    assert 600.0 <= clock.now() - before < 602.0


def test_node_that_was_given_up_may_still_answer(beating: Beating, clock: VirtualClock):
    """Its heartbeats were lost and it was not: the answer is late."""
    grid = make_grid(beating, clock, handshake=NamesRead())
    stop_beating(beating, clock, 20)
    exchange(grid, seconds=600.0)
    beating.silent, beating.last = set(), {}
    replies = exchange(grid, round_index=2)
    assert sorted(r.message.round_index for r in replies) == [1, 2, 2, 2]


@pytest.mark.parametrize(
    ("index", "what"), [(7, "round 7"), (0, "the setup of secure aggregation")]
)
def test_round_waits_for_a_node_that_restarts(
    beating: Beating, clock: VirtualClock, index: int, what: str
):
    """Or a site that is killed would lose every round; who watches hears of it."""
    told = list[Connected]()
    grid = make_grid(beating, clock, handshake=NamesRead(), quorum=3, tell=told.append)
    del told[:]
    stop_beating(beating, clock, 20)
    clock.sleep(30.0)
    before, real_sleep = clock.now(), clock.sleep

    def sleep(seconds: float) -> None:
        real_sleep(seconds)
        if clock.now() - before > 25.0:
            beating.silent, beating.last = set(), {}

    clock.sleep = sleep
    found = kinds(exchange(grid, seconds=600.0, round_index=index))
    assert set(found.values()) == {"answered"}
    assert 25.0 < clock.now() - before < 30.0
    first, last = told
    assert (first.missing, first.absent, first.seconds) == (("one",), ("one",), 600.0)
    assert first.lack("one") == f"one (not connected: {what} waits)"
    assert {*first.there} == {"two", "three"}
    assert (last.missing, {*last.there}) == ((), {"one", "two", "three"})


def test_revoked_site_is_named_and_not_awaited(beating: Beating, clock: VirtualClock):
    """Although a quorum needs it: it does not come back."""
    gone = set[SiteId]()
    grid = make_grid(
        beating,
        clock,
        handshake=NamesRead(),
        quorum=3,
        revoked=lambda: frozenset(gone),
    )
    stop_beating(beating, clock, 20)
    clock.sleep(30.0)
    gone.add(SiteId("one"))
    before = clock.now()
    replies = exchange(grid, seconds=600.0)
    (silent,) = [r.message for r in replies if r.message.site == "one"]
    assert silent.message == "the site was revoked"
    assert clock.now() - before < 15.0


def test_site_that_is_revoked_during_its_task_is_named(
    flower: FakeFlower, clock: VirtualClock
):
    """Not Flower's word for a node that is gone."""
    grid = make_grid(flower, clock, revoked=lambda: frozenset({SITES[0]}))
    flower.spoilt = dict.fromkeys((10, 20, 30), Error(5, "gone"))
    found = {r.message.site: r.message.message for r in exchange(grid)}
    gone = "Flower error 5: gone"
    assert found == {**dict.fromkeys(SITES, gone), SITES[0]: "the site was revoked"}


def test_node_that_leaves_between_two_looks_costs_one_round(
    beating: Beating, clock: VirtualClock
):
    """An agent that is restarted says so, and the next round waits for it."""
    grid = make_grid(beating, clock, handshake=NamesRead())
    exchange(grid)
    beating.spoilt, beating.last = {20: Error(5, "gone")}, {20: clock.now() - 20.0}
    assert kinds(exchange(grid, round_index=2))["one"] == FailureKind.DISCONNECTED
    before, real_sleep = clock.now(), clock.sleep

    def sleep(seconds: float) -> None:
        real_sleep(seconds)
        if clock.now() - before > 8.0:
            beating.spoilt, beating.last = {}, {}

    clock.sleep = sleep
    found = kinds(exchange(grid, round_index=3))
    assert set(found.values()) == {"answered"}


def test_node_that_does_not_come_back_delays_one_round_only(
    beating: Beating, clock: VirtualClock
):
    """From then on the others continue without it; when it is back, with it."""
    grid = make_grid(beating, clock, handshake=NamesRead())
    stop_beating(beating, clock, 20)
    clock.sleep(30.0)
    taken = []
    for round_index in (1, 2):
        before = clock.now()
        found = kinds(exchange(grid, seconds=600.0, round_index=round_index))
        assert found["one"] == FailureKind.DISCONNECTED
        taken.append(clock.now() - before)
    assert taken[0] >= flower_presence.RETURN_SECONDS
    assert taken[1] < 5.0
    beating.silent, beating.last = set(), {}
    assert kinds(exchange(grid, round_index=3))["one"] == "answered"


@pytest.mark.parametrize(
    ("grace", "silent", "seconds"),
    [
        (1 / 12, [20], (2.0, 5.0)),
        (1 / 12, [10, 20], (600.0, 610.0)),
        ("learnt", [20], (14.0, 18.0)),
    ],
)
def test_grace_bounds_the_wait_for_a_frozen_site_if_a_quorum_is_there(
    beating: Beating,
    clock: VirtualClock,
    grace: float | str,
    silent: list[int],
    seconds: tuple[float, float],
):
    """It is a part of the last round, here of 30 s; and the site is asked again."""
    grid = make_grid(beating, clock, handshake=NamesRead(), quorum=2, grace=grace)
    exchange(grid)
    for node in silent:
        stop_beating(beating, clock, node)
    clock.sleep(30.0)
    before = clock.now()
    found = kinds(exchange(grid, seconds=600.0, round_index=2))
    assert found["one"] == FailureKind.DISCONNECTED
    low, high = seconds
    assert low <= clock.now() - before < high
    beating.silent, beating.last = set(), {}
    assert kinds(exchange(grid, round_index=3))["one"] == "answered"


@pytest.mark.parametrize(
    ("silent", "seconds"), [([20], (0.0, 5.0)), ([20, 10], (90.0, 95.0))]
)
def test_no_round_waits_for_a_site_whose_replica_is_there(
    beating: Beating,
    clock: VirtualClock,
    silent: list[int],
    seconds: tuple[float, float],
):
    """Their answer is the same; if both are gone, their data is missing."""
    replicas = [(SITES[1], SITES[0])]
    grid = make_grid(beating, clock, handshake=NamesRead(), replicas=replicas)
    for node in silent:
        stop_beating(beating, clock, node)
    clock.sleep(30.0)
    before = clock.now()
    assert kinds(exchange(grid, seconds=600.0))["one"] == FailureKind.DISCONNECTED
    low, high = seconds
    assert low <= clock.now() - before < high


def test_a_run_whose_sites_wait_for_nobody_awaits_no_lost_node(
    beating: Beating, clock: VirtualClock
):
    """Meanwhile answers of the others would lie there, and they would be idle."""
    grid = make_grid(beating, clock, handshake=NamesRead(), quorum=0)
    stop_beating(beating, clock, 20)
    clock.sleep(30.0)
    before = clock.now()
    assert kinds(exchange(grid, seconds=600.0))["one"] == FailureKind.DISCONNECTED
    assert clock.now() - before < 5.0


def test_a_question_to_some_nodes_forgets_no_lost_one(
    beating: Beating, clock: VirtualClock
):
    """Or it would be awaited again in the next round: a busy site was asked alone."""
    grid = make_grid(beating, clock, handshake=NamesRead())
    stop_beating(beating, clock, 20)
    clock.sleep(30.0)
    exchange(grid, seconds=600.0)
    some = [replace(TASK, site=SITES[1])]
    list(exchange_over(grid, some, deadline_seconds=600.0))
    before = clock.now()
    found = kinds(exchange(grid, seconds=600.0, round_index=2))
    assert found["one"] == FailureKind.DISCONNECTED
    assert clock.now() - before < 5.0


def test_node_that_took_leave_is_awaited_for_a_restart_only(
    beating: Beating, clock: VirtualClock
):
    """A machine that was taken back does not return, and an agent that restarts does.

    After that it may die without a word: then it has the time of one that died.
    """
    grid = make_grid(beating, clock, handshake=NamesRead())
    exchange(grid)
    beating.left = beating.silent = {20}
    clock.sleep(2.0)
    before = clock.now()
    assert kinds(exchange(grid, seconds=600.0))["one"] == FailureKind.LEAVING
    taken = clock.now() - before
    assert flower_presence.RESTART_SECONDS <= taken < 45.0
    beating.left = beating.silent = set()
    clock.sleep(2.0)
    assert kinds(exchange(grid, round_index=2))["one"] == "answered"
    stop_beating(beating, clock, 20)
    clock.sleep(30.0)
    before = clock.now()
    found = kinds(exchange(grid, seconds=600.0, round_index=3))
    assert found["one"] == FailureKind.DISCONNECTED
    assert clock.now() - before >= flower_presence.RETURN_SECONDS


def leaving(message: Any) -> RecordDict:
    """A site's word that it leaves the task that it works on."""
    task = replace(TASK, site=message)
    return flower_site.pack_answer(
        failure(task, FailureKind.LEAVING, LeaveReason.SIGTERM.value)
    )


@pytest.mark.parametrize("is_restarted_first", [True, False])
def test_agent_that_was_restarted_during_its_last_task(
    beating: Beating, clock: VirtualClock, *, is_restarted_first: bool
):
    """One that leaves after that is not back; one that comes after it left is."""
    grid = make_grid(beating, clock, handshake=NamesRead())
    exchange(grid)
    beating.silent, before, real_sleep = {20}, clock.now(), clock.sleep

    def sleep(seconds: float) -> None:
        real_sleep(seconds)
        if clock.now() - before > 1.0 and is_restarted_first:
            beating.let_in = {20: "again"}
        if clock.now() - before > 4.5:
            beating.silent, beating.spoilt = set(), {20: leaving(SITES[0])}
            beating.let_in = {20: "again"}  # Between two looks, one a second

    clock.sleep = sleep
    found = kinds(exchange(grid, seconds=60.0, round_index=2))
    assert found["one"] == FailureKind.LEAVING
    real_sleep(2.0)
    back = [] if is_restarted_first else [SITES[0]]
    assert [*grid.returned([SITES[0]], 3)] == back
    beating.let_in = {20: "once more"}
    real_sleep(2.0)
    assert [*grid.returned([SITES[0]], 3)] == [SITES[0]]


def test_site_that_is_back_in_time_is_asked_again(
    beating: Beating, clock: VirtualClock
):
    """While another still works; its answer then counts like any."""
    grid = make_grid(beating, clock, handshake=NamesRead(), asks_again=True)
    exchange(grid)
    beating.spoilt, beating.silent = {20: leaving(SITES[0])}, {10}
    before, real_sleep = clock.now(), clock.sleep

    def sleep(seconds: float) -> None:
        real_sleep(seconds)
        if clock.now() - before > 8.0 and not beating.let_in:
            beating.spoilt, beating.let_in = {}, {20: "again"}
            beating._inboxes.pop(20)  # Another process knows of no question.
        if clock.now() - before > 20.0:
            beating.silent = set()

    clock.sleep = sleep
    replies = exchange(grid, seconds=600.0, round_index=2)
    assert set(kinds(replies).values()) == {"answered"}
    assert len(replies) == len(SITES)
    assert 20.0 < clock.now() - before < 25.0


@pytest.mark.parametrize("asks_again", [True, False])
def test_site_that_left_and_came_back_unseen_is_asked_again(
    beating: Beating, clock: VirtualClock, *, asks_again: bool
):
    """The aggregator was busy meanwhile: it sees the next agent before the farewell."""
    grid = make_grid(beating, clock, handshake=NamesRead(), asks_again=asks_again)
    exchange(grid)
    beating.silent, before, real_sleep = {10, 20}, clock.now(), clock.sleep

    def sleep(seconds: float) -> None:
        real_sleep(seconds)
        if clock.now() - before > 2.0 and not beating.let_in:
            real_sleep(4.0)
            beating.spoilt, beating.silent = {20: leaving(SITES[0])}, {10}
            beating.let_in = {20: "again"}
        elif beating.spoilt:
            beating.spoilt = {}
            beating._inboxes.pop(20)  # Another process knows of no question.
        if clock.now() - before > 30.0:
            beating.silent = set()

    clock.sleep = sleep
    found = kinds(exchange(grid, seconds=600.0, round_index=2))
    assert clock.now() - before < 35.0
    if asks_again:
        assert set(found.values()) == {"answered"}
    else:
        assert found["one"] == FailureKind.LEAVING
        assert [*grid.returned([SITES[0]], 3)] == [SITES[0]]


@pytest.mark.parametrize("asks_again", [True, False])
def test_nobody_waits_for_a_site_that_left(
    beating: Beating, clock: VirtualClock, *, asks_again: bool
):
    """The others have answered: the round ends without it."""
    grid = make_grid(beating, clock, handshake=NamesRead(), asks_again=asks_again)
    exchange(grid)
    beating.spoilt = {20: leaving(SITES[0])}
    before = clock.now()
    found = kinds(exchange(grid, seconds=600.0, round_index=2))
    assert found["one"] == FailureKind.LEAVING
    assert clock.now() - before < 1.0


@pytest.mark.parametrize(("quorum", "is_awaited"), [(3, True), (2, False)])
def test_a_round_waits_for_a_site_that_left_only_if_it_needs_it(
    beating: Beating, clock: VirtualClock, quorum: int, *, is_awaited: bool
):
    """It restarts after 20 s: the last round of a run would be lost before that."""
    names = NamesRead()
    grid = make_grid(beating, clock, handshake=names, asks_again=True, quorum=quorum)
    exchange(grid)
    beating.spoilt = {20: leaving(SITES[0])}
    before, real_sleep = clock.now(), clock.sleep

    def sleep(seconds: float) -> None:
        real_sleep(seconds)
        if clock.now() - before > 20.0 and not beating.let_in:
            beating.spoilt, beating.let_in = {}, {20: "again"}
            beating._inboxes.pop(20)  # Another process knows of no question.

    clock.sleep = sleep
    found = kinds(exchange(grid, seconds=600.0, round_index=2))
    assert found["one"] == ("answered" if is_awaited else FailureKind.LEAVING)
    assert (clock.now() - before > 20.0) == is_awaited


def test_no_round_waits_for_a_site_that_left_if_it_is_lost_anyway(
    beating: Beating, clock: VirtualClock
):
    grid = make_grid(beating, clock, handshake=NamesRead(), asks_again=True, quorum=3)
    exchange(grid)
    crashed = failure(replace(TASK, site=SITES[1]), FailureKind.CRASHED, "failed")
    beating.spoilt = {20: leaving(SITES[0]), 10: flower_site.pack_answer(crashed)}
    before = clock.now()
    found = kinds(exchange(grid, seconds=600.0, round_index=2))
    assert found["one"] == FailureKind.LEAVING
    assert clock.now() - before < 1.0


def test_site_that_left_and_stays_away_ends_with_the_deadline(
    beating: Beating, clock: VirtualClock
):
    """As having left, and not as one that was too slow."""
    grid = make_grid(beating, clock, handshake=NamesRead(), asks_again=True)
    exchange(grid)
    beating.spoilt, beating.silent = {20: leaving(SITES[0])}, {10}
    found = kinds(exchange(grid, seconds=60.0, round_index=2))
    assert found["one"] == FailureKind.LEAVING
    assert found["two"] == FailureKind.DEADLINE


def test_rounds_are_not_burnt_while_too_few_are_there(
    beating: Beating, clock: VirtualClock
):
    """Each waits until its deadline: a cut of minutes must not end a run."""
    grid = make_grid(beating, clock, handshake=NamesRead(), quorum=3)
    stop_beating(beating, clock, 20)
    clock.sleep(30.0)
    for round_index in (1, 2):
        before = clock.now()
        found = kinds(exchange(grid, seconds=200.0, round_index=round_index))
        assert found["one"] == FailureKind.DISCONNECTED
        assert clock.now() - before >= 200.0
    beating.silent, beating.last = set(), {}
    assert kinds(exchange(grid, round_index=3))["one"] == "answered"


def make_app(handler_for: Any) -> Any:
    """Make an app whose job no other test has."""
    app = flower_site.client_app(handler_for)
    app.job_text = f"job {next(JOB_NUMBERS)}"  # type: ignore[attr-defined]
    return app


def ask_app(app: Any, task: Any, *, site: str = "one", seconds: float = 5.0) -> Any:
    """Send a site's app a message and read its answer; each app has its own job."""
    content = flower_site.pack(
        wire.encode_bytes(task),
        site=SiteId(site),
        job_text=app.job_text,
        deadline_seconds=seconds,
    )
    reply = app(Message(content, 10, "train"), None)
    return wire.decode(flower_site.unpack(reply.content))


def test_app_builds_a_site_once(flower: FakeFlower):
    """Data and model are loaded for the first task of a site."""
    built = []

    def handler_for(site: SiteId, job_text: str) -> Any:
        built.append(site)
        return toy_sites.echo_site(site, job_text)

    app = make_app(handler_for)
    for _ in range(2):
        assert isinstance(ask_app(app, TASK), SiteUpdate)
    ask_app(app, replace(TASK, site=SITES[1]), site="two")
    assert built == ["one", "two"]


def test_app_forgets_the_site_used_longest_ago(
    flower: FakeFlower, monkeypatch: pytest.MonkeyPatch
):
    """A process of a large simulation does not hold every site."""
    monkeypatch.setattr(flower_site, "MAX_HANDLERS", 1)
    built = []

    def handler_for(site: SiteId, job_text: str) -> Any:
        built.append(site)
        return toy_sites.echo_site(site, job_text)

    app = make_app(handler_for)
    for site in ("one", "two", "two", "one"):
        ask_app(app, replace(TASK, site=SiteId(site)), site=site)
    assert built == ["one", "two", "one"]


def test_app_reports_a_hanging_site_and_stays_usable(flower: FakeFlower):
    """The thread continues; a second task finds the site busy, others do not."""
    app = make_app(toy_sites.echo_site)
    bad = replace(TASK, site=SiteId("x-bad"), round_index=toy_sites.HANGING_ROUND)
    first = ask_app(app, bad, site="x-bad", seconds=0.1)
    second = ask_app(app, bad, site="x-bad", seconds=0.1)
    assert (first.kind, second.kind) == (FailureKind.DEADLINE, FailureKind.BUSY)
    other = replace(bad, run_id=RunId("another"))
    assert ask_app(app, other, site="x-bad", seconds=0.1).kind is FailureKind.DEADLINE
    assert isinstance(ask_app(app, TASK), SiteUpdate)


def test_small_tasks_go_out_together_and_large_ones_one_by_one(
    flower: FakeFlower, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
):
    """Each call has every site look into Flower's database; models need memory."""
    grid, begun = make_grid(flower, clock), len(flower.pushes)
    assert set(kinds(exchange(grid)).values()) == {"answered"}
    assert flower.pushes[begun:] == [3]
    monkeypatch.setattr(flower_grid, "TOGETHER_BYTES", 1)
    assert set(kinds(exchange(grid)).values()) == {"answered"}
    assert flower.pushes[begun:] == [3, 1, 1, 1]


def test_app_reports_a_site_that_leaves(flower: FakeFlower):
    """A handler that ends its thread does not end the process."""

    def handler_for(site: SiteId, job_text: str) -> Any:
        raise SystemExit(3)

    failure = ask_app(make_app(handler_for), TASK)
    assert (failure.kind, failure.message) == (FailureKind.CRASHED, "SystemExit")


@pytest.mark.parametrize("task", [TASK, toy_sites.echo_site(SITES[1], "").handle(TASK)])
def test_app_refuses_what_is_not_its_task(flower: FakeFlower, task: Any):
    """A task for another site, or no task at all."""
    app = make_app(toy_sites.echo_site)
    with pytest.raises(FederationError, match="another site's task"):
        ask_app(app, task, site="two")


def test_app_sets_the_threads_of_arithmetic(flower: FakeFlower):
    """Their number decides the last bits of sums; it is set where a site works."""
    threads = []

    class CountingSite(toy_sites.EchoSite):
        def handle(self, task: RoundTask) -> Any:  # type: ignore[override]
            threads.append(torch.get_num_threads())
            return super().handle(task)

    app = flower_site.client_app(CountingSite, threads=3)
    app.job_text = "threads"  # type: ignore[attr-defined]
    before = torch.get_num_threads()
    try:
        ask_app(app, TASK)
    finally:
        torch.set_num_threads(before)
    assert threads == [3]


def test_coordinators_may_wait_as_long_as_their_rounds_do():
    """The queue ends those that note nothing for longer; it does not know Flower."""
    assert run_queue.PATIENCE_SECONDS >= flower_presence.RETURN_SECONDS
    assert Retry().deadline_seconds <= run_queue.PATIENCE_SECONDS


def test_begin_and_end_of_a_wait_for_a_lost_node_are_noted(
    beating: Beating, clock: VirtualClock
):
    """So that a queue does not take the wait for a part of the round."""
    told: list[tuple[float, tuple[SiteId, ...]]] = []

    def note(found: Connected) -> None:
        told.append((clock.now(), found.missing))

    grid = make_grid(beating, clock, handshake=NamesRead(), tell=note)
    stop_beating(beating, clock, 20)
    clock.sleep(30.0)
    told.clear()
    before = clock.now()
    exchange(grid, seconds=600.0)
    (begin, one), (end, nobody) = told
    assert (len(one), nobody) == (1, ())
    assert begin - before < 5.0
    assert end - begin >= flower_presence.RETURN_SECONDS
