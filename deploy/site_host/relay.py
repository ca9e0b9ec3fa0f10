"""``crossfed site relay``: connects a stock SuperNode to the aggregator.

Flower's own SuperNode shows no certificate, and the aggregator's proxy requires
one. This relay listens on the loopback of the site's machine and passes the calls
of a node on, with the site's certificate. One call it answers itself: that for the
bundle of a run, which a SuperNode executes. What the aggregator would send for it is
not fetched; the SuperNode gets the one of this release, which runs the app that its
operator has installed, or none.

Who may speak as the site's node is for the SuperLink to tell, by the node's key.
"""

import http.client
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization

from cloud_adapters.flower_apps import bundle as flower_bundle
from cloud_adapters.net import loopback_http
from cloud_adapters.net.outbound import https_line
from cloud_adapters.net.ports import LOOPBACK
from cloud_adapters.net.tls import client_context
from cloud_adapters.nginx.config import FLEET_CALLS, MAX_FLEET_BYTES
from deploy.site_host import (
    config as site_file,
    folder as site_folder,
    relay_certificate,
)
from deploy.site_host.config import SiteConfig
from federation.addresses import parse_address
from federation.errors import FederationError, JobError, ProtocolError
from federation.protocols import Clock
from privacy.secret_files import replace_private

# A SuperNode asks for messages every three seconds, but not while its app works.
IDLE_SECONDS = 75.0
CALL_SECONDS = 60.0

_PATHS = frozenset(f"/v1/fleet/{call}" for call in FLEET_CALLS)
_BUNDLE = "/v1/fleet/get-fab"
# Those of one connection, and those that are computed again.
_HOP = frozenset(
    {"connection", "keep-alive", "transfer-encoding", "upgrade", "te", "trailer"}
    | {"host", "content-length", "expect", "proxy-connection"}
    | {"date", "server"}
)

Listener = Callable[[str], None]


def serve(
    path: Path,
    *,
    port: int,
    stopped: threading.Event,
    clock: Clock,
    listener: Listener,
) -> None:
    """Pass calls on until ``stopped`` is set.

    Args:
        path: ``site.toml``.
        port: Where to listen on the loopback; 0 for any that is free.
        stopped: Ends it.
        clock: Clock of waits and of times in its log.
        listener: Called with a word about what happens.

    Raises:
        JobError: The configuration is wrong, or names no certificate.
        KeyFileRefused: A key file is missing, open to others or damaged.
        FederationError: An agent works in the folder, or another process has the port.
    """
    config = site_file.load(path)
    if config.file.home.url:
        raise JobError(
            "a relay charges nothing and does not use a home: remove it, and keep a "
            "copy of the folder's keys",
            key="home.url",
        )
    with site_folder.only_one(config.folder):
        way = _Upstream.of(config)
        paths = _Paths(config.folder.resolve() / "relay")
        context = paths.prepare(config, clock)
        site_folder.keep_fresh(config, clock, stopped, listener)
        with _RelayServer(way, context, port, listener).listening() as found:
            listener(f"passes the calls of a SuperNode on to {way.host}:{way.port}")
            listener(f"start it with: {paths.command(found)}")
            relay_certificate.keep_certified(
                paths.folder, (LOOPBACK,), context, clock, stopped
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Upstream:
    """How to reach the aggregator as this site."""

    host: str
    port: int
    authority: bytes
    certificate: Path

    @classmethod
    def of(cls, config: SiteConfig) -> "_Upstream":
        if config.certificate is None:
            raise JobError(
                "is empty: without a proxy in front of the aggregator a SuperNode "
                "needs no relay, and with one this site must enrol",
                key="certificate",
            )
        address = config.file.aggregator.address
        host, port = parse_address(address, key="aggregator.address")
        way = cls(
            host=host,
            port=port,
            authority=site_folder.authority(config),
            certificate=config.certificate,
        )
        way.connect().close()  # Report unusable files now.
        return way

    def connect(self) -> http.client.HTTPSConnection:
        """Make a connection that opens with its first call.

        The certificate is read each time, so that a renewed one is used.

        Raises:
            JobError: A file holds no certificate.
        """
        context = client_context(self.authority, self.certificate)
        return https_line(self.host, self.port, context=context, seconds=CALL_SECONDS)


@dataclass(frozen=True, slots=True)
class _Paths:
    """The files of a SuperNode on this machine, in a separate folder."""

    folder: Path

    def prepare(self, config: SiteConfig, clock: Clock) -> ssl.SSLContext:
        """Write the node's key as Flower reads it, and certify the loopback.

        Raises:
            KeyFileRefused: A key file is missing, open to others or damaged.
            FederationError: The folder cannot be written.
        """
        key = site_folder.node_key(config.node_key).private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.OpenSSH,
            serialization.NoEncryption(),
        )
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            replace_private(self.folder / "node", key)
        except OSError as error:
            raise FederationError(
                f"cannot write below {self.folder}: {error.strerror}"
            ) from error
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        relay_certificate.prepare(self.folder, (LOOPBACK,), context, clock)
        return context

    def command(self, port: int) -> str:
        """The command that starts a SuperNode."""
        return (
            f"flower-supernode --superlink {LOOPBACK}:{port} "
            f"--root-certificates {self.folder / 'ca.crt'} "
            f"--auth-supernode-private-key {self.folder / 'node'} "
            "--node-config 'app=\"/folder/of/the/app\" partition-id=0 num-partitions=1'"
        )


