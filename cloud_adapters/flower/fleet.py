"""A node's requests to Flower's Fleet API, and the meaning of their errors.

A request is made again while the aggregator still counts the node as active, so that a
restart of the SuperLink, or of the proxy before it, costs no message.
"""

import math
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import TypeVar

import httpx

from cloud_adapters.flower.facts import MOST_BEHIND_SECONDS, forbids_signing
from cloud_adapters.flower.private.node import ApiErrorCode, FlowerError
from cloud_adapters.net.outbound import proxy_note
from cloud_adapters.net.tls import clock_doubt
from federation.addresses import parse_address
from federation.errors import SiteError
from federation.protocols import Clock
from federation.wire import frame as wire

# The least that a SuperLink accepts; it counts a node as gone after two of these.
HEARTBEAT_SECONDS = 10.0
# A node that was heard of this recently is still counted as active: it continues where
# it was, and does not activate itself again, which would be refused.
ACTIVE_SECONDS = 2 * HEARTBEAT_SECONDS
MAX_WAIT_SECONDS = 30.0
# Between attempts to take the place of a node with the same key, and how long to try:
# Flower refuses a key that it does not know with the same words.
MAX_TURN_SECONDS = 4.0
TURN_SECONDS = 3 * ACTIVE_SECONDS
# How long the SuperLink may fail at a request while it answers heartbeats. If restored
# from a copy, it does not know newer runs, and would always fail at a message of one.
FAULT_SECONDS = 60.0
# How long a key that was accepted before may be refused: a clock may be set meanwhile.
# A revoked site ends sooner, because the proxy does not let it in.
DENIED_SECONDS = 300.0

# What a proxy or a server that is being restarted says.
# The last is that of an aggregator whose disk is full.
PASSING = frozenset({408, 425, 429, 500, 502, 503, 504, 507})
_FAULT = 500
_UNAUTHORIZED = 401
_FORBIDDEN = 403
_NOT_ACTIVATED = ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED

Uniform = Callable[[float, float], float]
Answer = TypeVar("Answer")


class NodeGone(Exception):
    """The connection is gone, or the node is no longer active."""


class Outage(NodeGone):
    """The aggregator or the connection to it is down, perhaps briefly."""


class SuperLinkFault(Outage):
    """The SuperLink failed at this request; it may answer others."""


class KeyInUse(NodeGone):
    """Another node is active under this key, or one that died is still counted."""


class Unanswerable(Exception):
    """A message cannot be answered; the next one can."""


