"""The grid over Flower: tasks become Flower messages, answers become replies.

Lost messages are probed for and sent again: see ``redelivery``. Byte counts
are those of the wire format, without Flower's own; what travels through a store instead
is among them.
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeGuard

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid as FlowerApi

from cloud_adapters.flower import errors as flower_errors, site as flower_site
from cloud_adapters.flower.answers import Answers
from cloud_adapters.flower.facts import Connected
from cloud_adapters.flower.handshake import ANYONE, Attendance
from cloud_adapters.flower.presence import Presence
from cloud_adapters.flower.questions import (
    Asked,
    Batch,
    Out,
    Question,
    QuestionNote,
    num_ahead,
)
from cloud_adapters.transport.frame_references import PackedFrame
from cloud_adapters.transport.frames import INLINE, Frames
from cloud_adapters.transport.redelivery import Inquiry, Word
from federation.errors import FederationError, StoreError
from federation.ids import RunId, SiteId, TaskId
from federation.messages import (
    FailureKind,
    RelayedTasks,
    Reply,
    RoundTask,
    SecureAnswer,
    SiteFailure,
    SiteMessage,
    TaskKind,
)
from federation.protocols import Clock
from federation.rounds.failures import failure, no_answer
from federation.wire.relayed import down_frames

POLL_SECONDS = 0.02
# Over a SuperLink, which works for 10 ms on every look that it does not hold back.
SUPERLINK_POLL_SECONDS = 0.1
# Tasks go to Flower together, as long as they are not larger than this.
TOGETHER_BYTES = 1 << 20
# An answer stays with Flower for this long after its deadline, so that a late one
# is seen to be late, and then is deleted.
LATE_SECONDS = 60.0
# The least time from an agent's last answer to the next agent of its site.
NEXT_SECONDS = 0.5
# Tasks per shared process that are out at the same time: one waits in the process's
# queue while it works on another.
QUEUE = 2
# Flower's own delays, where nodes share processes.
GRACE_SECONDS = 2.0
# A look for answers that took so long has fetched vectors.
LONG_SECONDS = 1.0
# What is known of a site that has ended its connection while it had no task.
TOOK_LEAVE = "took leave when it had no task, and is not back"


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
        poll_seconds: From one look for replies to the next, at the least.
        asks_again: Whether a site that left in the middle of a task, and is back while
            others still work or the round needs it, is asked once more.
    """

    job_text: str = ""
    frames: Frames = INLINE
    ordered: bool = False
    workers: int | None = None
    poll_seconds: float = POLL_SECONDS
    asks_again: bool = False

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
        attendance: Attendance = ANYONE,
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
        self._known, self._quorum = attendance.known, attendance.quorum
        self._tell, self._revoked = attendance.tell, attendance.revoked
        self._replicas = attendance.replicas
        self._answers = Answers(delivery.frames)
        # When the node of a site had been let in that was last asked something.
        self._activations: dict[SiteId, str | None] = {}
        # The last look for answers: when, whether long before this one, who was there.
        self._pulled, self._was_busy = -math.inf, False
        self._seen: dict[SiteId, str | None] = {}
        self._tidied: tuple[RunId, int] | None = None
        self._num_sent = 0
        self._batches: list[Batch] = []  # Those with a task that is open.
        # Messages whose tasks are closed and whose replies are still to be fetched.
        self._late: dict[str, QuestionNote] = {}
        self._presence = Presence(
            api,
            quorum=attendance.quorum,
            grace=attendance.grace,
            clock=clock,
            pause=self._pause,
            is_told=not delivery.is_simulated,
        )
        self._nodes, self._look_late = attendance.find_nodes(
            api, sites, workers=delivery.workers, clock=clock, pause=self._pause
        )

    def send(
        self, tasks: Sequence[Asked], *, deadline_seconds: float
    ) -> Sequence[TaskId]:
        """Open tasks; see ``Grid`` and ``RelayLines``.

        Waits for nodes that have just gone.

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
        task_ids = [TaskId(self._num_sent + index) for index in range(len(tasks))]
        self._num_sent += len(tasks)
        sites = {task.site for task in tasks} & self._nodes.keys()
        self._presence.await_return(
            self._awaited(sites - self._revoked()),
            deadline_seconds,
            partial(self._tell_awaited, tasks),
            round_index=tasks[0].round_index if tasks else 0,
        )
        activations = self._presence.activations()
        self._activations |= {s: activations.get(self._nodes[s]) for s in sites}
        self._seen |= {site: self._activations[site] for site in sites}
        batch = Batch(
            task_ids=task_ids,
            deadline_seconds=deadline_seconds,
            waiting=deque(enumerate(tasks)),
            ahead=ahead,
            ordered=ordered,
        )
        self._batches.append(batch)
        self._push(batch)
        return task_ids

    def receive(self, timeout_seconds: float | None = None) -> deque[Reply]:
        """Take in what comes; answers that missed their deadline come as they arrive.

        Raises:
            FederationError: Flower has ended.
        """
        end = math.inf
        if timeout_seconds is not None:
            end = self._clock.monotonic() + timeout_seconds
        while True:
            for batch in self._batches:
                self._push(batch)
            # Before the look for answers: one that leaves answers first.
            self._look_late()
            looked = self._clock.monotonic()
            silent = self._presence.silent({*self._nodes.values()})
            ready = deque(self._pull_all())
            for batch in self._batches:
                self._expire(batch)
                self._give_up_silent(batch, silent)
                self._ask_after(batch)
                self._ask_returned(batch)
                ready.extend(batch.ready())
            self._batches = [batch for batch in self._batches if batch.is_open()]
            if ready or self._clock.monotonic() >= end:
                return ready
            # Also if no task is open: the caller may pause before it sends one again.
            self._check_flower()
            if not self._batches:
                return ready
            now = self._clock.monotonic()
            # Our SuperLink holds a look back until there is an answer.
            pause = min(self._delivery.poll_seconds, end - now)
            self._pause(max(0.0, pause - (now - looked)))

    def withdraw(self, task_ids: Collection[TaskId]) -> Mapping[TaskId, int]:
        """Close tasks; a site that has not begun one learns of it by its next task."""
        closed: dict[TaskId, int] = {}
        for batch in self._batches:
            for asked, names in batch.withdraw(task_ids):
                closed[asked.task_id] = asked.bytes_down
                self._late |= dict.fromkeys(names, asked)
        return closed

    def returned(
        self,
        sites: Collection[SiteId],
        round_index: int,  # noqa: ARG002 -- of the seam
    ) -> Collection[SiteId]:
        """Sites whose node was accepted again after their last task."""
        let_in = self._presence.activations()
        now = {s: let_in.get(node) for s, node in self._nodes.items() if s in sites}
        return [s for s in now if now[s] not in {None, self._activations.get(s)}]

    def _awaited(self, sites: Collection[SiteId]) -> set[int]:
        """Nodes of sites, without those that are gone and whose replica is there."""
        asked = {self._nodes[site] for site in sites}
        silent = self._presence.silent(asked)
        for group in self._replicas:
            copies = {self._nodes[site] for site in sites if site in group}
            if not copies <= silent:
                asked -= copies & silent
        return asked

    def _tell_awaited(
        self, tasks: Sequence[Asked], silent: Collection[int], seconds: float
    ) -> None:
        """Report which sites tasks wait for before they go out."""
        missing = tuple(s for s, node in self._nodes.items() if node in silent)
        index = tasks[0].round_index
        found = Connected(
            there=tuple(site for site in self._nodes if site not in missing),
            missing=missing,
            seconds=seconds,
            absent=missing,
            what=f"round {index}" if index else "the setup of secure aggregation",
        )
        self._tell(found)

    def _push(self, batch: Batch) -> None:
        letters: list[tuple[Out, Message]] = []
        num_bytes = 0
        oldest = self._oldest_open() if batch.waiting else {}
        while batch.waiting and self._num_in_flight() < self._delivery.max_in_flight:
            index, task = batch.waiting[0]
            if index >= batch.next_index + batch.ahead:
                break
            batch.waiting.popleft()
            packed = self._pack(task)
            now = self._clock.monotonic()
            # A simulation's messages do not leave this machine.
            inquiry = None if self._delivery.is_simulated else Inquiry(now, index)
            task_id = batch.task_ids[index]
            question = Question.of(
                task,
                index,
                now,
                inquiry,
                task_id=task_id,
                oldest_open=oldest.get(task.site, task.round_index),
            )
            batch.open[index] = question
            letters += self._written(batch, question, packed)
            num_bytes += 0 if isinstance(packed, SiteFailure) else packed.num_bytes
            if num_bytes > TOGETHER_BYTES:
                self._post(batch, letters)
                letters, num_bytes = [], 0
        self._post(batch, letters)

    def _oldest_open(self) -> Mapping[SiteId, int]:
        """The first round of which each site has an open question."""
        found: dict[SiteId, int] = {}
        for batch in self._batches:
            for question in batch.open.values():
                site, index = question.task.site, question.task.round_index
                found[site] = min(index, found.get(site, index))
        return found

    def _num_in_flight(self) -> int:
        return sum(len(batch.open) for batch in self._batches)

    def _send(self, batch: Batch, question: Question) -> None:
        """Send a question again."""
        packed = self._pack(question.task)
        self._post(batch, self._written(batch, question, packed))

    def _written(
        self, batch: Batch, question: Question, packed: PackedFrame | SiteFailure
    ) -> list[tuple[Out, Message]]:
        """Write the message of a question, or settle one that cannot be sent."""
        if isinstance(packed, SiteFailure):
            self._settle(batch, question, packed)
            return []
        question.asked.bytes_down += packed.num_bytes
        content = flower_site.pack(
            packed.frame,
            site=question.task.site,
            job_text=self._delivery.job_text,
            deadline_seconds=self._seconds_left(batch, question),
            references=packed.references,
        )
        out = Out(question=question)
        return [(out, self._message(batch, out, content, question.kind.value))]

    def _message(
        self, batch: Batch, out: Out, content: RecordDict, kind: str
    ) -> Message:
        question = out.question
        return Message(
            content,
            self._nodes[question.task.site],
            kind,
            ttl=QUEUE * (self._seconds_left(batch, question) + LATE_SECONDS),
            group_id=question.name,
        )

    def _post(self, batch: Batch, letters: Sequence[tuple[Out, Message]]) -> None:
        """Give Flower messages about questions, all at once.

        After each call every site's next look goes to Flower's database.
        """
        if not letters:
            return
        messages = [message for _, message in letters]
        ids = [*self._api.push_messages(messages)]
        ids += [""] * (len(letters) - len(ids))
        for (out, _), message_id in zip(letters, ids, strict=True):
            question, is_question = out.question, out.probed_seconds is None
            if message_id:
                batch.out[message_id] = out
                if is_question and question.inquiry is not None:
                    question.inquiry.note_sent(self._clock.monotonic())
            elif is_question:
                text = "Flower did not accept the message for its node"
                self._fail(batch, question, FailureKind.UNREACHABLE, text)

    def _seconds_left(self, batch: Batch, question: Question) -> float:
        passed = self._clock.monotonic() - question.asked.asked_seconds
        return max(batch.deadline_seconds - passed, 1.0)

    def _ask_after(self, batch: Batch) -> None:
        """Probe for questions that have been open for long."""
        for question in [*batch.open.values()]:
            now = self._clock.monotonic()
            has_left = question.index in batch.left
            inquiry = None if has_left else question.inquiry
            if inquiry is not None and inquiry.is_due(now):
                self._probe(batch, question, flower_site.PROBE)

    def _ask_returned(self, batch: Batch) -> None:
        """Ask sites again that have left their task, and are back.

        When all others have answered, they have left; unless the round is lost without
        them, which then waits for them until its deadline.
        """
        is_over = not batch.awaits_left(self._quorum)
        for index, answer in [*batch.left.items()]:
            question = batch.open[index]
            site = question.task.site
            if is_over:
                self._settle(batch, question, answer)
                continue
            if self.returned([site], question.task.round_index):
                let_in = self._presence.activations()[self._nodes[site]]
                self._activations[site] = self._seen[site] = let_in
                del batch.left[index]
                self._send(batch, question)

    def _probe(self, batch: Batch, question: Question, kind: str) -> None:
        out = Out(question=question, probed_seconds=self._clock.monotonic())
        # An empty frame, because it travels whole.
        content = flower_site.pack_frame(PackedFrame(frame=b""))
        self._post(batch, [(out, self._message(batch, out, content, kind))])

    def _pack(self, task: Asked) -> PackedFrame | SiteFailure:
        if task.site not in self._nodes:
            return failure(task, FailureKind.UNREACHABLE, "has not connected")
        try:
            if isinstance(task, RelayedTasks):
                return self._delivery.frames.send_whole(down_frames(task.tasks))
            frames = INLINE if task.site in self._known else self._delivery.frames
            return frames.send(task)
        except StoreError as error:
            text = f"the model could not be stored: {error}"
            return failure(task, FailureKind.UNREACHABLE, text)

    def _tidy(self, tasks: Sequence[Asked]) -> None:
        """Remove objects of rounds before all open ones from the store."""
        for task in tasks[:1]:  # All are of one round.
            rounds = set[int]().union(*(batch.rounds() for batch in self._batches))
            now = task.run_id, min(rounds | {task.round_index})
            if self._tidied != now:
                self._tidied = now
                self._delivery.frames.end_rounds(now[0], self._sites, before=now[1])

    def _pull_all(self) -> list[Reply]:
        """Receive what has arrived, also while vectors were being fetched.

        Or answers would miss their deadline because others are large.
        """
        late: list[Reply] = []
        while True:
            begin, num_open = self._clock.monotonic(), self._num_in_flight()
            late += self._pull()
            is_new = self._num_in_flight() < num_open
            if not is_new or self._clock.monotonic() - begin < LONG_SECONDS:
                return late

    def _pull(self) -> list[Reply]:
        """Receive what has arrived; return the late answers."""
        late, now = list[Reply](), self._clock.monotonic()
        self._was_busy = now - self._pulled > NEXT_SECONDS
        owners = {name: batch for batch in self._batches for name in batch.out}
        found = self._api.pull_messages([*owners, *self._late])
        # Words last: one about an answer may have arrived with it.
        for message in sorted(found, key=_is_word):
            message_id = message.metadata.reply_to_message_id
            batch = owners.get(message_id)
            if batch is not None and message_id in batch.out:
                self._take_in(batch, batch.out.pop(message_id), message)
            elif message_id in self._late:
                late += self._take_in_late(self._late.pop(message_id), message)
        nodes = self._nodes.items()
        self._pulled = now
        self._seen = {site: self._presence.let_in(node) for site, node in nodes}
        return late

    def _take_in(self, batch: Batch, out: Out, message: Message) -> None:
        question, inquiry = out.question, out.question.inquiry
        if message.has_error():
            if out.probed_seconds is not None:
                return  # It is probed again.
            if inquiry is not None and message.error.code in flower_errors.LOST:
                inquiry.note_lost(self._clock.monotonic())
                return
            if message.error.code == flower_errors.NODE_GONE:
                self._presence.note_gone(self._nodes[question.task.site])
                if self._presence.has_left(self._nodes[question.task.site]):
                    self._fail(batch, question, FailureKind.LEAVING, TOOK_LEAVE)
                    return
            told = flower_errors.failure_of(question.task, message)
            self._fail(batch, question, told.kind, told.message)
            return
        word = flower_site.read_word(message.content)
        if word is not None:
            self._take_word(batch, out, word, is_again=not _is_word(message))
            return
        (answer, *following), bytes_up = self._answers.read(question.task, message)
        self._note_leave(question.task.site, answer)
        if self._may_return(answer, question.task):
            batch.left[question.index] = answer
            return
        question.asked.is_answered = True
        more = tuple(following)
        self._settle(batch, question, answer, bytes_up=bytes_up, following=more)

    def _note_leave(self, site: SiteId, answer: SiteMessage) -> None:
        """If a site leaves, note as which agent, and not as which it was asked.

        If its agent was restarted between the two, the site would seem to be back. The
        last look shows it; that of a busy aggregator may show the agent that came next.
        """
        let_in = self._presence.let_in(self._nodes[site])
        if self._was_busy:
            let_in = self._seen.get(site)
        if _leaves(answer) and let_in is not None:
            self._activations[site] = let_in

    def _may_return(self, answer: SiteMessage, task: Asked) -> TypeGuard[SiteFailure]:
        """Whether a site has left a task that it may continue when it is back."""
        return (
            self._delivery.asks_again
            and isinstance(task, RoundTask)
            and task.kind is TaskKind.TRAIN
            and isinstance(answer, SiteFailure)
            and answer.kind is FailureKind.LEAVING
        )

    def _take_word(self, batch: Batch, out: Out, word: Word, *, is_again: bool) -> None:
        question, inquiry = out.question, out.question.inquiry
        if inquiry is None or out.probed_seconds is None:
            return  # A copy came there, of which nothing follows.
        if inquiry.is_missing(word, out.probed_seconds):
            self._send(batch, question)
        elif word is Word.ANSWERED and not is_again:
            self._probe(batch, question, flower_site.AGAIN)

    def _take_in_late(self, asked: QuestionNote, message: Message) -> list[Reply]:
        """The answer to a closed question, if it is the first one."""
        if asked.is_answered or message.has_error():
            return []  # A failure was counted when the deadline passed.
        answer, bytes_up = self._answers.read_unfetched(asked, message)
        if isinstance(answer, SiteFailure):
            return []
        asked.is_answered = True
        now = self._clock.monotonic()
        late = asked.reply(answer, answered_seconds=now, bytes_up=bytes_up)
        return [replace(late, bytes_down=0)]  # They were counted when it was closed.

    def _expire(self, batch: Batch) -> None:
        allowed = seconds = batch.deadline_seconds
        if self._delivery.is_simulated:
            # The process keeps the deadline itself; this is for when it is gone.
            allowed = QUEUE * (seconds + GRACE_SECONDS)
        now = self._clock.monotonic()
        for question in [*batch.open.values()]:
            if now - question.asked.asked_seconds < allowed:
                continue
            if (answer := batch.left.get(question.index)) is not None:
                self._settle(batch, question, answer)
            else:
                text = no_answer(seconds)
                self._fail(batch, question, FailureKind.DEADLINE, text)

    def _give_up_silent(self, batch: Batch, silent: set[int]) -> None:
        """Do not wait for nodes whose heartbeats have stopped."""
        for question in [*batch.open.values()]:
            node = self._nodes[question.task.site]
            if node not in silent or question.index in batch.left:
                continue
            if self._presence.has_left(node):
                self._fail(batch, question, FailureKind.LEAVING, TOOK_LEAVE)
                continue
            # How long that takes to be known is different for nodes of Flower's.
            text = "is no longer connected: its heartbeats have stopped"
            self._fail(batch, question, FailureKind.DISCONNECTED, text)

    def _fail(
        self, batch: Batch, question: Question, kind: FailureKind, text: str
    ) -> None:
        is_revoked = question.task.site in self._revoked()
        text = "the site was revoked" if is_revoked else text
        self._settle(batch, question, failure(question.task, kind, text))

    def _settle(
        self,
        batch: Batch,
        question: Question,
        message: SiteMessage,
        *,
        bytes_up: int = 0,
        following: tuple[SiteMessage, ...] = (),
    ) -> None:
        reply = question.asked.reply(
            message,
            answered_seconds=self._clock.monotonic(),
            bytes_up=bytes_up,
            following=following,
        )
        self._late |= batch.settle(question, reply)

    def _check_flower(self) -> None:
        if self._stopped():
            raise FederationError("Flower has stopped; no site will answer")

    def _pause(self, seconds: float | None = None) -> None:
        self._check_flower()
        self._clock.sleep(self._delivery.poll_seconds if seconds is None else seconds)


def _leaves(answer: SiteMessage) -> bool:
    if isinstance(answer, SiteFailure):
        return answer.kind is FailureKind.LEAVING
    return not isinstance(answer, SecureAnswer) and answer.leaving is not None


def _is_word(message: Message) -> bool:
    return message.metadata.message_type == flower_site.PROBE
