"""Decode the messages of ``privacy.secagg`` in a transcript, field by field.

They are decoded by the protocol's own readers, which refuse what is not the one
encoding of a message, so a message has no content besides the fields shown here.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass

import numpy as np

from federation.errors import ProtocolError
from privacy.secagg.agreement.certificate import Certificate
from privacy.secagg.agreement.contract import SUITE, Contract
from privacy.secagg.protocol import messages
from privacy.secagg.protocol.train import read_train

Value = str | int | float | bool | list[int] | list[str]

_MAX_SHOWN_BYTES = 64  # Digests, keys, signatures, shares; sealed shares are longer.
_MAX_TAG_BYTES = 32
_LENGTH_BYTES = 8
_MAX_DEPTH = 3  # A task's confirms hold confirms; a site may send deeper nonsense.
_SUITE = f"{SUITE}/".encode()


_READERS: Mapping[str, Callable[[bytes], object]] = {
    "contract": Contract.from_bytes,
    "train": read_train,
    "certificate": Certificate.from_bytes,
} | {
    kind.TAG.removeprefix(_SUITE).decode(): kind.from_bytes
    for kind in (
        messages.Offer,
        messages.Advert,
        messages.Book,
        messages.Confirm,
        messages.Confirms,
        messages.Head,
        messages.MaskedAnswer,
        messages.Decline,
        messages.Survivors,
        messages.Consent,
        messages.Reveal,
        messages.Shares,
    )
}


def kind_of(body: bytes) -> str | None:
    """Name a message by the tag that it begins with; None if there is none."""
    size = int.from_bytes(body[:_LENGTH_BYTES], "big")
    tag = body[_LENGTH_BYTES : _LENGTH_BYTES + size]
    if size > _MAX_TAG_BYTES or not tag.startswith(_SUITE):
        return None
    return tag.removeprefix(_SUITE).decode("ascii", "replace")


def decode(body: bytes) -> dict[str, Value]:
    """All fields of a message, those of messages inside it with dotted names.

    Returns:
        Values by name, for example ``head.context`` or ``self_shares[3]``. Bytes are
        hexadecimal digits; of more than 64 bytes there are size and SHA-256 instead.

    Raises:
        ProtocolError: The bytes are not a message of the protocol.
    """
    return dict(_walk("", _read(body), depth=0))


def _read(body: bytes) -> object:
    kind = kind_of(body)
    reader = _READERS.get(kind or "")
    if reader is None:
        raise ProtocolError(f"{kind!r} is not a known message")
    try:
        return reader(body)
    except ValueError as error:  # A contract whose fields leave no ring.
        raise ProtocolError(str(error)) from error


def _walk(name: str, value: object, *, depth: int) -> Iterator[tuple[str, Value]]:
    if isinstance(value, np.ndarray):  # Steps of few levels: shown as they travel.
        value = value.astype("<f4").tobytes()
    parts = list(_parts(name, value))
    for inner, part in parts:
        yield from _walk(inner, part, depth=depth)
    if isinstance(value, bytes):
        if kind_of(value) in _READERS and depth < _MAX_DEPTH:
            yield from _walk(name, _read(value), depth=depth + 1)
        else:
            yield name, _shown(value)
    elif not parts and not isinstance(value, Mapping):
        yield name, _plain(name, value)


def _parts(name: str, value: object) -> Iterator[tuple[str, object]]:
    """What is inside a message, a map, or a list of either."""
    if is_dataclass(value):
        for field in fields(value):
            inner = f"{name}.{field.name}" if name else field.name
            yield inner, getattr(value, field.name)
    elif isinstance(value, Mapping):
        for key, part in sorted(value.items()):
            yield f"{name}[{key}]" if name else str(key), part
    elif isinstance(value, tuple) and any(is_dataclass(part) for part in value):
        yield from ((f"{name}[{at}]", part) for at, part in enumerate(value, start=1))


def _plain(name: str, value: object) -> Value:
    if isinstance(value, tuple):
        return list(value)
    if value is None:
        return "none"
    if isinstance(value, (str, int, float)):
        return value
    raise TypeError(f"{name} is a {type(value).__name__}, which cannot be shown")


def _shown(value: bytes) -> str:
    if len(value) <= _MAX_SHOWN_BYTES:
        return value.hex()
    return f"{len(value):,} bytes, sha256 {hashlib.sha256(value).hexdigest()}"
