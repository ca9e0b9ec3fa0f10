"""Answer a look for messages from memory while it would find what the last one found.

A look is one poll: sites poll for messages, and a run for answers, up to ten times a
second each. Flower answers every look from its database, in a transaction that writes,
and behind eight middlewares: 5 ms of processor time. Most looks find nothing.

``PollCache`` keeps such an answer until a request arrives that may change it, and for
a few seconds at most. It answers no one whom Flower would refuse: a site's signature is
checked here as Flower checks it, and a run is answered only if it repeats the same
request, byte for byte, with its token.
"""

import datetime as dt
import hashlib
import time
from base64 import b64decode
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from starlette.middleware import Middleware

from cloud_adapters.flower.private.http import extensions
from cloud_adapters.flower.private.superlink import (
    FLEET_HTTP_PUBLIC_KEY_HEADER,
    FLEET_HTTP_SIGNATURE_HEADER,
    SYSTEM_TIME_TOLERANCE,
    TIMESTAMP_HEADER,
    TIMESTAMP_TOLERANCE,
    bytes_to_public_key,
    now,
    verify_signature,
)
from cloud_adapters.superlink.guard import App, Receive, Scope, Send

Message = MutableMapping[str, Any]

# Larger bodies are passed on, and larger answers are not kept.
MAX_BYTES = 64 << 10
# Answers of one kind of look; with one more, all are forgotten.
MAX_KEPT = 4096
_OK = 200

# These requests change the answer to no look. After a heartbeat a node may be online
# again, which a run sees when the kept answer expires, a second later.
_READS = frozenset(
    {
        "/health",
        "/v1/control/list-nodes",
        "/v1/control/list-runs",
        "/v1/fleet/get-fab",
        "/v1/fleet/get-run",
        "/v1/fleet/pull-object",
        "/v1/fleet/send-node-heartbeat",
        "/v1/runtime/acquire-task",
        "/v1/runtime/pull-object",
        "/v1/runtime/pull-task-input",
        "/v1/runtime/push-logs",
        "/v1/runtime/send-task-heartbeat",
    }
)
# These add or remove answers for a run; no look of a site depends on them.
_OF_ANSWERS = frozenset(
    {
        "/v1/fleet/confirm-message-received",
        "/v1/fleet/push-messages",
        "/v1/fleet/push-object",
        "/v1/runtime/confirm-message-received",
    }
)


@dataclass(frozen=True, slots=True)
class _LookAnswer:
    """An answer: what was sent, and the reading of the clock until which it holds."""

    parts: tuple[Message, ...]
    until: float


@dataclass(kw_only=True)
class _LookKind:
    """One kind of look.

    Attributes:
        seconds: How long an answer is kept at most.
        unchanged_by: Requests after which an answer still holds.
        is_signed: Whether each request has a new signature of a site.
        may_have_content: Whether an answer with content is kept; those with messages
            are not, since Flower gives them once.
        kept: Answers by a digest of their request.
        num_changes: Requests that may have changed an answer.
    """

    seconds: float
    unchanged_by: frozenset[str]
    is_signed: bool = False
    may_have_content: bool = False
    kept: dict[bytes, _LookAnswer] = field(default_factory=dict)
    num_changes: int = 0


def _kinds() -> dict[str, _LookKind]:
    return {
        "/v1/fleet/pull-messages": _LookKind(
            seconds=5.0, unchanged_by=_OF_ANSWERS, is_signed=True
        ),
        # That a node has been silent for too long takes no request.
        "/v1/runtime/pull-messages": _LookKind(seconds=1.0, unchanged_by=frozenset()),
        "/v1/runtime/get-nodes": _LookKind(
            seconds=1.0, unchanged_by=_OF_ANSWERS, may_have_content=True
        ),
    }


