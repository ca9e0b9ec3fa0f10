"""Messages that are lost between the grid over Flower and sites: in virtual time."""

import importlib.util
import queue
import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import pytest
from support import toy, toy_sites

from cloud_adapters.flower import simulation as flower_simulation
from federation.clock import VirtualClock
from federation.ids import RunId, SiteId
from federation.messages import (
    FailureKind,
    Reply,
    SecureAnswer,
    SiteMessage,
    SiteUpdate,
    Task,
)
from federation.rounds.gather import exchange as exchange_over
from federation.vectors import Layout

if importlib.util.find_spec("flwr") is None:
    pytest.skip("the flower extra is not installed", allow_module_level=True)
flower_simulation.import_flower()

import httpx  # noqa: E402
from cryptography.hazmat.primitives.asymmetric import ec  # noqa: E402
from flwr.app import Error, Message  # noqa: E402
from flwr.proto.fleet_pb2 import (  # noqa: E402
    PullMessagesResponse,
    PushMessagesResponse,
)
from flwr.supercore.task_identity import TaskIdentity  # noqa: E402
from support.lossy_flower import (  # noqa: E402
    DEADLINE_SECONDS,
    LossyFlower,
    is_answer,
    is_task,
)

from cloud_adapters.flower import (  # noqa: E402
    envelope as flower_envelope,
    site as flower_site,
)
from cloud_adapters.flower.connection import Connection  # noqa: E402
from cloud_adapters.flower.envelope import Envelope  # noqa: E402
from cloud_adapters.flower.fleet import Unanswerable  # noqa: E402
from cloud_adapters.flower.grid import FlowerGrid  # noqa: E402
from cloud_adapters.flower.handshake import Attendance  # noqa: E402
from cloud_adapters.flower.node import FlowerNode  # noqa: E402
from cloud_adapters.flower.private.messages import Node  # noqa: E402
from cloud_adapters.transport.redelivery import Inbox, Word, new_name  # noqa: E402

pytestmark = pytest.mark.flower

SITES = [SiteId("one"), SiteId("two"), SiteId("three")]
ROUND = toy.task(
    SITES[0], run_id=RunId("run-1"), weights_d=np.arange(5, dtype=np.float32)
)
STEP = toy.secure_task(SITES[0], run_id=RunId("run-1"))
Loses = Callable[[Message], bool]


class Names:
    """A handshake that believes every name."""

    question = b"who?"
    absent: Mapping[SiteId, str] = MappingProxyType({})

    def move_on(self) -> bool:
        return False

    def site_of(self, answer: bytes) -> SiteId:
        return SiteId(answer.decode())


class Echo:
    """An agent that says weights in reverse."""

    def __init__(self, site: SiteId) -> None:
        self._site = site

    def introduce(self, sealed: bytes) -> bytes:
        assert sealed == Names.question
        return self._site.encode()

    def layout(self, run_id: RunId) -> Layout:
        raise NotImplementedError

    def answer(self, task: Task) -> SiteMessage:
        return toy_sites.echo_site(self._site, "").handle(task)


def echo_app(site: SiteId) -> Any:
    """The app of such a site."""
    return flower_site.agent_app(Echo(site))


@pytest.fixture
def flower() -> LossyFlower:
    """A run of three nodes; the test says what is lost."""
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    apps = {10 + i: echo_app(site) for i, site in enumerate(SITES)}
    clock = VirtualClock()
    clock.sleep(1000.0)
    return LossyFlower(apps=apps, clock=clock)


def make_grid(flower: LossyFlower) -> FlowerGrid:
    """A grid whose sites have introduced themselves."""
    attendance = Attendance(handshake=Names())
    return FlowerGrid(flower, SITES, clock=flower.clock, attendance=attendance)


def exchange(grid: FlowerGrid, task: Any = ROUND, **changes: Any) -> list[Reply]:
    """Send every site a task."""
    tasks = [replace(task, site=site, **changes) for site in SITES]
    return list(exchange_over(grid, tasks, deadline_seconds=DEADLINE_SECONDS))


def first(fits: Loses, times: int = 1) -> Loses:
    """Lose so many messages of a sort."""
    lost: list[Message] = []

    def loses(message: Message) -> bool:
        if not fits(message) or len(lost) == times:
            return False
        lost.append(message)
        return True

    return loses


def is_probe(message: Message) -> bool:
    return message.metadata.message_type == flower_site.PROBE


def is_reply_to_probe(message: Message) -> bool:
    return is_probe(message) and bool(message.metadata.reply_to_message_id)


