"""Messages to bytes and back: the only format between clouds.

A frame, all numbers little-endian::

    magic            8 bytes   b"crossfed"
    version          u32       2
    digest          32 bytes   SHA-256 of everything below
    kind             u32       1 task, 2 update, 3 evaluation, 4 failure,
                               5 secure task, 6 secure answer, 7 masked update
    header length    u32       bytes of the header, its padding included
    payload length   u64       bytes of the payload
    header                     canonical JSON, padded with spaces so that the
                               payload starts at a multiple of 64 bytes
    payload                    integers as i64, floats as f32, words as bytes,
                               body as bytes

The header states the sizes of the payload's parts that its kind of message has:
``num_integers``, ``num_floats``, ``words_bytes`` and ``body_bytes``. If the job's codec
sends floats in 16 bits, ``num_fp16`` or ``num_bf16`` replaces ``num_floats``, and the
payload holds IEEE halves or the upper halves of f32; with ``packed_bytes`` it holds the
bytes of a codec of fewer bits, with ``num_words64`` the words of a sum in few levels,
each a u64. The body is a task's ``secure`` or
another message's ``body``; the masked header of a masked update replaces the integers,
with the bits of its u64.

Numbers that may be fractions are ``float.hex`` text in the header, which is exact and
can express infinity and not-a-number. Every message has exactly one encoding: encoding
a decoded message gives the same bytes.

Input is hostile. Length is checked before content, version before meaning and digest
before use; any fault raises ``WireError``, and no memory is allocated because a length
field asks for it. The digest finds accidents, not attackers: the transport must prove
who sent a frame. Values *inside* vectors are not checked here but by the aggregator.

``wire_fields`` lists the content of each kind of message, ``wire_values`` the spelling
of header values.
"""

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import fields
from operator import attrgetter, is_

import numpy as np

from federation.errors import WireError
from federation.mapped import pieces
from federation.messages import RoundTask
from federation.protocols import Buffer
from federation.wire import wire_fields, wire_values
from federation.wire.wire_fields import (
    MAX_BODY_BYTES,
    MAX_FLOAT_VALUES,
    MAX_INTEGER_VALUES,
    MAX_MASKED_HEADER_WORDS,
    MAX_WORDS_BYTES,
    Kind,
    WireMessage,
)
from federation.wire.wire_values import (
    MAX_COUNT,
    MAX_PHASE_NAME_CHARS,
    MAX_PHASES,
    MAX_TEXT_CHARS,
    Fields,
    one_line,
)

__all__ = [
    "MAGIC",
    "MAX_BODY_BYTES",
    "MAX_COUNT",
    "MAX_FLOAT_VALUES",
    "MAX_HEADER_BYTES",
    "MAX_INTEGER_VALUES",
    "MAX_MASKED_HEADER_WORDS",
    "MAX_PHASES",
    "MAX_PHASE_NAME_CHARS",
    "MAX_TEXT_CHARS",
    "MAX_WORDS_BYTES",
    "VERSION",
    "WireMessage",
    "decode",
    "decode_all",
    "encode",
    "encode_bytes",
    "encoded_size",
    "encoded_sizes",
    "one_line",
]

MAGIC = b"crossfed"
VERSION = 2

MAX_HEADER_BYTES = 1 << 16

_LEAD = struct.Struct("<8sI32s")  # magic, version, digest
_LENGTHS = struct.Struct("<IIQ")  # kind, header length, payload length
_PREFIX_BYTES = _LEAD.size + _LENGTHS.size
_ALIGNMENT_BYTES = 64
# Of the message that goes to many sites at once: its fields, without the site.
_BUT_SITE: Mapping[type[WireMessage], "attrgetter[tuple[object, ...]]"] = {
    RoundTask: attrgetter(*(f.name for f in fields(RoundTask) if f.name != "site"))
}
_CANONICAL = json.JSONEncoder(
    allow_nan=False, sort_keys=True, separators=(",", ":"), check_circular=False
)


def encode(message: WireMessage) -> list[Buffer]:
    """Write a message as pieces that make a frame when joined.

    The vectors are pieces of their own and are not copied; they must not change
    until the frame has been sent.

    Raises:
        WireError: ``decode`` would refuse the message: a field is out of range, or
            a vector has another type or more than one dimension.
    """
    kind, members, parts = wire_fields.write(message)
    payload = [np.ascontiguousarray(part).data for part in parts]
    header = _padded(wire_values.spell(members))
    lengths = _LENGTHS.pack(kind, len(header), sum(p.nbytes for p in payload))
    digest = hashlib.sha256(lengths)
    digest.update(header)
    for piece in payload:
        for part in pieces(piece):
            digest.update(part)
    prefix = _LEAD.pack(MAGIC, VERSION, digest.digest()) + lengths
    return [prefix + header, *(p for p in payload if p.nbytes)]


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
    return encoded_sizes((message,))[0]


