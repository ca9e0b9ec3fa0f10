"""One spelling for everything that is hashed or signed."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, strategies as st

from privacy.secagg.agreement import canonical
from privacy.secagg.agreement.canonical import Reader
from privacy.secagg.errors import MalformedMessage

TAG = canonical.lp(b"t")
numbers = st.integers(0, canonical.MAX_U64)


def reader(body: bytes) -> Reader:
    return Reader(TAG + body, b"t")


@given(st.dictionaries(numbers, st.binary(max_size=20), max_size=8))
def test_maps_survive_a_round_trip(entries: dict[int, bytes]):
    """A map comes back whatever order it was built in, and re-encodes the same."""
    data = canonical.byte_map(entries)
    parsed = reader(data).byte_map("m", max_entries=8, limit=20)
    assert entries == parsed
    assert data == canonical.byte_map(parsed)


@given(st.sets(numbers, max_size=8))
def test_numbers_survive_a_round_trip(values: set[int]):
    """An increasing list comes back."""
    listed = tuple(sorted(values))
    assert listed == reader(canonical.numbers(listed)).numbers("n", limit=8)


@given(st.floats(allow_nan=False, allow_infinity=False).map(lambda x: x + 0.0))
def test_floats_survive_a_round_trip(value: float):
    """Every finite number has one encoding."""
    if math.copysign(1, value) > 0 or value:
        assert value == reader(canonical.float64(value)).float64("x")


@given(st.binary(max_size=60))
def test_what_is_read_encodes_to_the_same_bytes(data: bytes):
    """Arbitrary bytes are refused or are the one spelling of what they say."""
    try:
        parsed = reader(data)
        entries = parsed.byte_map("m", max_entries=4, limit=40)
        listed = parsed.numbers("n", limit=4)
        parsed.end()
    except MalformedMessage:
        return
    assert data == canonical.byte_map(entries) + canonical.numbers(listed)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.0])
def test_odd_floats_have_no_encoding(value: float):
    """Neither written nor read."""
    with pytest.raises(ValueError, match="canonical"):
        canonical.float64(value)
    with pytest.raises(MalformedMessage, match="finite"):
        reader(canonical._FLOAT.pack(value)).float64("x")


@pytest.mark.parametrize("values", [[1, 1], [2, 1], [3, 4, 4]])
def test_lists_increase_strictly(values: list[int]):
    """Duplicates and other orders are neither written nor read."""
    with pytest.raises(ValueError, match="increasing"):
        canonical.numbers(values)
    data = canonical.u64(len(values)) + b"".join(map(canonical.u64, values))
    with pytest.raises(MalformedMessage, match="increasing"):
        reader(data).numbers("n", limit=8)


@pytest.mark.parametrize(
    ("body", "read"),
    [
        (b"", lambda r: r.u64("n")),
        (canonical.u64(5), lambda r: r.u64("n", high=4)),
        (canonical.u64(5), lambda r: r.u64("n", low=6)),
        (canonical.u64(2), lambda r: r.flag("f")),
        (canonical.lp(b"abc"), lambda r: r.field("x", size=4)),
        (canonical.lp(b"abc"), lambda r: r.field("x", limit=2)),
        (canonical.lp(b"abc")[:-1], lambda r: r.field("x", limit=9)),
        (canonical.u64(canonical.MAX_U64), lambda r: r.field("x")),
        (canonical.lp(b"\xff"), lambda r: r.text("x", limit=9)),
        (canonical.lp(b"a\nb"), lambda r: r.text("x", limit=9)),
        (canonical.lp(b"A b"), lambda r: r.name("x")),
        (canonical.u64(9), lambda r: r.numbers("x", limit=8)),
        (canonical.u64(1 << 60), lambda r: r.byte_map("x", max_entries=8)),
        (canonical.u64(2) + 2 * (canonical.u64(1) + canonical.lp(b"")), None),
        (b"rest", lambda r: r.end()),
    ],
)
def test_malformed_bytes_are_refused(body: bytes, read: Callable[[Reader], Any] | None):
    """Lengths before content, and a typed error for everything."""
    read = read or (lambda r: r.byte_map("x", max_entries=8, limit=8))
    with pytest.raises(MalformedMessage):
        read(reader(body))


def test_another_tag_is_refused():
    """A message of one kind is not read as another."""
    with pytest.raises(MalformedMessage, match="a different kind"):
        Reader(canonical.lp(b"u"), b"t")


def test_huge_messages_are_refused_unread(monkeypatch: pytest.MonkeyPatch):
    """A limit on the whole message comes first."""
    monkeypatch.setattr(canonical, "MAX_MESSAGE_BYTES", 8)
    with pytest.raises(MalformedMessage, match="the 8 allowed"):
        reader(b"")


@pytest.mark.parametrize("value", [-1, 1 << 64])
def test_numbers_fit_in_64_bits(value: int):
    """A caller's bad number is its own error."""
    with pytest.raises(ValueError, match="64 bits"):
        canonical.u64(value)
