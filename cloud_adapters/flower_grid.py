"""The grid over Flower: tasks become Flower messages, answers become replies.

What is lost on the way is asked after, and sent again: see ``redelivery``. Byte counts
are those of the wire format, without Flower's own; what travels through a store instead
is among them.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid as FlowerApi

from cloud_adapters import flower_errors, flower_site
from cloud_adapters.flower_answers import Answers
from cloud_adapters.flower_presence import Presence
from cloud_adapters.flower_questions import Asked, Exchange, Out, Question, num_ahead
from cloud_adapters.flower_roll_call import ANYBODY, Attendance
from cloud_adapters.frame_references import Packed
from cloud_adapters.frames import INLINE, Frames
from cloud_adapters.redelivery import Inquiry, Word
from federation.errors import FederationError, StoreError
from federation.failures import failure
from federation.ids import RunId, SiteId
from federation.messages import (
    FailureKind,
    Reply,
    SiteFailure,
    SiteMessage,
    Task,
)
from federation.protocols import Clock

POLL_SECONDS = 0.02
# Over a SuperLink, which works for 10 ms on every look, while sites wait for it.
SUPERLINK_POLL_SECONDS = 0.1
# An answer stays with Flower for this long after its deadline, so that a late one
# is seen to be late, and then is deleted.
LATE_SECONDS = 60.0
# Tasks per shared process that are out at the same time: one waits in the process's
# queue while it works on another.
QUEUE = 2
# Flower's own delays, where nodes share processes.
GRACE_SECONDS = 2.0
# A look for answers that took so long has fetched vectors.
LONG_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """How tasks travel, and their answers.

    Attributes:
        job_text: Handed to every site with its tasks; empty where sites know it.
        frames: How large messages travel; all in one piece by default.
        ordered: Yield replies in the order of the tasks, so that sums of floating-point
            updates are the same in every run; otherwise, and where memory does not
            allow to hold all of them back, as they arrive.
        workers: Processes that the nodes share, as in a simulation: a task's deadline
            then counts from when a process takes it up. None if every node has a
            process of its own: it counts from when the task goes out.
        poll_seconds: Pause between two looks for replies.
    """

    job_text: str = ""
    frames: Frames = INLINE
    ordered: bool = False
    workers: int | None = None
    poll_seconds: float = POLL_SECONDS

    @property
    def is_simulated(self) -> bool:
        """Whether nodes share processes, on the machine of the coordinator."""
        return self.workers is not None

    @property
    def max_in_flight(self) -> float:
        """Tasks that are out at the same time."""
        return math.inf if self.workers is None else QUEUE * self.workers


class FlowerGrid:
    """The sites as nodes of a Flower run."""

    def __init__(
        self,
        api: FlowerApi,
        sites: Sequence[SiteId],
        *,
        clock: Clock,
        attendance: Attendance = ANYBODY,
        delivery: Delivery = Delivery(),
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Find a node for each site, and have it ready for work.

        Args:
            api: Flower's own grid.
            sites: In the order of the job.
            clock: Measures deadlines and durations.
            attendance: Which nodes they are, and how many of them must be there.
            delivery: How tasks travel.
            stopped: Tells that Flower has ended and nothing more will come.

        Raises:
            SiteError: There are too few nodes in time, or one cannot run a site.
        """
        self._api = api
        self._sites = tuple(sites)
        self._clock = clock
        self._delivery = delivery
        self._stopped = stopped
        self._known = attendance.known
        self._answers = Answers(delivery.frames)
        self._tidied: tuple[RunId, int] | None = None
        # Messages for which nobody waits and whose replies are still to be taken in.
        self._late: dict[str, Asked] = {}
        self._presence = Presence(
            api,
            quorum=attendance.quorum,
            clock=clock,
            pause=self._pause,
            is_told=not delivery.is_simulated,
        )
        self._nodes = attendance.find_nodes(
            api, sites, workers=delivery.workers, clock=clock, pause=self._pause
        )

    def sites(self) -> Sequence[SiteId]:
        """Every site, in the order of the job."""
        return self._sites

    def exchange(
        self, tasks: Sequence[Task], *, deadline_seconds: float
    ) -> Iterator[Reply]:
        """Send tasks and yield what comes back.

        Answers to earlier exchanges that missed their deadline come as they arrive.

        Raises:
            ValueError: A task is for a site that the grid does not have.
            FederationError: Flower has ended.
        """
        unknown = [task.site for task in tasks if task.site not in self._sites]
        if unknown:
            raise ValueError(f"the grid has no sites {unknown}")
        self._tidy(tasks)
        ordered, ahead = self._delivery.ordered, math.inf
        if ordered:
            num_held = num_ahead(tasks)
            ahead = self._delivery.max_in_flight + num_held
            # Without shared processes all tasks go out at once, and all answers may
            # have to wait for the first.
            ordered = self._delivery.is_simulated or len(tasks) <= num_held
        exchange = Exchange(
            deadline_seconds=deadline_seconds,
            waiting=deque(enumerate(tasks)),
            ahead=ahead,
            ordered=ordered,
        )
        return self._run(exchange)

    def _run(self, exchange: Exchange) -> Iterator[Reply]:
        sites = {task.site for _, task in exchange.waiting} & self._nodes.keys()
        nodes = {self._nodes[site] for site in sites}
        self._presence.await_return(nodes, exchange.deadline_seconds)
        try:
            while exchange.is_open():
                self._push(exchange)
                late = self._pull_all(exchange)
                self._expire(exchange)
                self._give_up_silent(exchange)
                self._ask_after(exchange)
                ready = [*late, *exchange.ready()]
                yield from ready
                if not ready and exchange.is_open():
                    self._pause()
        finally:
            self._late |= {name: o.question.asked for name, o in exchange.out.items()}

    def _push(self, exchange: Exchange) -> None:
        while exchange.waiting and len(exchange.open) < self._delivery.max_in_flight:
            index, task = exchange.waiting[0]
            if index >= exchange.next_index + exchange.ahead:
                return
            exchange.waiting.popleft()
            packed = self._pack(task)
            now = self._clock.monotonic()
            # A simulation's messages do not leave this machine.
            inquiry = None if self._delivery.is_simulated else Inquiry(now)
            question = Question.of(task, index, now, inquiry)
            exchange.open[index] = question
            self._send(exchange, question, packed)

    def _send(
        self, exchange: Exchange, question: Question, packed: Packed | SiteFailure
    ) -> None:
        """Send a question, for the first time or again."""
        if isinstance(packed, SiteFailure):
            self._settle(exchange, question, packed)
            return
        question.asked.bytes_down += packed.num_bytes
        content = flower_site.pack(
            packed.frame,
            site=question.task.site,
            job_text=self._delivery.job_text,
            deadline_seconds=self._seconds_left(exchange, question),
            references=packed.references,
        )
        out = Out(question=question)
        if not self._post(exchange, out, content, question.kind.value):
            text = "Flower did not take the message for its node"
            self._fail(exchange, question, FailureKind.UNREACHABLE, text)
        elif question.inquiry is not None:
            question.inquiry.note_sent(self._clock.monotonic())

    def _post(
        self, exchange: Exchange, out: Out, content: RecordDict, kind: str
    ) -> bool:
        """Give Flower a message that is about a question; say whether it took it."""
        question = out.question
        message = Message(
            content,
            self._nodes[question.task.site],
            kind,
            ttl=QUEUE * (self._seconds_left(exchange, question) + LATE_SECONDS),
            group_id=question.name,
        )
        for message_id in self._api.push_messages([message]):
            if message_id:
                exchange.out[message_id] = out
                return True
        return False

    def _seconds_left(self, exchange: Exchange, question: Question) -> float:
        passed = self._clock.monotonic() - question.asked.asked_seconds
        return max(exchange.deadline_seconds - passed, 1.0)

    def _ask_after(self, exchange: Exchange) -> None:
        """Ask sites what became of questions that have been out for long."""
        for question in [*exchange.open.values()]:
            now = self._clock.monotonic()
            if question.inquiry is not None and question.inquiry.is_due(now):
                self._probe(exchange, question, flower_site.PROBE)

    def _probe(self, exchange: Exchange, question: Question, kind: str) -> None:
        out = Out(question=question, probed_seconds=self._clock.monotonic())
        self._post(exchange, out, RecordDict(), kind)

    def _pack(self, task: Task) -> Packed | SiteFailure:
        if task.site not in self._nodes:
            return failure(task, FailureKind.UNREACHABLE, "was never there")
        try:
            frames = INLINE if task.site in self._known else self._delivery.frames
            return frames.send(task)
        except StoreError as error:
            text = f"the model does not get into the store: {error}"
            return failure(task, FailureKind.UNREACHABLE, text)

    def _tidy(self, tasks: Sequence[Task]) -> None:
        """Remove what earlier rounds have left in the store."""
        for task in tasks[:1]:  # All are of one round.
            now = task.run_id, task.round_index
            if self._tidied != now:
                self._tidied = now
                self._delivery.frames.end_rounds(now[0], self._sites, before=now[1])

    def _pull_all(self, exchange: Exchange) -> list[Reply]:
        """Take in what has arrived, also while vectors were being fetched.

        Or answers would miss their deadline because others are large.
        """
        late: list[Reply] = []
        while True:
            begin, num_open = self._clock.monotonic(), len(exchange.open)
            late += self._pull(exchange)
            is_new = len(exchange.open) < num_open
            if not is_new or self._clock.monotonic() - begin < LONG_SECONDS:
                return late

    def _pull(self, exchange: Exchange) -> list[Reply]:
        """Take in what has arrived; return the late answers among it."""
        late = []
        found = self._api.pull_messages([*exchange.out, *self._late])
        # Words last: one that tells of an answer may have come with it.
        for message in sorted(found, key=_is_word):
            message_id = message.metadata.reply_to_message_id
            if message_id in exchange.out:
                self._take_in(exchange, exchange.out.pop(message_id), message)
            elif message_id in self._late:
                late += self._take_in_late(self._late.pop(message_id), message)
        return late

    def _take_in(self, exchange: Exchange, out: Out, message: Message) -> None:
        question, inquiry = out.question, out.question.inquiry
        if message.has_error():
            if out.probed_seconds is not None:
                return  # It is asked after again.
            if inquiry is not None and message.error.code in flower_errors.LOST:
                inquiry.note_lost(self._clock.monotonic())
                return
            if message.error.code == flower_errors.NODE_GONE:
                self._presence.note_gone(self._nodes[question.task.site])
            told = flower_errors.failure_of(question.task, message)
            self._settle(exchange, question, told)
            return
        word = flower_site.read_word(message.content)
        if word is not None:
            self._take_word(exchange, out, word, is_again=not _is_word(message))
            return
        answer, bytes_up = self._answers.read(question.task, message)
        question.asked.is_answered = True
        self._settle(exchange, question, answer, bytes_up=bytes_up)

    def _take_word(
        self, exchange: Exchange, out: Out, word: Word, *, is_again: bool
    ) -> None:
        question, inquiry = out.question, out.question.inquiry
        if inquiry is None or out.probed_seconds is None:
            return  # A copy came there, of which nothing follows.
        if inquiry.is_missing(word, out.probed_seconds):
            self._send(exchange, question, self._pack(question.task))
        elif word is Word.ANSWERED and not is_again:
            self._probe(exchange, question, flower_site.AGAIN)

    def _take_in_late(self, asked: Asked, message: Message) -> list[Reply]:
        """The answer to a question for which nobody waits, if it is the first one."""
        if asked.is_answered or message.has_error():
            return []  # A failure was counted when the deadline passed.
        answer, bytes_up = self._answers.read_unfetched(asked, message)
        if isinstance(answer, SiteFailure):
            return []
        asked.is_answered = True
        now = self._clock.monotonic()
        return [asked.reply(answer, answered_seconds=now, bytes_up=bytes_up)]

    def _expire(self, exchange: Exchange) -> None:
        allowed = seconds = exchange.deadline_seconds
        if self._delivery.is_simulated:
            # The process keeps the deadline itself; this is for when it is gone.
            allowed = QUEUE * (seconds + GRACE_SECONDS)
        now = self._clock.monotonic()
        for question in [*exchange.open.values()]:
            if now - question.asked.asked_seconds >= allowed:
                text = f"gave no answer within {seconds:g} s"
                self._fail(exchange, question, FailureKind.DEADLINE, text)

    def _give_up_silent(self, exchange: Exchange) -> None:
        """Do not wait for nodes whose heartbeats have stopped."""
        silent = self._presence.silent(
            {self._nodes[one.task.site] for one in exchange.open.values()}
        )
        for question in [*exchange.open.values()]:
            if self._nodes[question.task.site] in silent:
                # How long that takes to be known is different for nodes of Flower's.
                text = "is not there any more: its heartbeats have stopped"
                self._fail(exchange, question, FailureKind.DISCONNECTED, text)

    def _fail(
        self, exchange: Exchange, question: Question, kind: FailureKind, text: str
    ) -> None:
        self._settle(exchange, question, failure(question.task, kind, text))

    def _settle(
        self,
        exchange: Exchange,
        question: Question,
        message: SiteMessage,
        *,
        bytes_up: int = 0,
    ) -> None:
        now = self._clock.monotonic()
        reply = question.asked.reply(message, answered_seconds=now, bytes_up=bytes_up)
        self._late |= exchange.settle(question, reply)

    def _pause(self, seconds: float | None = None) -> None:
        if self._stopped():
            raise FederationError("Flower has ended; no site will answer any more")
        self._clock.sleep(self._delivery.poll_seconds if seconds is None else seconds)


def _is_word(message: Message) -> bool:
    return message.metadata.message_type == flower_site.PROBE
