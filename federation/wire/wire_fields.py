"""What the header and the payload of each kind of message hold, for ``wire``.

Writing and reading are driven by the same tables, and both check: the encoder has
what it wrote read again. The frame around it and the spelling of the header are in
``wire``, which is the module to import.

Shape suffixes: d float values of the model, m integer values of the model, h words
of a masked header.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from federation.errors import WireError
from federation.ids import RunId, SiteId
from federation.messages import (
    FailureKind,
    MaskedUpdate,
    RoundTask,
    SecureAnswer,
    SecureStep,
    SecureTask,
    SiteEvaluation,
    SiteFailure,
    SiteMessage,
    SiteUpdate,
    Task,
    TaskKind,
)
from federation.wire import wire_values
from federation.wire.wire_values import Fields

WireMessage = Task | SiteMessage

MAX_FLOAT_VALUES = 1 << 33  # 32 GiB of float32
MAX_INTEGER_VALUES = 1 << 24  # 128 MiB of int64
MAX_WORDS_BYTES = 4 * MAX_FLOAT_VALUES  # a word has at most 32 bits
MAX_MASKED_HEADER_WORDS = 64
MAX_BODY_BYTES = 1 << 24  # 16 MiB


class Kind(IntEnum):
    """The number of a kind of message in its frame."""

    TASK = 1
    UPDATE = 2
    EVALUATION = 3
    FAILURE = 4
    SECURE_TASK = 5
    SECURE_ANSWER = 6
    MASKED_UPDATE = 7


_KINDS: Mapping[type[WireMessage], Kind] = {
    RoundTask: Kind.TASK,
    SiteUpdate: Kind.UPDATE,
    SiteEvaluation: Kind.EVALUATION,
    SiteFailure: Kind.FAILURE,
    SecureTask: Kind.SECURE_TASK,
    SecureAnswer: Kind.SECURE_ANSWER,
    MaskedUpdate: Kind.MASKED_UPDATE,
}

# Fields of the dataclasses that stand in the header under their own names.
_ABOUT = ("run_id", "round_index", "site")
_MODEL = ("based_on", "fragment")
_PLAIN: Mapping[Kind, tuple[str, ...]] = {
    Kind.TASK: (
        *("kind", "layout_digest", "evaluate", "evaluate_after", "anchor"),
        *_MODEL,
    ),
    Kind.UPDATE: (
        *("layout_digest", "num_examples", "num_steps"),
        *("training", "evaluation", "evaluation_after", "phases", "spent"),
        *_MODEL,
    ),
    Kind.EVALUATION: ("evaluation", "phases", "spent", *_MODEL),
    Kind.FAILURE: ("kind", "message"),
    Kind.SECURE_TASK: ("step",),
    Kind.SECURE_ANSWER: ("step",),
    Kind.MASKED_UPDATE: ("layout_digest", "spent", *_MODEL),
}


@dataclass(frozen=True, slots=True)
class _Section:
    """A part of the payload.

    Attributes:
        field: The field of the dataclass that travels in it.
        size: The header's name for its number of values.
        dtype: Type of a value.
        maximum: How many there may be.
        is_bytes: Whether the field is ``bytes`` and not an array.
    """

    field: str
    size: str
    dtype: np.dtype[Any]
    maximum: int
    is_bytes: bool = False


def _integers(field: str) -> _Section:
    return _Section(field, "num_integers", np.dtype("<i8"), MAX_INTEGER_VALUES)


def _floats(field: str) -> _Section:
    return _Section(field, "num_floats", np.dtype("<f4"), MAX_FLOAT_VALUES)


def _body(field: str) -> _Section:
    return _Section(field, "body_bytes", np.dtype("u1"), MAX_BODY_BYTES, is_bytes=True)


# In the order of the payload: larger values first, so that each is aligned.
_SECTIONS: Mapping[Kind, tuple[_Section, ...]] = {
    Kind.TASK: (_integers("integers_m"), _floats("weights_d"), _body("secure")),
    Kind.UPDATE: (_integers("integers_m"), _floats("delta_d")),
    Kind.EVALUATION: (),
    Kind.FAILURE: (),
    Kind.SECURE_TASK: (_body("body"),),
    Kind.SECURE_ANSWER: (_body("body"),),
    Kind.MASKED_UPDATE: (
        # The bits of an u64 in the place of the integers.
        _Section("header_h", "num_integers", np.dtype("<u8"), MAX_MASKED_HEADER_WORDS),
        _Section("words", "words_bytes", np.dtype("u1"), MAX_WORDS_BYTES),
        _body("body"),
    ),
}

_NATIVE = {  # Types of values in memory.
    s.dtype: s.dtype.newbyteorder("=") for parts in _SECTIONS.values() for s in parts
}


# Writing.


def sections(message: WireMessage) -> list[NDArray[Any]]:
    """Values of a message's payload, in order, in little-endian order.

    Raises:
        WireError: A vector has another type or more than one dimension.
    """
    parts = []
    for section in _SECTIONS[_KINDS[type(message)]]:
        value = getattr(message, section.field)
        if section.is_bytes:
            value = _raw(value, section.field)
        expected = _NATIVE[section.dtype]
        if value.dtype != expected or value.ndim != 1:
            raise WireError(
                f"a vector is {value.dtype} of shape {value.shape}, "
                f"not one-dimensional {expected}"
            )
        parts.append(value.astype(section.dtype, copy=False))
    return parts


def write(message: WireMessage) -> tuple[Kind, Fields]:
    """Kind and header of a message, checked by the very rules of ``read``.

    Raises:
        WireError: A field is out of range.
    """
    kind = _KINDS[type(message)]
    fields: Fields = {}
    for name, spell in _SPELLED[kind]:
        value = getattr(message, name)
        fields[name] = value if spell is None else spell(value)
    for section in _SECTIONS[kind]:
        fields[section.size] = len(getattr(message, section.field))
    read(kind, fields, None)
    return kind, fields


def _raw(value: object, name: str) -> NDArray[np.uint8]:
    if type(value) is not bytes:
        raise WireError(f"{name} is of type {type(value).__name__}, not bytes")
    return np.frombuffer(value, np.uint8)


_SPELLINGS: Mapping[str, Callable[[Any], Any]] = {
    "kind": str,
    "step": str,
    "training": wire_values.write_sums,
    "evaluation": wire_values.write_sums,
    "evaluation_after": wire_values.write_sums,
    "phases": wire_values.write_phases,
    "spent": wire_values.write_spent,
    "anchor": wire_values.write_anchor,
    # A failure must not get lost for its text, which often is a library's.
    "message": wire_values.one_line,
}
_SPELLED = {
    kind: tuple((name, _SPELLINGS.get(name)) for name in (*_ABOUT, *plain))
    for kind, plain in _PLAIN.items()
}


# Reading.

_MEMBERS = {
    kind: frozenset((*_ABOUT, *plain, *(s.size for s in _SECTIONS[kind])))
    for kind, plain in _PLAIN.items()
}


def read(kind: Kind, fields: object, payload: memoryview | None) -> WireMessage:
    """Make a message of its header and payload.

    Args:
        kind: Its kind.
        fields: Its header; of any content.
        payload: Its payload, of which vectors are views; None while the encoder
            has its own fields checked.

    Raises:
        WireError: They are not exactly those of one message.
    """
    members = wire_values.check_members(fields, _MEMBERS[kind])
    return _READERS[kind](members, _read_sections(kind, members, payload))


def _read_sections(kind: Kind, fields: Fields, payload: memoryview | None) -> Fields:
    """Values of the payload by the names of their fields."""
    parts = _SECTIONS[kind]
    sizes = [
        wire_values.read_count(fields, s.size, s.maximum) * s.dtype.itemsize
        for s in parts
    ]
    if payload is None:
        return dict.fromkeys(s.field for s in parts)
    if len(payload) != sum(sizes):
        raise WireError(
            f"the payload has {len(payload)} bytes where the header says {sum(sizes)}"
        )
    ends = itertools.accumulate(sizes)
    return {
        section.field: _value(payload[end - size : end], section)
        for section, size, end in zip(parts, sizes, ends, strict=True)
    }


def _value(data: memoryview, section: _Section) -> NDArray[Any] | bytes:
    if section.is_bytes:
        return bytes(data)
    vector = np.frombuffer(data, dtype=section.dtype)
    if not vector.flags.aligned:
        vector = vector.copy()
        vector.flags.writeable = False
    return vector


class _About(TypedDict):
    run_id: RunId
    round_index: int
    site: SiteId


def _about(fields: Fields) -> _About:
    return {
        "run_id": RunId(wire_values.read_name(fields, "run_id")),
        "round_index": wire_values.read_count(fields, "round_index"),
        "site": SiteId(wire_values.read_name(fields, "site")),
    }


class _Model(TypedDict):
    based_on: int
    fragment: int


def _model(fields: Fields) -> _Model:
    return {
        "based_on": wire_values.read_count(fields, "based_on"),
        "fragment": wire_values.read_count(fields, "fragment"),
    }


def _read_task(fields: Fields, parts: Fields) -> RoundTask:
    return RoundTask(
        **_about(fields),
        **_model(fields),
        kind=wire_values.read_word(fields, "kind", TaskKind),
        layout_digest=wire_values.read_digest(fields),
        evaluate=wire_values.read_flag(fields, "evaluate"),
        evaluate_after=wire_values.read_flag(fields, "evaluate_after"),
        anchor=wire_values.read_anchor(fields["anchor"]),
        **parts,
    )


def _read_update(fields: Fields, parts: Fields) -> SiteUpdate:
    return SiteUpdate(
        **_about(fields),
        **_model(fields),
        layout_digest=wire_values.read_digest(fields),
        num_examples=wire_values.read_count(fields, "num_examples"),
        num_steps=wire_values.read_count(fields, "num_steps"),
        training=wire_values.read_sums_or_none(fields["training"]),
        evaluation=wire_values.read_sums_or_none(fields["evaluation"]),
        evaluation_after=wire_values.read_sums_or_none(fields["evaluation_after"]),
        phases=wire_values.read_phases(fields),
        spent=wire_values.read_spent(fields["spent"]),
        **parts,
    )


def _read_evaluation(fields: Fields, parts: Fields) -> SiteEvaluation:
    return SiteEvaluation(
        **_about(fields),
        **_model(fields),
        evaluation=wire_values.read_sums(fields["evaluation"]),
        phases=wire_values.read_phases(fields),
        spent=wire_values.read_spent(fields["spent"]),
        **parts,
    )


def _read_failure(fields: Fields, parts: Fields) -> SiteFailure:
    return SiteFailure(
        **_about(fields),
        kind=wire_values.read_word(fields, "kind", FailureKind),
        message=wire_values.read_text(fields, "message", wire_values.MAX_TEXT_CHARS),
        **parts,
    )


def _read_secure_task(fields: Fields, parts: Fields) -> SecureTask:
    step = wire_values.read_word(fields, "step", SecureStep)
    return SecureTask(**_about(fields), step=step, **parts)


def _read_secure_answer(fields: Fields, parts: Fields) -> SecureAnswer:
    step = wire_values.read_word(fields, "step", SecureStep)
    return SecureAnswer(**_about(fields), step=step, **parts)


def _read_masked_update(fields: Fields, parts: Fields) -> MaskedUpdate:
    return MaskedUpdate(
        **_about(fields),
        **_model(fields),
        layout_digest=wire_values.read_digest(fields),
        spent=wire_values.read_spent(fields["spent"]),
        **parts,
    )


_READERS: Mapping[Kind, Callable[[Fields, Fields], WireMessage]] = {
    Kind.TASK: _read_task,
    Kind.UPDATE: _read_update,
    Kind.EVALUATION: _read_evaluation,
    Kind.FAILURE: _read_failure,
    Kind.SECURE_TASK: _read_secure_task,
    Kind.SECURE_ANSWER: _read_secure_answer,
    Kind.MASKED_UPDATE: _read_masked_update,
}
