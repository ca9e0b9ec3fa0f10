"""What the wire promises about well-formed and about hostile bytes."""

import hashlib
import json
import math
import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from federation.errors import WireError
from federation.ids import SiteId
from federation.messages import (
    FailureKind,
    LedgerAnchor,
    MaskedUpdate,
    MetricSums,
    Phase,
    PrivacySpent,
    Resources,
    RoundTask,
    SecureAnswer,
    SecureStep,
    SecureTask,
    SiteEvaluation,
    SiteFailure,
    SiteUpdate,
    TaskKind,
)
from federation.wire import frame as wire, wire_fields

ABOUT = {"run_id": "run-1", "round_index": 2, "site": "site-a"}
SUMS = MetricSums(count=10, loss_sum=2.5, metrics={"correct": 7})
TASK = RoundTask(
    **ABOUT,
    kind=TaskKind.TRAIN,
    layout_digest="ab" * 32,
    weights_d=np.arange(5, dtype=np.float32),
    integers_m=np.array([3, -4], dtype=np.int64),
    evaluate=True,
    evaluate_after=False,
)
UPDATE = SiteUpdate(
    **ABOUT,
    layout_digest="ab" * 32,
    delta_d=np.array([1, np.nan, np.inf], dtype=np.float32),
    integers_m=np.array([9], dtype=np.int64),
    num_examples=100,
    num_steps=4,
    training=SUMS,
    evaluation=None,
    evaluation_after=SUMS,
    phases=(Phase(name="train", start_seconds=0.0, seconds=1.5),),
    resources=Resources(
        busy_seconds=1.5, cpu_seconds=3.0, peak_memory_bytes=None, method="thread"
    ),
)
USED: dict[str, Any] = {
    "busy_seconds": (1.5).hex(),
    "cpu_seconds": (3.0).hex(),
    "peak_memory_bytes": None,
    "method": "thread",
}
TAKEN: dict[str, Any] = {
    "joules": [(1.5).hex(), (2.5).hex()],
    "grams": None,
    "method": "RAPL",
}
EVALUATION = SiteEvaluation(**ABOUT, evaluation=SUMS, phases=())
FAILURE = SiteFailure(**ABOUT, kind=FailureKind.BUSY, message="still on round 1")
SECURE_ROUND = replace(TASK, secure=b"\0round\xff")
SECURE_TASK = SecureTask(**ABOUT, step=SecureStep.SURVIVORS, body=b"\0who")
SECURE_ANSWER = SecureAnswer(**ABOUT, step=SecureStep.SURVIVORS, body=b"assent\xff")
MASKED = MaskedUpdate(
    **ABOUT,
    layout_digest="ab" * 32,
    words=np.arange(9, dtype=np.uint8),
    header_h=np.array([0, 2**63, 2**64 - 1], dtype=np.uint64),
    body=b"signed",
)
PRIVATE = replace(
    MASKED, spent=PrivacySpent(epsilon=1.5, delta=1e-5, held_out_epsilon=0.0)
)
SPENT = {
    "epsilon": (1.5).hex(),
    "delta": (1e-5).hex(),
    "held_out_epsilon": (0.0).hex(),
    "anchor": {"train": 0, "evaluate": 0},
}
SMALL = [EVALUATION, FAILURE, SECURE_TASK, SECURE_ANSWER]
MESSAGES = [TASK, SECURE_ROUND, UPDATE, MASKED, PRIVATE, *SMALL]


def frame(
    header: Any,
    payload: bytes = b"",
    *,
    kind: int = 1,
    version: int = 2,
    magic: bytes = b"crossfed",
    pad: bytes = b" ",
):
    """Build a frame whose lengths and digest are right, whatever is in it."""
    if not isinstance(header, bytes):
        header = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    header += pad * (-(60 + len(header)) % 64)
    body = struct.pack("<IIQ", kind, len(header), len(payload)) + header + payload
    digest = hashlib.sha256(body).digest()
    return magic + struct.pack("<I", version) + digest + body