def assert_all_answered_once(flower: LossyFlower, replies: list[Reply]) -> None:
    """Each site has answered, right, and has worked once."""
    assert sorted(reply.message.site for reply in replies) == sorted(SITES)
    for reply in replies:
        message = reply.message
        if isinstance(message, SiteUpdate):
            np.testing.assert_array_equal(message.delta_d, ROUND.weights_d[::-1])
        else:
            assert isinstance(message, SecureAnswer)
            assert message.body == STEP.body[::-1]
    assert set(flower.worked.values()) == {1}
    assert len(flower.worked) == len(SITES)


@pytest.mark.parametrize("task", [ROUND, STEP], ids=["round", "secure step"])
@pytest.mark.parametrize(
    ("fits", "times", "seconds"),
    [
        (is_task, 1, 10.0),
        (is_task, 3, 10.0),
        (is_answer, 1, 8.0),
        (is_answer, 3, 8.0),
        (is_answer, 5, 40.0),
        (lambda m: is_task(m) or is_answer(m), 5, 40.0),
    ],
    ids=["a task", "tasks", "an answer", "answers", "answers twice", "both"],
)
def test_lost_message_costs_seconds(
    flower: LossyFlower, fits: Loses, times: int, seconds: float, task: Any
):
    """And not the round's deadline, and no site works twice."""
    grid = make_grid(flower)
    flower.loses = first(fits, times)
    begin = flower.clock.monotonic()
    replies = exchange(grid, task)
    assert_all_answered_once(flower, replies)
    assert 5.0 <= flower.clock.monotonic() - begin < seconds


@pytest.mark.parametrize("seed", range(20))
def test_sites_are_found_whatever_is_lost(flower: LossyFlower, seed: int):
    """A third of all messages; nobody is asked to introduce itself twice."""
    draws = random.Random(seed)  # noqa: S311 -- not for keys
    flower.loses = lambda _: draws.random() < 1 / 3
    attendance = Attendance(handshake=Names(), connect_seconds=DEADLINE_SECONDS)
    grid = FlowerGrid(flower, SITES, clock=flower.clock, attendance=attendance)
    assert dict(grid._nodes) == {site: 10 + i for i, site in enumerate(SITES)}
    assert set(flower.introduced.values()) == {1}


def test_lost_probes_are_sent_again(flower: LossyFlower):
    """Whichever way they were lost."""
    grid = make_grid(flower)
    lost = [first(is_task), first(is_probe, 2), first(is_reply_to_probe, 2)]
    flower.loses = lambda message: any(each(message) for each in lost)
    replies = exchange(grid)
    assert_all_answered_once(flower, replies)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_lost_each_question_is_worked_on_once(
    flower: LossyFlower, seed: int
):
    """A third of all messages, in both directions, over several rounds."""
    grid = make_grid(flower)
    draws = random.Random(seed)  # noqa: S311 -- not for keys
    flower.loses = lambda _: draws.random() < 1 / 3
    flower.delay = lambda _: draws.uniform(0.0, 20.0)
    for index in (1, 2, 3):
        for task in (ROUND, STEP):
            flower.worked.clear()
            replies = exchange(grid, task, round_index=index)
            now = [r for r in replies if r.message.round_index == index]
            assert_all_answered_once(flower, now)


def test_long_work_is_let_alone(flower: LossyFlower):
    """A site that is asked after says that it works, at the price of few messages."""
    grid = make_grid(flower)
    flower.work = 250.0
    replies = exchange(grid)
    assert_all_answered_once(flower, replies)
    probes = sum(map(is_probe, flower.sent))
    assert 3 * 10 < probes < 3 * 20


def test_sites_are_probed_one_by_one_and_in_one_request_each(flower: LossyFlower):
    """All at once, their words would hold up a round that is about to end."""
    grid = make_grid(flower)
    flower.work = 20.0
    probed: list[float] = []

    def note(message: Message) -> float:
        if is_probe(message):
            probed.append(flower.clock.monotonic())
        return 0.01

    flower.delay = note
    exchange(grid)
    assert len({round(at, 1) for at in probed[:3]}) == 3
    probes = [message.content for message in flower.sent if is_probe(message)]
    # With a small frame it travels whole.
    assert {flower_site.frame_in_record(content) for content in probes} == {b""}


def test_task_that_was_late_and_comes_twice_is_worked_on_once(flower: LossyFlower):
    """It was overtaken by the probe, and so sent again: the second one is dropped."""
    grid = make_grid(flower)
    flower.delay = lambda message: 30.0 if is_task(message) else 0.01
    replies = exchange(grid)
    assert_all_answered_once(flower, replies)
    assert sum(map(is_task, flower.sent)) > len(SITES)
    flower.worked.clear()
    replies = exchange(grid, round_index=2)  # The copies of round 1 are nobody's.
    assert_all_answered_once(flower, replies)


