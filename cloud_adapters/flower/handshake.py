"""The handshake: which of Flower's nodes belongs to which site."""

import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid as FlowerApi

from cloud_adapters.flower import site as flower_site
from cloud_adapters.flower.errors import LOST, NODE_GONE, gist
from cloud_adapters.flower.facts import Connected, not_connected
from cloud_adapters.transport.redelivery import Inquiry, Word, new_name
from federation.errors import ProtocolError, SiteError, SiteNotReady
from federation.ids import SiteId
from federation.protocols import Clock
from federation.wire import frame as wire

CONNECT_SECONDS = 60.0
# How long sites that are missing may still come, once a node has answered something
# that cannot be believed, or that ends the run: then all faults are named at once.
DOUBT_SECONDS = 15.0
# How long a run that has begun waits for the others once enough sites are there: for as
# long as an agent takes to connect again. They may come later, too.
SPARE_SECONDS = 30.0
# Then it looks for them so often.
LATE_LOOK_SECONDS = 1.0
# Before a site that could not take part is asked again: it loads its data anew.
AGAIN_SECONDS = 5.0
# How long nodes may take to hear what needs no answer: idle ones look twice a second.
TELL_SECONDS, TELL_POLL_SECONDS = 3.0, 0.1

_LOG = logging.getLogger(__name__)


class Handshake(Protocol):
    """See ``deploy.aggregator_host.handshake``."""

    @property
    def question(self) -> bytes:
        """The current question to every node."""
        ...

    @property
    def absent(self) -> Mapping[SiteId, str]:
        """Sites that are not awaited, and why; answers may add to them."""
        ...

    def site_of(self, answer: bytes) -> SiteId:
        """Find the site from its node's answer.

        Raises:
            ProtocolError: The answer cannot be trusted.
            SiteError: The site does not take part, but the run needs it; the
                message says why.
            SiteNotReady: It does not yet, and is asked again.
        """
        ...

    def move_on(self) -> bool:
        """Go on to the next question, for nodes that answered; false after the last."""
        ...


