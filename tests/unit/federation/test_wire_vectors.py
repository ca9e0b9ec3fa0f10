"""The bytes on the wire are those that were published as version 2."""

import hashlib
import json
import struct

import numpy as np
import pytest
from vectors.generate import WIRE_MESSAGES, WIRE_V2, wire_vectors

from federation.wire import frame as wire

GOLDEN = json.loads(WIRE_V2.read_text(encoding="ascii"))
KINDS = {
    "task": 1,
    "round of secrets": 1,
    "update": 2,
    "evaluation": 3,
    "failure": 4,
    "secure task": 5,
    "secure answer": 6,
    "masked update": 7,
}


def read(frame: bytes):
    """Read a frame with the standard library alone, as another language would."""
    magic, version = struct.unpack_from("<8sI", frame)
    digest = frame[12:44]
    kind, header_bytes, payload_bytes = struct.unpack_from("<IIQ", frame, 44)
    header = json.loads(frame[60 : 60 + header_bytes])
    payload = frame[60 + header_bytes :]
    assert (magic, version, len(payload)) == (b"crossfed", 2, payload_bytes)
    assert digest == hashlib.sha256(frame[44:]).digest()
    assert (60 + header_bytes) % 64 == 0
    num_integers = header.get("num_integers", 0)
    num_floats = header.get("num_floats", 0)
    num_bytes = [header.get("words_bytes", 0), header.get("body_bytes", 0)]
    layout = f"<{num_integers}q{num_floats}f{num_bytes[0]}s{num_bytes[1]}s"
    values = struct.unpack(layout, payload)
    return kind, header, values


@pytest.mark.parametrize("name", sorted(KINDS))
def test_golden_bytes_are_what_the_encoder_makes(name: str):
    """A message has the same bytes as in the release that froze the format."""
    assert GOLDEN[name] == wire_vectors()[name]


@pytest.mark.parametrize("name", sorted(KINDS))
def test_golden_bytes_decode_to_their_message(name: str):
    """Frames of the release that froze the format are still read."""
    message = wire.decode(bytes.fromhex(GOLDEN[name]))
    assert repr(WIRE_MESSAGES[name]) == repr(message)


@pytest.mark.parametrize("name", sorted(KINDS))
def test_golden_bytes_are_readable_without_crossfed(name: str):
    """A reader that shares no code with the product finds the same fields."""
    kind, header, values = read(bytes.fromhex(GOLDEN[name]))
    message = WIRE_MESSAGES[name]
    assert (KINDS[name], message.site) == (kind, header["site"])
    assert message.round_index == header["round_index"]
    if name == "task":
        assert values == (-1, 2**40, 1.0, -0.5, 3.25, b"", b"")
    if name == "round of secrets":
        assert values == (-2, 2.5, b"", b"\x00secret\xff")
    if name == "update":
        assert header["training"]["loss_sum"] == "nan"
        assert header["evaluation"]["loss_sum"] == (12.1).hex()
        assert np.float32(1e-45) == values[-3]
    if name == "secure task":
        assert (header["step"], values) == ("advertise", (b"", b"\x01\x00contract"))
    if name == "masked update":
        words = b"\x01\x02\x03\xfa\xfb\xfc"
        assert values == (0, -(2**63), -1, words, b"signed")
