"""The small server behind the proxy: lengths, paths, and clients that misbehave."""

import contextlib
import http.client
import logging
import socket
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from support.examples import few

from cloud_adapters.net.ports import PortTaken
from deploy.aggregator_host import enrolment_http


@pytest.fixture
def port() -> Iterator[int]:
    def fail(_: bytes) -> tuple[int, bytes]:
        raise RuntimeError("a defect")

    handlers = {
        "GET /health": lambda _: (200, b"{}"),
        "POST /enroll": lambda body: (403, body),
        "POST /fail": fail,
    }
    with enrolment_http.serve(handlers) as port:
        yield port


def _ask(
    port: int, method: str, path: str, body: bytes | None = None, **headers: str
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60.0)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_handlers_answer(port: int):
    """By method and path."""
    assert _ask(port, "GET", "/health") == (200, b"{}")
    assert _ask(port, "POST", "/enroll", b"body") == (403, b"body")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/enroll"),
        ("POST", "/health"),
        ("GET", "/health?x"),
        ("GET", "/"),
    ],
)
def test_other_paths_are_not_found(port: int, method: str, path: str):
    """Whatever they resemble."""
    assert _ask(port, method, path, b"")[0] == 404


def test_other_methods_are_refused(port: int):
    """By the library."""
    assert _ask(port, "DELETE", "/enroll")[0] == 501


def test_longest_body_is_read_and_a_longer_one_is_not(port: int):
    """64 KiB, told from the length alone."""
    body = b"x" * (64 << 10)
    assert _ask(port, "POST", "/enroll", body) == (403, body)
    for length in (str((64 << 10) + 1), "9" * 5000):
        asked = _ask(port, "POST", "/enroll", None, **{"Content-Length": length})
        assert asked[0] == 413


@pytest.mark.parametrize("length", ["-1", "1e3", "0x10", "²", "", "+1"])
def test_body_needs_a_length(port: int, length: str):
    """Of decimal digits."""
    with socket.create_connection(("127.0.0.1", port), 60.0) as plain:
        head = f"POST /enroll HTTP/1.1\r\nContent-Length: {length}\r\n\r\n"
        plain.sendall(head.encode())
        answer = http.client.HTTPResponse(plain)
        answer.begin()
    assert answer.status == 411


def test_defect_is_told_to_the_log_alone(port: int, caplog: pytest.LogCaptureFixture):
    """The client learns nothing of it, and the server continues."""
    caplog.set_level(logging.ERROR)
    assert _ask(port, "POST", "/fail", b"") == (500, b"")
    assert _ask(port, "GET", "/health")[0] == 200
    assert "a defect" in caplog.text


def test_client_that_hangs_up_harms_nobody(port: int):
    """In the middle of its body."""
    with socket.create_connection(("127.0.0.1", port), 60.0) as plain:
        plain.sendall(b"POST /enroll HTTP/1.1\r\nContent-Length: 100\r\n\r\nhalf")
    assert _ask(port, "GET", "/health")[0] == 200


def test_answers_say_no_version(port: int):
    """Nor a date, which nobody needs."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60.0)
    connection.request("GET", "/health")
    answer = connection.getresponse()
    answer.read()
    connection.close()
    assert answer.headers["Server"] is None


def test_port_that_is_taken(port: int):
    """The key that changes it is named."""
    with (
        pytest.raises(PortTaken, match="service_port"),
        enrolment_http.serve({}, port),
    ):
        pass


LINES = st.sampled_from(
    [
        *(b"POST /enroll HTTP/1.1", b"GET /health HTTP/1.1", b"POST /enroll HTTP/9.9"),
        *(b"POST /enroll", b"GET /health HTTP/0.9", b"\x16\x03\x01", b""),
    ]
) | st.binary(max_size=60)
HEADERS = st.lists(
    st.sampled_from(
        [
            *(b"Content-Length: 5", b"Content-Length: 99999", b"Content-Length: x"),
            *(b"Transfer-Encoding: chunked", b"Expect: 100-continue", b": no name"),
            *(b"X: LONG", b"Connection: keep-alive", b"\x00\xff"),
        ]
    )
    | st.binary(max_size=40),
    max_size=4,
)


@given(line=LINES, headers=HEADERS, body=st.binary(max_size=80))
@settings(
    few(60),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_no_bytes_break_the_server(
    port: int, line: bytes, headers: list[bytes], body: bytes
):
    """Refused, or closed without a word; nobody's defect, and it continues."""
    with socket.create_connection(("127.0.0.1", port), 60.0) as plain:
        answer = b""
        with contextlib.suppress(OSError):  # It may hang up before the end.
            head = b"\r\n".join([line, *headers, b""])
            plain.sendall(head.replace(b"LONG", bytes(70_000)) + b"\r\n" + body)
            plain.shutdown(socket.SHUT_WR)
            while more := plain.recv(1 << 16):
                answer += more
    if answer.startswith(b"HTTP/1."):
        assert int(answer.split()[1]) != 500
    assert b"Traceback" not in answer
    assert _ask(port, "GET", "/health")[0] == 200
