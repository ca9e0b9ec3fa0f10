"""The node against a real SuperLink: over TLS, with keys, and through misfortune."""

import contextlib
import datetime as dt
import gc
import importlib.util
import itertools
import sqlite3
import threading
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from cloud_adapters.flower import simulation as flower_simulation
from federation.clock import SystemClock
from federation.errors import SiteError

if importlib.util.find_spec("flwr") is None:
    pytest.skip("the flower extra is not installed", allow_module_level=True)
flower_simulation.import_flower()

from flwr.supernode import node_auth_http_interceptor  # noqa: E402
from support import flower_node_process, superlink  # noqa: E402
from support.running_node import Running  # noqa: E402
from support.superlink import SuperLink, wait_for  # noqa: E402

from cloud_adapters.flower import (  # noqa: E402
    connection as flower_connection,
    fleet as flower_fleet,
    node as flower_node,
    presence as flower_presence,
)
from cloud_adapters.flower.node import FlowerNode  # noqa: E402
from privacy.membership.certificates import Authority  # noqa: E402

pytestmark = [
    pytest.mark.flower,
    pytest.mark.slow,
    pytest.mark.xdist_group("superlink"),
]

MB = 1 << 20
LARGE = 6 * MB  # Flower sends an array in pieces of 5 MiB.


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SuperLink]:
    with superlink.serve(tmp_path_factory.mktemp("superlink"), forked=True) as running:
        yield running
        assert "Traceback" not in running.log


@pytest.fixture
def key(server: SuperLink) -> ec.EllipticCurvePrivateKey:
    """Of a node that the SuperLink knows."""
    made = ec.generate_private_key(ec.SECP384R1())
    server.register(made)
    return made


@pytest.fixture
def running(
    server: SuperLink,
    key: ec.EllipticCurvePrivateKey,
    caplog: pytest.LogCaptureFixture,
) -> Iterator[Running]:
    """A connected node, which in the end has no traceback in its log."""
    found = Running(server, key)
    try:
        found.connected()
        yield found
    finally:
        found.stop()
    assert "Traceback" not in caplog.text


def test_messages_of_any_size_come_through(running: Running):
    """Both kinds, whole, in both directions."""
    for what, size in [("query", 0), ("query", 1), ("query", LARGE), ("train", LARGE)]:
        assert running.ask(what, size) == {"error": None, "right": True}, (what, size)


def test_large_messages_leave_no_copy_behind(running: Running):
    """Neither what came nor what went is held until the next message."""
    size = LARGE  # So that little else counts.
    running.ask("train", size)  # Whatever is made but once is made now.
    # As often as outside tests: what holds itself goes with the next collection.
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    tracemalloc.start()
    try:
        for _ in range(2):
            running.ask("train", size)
            wait_for(lambda: _traced() < size / 4, "the last copy is gone")
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        gc.set_threshold(*before)
    # The task, the answer, and each once more on its way.
    assert most < 6 * size


def _traced() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def test_app_that_raises_does_not_end_the_node(
    running: Running, caplog: pytest.LogCaptureFixture
):
    """The aggregator learns what kind of error; its text may quote a record."""
    running.agent.broken = True
    failed = running.ask("query", 8)
    assert failed["code"] == 2
    assert "KeyError" in failed["error"]
    assert "record" not in failed["error"]
    assert "Traceback" in caplog.text  # It is in the site's own log, and there alone.
    assert "record 17" in caplog.text
    caplog.clear()
    message = running.server.ask("push_nothing", node=running.node.node_id)
    failed = running.server.ask("pull", message=message, size=0)
    assert "ProtocolError: a Flower message" in failed["error"]
    running.agent.broken = False
    assert running.ask("query", 8)["right"]


def test_code_of_a_bundle_is_never_run(running: Running):
    """It is not even fetched: the node runs what is installed at the site."""
    for what in ("query", "train"):
        assert running.ask(what, 8)["right"]
    assert "/v1/fleet/activate-node" in running.server.log, "or this could not fail"
    assert "/v1/fleet/get-fab" not in running.server.log
    assert not running.server.trap.exists()
    exec((running.server.folder / "app/shim/client_app.py").read_text(), {})  # noqa: S102
    assert running.server.trap.exists(), "or it would be no trap"
    running.server.trap.unlink()


