"""What a node makes of a request that fails: again, anew, never, or an end."""

import importlib.util
import json
import ssl
import threading
from collections.abc import Callable
from email.utils import formatdate
from typing import Any

import pytest

from cloud_adapters.flower import simulation as flower_simulation
from federation.clock import VirtualClock
from federation.errors import SiteError

if importlib.util.find_spec("flwr") is None:
    pytest.skip("the flower extra is not installed", allow_module_level=True)
flower_simulation.import_flower()

import httpx  # noqa: E402

from cloud_adapters.flower import fleet as flower_fleet  # noqa: E402
from cloud_adapters.flower.fleet import (  # noqa: E402
    FleetCalls,
    KeyInUse,
    NodeGone,
    Outage,
    Unanswerable,
)

pytestmark = pytest.mark.flower

REQUEST = httpx.Request("POST", "https://host:1/v1/fleet/pull-messages")
GONE = httpx.ConnectError("refused", request=REQUEST)


def status(code: int, flower: int | None = None) -> httpx.HTTPStatusError:
    """An answer that is none, by a proxy or with a code of Flower's."""
    text = "" if flower is None else json.dumps({"code": flower, "detail": "no"})
    response = httpx.Response(code, text=text, request=REQUEST)
    return httpx.HTTPStatusError("no", request=REQUEST, response=response)


def gate(code: int, detail: Any) -> httpx.HTTPStatusError:
    """A refusal of the gate at the SuperLink, or of somebody who poses as it."""
    response = httpx.Response(code, json={"detail": detail}, request=REQUEST)
    return httpx.HTTPStatusError("no", request=REQUEST, response=response)


class Aggregator:
    """Answers with errors, one after the other, and then as it should."""

    def __init__(self, clock: VirtualClock, *errors: Exception) -> None:
        self.errors = list(errors)
        self.clock = clock
        self.asked = 0

    def __call__(self) -> str:
        self.asked += 1
        self.clock.sleep(1.0)
        if self.errors:
            raise self.errors.pop(0)
        return "answer"


class Node:
    """A node that is active and has just been heard of."""

    def __init__(self, *, is_active: bool = True) -> None:
        self.clock = VirtualClock(1000.0)
        self.words: list[str] = []
        self.waits: list[float] = []
        self.calls = FleetCalls(
            address="host:1",
            clock=self.clock,
            stopped=threading.Event(),
            listener=self.words.append,
            uniform=lambda _, high: self.waits.append(high) or 0.0,  # type: ignore[redundant-expr]
        )
        self.calls.begin()
        if is_active:
            self.calls.succeed()
            self.calls.hear()

    def ask(self, *errors: Exception) -> str:
        """Make a request that first meets some errors."""
        return self.calls.call(Aggregator(self.clock, *errors))


@pytest.mark.parametrize("error", [GONE, *map(status, sorted(flower_fleet.PASSING))])
def test_passing_failure_costs_a_wait(error: Exception):
    """The aggregator still counts the node: it continues where it was."""
    node = Node()
    assert node.ask(error, error, error) == "answer"
    assert node.waits == [1.0, 2.0, 4.0]
    *troubles, last = node.words
    assert all("host:1" in word and "trying again" in word for word in troubles)
    assert last == "host:1 answers again"


