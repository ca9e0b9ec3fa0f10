"""Addresses as operators write them: ``HOST:PORT``, IPv6 in brackets."""

import ipaddress
import re

from federation.errors import JobError

_PORT_DIGITS = 5
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")


def parse_address(text: str, *, key: str) -> tuple[str, int]:
    """Split ``HOST:PORT``; the host is without brackets.

    Args:
        text: What was written.
        key: Where, for the message.

    Raises:
        JobError: It is none.
    """
    host, _, port = text.rpartition(":")
    number = parse_port(port)
    if not host or number is None:
        raise JobError(f"{text!r:.200} is not HOST:PORT", key=key)
    return host.strip("[]"), number


def parse_port(text: str) -> int | None:
    """Read the number of a port; None if it is none."""
    # The length first: Python refuses to read a number of thousands of digits.
    if not text.isdecimal() or len(text) > _PORT_DIGITS:
        return None
    return int(text) if 0 < int(text) < 1 << 16 else None


def is_host(text: str) -> bool:
    """Whether a certificate can be issued for it: no port, no URL."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return _NAME.fullmatch(text) is not None
    return True


def bracketed(host: str) -> str:
    """A host as it is written before a port."""
    return f"[{host}]" if ":" in host else host
