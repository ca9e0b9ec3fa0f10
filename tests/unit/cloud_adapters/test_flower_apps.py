"""Apps of Flower on the grid of ours, beside a node that speaks our format."""

import gc
import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from support import toy, toy_sites

from cloud_adapters.flower import simulation as flower_simulation
from federation.clock import VirtualClock
from federation.errors import SiteError
from federation.ids import SiteId
from federation.job import job_file
from federation.job.spec import JobSpec
from federation.messages import (
    FailureKind,
    MetricSums,
    Reply,
    RoundTask,
    SecureStep,
    SecureTask,
    SiteEvaluation,
    SiteFailure,
    SiteUpdate,
    TaskKind,
)
from federation.rounds.gather import exchange

if importlib.util.find_spec("flwr") is None:
    pytest.skip("the flower extra is not installed", allow_module_level=True)
flower_simulation.import_flower()

from flwr.app import (  # noqa: E402
    ArrayRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp  # noqa: E402
from flwr.supercore.task_identity import TaskIdentity  # noqa: E402

from cloud_adapters.flower import site as flower_site  # noqa: E402
from cloud_adapters.flower.grid import Delivery, FlowerGrid  # noqa: E402
from cloud_adapters.flower.handshake import Attendance  # noqa: E402
from cloud_adapters.flower.private.messages import NodeInfo  # noqa: E402
from cloud_adapters.flower_apps.apps import FlowerApps  # noqa: E402
from cloud_adapters.transport.frames import INLINE, Frames  # noqa: E402

pytestmark = pytest.mark.flower

OURS, LAB = SiteId("ours"), SiteId("lab")
NODES = {OURS: 10, LAB: 20}
LAYOUT = toy.LAYOUT
REPLY_GONE, NODE_GONE, APP_RAISED = 4, 5, 2


def job(**app: Any) -> JobSpec:
    """A job of a site of ours and a laboratory."""
    return job_file.parse(
        {
            "name": "mixed",
            "rounds": 1,
            "model": {"factory": "a:b"},
            "data": {"source": "a:b"},
            "training": {"local_epochs": 2, "optimizer": {"lr": 0.5}},
            "sites": [{"name": OURS}, {"name": LAB, "flower_app": app}],
        }
    )


def task(site: SiteId = LAB, **fields: Any) -> RoundTask:
    """A task with a model of ones."""
    return RoundTask(
        **{
            "run_id": toy.RUN,
            "round_index": 3,
            "site": site,
            "kind": TaskKind.TRAIN,
            "layout_digest": LAYOUT.digest,
            "weights_d": np.ones(LAYOUT.size, dtype=np.float32),
            "integers_m": np.array([7, 1], dtype=np.int64),
            "evaluate": True,
            "evaluate_after": False,
            **fields,
        }
    )


app = ClientApp()


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Add the learning rate to every weight."""
    lr = msg.content["config"]["lr"]
    arrays = [
        array + lr if array.dtype.kind == "f" else array
        for array in msg.content["arrays"].to_numpy_ndarrays()
    ]
    content = RecordDict({"arrays": ArrayRecord(list(map(np.asarray, arrays)))})
    content["metrics"] = MetricRecord({"num-examples": 8, "train_loss": 1.5})
    return Message(content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    """Find that half of four are right."""
    metrics = {"num-examples": 4, "eval_loss": 0.25, "eval_acc": 0.5}
    return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=msg)


@dataclass
class Nodes:
    """Flower with two nodes; each answers one message at every look.

    Attributes:
        online: Who is connected.
        spoil: Changes what the laboratory answers.
        sent: Every message.
        full: Whether messages are not taken.
        mute: Whether nobody answers.
    """

    online: set[int] = field(default_factory=lambda: set(NODES.values()))
    spoil: Callable[[Message], Message] = lambda message: message
    sent: list[Message] = field(default_factory=list)
    full: bool = False
    mute: bool = False
    _open: dict[str, Message] = field(default_factory=dict)

    def get_node_ids(self) -> Iterable[int]:
        return self.online

    def get_nodes(self) -> Sequence[NodeInfo]:
        """As a stock node, which announces 30 s, and one of ours."""
        far = 1e6
        return [
            NodeInfo(node_id=n, online_until=far, heartbeat_interval=30.0)
            for n in self.online
        ]

    def push_messages(self, messages: Iterable[Message]) -> list[str | None]:
        if self.full:
            return [None]
        return [self._take(message) for message in messages]

    def _take(self, message: Message) -> str:
        name = f"m{len(self.sent)}"
        message.metadata.__dict__["_message_id"] = name
        self.sent.append(message)
        node = message.metadata.dst_node_id
        if node == NODES[OURS]:
            answer = flower_site.client_app(toy_sites.echo_site)(message, None)
        else:
            answer = self.spoil(app(message, None))
        self._open[name] = answer
        return name

    def pull_messages(self, names: Iterable[str]) -> list[Message]:
        asked = list(names)
        assert set(asked) <= self._open.keys(), "asked twice for one answer"
        return [self._open.pop(name) for name in asked[:1] if not self.mute]


@pytest.fixture
def nodes() -> Nodes:
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    return Nodes()


def grid(
    nodes: Nodes,
    spec: JobSpec | None = None,
    *,
    clock: VirtualClock | None = None,
    frames: Frames = INLINE,
    **changes: Any,
) -> FlowerGrid:
    """The grid that a coordinator makes; nobody is asked who it is."""
    apps = FlowerApps(nodes, spec or job(), LAYOUT, NODES)
    return FlowerGrid(
        apps,
        [OURS, LAB],
        clock=clock or VirtualClock(),
        attendance=Attendance(handshake=Silence(), known=NODES, **changes),
        delivery=Delivery(job_text="job", frames=frames),
    )


class Silence:
    """A handshake that is not to happen."""

    absent: Mapping[SiteId, str] = MappingProxyType({})

    @property
    def question(self) -> bytes:
        raise AssertionError

    def site_of(self, answer: bytes) -> SiteId:
        raise AssertionError(answer)

    def move_on(self) -> bool:
        """There is no second question either."""
        return False


def ask(grid: FlowerGrid, *tasks: RoundTask, seconds: float = 60.0) -> list[Reply]:
    """What comes back."""
    return list(exchange(grid, tasks, deadline_seconds=seconds))


def answer_of(replies: list[Reply], site: SiteId = LAB) -> Any:
    """The one message of a site."""
    (message,) = (r.message for r in replies if r.message.site == site)
    return message


def test_sites_of_both_kinds_answer(nodes: Nodes):
    """One exchange, one answer each; the app's two messages are one of them."""
    replies = ask(grid(nodes), task(OURS), task(LAB))
    assert isinstance(answer_of(replies, OURS), SiteUpdate)
    update = answer_of(replies)
    assert isinstance(update, SiteUpdate)
    assert update.delta_d.tolist() == [0.5] * LAYOUT.size
    assert update.integers_m.tolist() == [7, 1]
    assert update.num_examples == 8
    assert update.training == MetricSums(count=8, loss_sum=12.0, metrics={"correct": 0})
    assert update.evaluation == MetricSums(
        count=4, loss_sum=1.0, metrics={"correct": 2}
    )
    assert len(replies) == 2
    assert all(reply.bytes_up > 0 for reply in replies)


def test_app_is_asked_in_its_own_words(nodes: Nodes):
    """Two messages of the round, with the job's settings and no bytes of ours."""
    content = []
    nodes.spoil = lambda reply: content.append(nodes.sent[-1].content) or reply  # type: ignore[redundant-expr]
    ask(grid(nodes, job(settings={"mode": "slow"})), task())
    kinds = [(m.metadata.message_type, m.metadata.group_id) for m in nodes.sent]
    assert kinds == [("evaluate", "3"), ("train", "3")]
    assert [set(each) for each in content] == [{"arrays", "config"}] * 2
    assert dict(content[1]["config"]) == {
        "server-round": 3,
        "lr": 0.5,
        "batch-size": 32,
        "local-epochs": 2,
        "mode": "slow",
    }


def test_model_is_not_kept_while_the_app_works(nodes: Nodes):
    """A round's memory does not grow with the number of apps."""
    ask(grid(nodes), task())
    assert not any(len(message.content) for message in nodes.sent)


def test_evaluation_alone(nodes: Nodes):
    """As after the last round."""
    found = answer_of(ask(grid(nodes), task(kind=TaskKind.EVALUATE)))
    assert isinstance(found, SiteEvaluation)
    assert found.evaluation.accuracy == 0.5


@pytest.mark.parametrize("who", ["job", "round"])
def test_app_that_does_not_evaluate(nodes: Nodes, who: str):
    """Neither by the job's word nor in a round without evaluation."""
    spec = job(evaluate=who != "job")
    update = answer_of(ask(grid(nodes, spec), task(evaluate=who != "round")))
    assert isinstance(update, SiteUpdate)
    assert update.evaluation is None
    assert [m.metadata.message_type for m in nodes.sent] == ["train"]


def test_hostile_answer_is_refused(nodes: Nodes):
    """The reply names the site and says what is wrong."""
    nodes.spoil = lambda _: Message(RecordDict(), reply_to=nodes.sent[-1])
    failure = answer_of(ask(grid(nodes), task()))
    assert isinstance(failure, SiteFailure)
    assert failure.kind is FailureKind.INVALID
    assert failure.message.startswith("its answer has no record of metrics")


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (APP_RAISED, FailureKind.CRASHED),
        (NODE_GONE, FailureKind.DISCONNECTED),
        (REPLY_GONE, FailureKind.UNREACHABLE),
    ],
)
@pytest.mark.parametrize("part", ["train", "evaluate"])
def test_error_of_either_part_fails_the_task(
    nodes: Nodes, part: str, code: int, kind: FailureKind
):
    """With Flower's reason and the part's name."""

    def spoil(reply: Message) -> Message:
        error = Error(code=code, reason="because")
        here = reply.metadata.message_type == part
        return Message(error, reply_to=nodes.sent[-1]) if here else reply

    nodes.spoil = spoil
    failure = answer_of(ask(grid(nodes), task()))
    assert isinstance(failure, SiteFailure)
    assert failure.kind is kind
    assert failure.message == f"asked to {part}: Flower error {code}: because"


