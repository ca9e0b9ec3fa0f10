"""The grid over Flower: tasks become Flower messages, answers become replies.

Flower proves which node sent a reply; that it speaks for the site that was asked is
checked here. Byte counts are those of the wire format, without Flower's own; what
travels through a store instead is among them.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid as FlowerApi

from cloud_adapters import flower_site
from cloud_adapters.flower_presence import SILENT_SECONDS, Presence
from cloud_adapters.flower_roll_call import NODE_GONE, RollCall, gist, meet
from cloud_adapters.frame_references import Packed, Reference, Sizes
from cloud_adapters.frames import INLINE, Frames
from federation import wire
from federation.errors import (
    CorruptObject,
    FederationError,
    ObjectNotFound,
    ProtocolError,
    SiteError,
    StoreError,
)
from federation.ids import RunId, SiteId
from federation.messages import (
    FailureKind,
    Reply,
    RoundTask,
    SecureTask,
    SiteFailure,
    SiteMessage,
    Task,
    TaskKind,
)
from federation.protocols import Clock

CONNECT_SECONDS = 60.0
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
# Answers that may be held back for one that is due before them.
MAX_AHEAD = 64
MAX_AHEAD_BYTES = 64 << 20

# flwr.common.constant.ErrorCode, which is not public: the sites' own doing. All
# other codes say that a message or a node is gone.
_CRASHES = frozenset({1, 2, 6, 7, 8})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    """A task on its way."""

    index: int
    task: Task
    asked_seconds: float
    bytes_down: int


@dataclass(slots=True, kw_only=True)
class _Exchange:
    """The state of one call of ``exchange``."""

    waiting: deque[tuple[int, Task]]
    ahead: float
    pending: dict[str, _Question] = field(default_factory=dict)
    landed: dict[int, Reply] = field(default_factory=dict)
    next_index: int = 0

    def is_open(self) -> bool:
        """Whether an answer is still to come or to be handed on."""
        return bool(self.waiting or self.pending or self.landed)


class FlowerGrid:
    """The sites as nodes of a Flower run."""

    def __init__(
        self,
        api: FlowerApi,
        sites: Sequence[SiteId],
        *,
        clock: Clock,
        job_text: str = "",
        roll_call: RollCall | None = None,
        frames: Frames = INLINE,
        required: int | None = None,
        quorum: int = 0,
        ordered: bool = False,
        workers: int | None = None,
        connect_seconds: float = CONNECT_SECONDS,
        poll_seconds: float = POLL_SECONDS,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Find a node for each site, and have it ready for work.

        Args:
            api: Flower's own grid.
            sites: In the order of the job.
            clock: Measures deadlines and durations.
            job_text: Handed to every site with its tasks; empty where sites know it.
            roll_call: Tells which node is which site. Without it nodes are as good
                as each other: they are dealt out in ascending order of their ids.
            frames: How large messages travel; all in one piece by default.
            required: Sites that must be there after ``connect_seconds``; all of them
                by default.
            quorum: Sites without which an exchange is of no use.
            ordered: Yield replies in the order of the tasks, so that sums of
                floating-point updates are the same in every run; otherwise as they
                arrive.
            workers: Processes that the nodes share, as in a simulation: a task's
                deadline then counts from when a process takes it up. None if every
                node has a process of its own: it counts from when the task goes out.
            connect_seconds: How long to wait for the nodes.
            poll_seconds: Pause between two looks for replies.
            stopped: Tells that Flower has ended and nothing more will come.

        Raises:
            SiteError: There are too few nodes after ``connect_seconds``, or one
                cannot run a site.
        """
        self._api = api
        self._job_text = job_text
        self._frames = frames
        self._tidied: tuple[RunId, int] | None = None
        self._clock = clock
        self._ordered = ordered
        self._workers = workers
        self._max_in_flight = math.inf if workers is None else QUEUE * workers
        self._poll_seconds = poll_seconds
        self._stopped = stopped
        self._late: dict[str, _Question] = {}
        deadline = clock.monotonic() + connect_seconds
        self._sites = tuple(sites)
        self._nodes: dict[SiteId, int]
        self._presence = Presence(
            api,
            quorum=quorum,
            clock=clock,
            pause=self._pause,
            is_told=workers is None,
        )
        if roll_call is None:
            nodes = self._wait_for_nodes(len(sites), deadline)
            self._nodes = dict(zip(sites, nodes, strict=True))
            self._greet(deadline)
        else:
            self._nodes = meet(
                api,
                roll_call,
                self._sites,
                deadline=deadline,
                required=len(sites) if required is None else required,
                clock=clock,
                pause=self._pause,
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
        exchange = _Exchange(
            waiting=deque(enumerate(tasks)),
            ahead=self._max_in_flight + _ahead(tasks) if self._ordered else math.inf,
        )
        return self._run(exchange, deadline_seconds)

    def _run(self, exchange: _Exchange, deadline_seconds: float) -> Iterator[Reply]:
        sites = {task.site for _, task in exchange.waiting} & self._nodes.keys()
        nodes = {self._nodes[site] for site in sites}
        self._presence.await_return(nodes, deadline_seconds)
        try:
            while exchange.is_open():
                self._push(exchange, deadline_seconds)
                late = self._pull_all(exchange)
                self._expire(exchange, deadline_seconds)
                self._give_up_silent(exchange)
                ready = [*late, *self._ready(exchange)]
                yield from ready
                if not ready and exchange.is_open():
                    self._pause()
        finally:
            self._late |= exchange.pending

    def _push(self, exchange: _Exchange, deadline_seconds: float) -> None:
        while exchange.waiting and len(exchange.pending) < self._max_in_flight:
            index, task = exchange.waiting[0]
            if index >= exchange.next_index + exchange.ahead:
                return
            exchange.waiting.popleft()
            packed = self._pack(task)
            question = _Question(
                index=index,
                task=task,
                asked_seconds=self._clock.monotonic(),
                bytes_down=packed.num_bytes if isinstance(packed, Packed) else 0,
            )
            if isinstance(packed, SiteFailure):
                exchange.landed[index] = self._reply(question, packed, bytes_up=0)
                continue
            message = Message(
                flower_site.pack(
                    packed.frame,
                    site=task.site,
                    job_text=self._job_text,
                    deadline_seconds=deadline_seconds,
                    references=packed.references,
                ),
                self._nodes[task.site],
                _kind(task).value,
                ttl=QUEUE * (deadline_seconds + LATE_SECONDS),
                group_id=str(task.round_index),
            )
            for message_id in self._api.push_messages([message]):
                exchange.pending[message_id] = question
                break
            else:
                text = "Flower did not take the message for its node"
                failure = _failure(task, FailureKind.UNREACHABLE, text)
                exchange.landed[index] = self._reply(question, failure, bytes_up=0)

    def _pack(self, task: Task) -> Packed | SiteFailure:
        if task.site not in self._nodes:
            return _failure(task, FailureKind.UNREACHABLE, "was never there")
        try:
            return self._frames.send(task)
        except StoreError as error:
            text = f"the model does not get into the store: {error}"
            return _failure(task, FailureKind.UNREACHABLE, text)

    def _tidy(self, tasks: Sequence[Task]) -> None:
        """Remove what earlier rounds have left in the store."""
        for task in tasks[:1]:  # All are of one round.
            now = task.run_id, task.round_index
            if self._tidied != now:
                self._tidied = now
                self._frames.end_rounds(now[0], self._sites, before=now[1])

    def _pull_all(self, exchange: _Exchange) -> list[Reply]:
        """Take in what has arrived, also while vectors were being fetched.

        Or answers would miss their deadline because others are large.
        """
        late = []
        while True:
            begin, num_pending = self._clock.monotonic(), len(exchange.pending)
            late += self._pull(exchange)
            is_new = len(exchange.pending) < num_pending
            if not is_new or self._clock.monotonic() - begin < LONG_SECONDS:
                return late

    def _pull(self, exchange: _Exchange) -> list[Reply]:
        """Take in what has arrived; return the late answers among it."""
        late = []
        for message in self._api.pull_messages([*exchange.pending, *self._late]):
            message_id = message.metadata.reply_to_message_id
            if message_id in exchange.pending:
                question = exchange.pending.pop(message_id)
                exchange.landed[question.index] = self._receive(question, message)
            elif message_id in self._late:
                question = self._late.pop(message_id)
                reply = self._receive(question, message, is_late=True)
                if not isinstance(reply.message, SiteFailure):
                    late.append(reply)
        return late

    def _expire(self, exchange: _Exchange, deadline_seconds: float) -> None:
        allowed = deadline_seconds
        if self._workers is not None:
            # The process keeps the deadline itself; this is for when it is gone.
            allowed = QUEUE * (deadline_seconds + GRACE_SECONDS)
        now = self._clock.monotonic()
        for message_id, question in list(exchange.pending.items()):
            if now - question.asked_seconds >= allowed:
                self._late[message_id] = exchange.pending.pop(message_id)
                text = f"gave no answer within {deadline_seconds:g} s"
                failure = _failure(question.task, FailureKind.DEADLINE, text)
                reply = self._reply(question, failure, bytes_up=0)
                exchange.landed[question.index] = reply

    def _give_up_silent(self, exchange: _Exchange) -> None:
        """Do not wait for nodes whose heartbeats have stopped."""
        if not self._presence.is_time():
            return
        silent = self._presence.silent(
            {self._nodes[one.task.site] for one in exchange.pending.values()}
        )
        for message_id, question in list(exchange.pending.items()):
            if self._nodes[question.task.site] in silent:
                del exchange.pending[message_id]
                self._late[message_id] = question
                text = f"has sent no heartbeat for {SILENT_SECONDS:g} s"
                failure = _failure(question.task, FailureKind.DISCONNECTED, text)
                reply = self._reply(question, failure, bytes_up=0)
                exchange.landed[question.index] = reply

    def _ready(self, exchange: _Exchange) -> list[Reply]:
        """Take out the replies that may be handed on."""
        if not self._ordered:
            ready = [*exchange.landed.values()]
            exchange.landed.clear()
            return ready
        ready = []
        while exchange.next_index in exchange.landed:
            ready.append(exchange.landed.pop(exchange.next_index))
            exchange.next_index += 1
        return ready

    def _receive(
        self, question: _Question, message: Message, *, is_late: bool = False
    ) -> Reply:
        task = question.task
        if message.has_error():
            error = message.error
            kind = FailureKind.UNREACHABLE
            if error.code in _CRASHES:
                kind = FailureKind.CRASHED
            elif error.code == NODE_GONE:
                kind = FailureKind.DISCONNECTED
            text = f"Flower error {error.code}: {gist(error.reason)}"
            return self._reply(question, _failure(task, kind, text), bytes_up=0)
        packed = Packed(frame=b"")
        try:
            packed = flower_site.unpack_all(message.content)
            answer = wire.decode(packed.frame)
            if isinstance(answer, RoundTask | SecureTask) or answer.site != task.site:
                text = f"{task.site}'s node spoke for {answer.site!r}"
                raise ProtocolError(text)  # noqa: TRY301 -- one place makes the reply
            if packed.references and not is_late:
                answer = self._fetch(task, answer, packed.references)
        except (ProtocolError, CorruptObject, ObjectNotFound) as error:
            answer = _failure(task, FailureKind.INVALID, str(error))
        except StoreError as error:
            text = f"its answer cannot be fetched: {error}"
            answer = _failure(task, FailureKind.UNREACHABLE, text)
        return self._reply(question, answer, bytes_up=packed.num_bytes)

    def _fetch(
        self, task: Task, head: SiteMessage, references: Sequence[Reference]
    ) -> SiteMessage:
        if not isinstance(task, RoundTask):
            text = f"{task.site} answered a step with vectors in the store"
            raise ProtocolError(text)
        if (head.run_id, head.round_index) != (task.run_id, task.round_index):
            return head  # It will not count, whatever its vectors are.
        try:
            return self._frames.receive(head, references, Sizes.of_task(task))
        finally:
            self._frames.discard(head, references)

    def _reply(
        self, question: _Question, message: SiteMessage, *, bytes_up: int
    ) -> Reply:
        return Reply(
            message=message,
            asked_seconds=question.asked_seconds,
            answered_seconds=self._clock.monotonic(),
            bytes_down=question.bytes_down,
            bytes_up=bytes_up,
        )

    def _wait_for_nodes(self, count: int, deadline: float) -> list[int]:
        while len(nodes := sorted(self._api.get_node_ids())) < count:
            self._pause_before(
                deadline, f"only {len(nodes)} of {count} Flower nodes are connected"
            )
        return nodes[:count]

    def _greet(self, deadline: float) -> None:
        """Have the nodes start their processes before a round's time counts."""
        first = [*self._nodes.values()][: self._workers]
        messages = [Message(RecordDict(), node, "query") for node in first]
        silent = set(self._api.push_messages(messages))
        while silent:
            for reply in self._api.pull_messages(silent):
                silent.discard(reply.metadata.reply_to_message_id)
                if reply.has_error():
                    raise SiteError(
                        "a Flower node cannot run a site: "
                        f"{wire.one_line(gist(reply.error.reason))}"
                    )
            if silent:
                self._pause_before(deadline, f"{len(silent)} Flower nodes are silent")

    def _pause_before(self, deadline: float, complaint: str) -> None:
        if self._clock.monotonic() >= deadline:
            raise SiteError(f"{complaint}; start them, or allow them more time")
        self._pause()

    def _pause(self, seconds: float | None = None) -> None:
        if self._stopped():
            raise FederationError("Flower has ended; no site will answer any more")
        self._clock.sleep(self._poll_seconds if seconds is None else seconds)


def _ahead(tasks: Sequence[Task]) -> int:
    """Answers that memory allows to hold back."""
    models = (t.weights_d.nbytes for t in tasks if isinstance(t, RoundTask))
    largest = max(models, default=0)
    return min(MAX_AHEAD, MAX_AHEAD_BYTES // max(largest, 1))


def _kind(task: Task) -> TaskKind:
    # Flower knows no kind for steps of secure aggregation; they belong to training.
    return task.kind if isinstance(task, RoundTask) else TaskKind.TRAIN


def _failure(task: Task, kind: FailureKind, text: str) -> SiteFailure:
    return SiteFailure(
        run_id=task.run_id,
        round_index=task.round_index,
        site=task.site,
        kind=kind,
        message=wire.one_line(text),
    )