def encoded_sizes(messages: Sequence[WireMessage]) -> list[int]:
    """Bytes that ``encode`` would make of each message.

    Of messages in a row that differ only in their site, one header is written.

    Raises:
        WireError: See ``encode``.
    """
    sizes: list[int] = []
    last: WireMessage | None = None
    for message in messages:
        site = message.site
        if last is not None and _differ_in_site(message, last):
            wire_values.name_of(site, "site")  # All else was checked with the last.
        else:
            _, members, parts = wire_fields.write(message)
            chars = wire_values.spelled_size(members) - len(site)
            payload = sum([part.nbytes for part in parts])
            last = message
        whole = _PREFIX_BYTES + chars + len(site)
        sizes.append(whole + -whole % _ALIGNMENT_BYTES + payload)
    return sizes


def _differ_in_site(one: WireMessage, other: WireMessage) -> bool:
    """Whether two messages share all other objects."""
    others = _BUT_SITE.get(type(one))
    if others is None or type(one) is not type(other):
        return False
    return all(map(is_, others(one), others(other)))


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
        raise WireError("the bytes do not start like a crossfed message")
    if version != VERSION:
        older = "the sender" if version < VERSION else "this side"
        raise WireError(
            f"the message has format version {version}, but this side reads {VERSION}: "
            f"upgrade {older}, so that both have the same release of crossfed"
        )
    number, header_bytes, payload_bytes = _LENGTHS.unpack_from(frame, _LEAD.size)
    if header_bytes > MAX_HEADER_BYTES:
        raise WireError(
            f"the header has {header_bytes} bytes, more than the {MAX_HEADER_BYTES} "
            "allowed"
        )
    expected = _PREFIX_BYTES + header_bytes + payload_bytes
    if len(frame) != expected:
        raise WireError(f"the message has {len(frame)} bytes, but declares {expected}")
    # 3. Digest before use.
    found = hashlib.sha256()
    for part in pieces(frame[_LEAD.size :]):
        found.update(part)
    if found.digest() != digest:
        raise WireError("the message was damaged in transit: its digest is wrong")
    # 4. Meaning.
    kind = _kind(number)
    body = _PREFIX_BYTES + header_bytes
    fields = _parse_header(bytes(frame[_PREFIX_BYTES:body]))
    return wire_fields.read(kind, fields, frame[body:])


def decode_all(data: Buffer, *, limit: int) -> list[WireMessage]:
    """Read frames that stand one after another.

    Args:
        data: The frames and nothing else; see ``decode``.
        limit: How many there may be.

    Raises:
        WireError: They are not well-formed messages, or too many.
    """
    rest, found = memoryview(data).toreadonly().cast("B"), list[WireMessage]()
    while rest:
        if len(found) == limit:
            raise WireError(f"more than {limit} messages in one")
        size = _frame_bytes(rest)
        found.append(decode(rest[:size]))
        rest = rest[size:]
    return found


def _frame_bytes(data: memoryview) -> int:
    """How long the first frame says that it is; at most as long as the data."""
    if len(data) < _PREFIX_BYTES:
        return len(data)
    _, header_bytes, payload_bytes = _LENGTHS.unpack_from(data, _LEAD.size)
    return min(len(data), int(_PREFIX_BYTES + header_bytes + payload_bytes))


def _padded(header: str) -> bytes:
    text = header.encode("ascii")
    return text + b" " * (-(_PREFIX_BYTES + len(text)) % _ALIGNMENT_BYTES)


def _parse_header(header: bytes) -> Fields:
    try:
        fields = json.loads(header)
        # A repeated key, a NaN, a fraction written two ways or a wrong padding
        # does not survive being written again.
        canonical = isinstance(fields, dict) and (
            _padded(_CANONICAL.encode(fields)) == header
        )
    except (ValueError, RecursionError) as error:
        raise WireError("the header is not JSON, or is nested too deeply") from error
    if not canonical:
        raise WireError("the header is not a JSON object in canonical form")
    return fields  # type: ignore[no-any-return]


def _kind(number: int) -> Kind:
    try:
        return Kind(number)
    except ValueError as error:
        raise WireError(f"there is no message kind {number}") from error
