"""The wire under arbitrary messages and arbitrary bytes."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from support.wire_messages import messages

from federation.errors import WireError
from federation.wire import frame as wire

pytestmark = pytest.mark.slow


def plain(value: object):
    """Reduce a message to values that compare bit by bit, NaN included."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.tobytes()
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return type(value), [plain(getattr(value, f.name)) for f in fields]
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return value.hex() if isinstance(value, float) else value


def refused(data: Any):
    """Assert that the bytes are refused, and with no other error than ours."""
    with pytest.raises(WireError):
        wire.decode(data)


@given(messages)
def test_round_trip(message: wire.WireMessage):
    """Every message arrives exactly as it was sent."""
    assert plain(message) == plain(wire.decode(wire.encode_bytes(message)))


@given(messages)
def test_encoding_is_canonical(message: wire.WireMessage):
    """Encoding what was decoded gives the same bytes."""
    data = wire.encode_bytes(message)
    assert data == wire.encode_bytes(wire.decode(data))


@given(messages, st.data())
def test_mutation_is_refused(message: wire.WireMessage, data: st.DataObject):
    """Any other byte anywhere is noticed."""
    frame = bytearray(wire.encode_bytes(message))
    position = data.draw(st.integers(0, len(frame) - 1))
    frame[position] ^= data.draw(st.integers(1, 255))
    refused(frame)


@given(messages, st.data())
def test_splice_is_refused(message: wire.WireMessage, data: st.DataObject):
    """Bytes put in or taken out in the middle are noticed."""
    frame = wire.encode_bytes(message)
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(frame))] * 2)))
    spliced = frame[:start] + data.draw(st.binary(max_size=9)) + frame[stop:]
    if spliced != frame:
        refused(spliced)


@given(st.binary(max_size=300))
def test_noise_is_refused(data: bytes):
    """Bytes that nobody encoded are refused."""
    refused(data)


@given(st.binary(max_size=300))
def test_noise_after_a_true_start_is_refused(data: bytes):
    """So are they behind our magic and version."""
    refused(wire.MAGIC + wire.VERSION.to_bytes(4, "little") + data)