class PollCache:
    """Answers looks for messages; an ASGI application."""

    def __init__(
        self, app: App, *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        """Keep nothing yet.

        Args:
            app: Answers everything else.
            monotonic: A clock in seconds.
        """
        self._app = app
        self._monotonic = monotonic
        self._kinds = _kinds()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a look from memory, or pass a request on."""
        path = scope.get("path", "")
        if scope["type"] != "http" or path in _READS:
            await self._app(scope, receive, send)
        elif path in self._kinds and _length(scope) <= MAX_BYTES:
            await self._look(self._kinds[path], scope, receive, send)
        else:
            try:
                await self._app(scope, receive, send)
            finally:  # Also if it failed, or its sender has gone.
                self._forget(path)

    def _forget(self, path: str) -> None:
        for kind in self._kinds.values():
            if path not in kind.unchanged_by:
                kind.kept.clear()
                kind.num_changes += 1

    async def _look(
        self, kind: _LookKind, scope: Scope, receive: Receive, send: Send
    ) -> None:
        body = await _body(receive)
        if body is None:  # Its sender has gone.
            return
        key = _key(scope, kind, body)
        kept = kind.kept.get(key)
        is_fresh = kept is not None and self._monotonic() < kept.until
        if kept is not None and is_fresh and (not kind.is_signed or is_signed(scope)):
            for part in kept.parts:
                await send(part)
            return
        parts: list[Message] = []

        async def note(part: Message) -> None:
            parts.append(part)
            await send(part)

        begin, num_changes = self._monotonic(), kind.num_changes
        await self._app(scope, _reading(body, receive), note)
        # A request that came meanwhile may have changed what the answer should be.
        if num_changes == kind.num_changes and _may_be_kept(kind, parts):
            if len(kind.kept) >= MAX_KEPT:
                kind.kept.clear()
            kind.kept[key] = _LookAnswer(tuple(parts), begin + kind.seconds)


def _length(scope: Scope) -> float:
    """Bytes of a body; infinite if the request does not say."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value)
    return float("inf")


def _key(scope: Scope, kind: _LookKind, body: bytes) -> bytes:
    """Name a request by all that is the same if its sender repeats it.

    A digest: thousands of requests as long as a site may send would fill the memory.
    """
    new: tuple[bytes, ...] = ()
    if kind.is_signed:
        new = (TIMESTAMP_HEADER.encode(), FLEET_HTTP_SIGNATURE_HEADER.encode())
    headers = [(name, value) for name, value in scope["headers"] if name not in new]
    facts = (scope["method"], scope["query_string"], headers, body)
    return hashlib.sha256(repr(facts).encode()).digest()


async def _body(receive: Receive) -> bytes | None:
    pieces: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        pieces.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(pieces)


def _reading(body: bytes, receive: Receive) -> Receive:
    """What the next application receives: a body that has been read."""
    unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def read() -> Message:
        return unread.pop() if unread else await receive()

    return read


def _may_be_kept(kind: _LookKind, parts: list[Message]) -> bool:
    """Whether an answer is whole, says that all is well, and brings no message."""
    if not parts or parts[0].get("status") != _OK or parts[-1].get("more_body"):
        return False
    size = sum(len(part.get("body", b"")) for part in parts)
    return size <= (MAX_BYTES if kind.may_have_content else 0)


def is_signed(scope: Scope) -> bool:
    """Check a signature as Flower does; the kept answer is that of the key's node."""
    sent = dict(reversed(scope["headers"]))  # Flower reads the first of several.
    try:
        public_key, signature = (
            b64decode(sent[name.encode()], validate=True)
            for name in (FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER)
        )
        timestamp = sent[TIMESTAMP_HEADER.encode()]
        signed_at = dt.datetime.fromisoformat(timestamp.decode("ascii"))
        age = (now() - signed_at).total_seconds()
        most = TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE
        return -SYSTEM_TIME_TOLERANCE < age < most and verify_signature(
            bytes_to_public_key(public_key), timestamp, signature
        )
    except (KeyError, ValueError, TypeError):
        return False  # Flower refuses it, and says why.


def install() -> None:
    """Put ``PollCache`` in front of the SuperLink that this process will become.

    Call it before ``guard.install``: the guard must see every request first.
    """
    others = extensions.get_middleware

    def get_middleware() -> tuple[Middleware, ...]:
        return (Middleware(PollCache), *others())

    extensions.get_middleware = get_middleware