def test_message_that_is_not_taken(nodes: Nodes):
    """As with every other node."""
    built = grid(nodes)
    nodes.full = True
    assert answer_of(ask(built, task())).kind is FailureKind.UNREACHABLE


def test_round_begins_without_an_app_that_is_not_connected(nodes: Nodes):
    """If the job's quorum allows it; the app is not there for the run."""
    nodes.online = {NODES[OURS]}
    built = grid(nodes, required=1, quorum=1, connect_seconds=1.0)
    assert answer_of(ask(built, task())).kind is FailureKind.UNREACHABLE
    with pytest.raises(SiteError, match="lab is not connected"):
        grid(nodes, connect_seconds=1.0, enrolled=NODES)


def test_stock_node_is_not_silent_between_its_heartbeats(nodes: Nodes):
    """It sends one in 20 s or so, and not in 3 s as ours do."""
    clock = VirtualClock()
    built = grid(nodes, clock=clock)
    clock.sleep(1e6 - 61)  # Its last heartbeat was a second ago; for ours 41 s.
    clock.sleep(40)
    assert isinstance(answer_of(ask(built, task())), SiteUpdate)


def test_frame_of_a_large_model_stays_in_the_message(nodes: Nodes):
    """An app cannot fetch from a store; it has none."""
    small = Frames(threshold_bytes=16)  # And no store: others would be refused.
    assert isinstance(answer_of(ask(grid(nodes, frames=small), task())), SiteUpdate)


