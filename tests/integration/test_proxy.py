"""A real nginx: what it lets in, and what it does not."""

import contextlib
import os
import pwd
import signal
import socket
import ssl
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from support import memory_reader, proxy_server
from support.programs import needs
from support.proxy_server import RunningProxy, wait_for

from cloud_adapters.nginx import processes as proxy_processes
from cloud_adapters.nginx.config import ProxyFailed
from cloud_adapters.nginx.processes import is_nginx
from federation.clock import SystemClock, VirtualClock
from privacy.membership.certificates import Authority

pytestmark = [
    pytest.mark.slow,
    pytest.mark.deploy,
    needs("nginx"),
]

FLEET = "POST /v1/fleet/pull-messages HTTP/1.1"


@pytest.fixture(scope="module")
def proxy() -> Iterator[RunningProxy]:
    with proxy_server.serve() as running:
        yield running


@pytest.fixture(scope="module")
def site(proxy: RunningProxy) -> Path:
    return proxy.issue("site-a")[0]


def test_site_with_a_certificate_reaches_the_fleet(proxy: RunningProxy, site: Path):
    """As it came, and nothing else of the SuperLink."""
    before = len(proxy.fleet)

    assert proxy.ask(FLEET, body=b"x" * 1000, certificate=site) == "200"
    assert proxy.fleet[before:] == [FLEET]


def test_a_message_of_twenty_megabytes_goes_through(proxy: RunningProxy, site: Path):
    """Nothing of it is kept on the disk on the way."""
    with httpx.Client(verify=proxy.context(site)) as client:
        url = f"https://{proxy.address}/v1/fleet/push-object"
        assert client.post(url, content=bytes(20 << 20)).text == str(20 << 20)
    assert not [p for p in proxy.settings.work.glob("temporary/**/*") if p.is_file()]


@pytest.mark.parametrize("way", ["GET /health", "GET /enroll", "POST /enroll"])
def test_health_and_enrolment_need_no_certificate(proxy: RunningProxy, way: str):
    """They go to the service."""
    assert proxy.ask(f"{way} HTTP/1.1", body=b"{}" if "POST" in way else b"") == "200"
    assert proxy.service[-1] == f"{way} HTTP/1.1"


def test_load_balancer_asks_for_health_in_http_1_0(proxy: RunningProxy):
    """Some do by default, and name no host."""
    with proxy.connect() as tls:
        tls.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert proxy_server.read_status(tls) == "200"


def test_fleet_without_a_certificate_is_refused(proxy: RunningProxy):
    """Anonymous clients do not reach Flower at all."""
    before = list(proxy.fleet)

    assert proxy.ask(FLEET, body=b"x") == "403"
    assert proxy.fleet == before


REFUSED = [
    "POST /v1/control/start-run HTTP/1.1",
    "POST /v1/runtime/acquire-task HTTP/1.1",
    "POST /v1/fleet/register-node HTTP/1.1",
    "POST /v1/fleet/unregister-node HTTP/1.1",
    "GET / HTTP/1.1",
    "GET /docs HTTP/1.1",
    "GET /openapi.json HTTP/1.1",
    "GET /v1/fleet/pull-messages HTTP/1.1",
    "OPTIONS /v1/fleet/pull-messages HTTP/1.1",
    "CONNECT 127.0.0.1:22 HTTP/1.1",
    "TRACE /v1/fleet/pull-messages HTTP/1.1",
    "DELETE /enroll HTTP/1.1",
    "POST /health HTTP/1.1",
    "POST /v1/fleet/../control/start-run HTTP/1.1",
    "POST /v1/control/../fleet/pull-messages HTTP/1.1",
    "POST /v1/fleet/%2e%2e/control/start-run HTTP/1.1",
    "POST /v1/fleet/..%2fcontrol%2fstart-run HTTP/1.1",
    "POST /v1/fleet%2fpull-messages HTTP/1.1",
    "POST /v1/fleet/%70ull-messages HTTP/1.1",
    "POST //v1/fleet/pull-messages HTTP/1.1",
    "POST /v1//fleet/pull-messages HTTP/1.1",
    "POST /v1/fleet//pull-messages HTTP/1.1",
    "POST /v1/./fleet/pull-messages HTTP/1.1",
    "POST /v1/fleet/pull-messages/ HTTP/1.1",
    "POST /v1/fleet/pull-messages;/../../control/start-run HTTP/1.1",
    "POST /v1/fleet/pull-messages?x=/v1/control/ HTTP/1.1",
    "POST /v1/fleet/pull-messages#x HTTP/1.1",
    "POST /v1/fleet/pull-messages%00 HTTP/1.1",
    "POST /V1/FLEET/pull-messages HTTP/1.1",
    "POST /v1\\fleet\\pull-messages HTTP/1.1",
    "POST https://localhost/v1/fleet/pull-messages HTTP/1.1",
    "POST http://127.0.0.1/v1/control/start-run HTTP/1.1",
    "POST /v1/fleet/pull-messages HTTP/1.0",
    "POST /health HTTP/1.0",
    "GET /health?x HTTP/1.0",
    "GET /health",
    "GET /enroll HTTP/1.0",
    "POST /v1/fleet/pull-messages",
    "POST /v1/fleet/pull-messages HTTP/2.0",
    "POST  /v1/fleet/pull-messages HTTP/1.1",
    "GET /health?x HTTP/1.1",
    "GET /health/../v1/control/x HTTP/1.1",
    "GET /enroll/ HTTP/1.1",
    "PRI * HTTP/2.0",
    "\x16\x03\x01",
]


