"""What all key services share: contexts as bytes, and the kind of a wrapped key.

A wrapped key begins with the kind of its service, so that a key of another service
is named as such instead of looking like damage.
"""

import json
from collections.abc import Mapping

from federation.errors import CorruptObject, KeyRefused

DATA_KEY_BYTES = 32
MAX_WRAPPED_BYTES = 960  # What the header of an encrypted object has room for.

KINDS = ("file", "aws-kms", "gcp-kms")

_TO_JSON = json.JSONEncoder(sort_keys=True, separators=(",", ":"))


def context_bytes(context: Mapping[str, str]) -> bytes:
    """Encode a context in its only form: JSON, sorted, in ASCII."""
    return _TO_JSON.encode(dict(context)).encode("ascii")


def check_data_key(plaintext: bytes) -> bytes:
    """Check the length of a data key and return it.

    Raises:
        ValueError: It has another.
    """
    if len(plaintext) != DATA_KEY_BYTES:
        raise ValueError(
            f"a data key must have {DATA_KEY_BYTES} bytes, not {len(plaintext)}"
        )
    return plaintext


def mark(kind: str, blob: bytes) -> bytes:
    """Put the kind of a service before what it wrapped."""
    return kind.encode() + b":" + blob


def unmark(kind: str, wrapped: bytes, name: str) -> bytes:
    """Return what a service of this kind wrapped.

    Raises:
        KeyRefused: A service of another kind wrapped it.
        CorruptObject: No service did.
    """
    found, separator, blob = wrapped.partition(b":")
    if separator and found == kind.encode():
        return blob
    for other in KINDS:
        if separator and found == other.encode():
            raise KeyRefused(
                f"the object's key was wrapped by a key of the kind {other!r}, not by "
                f"{name}: set storage.encryption.key to the key that the object was "
                "written with"
            )
    raise CorruptObject(f"this is not a key wrapped by {name}")
