"""Messages whole and in objects, against a SuperLink made of dicts."""

import importlib.util
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cloud_adapters.flower import simulation as flower_simulation
from federation.ids import RunId, SiteId
from federation.messages import RoundTask, TaskKind
from federation.wire import frame as wire

if importlib.util.find_spec("flwr") is None:
    pytest.skip("the flower extra is not installed", allow_module_level=True)
flower_simulation.import_flower()

import httpx  # noqa: E402
from flwr.app import (  # noqa: E402
    Array,
    ArrayRecord,
    ConfigRecord,
    Error,
    Message,
    RecordDict,
)
from flwr.proto.message_pb2 import (  # noqa: E402
    PullObjectResponse,
    PushObjectResponse,
)
from flwr.proto.node_pb2 import Node  # noqa: E402
from flwr.proto.runtime_pb2 import (  # noqa: E402
    PullAppMessagesResponse,
    PushAppMessagesResponse,
)
from flwr.supercore.inflatable.inflatable_object import (  # noqa: E402
    iterate_object_tree,
)
from flwr.supercore.task_identity import TaskIdentity  # noqa: E402

from cloud_adapters.flower import (  # noqa: E402
    envelope as flower_envelope,
    runtime as flower_runtime,
    site as flower_site,
)
from cloud_adapters.flower.envelope import Envelope, Parcel  # noqa: E402
from cloud_adapters.flower.runtime import RuntimeGrid, SuperLinkFailed  # noqa: E402

pytestmark = pytest.mark.flower

NODE = 7


class FakeSuperLink:
    """Keeps what is pushed; a test answers in the name of a site."""

    def __init__(self) -> None:
        self.run, self.node = SimpleNamespace(run_id=1), Node(node_id=1)
        self.objects: dict[str, bytes] = {}
        self.awaited: set[str] = set()
        self.pushed: list[str] = []
        self.told: list[Parcel] = []
        self.asked: list[list[str]] = []
        self.confirmed: list[str] = []
        self.answers: list[Parcel] = []
        # Flower's grid has its client under this name.
        self._runtime_client = self

    def PushMessages(self, request: Any) -> Any:  # noqa: N802
        trees = request.message_object_trees
        for message, tree in zip(request.messages_list, trees, strict=True):
            self.told.append(Parcel(envelope=message, tree=tree, objects={}))
        return PushAppMessagesResponse(
            message_ids=[m.metadata.message_id for m in request.messages_list],
            objects_to_push=[
                p.object_id for t in trees for p in iterate_object_tree(t)
            ],
            session_id="session",
        )

    def PushObject(self, request: Any) -> Any:  # noqa: N802
        self.pushed.append(request.object_id)
        self.objects[request.object_id] = request.object_content
        return PushObjectResponse(stored=True)

    def PullMessages(self, request: Any) -> Any:  # noqa: N802
        # The field's name and form differ between versions of Flower.
        ((_, names),) = request.ListFields()
        self.asked.append(list(getattr(names, "vals", names)))
        found, self.answers = self.answers, []
        return PullAppMessagesResponse(
            messages_list=[parcel.envelope for parcel in found],
            message_object_trees=[parcel.tree for parcel in found],
        )

    def PullObject(self, request: Any) -> Any:  # noqa: N802
        content = self.objects.get(request.object_id)
        return PullObjectResponse(
            object_found=content is not None or request.object_id in self.awaited,
            object_available=content is not None,
            object_content=content or b"",
        )

    def ConfirmMessageReceived(self, request: Any) -> None:  # noqa: N802
        self.confirmed.append(request.message_object_id)

    def answer(self, parcel: Parcel) -> None:
        """Tell of an answer whose objects are still to come."""
        self.answers.append(parcel)
        self.awaited |= parcel.objects.keys()

    def receive(self, parcel: Parcel) -> None:
        """Take in an answer's objects."""
        self.objects |= {n: each.deflate() for n, each in parcel.objects.items()}


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> FakeSuperLink:
    """A run of a SuperLink that keeps what is in envelopes, as up to Flower 1.42."""
    monkeypatch.setattr(flower_envelope, "KEEPS_CONTENT", True)
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    return FakeSuperLink()


