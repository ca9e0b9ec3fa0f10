"""The wire under arbitrary messages and arbitrary bytes."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from federation import wire
from federation.errors import WireError
from federation.messages import (
    FailureKind,
    MaskedUpdate,
    MetricSums,
    Phase,
    PrivacySpent,
    RoundTask,
    SecureAnswer,
    SecureStep,
    SecureTask,
    SiteEvaluation,
    SiteFailure,
    SiteUpdate,
    TaskKind,
)

pytestmark = pytest.mark.slow

counts = st.integers(0, wire.MAX_COUNT)
names = st.from_regex(r"[a-z0-9]([a-z0-9_-]{0,62}[a-z0-9])?", fullmatch=True)
digests = st.text("0123456789abcdef", min_size=64, max_size=64)
seconds = st.floats(0, allow_infinity=False)
lines = st.text(max_size=64).map(wire.one_line)
float_vectors = st.binary(max_size=400).map(
    lambda data: np.frombuffer(data[: len(data) // 4 * 4], dtype=np.float32)
)
integer_vectors = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20).map(
    lambda values: np.array(values, dtype=np.int64)
)
byte_vectors = st.binary(max_size=400).map(
    lambda data: np.frombuffer(data, dtype=np.uint8)
)
header_vectors = st.lists(
    st.integers(0, 2**64 - 1), max_size=wire.MAX_MASKED_HEADER_WORDS
).map(lambda values: np.array(values, dtype=np.uint64))
bodies = st.binary(max_size=200)
sums = st.builds(MetricSums, count=counts, loss_sum=st.floats(), correct=counts)
phases = st.lists(
    st.builds(Phase, name=lines, start_seconds=seconds, seconds=seconds), max_size=5
).map(tuple)
epsilons = st.floats(min_value=0, allow_infinity=False)
spents = st.none() | st.builds(
    PrivacySpent,
    epsilon=epsilons,
    delta=st.floats(0, 1, exclude_min=True, exclude_max=True),
    held_out_epsilon=st.none() | epsilons,
)
about = {"run_id": names, "round_index": counts, "site": names}
tasks = st.builds(
    RoundTask,
    **about,
    kind=st.sampled_from(TaskKind),
    layout_digest=digests,
    weights_d=float_vectors,
    integers_m=integer_vectors,
    evaluate=st.booleans(),
    evaluate_after=st.booleans(),
    secure=bodies,
)
updates = st.builds(
    SiteUpdate,
    **about,
    layout_digest=digests,
    delta_d=float_vectors,
    integers_m=integer_vectors,
    num_examples=counts,
    num_steps=counts,
    training=st.none() | sums,
    evaluation=st.none() | sums,
    evaluation_after=st.none() | sums,
    phases=phases,
    spent=spents,
)
evaluations = st.builds(
    SiteEvaluation, **about, evaluation=sums, phases=phases, spent=spents
)
failures = st.builds(
    SiteFailure, **about, kind=st.sampled_from(FailureKind), message=lines
)
step = {"step": st.sampled_from(SecureStep), "body": bodies}
secure_tasks = st.builds(SecureTask, **about, **step)
secure_answers = st.builds(SecureAnswer, **about, **step)
masked_updates = st.builds(
    MaskedUpdate,
    **about,
    layout_digest=digests,
    words=byte_vectors,
    header_h=header_vectors,
    body=bodies,
    spent=spents,
)
messages = st.one_of(
    *(tasks, updates, evaluations, failures),
    *(secure_tasks, secure_answers, masked_updates),
)


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


@given(messages)
def test_size_is_exact(message: wire.WireMessage):
    """The size is known without encoding."""
    assert len(wire.encode_bytes(message)) == wire.encoded_size(message)


@given(messages, st.data())
def test_truncation_is_refused(message: wire.WireMessage, data: st.DataObject):
    """A frame that ends early is refused."""
    frame = wire.encode_bytes(message)
    refused(frame[: data.draw(st.integers(0, len(frame) - 1))])


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
