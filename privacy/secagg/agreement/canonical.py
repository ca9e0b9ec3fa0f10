"""One spelling for everything that is hashed or signed.

A message is a tag and its fields, one after another, without names::

    u64      8 bytes, big-endian
    LP(x)    u64 length, then the bytes of x
    float    8 bytes, IEEE 754 binary64, big-endian; finite and not minus zero
    numbers  u64 count, then u64 each, strictly increasing
    map      u64 count, then u64 key and LP(value) each, keys strictly increasing

There are no optional fields and no second spelling: what ``Reader`` accepts,
encoding gives back byte for byte. Lengths are checked before content, against
limits that the caller names, and nothing is allocated on the word of a length.
What the fields of a message are is said in ``contract`` and ``messages``.
"""

import math
import operator
import struct
from collections.abc import Iterable, Mapping, Sequence

from federation.ids import MAX_NAME_CHARS, check_name
from privacy.secagg.errors import MalformedMessage

MAX_U64 = (1 << 64) - 1
MAX_MESSAGE_BYTES = 1 << 24  # 16 MiB: a Reveal at 64 sites has about 0.2 MiB

_MAX_TAG_BYTES = 64
_U64 = struct.Struct(">Q")
_FLOAT = struct.Struct(">d")


def u64(value: int) -> bytes:
    """Eight bytes, big-endian."""
    if not 0 <= value <= MAX_U64:
        raise ValueError(f"{value} does not fit in 64 bits")
    return _U64.pack(value)


def lp(data: bytes) -> bytes:
    """Length-prefixed: LP(x) of the specification, section 2.2."""
    return _U64.pack(len(data)) + data


def fields(*parts: bytes) -> bytes:
    """LP of each part, one after another."""
    return b"".join(lp(part) for part in parts)


def float64(value: float) -> bytes:
    """Eight bytes of a finite number that is not minus zero."""
    if not math.isfinite(value) or (value == 0 and math.copysign(1, value) < 0):
        raise ValueError(f"{value!r} has no canonical encoding")
    return _FLOAT.pack(value)


def numbers(values: Iterable[int]) -> bytes:
    """A strictly increasing list of numbers; canon(U_r) of section 2.2."""
    listed = list(values)
    _check_increasing(listed)
    for end in listed[:1] + listed[-1:]:
        u64(end)  # What is between them fits too.
    return struct.pack(f">{1 + len(listed)}Q", len(listed), *listed)


def byte_map(entries: Mapping[int, bytes]) -> bytes:
    """A map from numbers to bytes, in the order of its keys."""
    pieces = [u64(len(entries))]
    for key in sorted(entries):
        pieces += u64(key), u64(len(entries[key])), entries[key]
    return b"".join(pieces)


def _check_increasing(values: Sequence[int]) -> None:
    if not all(map(operator.lt, values, values[1:])):
        raise ValueError(f"{list(values)} is not strictly increasing")


def _other_tag(found: bytes, tag: bytes) -> str:
    """Say what is wrong with a tag; of another version of the protocol, what to do."""
    theirs, _, kind = found.partition(b"/")
    ours, _, _ = tag.partition(b"/")
    if theirs == ours or not kind or (not theirs.isalnum() and b"-" not in theirs):
        return "it is a different kind of message"
    version = theirs.decode("ascii", "replace")
    return (
        f"its sender uses version {version!r:.20} of the protocol and this release "
        f"uses {ours.decode()!r}: install the same release at all parties of the run"
    )