@pytest.mark.parametrize("line", REFUSED)
def test_everything_else_is_refused(proxy: RunningProxy, site: Path, line: str):
    """Even from a site with a certificate; none of it reaches anything."""
    before = [*proxy.fleet, *proxy.service]

    assert proxy.ask(line, certificate=site) in {
        *("400", "403", "404", "405", "501", "505"),
        "closed",
    }
    assert before == [*proxy.fleet, *proxy.service]


def test_request_smuggling_is_refused(proxy: RunningProxy, site: Path):
    """Two lengths, or a length and chunks: the next request would be ours to choose."""
    before = list(proxy.fleet)
    for headers in (
        ("Content-Length: 4", "Transfer-Encoding: chunked"),
        ("Content-Length: 4", "Content-Length: 5"),
        ("Transfer-Encoding: chunked, identity",),
        ("Content-Length: -1",),
    ):
        assert proxy.ask(FLEET, *headers, certificate=site) in {"400", "501"}
    assert proxy.fleet == before


def test_bodies_have_a_limit(proxy: RunningProxy, site: Path):
    """64 KiB without a certificate and 64 MiB with one; told from the length alone."""
    assert proxy.ask("POST /enroll HTTP/1.1", body=bytes(65 << 10)) == "413"
    length = f"Content-Length: {65 << 20}"
    assert proxy.ask(FLEET, length, certificate=site) == "413"
    chunks = b"10001\r\n" + bytes(0x10001) + b"\r\n0\r\n\r\n"
    with proxy.connect() as tls:
        head = "POST /enroll HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        tls.sendall(head.encode() + chunks)
        assert proxy_server.read_status(tls) == "413"


def test_headers_have_a_limit(proxy: RunningProxy, site: Path):
    """In length, each and all together."""
    assert proxy.ask(FLEET, f"X-Long: {'x' * 9000}", certificate=site) == "400"
    many = [f"X-{n}: {'x' * 4000}" for n in range(20)]
    assert proxy.ask(FLEET, *many, certificate=site) == "400"
    assert proxy.ask(f"POST /{'x' * 9000} HTTP/1.1", certificate=site) == "414"


@pytest.mark.parametrize("way", ["POST /enroll", "GET /health"])
def test_strangers_may_ask_so_often_and_no_more(way: str):
    """Who asks for ever is told to wait; sites at work notice nothing."""
    with proxy_server.serve() as proxy:
        site, _ = proxy.issue("site-a")
        body = b"{}" if "POST" in way else b""
        found = [proxy.ask(f"{way} HTTP/1.1", body=body) for _ in range(60)]
        assert found[:20] == ["200"] * 20
        assert "429" in found
        assert set(found) == {"200", "429"}
        reached = len(proxy.service)
        assert reached == found.count("200")
        assert [proxy.ask(FLEET, certificate=site) for _ in range(30)] == ["200"] * 30
        wait_for(
            lambda: proxy.ask(f"{way} HTTP/1.1", body=body) == "200",
            "it may ask again",
        )


def test_an_address_has_so_many_requests_at_a_time():
    """Whoever holds them open gets no more, and one that ends makes room."""
    with proxy_server.serve() as proxy, contextlib.ExitStack() as stack:
        site, _ = proxy.issue("site-a")
        head = f"{FLEET}\r\nHost: x\r\nContent-Length: 10\r\n\r\n".encode()
        open_ones = []
        for _ in range(proxy.settings.max_connections):
            tls = stack.enter_context(proxy.connect(site))
            tls.sendall(head)
            open_ones.append(tls)
        wait_for(
            lambda: len(proxy.fleet) == proxy.settings.max_connections, "all arrive"
        )
        assert proxy.ask(FLEET, certificate=site) == "429"
        open_ones[0].close()
        wait_for(
            lambda: proxy.ask(FLEET, certificate=site) == "200", "there is room again"
        )


