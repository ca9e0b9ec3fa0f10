"""Messages to bytes and back: the only format that crosses a cloud's border.

A frame, all numbers little-endian::

    magic            8 bytes   b"crossfed"
    version          u32       1
    digest          32 bytes   SHA-256 of everything below
    kind             u32       1 task, 2 update, 3 evaluation, 4 failure
    header length    u32       bytes of the header, its padding included
    payload length   u64       bytes of the payload
    header                     canonical JSON, padded with spaces so that the
                               payload starts at a multiple of 64 bytes
    payload                    integers as i64, then floats as f32

Numbers that may be fractions stand in the header as ``float.hex`` text, which is
exact and has a spelling for infinity and for not-a-number. There is one spelling
of every message: encoding what was decoded gives the same bytes.

Input is hostile. Length is checked before content, version before meaning and
digest before use; whatever is wrong is a ``WireError``; nothing is allocated on
the word of a length. The digest finds accidents, not attackers: who sent a frame
is for the transport to prove. Values *inside* vectors are not looked at here, the
aggregator decides on those.

Shape suffixes: d float values of the model, m integer values of the model.
"""

import hashlib
import json
import math
import re
import struct
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from federation.errors import WireError
from federation.ids import RunId, SiteId, check_name
from federation.messages import (
    FailureKind,
    MetricSums,
    Phase,
    RoundTask,
    SiteEvaluation,
    SiteFailure,
    SiteMessage,
    SiteUpdate,
    TaskKind,
)
from federation.protocols import Buffer
from federation.vectors import IntegerVector, Vector

WireMessage = RoundTask | SiteMessage

MAGIC = b"crossfed"
VERSION = 1

MAX_HEADER_BYTES = 1 << 16
MAX_FLOAT_VALUES = 1 << 33  # 32 GiB of float32
MAX_INTEGER_VALUES = 1 << 24  # 128 MiB of int64
MAX_COUNT = (1 << 53) - 1  # exact in float64 and in every JSON reader
MAX_PHASES = 64
MAX_PHASE_NAME_CHARS = 64
MAX_TEXT_CHARS = 1000

_LEAD = struct.Struct("<8sI32s")  # magic, version, digest
_LENGTHS = struct.Struct("<IIQ")  # kind, header length, payload length
_PREFIX_BYTES = _LEAD.size + _LENGTHS.size
_ALIGNMENT_BYTES = 64
_FLOAT = np.dtype("<f4")
_INTEGER = np.dtype("<i8")
_DIGEST = re.compile(r"[0-9a-f]{64}")
# Controls, line and paragraph separators, direction overrides and lone surrogates
# would let a site rewrite what an operator's terminal or log shows.
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)

_Fields = dict[str, Any]
_Word = TypeVar("_Word", TaskKind, FailureKind)


class _Kind(IntEnum):
    TASK = 1
    UPDATE = 2
    EVALUATION = 3
    FAILURE = 4


def encode(message: WireMessage) -> list[Buffer]:
    """Write a message as pieces that make a frame when joined.

    The vectors are pieces of their own and are not copied; they must not change
    until the frame has been sent.

    Raises:
        WireError: ``decode`` would refuse the message: a field is out of range, or
            a vector has another type or more than one dimension.
    """
    integers_m, floats_d = _vectors(message)
    payload: list[Buffer] = [
        np.ascontiguousarray(integers_m, dtype=_INTEGER).data,
        np.ascontiguousarray(floats_d, dtype=_FLOAT).data,
    ]
    kind, header = _head(message)
    lengths = _LENGTHS.pack(kind, len(header), sum(_nbytes(p) for p in payload))
    digest = hashlib.sha256(lengths)
    digest.update(header)
    for piece in payload:
        digest.update(piece)
    prefix = _LEAD.pack(MAGIC, VERSION, digest.digest()) + lengths
    return [prefix + header, *(p for p in payload if _nbytes(p))]


def encode_bytes(message: WireMessage) -> bytes:
    """Write a message as one ``bytes``, which copies its vectors.

    Raises:
        WireError: See ``encode``.
    """
    return b"".join(encode(message))


def encoded_size(message: WireMessage) -> int:
    """Bytes that ``encode`` would make, without reading a vector.

    Raises:
        WireError: See ``encode``.
    """
    integers_m, floats_d = _vectors(message)
    _, header = _head(message)
    payload = integers_m.size * _INTEGER.itemsize + floats_d.size * _FLOAT.itemsize
    return _PREFIX_BYTES + len(header) + payload