def parts(message: wire.WireMessage):
    """Take a message's frame apart: header fields, payload, kind."""
    data = wire.encode_bytes(message)
    kind, header_bytes, _ = struct.unpack_from("<IIQ", data, 44)
    return json.loads(data[60 : 60 + header_bytes]), data[60 + header_bytes :], kind


def changed(message: wire.WireMessage, fields: dict[str, Any]):
    """Frame a message whose header has other fields than it should."""
    header, payload, kind = parts(message)
    return frame({**header, **fields}, payload, kind=kind)


def refused(data: Any, match: str | None = None):
    """Assert that the bytes are refused for this reason."""
    with pytest.raises(WireError, match=match):
        wire.decode(data)


def test_cells_that_noise_made_negative_survive_the_journey():
    """Of a histogram of held-out records."""
    sums = replace(SUMS, metrics={"auc_pos_0": -3, "calibration_0": -0.5})
    sent = wire.encode_bytes(replace(UPDATE, evaluation=sums))
    assert wire.decode(sent).evaluation == sums


def test_sizes_of_many_messages():
    """Also where one header serves several, and where padding hides a longer name."""
    many = [
        *(replace(TASK, site=SiteId("s" * n)) for n in range(1, 65)),
        *MESSAGES,
        replace(TASK, anchor=LedgerAnchor(train=10**9, evaluate=0)),
        *(replace(TASK, site=SiteId("s" * n), secure=b"1234") for n in range(1, 65)),
    ]
    assert wire.encoded_sizes(many) == [len(wire.encode_bytes(m)) for m in many]
    assert wire.encoded_sizes([]) == []


def test_encode_does_not_copy_masked_words():
    """Nor the header that is masked with them."""
    _, header, words, body = wire.encode(MASKED)
    assert np.shares_memory(np.frombuffer(words, np.uint8), MASKED.words)
    assert np.shares_memory(np.frombuffer(header, np.uint64), MASKED.header_h)
    assert bytes(body) == MASKED.body


def test_strided_vector_is_encoded_by_value():
    """A view with gaps is written without its gaps."""
    values = np.arange(10, dtype=np.float32)[::2]
    task = wire.decode(wire.encode_bytes(replace(TASK, weights_d=values)))
    np.testing.assert_array_equal(values, task.weights_d)


@pytest.mark.parametrize("lead", [0, 1, 4])
def test_decoded_vectors_are_aligned_and_read_only(lead: int):
    """Also from the middle of a writable buffer that starts at an odd address."""
    data = memoryview(bytearray(b"x" * lead + wire.encode_bytes(TASK)))[lead:]
    task = wire.decode(data)
    for vector in (task.weights_d, task.integers_m):
        assert vector.flags.aligned
        assert not vector.flags.writeable
    np.testing.assert_array_equal(TASK.integers_m, task.integers_m)


@pytest.mark.parametrize(
    "vector",
    [np.zeros(2), np.zeros((2, 2), np.float32), np.zeros(2, np.int32)],
)
def test_encoder_refuses_other_vectors(vector: np.ndarray):
    """Only one-dimensional float32 is a model."""
    with pytest.raises(WireError, match="not one-dimensional float32"):
        wire.encode(replace(TASK, weights_d=vector))


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"words": np.zeros(3, np.int8)}, "int8.*not one-dimensional uint8"),
        ({"words": np.zeros((2, 2), np.uint8)}, "not one-dimensional uint8"),
        ({"header_h": np.zeros(3, np.int64)}, "int64.*not one-dimensional uint64"),
        ({"header_h": np.zeros(2049, np.uint64)}, "num_integers is 2049.*0 to 2048"),
        ({"body": bytearray(3)}, "of type bytearray"),
        ({"body": bytes(2**24 + 1)}, "body_bytes is 16777217"),
    ],
)
def test_encoder_refuses_other_masked_updates(fields: dict[str, Any], match: str):
    """Each part is of its type and not too large, in all ways of encoding."""
    for write in (wire.encode, wire.encode_bytes, wire.encoded_size):
        with pytest.raises(WireError, match=match):
            write(replace(MASKED, **fields))


