"""Addresses as operators write them, and what is none."""

import pytest

from federation.addresses import bracketed, parse_address, parse_port
from federation.errors import JobError


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("fed.example.org:8443", ("fed.example.org", 8443)),
        ("10.0.0.1:1", ("10.0.0.1", 1)),
        ("[2001:db8::1]:65535", ("2001:db8::1", 65535)),
    ],
)
def test_addresses(text: str, parts: tuple[str, int]):
    """Names, and both kinds of numbers, there and back."""
    host, port = parts
    assert parse_address(text, key="address") == parts
    assert f"{bracketed(host)}:{port}" == text


@pytest.mark.parametrize("port", ["", "0", "65536", "-1", "1.5", "9" * 5000])
def test_port_that_is_none(port: str):
    """However long it is."""
    assert parse_port(port) is None
    with pytest.raises(JobError, match=r"listen: .* is not HOST:PORT"):
        parse_address(f"host:{port}", key="listen")
