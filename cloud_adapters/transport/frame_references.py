"""What replaces a vector that is in a store, and what it is held against.

See ``frames``.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from federation import typed_json
from federation.errors import ProtocolError
from federation.messages import MaskedUpdate, RoundTask, SiteUpdate
from federation.vectors import Layout
from federation.wire import frame as wire
from federation.wire.frame import WireMessage

MAX_REFERENCES_CHARS = 4096

_NAME = re.compile(r"[0-9a-f]{32}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
# A codec's value and a masked word have at most the bits of a float, but are padded.
_FLOAT_BYTES = 4
_SPARE_BYTES = 64

_FIELDS: Mapping[type[Any], Sequence[str]] = {
    RoundTask: ("weights_d", "integers_m"),
    SiteUpdate: ("delta_d", "integers_m"),
    MaskedUpdate: ("words",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A vector of a message that is in the store.

    Attributes:
        field: The message's field that it is.
        name: Last part of the object's key, 32 hexadecimal digits.
        size: Bytes.
        sha256: SHA-256 of the content, 64 hexadecimal digits.
        message: Which of the messages in one frame has the field; 0 if there is one.
    """

    field: str
    name: str
    size: int
    sha256: str
    message: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedFrame:
    """A message as it travels.

    Attributes:
        frame: Of ``federation.wire.frame``; vectors that are in the store are empty.
            That of a relay is several, one after another.
        references: To those vectors.
    """

    frame: bytes
    references: tuple[Reference, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of the frame and of all that it refers to."""
        return len(self.frame) + sum(each.size for each in self.references)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How large a run's vectors are.

    Attributes:
        num_floats: Float values of the model, d.
        num_integers: Its integer values, m.
    """

    num_floats: int
    num_integers: int

    @classmethod
    def of_layout(cls, layout: Layout) -> "Sizes":
        """Those of a model."""
        return cls(num_floats=layout.size, num_integers=layout.num_integers)

    @classmethod
    def of_task(cls, task: RoundTask) -> "Sizes":
        """Those of the model that a task brings, at most.

        Values of a codec or words of a sum are fewer than the model's floats.
        """
        values = task.weights_d
        most = max(values.size, -(-values.nbytes // _FLOAT_BYTES))
        return cls(num_floats=most, num_integers=task.integers_m.size)

    def with_floats(self, num_floats: int) -> "Sizes":
        """The same with at least so many floats."""
        return replace(self, num_floats=max(num_floats, self.num_floats))


def inline(message: WireMessage) -> PackedFrame:
    """Pack a message whole, whatever its size."""
    return PackedFrame(frame=wire.encode_bytes(message))


def write_references(references: Sequence[Reference]) -> str:
    """Spell references out as JSON."""
    return json.dumps([typed_json.encode(each) for each in references])


def read_references(text: str) -> tuple[Reference, ...]:
    """Read what ``write_references`` wrote.

    Raises:
        ProtocolError: It did not write this.
    """
    if len(text) > MAX_REFERENCES_CHARS:
        raise ProtocolError(
            f"references to vectors have {len(text)} characters, which is too long"
        )
    try:
        parsed = json.loads(text, parse_constant=typed_json.refuse_constant)
        found: tuple[Reference, ...] = typed_json.decode(
            parsed, tuple[Reference, ...], where="references"
        )
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"malformed references to vectors: {error}") from error
    if not all(0 < each.size <= wire.MAX_COUNT for each in found):
        raise ProtocolError("a reference has an impossible vector size")
    return found


def vectors_of(message: WireMessage) -> dict[str, NDArray[Any]]:
    """Vectors of a message that may be in a store, by their fields."""
    names = _FIELDS.get(type(message), ())
    return {name: getattr(message, name) for name in names}


def folder_of(message: WireMessage) -> str:
    """Where vectors of a message are. Its names have been checked when it was read."""
    is_task = isinstance(message, RoundTask)
    writer = "model" if is_task else f"sites/{message.site}"
    return f"{writer}/{message.run_id}/{message.round_index}"


def check(head: WireMessage, reference: Reference, sizes: Sizes) -> int:
    """Check a reference before anything is fetched; its size.

    Raises:
        ProtocolError: It does not belong to such a message.
    """
    name = reference.field
    vectors = vectors_of(head)
    if name not in vectors or vectors[name].size:
        raise ProtocolError(
            f"a {type(head).__name__} cannot refer to a vector {name!r:.40}"
        )
    for text, form in ((reference.sha256, _SHA256), (reference.name, _NAME)):
        if form.fullmatch(text) is None:
            raise ProtocolError(f"{text!r:.80} is not {form.pattern}")
    if name == "integers_m":
        most = vectors[name].dtype.itemsize * sizes.num_integers
        least = max(1, most)
    else:  # Fewer are a fragment's, or a codec's: what reads them checks their number.
        is_plain = vectors[name].dtype == np.float32
        most = _FLOAT_BYTES * sizes.num_floats + (0 if is_plain else _SPARE_BYTES)
        least = 1
    is_whole = reference.size % vectors[name].dtype.itemsize == 0
    if not (least <= reference.size <= most and is_whole):
        raise ProtocolError(
            f"{name} has {reference.size} bytes, but this run's model needs {most}"
        )
    return reference.size