def decode(data: Buffer) -> WireMessage:
    """Read a frame.

    Args:
        data: The whole frame and nothing else, contiguous in memory. It must not
            change while the message is in use.

    Returns:
        The message. Its vectors are read-only views into ``data``, unless that
        starts at an address that is not aligned: then they are copies.

    Raises:
        WireError: The bytes are not exactly one well-formed message.
    """
    frame = memoryview(data).toreadonly().cast("B")
    # 1. Length before content.
    if len(frame) < _PREFIX_BYTES:
        raise WireError(f"{len(frame)} bytes are too few for a message")
    magic, version, digest = _LEAD.unpack_from(frame)
    # 2. Version before meaning.
    if magic != MAGIC:
        raise WireError("the bytes do not start like a message of crossfed")
    if version != VERSION:
        raise WireError(
            f"the message has format version {version}, this side reads {VERSION}: "
            "install the same release of crossfed everywhere"
        )
    number, header_bytes, payload_bytes = _LENGTHS.unpack_from(frame, _LEAD.size)
    if header_bytes > MAX_HEADER_BYTES:
        raise WireError(
            f"the header has {header_bytes} bytes, at most {MAX_HEADER_BYTES} may be"
        )
    expected = _PREFIX_BYTES + header_bytes + payload_bytes
    if len(frame) != expected:
        raise WireError(f"the message has {len(frame)} bytes and declares {expected}")
    # 3. Digest before use.
    if hashlib.sha256(frame[_LEAD.size :]).digest() != digest:
        raise WireError("the message was damaged on its way: its digest is wrong")
    # 4. Meaning.
    kind = _kind(number)
    body = _PREFIX_BYTES + header_bytes
    fields = _parse_header(bytes(frame[_PREFIX_BYTES:body]))
    return _READERS[kind](_members(fields, _NAMES[kind]), frame[body:])


def one_line(text: str) -> str:
    """Make any text fit to travel in a ``SiteFailure``.

    Line breaks and other unprintable characters become spaces; a text over
    ``MAX_TEXT_CHARS`` is cut and ends in three dots.
    """
    flat = _UNSAFE.sub(" ", text)
    if len(flat) <= MAX_TEXT_CHARS:
        return flat
    return flat[: MAX_TEXT_CHARS - 3] + "..."


def _nbytes(piece: Buffer) -> int:
    return memoryview(piece).nbytes


def _vectors(message: WireMessage) -> tuple[IntegerVector, Vector]:
    integers_m: IntegerVector = np.empty(0, dtype=_INTEGER)
    floats_d: Vector = np.empty(0, dtype=_FLOAT)
    if isinstance(message, RoundTask):
        integers_m, floats_d = message.integers_m, message.weights_d
    elif isinstance(message, SiteUpdate):
        integers_m, floats_d = message.integers_m, message.delta_d
    for vector, dtype in ((integers_m, np.int64), (floats_d, np.float32)):
        if vector.dtype != dtype or vector.ndim != 1:
            raise WireError(
                f"a vector is {vector.dtype} of shape {vector.shape}, "
                f"not one-dimensional {np.dtype(dtype)}"
            )
    return integers_m, floats_d


def _head(message: WireMessage) -> tuple[_Kind, bytes]:
    """Kind and header of a message, checked by the very rules of ``decode``."""
    kind, fields = _write(message)
    _READERS[kind](fields, None)
    return kind, _format_header(fields)


def _format_header(fields: _Fields) -> bytes:
    text = json.dumps(fields, allow_nan=False, sort_keys=True, separators=(",", ":"))
    header = text.encode("ascii")
    return header + b" " * (-(_PREFIX_BYTES + len(header)) % _ALIGNMENT_BYTES)


def _parse_header(header: bytes) -> _Fields:
    try:
        fields = json.loads(header)
        # A repeated key, a NaN, a fraction written two ways or a wrong padding
        # does not survive being written again.
        canonical = isinstance(fields, dict) and _format_header(fields) == header
    except (ValueError, RecursionError) as error:
        raise WireError("the header is not JSON of a reasonable depth") from error
    if not canonical:
        raise WireError("the header is not a JSON object in canonical form")
    return fields  # type: ignore[no-any-return]


def _kind(number: int) -> _Kind:
    try:
        return _Kind(number)
    except ValueError as error:
        raise WireError(f"messages of kind {number} do not exist") from error


# Writing. Field names are those of the dataclasses.