def test_lost_task_is_sent_again_once(flower: LossyFlower):
    """Though two probes that were on the way together say that it is unknown."""
    grid = make_grid(flower)
    flower.loses = first(is_task, len(SITES))
    arrival = flower.clock.monotonic() + 17.0
    flower.delay = lambda message: (
        max(0.01, arrival - flower.clock.monotonic()) if is_probe(message) else 0.01
    )
    assert_all_answered_once(flower, exchange(grid))
    assert sum(map(is_task, flower.sent)) == 2 * len(SITES)


def test_kept_answer_is_the_one_that_was_lost(flower: LossyFlower):
    """Byte for byte: nothing is made anew."""
    grid = make_grid(flower)
    lost: list[Message] = []
    said: list[bytes] = []

    def loses(message: Message) -> bool:
        if is_answer(message):
            said.append(flower_site.unpack(message.content))
            lost.append(message)
            return len(lost) == 1
        return False

    flower.loses = loses
    (reply,) = exchange_over(grid, [ROUND], deadline_seconds=DEADLINE_SECONDS)
    assert len(said) == 2
    assert said[0] == said[1]
    assert reply.bytes_up == len(said[0])


def test_probe_that_an_answer_overtakes_brings_no_second_one(flower: LossyFlower):
    """It waits for the site while that sends, and is met by a word and no model."""
    grid = make_grid(flower)
    flower.work = 6.0
    flower.delay = lambda message: 3.0 if is_probe(message) else 0.01
    exchange(grid)
    flower.clock.sleep(5.0)
    flower.delay = lambda _: 0.01
    exchange(grid, round_index=2)
    kinds = {message.metadata.message_type for message in flower.sent}
    assert flower_site.AGAIN not in kinds
    words = [flower_site.read_word(message.content) for message in flower.replied]
    assert Word.ANSWERED in words, "or this could not fail"
    assert None not in words


def test_site_that_says_that_it_has_answered_is_asked_now_and_then(
    flower: LossyFlower, monkeypatch: pytest.MonkeyPatch
):
    """And not as fast as it can say so without ever doing it."""
    grid = make_grid(flower)
    flower.loses = is_answer
    monkeypatch.setattr(Inbox, "answer", lambda *_: None)
    replies = exchange(grid)
    assert {r.message.kind for r in replies} == {FailureKind.DEADLINE}
    again = [m for m in flower.sent if m.metadata.message_type == flower_site.AGAIN]
    probes = sum(map(is_probe, flower.sent))
    assert 0 < len(again) <= probes < 3 * DEADLINE_SECONDS / 10


def test_answer_that_comes_twice_is_handed_on_once(flower: LossyFlower):
    """The first one counts; no copy of it counts as late in a later round."""
    grid = make_grid(flower)
    flower.delay = lambda message: 0.01 if is_task(message) else 5.0
    flower.work = 6.0  # The answer is kept when the probe comes.
    exchange(grid)
    flower.clock.sleep(60.0)
    replies = exchange(grid, round_index=2)
    assert [reply.message.round_index for reply in replies] == [2, 2, 2]


def test_restarted_site_is_sent_its_task_again(flower: LossyFlower):
    """It stopped in peace while it worked, and was soon back."""
    grid = make_grid(flower)
    flower.work = 100.0
    tasks = exchange_over(grid, [ROUND], deadline_seconds=DEADLINE_SECONDS)
    node, sleep = 10, flower.clock.sleep
    restarted: list[float] = []

    def restart(seconds: float) -> None:
        sleep(seconds)
        if flower.worked and not restarted:
            restarted.append(flower.clock.monotonic())
            flower._events.clear()
            flower.restart(node, echo_app(SITES[0]))
            flower.work = 1.0

    flower.clock.sleep = restart
    (reply,) = tasks
    assert not hasattr(reply.message, "kind")
    assert reply.answered_seconds - restarted[0] < 20.0


def test_message_that_flower_has_lost_is_asked_after_at_once(flower: LossyFlower):
    """Flower says so of an answer whose pull was cut off, and forgets it."""
    grid = make_grid(flower)
    pull, told = flower.pull_messages, []

    def pull_losing(ids: list[str]) -> list[Message]:
        found = pull(ids)
        for reply in found:
            if is_answer(reply) and not told:
                told.append(reply)
                sent = next(
                    m
                    for m in flower.sent
                    if m.metadata.message_id == reply.metadata.reply_to_message_id
                )
                error = Message(Error(3, "unavailable"), reply_to=sent)
                found[found.index(reply)] = error
        return found

    flower.pull_messages = pull_losing
    begin = flower.clock.monotonic()
    replies = exchange(grid)
    assert told
    assert_all_answered_once(flower, replies)
    assert flower.clock.monotonic() - begin < 4.0


