"""Requests that leave this machine, and the proxy that its environment names.

Every client of the aggregator, of a store and of a cloud follows ``https_proxy`` and
``no_proxy``; what stays on this machine never goes through a proxy.
"""

import base64
import http.client
import ssl
from collections.abc import MutableMapping
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import getproxies, getproxies_environment, proxy_bypass

LOOPBACK = ("localhost", "127.0.0.1", "::1")
_VARIABLES = ("no_proxy", "NO_PROXY")  # In the order in which libraries read them.
_DEFAULT_PORT = 80


def keep_loopback_direct(environment: MutableMapping[str, str]) -> None:
    """Add this machine to ``no_proxy`` if a proxy is set, for all libraries.

    httpx, requests, botocore, urllib and gRPC read these variables, here and in the
    processes that inherit them. Without them, a corporate proxy is asked to connect to
    its own loopback.

    Args:
        environment: That of the process, ``os.environ``.
    """
    # On macOS a variable hides the system's settings, which except the loopback.
    if not getproxies_environment().keys() - {"no"}:
        return
    found = next(filter(None, map(environment.get, _VARIABLES)), "")
    names = [name for name in map(str.strip, found.split(",")) if name]
    if "*" in names:
        return
    names += [name for name in LOOPBACK if name not in names]
    environment.update(dict.fromkeys(_VARIABLES, ",".join(names)))


def https_line(
    host: str, port: int, *, context: ssl.SSLContext, seconds: float
) -> http.client.HTTPSConnection:
    """Prepare a connection, through a proxy where the environment asks for one.

    Args:
        host: Name or address of the server, which ``context`` checks.
        port: Of the server.
        context: TLS to the server; a proxy sees nothing but its name.
        seconds: Limit of each operation.
    """
    proxy = _proxy_of(host)
    if proxy is None:
        return http.client.HTTPSConnection(host, port, timeout=seconds, context=context)
    line = http.client.HTTPSConnection(
        proxy.hostname or "",
        proxy.port or _DEFAULT_PORT,
        timeout=seconds,
        context=context,
    )
    headers = {}
    if proxy.username is not None:
        name, word = unquote(proxy.username), unquote(proxy.password or "")
        secret = base64.b64encode(f"{name}:{word}".encode()).decode("ascii")
        headers["Proxy-Authorization"] = f"Basic {secret}"
    line.set_tunnel(host, port, headers)
    return line


def proxy_note(host: str) -> str:
    """Name the proxy that requests to a host go through; empty if there is none.

    Its user name and password are left out.
    """
    proxy = _proxy_of(host)
    if proxy is None:
        return ""
    return (
        f" (through the proxy {proxy.hostname}:{proxy.port or _DEFAULT_PORT} of "
        f"https_proxy; to connect directly, add {host} to no_proxy)"
    )


def _proxy_of(host: str) -> SplitResult | None:
    found = getproxies()
    url = found.get("https") or found.get("all")
    if not url or host in LOOPBACK or proxy_bypass(host):
        return None
    return urlsplit(url if "://" in url else f"http://{url}")
