"""Large models between the grid over Flower and agents, through a store."""

import importlib.util
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import toy, toy_sites

from cloud_adapters.flower import simulation as flower_simulation
from cloud_adapters.storage.disk.store import LocalStore
from cloud_adapters.transport import frames as frames_module
from cloud_adapters.transport.frames import Frames
from federation.clock import VirtualClock
from federation.errors import JobError, StoreUnavailable
from federation.ids import RunId, SiteId
from federation.messages import (
    Reply,
    RoundTask,
    SiteFailure,
    SiteMessage,
    SiteUpdate,
    Task,
)
from federation.rounds.gather import exchange as exchange_over
from federation.vectors import Layout, Role

if importlib.util.find_spec("flwr") is None:
    pytest.skip("the flower extra is not installed", allow_module_level=True)
flower_simulation.import_flower()

from flwr.app import Message, RecordDict  # noqa: E402
from flwr.supercore.task_identity import TaskIdentity  # noqa: E402

from cloud_adapters.flower import site as flower_site  # noqa: E402
from cloud_adapters.flower.grid import Delivery, FlowerGrid  # noqa: E402
from cloud_adapters.transport.redelivery import Inbox  # noqa: E402

pytestmark = pytest.mark.flower

SITES = [SiteId("one"), SiteId("two")]
D = 2000
LAYOUT = Layout.build([("w", (D,), "float32", Role.PARAMETER)])
TASK = toy.task(
    SITES[0],
    run_id=RunId("run-1"),
    weights_d=np.arange(D, dtype=np.float32),
    integers_m=np.zeros(0, dtype=np.int64),
)


class Echo:
    """An agent that says the weights in reverse."""

    def __init__(self, site: SiteId) -> None:
        self._site = toy_sites.echo_site(site, "")

    def introduce(self, sealed: bytes) -> bytes:
        """Never asked: nodes are dealt out."""
        return sealed

    def layout(self, run_id: RunId) -> Layout:
        """The same for all runs."""
        assert run_id == "run-1"
        return LAYOUT

    def answer(self, task: Task) -> SiteMessage:
        """Answer, as in ``support.toy_sites``."""
        return self._site.handle(task)


class Nodes:
    """A Flower run of two nodes with agents, each with a store of its own view."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = VirtualClock()
        self.agents = {number: self.app(number) for number in (0, 1)}
        self.on_the_way: Callable[[Message], None] = lambda _: None
        self.late: set[int] = set()
        self.lost: list[str] = []  # one for each answer that does not arrive
        self._open: dict[str, Message] = {}
        self._inboxes: dict[int, Inbox[RecordDict]] = defaultdict(Inbox)
        self._count = 0

    def app(self, number: int, **changes: Any) -> Any:
        """The app of a node."""
        frames = self.frames(f"scratch-{number}", **changes)
        return flower_site.agent_app(Echo(SITES[number]), frames)

    def frames(self, scratch: str, **changes: Any) -> Frames:
        """How one side sends and receives."""
        settings = {
            "store": LocalStore(self.folder / "store"),
            "scratch": self.folder / scratch,
            "threshold_bytes": 1000,
            "retry": replace(frames_module.RETRY, clock=self.clock),
        }
        return Frames(**settings | changes)

    def grid(self, **changes: Any) -> FlowerGrid:
        """The aggregator's side."""
        frames = self.frames("scratch-aggregator", **changes)
        delivery = Delivery(frames=frames)
        return FlowerGrid(self, SITES, clock=self.clock, delivery=delivery)

    def get_node_ids(self) -> list[int]:
        return list(self.agents)

    def push_messages(self, messages: list[Message]) -> Iterator[str]:
        for message in messages:
            name = f"m{self._count}"
            self._count += 1
            message.metadata.__dict__["_message_id"] = name
            self._open[name] = self._answer(message)
            yield name

    def pull_messages(self, ids: list[str]) -> list[Message]:
        asked = [name for name in ids if name in self._open]
        nodes = {name: self._open[name].metadata.src_node_id for name in asked}
        ready = [name for name in asked if nodes[name] not in self.late]
        found = [self._open.pop(name) for name in ready]
        lost = [self.lost.pop(0) for _ in found if self.lost]
        return found[len(lost) :]

    def _answer(self, message: Message) -> Message:
        if message.metadata.message_type == "query":
            return Message(RecordDict(), reply_to=message)
        number = message.metadata.dst_node_id
        inbox = self._inboxes[number]
        reply = flower_site.reply_at_once(message, inbox)
        if reply is None:
            reply = self.agents[number](message, None)
            inbox.keep(message.metadata.group_id, reply.content)
        self.on_the_way(reply)
        return reply

    def left(self) -> list[str]:
        """All that is in the store and in scratch folders."""
        store = [info.key for info in LocalStore(self.folder / "store").list()]
        scratch = [str(path) for path in self.folder.glob("scratch-*/*")]
        return store + scratch