@pytest.mark.parametrize(
    "fields",
    [{"round_index": -1}, {"round_index": True}, {"site": "A"}, {"site": 3}],
)
def test_encoder_refuses_what_the_decoder_would(fields: dict[str, Any]):
    """A mistake shows at its sender, in all three ways of encoding."""
    message = replace(FAILURE, **fields)
    for write in (wire.encode, wire.encode_bytes, wire.encoded_size):
        with pytest.raises(WireError):
            write(message)


def _phases(**fields: Any) -> dict[str, Any]:
    phase = {"name": "train", "start_seconds": 0.0, "seconds": 1.0} | fields
    return {"phases": (Phase(**phase),)}


def _spent(**fields: Any) -> dict[str, Any]:
    spent = {"epsilon": 1.0, "delta": 1e-5, "held_out_epsilon": None} | fields
    return {"spent": PrivacySpent(**spent)}


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"layout_digest": "AB" * 32}, "layout_digest"),
        ({"num_steps": 2**53}, "num_steps"),
        ({"training": replace(SUMS, count=-1)}, "count is -1"),
        ({"evaluation": replace(SUMS, metrics={"auc": -(2**53)})}, "auc is -"),
        ({"phases": (Phase(name="a", start_seconds=0, seconds=0),) * 65}, "at most 64"),
        (_phases(name="two\nlines"), "name"),
        (_phases(name="x" * 65), "name"),
        (_phases(start_seconds=-1.0), "start_seconds is -1.0"),
        (_phases(seconds=math.nan), "seconds is nan"),
        (_spent(epsilon=math.inf), "epsilon is inf"),
        (_spent(held_out_epsilon=-1.0), "held_out_epsilon is -1.0"),
        (_spent(delta=0.0), "delta is 0.0"),
        (_spent(anchor=LedgerAnchor(train=-1)), "train is -1"),
        (_spent(anchor=LedgerAnchor(evaluate=2**53)), "evaluate is"),
    ],
)
def test_encoder_checks_each_value_of_an_update(fields: dict[str, Any], match: str):
    """What no decoder would take is refused where it is written."""
    for write in (wire.encode, wire.encode_bytes, wire.encoded_size):
        with pytest.raises(WireError, match=match):
            write(replace(UPDATE, **fields))


@pytest.mark.parametrize(
    ("message", "match"),
    [
        (replace(TASK, kind="teach"), "kind is 'teach'"),
        (replace(TASK, evaluate=1), "evaluate is 1"),
        (replace(SECURE_TASK, step="sum"), "step is 'sum'"),
    ],
)
def test_encoder_checks_each_word(message: wire.WireMessage, match: str):
    """Words and flags are those of the format."""
    for write in (wire.encode, wire.encode_bytes, wire.encoded_size):
        with pytest.raises(WireError, match=match):
            write(message)


def test_failure_text_is_made_to_fit():
    """Whatever a library says in an error, the failure is delivered."""
    text = "lost\nconnection \x1b[31m\ud800 " + "x" * 2000
    message = wire.decode(wire.encode_bytes(replace(FAILURE, message=text))).message
    assert wire.one_line(text) == message
    assert message.startswith("lost connection  [31m  xxx")
    assert len(message) == wire.MAX_TEXT_CHARS


def test_largest_header_fits():
    """No message within the limits of its fields is over the header's limit."""
    phase = Phase(
        name="\U0001f4be" * wire.MAX_PHASE_NAME_CHARS,
        start_seconds=math.ulp(0.0),
        seconds=1.7976931348623157e308,
    )
    message = replace(
        UPDATE, site="s" * 64, run_id="r" * 64, phases=(phase,) * wire.MAX_PHASES
    )
    assert message.phases == wire.decode(wire.encode_bytes(message)).phases


@pytest.mark.parametrize("message", MESSAGES)
def test_every_truncation_is_refused(message: wire.WireMessage):
    """A frame that ends early is refused wherever it ends."""
    data = wire.encode_bytes(message)
    for end in range(len(data)):
        refused(data[:end], "too few|declares")


