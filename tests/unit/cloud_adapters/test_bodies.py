"""Long bodies of HTTP, in pieces; and the time that a request has."""

import io
import socket
from pathlib import Path

import numpy as np
import pytest
from support import toy
from support.resident import resident_bytes

from cloud_adapters.net.bodies import PIECE_BYTES, SMALL_BYTES, cut, take_body
from cloud_adapters.relays.server import TimedSocket
from federation.clock import VirtualClock
from federation.errors import ProtocolError
from federation.messages import SiteUpdate
from federation.wire import frame as wire

LONG = bytes(range(256)) * (SMALL_BYTES // 256 + 1)


@pytest.mark.parametrize("content", [b"", b"short", LONG])
def test_a_body_is_read_whole_and_leaves_no_file(tmp_path: Path, content: bytes):
    scratch = tmp_path / "scratch"
    found = take_body(io.BytesIO(content).read, len(content), scratch)
    assert found is not None
    assert bytes(found) == content
    assert isinstance(found, memoryview) == scratch.exists() == (content is LONG)
    assert not scratch.exists() or [*scratch.iterdir()] == []


@pytest.mark.parametrize("size", [10, len(LONG)])
def test_a_body_that_ends_too_early_is_none(tmp_path: Path, size: int):
    assert take_body(io.BytesIO(LONG[: size - 1]).read, size, tmp_path) is None
    assert take_body(io.BytesIO(b"").read, size, tmp_path) is None


def test_no_more_is_read_than_was_announced(tmp_path: Path):
    line = io.BytesIO(LONG + b"next")
    assert take_body(line.read, len(LONG), tmp_path) == LONG
    assert line.read() == b"next"


def test_a_folder_that_takes_nothing_is_named(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ProtocolError, match=r"1 MiB cannot be written below .*/file"):
        take_body(io.BytesIO(LONG).read, len(LONG), tmp_path / "file")


def test_a_body_that_would_fill_the_disk_is_not_read(tmp_path: Path):
    """Whoever announces it: ledgers need the disk."""
    line = io.BytesIO(LONG)
    with pytest.raises(ProtocolError, match=r"MiB are free, of which 256 stay so"):
        take_body(line.read, 1 << 50, tmp_path)
    assert line.tell() == 0


def test_buffers_are_cut_without_a_copy():
    long = bytearray(PIECE_BYTES + 1)
    first, second, third = cut([long, b"", b"end"])
    assert [len(piece) for piece in (first, second, third)] == [PIECE_BYTES, 1, 3]
    long[0] = 7
    assert first[0] == 7


def timed(clock: VirtualClock, connection: socket.socket) -> TimedSocket:
    return TimedSocket(connection, clock, idle_seconds=60.0, head_seconds=10.0)


def test_the_head_of_a_request_has_a_time_from_its_first_byte_on():
    """However often a byte comes; what waits for a request may wait longer."""
    clock = VirtualClock()
    here, there = socket.socketpair()
    with here, there:
        line = timed(clock, here)
        there.sendall(b"P")
        clock.sleep(30.0)
        assert line.read(1) == b"P"
        for byte in (b"O", b"S"):
            clock.sleep(4.5)
            there.sendall(byte)
            assert line.read(1) == byte
        clock.sleep(1.5)
        there.sendall(b"T")
        with pytest.raises(TimeoutError, match="time of the request"):
            line.read(1)
        line.idle()
        assert line.read(1) == b"T"


def test_a_body_has_its_own_time_for_reading_and_writing():
    clock = VirtualClock()
    here, there = socket.socketpair()
    with here, there:
        line = timed(clock, here)
        line.allow(20.0)
        clock.sleep(19.0)
        line.send(memoryview(b"answer"))
        assert here.gettimeout() == 1.0
        clock.sleep(2.0)
        with pytest.raises(TimeoutError):
            line.send(memoryview(b"more"))
        assert there.recv(100) == b"answer"


def test_a_long_frame_that_maps_a_file_is_read_without_its_memory(tmp_path: Path):
    """Or a relay would hold the updates of all its sites."""
    values_d = np.ones(3 << 19, np.float32)
    sent = wire.encode_bytes(toy.update(delta_d=values_d))
    found = take_body(io.BytesIO(sent).read, len(sent), tmp_path)
    assert isinstance(found, memoryview)
    answer = wire.decode(found)
    assert isinstance(answer, SiteUpdate)
    assert resident_bytes(answer.delta_d) < values_d.nbytes / 3
    again = bytearray()
    for piece in cut(wire.encode(answer)):
        again += piece
    assert again == sent
    assert resident_bytes(answer.delta_d) < values_d.nbytes / 3
    assert answer.delta_d.tobytes() == values_d.tobytes()
    assert resident_bytes(answer.delta_d) > values_d.nbytes / 2
