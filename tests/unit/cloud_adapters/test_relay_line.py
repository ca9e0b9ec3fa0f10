"""The line between a site and its relay: TLS with certificates on both sides."""

import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any

import pytest
from support.agents import site_config

from cloud_adapters.net.tls import client_context
from cloud_adapters.relays import server
from cloud_adapters.relays.node import GivenAnswer, RelayedNode, knock
from cloud_adapters.relays.server import CloudServer, LineLimits, server_context
from cloud_adapters.relays.task_queue import QuestionKind, RelayQuestion, TaskQueue
from deploy.doctor import relay as doctor_relay
from deploy.doctor.checks import Check
from deploy.site_host import relay_certificate
from federation.clock import SystemClock, VirtualClock
from federation.errors import SiteError
from federation.ids import SiteId
from federation.protocols import Buffer
from privacy.membership.certificates import (
    Authority,
    key_pem,
    new_key,
    signing_request,
)
from privacy.secret_files import replace_private

CLOCK = SystemClock()
EAST, WEST = SiteId("east"), SiteId("west")


@dataclass
class Cloud:
    """A relay's server, and the certificates of its sites.

    Attributes:
        folder: Of everything.
        queue: What the relay asks.
        port: Where it listens.
        authority: Certifies sites.
        server: What listens there.
        stopped: Ends its waits.
    """

    folder: Path
    queue: TaskQueue
    port: int
    authority: Authority
    server: CloudServer
    stopped: threading.Event = field(default_factory=threading.Event)

    def certificate(self, name: str, authority: Authority | None = None) -> Path:
        """A site's certificate, as enrolment gives it."""
        key, path = new_key(), self.folder / f"{name}.pem"
        signer = authority or self.authority
        issued = signer.issue_site(name, signing_request(name, key))
        replace_private(path, issued + key_pem(key))
        return path

    def node(self, name: str, **changes: Any) -> RelayedNode:
        """A site that repeats what it is asked."""
        given = {
            "introduce": lambda sealed: b"introduced " + sealed,
            "answer": lambda frame, _seconds: GivenAnswer(body=2 * frame, lasts=True),
            "address": f"127.0.0.1:{self.port}",
            "authority": (self.folder / "relay" / "ca.crt").read_bytes(),
            "certificate": self.folder / f"{name}.pem",
            "uniform": lambda _low, _high: 0.01,
        }
        return RelayedNode(**given | changes)

    @contextmanager
    def running(self, node: RelayedNode) -> Iterator[None]:
        """Serve a site during the block."""
        with ThreadPoolExecutor(1) as pool:
            served = pool.submit(node.run)
            try:
                yield
            finally:
                node.stopped.set()
                served.result(10)

    def ask(
        self,
        site: SiteId,
        body: bytes,
        *,
        kind: QuestionKind = QuestionKind.TASK,
        seconds: float = 5.0,
        max_bytes: int = 100,
    ) -> Buffer | None:
        """Ask one site."""
        question = RelayQuestion.of(kind, [body], seconds=5.0, max_bytes=max_bytes)
        asked = {site: question}
        return self.queue.ask(asked, seconds=seconds, stopped=self.stopped)[site]


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    folder = tmp_path_factory.mktemp("cloud")
    authority = Authority.create("the aggregator's", clock=CLOCK)
    context = server_context(authority.pem)
    relay_certificate.prepare(folder / "relay", ("127.0.0.1",), context, CLOCK)
    queue = TaskQueue([EAST], CLOCK)
    limits = LineLimits(wait_seconds=0.1, max_connections=2, head_seconds=0.2)
    serves = CloudServer(
        queue,
        context,
        host="127.0.0.1",
        port=0,
        clock=CLOCK,
        scratch=folder / "scratch",
        limits=limits,
    )
    with serves.listening() as port:
        made = Cloud(folder, queue, port, authority, serves)
        made.certificate(EAST)
        made.certificate(WEST)
        yield made


