"""Who may see the pages: the browser that has the token, under this host's own name.

Other users of the host can connect to a port on the loopback interface, and any page
of the internet can send a browser there. So a request needs

- a ``Host`` of the loopback interface: a foreign name that was rebound to 127.0.0.1
  keeps its own name here;
- the token, in the address the first time and in a cookie afterwards, which scripts
  cannot read and which other sites' requests do not carry;
- or, for metrics, a token of their own;
- to change anything, an ``Origin`` that is this page.
"""

import hmac
from http.cookies import CookieError, SimpleCookie

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "cache-control": "no-store",
    # Not no-referrer: then browsers send the Origin of a form as null.
    "referrer-policy": "same-origin",
    "x-content-type-options": "nosniff",
    "cross-origin-resource-policy": "same-origin",
}

METRICS = "/metrics"
_ADDRESS = "open the address that crossfed has printed: it holds a token\n"
_BEARER = (
    "send the token in metrics.token, in the folder of this aggregator or site, as "
    "Authorization: Bearer TOKEN\n"
)


class Guard:
    """An ASGI application that passes on what it may."""

    def __init__(
        self, app: ASGIApp, *, token: str, port: int, metrics_token: str = ""
    ) -> None:
        """Guard ``app``.

        Args:
            app: The pages.
            token: Of at least 128 random bits, as text that an address may hold.
            port: Where they are served.
            metrics_token: Another one, which opens ``/metrics`` and nothing else, and
                comes as ``Authorization: Bearer``; empty for none.
        """
        self._bearer = f"Bearer {metrics_token}".encode() if metrics_token else b""
        self._app = app
        self._token = token.encode()
        # Cookies belong to a host, whatever the port: two pages need two names.
        self._cookie = f"crossfed-{port}"
        self._hosts = {f"{name}:{port}" for name in ("127.0.0.1", "localhost")}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer or refuse one request."""
        if scope["type"] != "http":
            return  # Of the rest there is only the lifespan, and nothing to do then.
        refusal = self._refusal(scope)
        if refusal is not None:
            await refusal(scope, receive, send)
            return

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        await self._app(scope, receive, send_safely)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if host not in self._hosts:
            return PlainTextResponse("this page has another address\n", 421)
        query: bytes = scope["query_string"]
        if query.startswith(b"token="):
            return self._enter(scope["path"], query.removeprefix(b"token="))
        if scope["path"] == METRICS:
            given = headers.get("authorization", "").encode()
            if self._bearer and hmac.compare_digest(given, self._bearer):
                return None
        if not self._is_known(headers.get("cookie", "")):
            text = _BEARER if scope["path"] == METRICS else _ADDRESS
            return PlainTextResponse(text, 403)
        changes = scope["method"] not in {"GET", "HEAD"}
        if changes and headers.get("origin") != f"http://{host}":
            return PlainTextResponse("not from this page\n", 403)
        return None

    def _enter(self, path: str, token: bytes) -> Response:
        """Exchange the address's token for a cookie, so that no address keeps it."""
        if not hmac.compare_digest(token, self._token):
            return PlainTextResponse("wrong token\n", 403)
        # One slash: two would begin the address of another host.
        answer = RedirectResponse("/" + path.lstrip("/"), 303, headers=_HEADERS)
        answer.set_cookie(
            self._cookie, self._token.decode(), httponly=True, samesite="strict"
        )
        return answer

    def _is_known(self, cookies: str) -> bool:
        try:
            found = SimpleCookie(cookies).get(self._cookie)
        except CookieError:
            return False
        value = "" if found is None else found.value
        return hmac.compare_digest(value.encode(), self._token)