def test_heartbeats_are_close_enough_for_the_aggregator(running: Running):
    """The grid gives up a node after so long without one; it may work for hours."""
    node, seen = running.node.node_id, []
    running.agent.free.clear()
    message = running.server.ask("push_query", node=node, size=8)
    assert running.agent.asked.wait(superlink.PATIENCE_SECONDS)

    def beaten() -> bool:
        until = running.server.online()[node]
        if until not in seen:
            seen.append(until)
        return len(seen) == 3

    wait_for(beaten, "two heartbeats have come")
    gaps = [after - before for before, after in itertools.pairwise(seen)]
    # A busy machine may come late to any one of them.
    often = flower_node.BEAT_EVERY_SECONDS
    assert often - 0.5 < min(gaps) < flower_presence.SILENT_SECONDS
    running.agent.free.set()
    assert running.server.ask("pull", message=message, size=8)["right"]


def test_stop_frees_the_key_at_once(server: SuperLink, key: ec.EllipticCurvePrivateKey):
    """The next process of the site need not wait until a heartbeat is old."""
    first = Running(server, key)
    node = first.connected()
    assert node in server.online()
    first.stop()
    assert node not in server.online()
    second = Running(server, key)
    try:
        assert second.connected() == node
        assert not second.said("has another active node")
        assert second.ask("query", 8)["right"]
    finally:
        second.stop()


def test_last_answer_of_a_node_that_stops_is_taken(
    running: Running, monkeypatch: pytest.MonkeyPatch
):
    """Flower would lose it if the node were gone before anybody looked."""
    monkeypatch.setattr(flower_node, "TAKEN_SECONDS", 3.0)
    running.agent.free.clear()
    message = running.server.ask("push_query", node=running.node.node_id, size=8)
    assert running.agent.asked.wait(superlink.PATIENCE_SECONDS)
    running.node.stopped.set()
    running.agent.free.set()
    wait_for(lambda: running.node._sent_at > 0, "the answer is sent")
    running.node.clock.sleep(0.3)  # Time in which a node that did not wait would go.
    answer = running.server.ask("pull", message=message, size=8)
    assert answer == {"error": None, "right": True}, running.words


def test_last_answer_of_a_node_with_time_is_taken_late(running: Running):
    """It need not go within a second, and a busy aggregator looks later than that."""
    running.agent.free.clear()
    message = running.server.ask("push_query", node=running.node.node_id, size=8)
    assert running.agent.asked.wait(superlink.PATIENCE_SECONDS)
    running.node.last.set()
    running.agent.free.set()
    wait_for(lambda: running.node._sent_at > 0, "the answer is sent")
    running.node.clock.sleep(2 * flower_node.TAKEN_SECONDS)
    answer = running.server.ask("pull", message=message, size=8)
    assert answer == {"error": None, "right": True}, running.words


def test_second_node_with_a_key_waits_for_the_first(
    running: Running, key: ec.EllipticCurvePrivateKey
):
    """And takes its place when it stops; meanwhile the first works on."""
    second = Running(running.server, key)
    try:
        wait_for(
            lambda: second.said("has another active node"), "the second node is refused"
        )
        assert running.ask("query", 8)["right"]
        assert second.node.node_id is None
        running.stop()
        assert second.connected() == running.node.node_id
        assert second.ask("query", 8)["right"]
    finally:
        second.stop()


def test_answer_survives_a_restart_of_the_superlink(
    running: Running, monkeypatch: pytest.MonkeyPatch
):
    """Its database knows the node and the question, and the node keeps the answer."""
    # A busy machine may need longer to start it than a node waits.
    monkeypatch.setattr(flower_fleet, "ACTIVE_SECONDS", superlink.PATIENCE_SECONDS)
    node = running.node.node_id
    running.agent.free.clear()
    message = running.server.ask("push_query", node=node, size=MB)
    assert running.agent.asked.wait(superlink.PATIENCE_SECONDS)
    running.server.kill()
    running.agent.free.set()
    wait_for(lambda: running.said("cannot be reached"), "the node misses the SuperLink")
    running.server.start()
    wait_for(lambda: node in running.server.online(), "a heartbeat has come")
    answer = running.server.ask("pull", message=message, size=MB)
    assert answer == {"error": None, "right": True}, running.words
    assert running.ask("train", MB)["right"]
    assert running.connected() == node
    assert running.said("connected to") == 1  # Twice would cost twenty seconds.