def test_slow_client_is_closed():
    """Who sends a byte now and then does not keep its connection for ever."""
    with proxy_server.serve(head_seconds=1) as proxy, proxy.connect() as tls:
        tls.sendall(b"GET /health HT")
        begin = time.monotonic()
        assert proxy_server.read_status(tls) in {"408", "closed"}
        assert time.monotonic() - begin < 9.0  # Sooner than by the product's limit.


def test_answers_tell_no_version(proxy: RunningProxy):
    """Neither a refusal nor an answer of the service says which nginx this is."""
    with httpx.Client(verify=proxy.context()) as client:
        found = client.get(f"https://{proxy.address}/nothing")
    assert found.status_code == 404
    assert "1." not in found.headers["server"] + found.text


def test_older_tls_is_refused(proxy: RunningProxy):
    """TLS 1.3 alone."""
    context = proxy.context()
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with (
        socket.create_connection(("127.0.0.1", proxy.port), 60.0) as plain,
        pytest.raises(ssl.SSLError),
    ):
        context.wrap_socket(plain, server_hostname="127.0.0.1")


def test_certificate_of_another_authority_is_refused(proxy: RunningProxy):
    """With the same names in it."""
    with proxy_server.serve() as other:
        stranger, _ = other.issue("site-a")
        with proxy.connect(stranger) as tls:
            tls.sendall(f"{FLEET}\r\nHost: x\r\nContent-Length: 0\r\n\r\n".encode())
            assert proxy_server.read_status(tls) == "403"


def test_server_certificate_is_no_clients(proxy: RunningProxy):
    """Whoever gets hold of the server's certificate is not thereby a site."""
    folder = proxy.settings.folder
    both = folder / "both.pem"
    both.write_bytes(
        (folder / "server.crt").read_bytes() + (folder / "server.key").read_bytes()
    )
    assert proxy.ask(FLEET, certificate=both) == "403"


def test_revoked_site_is_refused_at_once():
    """On a connection that is open, too; another site continues."""
    with proxy_server.serve() as proxy:
        revoked, serial = proxy.issue("site-a")
        other, _ = proxy.issue("site-b")
        url = f"https://{proxy.address}/v1/fleet/pull-messages"
        with (
            httpx.Client(verify=proxy.context(revoked)) as client,
            httpx.Client(verify=proxy.context(other)) as bystander,
        ):
            assert client.post(url, content=b"x").status_code == 200
            proxy.revoke(serial)
            assert [_status(client, url) for _ in range(20)] == [403] * 20
            assert _status(bystander, url) == 200
        assert proxy.ask(FLEET, certificate=revoked) == "403"


def test_certificate_that_expires_ends_with_its_connection():
    """Not immediately on one that is open, but when that grows old."""
    with proxy_server.serve(connection_seconds=6) as proxy:
        early = VirtualClock(SystemClock().now() - 90 * 86_400.0 + 4.0)
        ending = replace(proxy, authority=replace(proxy.authority, clock=early))
        site, _ = ending.issue("site-a")
        other, _ = proxy.issue("site-b")
        url = f"https://{proxy.address}/v1/fleet/pull-messages"
        with (
            httpx.Client(verify=proxy.context(site)) as client,
            httpx.Client(verify=proxy.context(other)) as bystander,
        ):
            assert _status(client, url) == 200
            wait_for(
                lambda: proxy.ask(FLEET, certificate=site) == "403", "it has expired"
            )
            wait_for(lambda: _status(client, url) == 403, "the connection is too old")
            assert [_status(client, url) for _ in range(5)] == [403] * 5
            assert _status(bystander, url) == 200


def test_a_clock_that_was_ahead_locks_nobody_out_for_good():
    """It was right again after a certificate and a list of revoked ones were signed."""
    with proxy_server.serve() as proxy:
        ahead = VirtualClock(SystemClock().now() + 3600.0)
        wrong = replace(proxy, authority=replace(proxy.authority, clock=ahead))
        site, _ = proxy.issue("site-a")
        early, _ = wrong.issue("site-b")
        gone, serial = proxy.issue("site-c")
        wrong.revoke(serial)
        assert proxy.ask(FLEET, certificate=site) == "200"
        assert proxy.ask(FLEET, certificate=gone) == "403"
        # An agent tries again after this one, and ends after a 403.
        assert proxy.ask(FLEET, certificate=early) == "503"


