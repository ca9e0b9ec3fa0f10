"""What replaces a vector that is in a store, and what it is held against.

See ``frames``.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
# A masked word has at most the bits of a float, and words may be padded.
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
        sha256: Of the content, 64 hexadecimal digits.
    """

    field: str
    name: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedFrame:
    """A message as it travels.

    Attributes:
        frame: Of ``federation.wire.frame``; vectors that are in the store are empty.
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
        """Those of the model that a task brings."""
        return cls(num_floats=task.weights_d.size, num_integers=task.integers_m.size)


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
    if name == "words":
        most = 4 * sizes.num_floats
    else:
        num = sizes.num_integers if name == "integers_m" else sizes.num_floats
        most = vectors[name].dtype.itemsize * num
    least = 1 if name == "words" else max(1, most)
    most += _SPARE_BYTES if name == "words" else 0
    if not least <= reference.size <= most:
        raise ProtocolError(
            f"{name} has {reference.size} bytes, but this run's model needs {most}"
        )
    return reference.size