def test_node_at_work_outlasts_an_outage(
    running: Running, monkeypatch: pytest.MonkeyPatch
):
    """It would be counted as gone, and has no time to see that: it answers later."""
    node = running.node.node_id
    running.agent.free.clear()
    message = running.server.ask("push_query", node=node, size=8)
    assert running.agent.asked.wait(superlink.PATIENCE_SECONDS)
    monkeypatch.setattr(flower_fleet, "ACTIVE_SECONDS", 0.5)
    running.server.kill()
    SystemClock().sleep(5.0)
    running.server.start()
    wait_for(lambda: node in running.server.online(), "a heartbeat has come")
    monkeypatch.undo()
    running.agent.free.set()
    answer = running.server.ask("pull", message=message, size=8)
    assert answer == {"error": None, "right": True}, running.words
    assert running.ask("query", 8)["right"]
    assert running.said("connected to") == 1, running.words


def test_superlink_killed_in_the_middle_of_an_answer_costs_none(
    running: Running, monkeypatch: pytest.MonkeyPatch
):
    """Just before its pieces are on their way: each is sent again."""
    making = "make_push_object_fn_protobuf"
    make, killed = getattr(flower_connection, making), threading.Event()
    lock = threading.Lock()

    def make_killing(*arguments: Any) -> Any:
        carry = make(*arguments)

        def kill_and_carry(*piece: Any) -> Any:
            with lock:
                if not killed.is_set():
                    running.server.kill()
                    killed.set()
            return carry(*piece)

        return kill_and_carry

    monkeypatch.setattr(flower_fleet, "ACTIVE_SECONDS", superlink.PATIENCE_SECONDS)
    monkeypatch.setattr(flower_connection, making, make_killing)
    node, size = running.node.node_id, 12 * MB
    message = running.server.ask("push_query", node=node, size=size)
    assert killed.wait(superlink.PATIENCE_SECONDS)
    running.server.start()
    wait_for(lambda: node in running.server.online(), "a heartbeat has come")
    answer = running.server.ask("pull", message=message, size=size)
    assert answer == {"error": None, "right": True}, running.words


def test_run_that_was_stopped_does_not_end_the_node(running: Running):
    """Nobody wants its answer any more; the next run is another matter."""
    node = running.node.node_id
    running.agent.free.clear()
    running.server.ask("push_query", node=node, size=MB)
    assert running.agent.asked.wait(superlink.PATIENCE_SECONDS)
    running.server.stop_app()
    running.agent.free.set()
    running.server.start_app()
    answer = running.ask("query", 8)
    assert answer == {"error": None, "right": True}, running.words
    assert running.said("connected to") == 1, running.words


def _age_heartbeat(server: SuperLink, node: int, until: float) -> None:
    """Have a node be over sooner than its last heartbeat is old."""
    number = node - (1 << 64) if node >= 1 << 63 else node  # As SQLite has it.
    state = server.folder / server.database
    with contextlib.closing(sqlite3.connect(state)) as database, database:
        changed = database.execute(
            "UPDATE node SET online_until = ? WHERE node_id = ?", (until, number)
        )
        assert changed.rowcount == 1


def test_killed_node_comes_back_under_its_number(server: SuperLink):
    """Refused while its last heartbeat counts; then it works on."""
    key = ec.generate_private_key(ec.SECP384R1())
    node = server.register(key)
    process = flower_node_process.start(server, key, "killed")
    log = server.folder / "killed.log"
    try:
        # Nodes of other tests may be listed, too, until their time is over.
        wait_for(lambda: node in server.online(), "a heartbeat has come")
        # The SuperLink counts it before its answer has come.
        wait_for(lambda: "connected to" in log.read_text(), "the node knows")
    finally:
        process.kill()
        process.wait()
    killed = SystemClock().now()
    # It tries for longer than the SuperLink counts the one that was killed.
    assert server.online()[node] - killed < flower_fleet.TURN_SECONDS
    second = Running(server, key)
    try:
        wait_for(
            lambda: second.said("has another active node with this site's key"),
            "the second node is refused",
        )
        _age_heartbeat(server, node, killed)
        assert second.connected() == node
        assert second.ask("query", 8)["right"]
    finally:
        second.stop()


