"""The header and payload of each kind of message, for ``wire``.

Writing and reading are driven by the same tables, and both check by the same rules.
The frame around it and the spelling of the header are in
``wire``, which is the module to import.

Shape suffixes: d float values of the model, m integer values of the model, h words
of a masked header.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from federation.errors import WireError
from federation.messages import (
    FailureKind,
    LeaveReason,
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
MAX_MASKED_HEADER_WORDS = 2048
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
_TYPES: Mapping[Kind, Callable[..., WireMessage]] = {
    kind: message for message, kind in _KINDS.items()
}


@dataclass(frozen=True, slots=True)
class _Value:
    """How a field of the header is read and written; both check it.

    Attributes:
        read: Takes what the header says, and the name of the field.
        write: Takes the field's value, and its name; returns JSON text.
    """

    read: Callable[[Any, str], Any]
    write: Callable[[Any, str], str]


def _word(words: Any) -> _Value:
    return _Value(
        lambda value, name: wire_values.read_word(value, name, words),
        lambda value, name: wire_values.write_word(value, name, words),
    )


def _or_none(value: _Value) -> _Value:
    read, write = value.read, value.write
    return _Value(
        lambda value, name: None if value is None else read(value, name),
        lambda value, name: "null" if value is None else write(value, name),
    )


_COUNT = _Value(wire_values.count, wire_values.write_count)
_FLAG = _Value(wire_values.flag, wire_values.write_flag)
_NAME = _Value(wire_values.name_of, wire_values.write_name)
_DIGEST = _Value(wire_values.digest, wire_values.write_digest)
_PHASES = _Value(wire_values.read_phases, wire_values.write_phases)
_RESOURCES = _or_none(_Value(wire_values.read_resources, wire_values.write_resources))
_SPENT = _or_none(_Value(wire_values.read_spent, wire_values.write_spent))
_ANCHOR = _Value(wire_values.read_anchor, wire_values.write_anchor)
_SUMS = _Value(wire_values.read_sums, wire_values.write_sums)
_SUMS_OR_NONE = _or_none(_SUMS)
# A failure must not get lost for its text, which often is a library's.
_TEXT = _Value(wire_values.text, wire_values.write_one_line)

# Fields of the dataclasses that are in the header under their own names, in order.
_ABOUT = {"run_id": _NAME, "round_index": _COUNT, "site": _NAME}
_MODEL = {"based_on": _COUNT, "fragment": _COUNT}
_STEP = {"step": _word(SecureStep)}
_PLAIN: Mapping[Kind, Mapping[str, _Value]] = {
    Kind.TASK: {
        "kind": _word(TaskKind),
        "layout_digest": _DIGEST,
        "evaluate": _FLAG,
        "evaluate_after": _FLAG,
        "anchor": _ANCHOR,
        **_MODEL,
    },
    Kind.UPDATE: {
        "layout_digest": _DIGEST,
        "num_examples": _COUNT,
        "num_steps": _COUNT,
        "training": _SUMS_OR_NONE,
        "evaluation": _SUMS_OR_NONE,
        "evaluation_after": _SUMS_OR_NONE,
        "phases": _PHASES,
        "resources": _RESOURCES,
        "spent": _SPENT,
        **_MODEL,
    },
    Kind.EVALUATION: {
        "evaluation": _SUMS,
        "phases": _PHASES,
        "spent": _SPENT,
        **_MODEL,
    },
    Kind.FAILURE: {"kind": _word(FailureKind), "message": _TEXT},
    Kind.SECURE_TASK: _STEP,
    Kind.SECURE_ANSWER: _STEP,
    Kind.MASKED_UPDATE: {"layout_digest": _DIGEST, "spent": _SPENT, **_MODEL},
}
_FIELDS = {kind: {**_ABOUT, **plain} for kind, plain in _PLAIN.items()}
# Fields that are in the header unless they are empty.
_LEAVING = {"leaving": _word(LeaveReason)}
_OPTIONAL: Mapping[Kind, Mapping[str, _Value]] = {
    Kind.TASK: {
        "changed_to": _DIGEST,
        "counted": _COUNT,
        "num_steps": _COUNT,
        "first_step": _COUNT,
        "state_round": _COUNT,
        "state_context": _DIGEST,
    },
    Kind.UPDATE: _LEAVING,
    Kind.EVALUATION: _LEAVING,
    Kind.MASKED_UPDATE: _LEAVING,
    Kind.FAILURE: {},
    Kind.SECURE_TASK: {},
    Kind.SECURE_ANSWER: {},
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
        others: Other sections that the field may travel in; its type decides.
        native: Type of a value in memory.
    """

    field: str
    size: str
    dtype: np.dtype[Any]
    maximum: int
    is_bytes: bool = False
    others: tuple["_Section", ...] = ()
    native: np.dtype[Any] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        """Find the type in memory."""
        object.__setattr__(self, "native", self.dtype.newbyteorder("="))

    def of_type(self, dtype: np.dtype[Any]) -> "_Section":
        """The section for a value of a type."""
        if dtype != self.native:
            for other in self.others:
                if dtype == other.native:
                    return other
        return self

    def named_in(self, fields: Fields) -> "_Section":
        """The section that a header names."""
        return next((s for s in self.others if s.size in fields), self)


