"""All hosts of the internet at one address, for a machine with a network of its own.

Every name has that address. A connection to its port 443 is passed on to the host that
its TLS handshake names, unseen: machines check certificates as they do anywhere. Hosts
of a test's own are here.
"""

import contextlib
import socket
import socketserver
import struct
import threading
from collections.abc import Iterator, Mapping

Address = tuple[str, int]
_TLS, _ANSWER, _A = 443, 0x8580, 1
_SECONDS = 120.0


def _name_of(hello: bytes) -> str:
    """The server's name in a TLS handshake (RFC 8446, 4.1.2; RFC 6066, 3)."""
    at = 43 + 1 + hello[43]  # Of the record: header, version, random; the session.
    at += 2 + struct.unpack_from("!H", hello, at)[0]  # Cipher suites.
    at += 1 + hello[at] + 2  # Compression, and the length of the extensions.
    while True:
        kind, size = struct.unpack_from("!HH", hello, at)
        if kind == 0:
            (length,) = struct.unpack_from("!H", hello, at + 7)
            return hello[at + 9 : at + 9 + length].decode()
        at += 4 + size


def _pass_on(one: socket.socket, other: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := one.recv(1 << 16):
            other.sendall(data)
        other.shutdown(socket.SHUT_WR)


class _Tls(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        self.request.settimeout(_SECONDS)
        with contextlib.suppress(OSError, struct.error, IndexError):
            whole = socket.MSG_PEEK | socket.MSG_WAITALL
            (size,) = struct.unpack("!3xH", self.request.recv(5, whole))
            hello = self.request.recv(5 + size, whole)
            name = _name_of(hello)
            self.server.asked.add(name)  # type: ignore[attr-defined]
            known = self.server.hosts  # type: ignore[attr-defined]
            to = known.get(name, (name, _TLS))
            with socket.create_connection(to, timeout=_SECONDS) as there:
                back = threading.Thread(target=_pass_on, args=(there, self.request))
                back.start()
                _pass_on(self.request, there)
                back.join()


class _Names(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        """Answer with the one address, or with none for other kinds (RFC 1035)."""
        query, reply = self.request
        end = query.index(0, 12) + 5
        (kind,) = struct.unpack_from("!H", query, end - 4)
        found = b""
        if kind == _A:
            address = socket.inet_aton(self.server.server_address[0])  # type: ignore[arg-type]
            found = struct.pack("!HHHIH", 0xC00C, _A, 1, 60, 4) + address
        head = struct.pack("!HHHHH", _ANSWER, 1, bool(found), 0, 0)
        reply.sendto(query[:2] + head + query[12:end] + found, self.client_address)


class _Many(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64


@contextlib.contextmanager
def serve(
    address: str, hosts: Mapping[str, Address], ports: Mapping[int, str]
) -> Iterator[set[str]]:
    """Be the internet at an address, until the end of the block.

    Args:
        address: Of an interface of this host, that a machine has a route to.
        hosts: Where hosts of a test are, by name.
        ports: Other ports that take connections, and what they say.

    Yields:
        Names of the hosts that were connected to.
    """
    asked: set[str] = set()

    def saying(word: str) -> type[socketserver.BaseRequestHandler]:
        class Says(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                self.request.sendall(word.encode())

        return Says

    tls = _Many((address, _TLS), _Tls)
    tls.asked, tls.hosts = asked, hosts  # type: ignore[attr-defined]
    servers: list[socketserver.BaseServer] = [
        tls,
        socketserver.ThreadingUDPServer((address, 53), _Names),
        *(_Many((address, port), saying(word)) for port, word in ports.items()),
    ]
    threads = [threading.Thread(target=server.serve_forever) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield asked
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
        for thread in threads:
            thread.join()
