"""Messages as tables: each attribute of a message names its form, in the order sent.

A message is LP of its tag, then its attributes in the order in which they are listed,
each in the spelling of ``canonical``. A signature comes last, and is over everything
between the tag and itself. To read takes nothing else than what writing gives, each
attribute under the limit that its form names.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Self, get_type_hints

from privacy.secagg.agreement.canonical import (
    MAX_U64,
    Reader,
    byte_map,
    float64,
    lp,
    numbers,
    u64,
)
from privacy.secagg.agreement.identity import (
    SIGNATURE_BYTES,
    Identity,
    Label,
    PublicIdentity,
)

DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class FieldCodec:
    """How one attribute is written, and read under its name."""

    write: Callable[[Any], bytes]
    read: Callable[[Reader, str], Any]


def octets(*, size: int | None = None, limit: int | None = None) -> FieldCodec:
    """Bytes as LP: of exactly ``size``, or of at most ``limit``."""
    return FieldCodec(
        lp, lambda reader, name: reader.field(name, size=size, limit=limit)
    )


def text(limit: int) -> FieldCodec:
    """Printable text of at most ``limit`` bytes, as LP of its UTF-8."""
    return FieldCodec(_text, lambda reader, name: reader.text(name, limit=limit))


def whole(low: int = 0, high: int = MAX_U64) -> FieldCodec:
    """A whole number in ``[low, high]``, as u64."""
    return FieldCodec(u64, lambda reader, name: reader.u64(name, low=low, high=high))


def increasing(limit: int) -> FieldCodec:
    """At most ``limit`` strictly increasing numbers."""
    return FieldCodec(numbers, lambda reader, name: reader.numbers(name, limit=limit))


def octet_map(
    max_entries: int,
    *,
    size: int | None = None,
    limit: int | None = None,
    named: str = "",
) -> FieldCodec:
    """A map from numbers to bytes; ``named`` is its name in errors."""

    def read(reader: Reader, name: str) -> dict[int, bytes]:
        return reader.byte_map(
            named or name, max_entries=max_entries, size=size, limit=limit
        )

    return FieldCodec(byte_map, read)


def listed(form: FieldCodec, max_entries: int, *, named: str) -> FieldCodec:
    """The number of entries, then each; ``named`` is an entry's name in errors."""

    def write(values: tuple[Any, ...]) -> bytes:
        return u64(len(values)) + b"".join(map(form.write, values))

    def read(reader: Reader, name: str) -> tuple[Any, ...]:
        count = reader.u64(f"count of {name}", high=max_entries)
        return tuple(form.read(reader, named) for _ in range(count))

    return FieldCodec(write, read)


def record(kind: type) -> FieldCodec:
    """The attributes of a dataclass, each in its form, with nothing around them."""
    return FieldCodec(write_record, lambda reader, _: read_record(kind, reader))


def _text(value: str) -> bytes:
    return lp(value.encode())


FLOAT = FieldCodec(float64, Reader.float64)
FLAG = FieldCodec(u64, Reader.flag)
NAME = FieldCodec(_text, Reader.name)

Digest = Annotated[bytes, octets(size=DIGEST_BYTES)]


@cache
def _forms(kind: type) -> Mapping[str, FieldCodec]:
    """The form of each attribute in the order sent: a signature is the last."""
    hints = get_type_hints(kind, include_extras=True)
    names = [field.name for field in dataclasses.fields(kind)]
    names.sort(key=lambda name: name == "signature")
    return {name: hints[name].__metadata__[0] for name in names}


def write_record(value: Any, *, without: str = "") -> bytes:
    """Write the attributes of a dataclass, but for the one that is named."""
    kind: Any = type(value)
    forms = _forms(kind).items()
    return b"".join(
        form.write(getattr(value, name)) for name, form in forms if name != without
    )


def read_record(kind: Any, reader: Reader) -> Any:
    """Take the attributes of a dataclass out of a message."""
    forms = _forms(kind).items()
    return kind(**{name: form.read(reader, name) for name, form in forms})


class Message:
    """A dataclass whose attributes are annotated with their forms."""

    __slots__ = ()
    TAG: ClassVar[bytes]

    def to_bytes(self) -> bytes:
        """The canonical encoding."""
        return lp(self.TAG) + write_record(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read the canonical encoding; raises ``MalformedMessage``."""
        reader = Reader(data, cls.TAG)
        message: Self = read_record(cls, reader)
        reader.end()
        return message


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SignedMessage(Message):
    """A message with a signature.

    Attributes:
        signature: By its sender, over ``signed``.
    """

    LABEL: ClassVar[Label]
    signature: Annotated[bytes, octets(size=SIGNATURE_BYTES)] = b""

    @property
    def signed(self) -> bytes:
        """What ``signature`` is over."""
        return write_record(self, without="signature")

    def signed_by(self, identity: Identity) -> Self:
        """Fill in the signature."""
        signature = identity.sign(self.LABEL, self.signed)
        return dataclasses.replace(self, signature=signature)

    def verify(self, key: bytes, *, who: str) -> None:
        """Check that the holder of a pinned key signed this.

        Raises:
            BadSignature: It did not.
        """
        PublicIdentity(key).verify(self.LABEL, self.signed, self.signature, who=who)