def test_secure_task_never_reaches_an_app(nodes: Nodes):
    """Such jobs are refused; this is for a mistake of ours."""
    step = SecureTask(
        run_id=toy.RUN, round_index=0, site=LAB, step=SecureStep.ADVERTISE, body=b"x"
    )
    with pytest.raises(TypeError, match="cannot answer SecureTask"):
        ask(grid(nodes), step)  # type: ignore[arg-type]
    assert nodes.sent == []


def test_stock_node_is_not_asked_after_a_question(nodes: Nodes):
    """It would start a process for each time, and answer with an error."""
    nodes.mute = True
    failure = answer_of(ask(grid(nodes), task(), seconds=120.0))
    assert failure.kind is FailureKind.DEADLINE
    kinds = [message.metadata.message_type for message in nodes.sent]
    assert kinds == ["evaluate", "train"]


def test_question_without_an_answer_does_not_keep_its_model(nodes: Nodes):
    """A site that is away would cost a model a round; an answer too late is none."""
    built = grid(nodes)
    nodes.mute = True
    ask(built, task(round_index=1), seconds=20.0)
    nodes.mute = False
    assert len(ask(built, task(round_index=2))) == 1
    gc.collect()
    tasks = [o for o in gc.get_objects() if type(o) is RoundTask]
    assert not [o.site for o in tasks if o.site == LAB]


def test_second_question_of_one_task_is_one_more(nodes: Nodes):
    """A task that is sent again has answers of its own."""
    built = grid(nodes)
    first = answer_of(ask(built, task()))
    again = answer_of(ask(built, replace(task(), round_index=4)))
    assert (first.round_index, again.round_index) == (3, 4)
    assert len(nodes.sent) == 4