@pytest.fixture
def nodes(tmp_path: Path) -> Nodes:
    """A run."""
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    return Nodes(tmp_path)


def exchange(grid: FlowerGrid, **changes: Any) -> dict[str, Reply]:
    """Send both sites a task."""
    tasks = [replace(TASK, site=site, **changes) for site in SITES]
    replies = list(exchange_over(grid, tasks, deadline_seconds=60.0))
    assert len(replies) == len({each.message.site for each in replies}) == len(SITES)
    return {each.message.site: each for each in replies}


def said(reply: Reply) -> str:
    """Why an answer does not count."""
    return f"{reply.message.kind}: {reply.message.message}"


def test_large_models_travel_through_the_store(nodes: Nodes):
    """There and back; the next round removes what is left, and its end the rest."""
    frames = nodes.frames("scratch-aggregator")
    delivery = Delivery(frames=frames)
    grid = FlowerGrid(nodes, SITES, clock=nodes.clock, delivery=delivery)
    for index in (1, 2):
        for reply in exchange(grid, round_index=index).values():
            assert isinstance(reply.message, SiteUpdate)
            expected = TASK.weights_d[::-1]
            np.testing.assert_array_equal(reply.message.delta_d, expected)
            assert min(reply.bytes_down, reply.bytes_up) > 4 * D
        (key,) = nodes.left()  # One copy of the model for both, and no update.
        assert key.startswith(f"model/run-1/{index}/")
    frames.end_run(RunId("run-1"), SITES)
    assert nodes.left() == []


def test_spoilt_update_is_the_failure_of_its_site(nodes: Nodes):
    """The other one's counts; nothing is counted of what is wrong."""

    def spoil(_: Message) -> None:
        store = LocalStore(nodes.folder / "store")
        for info in store.list("sites/two/"):
            store.put(info.key, [bytes(info.size)])

    nodes.on_the_way = spoil
    replies = exchange(nodes.grid())
    assert isinstance(replies[SITES[0]].message, SiteUpdate)
    assert "invalid: 'sites/two/run-1/1/" in said(replies[SITES[1]])
    assert not [name for name in nodes.left() if name.startswith("sites/")]


def test_update_that_is_gone_is_a_failure(nodes: Nodes):
    """Its object was deleted before it was read."""

    def remove(_: Message) -> None:
        store = LocalStore(nodes.folder / "store")
        for info in list(store.list("sites/one/")):
            store.delete(info.key)

    nodes.on_the_way = remove
    replies = exchange(nodes.grid())
    assert said(replies[SITES[0]]).startswith("invalid: ")
    assert isinstance(replies[SITES[1]].message, SiteUpdate)


def test_model_that_is_gone_is_told_by_the_site(nodes: Nodes, tmp_path: Path):
    """It looks into another store, for example."""
    elsewhere = LocalStore(tmp_path / "elsewhere")
    nodes.agents[1] = nodes.app(1, store=elsewhere)
    replies = exchange(nodes.grid())
    assert isinstance(replies[SITES[0]].message, SiteUpdate)
    assert said(replies[SITES[1]]).startswith("crashed: ObjectNotFound: ")


def test_site_without_a_store_says_what_to_set(nodes: Nodes):
    """The rest of the federation continues."""
    nodes.agents[1] = nodes.app(1, store=None)
    replies = exchange(nodes.grid())
    assert isinstance(replies[SITES[0]].message, SiteUpdate)
    assert "exchange.url: " in said(replies[SITES[1]])


def test_aggregator_without_a_store_ends_the_run(nodes: Nodes):
    """No site could ever be asked."""
    with pytest.raises(JobError, match=r"exchange\.url: .*too large"):
        exchange(nodes.grid(store=None))


class Shut:
    """A store that is out of reach for good."""

    url = "shut://"

    def __getattr__(self, name: str) -> Any:
        def refuse(*_: Any, **__: Any) -> Any:
            raise StoreUnavailable(f"no {name}: the network is gone", temporary=True)

        return refuse