def test_torn_list_is_not_taken():
    """The one before stays in force, and the operator is told."""
    with proxy_server.serve() as proxy:
        site, _ = proxy.issue("site-a")
        gone, serial = proxy.issue("site-b")
        proxy.revoke(serial)
        path = proxy.settings.folder / "ca.crl"
        path.write_bytes(path.read_bytes()[:100])
        with pytest.raises(ProxyFailed, match="does not accept"):
            proxy_processes.reload(proxy.settings.work)
        assert proxy.ask(FLEET, certificate=gone) == "403"
        assert proxy.ask(FLEET, certificate=site) == "200"


def _status(client: httpx.Client, url: str) -> int:
    for _ in range(3):
        try:
            return client.post(url, content=b"x").status_code
        except httpx.TransportError:
            continue  # The old worker has closed the connection.
    raise AssertionError("three connections were closed")


def test_another_in_the_superlinks_place_gets_nothing(tmp_path: Path):
    """A process that took the port while the SuperLink was down has no certificate."""
    authority = Authority.create("test", clock=SystemClock())
    authority.save(tmp_path)
    stranger = Authority.create("test", clock=SystemClock())
    with proxy_server.serve_before(
        tmp_path, authority, service_port=1, behind=stranger
    ) as proxy:
        site, _ = proxy.issue("site-a")
        assert proxy.ask(FLEET, body=b"x", certificate=site) == "502"
        assert not proxy.fleet


def test_log_holds_no_secret(proxy: RunningProxy):
    """Neither headers nor bodies; refusals are in it."""
    proxy.ask("POST /nothing HTTP/1.1", "flwr-signature: c2VjcmV0", body=b"token")
    path = proxy.settings.work / "access.log"
    # Nginx writes its line after the answer.
    wait_for(lambda: "POST /nothing HTTP/1.1" in path.read_text(), "it is written")
    log = path.read_text()
    assert "c2VjcmV0" not in log
    assert '"request":"POST /v1/fleet/pull-messages HTTP/1.1","status":200' not in log


@pytest.mark.parametrize("left", ["workers", "all of it"])
def test_nginx_starts_again_whatever_was_killed(left: str):
    """Workers outlive a killed master, and a killed aggregator its nginx."""
    with proxy_server.serve() as proxy:
        site, _ = proxy.issue("site-a")
        before = int(proxy.settings.pid_file.read_text())
        # The master listens, and writes its number, before it has workers.
        work = proxy.settings.work
        wait_for(lambda: len(proxy_processes.processes(work)) > 1, "it has workers")
        if left == "workers":
            os.kill(before, signal.SIGKILL)
            wait_for(lambda: not is_nginx(before), "the master is gone")
        assert proxy_processes.processes(work), "or this test cannot fail"
        with proxy_server.nginx(proxy.settings):
            wait_for(lambda: _master(proxy) not in {0, before}, "there is another")
            assert not is_nginx(before)
            assert proxy.ask(FLEET, certificate=site) == "200"


def _master(proxy: RunningProxy) -> int:
    path = proxy.settings.pid_file
    text = path.read_text() if path.exists() else ""
    return int(text or 0)


@needs("root")
def test_programs_of_the_workers_user_cannot_read_the_key(proxy: RunningProxy):
    """Root's nginx has workers of ``nobody``, a user that other programs share."""
    work = proxy.settings.work
    (master,) = [
        one for one in proxy_processes.processes(work) if os.getpgid(one) == one
    ]
    workers = _workers(proxy, master)
    key = load_pem_private_key(
        (proxy.settings.folder / "server.key").read_bytes(), password=None
    )
    assert isinstance(key, EllipticCurvePrivateKey)
    number = key.private_numbers().private_value.to_bytes(32, sys.byteorder)

    # The key is there: root may read it.
    assert memory_reader.read(0, workers, number).matching == frozenset(workers)
    found = memory_reader.read(pwd.getpwnam("nobody").pw_uid, workers, number)
    assert found.readable == frozenset()

    proxy.revoke()  # Which starts other workers.
    after = _workers(proxy, master, without=workers)
    again = memory_reader.read(pwd.getpwnam("nobody").pw_uid, after, number)
    assert again.readable == frozenset()


def _workers(
    proxy: RunningProxy, master: int, without: Sequence[int] = ()
) -> list[int]:
    """Workers that have taken their user; until then a new one is root's fork."""
    nobody = pwd.getpwnam("nobody").pw_uid
    found: list[int] = []

    def are_there() -> bool:
        everything = proxy_processes.processes(proxy.settings.work)
        found[:] = [one for one in everything if one != master]
        users = {_user(one) for one in found}
        return users == {nobody} and not set(found) & set(without)

    wait_for(are_there, "nginx has workers of nobody")
    return found


def _user(process: int) -> int | None:
    """Its user; None if it has ended."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return None
    (line,) = [line for line in status.splitlines() if line.startswith("Uid:")]
    return int(line.split()[1])
