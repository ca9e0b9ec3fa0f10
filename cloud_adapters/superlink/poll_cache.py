"""Answer a look for messages when there is one, and not from the database before.

A look is one poll: sites poll for messages, and a run for answers. Flower answers every
look from its database, in a transaction that writes, and behind eight middlewares: 5 ms
of processor time. Most looks find nothing.

``PollCache`` keeps such an answer until a request arrives that may change it, and for
a few seconds at most. Meanwhile it holds looks back, for a while each: a message is
noticed as soon as it is there, and by few looks. It answers no one whom Flower would
refuse: a site's signature is checked here as Flower checks it, and a run is answered
only if it repeats the same request, byte for byte, with its token.
"""

import asyncio
import datetime as dt
import hashlib
import time
from base64 import b64decode
from collections.abc import Callable, Collection, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.middleware import Middleware

from cloud_adapters.flower.private.bundle import DecodeError
from cloud_adapters.flower.private.http import extensions
from cloud_adapters.flower.private.node import PullMessagesRequest
from cloud_adapters.flower.private.runtime import PushAppMessagesRequest
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
# Larger tasks are not read to see whose they are.
MAX_TASK_BYTES = 4 << 20
# How long looks of sites and runs are held back. A site that ends, and a run whose
# grace is over, notice it as much later.
SITE_HOLD_SECONDS, RUN_HOLD_SECONDS = 1.0, 0.2
# Answers that come together are found by one look.
SETTLE_SECONDS = 0.02
_OK = 200
_TASKS = "/v1/runtime/push-messages"

# These requests change the answer to no look. After a heartbeat a node may be online
# again, which a run sees when the kept answer expires, a second later. A task is found
# as soon as it is announced, before its parts are pushed.
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
        "/v1/runtime/push-object",
        "/v1/runtime/send-task-heartbeat",
    }
)
# These remove messages that were found, or add answers for a run: no look of a site
# depends on them.
_CONFIRMS = frozenset(
    {
        "/v1/fleet/confirm-message-received",
        "/v1/runtime/confirm-message-received",
    }
)
_OF_ANSWERS = _CONFIRMS | {"/v1/fleet/push-messages", "/v1/fleet/push-object"}


@dataclass(frozen=True, slots=True)
class _LookAnswer:
    """An answer.

    Attributes:
        parts: What was sent.
        until: The reading of the clock until which it holds.
        node: The site that looks; 0 if that is not known.
        changed: Set once it no longer holds.
    """

    parts: tuple[Message, ...]
    until: float
    node: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(kw_only=True)
class _LookKind:
    """One kind of look.

    Attributes:
        seconds: How long an answer is kept at most.
        unchanged_by: Requests after which an answer still holds.
        hold: How long a look that finds nothing is held back, in seconds.
        settle: After a change, the seconds until it looks again.
        is_signed: Whether each request has a new signature of a site.
        may_have_content: Whether an answer with content is kept; those with messages
            are not, since Flower gives them once.
        kept: Answers by a digest of their request.
        num_changes: Requests that may have changed an answer.
    """

    seconds: float
    unchanged_by: frozenset[str]
    hold: float = 0.0
    settle: float = 0.0
    is_signed: bool = False
    may_have_content: bool = False
    kept: dict[bytes, _LookAnswer] = field(default_factory=dict)
    num_changes: int = 0

    def forget(self, nodes: Collection[int] | None = None) -> None:
        """Forget answers: to some sites, or all."""
        for key, answer in [*self.kept.items()]:
            if nodes is None or not answer.node or answer.node in nodes:
                del self.kept[key]
                answer.changed.set()
        self.num_changes += 1


def _kinds(
    site_hold: float = SITE_HOLD_SECONDS, run_hold: float = RUN_HOLD_SECONDS
) -> dict[str, _LookKind]:
    return {
        "/v1/fleet/pull-messages": _LookKind(
            seconds=5.0,
            unchanged_by=_OF_ANSWERS,
            hold=site_hold,
            is_signed=True,
        ),
        # That a node has been silent for too long takes no request.
        "/v1/runtime/pull-messages": _LookKind(
            seconds=1.0,
            unchanged_by=_CONFIRMS,
            hold=run_hold,
            settle=SETTLE_SECONDS,
        ),
        "/v1/runtime/get-nodes": _LookKind(
            seconds=1.0, unchanged_by=_OF_ANSWERS, may_have_content=True
        ),
    }