def _write(message: WireMessage) -> tuple[_Kind, _Fields]:
    fields: _Fields = {
        "run_id": message.run_id,
        "round_index": message.round_index,
        "site": message.site,
    }
    if isinstance(message, RoundTask):
        fields |= _write_sizes(message.weights_d, message.integers_m)
        fields["kind"] = str(message.kind)
        for name in ("layout_digest", "evaluate", "evaluate_after"):
            fields[name] = getattr(message, name)
        return _Kind.TASK, fields
    if isinstance(message, SiteUpdate):
        fields |= _write_sizes(message.delta_d, message.integers_m)
        for name in ("layout_digest", "num_examples", "num_steps"):
            fields[name] = getattr(message, name)
        for name in ("training", "evaluation", "evaluation_after"):
            fields[name] = _write_sums(getattr(message, name))
        fields["phases"] = [_write_phase(p) for p in message.phases]
        return _Kind.UPDATE, fields
    if isinstance(message, SiteEvaluation):
        fields["evaluation"] = _write_sums(message.evaluation)
        fields["phases"] = [_write_phase(p) for p in message.phases]
        return _Kind.EVALUATION, fields
    fields["kind"] = str(message.kind)
    # A failure must not get lost for its text, which often is a library's.
    fields["message"] = one_line(message.message)
    return _Kind.FAILURE, fields


def _write_sizes(floats_d: Vector, integers_m: IntegerVector) -> _Fields:
    return {"num_floats": floats_d.size, "num_integers": integers_m.size}


def _write_sums(sums: MetricSums | None) -> _Fields | None:
    if sums is None:
        return None
    loss_sum = float(sums.loss_sum).hex()
    return {"count": sums.count, "loss_sum": loss_sum, "correct": sums.correct}


def _write_phase(phase: Phase) -> _Fields:
    return {
        "name": phase.name,
        "start_seconds": float(phase.start_seconds).hex(),
        "seconds": float(phase.seconds).hex(),
    }


# Reading. ``payload`` is None while the encoder has its own fields checked.

_ABOUT = frozenset({"run_id", "round_index", "site"})
_SIZES = frozenset({"num_floats", "num_integers"})
_NAMES: Mapping[_Kind, frozenset[str]] = {
    _Kind.TASK: _ABOUT
    | _SIZES
    | {"kind", "layout_digest", "evaluate", "evaluate_after"},
    _Kind.UPDATE: _ABOUT
    | _SIZES
    | {"layout_digest", "num_examples", "num_steps", "training"}
    | {"evaluation", "evaluation_after", "phases"},
    _Kind.EVALUATION: _ABOUT | {"evaluation", "phases"},
    _Kind.FAILURE: _ABOUT | {"kind", "message"},
}
_SUMS = frozenset({"count", "loss_sum", "correct"})
_PHASE = frozenset({"name", "start_seconds", "seconds"})


def _read_task(fields: _Fields, payload: memoryview | None) -> RoundTask:
    integers_m, floats_d = _read_vectors(fields, payload)
    return RoundTask(
        run_id=RunId(_name(fields, "run_id")),
        round_index=_count(fields, "round_index"),
        site=SiteId(_name(fields, "site")),
        kind=_word(fields, TaskKind),
        layout_digest=_digest(fields),
        weights_d=floats_d,
        integers_m=integers_m,
        evaluate=_flag(fields, "evaluate"),
        evaluate_after=_flag(fields, "evaluate_after"),
    )


def _read_update(fields: _Fields, payload: memoryview | None) -> SiteUpdate:
    integers_m, floats_d = _read_vectors(fields, payload)
    return SiteUpdate(
        run_id=RunId(_name(fields, "run_id")),
        round_index=_count(fields, "round_index"),
        site=SiteId(_name(fields, "site")),
        layout_digest=_digest(fields),
        delta_d=floats_d,
        integers_m=integers_m,
        num_examples=_count(fields, "num_examples"),
        num_steps=_count(fields, "num_steps"),
        training=_sums(fields["training"]),
        evaluation=_sums_or_none(fields["evaluation"]),
        evaluation_after=_sums_or_none(fields["evaluation_after"]),
        phases=_phases(fields),
    )


def _read_evaluation(fields: _Fields, payload: memoryview | None) -> SiteEvaluation:
    _check_payload(payload, 0)
    return SiteEvaluation(
        run_id=RunId(_name(fields, "run_id")),
        round_index=_count(fields, "round_index"),
        site=SiteId(_name(fields, "site")),
        evaluation=_sums(fields["evaluation"]),
        phases=_phases(fields),
    )


def _read_failure(fields: _Fields, payload: memoryview | None) -> SiteFailure:
    _check_payload(payload, 0)
    return SiteFailure(
        run_id=RunId(_name(fields, "run_id")),
        round_index=_count(fields, "round_index"),
        site=SiteId(_name(fields, "site")),
        kind=_word(fields, FailureKind),
        message=_text(fields, "message", MAX_TEXT_CHARS),
    )


