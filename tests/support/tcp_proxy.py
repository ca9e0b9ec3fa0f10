"""A proxy on loopback that lets HTTP requests fail in the ways that networks do.

One connection carries one request: the proxy asks both sides to close after it, so
that a fault meets the request it was meant for. Faults are chosen by the request's
first line and by how many of that kind there have been.
"""

import contextlib
import re
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

_CHUNK = 64 * 1024
_MAX_HEAD = 256 * 1024


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What goes wrong with a request; with no field set, nothing does.

    Attributes:
        reset_up: Reset after so many bytes of the request's body, which never
            reaches the server whole.
        reset_down: Carry the request out, and reset after so many bytes of the
            answer's body; with -1 before its head: the lost reply.
        end_down: The same, but close properly: a body that is cut short.
        answer: Answer with these bytes, and never ask the server.
        flip_up: Change the body's byte at this place on its way up.
        flip_down: The same, on its way down.
        bytes_per_second: Of the answer's body; slowly and steadily.
    """

    reset_up: int | None = None
    reset_down: int | None = None
    end_down: int | None = None
    answer: bytes | None = None
    flip_up: int | None = None
    flip_down: int | None = None
    bytes_per_second: float | None = None


def answer(status: int, body: bytes = b"", *headers: str) -> Fault:
    """A fault that is an answer of its own."""
    lines = [f"HTTP/1.1 {status} Fault", f"Content-Length: {len(body)}", *headers]
    head = "\r\n".join([*lines, "Connection: close", "", ""])
    return Fault(answer=head.encode() + body)


def s3_error(status: int, code: str, *headers: str, more: str = "") -> Fault:
    """An error as S3 words it."""
    body = f"<Error><Code>{code}</Code><Message>a fault</Message>{more}</Error>"
    return answer(status, body.encode(), "Content-Type: application/xml", *headers)


@dataclass
class _Plan:
    pattern: re.Pattern[str]
    fault: Fault
    left: int


@dataclass
class FaultyProxy:
    """A running proxy.

    Attributes:
        url: What clients connect to.
        requests: First lines of all requests, in the order of their arrival.
    """

    url: str
    requests: list[str] = field(default_factory=list)
    _plans: list[_Plan] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def fail(
        self, pattern: str, fault: Fault, *, times: int = 1, after: int = 0
    ) -> None:
        """Let the next ``times`` requests whose first line fits fail.

        Args:
            pattern: Regular expression, searched in ``PUT /bucket/key?partNumber=1``.
            fault: What happens to them.
            times: How many.
            after: How many that fit go through before.
        """
        compiled = re.compile(pattern)
        with self._lock:
            if after:
                self._plans.append(_Plan(compiled, Fault(), after))
            self._plans.append(_Plan(compiled, fault, times))

    def count(self, pattern: str) -> int:
        """How many requests have come whose first line fits."""
        return sum(bool(re.search(pattern, line)) for line in self.requests)

    def clear(self) -> None:
        """Forget all requests, and let no further one fail."""
        with self._lock:
            self.requests.clear()
            self._plans.clear()

    def choose(self, line: str) -> Fault:
        """Take note of a request and say what happens to it."""
        with self._lock:
            self.requests.append(line)
            for plan in self._plans:
                if plan.left and plan.pattern.search(line):
                    plan.left -= 1
                    return plan.fault
        return Fault()


@contextlib.contextmanager
def proxy(target_url: str) -> Iterator[FaultyProxy]:
    """Run a proxy in front of an HTTP server until the end of the block."""
    parts = urlsplit(target_url)
    assert parts.hostname is not None
    assert parts.port is not None
    listener = socket.create_server(("127.0.0.1", 0))
    running = FaultyProxy(f"http://127.0.0.1:{listener.getsockname()[1]}")
    target = (parts.hostname, parts.port)
    workers: list[threading.Thread] = []
    ended = threading.Event()

    def accept() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            worker = threading.Thread(
                target=_serve, args=(client, target, running, ended), daemon=True
            )
            worker.start()
            workers.append(worker)

    acceptor = threading.Thread(target=accept, daemon=True)
    acceptor.start()
    try:
        yield running
    finally:
        ended.set()
        # close() alone does not wake the thread that waits in accept().
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        acceptor.join()
        for worker in workers:
            worker.join(timeout=10)


def _serve(
    client: socket.socket,
    target: tuple[str, int],
    running: FaultyProxy,
    ended: threading.Event,
) -> None:
    with client, contextlib.suppress(OSError, EOFError):
        client.settimeout(10)
        head, rest = _read_head(client)
        method, path, *_ = head.split(b"\r\n", 1)[0].decode().split(" ")
        fault = running.choose(f"{method} {path}")
        if fault.answer is not None:
            _answer(client, fault.answer, _body_left(head, rest))
            return
        with socket.create_connection(target, timeout=10) as server:
            server.sendall(_closing(head))
            if not _pass_body_up(client, server, fault, _body_left(head, rest), rest):
                _reset(client)
                return
            _pass_answer_down(client, server, fault, ended)


def _answer(client: socket.socket, content: bytes, body_left: int) -> None:
    # Take the body first, as servers do: a close with unread bytes is a reset.
    while body_left > 0 and (chunk := client.recv(min(_CHUNK, body_left))):
        body_left -= len(chunk)
    client.sendall(content)


def _read_head(side: socket.socket) -> tuple[bytes, bytes]:
    """The head of a message with its empty line, and what came of the body."""
    found = b""
    while b"\r\n\r\n" not in found:
        chunk = side.recv(_CHUNK)
        if not chunk or len(found) > _MAX_HEAD:
            raise EOFError
        found += chunk
    head, _, rest = found.partition(b"\r\n\r\n")
    return head + b"\r\n\r\n", rest


def _body_left(head: bytes, rest: bytes) -> int:
    found = re.search(rb"(?im)^content-length:\s*(\d+)", head)
    return (int(found[1]) if found else 0) - len(rest)


def _closing(head: bytes) -> bytes:
    head = re.sub(rb"(?im)^connection:[^\r]*\r\n", b"", head)
    return head[:-2] + b"Connection: close\r\n\r\n"


def _pass_body_up(
    client: socket.socket, server: socket.socket, fault: Fault, left: int, rest: bytes
) -> bool:
    """Pass the request's body on; False if the fault ends it."""
    place, chunk = 0, rest
    while True:
        if fault.reset_up is not None and place + len(chunk) >= fault.reset_up:
            server.sendall(chunk[: fault.reset_up - place])
            return False
        server.sendall(_flipped(chunk, place, fault.flip_up))
        place += len(chunk)
        if left <= 0:
            return True
        chunk = client.recv(min(_CHUNK, left))
        if not chunk:
            raise EOFError
        left -= len(chunk)