def test_message_that_cannot_be_opened_is_unknown_to_its_site():
    """It was admitted by its name, and must be sent again: nobody works on it."""
    node = FlowerNode(
        app=echo_app(SITES[0]),
        address="127.0.0.1:1",
        root_certificates=None,
        key=ec.generate_private_key(ec.SECP384R1()),
        clock=VirtualClock(),
    )
    node._calls.succeed()
    name, kind = new_name(1), ROUND.kind.value
    asked = Message(flower_site.pack_bytes(b"a task"), 1, kind, group_id=name)
    parcel = flower_envelope.pack(asked, whole=False)
    envelope = Envelope.of(parcel.envelope, parcel.tree)
    assert flower_site.reply_at_once(envelope.about, node._inbox) is None
    assert node._inbox.look(name) is Word.KNOWN
    gone = httpx.MockTransport(lambda _: httpx.Response(404))
    with node._client() as client, httpx.Client(transport=gone) as refusing:
        client._client.close()
        client._client = refusing
        connection = Connection(client=client, node=Node(node_id=1), calls=node._calls)
        with pytest.raises(Unanswerable, match="HTTP 404"):
            node._take(connection, envelope)
    assert node._inbox.look(name) is Word.UNKNOWN


def test_late_answers_hold_no_weights(flower: LossyFlower):
    """Of a question that nobody waits for its identity is kept, and no model."""
    grid = make_grid(flower)
    flower.loses = is_task
    replies = exchange(grid)
    assert {r.message.kind for r in replies} == {FailureKind.DEADLINE}
    assert grid._late
    assert not any(hasattr(asked, "task") for asked in grid._late.values())


class Backlog:
    """Flower's side of a connection: it has tasks for a node, and takes its answers."""

    PushObject: Any = None  # They are whole.

    def __init__(self, *tasks: Message) -> None:
        self.parcels = [flower_envelope.pack(task, whole=True) for task in tasks]
        self.answers: list[Any] = []

    def PullMessages(self, _: Any) -> PullMessagesResponse:  # noqa: N802 -- as Flower
        taken, self.parcels = self.parcels[:1], self.parcels[1:]
        return PullMessagesResponse(
            messages_list=[parcel.envelope for parcel in taken],
            message_object_trees=[parcel.tree for parcel in taken],
        )

    def PushMessages(self, request: Any) -> PushMessagesResponse:  # noqa: N802
        self.answers += request.messages_list
        return PushMessagesResponse()


class Waits(threading.Event):
    """Notes for how long it is waited for, and ends a loop after a number of waits."""

    def __init__(self, ended: threading.Event, *, num: int) -> None:
        super().__init__()
        self.num_waits, self._ended, self._num = 0, ended, num

    def wait(self, timeout: float | None = None) -> bool:  # noqa: ARG002
        self.num_waits += 1
        if self.num_waits == self._num:
            self._ended.set()
        return self.is_set()


def backlog_of(*questions: tuple[str, int]) -> tuple[FlowerNode, Backlog, Connection]:
    """A node for which questions wait, by their names and Flower's runs."""
    node = FlowerNode(
        app=echo_app(SITES[0]),
        address="127.0.0.1:1",
        root_certificates=None,
        key=ec.generate_private_key(ec.SECP384R1()),
        clock=VirtualClock(),
    )
    node._calls.succeed()
    messages = []
    for name, run in questions:
        TaskIdentity.run_id = run
        content = flower_site.pack_bytes(b"a task")
        messages.append(Message(content, 1, ROUND.kind.value, group_id=name))
    flower = Backlog(*messages)
    calls, client = node._calls, cast("Any", flower)
    return node, flower, Connection(client=client, node=Node(node_id=1), calls=calls)


def waiting(letters: "queue.Queue[Any]") -> list[str]:
    """Names of what waits for a node, in its order."""
    return [letters.get_nowait().name for _ in range(letters.qsize())]


def test_task_that_was_given_up_is_skipped_once_a_newer_one_waits():
    """It is answered, or the aggregator would look for its answer until the end."""
    setup, dead = new_name(0, 0), new_name(3, 3)
    other, newer, same = new_name(3, 3), new_name(5, 5), new_name(5, 5)
    node, flower, connection = backlog_of(
        (setup, 1), (dead, 1), (other, 2), (newer, 1), (same, 1)
    )
    letters: queue.Queue[Any] = queue.Queue()
    while flower.parcels:
        node._sort(connection, letters)
    assert waiting(letters) == [setup, other, newer, same]
    (answer,) = flower.answers
    assert answer.metadata.group_id == dead
    assert "given up" in answer.error.reason


def test_node_at_work_looks_for_all_that_waits_at_once():
    """A look a second is too few for a site that is slower than the rounds."""
    names = [new_name(index, index) for index in range(1, 6)]
    node, _, connection = backlog_of(*((name, 1) for name in names))
    ended, letters = threading.Event(), queue.Queue[Any]()
    node._free = Waits(ended, num=1)  # It is at work, and waits before the next look.
    node._collect(connection, letters, ended)
    assert waiting(letters) == names[-1:]
