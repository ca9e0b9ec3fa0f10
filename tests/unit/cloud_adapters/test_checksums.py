"""Checksums of contents in pieces."""

import hashlib
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given, strategies as st

from cloud_adapters.storage.checksums import (
    Checksums,
    Crc32c,
    checksums_of,
    crc32c,
    summed,
)


def plain_crc32c(content: bytes) -> str:
    """Bit by bit: the reversed Castagnoli polynomial of RFC 3720, section 12.1."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return f"{crc ^ 0xFFFFFFFF:08x}"


@given(st.lists(st.binary(max_size=40), max_size=5))
def test_pieces_make_the_whole(pieces: list[bytes]):
    """However a content is cut, in whatever buffers, and whichever way it is summed."""
    both, one_by_one, one, joined = Checksums(), Checksums(), Crc32c(), Crc32c()
    kinds = (bytes, bytearray, memoryview, lambda b: memoryview(bytearray(b)))
    for number, piece in enumerate(pieces):
        both.update(kinds[number % 4](piece))
        one_by_one.update_crc32c(kinds[number % 4](piece))
        one_by_one.update_sha256(kinds[number % 4](piece))
        one.update(kinds[number % 4](piece))
        joined.join(plain_crc32c(piece), len(piece))
    content = b"".join(pieces)
    expected = plain_crc32c(content)
    found = {sums.crc32c for sums in (both, one_by_one, one, joined)}
    assert found == {expected} == {crc32c(content)}
    assert both.sha256 == one_by_one.sha256 == hashlib.sha256(content).hexdigest()
    assert {both.size, one_by_one.size, one.size, joined.size} == {len(content)}


def test_only_what_can_be_read_again_is_summed_before():
    """A stream is not used up; what gives a new iterator each time has sums."""
    stream = iter([b"ab", b"c"])
    assert checksums_of(stream) is None
    assert list(stream) == [b"ab", b"c"]
    for data in ([b"ab", b"c"], (b"abc",), {b"abc": 1}.keys()):
        sums = checksums_of(data)
        assert sums is not None
        assert (sums.crc32c, sums.size) == (crc32c(b"abc"), 3)


def test_whoever_stops_summing_leaves_no_thread():
    """Neither by leaving, nor by the failure of the source."""
    large = [bytes(1 << 20)] * 3
    pieces = summed(large, Checksums())
    next(pieces)
    pieces.close()

    def broken() -> Iterator[bytes]:
        yield from large
        raise LookupError

    with pytest.raises(LookupError):
        list(summed(broken(), Checksums()))
    names = [thread.name for thread in threading.enumerate()]
    assert not any(name.startswith("sha256") for name in names)
