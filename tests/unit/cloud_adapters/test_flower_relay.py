"""A relay as a node of Flower, and what a coordinator makes of its answers."""

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import toy

if importlib.util.find_spec("flwr") is None:
    pytest.skip("the flower extra is not installed", allow_module_level=True)

from cloud_adapters.flower import simulation as flower_simulation

flower_simulation.import_flower()

from flwr.app import Message, RecordDict  # noqa: E402

from cloud_adapters.flower import site as flower_site  # noqa: E402
from cloud_adapters.flower.grid import Delivery, FlowerGrid  # noqa: E402
from cloud_adapters.flower.handshake import Attendance  # noqa: E402
from cloud_adapters.flower.private.messages import TaskIdentity  # noqa: E402
from cloud_adapters.flower.relay import relay_app  # noqa: E402
from cloud_adapters.storage.disk.store import LocalStore  # noqa: E402
from cloud_adapters.transport.frame_references import PackedFrame, Sizes  # noqa: E402
from cloud_adapters.transport.frames import INLINE, Frames  # noqa: E402
from cloud_adapters.transport.relay_lines import RelayLines  # noqa: E402
from federation.clock import VirtualClock  # noqa: E402
from federation.errors import JobError, ProtocolError  # noqa: E402
from federation.ids import RunId, SiteId  # noqa: E402
from federation.messages import (  # noqa: E402
    FailureKind,
    RoundTask,
    SiteFailure,
    SiteUpdate,
    TaskKind,
)
from federation.rounds.failures import failure  # noqa: E402
from federation.rounds.gather import exchange  # noqa: E402
from federation.wire import frame as wire  # noqa: E402
from federation.wire.relayed import down_frames_in, with_models  # noqa: E402

pytestmark = pytest.mark.flower

EAST, SITES = SiteId("east"), [SiteId("a"), SiteId("b")]


class Relay:
    """Reports each task as a failure of its site; knows its one run."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def introduce(self, sealed: bytes) -> bytes:
        return b"introduced " + sealed

    def answer(self, packed: PackedFrame, *, seconds: float) -> PackedFrame:
        self.seconds.append(seconds)
        tasks = down_frames_in(packed.frame, limit=2)
        return INLINE.send_whole(
            [failure(task, FailureKind.BUSY, "works") for task in tasks]
        )


class OneNode:
    """A Flower run with one node, whose app answers immediately."""

    def __init__(self, relay: Relay, *, spoil: bytes | None = None) -> None:
        self.app, self.spoil = relay_app(relay), spoil
        self.open: dict[str, Message] = {}

    def get_node_ids(self) -> list[int]:
        return [7]

    def push_messages(self, messages: Sequence[Message]) -> list[str]:
        names = [f"m{len(self.open) + index}" for index in range(len(messages))]
        for name, message in zip(names, messages, strict=True):
            message.metadata.__dict__["_message_id"] = name
            self.open[name] = message
        return names

    def pull_messages(self, ids: Sequence[str]) -> list[Message]:
        found = [self.open.pop(name) for name in ids if name in self.open]
        return [self._reply(message) for message in found]

    def _reply(self, message: Message) -> Message:
        if self.spoil is None:
            return self.app(message, None)
        content = flower_site.pack(
            self.spoil, site=EAST, job_text="", deadline_seconds=1.0
        )
        return Message(content, reply_to=message)


class Named:
    """Knows that the node is the relay."""

    question, absent = b"?", {}

    def site_of(self, answer: bytes) -> SiteId:
        assert answer == b"introduced ?"
        return EAST

    def move_on(self) -> bool:
        return False


def task(site: SiteId) -> RoundTask:
    return RoundTask(
        run_id=RunId("run"),
        round_index=1,
        site=site,
        kind=TaskKind.EVALUATE,
        layout_digest="00" * 32,
        weights_d=MODEL,
        integers_m=np.zeros(0, np.int64),
        evaluate=True,
        evaluate_after=False,
    )


MODEL = np.ones(100, np.float32)


def grid_of(api: OneNode, frames: Frames) -> FlowerGrid:
    """An aggregator's grid."""
    return FlowerGrid(
        api,
        [EAST],
        clock=VirtualClock(),
        attendance=Attendance(handshake=Named()),
        delivery=Delivery(ordered=True, frames=frames),
    )


def asked(api: OneNode, **frames: Any) -> list[SiteFailure]:
    """What comes back for a task of each site."""
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    spoil, api.spoil = api.spoil, None
    grid = grid_of(api, Frames(**frames))
    api.spoil = spoil
    lines = RelayLines(grid, {EAST: SITES})
    tasks = [task(site) for site in SITES]
    replies = list(exchange(lines, tasks, deadline_seconds=5.0))
    sizes = wire.encoded_size(tasks[0])
    assert sum(each.bytes_down for each in replies) < 2 * sizes - MODEL.nbytes / 2
    found = [reply.message for reply in replies]
    assert all(isinstance(each, SiteFailure) for each in found)
    return found  # type: ignore[return-value]


