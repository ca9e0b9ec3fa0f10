"""Agents behind relays: a coordinator reaches both by bytes, and no more."""

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from support import agents
from support.agents import Consortium, consortium

from cloud_adapters.relays.task_queue import QuestionKind, RelayQuestion
from cloud_adapters.transport.frames import INLINE
from cloud_adapters.transport.relay_lines import RelayLines, nodes_of
from cloud_adapters.transport.task_work import answer_frame
from deploy.aggregator_host.handshake import SignedHandshake
from deploy.site_host.agent import SiteAgent
from deploy.site_host.relay_agent import RelayAgent
from federation.clock import SystemClock, VirtualClock
from federation.errors import FederationError
from federation.ids import SiteId, TaskId
from federation.job.spec import JobSpec
from federation.messages import (
    FailureKind,
    RelayedTasks,
    Reply,
    SiteMessage,
    Task,
)
from federation.protocols import Grid
from federation.rounds.failures import failure
from federation.wire import frame as wire
from federation.wire.relayed import answers_in, down_frames
from privacy.secagg.agreement import roster

Asked = Task | RelayedTasks
Spoil = Callable[[SiteId, Asked, bytes], bytes]


@dataclass
class Clouds:
    """Relays with their sites, and the grid of a coordinator.

    Attributes:
        folder: Holds everything.
        members: Everybody's keys.
        sites: The agents of sites.
        relays: The agents of relays.
        lost: Relays that give no answer, with the rounds.
        spoil: Changes what a relay sends.
        sent: Bytes to and from relays, one pair for each message.
    """

    folder: Path
    members: Consortium
    sites: dict[SiteId, SiteAgent]
    relays: dict[SiteId, RelayAgent] = field(default_factory=dict)
    lost: set[tuple[SiteId, int]] = field(default_factory=set)
    spoil: Spoil = lambda _relay, _asked, frames: frames
    sent: list[tuple[int, int]] = field(default_factory=list)

    def relay(self, name: str, served: Collection[str]) -> RelayAgent:
        """A relay's agent, as it is after a start of its process."""
        serve = {"listen": "127.0.0.1:1", "hosts": ["h"], "sites": [*served]}
        config = agents.site_config(self.folder / name, name, serve=serve)
        roster.save(self.members.roster, config.roster)
        return RelayAgent(
            config=config,
            identity=self.members.sites[name],
            roster=self.members.roster,
            ask=self._ask,
            served={SiteId(site) for site in served},
            clock=VirtualClock(1e9),
        )

    def connect(
        self,
        handshake: SignedHandshake,
        sites: Sequence[SiteId],
        *,
        required: int,
        quorum: int,
    ) -> Grid:
        """Do the handshake, as ``deployed_run.Connect`` does."""
        assert quorum <= required <= len(sites)
        nodes = nodes_of(sites, handshake.relays)
        while True:
            for name in nodes:
                answer = (self.relays | self.sites)[name].introduce(handshake.question)
                assert handshake.site_of(answer) == name
            if not handshake.move_on():
                break
        absent = [*handshake.absent]
        lines = _Lines(self)
        return RelayLines(lines, handshake.relays, absent=absent)

    def _ask(
        self,
        questions: Mapping[SiteId, RelayQuestion],
        *,
        seconds: float,
        patience: float = 0.0,
        stopped: threading.Event,
    ) -> dict[SiteId, bytes | None]:
        assert seconds > 0 <= patience
        assert not stopped.is_set()
        found: dict[SiteId, bytes | None] = dict.fromkeys(questions)
        for name, question in questions.items():
            site = self.sites.get(name)
            if site is not None:
                if question.kind is QuestionKind.INTRODUCE:
                    found[name] = site.introduce(question.body)
                else:
                    found[name], _ = answer_frame(site, question.body, seconds)
                assert len(found[name] or b"") <= question.max_bytes
        return found


@dataclass
class _Lines:
    """Answers as they are received, one node after another."""

    clouds: Clouds
    waiting: deque[tuple[TaskId, Asked, float]] = field(default_factory=deque)
    num_sent: int = 0

    def returned(
        self, sites: Collection[SiteId], round_index: int
    ) -> Collection[SiteId]:
        assert round_index >= 0
        return [site for site in sites if site in self.clouds.sites]

    def send(
        self, tasks: Sequence[Asked], *, deadline_seconds: float
    ) -> Sequence[TaskId]:
        ids = [TaskId(self.num_sent + index) for index in range(len(tasks))]
        self.num_sent += len(tasks)
        for task_id, task in zip(ids, tasks, strict=True):
            self.waiting.append((task_id, task, deadline_seconds))
        return ids

    def receive(self, timeout_seconds: float | None = None) -> deque[Reply]:
        assert timeout_seconds is None
        if not self.waiting:
            return deque()
        task_id, task, seconds = self.waiting.popleft()
        now = SystemClock().monotonic()
        messages, down, up = self._answered(task, seconds)
        return deque(
            [
                Reply(
                    task_id=task_id,
                    message=messages[0],
                    asked_seconds=now,
                    answered_seconds=now,
                    bytes_down=down,
                    bytes_up=up,
                    following=tuple(messages[1:]),
                )
            ]
        )

    def withdraw(self, task_ids: Collection[TaskId]) -> Mapping[TaskId, int]:
        self.waiting = deque(w for w in self.waiting if w[0] not in task_ids)
        return {}

    def _answered(
        self, task: Asked, seconds: float
    ) -> tuple[Sequence[SiteMessage], int, int]:
        clouds = self.clouds
        if not isinstance(task, RelayedTasks):
            frame = wire.encode_bytes(task)
            frames, _ = answer_frame(clouds.sites[task.site], frame, seconds)
            return answers_in(frames, limit=1), len(frame), len(frames)
        packed = INLINE.send_whole(down_frames(task.tasks))
        if (task.site, task.round_index) in clouds.lost:
            silent = failure(task, FailureKind.DISCONNECTED, "is not connected")
            return [silent], packed.num_bytes, 0
        try:
            answer = clouds.relays[task.site].answer(packed, seconds=seconds)
        except FederationError as error:  # As FlowerNode and FlowerGrid.
            return [failure(task, FailureKind.CRASHED, str(error))], packed.num_bytes, 0
        found = clouds.spoil(task.site, task, answer.frame)
        clouds.sent.append((packed.num_bytes, len(found)))
        return answers_in(found, limit=100), packed.num_bytes, len(found)


@contextmanager
def clouds_of(folder: Path, job: JobSpec) -> Iterator[Clouds]:
    """All parties of a job, in one process."""
    sites = [SiteId(site.name) for site in job.sites]
    relays = [relay.name for relay in job.relays]
    members = consortium(*sites, *relays, relays=relays)
    found = {name: agents.agent(folder, name, members) for name in sites}
    made = Clouds(folder, members, found)
    for relay in job.relays:
        made.relays[SiteId(relay.name)] = made.relay(relay.name, relay.sites)
    try:
        yield made
    finally:
        for each in found.values():
            each.close()