@pytest.fixture
def grid(link: FakeSuperLink) -> RuntimeGrid:
    """Its grid."""
    return RuntimeGrid(link)  # type: ignore[arg-type]


def task_of(num_floats: int) -> Message:
    """A task with a model of that size."""
    task = RoundTask(
        run_id=RunId("run-1"),
        round_index=1,
        site=SiteId("one"),
        kind=TaskKind.TRAIN,
        layout_digest="ab" * 32,
        weights_d=np.ones(num_floats, dtype=np.float32),
        integers_m=np.zeros(0, dtype=np.int64),
        evaluate=False,
        evaluate_after=False,
    )
    frame = wire.encode_bytes(task)
    content = flower_site.pack(frame, site=task.site, job_text="", deadline_seconds=9.0)
    return Message(content, NODE, "train")


def sent(grid: RuntimeGrid, link: FakeSuperLink, message: Message) -> Envelope:
    """Send a message, and read what the SuperLink would hand out."""
    (name,) = grid.push_messages([message])
    parcel = link.told[-1]
    assert parcel.envelope.metadata.message_id == name == parcel.tree.object_id
    return Envelope.of(parcel.envelope, parcel.tree)


def test_small_task_travels_whole(grid: RuntimeGrid, link: FakeSuperLink):
    """One request brings it."""
    message = task_of(10)
    envelope = sent(grid, link, message)
    assert not link.pushed
    assert envelope.is_whole
    frame = flower_site.unpack(envelope.message().content)
    assert frame == flower_site.unpack(message.content)


@pytest.mark.parametrize("num_floats", [1 << 15, 1 << 17])
def test_larger_task_travels_in_objects(
    grid: RuntimeGrid, link: FakeSuperLink, num_floats: int
):
    """In a config record, and in an array."""
    message = task_of(num_floats)
    frame = flower_site.unpack(message.content)
    envelope = sent(grid, link, message)
    assert not envelope.is_whole
    assert not envelope.about.content
    envelope.contents.update(link.objects)
    assert frame == flower_site.unpack(envelope.message().content)


def test_what_any_node_is_asked_never_travels_whole(
    grid: RuntimeGrid, link: FakeSuperLink
):
    """Flower's own node, and an app in it, read nothing but objects."""
    arrays = ArrayRecord({"w": Array(np.ones(3, dtype=np.float32))})
    for content in [
        RecordDict(),
        RecordDict({"config": ConfigRecord({"server-round": 1})}),
        RecordDict({"arrays": arrays}),
        flower_site.pack_bytes(b"who is there?"),
    ]:
        assert not sent(grid, link, Message(content, NODE, "query")).is_whole
        assert link.told[-1].tree.object_id in link.pushed


def reply_to(
    link: FakeSuperLink, content: RecordDict | Error, *, whole: bool
) -> Parcel:
    """What the site pushes in answer to the last message."""
    about = Envelope.of(link.told[-1].envelope, link.told[-1].tree).about
    return flower_envelope.pack(Message(content, reply_to=about), whole=whole)


@pytest.mark.parametrize("whole", [True, False])
def test_answer_comes_back(grid: RuntimeGrid, link: FakeSuperLink, *, whole: bool):
    """In either form; an answer in objects after the SuperLink has told of it."""
    message = task_of(10)
    names = grid.push_messages([message])
    parcel = reply_to(link, message.content, whole=whole)
    link.answer(parcel)
    if not whole:
        assert grid.pull_messages(names) == []
        link.receive(parcel)
    (answer,) = grid.pull_messages(names)
    assert answer.metadata.reply_to_message_id == names[0]
    assert flower_site.unpack(answer.content) == flower_site.unpack(message.content)
    # The SuperLink tells of it once: to ask again would be answered by an error.
    assert link.asked == [names]


