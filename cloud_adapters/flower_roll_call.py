"""Which of Flower's nodes speaks for which site."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid as FlowerApi

from cloud_adapters import flower_site
from federation import wire
from federation.errors import ProtocolError, SiteError
from federation.ids import SiteId
from federation.protocols import Clock

# flwr.common.constant.ErrorCode.NODE_UNAVAILABLE, which is not public.
NODE_GONE = 5

# How long sites that are missing may still come, once a node has answered something
# that cannot be believed.
DOUBT_SECONDS = 15.0


class RollCall(Protocol):
    """What nodes are asked, and how their answers are read: ``deploy.roll_call``."""

    @property
    def question(self) -> bytes:
        """What every node is asked now."""
        ...

    def site_of(self, answer: bytes) -> SiteId:
        """Tell a site by its node's answer.

        Raises:
            ProtocolError: The answer is not to be believed.
            SiteError: The site does not take part; the message says why.
        """
        ...

    def move_on(self) -> bool:
        """Go on to the next question, for those who answered; false if all is said."""
        ...


def meet(
    api: FlowerApi,
    roll_call: RollCall,
    sites: Sequence[SiteId],
    *,
    deadline: float,
    required: int,
    clock: Clock,
    pause: Callable[[], None],
) -> dict[SiteId, int]:
    """Ask every node who it is, until all sites are there or time is up.

    Args:
        api: Flower's own grid.
        roll_call: What to ask.
        sites: Who is waited for; other nodes are left in peace.
        deadline: On the clock's monotonic time.
        required: Sites that must be there by then.
        clock: Tells time.
        pause: Waits between two looks.

    Returns:
        The node of each site that is there.

    Raises:
        SiteError: A site refuses the run, two nodes claim one site, or too few sites
            are there.
    """
    call = _Call(roll_call=roll_call, sites=sites)
    wait = _Wait(deadline=deadline, clock=clock, pause=pause)
    _ask(api, call, api.get_node_ids, wait)
    call.check(required)
    while roll_call.move_on():
        nodes = call.nodes
        call = _Call(roll_call=roll_call, sites=list(nodes), lack="answer again")
        _ask(api, call, nodes.values, wait)
        call.check(len(nodes))
    return call.nodes


@dataclass(frozen=True, kw_only=True)
class _Wait:
    deadline: float
    clock: Clock
    pause: Callable[[], None]


def _ask(
    api: FlowerApi, call: "_Call", nodes: Callable[[], Iterable[int]], wait: _Wait
) -> None:
    """Ask one question of all nodes, until it is answered or time is up."""
    now = wait.clock.monotonic
    while not call.is_over(now()) and now() < wait.deadline:
        for node in set(nodes()) - call.met:
            question = flower_site.pack_bytes(call.roll_call.question)
            for message_id in api.push_messages([Message(question, node, "query")]):
                call.met.add(node)
                call.asked[message_id] = node
        for reply in api.pull_messages(list(call.asked)) if call.asked else ():
            call.note(reply, now())
        if not call.is_over(now()):
            wait.pause()


def greet(
    api: FlowerApi,
    count: int,
    *,
    at_once: int | None,
    deadline: float,
    clock: Clock,
    pause: Callable[[], None],
) -> list[int]:
    """Find nodes that are as good as each other, in ascending order.

    Args:
        api: Flower's own grid.
        count: How many are needed.
        at_once: Processes that they share: so many nodes are greeted, to have the
            processes started before a round's time counts. All by default.
        deadline: On the clock's monotonic time.
        clock: Tells time.
        pause: Waits between two looks.

    Raises:
        SiteError: There are too few by then, or one cannot run a site.
    """

    def wait(complaint: str) -> None:
        if clock.monotonic() >= deadline:
            raise SiteError(f"{complaint}; start them, or allow them more time")
        pause()

    while len(nodes := sorted(api.get_node_ids())) < count:
        wait(f"only {len(nodes)} of {count} Flower nodes are connected")
    first = nodes[:count][:at_once]
    messages = [Message(RecordDict(), node, "query") for node in first]
    silent = set(api.push_messages(messages))
    while silent:
        for reply in api.pull_messages(silent):
            silent.discard(reply.metadata.reply_to_message_id)
            if reply.has_error():
                reason = wire.one_line(gist(reply.error.reason))
                raise SiteError(f"a Flower node cannot run a site: {reason}")
        if silent:
            wait(f"{len(silent)} Flower nodes are silent")
    return nodes[:count]


@dataclass(kw_only=True)
class _Call:
    """Who has been asked, and what came of it."""

    roll_call: RollCall
    sites: Sequence[SiteId]
    lack: str = "connect"
    asked: dict[str, int] = field(default_factory=dict)
    met: set[int] = field(default_factory=set)
    nodes: dict[SiteId, int] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    doubted: float = math.inf

    def is_over(self, now: float) -> bool:
        """Whether there is nothing to wait for."""
        complete = len(self.nodes) == len(self.sites)
        return complete or bool(self.complaints) or now - self.doubted > DOUBT_SECONDS

    def check(self, required: int) -> None:
        """Say why the run cannot begin, if it cannot.

        Raises:
            SiteError: See ``meet``.
        """
        missing = [site for site in self.sites if site not in self.nodes]
        if self.complaints or len(self.nodes) < required:
            texts = self.complaints or [f"{', '.join(missing)} did not {self.lack}"]
            raise SiteError(
                f"the run cannot begin: {'; '.join([*texts, *self.doubts])}"
            )

    def note(self, reply: Message, now: float) -> None:
        """Take in what a node answered."""
        node = self.asked.pop(reply.metadata.reply_to_message_id)
        if reply.has_error() and reply.error.code == NODE_GONE:
            self.met.discard(node)  # It may come back.
            return
        try:
            site = self._site_of(reply)
        except SiteError as error:
            self.complaints.append(str(error))
        except ProtocolError as error:
            # Nobody knows whose node it is; it must not stop a run of others.
            self.doubts.append(f"Flower node {node}: {error}")
            self.doubted = min(self.doubted, now)
        else:
            if site in self.sites:
                self.nodes[site] = node

    def _site_of(self, reply: Message) -> SiteId:
        if reply.has_error():
            reason = wire.one_line(gist(reply.error.reason))
            raise ProtocolError(f"cannot answer: {reason}")
        site = self.roll_call.site_of(flower_site.unpack_bytes(reply.content))
        if site in self.nodes:
            raise SiteError(f"two nodes speak for site {site!r}: stop one of them")
        return site


def gist(reason: str | None) -> str:
    """Drop the traceback that Ray puts before what a process raised."""
    return (reason or "").rpartition("occurred. Message: ")[2].strip()