Tell = Callable[[Connected], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attendance:
    """Which sites must be there before work begins, and how nodes are identified.

    Attributes:
        handshake: Finds which node is which site. Without it nodes are
            interchangeable: they are assigned in ascending order of their ids.
        known: Nodes that need not or cannot say who they are: of the handshake's sites
            those that run an app of Flower. They are not asked; they are there when
            they are connected.
        enrolled: Node of each site, as far as it is known before the site answers.
        required: Sites that must be there; all of them by default.
        quorum: Sites without which an exchange is of no use; 0 to wait for none.
        grace: See ``Presence``.
        replicas: Groups of sites with the same data: if one of them is there, no round
            waits for the others to come back.
        connect_seconds: How long to wait for the nodes, and for the answers to each
            further question of the handshake.
        spare_seconds: How long to wait, at most, after enough sites are there and none
            of the others has shown that it works on its answer; None to take in nobody
            who comes later.
        tell: Called whenever other sites are there or connected.
        revoked: Returns the sites that are shut out by now: nothing waits for them.
    """

    handshake: Handshake | None = None
    known: Mapping[SiteId, int] = field(default_factory=dict)
    enrolled: Mapping[SiteId, int] = field(default_factory=dict)
    required: int | None = None
    quorum: int = 1
    grace: float | str | None = None
    replicas: Sequence[Collection[str]] = ()
    connect_seconds: float = CONNECT_SECONDS
    spare_seconds: float | None = None
    tell: Tell = field(default=lambda _found: None)
    revoked: Callable[[], frozenset[SiteId]] = frozenset

    def find_nodes(
        self,
        api: FlowerApi,
        sites: Sequence[SiteId],
        *,
        workers: int | None = None,
        clock: Clock,
        pause: Callable[[], None],
    ) -> tuple[dict[SiteId, int], Callable[[], None]]:
        """Find the node of each site, until all are there or time is up.

        Args:
            api: Flower's own grid.
            sites: The sites to wait for; other nodes are ignored.
            workers: Processes that the nodes share; None if each has its own.
            clock: Tells time.
            pause: Waits between two looks.

        Returns:
            The node of each site that is there, and what looks for those that are not:
            it adds them when they come.

        Raises:
            SiteError: Too few sites are there, one refuses the run or cannot run, or
                two nodes claim one site.
        """
        deadline = clock.monotonic() + self.connect_seconds
        wait = _Patience(deadline=deadline, clock=clock, pause=pause, tell=self.tell)
        if self.handshake is None:
            nodes = _greet(api, len(sites), at_once=workers, wait=wait)
            return dict(zip(sites, nodes, strict=True)), _nothing
        call = _Call(
            api=api,
            handshake=self.handshake,
            sites=sites,
            known=self.known,
            enrolled=self.enrolled,
            required=len(sites) if self.required is None else self.required,
            spare_seconds=self.spare_seconds,
        )
        _ask(call, api.get_node_ids, wait)
        call.check()
        while self.handshake.move_on():
            nodes_before = call.nodes
            call = _Call(
                api=api,
                handshake=self.handshake,
                sites=list(nodes_before),
                known=self.known,
                enrolled=nodes_before,
                required=len(nodes_before),
            )
            # A site that came late has used up the time for the question before.
            deadline = clock.monotonic() + self.connect_seconds
            _ask(call, nodes_before.values, replace(wait, deadline=deadline))
            call.check()
        if self.spare_seconds is None:
            return call.nodes, _nothing
        return call.nodes, partial(_look_late, call, clock, self.tell)


ANYONE = Attendance()


def tell(api: FlowerApi, nodes: Iterable[int], content: bytes, *, clock: Clock) -> None:
    """Tell connected nodes something to which no answer counts.

    It stays with Flower only as long as the coordinator: so wait until they have it.
    """
    online = set(api.get_node_ids())
    messages = [
        Message(flower_site.pack_bytes(content), node, "query")
        for node in nodes
        if node in online
    ]
    out, end = {*api.push_messages(messages)}, clock.monotonic() + TELL_SECONDS
    while out and clock.monotonic() < end:
        clock.sleep(TELL_POLL_SECONDS)
        out -= {reply.metadata.reply_to_message_id for reply in api.pull_messages(out)}


class Candidate:
    """A site that is asked to join, while the others work: nothing waits for it."""

    def __init__(
        self, api: FlowerApi, handshake: Handshake, site: SiteId, node: int
    ) -> None:
        """Ask nothing yet.

        Args:
            api: Flower's own grid.
            handshake: Lets the site refuse.
            site: Its name.
            node: Where it is.
        """
        self._call = _Call(
            api=api,
            handshake=handshake,
            sites=[site],
            known={},
            enrolled={site: node},
            required=0,
        )
        self._node = node

    def look(self, now: float) -> str | None:
        """Ask the site, or see what it has answered.

        Returns:
            Why it does not join, empty if it does; None before it has answered.
        """
        call = self._call
        call.look({self._node}, now)
        if call.nodes:
            return ""
        texts = [*call.handshake.absent.values(), *call.doubts, *call.complaints]
        return "; ".join(texts) or None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Patience:
    deadline: float  # on the clock's monotonic time
    clock: Clock
    pause: Callable[[], None]
    tell: Tell


def _greet(
    api: FlowerApi, count: int, *, at_once: int | None, wait: _Patience
) -> list[int]:
    """Find interchangeable nodes, in ascending order.

    ``at_once`` of them are greeted, all by default, to have the processes that they
    share started before a round's time counts.
    """

    def pause(complaint: str) -> None:
        if wait.clock.monotonic() >= wait.deadline:
            raise SiteError(f"{complaint}; start them, or wait longer for them")
        wait.pause()

    while len(nodes := sorted(api.get_node_ids())) < count:
        pause(f"only {len(nodes)} of {count} Flower nodes are connected")
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
            pause(f"{len(silent)} Flower nodes do not answer")
    return nodes[:count]


def _nothing() -> None:
    """Look for nobody."""


def _ask(call: "_Call", nodes: Callable[[], Iterable[int]], wait: _Patience) -> None:
    """Ask one question of all nodes, until it is answered or time is up."""
    now, told = wait.clock.monotonic, None
    while not call.is_over(now()) and now() < min(wait.deadline, call.spared):
        call.look({*nodes()}, now())
        left = min(wait.deadline, call.spared) - now()
        found = call.connected(max(0.0, left))
        if told != (told := replace(found, seconds=0.0)):
            wait.tell(found)
        if not call.is_over(now()):
            wait.pause()


def _look_late(call: "_Call", clock: Clock, tell: Tell) -> None:
    """Ask nodes of missing sites that are connected by now."""
    now, there = clock.monotonic(), len(call.nodes)
    if not call.missing or now < call.looked + LATE_LOOK_SECONDS:
        return
    call.look({*call.api.get_node_ids()}, now)
    for complaint in call.complaints:
        _LOG.warning("%s; the run continues without it", complaint)
    call.complaints.clear()
    if len(call.nodes) > there:
        _LOG.info("%s came late", ", ".join([*call.nodes][there:]))
        tell(call.connected(0.0))


@dataclass(kw_only=True)
class _PendingNode:
    """A node that has not answered yet."""

    node: int
    name: str
    inquiry: Inquiry


@dataclass(kw_only=True)
class _Call:
    """The nodes that were asked, and the results.

    Attributes:
        enrolled: Node of each site, as far as it is known before the site answers.
        required: Sites that must answer.
        spare_seconds: See ``Attendance``.
        looked: When nodes were looked for last.
        enough: When enough sites were there.
        heard: When a missing site has shown last that it works on its answer.
        online: Nodes that are connected, as of the last look.
        again: When nodes of sites that were not ready are asked again.
        unready: Why they were not.
        out: Messages to which a reply may come, by their ids; with the time of those
            that ask for the state of the question.
    """

    api: FlowerApi
    handshake: Handshake
    sites: Sequence[SiteId]
    known: Mapping[SiteId, int]
    enrolled: Mapping[SiteId, int]
    required: int
    spare_seconds: float | None = None
    looked: float = -math.inf
    enough: float = math.inf
    heard: float = -math.inf
    online: Collection[int] = ()
    out: dict[str, tuple[_PendingNode, float | None]] = field(default_factory=dict)
    open: dict[int, _PendingNode] = field(default_factory=dict)
    met: set[int] = field(default_factory=set)
    nodes: dict[SiteId, int] = field(default_factory=dict)
    again: dict[int, float] = field(default_factory=dict)
    unready: dict[int, str] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    doubted: float = math.inf
    refused: float = math.inf

    @property
    def expected(self) -> list[SiteId]:
        """Sites that may be there."""
        return [site for site in self.sites if site not in self.handshake.absent]

    @property
    def missing(self) -> list[SiteId]:
        """Those that are not."""
        return [site for site in self.expected if site not in self.nodes]

    @property
    def awaited(self) -> list[int]:
        """Nodes of sites that are missing, as far as they are known."""
        return [self.enrolled[s] for s in self.missing if s in self.enrolled]

    @property
    def is_hopeless(self) -> bool:
        """Whether too many are absent, even if all others come."""
        return len(self.expected) < self.required

    @property
    def spared(self) -> float:
        """When the others are not waited for any more."""
        if self.spare_seconds is None:
            return math.inf
        return max(self.enough, self.heard) + self.spare_seconds

    def look(self, online: Collection[int], now: float) -> None:
        """Ask nodes that have come, and take in answers."""
        self.online, self.looked = online, now
        self.nodes |= {
            site: self.known[site]
            for site in self.expected
            if self.known.get(site) in online
        }
        for node in {*online} - self.met - {*self.known.values()}:
            if now >= self.again.get(node, -math.inf):
                self.ask(node, now)
        for reply in self.api.pull_messages([*self.out]) if self.out else ():
            self.note(reply, now)
        self.ask_after(now)
        if len(self.nodes) >= self.required:
            self.enough = min(self.enough, now)

    def connected(self, seconds: float) -> Connected:
        """Which sites have answered, and which of the others are connected.

        Args:
            seconds: How long the others may still come.
        """
        missing = tuple(self.missing)
        return Connected(
            there=tuple(self.nodes),
            missing=missing,
            seconds=seconds,
            absent=tuple(
                site
                for site in missing
                if site in self.enrolled and self.enrolled[site] not in self.online
            ),
        )

    def is_over(self, now: float) -> bool:
        """Whether there is nothing to wait for."""
        if self.complaints or self.is_hopeless:
            self.refused = min(self.refused, now)
            return not self.open or now - self.refused > DOUBT_SECONDS
        complete = len(self.nodes) == len(self.expected)
        return complete or now - self.doubted > DOUBT_SECONDS

    def check(self) -> None:
        """Say why the run cannot begin, if it cannot.

        Raises:
            SiteError: See ``Attendance.find_nodes``.
        """
        if not self.complaints and len(self.nodes) >= self.required:
            return
        texts = [*self.complaints, *self.handshake.absent.values()]
        texts += self.unready.values()
        found = self.connected(0.0)
        silent = [site for site in found.missing if site not in found.absent]
        if silent:
            has = "has" if len(silent) == 1 else "have"
            texts.append(f"{', '.join(silent)} {has} not answered")
        if found.absent:
            texts.append(not_connected(found.absent))
        texts = [*dict.fromkeys([*texts, *self.doubts])]
        separator = "\n  " if len(texts) > 1 else " "
        raise SiteError(f"the run cannot start:{separator}{separator.join(texts)}")

    def ask(self, node: int, now: float) -> None:
        """Ask a node for the first time."""
        asked = _PendingNode(node=node, name=new_name(0), inquiry=Inquiry(now))
        if self._post(asked, None):
            self.met.add(node)
            self.open[node] = asked

    def ask_after(self, now: float) -> None:
        """Probe nodes that have not answered."""
        for asked in self.open.values():
            if asked.inquiry.is_due(now):
                self._post(asked, now)

    def note(self, reply: Message, now: float) -> None:
        """Record a node's reply."""
        asked, probed = self.out.pop(reply.metadata.reply_to_message_id)
        if self.open.get(asked.node) is not asked:
            return  # It has answered already.
        if reply.has_error() and self._is_passing(asked, reply.error.code, probed, now):
            return
        word = None if reply.has_error() else flower_site.read_word(reply.content)
        if word is None:
            del self.open[asked.node]
            self._identify(asked.node, reply, now)
        elif probed is None:
            return  # A copy came there, of which nothing follows.
        elif word is Word.KNOWN and asked.node in self.awaited:
            self.heard = max(self.heard, now)
        elif asked.inquiry.is_missing(word, probed):
            self._post(asked, None)
            asked.inquiry.note_sent(now)
        elif reply.metadata.message_type == flower_site.PROBE and word is Word.ANSWERED:
            self._post(asked, now, flower_site.AGAIN)

    def _is_passing(
        self, asked: _PendingNode, code: int, probed: float | None, now: float
    ) -> bool:
        """Whether an error is no answer of the node's."""
        if code == NODE_GONE:
            self.met.discard(asked.node)  # It may come back.
            del self.open[asked.node]
            return True
        if code in LOST:
            asked.inquiry.note_lost(now)
        return code in LOST or probed is not None

    def _post(
        self, asked: _PendingNode, probed: float | None, kind: str = flower_site.PROBE
    ) -> bool:
        content = RecordDict()
        if probed is None:
            content, kind = flower_site.pack_bytes(self.handshake.question), "query"
        message = Message(content, asked.node, kind, group_id=asked.name)
        for message_id in self.api.push_messages([message]):
            if message_id:
                self.out[message_id] = asked, probed
                return True
        return False

    def _identify(self, node: int, reply: Message, now: float) -> None:
        try:
            site = self._site_of(reply)
        except SiteNotReady as error:
            self.met.discard(node)
            self.again[node], self.unready[node] = now + AGAIN_SECONDS, str(error)
            _LOG.warning("%s; it is asked again in %g s", error, AGAIN_SECONDS)
        except SiteError as error:
            self.complaints.append(str(error))
        except ProtocolError as error:
            # It is unknown whose node it is; it must not stop a run of others.
            self.doubts.append(f"Flower node {node}: {error}")
            self.doubted = min(self.doubted, now)
        else:
            self.unready.pop(node, None)
            if site in self.expected:
                self.nodes[site] = node

    def _site_of(self, reply: Message) -> SiteId:
        if reply.has_error():
            reason = wire.one_line(gist(reply.error.reason))
            raise ProtocolError(f"cannot answer: {reason}")
        site = self.handshake.site_of(flower_site.unpack_bytes(reply.content))
        if site in self.nodes:
            raise SiteError(f"two nodes claim to be site {site!r}: stop one of them")
        return site