def test_every_flipped_bit_is_refused():
    """No single bit of a frame may change unnoticed."""
    data = bytearray(wire.encode_bytes(FAILURE))
    for position in range(len(data) * 8):
        data[position // 8] ^= 1 << position % 8
        refused(data)
        data[position // 8] ^= 1 << position % 8


def test_trailing_bytes_are_refused():
    """Two messages are not one."""
    refused(wire.encode_bytes(FAILURE) + b"\0", "declares")


def test_other_version_is_named_before_anything_is_read():
    """An operator with two releases is told which side to upgrade."""
    refused(
        frame({}, version=1), "format version 1, but this side reads 2: .*the sender"
    )
    refused(
        frame({}, version=3), "format version 3, but this side reads 2: .*this side"
    )


def test_other_magic_is_refused():
    """Something else's bytes are recognised as such."""
    refused(frame({}, magic=b"PK\3\4....."[:8]), "do not start like")


def test_huge_declared_header_is_refused():
    """A declared length allocates nothing."""
    data = bytearray(wire.encode_bytes(FAILURE))
    struct.pack_into("<I", data, 48, 2**32 - 1)
    refused(data, "the 65536 allowed")


def test_huge_declared_payload_is_refused():
    """A payload of 16 EiB is not there, so nothing is read."""
    data = bytearray(wire.encode_bytes(FAILURE))
    struct.pack_into("<Q", data, 52, 2**64 - 1)
    refused(data, "declares")


@pytest.mark.parametrize("name", ["num_floats", "num_integers"])
@pytest.mark.parametrize("value", [-1, 0, 6, 2**24 + 1, 2**33 + 1, 2**63])
def test_wrong_number_of_values_is_refused(name: str, value: int):
    """The header cannot say more, or less, than the payload holds."""
    refused(changed(TASK, {name: value}), f"{name} is|payload has")


@pytest.mark.parametrize("name", ["num_integers", "words_bytes", "body_bytes"])
@pytest.mark.parametrize("value", [-1, 0, 65, 2**24 + 1, 2**35 + 1, 2**63, "3", None])
def test_wrong_size_of_a_masked_update_is_refused(name: str, value: object):
    """None of its three parts can be longer, or shorter, than what is there."""
    refused(changed(MASKED, {name: value}), f"{name} is|payload has")


@pytest.mark.parametrize("message", [SECURE_ROUND, SECURE_TASK, SECURE_ANSWER])
@pytest.mark.parametrize("value", [0, 1, 100, 2**24 + 1])
def test_wrong_size_of_a_body_is_refused(message: wire.WireMessage, value: int):
    """Whatever else is in the payload."""
    refused(changed(message, {"body_bytes": value}), "body_bytes is|payload has")


def test_maximum_of_words_is_checked_before_the_payload():
    """A length that no model has is named as such."""
    too_long, longest = 2**35 + 1, 2**35
    refused(changed(MASKED, {"words_bytes": too_long}), f"{too_long}, not a count")
    refused(changed(MASKED, {"words_bytes": longest}), "but the header says")


@pytest.mark.parametrize("message", [EVALUATION, FAILURE])
def test_payload_where_none_belongs_is_refused(message: wire.WireMessage):
    """Small messages have no vectors."""
    header, _, kind = parts(message)
    refused(frame(header, b"\0" * 8, kind=kind), "payload has 8 bytes")


def test_unknown_kind_is_refused():
    """There are seven kinds of messages."""
    for kind in (0, len(wire_fields.Kind) + 1):
        refused(frame(parts(FAILURE)[0], kind=kind), f"no message kind {kind}")


def test_message_under_another_kind_is_refused():
    """Its fields are not those of the other."""
    for message in MESSAGES:
        header, payload, own = parts(message)
        for kind in set(wire_fields.Kind) - {own}:
            if {own, kind} == {5, 6}:
                continue
            refused(frame(header, payload, kind=kind))


def test_question_is_not_its_answer():
    """A secure task and its answer differ in their kind alone."""
    header, payload, kind = parts(SECURE_TASK)
    answer = wire.decode(frame(header, payload, kind=kind + 1))
    assert isinstance(answer, SecureAnswer)
    assert answer.body == SECURE_TASK.body


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\xff\xfe",
        b"[1]",
        b"null",
        b"{",
        b'{"a":1,"a":1}',
        b'{"a": 1}',
        b'{"a":NaN}',
        b'{"a":Infinity}',
        b'{"a":1e999}',
        b'{"a":"\\u0041"}',
        b'{"b":1,"a":1}',
        b'{"a":' + b"9" * 5000 + b"}",
        b"[" * 60_000,
        b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
        '{"a":1}'.encode("utf-16"),
    ],
)
def test_header_that_is_not_canonical_json_is_refused(header: Any):
    """There is one spelling of a message, and no JSON bomb goes off."""
    refused(frame(header, kind=4), "header is not")