def test_relay_answers_for_its_sites_in_one_message():
    relay = Relay()
    found = asked(OneNode(relay))
    assert [(each.site, each.kind) for each in found] == [
        ("a", FailureKind.BUSY),
        ("b", FailureKind.BUSY),
    ]
    assert relay.seconds == [5.0]


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (b"", "without an answer"),
        (b"x" * 200, "do not start like"),
        (wire.encode_bytes(task(SITES[0])), "place of an answer"),
        (wire.encode_bytes(failure(task(SITES[0]), FailureKind.BUSY, "")), "1 answers"),
        (
            4 * wire.encode_bytes(failure(task(EAST), FailureKind.BUSY, "")),
            "more than 3",
        ),
    ],
)
def test_what_a_relay_must_not_send(spoil: bytes, text: str):
    """Its sites are invalid in this round, and nothing else happens."""
    found = asked(OneNode(Relay(), spoil=spoil))
    assert [each.site for each in found] == SITES
    assert {each.kind for each in found} == {FailureKind.INVALID}
    assert all(text in each.message for each in found)


def test_large_model_without_a_store_says_what_to_set():
    with pytest.raises(JobError, match=r"set \[exchange\]") as caught:
        asked(OneNode(Relay()), threshold_bytes=400)
    assert caught.value.key == "exchange.url"


def test_messages_that_are_none_are_errors():
    app = relay_app(Relay())
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    for kind in ("query", "train", "evaluate"):
        with pytest.raises(ProtocolError, match="without a frame"):
            app(Message(RecordDict(), 7, kind), None)


class Summing(Relay):
    """Sends a sum for its sites, through a store."""

    def __init__(self, frames: Frames, **changes: Any) -> None:
        super().__init__()
        self.frames, self.changes = frames, changes

    def answer(self, packed: PackedFrame, *, seconds: float) -> PackedFrame:
        assert seconds == 5.0
        heads = down_frames_in(packed.frame, limit=2)
        sizes = Sizes(num_floats=MODEL.size, num_integers=0)
        found = with_models(self.frames.receive_whole(heads, packed.references, sizes))
        assert [bytes(task.weights_d) for task in found] == [MODEL.tobytes()] * 2
        fields = {
            "run_id": RunId("run"),
            "layout_digest": "00" * 32,
            "integers_m": np.zeros(0, np.int64),
            "based_on": 0,
        }
        total = toy.update(EAST, delta_d=2 * MODEL, **fields)
        parts = [toy.update(site, delta_d=MODEL[:0], **fields) for site in SITES]
        return self.frames.send_whole([replace(total, **self.changes), *parts])


def summed(tmp_path: Path, **changes: Any) -> tuple[list[Any], LocalStore]:
    """What an aggregator reads of a relay's large sum, and what stays in the store."""
    store = LocalStore(tmp_path / "store")
    sides = [
        Frames(store=store, scratch=tmp_path / name, threshold_bytes=300)
        for name in ("aggregator", "relay")
    ]
    api = OneNode(Summing(sides[1], **changes))
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    grid = grid_of(api, sides[0])
    lines = RelayLines(grid, {EAST: SITES})
    tasks = [task(site) for site in SITES]
    return [*exchange(lines, tasks, deadline_seconds=5.0)], store


def test_large_model_and_sum_of_a_relay_go_through_the_store(tmp_path: Path):
    """The model is read once by the relay, and its sum removed when it is there."""
    replies, store = summed(tmp_path)
    for reply in replies:
        assert isinstance(reply.message, SiteUpdate)
        assert reply.message.delta_d.tobytes() == (2 * MODEL).tobytes()
    down, up = (sum(getattr(r, n) for r in replies) for n in ("bytes_down", "bytes_up"))
    assert MODEL.nbytes < down < 2 * MODEL.nbytes + 2000
    assert MODEL.nbytes < up < MODEL.nbytes + 3000
    assert [info.key.split("/")[0] for info in store.list()] == ["model"]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"site": SITES[0]}, "refers to vectors of 'a' in the store"),
        ({"round_index": 2}, "refers to vectors of 'east' in the store"),
        ({"delta_d": np.ones(101, np.float32)}, "this run's model needs 400"),
    ],
)
def test_references_that_a_relay_must_not_send(
    tmp_path: Path, changes: dict[str, Any], text: str
):
    """Or it could have another's objects fetched, or removed."""
    replies, store = summed(tmp_path, **changes)
    assert {reply.message.kind for reply in replies} == {FailureKind.INVALID}
    assert all(text in reply.message.message for reply in replies)
    kept = [info.key for info in store.list() if not info.key.startswith("model/")]
    assert len(kept) == (0 if "delta_d" in changes else 1)


def test_references_to_a_store_that_the_aggregator_has_not_do_not_end_the_run(
    tmp_path: Path,
):
    """A relay, or a site, could otherwise end it with one message."""
    with_store = Frames(
        store=LocalStore(tmp_path / "s"), scratch=tmp_path / "x", threshold_bytes=300
    )
    api = OneNode(Summing(with_store))
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    lines = RelayLines(grid_of(api, INLINE), {EAST: SITES})
    replies = [*exchange(lines, [task(s) for s in SITES], deadline_seconds=5.0)]
    assert {reply.message.kind for reply in replies} == {FailureKind.INVALID}
    assert all("has none" in reply.message.message for reply in replies)
