"""Ports of the aggregator's host: free ones, and ones in use."""

import random
import socket
from pathlib import Path

from federation.errors import FederationError
from federation.protocols import Clock

LOOPBACK = "127.0.0.1"
# What a killed service has left ends by itself, within this time.
PATIENCE_SECONDS = 20.0
_LOOK_SECONDS = 0.2
# From here to where the system's own choice begins.
_LOWEST_PORT = 10_000
_SYSTEM_CHOOSES = Path("/proc/sys/net/ipv4/ip_local_port_range")
_NUM_TRIES = 100


class PortTaken(FederationError):
    """A server cannot listen on its port."""


def free_port(host: str = LOOPBACK) -> int:
    """A port of an address of this host that is free now.

    It is below those that the system gives to outgoing connections, one of which could
    hold it when a server wants to listen there, perhaps after a restart.
    """
    for _ in range(_NUM_TRIES):
        port = random.randrange(_LOWEST_PORT, _first_of_the_system())  # noqa: S311 -- no secret
        if _complaint(host, port) is None:
            return port
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _first_of_the_system() -> int:
    """The lowest port that the system may give to an outgoing connection."""
    try:
        first = int(_SYSTEM_CHOOSES.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first = 32_768
    return max(first, _LOWEST_PORT + 1)


def await_free(
    host: str,
    port: int,
    *,
    advice: str,
    clock: Clock,
    patience_seconds: float = PATIENCE_SECONDS,
) -> None:
    """Wait until a server can listen somewhere.

    Args:
        host: Name or address of this machine.
        port: TCP port on that host.
        advice: What to do if it cannot, for the message.
        clock: Tells time.
        patience_seconds: How long to wait for another process to end.

    Raises:
        PortTaken: It cannot: another process listens, or the host is not this machine.
    """
    end = clock.monotonic() + patience_seconds
    while (error := _complaint(host, port)) is not None:
        if isinstance(error, socket.gaierror) or clock.monotonic() >= end:
            raise PortTaken(
                f"cannot listen on {host}:{port}: {error.strerror}; {advice}"
            ) from error
        clock.sleep(_LOOK_SECONDS)


def _complaint(host: str, port: int) -> OSError | None:
    """Why a server cannot listen; None if it can."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            # As servers do: connections that have ended do not count.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except OSError as error:
        return error
    return None