def test_a_relay_listens_at_an_address_of_ipv6(cloud: Cloud):
    """Which ``serve.listen`` writes in brackets."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("there is no IPv6 here")
    context = server_context(cloud.authority.pem)
    serves = CloudServer(cloud.queue, context, host="::1", port=0, clock=CLOCK)
    with serves.listening() as port:
        socket.create_connection(("::1", port), timeout=10).close()


def test_site_answers_its_relay(cloud: Cloud):
    with cloud.running(cloud.node(EAST)):
        assert cloud.ask(EAST, b"task") == b"tasktask"
        proposal = cloud.ask(EAST, b"run", kind=QuestionKind.INTRODUCE)
        assert proposal == b"introduced run"


def test_same_question_gets_the_same_answer(cloud: Cloud):
    """As from a relay that was restarted; work is not done twice."""
    done = []

    def answer(frame: bytes, seconds: float) -> GivenAnswer:
        assert seconds == 5.0
        done.append(frame)
        return GivenAnswer(body=b"%d" % len(done), lasts=frame != b"failed")

    with cloud.running(cloud.node(EAST, answer=answer)):
        found = [cloud.ask(EAST, body) for body in (b"a", b"a", b"failed", b"failed")]
    assert found == [b"1", b"1", b"2", b"3"]


@pytest.mark.parametrize("error", [RuntimeError("record 7"), OSError("no space")])
def test_question_that_fails_does_not_end_the_site(cloud: Cloud, error: Exception):
    """Nor is an error of its own disk one of the line; it quotes no record."""
    said: list[str] = []

    def introduce(_sealed: bytes) -> bytes:
        raise error

    node = cloud.node(EAST, introduce=introduce, listener=said.append)
    with cloud.running(node):
        assert cloud.ask(EAST, b"run", kind=QuestionKind.INTRODUCE) == b""
        assert cloud.ask(EAST, b"task") == b"tasktask"
    assert said[1:] == [f"a question of the relay failed: {type(error).__name__}"]


@pytest.mark.parametrize("name", ["\xe9", "", "a b", "../alive"])
def test_a_question_without_a_proper_name_does_not_end_the_site(
    cloud: Cloud, name: str
):
    """The name comes from the relay, and is part of the next request."""
    told: list[str] = []
    question = RelayQuestion(
        name=name, kind=QuestionKind.TASK, pieces=(b"x",), seconds=5.0, max_bytes=100
    )
    with cloud.running(cloud.node(EAST, listener=told.append)):
        asked = {EAST: question}
        answers = cloud.queue.ask(asked, seconds=0.2, stopped=cloud.stopped)
        assert answers == {EAST: None}
        assert cloud.ask(EAST, b"task") == b"tasktask"
    assert any("a question whose name" in line for line in told)


def test_a_site_reads_no_long_answer_but_a_question(cloud: Cloud):
    """Or a relay could fill its memory."""
    context = server_context(cloud.authority.pem)
    relay_certificate.prepare(cloud.folder / "relay", ("127.0.0.1",), context, CLOCK)

    def answer() -> None:
        connection, _ = listener.accept()
        with context.wrap_socket(connection, server_side=True) as secured:
            secured.recv(1 << 16)
            secured.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 9999999\r\n\r\n")

    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        ThreadPoolExecutor(1) as pool,
    ):
        answered = pool.submit(answer)
        with pytest.raises(SiteError, match="an answer of 9999999 bytes"):
            knock(
                f"127.0.0.1:{listener.getsockname()[1]}",
                (cloud.folder / "relay" / "ca.crt").read_bytes(),
                cloud.folder / "east.pem",
            )
        answered.result(10)


def test_answer_larger_than_asked_for_is_not_read(cloud: Cloud):
    """The site tries again, as after any broken line."""
    said: list[str] = []
    node = cloud.node(EAST, listener=said.append)
    with cloud.running(node):
        assert cloud.ask(EAST, b"x" * 51, seconds=0.3) is None
        assert cloud.ask(EAST, b"x" * 50) == b"x" * 100
    assert any("HTTP 413 for an answer" in line for line in said)


def test_relay_holds_one_answer_of_a_site(cloud: Cloud):
    """Or a site could fill its memory over many connections."""
    pinned = (cloud.folder / "relay" / "ca.crt").read_bytes()
    context = client_context(pinned, cloud.folder / f"{EAST}.pem")
    question = RelayQuestion.of(QuestionKind.TASK, [b"x"], seconds=5.0, max_bytes=100)
    way = server.ANSWER + question.name
    with (
        ThreadPoolExecutor(1) as pool,
        closing(HTTPSConnection("127.0.0.1", cloud.port, context=context)) as first,
        closing(HTTPSConnection("127.0.0.1", cloud.port, context=context)) as second,
    ):
        asked = pool.submit(cloud.ask, EAST, b"x")
        for line in (first, second):
            line.timeout = 5.0
            line.request("POST", server.NEXT)
            assert line.getresponse().read() == b"x"
        first.putrequest("POST", way)
        first.putheader("Content-Length", "100")
        first.endheaders(b"half")
        deadline = CLOCK.monotonic() + 5.0
        while not cloud.server._reading and CLOCK.monotonic() < deadline:
            CLOCK.sleep(0.005)
        second.request("POST", way, b"whole")
        assert second.getresponse().status == 204
        assert asked.result(5.0) == b"whole"
        with pytest.raises((ConnectionError, ssl.SSLError)):  # It is not late.
            first.getresponse()


def test_long_messages_are_views_into_files_without_a_name(cloud: Cloud):
    """At both ends, so that the memory of a model is not needed."""
    kinds = []

    def answer(frame: Buffer, _seconds: float) -> GivenAnswer:
        kinds.append(type(frame))
        return GivenAnswer(body=bytes(frame[::-1]), lasts=True)

    body = bytes(range(250)) * 5000
    scratch = cloud.folder / "of-the-site"
    with cloud.running(cloud.node(EAST, answer=answer, scratch=scratch)):
        found = cloud.ask(EAST, body, max_bytes=len(body))
    assert isinstance(found, memoryview)
    assert found == body[::-1]
    assert kinds == [memoryview]
    assert [*scratch.iterdir()] == [*(cloud.folder / "scratch").iterdir()] == []


def test_a_relay_without_room_says_so(
    cloud: Cloud, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """The site tries again: there may be room by then."""
    said: list[str] = []
    full = cloud.folder / "relay" / "ca.crt"  # No folder.
    body = bytes(700_000)
    with cloud.running(cloud.node(EAST, listener=said.append)):
        with monkeypatch.context() as patched:
            patched.setattr(cloud.server, "scratch", full)
            while not any("HTTP 507 for an answer" in line for line in said):
                found = cloud.ask(EAST, body, seconds=0.3, max_bytes=2 * len(body))
                assert found is None
        assert cloud.ask(EAST, body, max_bytes=2 * len(body)) == 2 * body
    assert "answer of site east" in caplog.text


def test_a_new_connection_ends_the_oldest_of_its_site(cloud: Cloud):
    """A site has two: one with a question, and one that reports that it is there."""
    pinned = (cloud.folder / "relay" / "ca.crt").read_bytes()
    context = client_context(pinned, cloud.folder / f"{EAST}.pem")
    with ExitStack() as stack:
        lines = [
            stack.enter_context(
                closing(HTTPSConnection("127.0.0.1", cloud.port, context=context))
            )
            for _ in range(3)
        ]
        for line in lines:
            line.connect()
            line.auto_open = 0
            assert hears(line)
        assert [hears(line) for line in lines] == [False, True, True]


@pytest.mark.slow
def test_a_site_that_is_sending_a_long_answer_is_not_silent(cloud: Cloud):
    """However long its line takes: every piece shows that it is there."""
    queue = TaskQueue([EAST], CLOCK, silent_seconds=0.4)
    context = server_context(cloud.authority.pem)
    relay_certificate.prepare(cloud.folder / "relay", ("127.0.0.1",), context, CLOCK)
    serves = CloudServer(queue, context, host="127.0.0.1", port=0, clock=CLOCK)
    pinned = (cloud.folder / "relay" / "ca.crt").read_bytes()
    own = client_context(pinned, cloud.folder / f"{EAST}.pem")
    question = RelayQuestion.of(QuestionKind.TASK, [b"x"], seconds=5.0, max_bytes=100)
    with (
        ThreadPoolExecutor(1) as pool,
        serves.listening() as port,
        closing(HTTPSConnection("127.0.0.1", port, context=own)) as line,
    ):
        asked = pool.submit(
            queue.ask,
            {EAST: question},
            seconds=5.0,
            patience=0.4,
            stopped=cloud.stopped,
        )
        line.request("POST", server.NEXT)
        assert line.getresponse().read() == b"x"
        line.putrequest("POST", server.ANSWER + question.name)
        line.putheader("Content-Length", "16")
        line.endheaders()
        for _ in range(16):
            CLOCK.sleep(0.05)
            line.send(b".")
        assert line.getresponse().status == 204
        assert asked.result(5.0) == {EAST: 16 * b"."}


def hears(line: HTTPSConnection) -> bool:
    """Whether a relay still answers on a connection."""
    try:
        line.request("POST", server.ALIVE)
        return line.getresponse().read() == b""
    except (HTTPException, OSError):
        return False


def test_a_request_whose_head_comes_slowly_is_ended(cloud: Cloud):
    """However often a byte comes."""
    pinned = (cloud.folder / "relay" / "ca.crt").read_bytes()
    context = client_context(pinned, cloud.folder / f"{EAST}.pem")
    begun, is_open = CLOCK.monotonic(), True
    with (
        socket.create_connection(("127.0.0.1", cloud.port), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as line,
    ):
        line.settimeout(0.05)
        while is_open and CLOCK.monotonic() - begun < 5.0:
            try:
                line.sendall(b"P")
                is_open = line.recv(1) != b""
            except TimeoutError:
                pass
            except OSError:
                is_open = False
    assert not is_open


def test_connections_without_a_certificate_are_bounded(
    cloud: Cloud, caplog: pytest.LogCaptureFixture
):
    """A stranger takes no place of a site, and fills no log."""
    limits = LineLimits(max_strangers=1)
    context = server_context(cloud.authority.pem)
    serves = CloudServer(
        cloud.queue, context, host="127.0.0.1", port=0, clock=CLOCK, limits=limits
    )
    with serves.listening() as port:
        with socket.create_connection(("127.0.0.1", port), timeout=10):
            assert all(is_refused(port) for _ in range(5))
        deadline = CLOCK.monotonic() + 5.0
        while (refused := is_refused(port)) and CLOCK.monotonic() < deadline:
            CLOCK.sleep(0.01)
    assert not refused
    assert caplog.text.count("are refused") == 1


def is_refused(port: int) -> bool:
    """Whether a relay ends a new connection before it has said anything."""
    with socket.create_connection(("127.0.0.1", port), timeout=0.2) as line:
        try:
            return line.recv(1) == b""
        except TimeoutError:
            return False


def test_site_that_the_relay_does_not_serve_is_told(cloud: Cloud):
    with pytest.raises(SiteError, match=r"add its name to serve\.sites"):
        cloud.node(WEST).run()


def test_another_relay_gets_no_word(cloud: Cloud):
    """Its certificate is not from the authority that the site pins."""
    other = Authority.create("another relay", clock=CLOCK)
    with pytest.raises(SiteError, match="it is the relay"):
        cloud.node(EAST, authority=other.pem).run()


def test_a_wrong_clock_at_the_relay_ends_no_site(cloud: Cloud):
    """Its certificate, made tomorrow, is not valid yet: the site tries again."""
    context, said = server_context(cloud.authority.pem), []
    tomorrow = VirtualClock(CLOCK.now() + 86400.0)
    folder = cloud.folder / "tomorrow"
    relay_certificate.prepare(folder, ("127.0.0.1",), context, tomorrow)
    made = CloudServer(
        cloud.queue, context, host="127.0.0.1", port=0, clock=CLOCK, scratch=folder
    )
    with made.listening() as port:
        authority = (folder / "ca.crt").read_bytes()
        node = cloud.node(EAST, address=f"127.0.0.1:{port}", authority=authority)

        def listen(text: str) -> None:
            said.append(text)
            if len(said) > 1:
                node.stopped.set()

        node.listener = listen
        node.run()
        with pytest.raises(SiteError, match="not valid yet"):
            knock(node.address, node.authority, node.certificate)
    assert "two clocks is wrong" in said[1]


def test_certificate_of_another_authority_is_refused(cloud: Cloud):
    """With the name of a site that is served."""
    said: list[str] = []
    path = cloud.certificate("stranger", Authority.create("other", clock=CLOCK))
    node = cloud.node(EAST, certificate=path)

    def listen(text: str) -> None:
        said.append(text)
        if "cannot be reached" in text:
            node.stopped.set()

    node.listener = listen
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(cloud.ask, EAST, b"task", seconds=0.3)
        node.run()
        assert asked.result() is None
    assert "cannot be reached" in said[-1]


def doctored(cloud: Cloud, name: str, **tables: Any) -> Check:
    """What the doctor finds at a site."""
    config = site_config(cloud.folder, name, certificate=f"{name}.pem", **tables)
    (found,) = doctor_relay.checks(config)
    return found


def test_doctor_knocks_at_the_relay(cloud: Cloud):
    """With the certificates that the site would use."""
    link = {"address": f"127.0.0.1:{cloud.port}", "authority": "relay/ca.crt"}
    assert doctored(cloud, EAST, relay=link).status == "ok"
    refused = doctored(cloud, WEST, relay=link)
    assert (refused.name, refused.status) == ("relay", "problem")
    assert "not serve this site" in refused.found
    gone = doctored(cloud, EAST, relay={**link, "address": "127.0.0.1:1"})
    assert "127.0.0.1:1 cannot be reached" in gone.found
    (cloud.folder / "other.crt").write_bytes(cloud.authority.pem)
    other = doctored(cloud, EAST, relay={**link, "authority": "other.crt"})
    assert "it is the relay" in other.found
    assert not [*doctor_relay.checks(site_config(cloud.folder, EAST))]


def test_doctor_says_whom_a_relay_serves(cloud: Cloud):
    serve = {"listen": "0.0.0.0:8444", "hosts": ["relay"], "sites": ["a", "b"]}
    assert (
        doctored(cloud, "relay-1", serve=serve).found == "serves a, b at 0.0.0.0:8444"
    )