class PollCache:
    """Answers looks for messages; an ASGI application."""

    def __init__(
        self,
        app: App,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        site_hold: float = SITE_HOLD_SECONDS,
        run_hold: float = RUN_HOLD_SECONDS,
    ) -> None:
        """Keep nothing yet.

        Args:
            app: Answers everything else.
            monotonic: A clock in seconds.
            site_hold: How long a site's look is held back, in seconds.
            run_hold: The same for a run's.
        """
        self._app = app
        self._monotonic = monotonic
        self._kinds = _kinds(site_hold, run_hold)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a look from memory, or pass a request on."""
        path = scope.get("path", "")
        if scope["type"] != "http" or path in _READS:
            await self._app(scope, receive, send)
        elif path in self._kinds and _length(scope) <= MAX_BYTES:
            await self._look(self._kinds[path], scope, receive, send)
        else:
            nodes: Collection[int] | None = None
            if path == _TASKS and _length(scope) <= MAX_TASK_BYTES:
                body = await _body(receive)
                if body is None:  # Its sender has gone.
                    return
                nodes, receive = _asked(body), _reading(body, receive)
            try:
                await self._app(scope, receive, send)
            finally:  # Also if it failed, or its sender has gone.
                for kind in self._kinds.values():
                    if path not in kind.unchanged_by:
                        kind.forget(nodes)

    async def _look(
        self, kind: _LookKind, scope: Scope, receive: Receive, send: Send
    ) -> None:
        body = await _body(receive)
        if body is None:  # Its sender has gone.
            return
        key, end = _key(scope, kind, body), self._monotonic() + kind.hold
        is_known = not kind.is_signed
        while True:
            found = kind.kept.get(key)
            is_fresh = found is not None and self._monotonic() < found.until
            is_known = is_known or (is_fresh and is_signed(scope))
            if found is None or not (is_fresh and is_known):
                # Flower's middleware adds to a scope.
                found = await self._ask(kind, {**scope}, body, receive)
                is_known = True  # Or it is refused, which ends the look.
            left = end - self._monotonic()
            if left <= 0 or not _is_held(found.parts):
                break
            try:
                await asyncio.wait_for(found.changed.wait(), left)
            except TimeoutError:
                break
            await asyncio.sleep(kind.settle)
        for part in found.parts:
            await send(part)

    async def _ask(
        self, kind: _LookKind, scope: Scope, body: bytes, receive: Receive
    ) -> _LookAnswer:
        """Have Flower answer, and keep that if it may be kept."""
        parts: list[Message] = []

        async def note(part: Message) -> None:
            parts.append(part)

        begin, num_changes = self._monotonic(), kind.num_changes
        await self._app(scope, _reading(body, receive), note)
        node = _asking(body) if kind.is_signed else 0
        found = _LookAnswer(tuple(parts), begin + kind.seconds, node)
        if num_changes != kind.num_changes:
            # A request that came meanwhile may have changed what it should be.
            found.changed.set()
        elif _may_be_kept(kind, parts):
            if len(kind.kept) >= MAX_KEPT:
                kind.forget()
            kind.kept[_key(scope, kind, body)] = found
        return found


def _asking(body: bytes) -> int:
    """The site that looks for messages; 0 if that cannot be read."""
    try:
        return int(PullMessagesRequest.FromString(body).node.node_id)
    except DecodeError:
        return 0


def _asked(body: bytes) -> Collection[int] | None:
    """The sites that a run sends tasks to; None if that cannot be read."""
    try:
        tasks = PushAppMessagesRequest.FromString(body).messages_list
    except DecodeError:
        return None
    return {task.metadata.dst_node_id for task in tasks}


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


def _is_held(parts: Sequence[Message]) -> bool:
    """Whether an answer says that all is well, and nothing more."""
    is_well = bool(parts) and parts[0].get("status") == _OK
    return is_well and not any(part.get("body") for part in parts)


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