@pytest.mark.parametrize("pad", [b"\n", b"\t", b"\0"])
def test_other_padding_is_refused(pad: bytes):
    """Padding carries nothing."""
    refused(frame(parts(FAILURE)[0], kind=4, pad=pad), "header is not")


def test_longer_padding_is_refused():
    """Padding is as short as it can be."""
    header = json.dumps(parts(FAILURE)[0], sort_keys=True, separators=(",", ":"))
    refused(frame(header.encode() + b" " * 64, kind=4), "canonical")


@pytest.mark.parametrize("message", MESSAGES)
def test_missing_and_unknown_fields_are_refused(message: wire.WireMessage):
    """The set of fields is exact."""
    header, payload, kind = parts(message)
    refused(frame({**header, "more": 1}, payload, kind=kind), "with exactly")
    for name in header:
        fewer = {k: v for k, v in header.items() if k != name}
        refused(frame(fewer, payload, kind=kind), "with exactly")


@pytest.mark.parametrize(
    ("message", "fields", "match"),
    [
        (FAILURE, {"round_index": True}, "round_index"),
        (FAILURE, {"round_index": 1.0}, "round_index"),
        (FAILURE, {"round_index": "1"}, "round_index"),
        (FAILURE, {"round_index": 2**53}, "round_index"),
        (FAILURE, {"site": None}, "site"),
        (FAILURE, {"site": "../etc"}, "site"),
        (FAILURE, {"run_id": ""}, "run_id"),
        (FAILURE, {"run_id": "r" * 65}, "run_id"),
        (FAILURE, {"kind": "sleepy"}, "kind"),
        (FAILURE, {"kind": 1}, "kind"),
        (FAILURE, {"kind": []}, "kind"),
        (FAILURE, {"message": "two\nlines"}, "message"),
        (FAILURE, {"message": "\ud800"}, "message"),
        (FAILURE, {"message": "x" * 1001}, "message"),
        (FAILURE, {"message": 0}, "message"),
        (TASK, {"kind": "busy"}, "kind"),
        (TASK, {"evaluate": 1}, "evaluate"),
        (TASK, {"evaluate_after": None}, "evaluate_after"),
        (TASK, {"layout_digest": "AB" * 32}, "layout_digest"),
        (TASK, {"layout_digest": "ab"}, "layout_digest"),
        (TASK, {"layout_digest": 5}, "layout_digest"),
        (TASK, {"body_bytes": True}, "body_bytes"),
        (SECURE_TASK, {"step": "sleep"}, "step"),
        (SECURE_TASK, {"step": 2}, "step"),
        (SECURE_ANSWER, {"step": None}, "step"),
        (SECURE_ANSWER, {"body_bytes": -1}, "body_bytes"),
        (MASKED, {"layout_digest": "g" * 64}, "layout_digest"),
        (MASKED, {"site": "A"}, "site"),
        (UPDATE, {"num_examples": -1}, "num_examples"),
        (UPDATE, {"num_steps": False}, "num_steps"),
        (UPDATE, {"training": []}, "exactly"),
        (UPDATE, {"spent": []}, "exactly"),
        (MASKED, {"spent": {"epsilon": "0x1p+0"}}, "exactly"),
        (PRIVATE, {"spent": {**SPENT, "epsilon": "inf"}}, "epsilon"),
        (PRIVATE, {"spent": {**SPENT, "epsilon": "-0x1.0000000000000p+0"}}, "epsilon"),
        (PRIVATE, {"spent": {**SPENT, "epsilon": 1.0}}, "epsilon"),
        (PRIVATE, {"spent": {**SPENT, "delta": "0x0.0p+0"}}, "delta"),
        (PRIVATE, {"spent": {**SPENT, "delta": (1.0).hex()}}, "delta"),
        (PRIVATE, {"spent": {**SPENT, "held_out_epsilon": "nan"}}, "held_out"),
        (UPDATE, {"evaluation": []}, "exactly"),
        (UPDATE, {"evaluation": {}}, "exactly"),
        (UPDATE, {"phases": {}}, "phases"),
        (UPDATE, {"phases": [[]]}, "exactly"),
        (UPDATE, {"resources": {}}, "exactly"),
        (UPDATE, {"resources": {**USED, "busy_seconds": "inf"}}, "finite time"),
        (UPDATE, {"resources": {**USED, "cpu_seconds": (-1.0).hex()}}, "finite time"),
        (UPDATE, {"resources": {**USED, "peak_memory_bytes": -1}}, "peak memory"),
        (UPDATE, {"resources": {**USED, "method": "x" * 65}}, "at most 64"),
        (UPDATE, {"resources": {**USED, "energy": None}}, "exactly"),
        (UPDATE, {"resources": {**USED, "energy": []}}, "exactly"),
        *(
            (UPDATE, {"resources": {**USED, "energy": {**TAKEN, **lie}}}, text)
            for lie, text in (
                ({"watts": 1}, "exactly"),
                ({"method": None}, "one line"),
                ({"joules": [(1.5).hex()]}, "two ends"),
                ({"joules": "0x1.8p+0"}, "two ends"),
                ({"joules": [(2.5).hex(), (1.5).hex()]}, "two finite ends"),
                ({"joules": [(-1.0).hex(), (1.5).hex()]}, "two finite ends"),
                ({"grams": [(0.0).hex(), "inf"]}, "two finite ends"),
                ({"grams": [(0.0).hex(), "nan"]}, "two finite ends"),
                ({"method": "RAPL\x1b"}, "one line"),
            )
        ),
        (EVALUATION, {"evaluation": None}, "exactly"),
    ],
)
def test_field_of_wrong_type_or_range_is_refused(
    message: wire.WireMessage, fields: dict[str, Any], match: str
):
    """Each field is of its type and in its range; a bool is no count."""
    refused(changed(message, fields), match)


