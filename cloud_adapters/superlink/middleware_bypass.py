"""Lead requests through Flower's middleware in less processor time.

The SuperLink has three interfaces: for sites, for runs and for control. Flower puts
every request through the middleware of all three. Middleware of another interface
passes it on, but makes a task and a stream in memory to do so. Here, each middleware
sees only requests of its own interface. The middleware that sites and runs do need
decides as before, but what follows it runs in the same task: Starlette makes a task for
the sake of answers that never end, and these are finite.

Middleware was more than a third of the processor time of a site's look for a message.
"""

import os
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from cloud_adapters.flower.private.superlink import superlink_middleware
from cloud_adapters.superlink.guard import App, Receive, Scope, Send

# Middleware of an interface is in the package of its routes.
_PACKAGE = re.compile(r"flwr\.\w+\.routers\.(control|fleet|runtime)\b")

# Middleware that hands on the next application's answer without reading it.
_HANDS_ON = {"NodeAuthMiddleware", "FleetEventLogMiddleware"}
# So does this one, unless Flower's tracing is on.
_TRACES = "RuntimeTracingMiddleware"
# Rewrites answers, and needs the whole answer of the next application to do so.
_TRANSLATES = "ProtobufTranslationMiddleware"
_CONTROL = "/v1/control/"

Call = Callable[[Any, Scope, Receive, Send], Awaitable[None]]


def install() -> None:
    """Shorten the path of requests in the SuperLink that this process will become."""
    traces = os.environ.get("FLWR_TRACING_ENABLED") == "1"
    hands_on = _HANDS_ON if traces else _HANDS_ON | {_TRACES}
    for each in superlink_middleware():
        kind: Any = each.cls
        call, found = kind.__call__, _PACKAGE.match(kind.__module__)
        if kind.__name__ in hands_on:
            call = in_place(call)
        if found:
            kind.__call__ = only_for(f"/v1/{found[1]}/", call)
        elif kind.__name__ == _TRANSLATES:
            kind.__call__ = whole(call)
        elif "dispatch" in each.kwargs:  # Starlette's own class, around a function.
            kind.__call__ = in_place(call, each.kwargs["dispatch"])


def only_for(prefix: str, call: Call) -> Call:
    """Restrict a middleware to the paths of one interface.

    Args:
        prefix: Prefix of these paths.
        call: Its ``__call__``; it keeps the next application as ``app``.
    """

    async def restricted(
        middleware: Any, scope: Scope, receive: Receive, send: Send
    ) -> None:
        # The router decides by the same string.
        if scope["type"] == "http" and not scope["path"].startswith(prefix):
            app: App = middleware.app
            await app(scope, receive, send)
        else:
            await call(middleware, scope, receive, send)

    return restricted


_SENT = Response()


@dataclass(kw_only=True)
class _Next:
    """The next application, which sends its answer itself.

    Attributes:
        app: The application.
        scope: Scope of the request.
        receive: Its body.
        send: Takes the answer.
        has_begun: Whether there is one.
        failure: What ended it.
    """

    app: App
    scope: Scope
    receive: Receive
    send: Send
    has_begun: bool = False
    failure: Exception | None = None

    async def call(self, _: Request) -> Response:
        try:
            await self.app(self.scope, self.receive, self._pass_on)
        except Exception as error:
            if not self.has_begun:
                raise
            self.failure = error  # Too late for another answer.
        return _SENT

    async def _pass_on(self, message: Any) -> None:
        self.has_begun = True
        await self.send(message)


def in_place(call: Call, dispatch: object = None) -> Call:
    """Have what follows a middleware answer for itself, without a task between them.

    Args:
        call: Its ``__call__``. It must return the answer of the next application as it
            is, or one of its own.
        dispatch: Only where this is what the middleware does; anywhere if None.
    """

    async def run(middleware: Any, scope: Scope, receive: Receive, send: Send) -> None:
        is_other = dispatch is not None and middleware.dispatch_func is not dispatch
        if scope["type"] != "http" or is_other:
            await call(middleware, scope, receive, send)
            return
        following = _Next(app=middleware.app, scope=scope, receive=receive, send=send)
        request = Request(scope, receive)
        answer = await middleware.dispatch_func(request, following.call)
        if following.failure is not None:
            raise following.failure
        if answer is not _SENT:
            await answer(scope, receive, send)

    return run


def whole(call: Call) -> Call:
    """Have a middleware look at whole answers, which need no stream and no task.

    Args:
        call: Its ``__call__``. Control has answers that go on, and keeps it.
    """

    async def run(middleware: Any, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(_CONTROL):
            await call(middleware, scope, receive, send)
            return
        request = Request(scope, receive)

        async def call_next(_: Request) -> Response:
            body = await request.body()
            unread = [{"type": "http.request", "body": body, "more_body": False}]

            async def read() -> Any:
                return unread.pop() if unread else await receive()

            parts: list[Any] = []

            async def take(message: Any) -> None:
                parts.append(message)

            await middleware.app(scope, read, take)
            start, *rest = parts
            content = b"".join(each.get("body", b"") for each in rest)
            answer = Response(content, start["status"])
            answer.raw_headers = start["headers"]
            return answer

        answer = await middleware.dispatch_func(request, call_next)
        await answer(scope, receive, send)

    return run