def _ended(node: FlowerNode) -> str:
    """What ends a node immediately."""
    with pytest.raises(SiteError) as caught:
        node.run()
    return str(caught.value)


def test_another_authority_ends_the_node(
    server: SuperLink, key: ec.EllipticCurvePrivateKey
):
    """Nothing is sent to who cannot prove to be the aggregator."""
    other = Authority.create("other", clock=SystemClock())
    text = _ended(flower_node_process.echo_node(key, server.address, other.pem))
    assert f"{server.address} does not prove that" in text
    assert "certificate authority" in text


def test_another_name_ends_the_node(server: SuperLink, key: ec.EllipticCurvePrivateKey):
    """A certificate holds for the names that are in it."""
    address = server.address.replace("127.0.0.1", "localhost")
    node = flower_node_process.echo_node(key, address, server.authority)
    assert "it is the aggregator" in _ended(node)


class FastClock(SystemClock):
    """Minutes pass in seconds."""

    def monotonic(self) -> float:
        return 30 * super().monotonic()


def test_key_that_was_never_registered_ends_the_node(server: SuperLink):
    """Flower tells it in the words that it has for a key in use, so not immediately."""
    stranger = ec.generate_private_key(ec.SECP384R1())
    words: list[str] = []
    node = flower_node_process.echo_node(
        stranger,
        server.address,
        server.authority,
        clock=FastClock(),
        listener=words.append,
    )
    text = _ended(node)
    assert words
    assert "stop the other agent" in text


class WrongClock(SystemClock):
    """One that is some seconds ahead until it is set."""

    ahead = 0.0

    def now(self) -> float:
        return super().now() + self.ahead


@pytest.mark.parametrize(
    ("ahead", "is_refused"), [(3.0, False), (-200.0, False), (20.0, True)]
)
def test_node_waits_until_a_clock_that_flower_refuses_is_set(
    server: SuperLink,
    key: ec.EllipticCurvePrivateKey,
    monkeypatch: pytest.MonkeyPatch,
    ahead: float,
    *,
    is_refused: bool,
):
    """Flower accepts signatures that are minutes old, and none of the future."""
    clock, words = WrongClock(), list[str]()
    clock.ahead = ahead

    def signed_at() -> dt.datetime:
        return dt.datetime.fromtimestamp(clock.now(), tz=dt.UTC)

    def listen(word: str) -> None:
        words.append(word)
        if "two clocks" in word:
            clock.ahead = 0.0
        if word.startswith("connected"):
            node.stopped.set()

    monkeypatch.setattr(node_auth_http_interceptor, "now", signed_at)
    node = flower_node_process.echo_node(
        key,
        server.address,
        server.authority,
        clock=clock,
        listener=listen,
        uniform=lambda *_: 0.1,
    )
    node.run()
    *refusals, last = words
    assert last.startswith("connected")
    assert bool(refusals) is is_refused, words
    assert all("this one is ahead" in each for each in refusals)


def test_unreachable_aggregator_is_tried_again():
    """With pauses, until it is told to stop."""
    key, words = ec.generate_private_key(ec.SECP384R1()), []
    waits: list[tuple[float, float]] = []

    def uniform(low: float, high: float) -> float:
        waits.append((low, high))
        return 0.0

    def listen(word: str) -> None:
        words.append(word)
        if len(words) == 8:
            node.stopped.set()

    authority = Authority.create("any", clock=SystemClock()).pem
    node = flower_node_process.echo_node(
        key, "127.0.0.1:1", authority, listener=listen, uniform=uniform
    )
    node.run()
    assert all("127.0.0.1:1 cannot be reached" in word for word in words)
    assert [high for _, high in waits] == [1, 2, 4, 8, 16, 30, 30, 30]