_READERS: Mapping[_Kind, Callable[[_Fields, memoryview | None], WireMessage]] = {
    _Kind.TASK: _read_task,
    _Kind.UPDATE: _read_update,
    _Kind.EVALUATION: _read_evaluation,
    _Kind.FAILURE: _read_failure,
}


def _members(value: object, names: frozenset[str]) -> _Fields:
    if not isinstance(value, dict) or value.keys() != names:
        raise WireError(f"expected an object with exactly {sorted(names)}")
    return value


def _read_vectors(
    fields: _Fields, payload: memoryview | None
) -> tuple[IntegerVector, Vector]:
    num_floats = _count(fields, "num_floats", MAX_FLOAT_VALUES)
    num_integers = _count(fields, "num_integers", MAX_INTEGER_VALUES)
    floats_at = num_integers * _INTEGER.itemsize
    _check_payload(payload, floats_at + num_floats * _FLOAT.itemsize)
    data = b"" if payload is None else payload
    return _view(data[:floats_at], _INTEGER), _view(data[floats_at:], _FLOAT)


def _check_payload(payload: memoryview | None, expected: int) -> None:
    if payload is not None and len(payload) != expected:
        raise WireError(
            f"the payload has {len(payload)} bytes where the header says {expected}"
        )


def _view(data: Buffer, dtype: np.dtype[Any]) -> NDArray[Any]:
    vector = np.frombuffer(data, dtype=dtype)
    if not vector.flags.aligned:
        vector = vector.copy()
        vector.flags.writeable = False
    return vector


def _count(fields: _Fields, name: str, maximum: int = MAX_COUNT) -> int:
    value = fields[name]
    # A bool is an int to isinstance, and no count.
    if type(value) is not int or not 0 <= value <= maximum:
        raise WireError(f"{name} is {value!r:.80}, not a count of 0 to {maximum}")
    return value


def _flag(fields: _Fields, name: str) -> bool:
    value = fields[name]
    if type(value) is not bool:
        raise WireError(f"{name} is {value!r:.80}, not true or false")
    return value


def _text(fields: _Fields, name: str, max_chars: int) -> str:
    value = fields[name]
    if type(value) is not str or len(value) > max_chars or _UNSAFE.search(value):
        raise WireError(
            f"{name} is {value!r:.80}, not one line of at most {max_chars} characters"
        )
    return value


def _name(fields: _Fields, name: str) -> str:
    value = fields[name]
    if type(value) is not str:
        raise WireError(f"{name} is {value!r:.80}, not text")
    try:
        return check_name(value)
    except ValueError as error:
        raise WireError(f"{name}: {error}") from error


def _digest(fields: _Fields) -> str:
    value = fields["layout_digest"]
    if type(value) is not str or not _DIGEST.fullmatch(value):
        raise WireError(f"layout_digest is {value!r:.80}, not 64 hexadecimal digits")
    return value


def _word(fields: _Fields, words: type[_Word]) -> _Word:
    value = fields["kind"]
    if type(value) is not str or value not in list(words):
        raise WireError(f"kind is {value!r:.80}, not one of {[str(w) for w in words]}")
    return words(value)


def _float(fields: _Fields, name: str) -> float:
    value = fields[name]
    try:
        number = float.fromhex(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"{name} is {value!r:.80}, not a float in hex") from error
    if number.hex() != value:
        raise WireError(f"{name} is {value!r:.80}, written unlike float.hex does")
    return number


def _duration(fields: _Fields, name: str) -> float:
    seconds = _float(fields, name)
    if not (math.isfinite(seconds) and seconds >= 0):
        raise WireError(f"{name} is {seconds} s, not a finite time of at least 0 s")
    return seconds


def _sums(value: object) -> MetricSums:
    fields = _members(value, _SUMS)
    return MetricSums(
        count=_count(fields, "count"),
        loss_sum=_float(fields, "loss_sum"),
        correct=_count(fields, "correct"),
    )


def _sums_or_none(value: object) -> MetricSums | None:
    return None if value is None else _sums(value)


def _phases(fields: _Fields) -> tuple[Phase, ...]:
    value = fields["phases"]
    if not isinstance(value, list) or len(value) > MAX_PHASES:
        raise WireError(f"phases is not a list of at most {MAX_PHASES}")
    phases = [_members(item, _PHASE) for item in value]
    return tuple(
        Phase(
            name=_text(phase, "name", MAX_PHASE_NAME_CHARS),
            start_seconds=_duration(phase, "start_seconds"),
            seconds=_duration(phase, "seconds"),
        )
        for phase in phases
    )
