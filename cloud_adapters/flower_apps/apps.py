"""Nodes that run existing apps, on a grid where every node uses our format.

The grid sends such a node a task as to any other; here it becomes the messages that an
app of Flower knows, and their answers become one answer of ours. Evaluation is a
message of its own there: a task that asks for both becomes two, and its answer is
complete with the second. Translation itself is in ``flower_records``.

A stock node works on one message at a time, in a process of its own for each: it is not
asked after a question. If a message
is lost without notice, the round waits for it until the deadline.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid as FlowerApi

from cloud_adapters.flower import (
    errors as flower_errors,
    records as flower_records,
    site as flower_site,
)
from federation.errors import InvalidUpdate
from federation.ids import SiteId
from federation.job.flower_app_job import FlowerAppSpec
from federation.job.metrics import Metric, metrics_of
from federation.job.spec import JobSpec
from federation.messages import (
    FailureKind,
    MetricSums,
    RoundTask,
    SiteFailure,
    SiteMessage,
    TaskKind,
)
from federation.rounds.failures import failure
from federation.vectors import Layout
from federation.wire import frame as wire


@dataclass(frozen=True, slots=True, kw_only=True)
class _App:
    """A node's app: its names, the job's metrics, and what is sent with the model."""

    spec: FlowerAppSpec
    metrics: Mapping[str, Metric]
    settings: Mapping[str, bool | int | float | str]


@dataclass(slots=True, kw_only=True)
class _AppQuestion:
    """A task that was sent to an app, in one message or two.

    Attributes:
        task: What was asked.
        app: Its names.
        last: The message that the grid knows the question by; its content is gone.
        parts: What each message asks, by its id.
        answers: To some or all of them.
    """

    task: RoundTask
    app: _App
    last: Message
    parts: Mapping[str, TaskKind]
    answers: dict[TaskKind, Message] = field(default_factory=dict)

    def open_parts(self) -> list[str]:
        """Messages without an answer."""
        return [name for name, kind in self.parts.items() if kind not in self.answers]


class FlowerApps(FlowerApi):
    """Flower's grid, with a translation for the nodes of apps."""

    def __init__(
        self, api: FlowerApi, job: JobSpec, layout: Layout, nodes: Mapping[SiteId, int]
    ) -> None:
        """Speak for the nodes of a job's apps.

        Args:
            api: Flower's own grid.
            job: Says what each app calls things.
            layout: Layout of the run's model.
            nodes: The node of each site that runs an app and takes part.
        """
        self._api = api
        self._layout = layout
        self._apps = {
            nodes[SiteId(site.name)]: _App(
                spec=site.flower_app,
                metrics=metrics_of(job.training),
                settings=flower_records.settings_of(site.flower_app, job.training),
            )
            for site in job.sites
            if site.flower_app is not None and site.name in nodes
        }
        self._questions: dict[str, _AppQuestion] = {}
        self._newest: dict[int, str] = {}

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages, to apps in Flower's format; an id is empty for a failure."""
        messages = [*messages]
        apps = [self._apps.get(each.metadata.dst_node_id) for each in messages]
        ours = [m for m, app in zip(messages, apps, strict=True) if app is None]
        taken = iter(self._api.push_messages(ours) if ours else ())
        ids: list[str] = []
        for message, app in zip(messages, apps, strict=True):
            if app is None:
                ids.append(next(taken, ""))
            elif message.metadata.message_type != flower_site.PROBE:
                ids += self._ask(message, app) or [""]
            else:
                ids.append("")
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Fetch answers; those of apps in our format, when they are complete."""
        wanted: list[str] = []
        parts: dict[str, str] = {}
        for name in message_ids:
            question = self._questions.get(name)
            mine = [name] if question is None else question.open_parts()
            parts |= dict.fromkeys(mine, name) if question is not None else {}
            wanted += mine
        ready = []
        for message in self._api.pull_messages(wanted):
            part = message.metadata.reply_to_message_id
            if part not in parts:
                ready.append(message)
            elif self._note(self._questions[parts[part]], part, message):
                ready.append(_answer(self._questions.pop(parts[part]), self._layout))
        return ready

    def get_node_ids(self) -> Iterable[int]:
        """See Flower's grid."""
        return self._api.get_node_ids()

    def get_nodes(self) -> Iterable[Any]:
        """See Flower's grid."""
        return self._api.get_nodes()

    def set_run(self, run: Any) -> None:
        """See Flower's grid."""
        self._api.set_run(run)

    @property
    def run(self) -> Any:
        """See Flower's grid."""
        return self._api.run

    def create_message(self, *arguments: Any, **named: Any) -> Message:
        """See Flower's grid."""
        return self._api.create_message(*arguments, **named)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Refuse: answers are pulled as they arrive."""
        raise NotImplementedError

    def _ask(self, message: Message, app: _App) -> Sequence[str]:
        task = wire.decode(flower_site.unpack(message.content))
        if not isinstance(task, RoundTask):  # Jobs that would ask for it are refused.
            raise TypeError(f"a Flower app cannot answer {type(task).__name__}")
        content = flower_records.instruction(task, self._layout, app.spec, app.settings)
        messages = {
            kind: Message(
                content,
                message.metadata.dst_node_id,
                kind.value,
                ttl=message.metadata.ttl,
                group_id=str(task.round_index),  # As Flower's strategies have it.
            )
            for kind in _kinds(task, app.spec)
        }
        # One by one: if Flower rejects some of several, it only leaves gaps.
        parts: dict[str, TaskKind] = {}
        for kind, part in messages.items():
            taken = [name for name in self._api.push_messages([part]) if name]
            if not taken:
                return []
            parts[taken[0]] = kind
            part.content = RecordDict()  # The model is no longer needed.
        *_, name = parts
        # An answer to the one before would come too late, and it holds a model.
        node = message.metadata.dst_node_id
        self._questions.pop(self._newest.get(node, ""), None)
        self._newest[node] = name
        self._questions[name] = _AppQuestion(
            task=task,
            app=app,
            last=messages[task.kind],
            parts=parts,
        )
        return [name]

    def _note(self, question: _AppQuestion, part: str, message: Message) -> bool:
        """Keep an answer to a part; return whether it was the last one."""
        question.answers[question.parts[part]] = message
        return not question.open_parts()


def _kinds(task: RoundTask, spec: FlowerAppSpec) -> Sequence[TaskKind]:
    """The requests to the app; the task's own kind comes last."""
    if task.kind is TaskKind.TRAIN and task.evaluate and spec.evaluate:
        return (TaskKind.EVALUATE, TaskKind.TRAIN)
    return (task.kind,)


def _answer(question: _AppQuestion, layout: Layout) -> Message:
    try:
        found = _error(question) or _read(question, layout)
    except InvalidUpdate as error:
        found = failure(question.task, FailureKind.INVALID, str(error))
    return Message(flower_site.pack_answer(found), reply_to=question.last)


def _error(question: _AppQuestion) -> SiteFailure | None:
    """The error in place of an answer to either part, or None."""
    for kind, message in question.answers.items():
        if message.has_error():
            told = flower_errors.failure_of(question.task, message)
            text = f"asked to {kind.value}: {told.message}"
            return failure(question.task, told.kind, text)
    return None


def _read(question: _AppQuestion, layout: Layout) -> SiteMessage:
    task, app, answers = question.task, question.app, question.answers
    evaluation: MetricSums | None = None
    if TaskKind.EVALUATE in answers:
        content = answers[TaskKind.EVALUATE].content
        read = flower_records.read_evaluation(
            content, task, app.spec, wanted=app.metrics
        )
        if task.kind is TaskKind.EVALUATE:
            return read
        evaluation = read.evaluation
    content = answers[TaskKind.TRAIN].content
    return flower_records.read_update(
        content, task, layout, app.spec, evaluation, wanted=app.metrics
    )