def _pass_answer_down(
    client: socket.socket, server: socket.socket, fault: Fault, ended: threading.Event
) -> None:
    head, chunk = _read_head(server)
    most = fault.reset_down if fault.reset_down is not None else fault.end_down
    if most == -1:
        _end(client, fault)
        return
    client.sendall(_closing(head))
    place = 0
    while not ended.is_set():
        if most is not None and place + len(chunk) >= most:
            client.sendall(chunk[: most - place])
            _end(client, fault)
            return
        _send(client, _flipped(chunk, place, fault.flip_down), fault, ended)
        place += len(chunk)
        chunk = server.recv(_CHUNK)
        if not chunk:
            return


def _send(
    client: socket.socket, chunk: bytes, fault: Fault, ended: threading.Event
) -> None:
    if fault.bytes_per_second is None:
        client.sendall(chunk)
        return
    for byte in chunk:
        client.sendall(bytes([byte]))
        if ended.wait(1 / fault.bytes_per_second):
            return


def _flipped(chunk: bytes, place: int, at: int | None) -> bytes:
    if at is None or not place <= at < place + len(chunk):
        return chunk
    changed = bytearray(chunk)
    changed[at - place] ^= 0x01
    return bytes(changed)


def _end(side: socket.socket, fault: Fault) -> None:
    if fault.reset_down is not None:
        _reset(side)


def _reset(side: socket.socket) -> None:
    """Close so that the other side sees a reset, not an end."""
    side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    side.close()