@pytest.mark.parametrize(
    "text",
    [1.5, None, [], "", "x", "1.5", "0x1.8", "0x1p+0", "INF", "-nan", "0x1p99999"],
)
def test_float_in_other_spelling_is_refused(text: object):
    """A fraction is written as float.hex writes it."""
    sums = {"count": 1, "loss_sum": text, "correct": 0}
    refused(changed(EVALUATION, {"evaluation": sums}), "loss_sum|header")


@pytest.mark.parametrize("seconds", [-1.0, math.inf, math.nan])
def test_impossible_duration_is_refused(seconds: float):
    """A site cannot spoil the timeline of a run."""
    phase = {"name": "x", "start_seconds": (0.0).hex(), "seconds": seconds.hex()}
    refused(changed(EVALUATION, {"phases": [phase]}), "finite time")


def test_too_many_phases_are_refused():
    """The list of phases is bounded."""
    phase = {"name": "", "start_seconds": (0.0).hex(), "seconds": (0.0).hex()}
    refused(changed(EVALUATION, {"phases": [phase] * 65}), "at most 64")


def test_long_phase_name_is_refused():
    """The name of a phase is bounded."""
    phase = {"name": "x" * 65, "start_seconds": (0.0).hex(), "seconds": (0.0).hex()}
    refused(changed(EVALUATION, {"phases": [phase]}), "at most 64")


@pytest.mark.parametrize(
    "metrics",
    [
        {"Error": 1},
        {"a b": 1},
        {f"m{i}": 1 for i in range(1297)},
    ],
)
def test_metrics_that_no_job_can_name(metrics: dict[str, int]):
    """The aggregator shows these names to people."""
    sums = replace(SUMS, metrics=metrics)
    with pytest.raises(WireError, match="not at most 1296 names"):
        wire.decode(wire.encode_bytes(replace(EVALUATION, evaluation=sums)))