def test_outage_names_the_proxy_in_between(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("https_proxy", "http://proxy.example:3128")
    node = Node()
    node.ask(GONE)
    assert "proxy.example:3128 of https_proxy" in node.words[0]


def test_two_requests_that_succeed_again_are_told_once():
    """A heartbeat and a question for tasks fail and succeed together."""
    node = Node()
    heartbeat = iter((GONE, None))

    def beat() -> str:
        if error := next(heartbeat):
            raise error
        return node.ask(GONE)  # Which succeeds while this waits for its answer.

    assert node.calls.call(beat) == "answer"
    assert node.words.count("host:1 answers again") == 1
    node.ask(GONE)
    assert node.words.count("host:1 answers again") == 2


def test_long_outage_is_for_a_new_connection():
    """After two intervals without a heartbeat another node may have the key."""
    node = Node()
    with pytest.raises(Outage, match="cannot be reached"):
        node.ask(*[GONE] * 100)
    assert flower_fleet.ACTIVE_SECONDS == 20.0
    assert len(node.waits) == 20


def test_heartbeats_count_as_word_of_the_aggregator():
    """Or the answer after an hour of work would be lost to the first hiccup."""
    node = Node()
    node.clock.sleep(3600.0)
    with pytest.raises(Outage):
        node.ask(GONE)
    node.calls.hear()
    assert node.ask(GONE) == "answer"


def beating(node: Node, error: Exception) -> Callable[[], str]:
    """A request that always fails, at an aggregator that answers heartbeats."""

    def fail() -> str:
        node.clock.sleep(1.0)
        node.calls.hear()
        if node.clock.monotonic() > 2000.0:
            return "answer"
        raise error

    return fail


def test_request_at_which_the_superlink_fails_does_not_hold_up_the_others():
    """It has lost the run, say: its database was restored from a copy."""
    node = Node()
    with pytest.raises(Unanswerable, match=r"HTTP 500 \(for 61 s\)"):
        node.calls.call(beating(node, status(500)))
    node.calls.hear()
    assert node.ask(status(500)) == "answer"


@pytest.mark.parametrize("error", [GONE, status(502), status(507)])
def test_other_outages_may_last(error: Exception):
    """An answer is worth the wait until a disk has space again."""
    node = Node()
    assert node.calls.call(beating(node, error)) == "answer"


def test_node_that_is_not_let_in_yet_hears_of_it_at_once():
    """How long to wait then is for its main loop."""
    with pytest.raises(Outage):
        Node(is_active=False).ask(GONE)


def test_stopped_node_makes_no_second_attempt():
    """Its operator waits."""
    node = Node()
    node.calls.stopped.set()
    with pytest.raises(Outage):
        node.ask(GONE)
    assert not node.waits


@pytest.mark.parametrize(
    ("error", "is_active", "kind", "text"),
    [
        (status(401), True, NodeGone, "refuses: HTTP 401"),
        (status(403), True, NodeGone, "refuses: HTTP 403"),
        (status(403, 2007), True, Unanswerable, "Flower error 2007: no"),
        (status(404), True, Unanswerable, "refuses: HTTP 404"),
        (status(413), True, Unanswerable, "refuses: HTTP 413"),
        (
            gate(413, "limits.site_mib\n"),
            True,
            Unanswerable,
            r"HTTP 413: limits\.site_mib",
        ),
        (gate(409, ["no text"]), True, Unanswerable, "HTTP 409$"),
        (status(401), False, SiteError, "not know this site's"),
        (status(403), False, SiteError, "expired or revoked"),
        (status(404), False, NodeGone, "refuses: HTTP 404"),
        (status(412, 2003), False, NodeGone, "Flower error 2003"),
    ],
)
def test_other_refusals(
    *, error: Exception, is_active: bool, kind: type[Exception], text: str
):
    """Those of a message are not those of the node, and no one waits for either."""
    node = Node(is_active=is_active)
    with pytest.raises(kind, match=text) as caught:
        node.ask(error)
    assert type(caught.value) is kind
    assert not node.waits


def refused(node: Node) -> Callable[[], object]:
    """A request to be let in that Flower refuses."""
    return Aggregator(node.clock, status(412, 2004))


def test_key_that_stays_refused_ends_the_node():
    """A node that died is forgotten sooner; what is left is a person's mistake."""
    node = Node(is_active=False)
    for _ in range(60):
        with pytest.raises(KeyInUse, match="another active node"):
            node.calls.call(refused(node))
    with pytest.raises(SiteError, match="stop the other agent"):
        node.calls.call(refused(node))


def test_time_of_refusal_counts_from_the_last_success():
    """A node that lives for weeks may meet its own shadow more than once."""
    node = Node(is_active=False)
    with pytest.raises(KeyInUse):
        node.calls.call(refused(node))
    node.calls.succeed()
    node.clock.sleep(10 * flower_fleet.TURN_SECONDS)
    node.calls.begin()
    with pytest.raises(KeyInUse):
        node.calls.call(refused(node))


def test_wrong_certificate_is_found_below_other_errors():
    """It ends the node: nothing may be sent to who is not the aggregator."""
    with pytest.raises(SiteError, match="aggregator: self-signed certificate; compare"):
        Node().ask(untrusted(18, "self-signed certificate"))


def untrusted(code: int, reason: str) -> httpx.ConnectError:
    """A handshake that ends since the other side's certificate is not believed."""
    cause = ssl.SSLCertVerificationError("certificate verify failed")
    cause.verify_code, cause.verify_message = code, reason
    error = httpx.ConnectError("handshake", request=REQUEST)
    error.__cause__ = RuntimeError("a library between")
    error.__cause__.__context__ = cause
    return error


@pytest.mark.parametrize(
    ("code", "reason"),
    [(9, "certificate is not yet valid"), (10, "certificate has expired")],
)
def test_certificate_of_another_time_points_at_the_clocks(code: int, reason: str):
    """It is waited out: enrolling again would not help."""
    node = Node(is_active=False)
    with pytest.raises(Outage, match=r"by this machine's clock: set whichever"):
        node.ask(untrusted(code, reason))


def untimely(node: Node, seconds: float, code: int = 401) -> httpx.HTTPStatusError:
    """A refusal by a machine whose clock is ahead of the node's."""
    there = formatdate(node.clock.now() + seconds, usegmt=True)
    response = httpx.Response(code, headers={"Date": there}, request=REQUEST)
    return httpx.HTTPStatusError("no", request=REQUEST, response=response)


@pytest.mark.parametrize("is_active", [True, False])
@pytest.mark.parametrize(
    ("code", "seconds", "word"),
    [
        (401, 600.0, "behind"),
        (401, -600.0, "ahead"),
        (401, -6.0, "ahead"),
        (401, -130.0, "ahead"),
        (403, 600.0, "behind"),
        (403, -600.0, "ahead"),
    ],
)
def test_clock_that_is_wrong_is_an_outage(
    seconds: float, word: str, code: int, *, is_active: bool
):
    """Signatures and certificates of another time are refused like unknown ones."""
    node = Node(is_active=is_active)
    error = untimely(node, seconds, code)
    match = rf"one of the two clocks is \d+ s off .this one is {word}"
    with pytest.raises(Outage, match=match):
        node.ask(*[error] * 100)


@pytest.mark.parametrize("seconds", [-3.0, 100.0])
def test_clock_by_which_signatures_are_accepted_explains_no_refusal(seconds: float):
    """Flower accepts signatures that are minutes old, and almost none of the future."""
    node = Node(is_active=False)
    with pytest.raises(SiteError, match="not know this site's"):
        node.ask(untimely(node, seconds))


def test_revocation_ends_a_node_whose_clock_is_some_seconds_ahead():
    """No certificate expires in that time, and a revoked one is refused at once."""
    node = Node()
    node.calls.begin()
    with pytest.raises(SiteError, match="expired or revoked"):
        node.ask(untimely(node, -20.0, 403))


def test_key_that_was_accepted_before_may_be_refused_for_some_minutes():
    """Its clock may be set meanwhile; a key that stays refused was taken out."""
    node = Node()
    node.calls.begin()
    for _ in range(300):
        with pytest.raises(NodeGone, match="refuses: HTTP 401"):
            node.ask(status(401))
    with pytest.raises(SiteError, match="not know this site's"):
        node.ask(status(401))
    node.calls.succeed()
    node.calls.begin()
    with pytest.raises(NodeGone, match="refuses: HTTP 401"):
        node.ask(status(401))


def test_place_of_a_node_outlasts_a_clock_that_was_set_back():
    """By that clock, the node's last heartbeat is of the future."""
    node = Node(is_active=False)
    with pytest.raises(Outage):
        node.ask(untimely(node, 3600.0))
    for _ in range(36):
        with pytest.raises(KeyInUse):
            node.calls.call(refused(node))
        node.clock.sleep(100.0)
    node.clock.sleep(100.0)
    with pytest.raises(SiteError, match="stop the other agent"):
        node.calls.call(refused(node))