class _RelayServer(loopback_http.Server):
    def __init__(
        self, way: _Upstream, context: ssl.SSLContext, port: int, listener: Listener
    ) -> None:
        self.way, self.listener, self._context = way, listener, context
        advice = "stop what listens there, or choose another --port"
        super().__init__(port, _RelayHandler, advice=advice)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Do the TLS handshake in the connection's thread, so nothing else waits."""
        request.settimeout(CALL_SECONDS)
        with self._context.wrap_socket(request, server_side=True) as secured:
            super().finish_request(secured, client_address)


class _RelayHandler(loopback_http.LoopbackHandler):
    """Calls of one connection, passed on over a second one."""

    server: _RelayServer
    protocol_version = "HTTP/1.1"
    timeout = IDLE_SECONDS
    _upstream: http.client.HTTPSConnection | None = None

    def do_POST(self) -> None:  # noqa: N802 -- the library's name
        """Pass a call on, or answer it."""
        body = self.read_body(MAX_FLEET_BYTES)
        if body is None:
            return
        if self.path == _BUNDLE:
            self._bundle(body)
        elif self.path in _PATHS:
            self._pass_on(body)
        else:
            self.answer(404)

    def finish(self) -> None:
        """Close both connections."""
        self._hang_up()
        super().finish()

    def _bundle(self, body: bytes) -> None:
        try:
            content = flower_bundle.answer(body)
        except ProtocolError as error:
            self.server.listener(f"a bundle was refused: {error}")
            # A SuperNode takes it for a run that has ended, and leaves that alone.
            self.answer(403)
        else:
            self.answer(200, content, {"Content-Type": "application/protobuf"})

    def _pass_on(self, body: bytes) -> None:
        kept = {n: v for n, v in self.headers.items() if n.lower() not in _HOP}
        try:
            if self._upstream is None:
                self._upstream = self.server.way.connect()
            self._upstream.request("POST", self.path, body, kept)
            answer = self._upstream.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException, FederationError) as error:
            self._hang_up()
            self.server.listener(f"the aggregator cannot be reached: {error!r}")
            self.answer(503)  # A SuperNode tries again.
            return
        if answer.will_close:
            self._hang_up()
        headers = {n: v for n, v in answer.getheaders() if n.lower() not in _HOP}
        self.answer(answer.status, content, headers)

    def _hang_up(self) -> None:
        if self._upstream is not None:
            self._upstream.close()
            self._upstream = None
