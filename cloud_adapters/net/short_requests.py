"""One short request to a web service, with bounds on everything.

No redirect is followed, and an answer that is too long or too late is none.
``https://`` follows the environment's proxy, as in ``outbound``.
"""

import http.client
import socket
import ssl
from collections.abc import Mapping
from contextlib import suppress
from threading import Event, Timer
from typing import NamedTuple
from urllib.parse import urlsplit

from cloud_adapters.net.outbound import https_line, proxy_note
from federation.errors import PlatformUnavailable

REQUEST_SECONDS = 10.0


class ShortAnswer(NamedTuple):
    """Status and body of an answer."""

    status: int
    body: bytes


def ask(
    url: str,
    *,
    max_bytes: int,
    method: str = "GET",
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> ShortAnswer:
    """Send a request and read its answer.

    Args:
        url: ``https://``, or ``http://`` if the operator has configured that.
        max_bytes: Longest answer.
        method: HTTP method.
        body: Body of the request.
        headers: Headers of the request; ``Host`` replaces the URL's.

    Raises:
        PlatformUnavailable: There is no answer, or it is too long.
    """
    parts = urlsplit(url)
    connection: http.client.HTTPConnection
    note = ""
    if parts.scheme == "https":
        connection = https_line(
            parts.hostname or "",
            parts.port or http.client.HTTPS_PORT,
            context=ssl.create_default_context(),
            seconds=REQUEST_SECONDS,
        )
        note = proxy_note(parts.hostname or "")
    else:
        connection = http.client.HTTPConnection(parts.netloc, timeout=REQUEST_SECONDS)
    late = Event()

    def cut(line: socket.socket) -> None:
        late.set()
        with suppress(OSError):  # It has ended.
            # Below TLS, whose own method would disturb the thread that reads.
            socket.socket.shutdown(line, socket.SHUT_RDWR)

    # The timeout is that of each byte: whoever sends one now and then must end, too.
    timer: Timer | None = None
    try:
        connection.connect()
        timer = Timer(REQUEST_SECONDS, cut, [connection.sock])
        timer.start()
        path = parts._replace(scheme="", netloc="", fragment="").geturl() or "/"
        connection.request(method, path, body, dict(headers or {}))
        response = connection.getresponse()
        answer = response.read(max_bytes + 1)
    except (OSError, http.client.HTTPException) as error:
        raise PlatformUnavailable(
            f"{parts.netloc} cannot be reached: {error}{note}"
        ) from error
    finally:
        if timer is not None:
            timer.cancel()
        connection.close()
    if late.is_set():
        raise PlatformUnavailable(
            f"{parts.netloc} does not end its answer within {REQUEST_SECONDS:g} s"
        )
    if len(answer) > max_bytes:
        raise PlatformUnavailable(
            f"{parts.netloc} answers with more than {max_bytes} bytes"
        )
    return ShortAnswer(status=response.status, body=answer)