@dataclass(kw_only=True)
class FleetCalls:
    """Makes requests for one node.

    Attributes:
        address: ``HOST:PORT`` of the aggregator.
        clock: Tells time.
        stopped: Ends all waits.
        listener: Called with one line about every failure that is waited out.
        uniform: Draws the waits.
        is_active: Whether the node has been accepted.
    """

    address: str
    clock: Clock
    stopped: threading.Event
    listener: Callable[[str], None]
    uniform: Uniform
    is_active: bool = False
    _heard: float = field(default=-math.inf, init=False)
    # Set by every failure; the first request that succeeds again clears it.
    _lost: threading.Event = field(default_factory=threading.Event, init=False)
    _refused_since: float | None = field(default=None, init=False)
    _turn_seconds: float = field(default=TURN_SECONDS, init=False)
    # The first refusal of the key since it was accepted: never, if it never was.
    _denied_since: float = field(default=-math.inf, init=False)

    def begin(self) -> None:
        """The node asks for admission; until then, each failure is reported."""
        self.is_active, self._heard = False, -math.inf

    def succeed(self) -> None:
        """Note that the node was accepted."""
        self.is_active, self._refused_since = True, None
        self._turn_seconds = TURN_SECONDS
        self._denied_since = math.inf

    def hear(self) -> None:
        """Note that the aggregator has just answered."""
        self._heard = self.clock.monotonic()

    def pause(self, error: NodeGone, attempt: int, *, most: float = math.inf) -> None:
        """Full jitter, as in ``cloud_adapters.storage.retry``, and at least a bit."""
        longest = min(MAX_WAIT_SECONDS, most, 0.5 * 2.0 ** min(attempt, 16))
        seconds = self.uniform(0.2, longest)
        self._lost.set()
        self.listener(f"{error}; trying again in {seconds:.1f} s")
        self.stopped.wait(seconds)

    def call(self, request: Callable[[], Answer]) -> Answer:
        """Make a request, again while the aggregator still counts this node.

        Raises:
            SiteError: Trying again is pointless.
            NodeGone: The node must activate itself again.
            Unanswerable: The aggregator does not want this, and never will; or it has
                failed at it for ``FAULT_SECONDS``.
        """
        attempt, failing_since = 0, math.inf
        while True:
            try:
                answer = request()
            except httpx.TransportError as error:
                problem = self._unreachable(error)
            except httpx.HTTPStatusError as error:
                problem = self._refused(error.response)
            else:
                self.hear()
                if attempt and self._lost.is_set():
                    self._lost.clear()
                    self.listener(f"{self.address} answers again")
                return answer
            attempt += 1
            now = self.clock.monotonic()
            failing_since = min(failing_since, now)
            over = now - self._heard > ACTIVE_SECONDS or self.stopped.is_set()
            if over or not isinstance(problem, Outage):
                raise problem
            seconds = now - failing_since
            if isinstance(problem, SuperLinkFault) and seconds > FAULT_SECONDS:
                raise Unanswerable(f"{problem} (for {seconds:.0f} s)")
            self.pause(problem, attempt, most=MAX_TURN_SECONDS)

    def _unreachable(self, error: httpx.TransportError) -> Exception:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, ssl.SSLCertVerificationError):
                if doubt := clock_doubt(cause):
                    return Outage(f"{self.address} cannot be trusted yet: {doubt}")
                return SiteError(
                    f"{self.address} does not prove that it is the aggregator: "
                    f"{cause.verify_message}; compare its address and the certificate "
                    "authority with the ones from the aggregator's operator"
                )
            cause = cause.__cause__ or cause.__context__
        host, _ = parse_address(self.address, key="address")
        return Outage(f"{self.address} cannot be reached: {error}{proxy_note(host)}")

    def _refused(self, response: httpx.Response) -> Exception:
        flower = FlowerError.from_json(response.text)
        what = f"HTTP {response.status_code}"
        if flower is not None:
            what += f", Flower error {flower.code}: {flower.message}"
        elif reason := _detail(response):
            what += f": {reason}"
        if response.status_code in PASSING:
            passing = SuperLinkFault if response.status_code == _FAULT else Outage
            return passing(f"{self.address} refuses: {what}")
        if flower is not None and flower.code == _NOT_ACTIVATED:
            return self._not_activated()
        # Flower's own 403 is about a run, which was stopped perhaps.
        by_proxy = response.status_code == _FORBIDDEN and flower is None
        denied = by_proxy or response.status_code == _UNAUTHORIZED
        if denied:
            return self._denied(response, what, by_proxy=by_proxy)
        kind = Unanswerable if self.is_active else NodeGone
        return kind(f"{self.address} refuses: {what}")

    def _denied(
        self, response: httpx.Response, what: str, *, by_proxy: bool
    ) -> Exception:
        """Why a node's signature or certificate is not accepted."""
        skew = self._skew(response, by_proxy=by_proxy)
        if skew is not None:
            return skew
        if self.is_active or (not by_proxy and self._may_pass()):
            return NodeGone(f"{self.address} refuses: {what}")
        if by_proxy:
            return SiteError(
                f"{self.address} rejects this site: its certificate is missing, "
                "expired or revoked; ask the aggregator's operator for an invitation, "
                "and enrol the site again"
            )
        return SiteError(
            f"{self.address} does not know this site's key ({what}): enrol the "
            "site, or ask the aggregator's operator whether it was revoked"
        )

    def _may_pass(self) -> bool:
        """Whether a key that was accepted before has not been refused for long."""
        now = self.clock.monotonic()
        self._denied_since = min(self._denied_since, now)
        return now - self._denied_since < DENIED_SECONDS

    def _skew(self, response: httpx.Response, *, by_proxy: bool) -> Outage | None:
        """The clocks, if they explain a refusal of a signature or a certificate."""
        date = response.headers.get("Date", "")
        try:
            ahead = self.clock.now() - parsedate_to_datetime(date).timestamp()
        except ValueError:
            return None  # It does not tell the time.
        # A few seconds explain a refused signature, but not a refused certificate.
        far = abs(ahead) > MOST_BEHIND_SECONDS if by_proxy else forbids_signing(ahead)
        if not far:
            return None
        # By a clock that was set back, a node that left stays active for so long.
        self._turn_seconds = TURN_SECONDS + abs(ahead)
        return Outage(
            f"{self.address} refuses this site: one of the two clocks is "
            f"{abs(ahead):.0f} s off (this one is {'ahead' if ahead > 0 else 'behind'})"
            "; set the wrong one (NTP)"
        )

    def _not_activated(self) -> Exception:
        now = self.clock.monotonic()
        if self._refused_since is None:
            self._refused_since = now
        if now - self._refused_since < self._turn_seconds:
            return KeyInUse(
                f"{self.address} has another active node with this site's key, or does "
                f"not know the key; a dead node is forgotten after {ACTIVE_SECONDS:g} s"
            )
        return SiteError(
            f"{self.address} does not activate this site's key: stop the other agent "
            "that uses it; or enrol the site, or ask the aggregator's operator whether "
            "it was revoked"
        )


def _detail(response: httpx.Response) -> str:
    """Why our gate at the SuperLink refuses; empty if Flower itself does."""
    try:
        found = response.json()
    except ValueError:
        return ""
    reason = found.get("detail") if isinstance(found, dict) else None
    return wire.one_line(reason) if isinstance(reason, str) else ""