def test_store_out_of_the_aggregators_reach_loses_the_round(nodes: Nodes):
    """And not the run: every site's task fails, after one wait for all."""
    replies = exchange(nodes.grid(store=Shut()))
    for reply in replies.values():
        assert "could not be stored" in said(reply)
    assert nodes.clock.monotonic() < 200.0
    assert nodes.left() == []


def test_late_answer_is_handed_on_unread(nodes: Nodes):
    """It will not count; what it has left goes with its round."""
    grid = nodes.grid()
    nodes.late = {1}
    replies = exchange(grid)
    assert said(replies[SITES[1]]).startswith("deadline: ")
    nodes.late = set()
    tasks = [replace(TASK, round_index=2)]
    late, now = exchange_over(grid, tasks, deadline_seconds=60.0)
    assert (late.message.round_index, late.message.delta_d.size) == (1, 0)
    assert (now.message.round_index, now.message.delta_d.size) == (2, D)
    list(exchange_over(grid, [replace(TASK, round_index=3)], deadline_seconds=60.0))
    assert [name for name in nodes.left() if "/run-1/3/" not in name] == []


def test_lost_answer_is_said_again(nodes: Nodes):
    """Its vectors lie in the store still: what is said again points to them."""
    grid = nodes.grid()
    nodes.lost = ["one", "two"]
    written: list[str] = []
    nodes.on_the_way = lambda _: written.extend(
        info.key for info in LocalStore(nodes.folder / "store").list("sites/")
    )
    for reply in exchange(grid).values():
        assert isinstance(reply.message, SiteUpdate)
        np.testing.assert_array_equal(reply.message.delta_d, TASK.weights_d[::-1])
    assert nodes.lost == []
    assert len(set(written)) == len(SITES)
    assert not [name for name in nodes.left() if name.startswith("sites/")]


@pytest.mark.parametrize("text", ["[", "x" * 5000, '[{"field": "delta_d"}]'])
def test_malformed_references_are_the_sites_failure(nodes: Nodes, text: str):
    """A node can send anything."""

    def spoil(reply: Message) -> None:
        reply.content.config_records["about"]["references"] = text

    nodes.on_the_way = spoil
    for reply in exchange(nodes.grid()).values():
        assert said(reply).startswith("invalid: ")


def test_step_has_no_vectors(nodes: Nodes):
    """An answer to a step of the protocol refers to nothing."""

    def spoil(reply: Message) -> None:
        text = f'[{{"field": "words", "name": "{"0" * 32}", "size": 4, '
        text += f'"sha256": "{"0" * 64}"}}]'
        reply.content.config_records["about"]["references"] = text

    nodes.on_the_way = spoil
    step = toy.secure_task(SITES[0], run_id=RunId("run-1"))
    (reply,) = exchange_over(nodes.grid(), [step], deadline_seconds=60.0)
    assert "invalid: one answered a secure" in said(reply)


def test_task_is_typed(nodes: Nodes):
    """What arrives at an agent is a whole task."""
    seen: list[Task] = []

    class Watch(Echo):
        def answer(self, task: Task) -> SiteMessage:
            seen.append(task)
            return super().answer(task)

    nodes.agents[0] = flower_site.agent_app(Watch(SITES[0]), nodes.frames("scratch-0"))
    exchange(nodes.grid())
    (task,) = seen
    assert isinstance(task, RoundTask)
    np.testing.assert_array_equal(task.weights_d, TASK.weights_d)


@pytest.mark.parametrize("kind", [KeyError, SystemExit, JobError])
def test_text_of_an_error_stays_at_the_site(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: type[BaseException]
):
    """It may quote a record; the aggregator learns what kind it is.

    An error of ours is no better where code of a user raised it.
    """

    class Broken(Echo):
        def answer(self, task: Task) -> SiteMessage:
            raise kind("record 17 of " + task.site)

    nodes = Nodes(tmp_path)
    nodes.agents[1] = flower_site.agent_app(Broken(SITES[1]), nodes.frames("broken"))
    tasks = [replace(TASK, site=site) for site in SITES]
    replies = [*exchange_over(nodes.grid(), tasks, deadline_seconds=60.0)]
    (failed,) = [r.message for r in replies if r.message.site == SITES[1]]
    assert isinstance(failed, SiteFailure)
    assert kind.__name__ in failed.message
    assert "record" not in failed.message
    assert "record 17" in caplog.text
