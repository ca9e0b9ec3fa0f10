"""Who may use the SuperLink's interfaces other than those of sites.

Flower's Control and Runtime interfaces accept every caller. They listen on the
loopback, which every user of the host can reach: starting a run there runs code
as the aggregator's user. ``Guard`` stands before all of Flower's own handlers and
refuses, by default, what does not carry a secret. It lets in without one only the
calls of a site, which Flower authenticates by the node's key, and ``/health``.

The two interfaces have different secrets. The process that coordinates a run reads
what sites send; it knows the secret of Runtime only and can start no other run.

What travels is not the secret but a value derived from it, over TLS to a server whose
certificate the client checks.
"""

import hmac
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from dataclasses import dataclass
from typing import Any

import httpx
from starlette.middleware import Middleware

from cloud_adapters.flower.private.http import (
    ProtobufCall,
    ProtobufRequestContext,
    extensions,
)

HEADER = "x-crossfed-secret"

_RUNTIME = "/v1/runtime/"
_REFUSED = b"this interface needs a secret of the aggregator's host\n"
_UNAUTHORIZED = 401

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def control_word(secret: bytes) -> str:
    """What a caller of Control sends."""
    return _derive(secret, b"crossfed superlink control 1")


def runtime_word(secret: bytes) -> str:
    """What a caller of Runtime sends."""
    return _derive(secret, b"crossfed superlink runtime 1")


def _derive(secret: bytes, purpose: bytes) -> str:
    return hmac.digest(secret, purpose, "sha256").hex()


@dataclass(frozen=True, slots=True)
class SecretSender:
    """Adds the secret to every request of one of Flower's clients.

    Attributes:
        word: See ``control_word`` and ``runtime_word``.
    """

    word: str

    def intercept(
        self, context: ProtobufRequestContext, call_next: ProtobufCall
    ) -> httpx.Response:
        """Send the request with the secret."""
        context.request.headers[HEADER] = self.word
        return call_next(context)


class Guard:
    """Refuses requests before Flower sees them; an ASGI application."""

    def __init__(
        self, app: App, *, control: str, runtime: str, public: Collection[str]
    ) -> None:
        """Guard an application.

        Args:
            app: Answers what is let in.
            control: What a caller must send, except for Runtime.
            runtime: What a caller of Runtime must send.
            public: Paths for which no secret is needed.
        """
        self._app = app
        self._control = control.encode()
        self._runtime = runtime.encode()
        self._public = frozenset(public)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        # "lifespan" comes from the server itself. Of connections, only HTTP is served.
        if scope["type"] == "lifespan" or self._may_pass(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"content-type", b"text/plain; charset=utf-8")]
            await send(
                {
                    "type": "http.response.start",
                    "status": _UNAUTHORIZED,
                    "headers": headers,
                }
            )
            await send({"type": "http.response.body", "body": _REFUSED})
        else:
            await send({"type": "websocket.close"})

    def _may_pass(self, scope: Scope) -> bool:
        if scope["type"] != "http":
            return False
        # The router decides by the same string.
        path = scope["path"]
        if path in self._public:
            return True
        name = HEADER.encode()
        sent = [value for key, value in scope["headers"] if key == name]
        wanted = self._runtime if path.startswith(_RUNTIME) else self._control
        return len(sent) == 1 and hmac.compare_digest(sent[0], wanted)


def install(*, control: bytes, runtime: bytes, public: Collection[str]) -> None:
    """Put the guard before the SuperLink that this process is going to be.

    Args:
        control: The secret of Control, and of everything that is not named here.
        runtime: The secret of Runtime.
        public: Paths for which no secret is needed.
    """
    guard = Middleware(
        Guard,
        control=control_word(control),
        runtime=runtime_word(runtime),
        public=public,
    )
    others = extensions.get_middleware

    def get_middleware() -> tuple[Middleware, ...]:
        return (guard, *others())

    # Flower puts these before all of its own.
    extensions.get_middleware = get_middleware