def _integers(field: str) -> _Section:
    return _Section(field, "num_integers", np.dtype("<i8"), MAX_INTEGER_VALUES)


def _floats(field: str) -> _Section:
    return _Section(
        field,
        "num_floats",
        np.dtype("<f4"),
        MAX_FLOAT_VALUES,
        others=(
            _Section(field, "num_fp16", np.dtype("<f2"), MAX_FLOAT_VALUES),
            _Section(field, "num_bf16", np.dtype("<u2"), MAX_FLOAT_VALUES),
            # Packed digits of a sum, from which a site computes the model.
            _Section(field, "num_words64", np.dtype("<u8"), MAX_FLOAT_VALUES),
            _Section(field, "packed_bytes", np.dtype("u1"), MAX_WORDS_BYTES),
        ),
    )


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


# Writing.


def write(message: WireMessage) -> tuple[Kind, dict[str, str], list[NDArray[Any]]]:
    """Write a message, checked by the rules of ``read``.

    Returns:
        Its kind; its header, JSON text by name; and the values of its payload, in order
        and in little-endian order.

    Raises:
        WireError: A field is out of range, or a vector has another type or more than
            one dimension.
    """
    kind = _KINDS[type(message)]
    parts, sizes = [], {}
    for first in _SECTIONS[kind]:
        value = getattr(message, first.field)
        if first.is_bytes:
            value = _raw(value, first.field)
        section = first.of_type(value.dtype)
        if value.dtype != section.native or value.ndim != 1:
            raise WireError(
                f"a vector is {value.dtype} of shape {value.shape}, "
                f"not one-dimensional {section.native}"
            )
        sizes[section.size] = wire_values.write_count(
            value.size, section.size, section.maximum
        )
        parts.append(value.astype(section.dtype, copy=False))
    header = {
        name: form.write(getattr(message, name), name)
        for name, form in _fields(kind, message.__getattribute__).items()
    }
    return kind, header | sizes, parts


def _fields(kind: Kind, find: Callable[[str], Any]) -> Mapping[str, _Value]:
    """Fields of a message's header, without optional ones that are empty."""
    fields = _FIELDS[kind]
    for name, form in _OPTIONAL[kind].items():
        if find(name):
            fields = {**fields, name: form}
    return fields


def _raw(value: object, name: str) -> NDArray[np.uint8]:
    if type(value) is not bytes:
        raise WireError(f"{name} is of type {type(value).__name__}, not bytes")
    return np.frombuffer(value, np.uint8)


# Reading.


def read(kind: Kind, fields: object, payload: memoryview) -> WireMessage:
    """Build a message from its header and payload.

    Args:
        kind: Determines which fields it must have.
        fields: Its header; of any content.
        payload: Its payload, of which vectors are views.

    Raises:
        WireError: They are not exactly those of one message.
    """
    given = fields if isinstance(fields, dict) else {}
    sections = [section.named_in(given) for section in _SECTIONS[kind]]
    forms = _fields(kind, given.get)
    names = frozenset((*forms, *(section.size for section in sections)))
    members = wire_values.check_members(fields, names)
    parts = _read_sections(sections, members, payload)
    named = {name: form.read(members[name], name) for name, form in forms.items()}
    message: WireMessage = _TYPES[kind](**named, **parts)
    return message


def _read_sections(
    parts: Sequence[_Section], fields: Fields, payload: memoryview
) -> Fields:
    """Values of the payload by the names of their fields."""
    sizes = [
        wire_values.count(fields[s.size], s.size, s.maximum) * s.dtype.itemsize
        for s in parts
    ]
    if len(payload) != sum(sizes):
        raise WireError(
            f"the payload has {len(payload)} bytes, but the header says {sum(sizes)}"
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