class Reader:
    """Takes the fields of one message in order, each under a limit.

    Args:
        data: The whole message.
        tag: The tag that it must start with.

    Raises:
        MalformedMessage: From every method: the bytes are anything else than the
            one encoding of what is asked for.
    """

    def __init__(self, data: bytes, tag: bytes) -> None:
        """Check size and tag."""
        self._what = tag.decode()
        if len(data) > MAX_MESSAGE_BYTES:
            raise self._wrong(
                f"it has {len(data)} bytes, more than the {MAX_MESSAGE_BYTES} allowed"
            )
        self._data = bytes(data)
        self._at = 0
        found = self.field("tag", limit=_MAX_TAG_BYTES)
        if found != tag:
            raise self._wrong(_other_tag(found, tag))

    def u64(self, name: str, *, low: int = 0, high: int = MAX_U64) -> int:
        """Take a number in ``[low, high]``."""
        if len(self._data) - self._at < _U64.size:
            raise self._wrong(f"it ends inside {name}")
        value: int = _U64.unpack_from(self._data, self._at)[0]
        self._at += _U64.size
        if not low <= value <= high:
            raise self._wrong(f"{name} is {value}, not in {low}..{high}")
        return value

    def float64(self, name: str) -> float:
        """Take a finite number."""
        value: float = _FLOAT.unpack(self._take(name, _FLOAT.size))[0]
        try:
            float64(value)
        except ValueError:
            raise self._wrong(f"{name} is not a finite number") from None
        return value

    def flag(self, name: str) -> bool:
        """Take a yes or no."""
        return bool(self.u64(name, high=1))

    def field(
        self, name: str, *, limit: int | None = None, size: int | None = None
    ) -> bytes:
        """Take LP bytes: of exactly ``size``, or of at most ``limit``."""
        length = self.u64(f"length of {name}")
        if size is not None and length != size:
            raise self._wrong(f"{name} has {length} bytes instead of {size}")
        if limit is not None and length > limit:
            raise self._wrong(
                f"{name} has {length} bytes, more than the {limit} allowed"
            )
        return self._take(name, length)

    def text(self, name: str, *, limit: int) -> str:
        """Take printable text of at most ``limit`` bytes of UTF-8."""
        try:
            text = self.field(name, limit=limit).decode()
        except UnicodeDecodeError:
            raise self._wrong(f"{name} is not UTF-8") from None
        if not text.isprintable():
            raise self._wrong(f"{name} holds unprintable characters")
        return text

    def name(self, name: str) -> str:
        """Take the name of a site, a run or a slot."""
        try:
            return check_name(self.text(name, limit=MAX_NAME_CHARS))
        except ValueError:
            raise self._wrong(f"{name} is not a name") from None

    def numbers(self, name: str, *, limit: int) -> tuple[int, ...]:
        """Take a strictly increasing list of at most ``limit`` numbers."""
        count = self.u64(f"count of {name}", high=limit)
        values = struct.unpack(f">{count}Q", self._take(name, _U64.size * count))
        self._increasing(name, values)
        return values

    def byte_map(
        self,
        name: str,
        *,
        max_entries: int,
        limit: int | None = None,
        size: int | None = None,
    ) -> dict[int, bytes]:
        """Take a map from numbers to bytes; ``limit`` and ``size`` as in field."""
        count = self.u64(f"count of {name}", high=max_entries)
        pairs = [
            (self.u64(f"key of {name}"), self.field(name, limit=limit, size=size))
            for _ in range(count)
        ]
        self._increasing(name, [key for key, _ in pairs])
        return dict(pairs)

    @property
    def is_at_end(self) -> bool:
        """Whether nothing is left."""
        return self._at == len(self._data)

    def end(self) -> None:
        """Check that nothing is left."""
        left = len(self._data) - self._at
        if left:
            raise self._wrong(f"{left} bytes follow its end")

    def _increasing(self, name: str, values: Sequence[int]) -> None:
        try:
            _check_increasing(values)
        except ValueError:
            raise self._wrong(f"{name} is not strictly increasing") from None

    def _take(self, name: str, length: int) -> bytes:
        if length > len(self._data) - self._at:
            raise self._wrong(f"it ends inside {name}")
        piece = self._data[self._at : self._at + length]
        self._at += length
        return piece

    def _wrong(self, fact: str) -> MalformedMessage:
        return MalformedMessage(f"malformed {self._what!r} message: {fact}")
