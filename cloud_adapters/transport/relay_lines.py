"""Sites behind relays of a deployed run: over a grid that reaches relays and sites.

All tasks of a relay's sites go to it in one message, and it answers in one: see
``federation.wire.relayed``. A relay that gives no answer is the absence of its sites.
"""

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeGuard

from federation.errors import ProtocolError
from federation.ids import SiteId, TaskId
from federation.messages import (
    FailureKind,
    RelayedSum,
    RelayedTasks,
    Reply,
    SiteFailure,
    SiteMessage,
    Task,
)
from federation.rounds.failures import failure
from federation.wire.frame import encoded_size
from federation.wire.relayed import shares_of, up_answers

_OF_RELAYS = dict.fromkeys(
    (FailureKind.DISCONNECTED, FailureKind.LEAVING, FailureKind.NOT_SET_UP),
    FailureKind.UNREACHABLE,
)


class Lines(Protocol):
    """A grid whose sites are relays, too; see ``federation.protocols.Grid``."""

    def send(
        self, tasks: Sequence[Task | RelayedTasks], *, deadline_seconds: float
    ) -> Sequence[TaskId]:
        """Send tasks; those of a relay have one id."""
        ...

    def receive(self, timeout_seconds: float | None = None) -> deque[Reply]:
        """Wait for replies: that of a relay has all its messages."""
        ...

    def withdraw(self, task_ids: Collection[TaskId]) -> Mapping[TaskId, int]:
        """Close tasks, and return the bytes that were sent for each."""
        ...

    def returned(
        self, sites: Collection[SiteId], round_index: int
    ) -> Collection[SiteId]:
        """Who is back after its last task."""
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class _Bundle:
    """Tasks that went to a relay together, those that are open by their ids."""

    relay: SiteId
    ids: Sequence[TaskId]
    tasks: Sequence[Task]
    open: set[TaskId] = field(default_factory=set)


