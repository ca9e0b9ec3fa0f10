"""A real nginx with our configuration, before a SuperLink that only takes notes."""

import contextlib
import http.client
import shutil
import socket
import ssl
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from cloud_adapters.net.ports import free_port
from cloud_adapters.nginx import config as proxy, processes as proxy_processes
from cloud_adapters.nginx.config import ProxySettings
from federation.clock import SystemClock
from privacy.membership.certificates import (
    Authority,
    key_pem,
    new_key,
    signing_request,
)

PATIENCE_SECONDS = 60.0
LOOPBACK = "127.0.0.1"


@dataclass(kw_only=True)
class RunningProxy:
    """Nginx and what stands behind it.

    Attributes:
        authority: Signs the certificates.
        settings: What nginx was configured from.
        port: Where it listens.
        fleet: Request lines that reached the SuperLink.
        service: Request lines that reached the service.
    """

    authority: Authority
    settings: ProxySettings
    port: int
    fleet: list[str] = field(default_factory=list)
    service: list[str] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"{LOOPBACK}:{self.port}"

    def issue(self, name: str) -> tuple[Path, int]:
        """Certificate and key of a site in one file, and its serial number."""
        from cryptography import x509  # noqa: PLC0415

        key = new_key()
        pem = self.authority.issue_site(name, signing_request(name, key))
        path = self.settings.folder / f"{name}.pem"
        path.write_bytes(pem + key_pem(key))
        return path, x509.load_pem_x509_certificate(pem).serial_number

    def context(self, certificate: Path | None = None) -> ssl.SSLContext:
        made = ssl.create_default_context(cadata=self.authority.pem.decode())
        if certificate is not None:
            made.load_cert_chain(certificate)
        return made

    def revoke(self, *serials: int) -> None:
        """Write the list anew and have it read."""
        now = SystemClock().now()
        listed = self.authority.revocation_list(dict.fromkeys(serials, now))
        (self.settings.folder / "ca.crl").write_bytes(listed)
        assert proxy_processes.reload(self.settings.work)

    def ask(
        self,
        line: str,
        *headers: str,
        body: bytes = b"",
        certificate: Path | None = None,
    ) -> str:
        """Send a request line as it is; return the status, or ``closed``."""
        head = [line, "Host: localhost", "Connection: close", *headers]
        if body:
            head.append(f"Content-Length: {len(body)}")
        with self.connect(certificate) as tls:
            # Nginx answers what is too large before it has read it.
            with contextlib.suppress(OSError):
                tls.sendall("\r\n".join([*head, "", ""]).encode("latin-1") + body)
            return read_status(tls)

    @contextlib.contextmanager
    def connect(self, certificate: Path | None = None) -> Iterator[ssl.SSLSocket]:
        with (
            socket.create_connection((LOOPBACK, self.port), PATIENCE_SECONDS) as plain,
            self.context(certificate).wrap_socket(
                plain, server_hostname=LOOPBACK
            ) as tls,
        ):
            yield tls


def read_status(tls: ssl.SSLSocket) -> str:
    """The status of an answer, or ``closed`` where there is none."""
    response = http.client.HTTPResponse(tls)
    try:
        response.begin()
        response.read()
    except (OSError, http.client.HTTPException):
        return "closed"
    return str(response.status)


@contextlib.contextmanager
def serve(**changes: Any) -> Iterator[RunningProxy]:
    """Start nginx in a folder of its own; the service takes notes, too.

    ``changes`` are of its settings.
    """
    folder = Path(tempfile.mkdtemp(prefix="proxy-"))
    try:
        authority = Authority.create("test", clock=SystemClock())
        authority.save(folder)
        service: list[str] = []
        with (
            _notes(service, None) as port,
            serve_before(folder, authority, service_port=port, **changes) as running,
        ):
            running.service = service
            yield running
    finally:
        shutil.rmtree(folder)


@contextlib.contextmanager
def serve_before(
    folder: Path,
    authority: Authority,
    *,
    service_port: int,
    host: str = LOOPBACK,
    behind: Authority | None = None,
    **changes: Any,
) -> Iterator[RunningProxy]:
    """Start nginx in an aggregator's folder, before a service that runs.

    ``behind`` has certified the SuperLink, if it is not the same authority.
    """
    key = new_key()
    (folder / "server.key").write_bytes(key_pem(key))
    certificate = authority.issue_server((LOOPBACK, "localhost"), key)
    (folder / "server.crt").write_bytes(certificate)
    other = (behind or authority).issue_server((LOOPBACK, "localhost"), key)
    (folder / "superlink.crt").write_bytes(other)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "superlink.crt", folder / "server.key")
    fleet: list[str] = []
    with _notes(fleet, context) as superlink, contextlib.ExitStack() as stack:
        for attempts_left in reversed(range(5)):
            port = free_port()
            settings = ProxySettings(
                listen=f"{host}:{port}",
                superlink_port=superlink,
                service_port=service_port,
                folder=folder,
                work=folder / "proxy",
                **changes,
            )
            try:
                stack.enter_context(nginx(settings))
            except Ended:  # Somebody has taken the port since.
                if not attempts_left:
                    raise
            else:
                break
        yield RunningProxy(
            authority=authority, settings=settings, port=port, fleet=fleet
        )


class Ended(Exception):
    """Nginx does not run."""


@contextlib.contextmanager
def nginx(settings: ProxySettings) -> Iterator[None]:
    """Run it until the end of the context, and see that nothing of it stays."""
    process = subprocess.Popen(
        proxy.prepare(settings), stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        wait_for(lambda: _is_up(settings, process), "nginx is up")
        yield
    finally:
        process.terminate()
        process.wait(PATIENCE_SECONDS)


def _is_up(settings: ProxySettings, process: subprocess.Popen[bytes]) -> bool:
    """Whether it has written its pid, which it does when it listens."""
    if process.poll() is not None:
        raise Ended(settings.listen)
    path = settings.pid_file
    return path.exists() and path.read_text().strip() == str(process.pid)


def installed() -> bool:
    try:
        proxy.find_program()
    except proxy.ProxyFailed:
        return False
    return True


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Wait until something holds."""
    end = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < end:
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError(f"waited in vain until {what}")


@contextlib.contextmanager
def _notes(lines: list[str], context: ssl.SSLContext | None) -> Iterator[int]:
    class Noting(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            lines.append(self.requestline)
            size = int(self.headers.get("Content-Length", 0))
            answer = str(len(self.rfile.read(size))).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_GET = do_POST  # noqa: N815

        def log_message(self, *args: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer((LOOPBACK, 0), Noting)
    server.daemon_threads = True
    if context is not None:
        server.socket = context.wrap_socket(
            server.socket, server_side=True, do_handshake_on_connect=False
        )
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
