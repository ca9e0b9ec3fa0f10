"""Proxy variables of the environment, and who follows them."""

import http.client
import http.server
import os
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import requests

from cloud_adapters.net import short_requests
from cloud_adapters.net.outbound import https_line, keep_loopback_direct, proxy_note
from cloud_adapters.net.tls import client_context
from deploy.cli import commands as cli
from federation.clock import SystemClock
from privacy.membership.certificates import Authority, key_pem, new_key

NAMES = ("https_proxy", "http_proxy", "all_proxy", "no_proxy")
HOST = "aggregator.example"


@pytest.fixture(autouse=True)
def _no_proxy_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    # Set first, so that what a test changes is put back.
    for name in (name for low in NAMES for name in (low, low.upper())):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


class _Hello(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_command_keeps_loopback_direct_for_every_library(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "intra.example, 127.0.0.1")
    assert cli.main(["runs", "--json"]) == 0
    capsys.readouterr()
    for name in ("no_proxy", "NO_PROXY"):
        assert os.environ[name] == "intra.example,127.0.0.1,localhost,::1"
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Hello) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_port}/"
            assert httpx.get(url).status_code == 200
            assert requests.get(url, timeout=10).status_code == 200
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    "environment",
    [{}, {"no_proxy": "a"}, {"https_proxy": "http://p:1", "no_proxy": "*"}],
)
def test_environment_that_needs_no_change(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    keep_loopback_direct(os.environ)
    assert dict(os.environ) == before


@pytest.mark.parametrize("host", [HOST, "localhost", "127.0.0.1"])
def test_note_names_variable_and_proxy_but_no_password(
    host: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("https_proxy", "http://user:word@proxy.example:3128")
    note = proxy_note(host)
    if host != HOST:
        assert note == ""
        return
    assert "proxy.example:3128" in note
    assert "https_proxy" in note
    assert "word" not in note
    monkeypatch.setenv("no_proxy", ".example")
    assert proxy_note(host) == ""


def head_of(line: socket.socket) -> bytes:
    found = b""
    while not found.endswith(b"\r\n\r\n"):
        found += line.recv(4096) or b"\r\n\r\n"
    return found


@contextmanager
def proxy_before_a_server(folder: Path, seen: list[bytes]) -> Iterator[str]:
    """Accept one CONNECT, and then answer as the server behind it."""
    authority = Authority.create("test", clock=SystemClock())
    key = new_key()
    chain = folder / "server.pem"
    chain.write_bytes(authority.issue_server((HOST,), key) + key_pem(key))
    (folder / "ca.crt").write_bytes(authority.pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain)

    def serve() -> None:
        plain, _ = listener.accept()
        plain.settimeout(10)
        seen.append(head_of(plain))
        plain.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        with context.wrap_socket(plain, server_side=True) as line:
            seen.append(head_of(line))
            line.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


def test_line_to_the_aggregator_goes_through_the_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The proxy sees the name; the certificate is checked against that name."""
    seen: list[bytes] = []
    with proxy_before_a_server(tmp_path, seen) as address:
        monkeypatch.setenv("https_proxy", f"http://user:w%40rd@{address}")
        context = client_context((tmp_path / "ca.crt").read_bytes(), None)
        line = https_line(HOST, 8443, context=context, seconds=10)
        line.request("GET", "/enroll")
        assert line.getresponse().status == 204
        line.close()
    connect, request = seen
    assert connect.startswith(b"CONNECT aggregator.example:8443 ")
    assert b"Proxy-Authorization: Basic dXNlcjp3QHJk\r\n" in connect
    assert request.startswith(b"GET /enroll ")
    assert b"Proxy-Authorization" not in request


def test_short_request_goes_through_the_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Alerts leave the aggregator's network as its other requests do."""
    seen: list[bytes] = []
    with proxy_before_a_server(tmp_path, seen) as address:
        monkeypatch.setenv("https_proxy", f"http://{address}")
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.crt"))
        answer = short_requests.ask(f"https://{HOST}/hook?code=1", max_bytes=9)
        assert answer.status == 204
    connect, request = seen
    assert connect.startswith(b"CONNECT aggregator.example:443 ")
    assert request.startswith(b"GET /hook?code=1 ")


def test_line_to_this_machine_is_direct(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("https_proxy", "http://proxy.example:3128")
    authority = Authority.create("test", clock=SystemClock())
    context = client_context(authority.pem, None)
    line = https_line("127.0.0.1", 1, context=context, seconds=10)
    assert isinstance(line, http.client.HTTPSConnection)
    assert (line.host, line.port) == ("127.0.0.1", 1)