def test_answer_that_is_not_there_yet_holds_up_no_other(
    grid: RuntimeGrid, link: FakeSuperLink
):
    """It is looked for again with the next ones."""
    first, second = task_of(10), task_of(11)
    names = grid.push_messages([first])
    slow = reply_to(link, first.content, whole=False)
    names += grid.push_messages([second])
    link.answer(slow)
    link.answer(reply_to(link, second.content, whole=True))
    (answer,) = grid.pull_messages(names)
    assert answer.metadata.reply_to_message_id == names[1]
    link.receive(slow)
    (answer,) = grid.pull_messages(names[:1])
    assert answer.metadata.reply_to_message_id == names[0]


def test_answers_are_confirmed_when_nothing_comes(
    grid: RuntimeGrid, link: FakeSuperLink
):
    """Which deletes them, and is not in anybody's way."""
    names = grid.push_messages([task_of(10)])
    parcel = reply_to(link, RecordDict(), whole=True)
    link.answer(parcel)
    assert len(grid.pull_messages(names)) == 1
    assert not link.confirmed
    for _ in range(2):
        assert grid.pull_messages(["another"]) == []
    assert link.confirmed == [parcel.tree.object_id]


def test_errors_are_in_the_envelope(grid: RuntimeGrid, link: FakeSuperLink):
    """Flower's own, as that a node is gone, and a site's."""
    names = grid.push_messages([task_of(10)])
    parcel = reply_to(link, Error(code=5, reason="gone"), whole=False)
    link.answer(parcel)
    (answer,) = grid.pull_messages(names)
    assert (answer.error.code, answer.error.reason) == (5, "gone")


@pytest.mark.parametrize(("spoil", "code"), [("withhold", 3), ("garble", 2)])
def test_site_that_pushes_nonsense_fails_alone(
    grid: RuntimeGrid, link: FakeSuperLink, spoil: str, code: int
):
    """Objects that never come, and such as are no message: the site's failure."""
    names = grid.push_messages([task_of(10)])
    parcel = reply_to(link, flower_site.pack_bytes(b"x"), whole=False)
    link.answer(parcel)
    if spoil == "withhold":
        link.awaited.clear()
    else:
        link.objects |= dict.fromkeys(parcel.objects, b"Message,,3\0abc")
    (answer,) = grid.pull_messages(names)
    assert answer.error.code == code
    assert answer.metadata.reply_to_message_id == names[0]


def test_root_of_the_tree_is_not_believed(grid: RuntimeGrid, link: FakeSuperLink):
    """A site could name another's question there; the SuperLink has not read it."""
    names = grid.push_messages([task_of(10)])
    parcel = reply_to(link, flower_site.pack_bytes(b"x"), whole=False)
    link.answer(parcel)
    root = parcel.objects[parcel.tree.object_id]
    root.metadata.__dict__["_reply_to_message_id"] = "another"  # type: ignore[attr-defined]
    link.receive(parcel)
    (answer,) = grid.pull_messages(names)
    assert answer.metadata.reply_to_message_id == names[0]


def test_other_grids_stay_as_they_are():
    """A simulation has no SuperLink."""
    other: Any = object()
    assert flower_runtime.over(other) is other


def test_error_of_the_superlink_says_where_to_look():
    """The coordinator's notice quotes it, to who watches a run on a full disk."""

    class Full(FakeSuperLink):
        def PullMessages(self, request: Any) -> Any:  # noqa: N802
            del request
            asked = httpx.Request("POST", "https://127.0.0.1/v1/pull")
            httpx.Response(500, request=asked).raise_for_status()

    grid = RuntimeGrid(Full())  # type: ignore[arg-type]
    with pytest.raises(SuperLinkFailed, match=r"HTTP 500.*disk is full") as told:
        grid.pull_messages(["one"])
    assert "\n" not in str(told.value)