class RelayLines:
    """The sites of a run, some of them behind relays."""

    def __init__(
        self,
        lines: Lines,
        relays: Mapping[SiteId, Collection[SiteId]],
        *,
        absent: Collection[SiteId] = (),
        now: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Put relays between a coordinator and some sites.

        Args:
            lines: Reaches the relays, and sites that have none.
            relays: The sites of each relay, in the order of the job.
            absent: Sites that were not in the handshake, or that were revoked. Those
                behind a relay are not asked: it may reach them by now.
            now: Monotonic time in seconds, of the replies in their place.
        """
        self._lines = lines
        self._relays = relays
        self._relay_of = {site: name for name, each in relays.items() for site in each}
        self._absent = self._relay_of.keys() & {*absent}
        self._now = now
        self._not_asked: deque[Reply] = deque()
        self._num_sent = 0
        self._alone: dict[TaskId, TaskId] = {}  # Our ids by those of the lines.
        self._bundles: dict[TaskId, _Bundle] = {}

    def returned(
        self, sites: Collection[SiteId], round_index: int
    ) -> Collection[SiteId]:
        """Who may be back: of sites behind a relay, only the relay knows.

        It is asked for them in each round, and soon reports which are not there.
        """
        alone = [site for site in sites if site not in self._relay_of]
        behind = [s for s in sites if s in self._relay_of and s not in self._absent]
        return [*self._lines.returned(alone, round_index), *behind]

    def send(
        self, tasks: Sequence[Task], *, deadline_seconds: float
    ) -> Sequence[TaskId]:
        """Send tasks; see ``Grid``.

        Relays come last, in the order of their first sites: if the lines keep the order
        of tasks, floating-point sums are those of a simulation.
        """
        ids = [TaskId(self._num_sent + index) for index in range(len(tasks))]
        self._num_sent += len(tasks)
        alone: dict[TaskId, Task] = {}
        behind: dict[SiteId, dict[TaskId, Task]] = {}
        for task_id, task in zip(ids, tasks, strict=True):
            if task.site in self._absent:
                self._not_asked.append(self._absence(task_id, task))
                continue
            relay = self._relay_of.get(task.site)
            into = alone if relay is None else behind.setdefault(relay, {})
            into[task_id] = task
        bundles = [
            _Bundle(relay=name, ids=[*each], tasks=[*each.values()], open={*each})
            for name, each in behind.items()
        ]
        out: list[Task | RelayedTasks] = [*alone.values(), *map(_relayed, bundles)]
        sent = self._lines.send(out, deadline_seconds=deadline_seconds)
        self._alone |= dict(zip(sent, alone, strict=False))
        self._bundles |= dict(zip(sent[len(alone) :], bundles, strict=True))
        return ids

    def receive(self, timeout_seconds: float | None = None) -> deque[Reply]:
        """Wait for replies of sites, or for a relay's; see ``Grid``."""
        found, self._not_asked = self._not_asked, deque()
        while not found:
            came = self._lines.receive(timeout_seconds)
            if not came:
                break
            while came:
                found.extend(self._opened(came.popleft()))
        return found

    def withdraw(self, task_ids: Collection[TaskId]) -> Mapping[TaskId, int]:
        """Close tasks; a relay's are open until the last of them is closed.

        The bytes of all of these are returned with one of them.
        """
        gone = {*task_ids}
        outer = {one: ours for one, ours in self._alone.items() if ours in gone}
        outer |= {one: next(iter(b.ids)) for one, b in self._bundles.items()}
        left = (each for each in self._not_asked if each.task_id not in gone)
        self._not_asked = deque(left)
        inner = [one for one, ours in self._alone.items() if ours in gone]
        for one in inner:
            del self._alone[one]
        for one, bundle in [*self._bundles.items()]:
            bundle.open -= gone
            if not bundle.open:
                inner.append(one)
                del self._bundles[one]
        return {outer[one]: n for one, n in self._lines.withdraw(inner).items()}

    def _absence(self, task_id: TaskId, task: Task) -> Reply:
        now = self._now()
        text = "was not in the handshake of this run, so its relay is not asked for it"
        return Reply(
            task_id=task_id,
            message=failure(task, FailureKind.UNREACHABLE, text),
            asked_seconds=now,
            answered_seconds=now,
            bytes_down=0,
            bytes_up=0,
        )

    def _opened(self, reply: Reply) -> list[Reply]:
        """Turn what came into replies of sites; drop what is late or not asked for."""
        bundle = self._bundles.pop(reply.task_id, None)
        if bundle is not None:
            return [
                each for each in _replies(bundle, reply) if each.task_id in bundle.open
            ]
        site = reply.message.site
        if site in self._relays or site in self._relay_of:
            return []  # It is late: its round has gone on without these sites.
        ours = self._alone.pop(reply.task_id, TaskId(-1))
        return [replace(reply, task_id=ours)]


def nodes_of(
    sites: Sequence[SiteId], relays: Mapping[SiteId, Collection[SiteId]]
) -> dict[SiteId, int]:
    """Who connects to the aggregator, and how many sites are lost without it."""
    behind = {site for each in relays.values() for site in each}
    alone = {site: 1 for site in sites if site not in behind}
    return alone | {name: len(each) for name, each in relays.items()}


def fewest_nodes(
    sites: Sequence[SiteId],
    relays: Mapping[SiteId, Collection[SiteId]],
    required: int,
) -> int:
    """How few nodes can be enough for so many sites: if small ones are missing."""
    nodes = nodes_of(sites, relays)
    spare, num_missing = len(sites) - required, 0
    for size in sorted(nodes.values()):
        spare -= size
        if spare < 0:
            break
        num_missing += 1
    return len(nodes) - num_missing


def _relayed(bundle: _Bundle) -> RelayedTasks:
    first = bundle.tasks[0]
    return RelayedTasks(
        run_id=first.run_id,
        round_index=first.round_index,
        site=bundle.relay,
        tasks=tuple(bundle.tasks),
    )


def _replies(bundle: _Bundle, reply: Reply) -> list[Reply]:
    """One reply for each task of a relay, whatever it has sent."""
    through, answers = _answers(bundle, reply)
    is_lost = _is_lost(reply.message, bundle.relay)
    shares = zip(
        shares_of(reply.bytes_down, len(answers)),
        shares_of(reply.bytes_up, len(answers)),
        strict=True,
    )
    found = []
    rows = zip(bundle.ids, bundle.tasks, answers, shares, strict=True)
    for task_id, task, answer, (down, up) in rows:
        is_part = through is not None and answer.site in through.sites
        found.append(
            Reply(
                task_id=task_id,
                message=answer,
                asked_seconds=reply.asked_seconds,
                answered_seconds=reply.answered_seconds,
                bytes_down=down,
                bytes_up=up,
                through=through if is_part else None,
                # A sum has as many words as each of its parts.
                inside_down=0 if is_lost else encoded_size(task),
                inside_up=0 if is_lost else encoded_size(answer),
            )
        )
    return found


def _is_lost(message: SiteMessage, relay: SiteId) -> TypeGuard[SiteFailure]:
    """Whether a relay has failed, or the line to it."""
    return isinstance(message, SiteFailure) and message.site == relay


def _answers(
    bundle: _Bundle, reply: Reply
) -> tuple[RelayedSum | None, list[SiteMessage]]:
    message = reply.message
    if _is_lost(message, bundle.relay):
        text = f"relay {bundle.relay!r} {message.message}"
        # Not that a site is gone, which would then have no keys: only its relay is.
        kind = _OF_RELAYS.get(message.kind, message.kind)
        return None, [failure(task, kind, text) for task in bundle.tasks]
    try:
        return up_answers(
            [message, *reply.following],
            relay=bundle.relay,
            sites=[task.site for task in bundle.tasks],
        )
    except ProtocolError as error:
        invalid = FailureKind.INVALID
        return None, [failure(task, invalid, str(error)) for task in bundle.tasks]
