"""The questions of one batch of tasks over Flower, and the messages that carry them.

A question may be out in several messages: as it was sent first, sent again, and asked
after. The first answer to any of them counts.
"""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from cloud_adapters.transport.redelivery import Inquiry, new_name
from federation.ids import TaskId
from federation.messages import (
    RelayedTasks,
    Reply,
    RoundMessage,
    RoundTask,
    SiteFailure,
    SiteMessage,
    Task,
    TaskKind,
)

# What a node is asked: a site, or a relay for its sites.
Asked = Task | RelayedTasks
# Answers that may be held back for one that is due before them.
MAX_AHEAD = 64
MAX_AHEAD_BYTES = 64 << 20


@dataclass(slots=True, kw_only=True)
class QuestionNote:
    """What is remembered of a closed question: no weights.

    Attributes:
        task_id: Which question.
        about: The run, the round and the site.
        asked_seconds: When, on the monotonic clock.
        bytes_down: Bytes sent to the site for it.
        is_answered: Whether an answer has come; any further one is dropped.
    """

    task_id: TaskId
    about: RoundMessage
    asked_seconds: float
    bytes_down: int
    is_answered: bool = False

    def reply(
        self,
        message: SiteMessage,
        *,
        answered_seconds: float,
        bytes_up: int = 0,
        following: tuple[SiteMessage, ...] = (),
    ) -> Reply:
        """The reply, with the bytes that were sent."""
        return Reply(
            task_id=self.task_id,
            message=message,
            asked_seconds=self.asked_seconds,
            answered_seconds=answered_seconds,
            bytes_down=self.bytes_down,
            bytes_up=bytes_up,
            following=following,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """An open task.

    Attributes:
        index: Its place among the tasks of its batch.
        name: The same in every message that is about it.
        task: What is asked.
        asked: What outlives the question.
        inquiry: When to ask for its state; None where nothing is lost.
    """

    index: int
    name: str
    task: Asked
    asked: QuestionNote
    inquiry: Inquiry | None

    @property
    def kind(self) -> TaskKind:
        """Its kind in Flower: steps of secure aggregation belong to training."""
        task = _first(self.task)
        return task.kind if isinstance(task, RoundTask) else TaskKind.TRAIN

    @classmethod
    def of(
        cls,
        task: Asked,
        index: int,
        now: float,
        inquiry: Inquiry | None,
        *,
        task_id: TaskId,
        oldest_open: int,
    ) -> "Question":
        """Name a task to be sent now; see ``new_name``."""
        asked = QuestionNote(
            task_id=task_id,
            about=RoundMessage(
                run_id=task.run_id, round_index=task.round_index, site=task.site
            ),
            asked_seconds=now,
            bytes_down=0,
        )
        name = new_name(task.round_index, min(oldest_open, task.round_index))
        return cls(index=index, name=name, task=task, asked=asked, inquiry=inquiry)


@dataclass(frozen=True, slots=True, kw_only=True)
class Out:
    """A message that may bring an answer.

    Attributes:
        question: What it is about.
        probed_seconds: When the message probed for the question; None if the message
            is the question.
    """

    question: Question
    probed_seconds: float | None = None


@dataclass(slots=True, kw_only=True)
class Batch:
    """The open tasks of one call of ``FlowerGrid.send``.

    Attributes:
        task_ids: IDs of its tasks, by their places.
        deadline_seconds: How long a site may take.
        waiting: Tasks that have not gone out, with their places.
        ahead: How far they may go out ahead of the next one to be handed on.
        ordered: Whether replies are handed on in the order of the tasks.
        open: Questions without an answer, by their places.
        left: What sites said that left in the middle of an open question, and may be
            back in time, by its place.
        out: Messages to which a reply may come, by their ids.
        landed: What is to be handed on, by its place; None for a task that was
            withdrawn.
        next_index: Place of the next one, where order is kept.
        num_answered: How many sites have done their tasks.
    """

    task_ids: Sequence[TaskId]
    deadline_seconds: float
    waiting: deque[tuple[int, Asked]]
    ahead: float
    ordered: bool
    open: dict[int, Question] = field(default_factory=dict)
    left: dict[int, SiteFailure] = field(default_factory=dict)
    out: dict[str, Out] = field(default_factory=dict)
    landed: dict[int, Reply | None] = field(default_factory=dict)
    next_index: int = 0
    num_answered: int = 0

    def is_open(self) -> bool:
        """Whether an answer is still to come or to be passed on."""
        return bool(self.waiting or self.open or self.landed)

    def rounds(self) -> set[int]:
        """Rounds whose tasks still wait for an answer."""
        tasks = [question.task for question in self.open.values()]
        return {task.round_index for task in (*tasks, *(t for _, t in self.waiting))}

    def awaits_left(self, quorum: int) -> bool:
        """Whether sites that have left may still be awaited.

        While others work, or if so many answers as the quorum can only be had with
        theirs.
        """
        if self.waiting or not self.open.keys() <= self.left.keys():
            return True
        needed = min(quorum, len(self.task_ids))
        return self.num_answered < needed <= self.num_answered + len(self.left)

    def settle(self, question: Question, reply: Reply) -> dict[str, QuestionNote]:
        """Stop waiting for a question.

        Returns:
            Its messages that may still be replied to.
        """
        self.landed[question.index] = reply
        self.num_answered += not isinstance(reply.message, SiteFailure)
        return self._leave(question)

    def withdraw(
        self, task_ids: Collection[TaskId]
    ) -> list[tuple[QuestionNote, Collection[str]]]:
        """Close tasks.

        Returns:
            Each that was sent, and its messages that may still be replied to.
        """
        found = [i for i, task_id in enumerate(self.task_ids) if task_id in task_ids]
        places = {i for i in found if i >= self.next_index}
        self.waiting = deque(one for one in self.waiting if one[0] not in places)
        self.landed |= dict.fromkeys(places)
        questions = [self.open[place] for place in places & self.open.keys()]
        return [(one.asked, self._leave(one).keys()) for one in questions]

    def _leave(self, question: Question) -> dict[str, QuestionNote]:
        self.open.pop(question.index, None)
        self.left.pop(question.index, None)
        left = [name for name, out in self.out.items() if out.question is question]
        return {name: self.out.pop(name).question.asked for name in left}

    def ready(self) -> list[Reply]:
        """Remove and return the replies that may be passed on."""
        if not self.ordered:
            found = [*self.landed.values()]
            self.landed.clear()
        else:
            found = []
            while self.next_index in self.landed:
                found.append(self.landed.pop(self.next_index))
                self.next_index += 1
        return [reply for reply in found if reply is not None]


def _first(asked: Asked) -> Task:
    """The task, or the first of several, which are of one kind."""
    return asked.tasks[0] if isinstance(asked, RelayedTasks) else asked


def num_ahead(tasks: Sequence[Asked]) -> int:
    """Answers that memory allows to hold back."""
    first = map(_first, tasks)
    models = (t.weights_d.nbytes for t in first if isinstance(t, RoundTask))
    largest = max(models, default=0)
    return min(MAX_AHEAD, MAX_AHEAD_BYTES // max(largest, 1))
