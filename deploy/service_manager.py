"""Reports to the service manager: that a process serves, and that it is alive.

Of those that start us, only systemd listens (``Type=notify``); others get nothing.
Protocol: https://www.freedesktop.org/software/systemd/man/sd_notify.html
"""

import contextlib
import os
import socket
from collections.abc import Callable

Notify = Callable[[str], None]
"""Sends a state such as ``READY=1``; never fails and never blocks."""

READY, ALIVE = "READY=1", "WATCHDOG=1"
_VARIABLE = "NOTIFY_SOCKET"


def notify_from_environment() -> Notify:
    """Take over the manager's socket; processes that this one starts do not inherit it.

    Returns:
        What sends to it, or does nothing if no manager listens.
    """
    address = os.environ.pop(_VARIABLE, "")
    if not address.startswith(("/", "@")):
        return lambda _state: None
    # In the abstract namespace, a name starts with a zero byte instead of the sign.
    name = f"\0{address[1:]}" if address.startswith("@") else address

    def notify(state: str) -> None:
        kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        # The manager restarts at times, and the next state may arrive again.
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, kind) as line:
            line.sendto(state.encode(), name)

    return notify


def status(text: str) -> str:
    """Return the state that ``systemctl status`` shows, in one line."""
    return f"STATUS={' '.join(text.split())}"
