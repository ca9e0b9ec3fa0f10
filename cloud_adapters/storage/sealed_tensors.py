"""A digest in the header of a safetensors file, which shows that the file was damaged.

The format has no checksum: a changed bit in its values is read as another number, and
the model only predicts worse. So the header of a model's file has an entry with the
SHA-256 of the same file without that entry. It protects against accidents, not against
a person who changes both; ``crossfed export --sign`` does.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from federation.errors import CorruptObject

if TYPE_CHECKING:  # At run time it brings numpy.
    from federation.protocols import Buffer

METADATA = "__metadata__"
_ENTRY = "crossfed.sha256"
_ALIGNMENT = 8
_LENGTH_BYTES = 8
_PIECE_BYTES = 4 << 20


def header_bytes(header: Mapping[str, Any]) -> bytes:
    """A header as the file begins with it: its length, and padded JSON."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def sealed(header: Mapping[str, Any], values: Iterable["Buffer"]) -> dict[str, Any]:
    """Add the entry to a header.

    Args:
        header: Of the file.
        values: All bytes after it.
    """
    texts = {**header.get(METADATA, {}), _ENTRY: _digest(header, values)}
    return {**header, METADATA: texts}


def check(path: Path, name: str = "") -> None:
    """Compare a file with the digest in its header; a file without one passes.

    Args:
        path: A safetensors file, as its library has read it.
        name: What to call it in an error; its path if empty.

    Raises:
        CorruptObject: It has other values than were written.
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        header = json.loads(file.read(length))
        texts = dict(header.get(METADATA, {}))
        expected = texts.pop(_ENTRY, None)
        if expected is None:
            return
        plain = {name: each for name, each in header.items() if name != METADATA}
        if texts:
            plain = {METADATA: texts, **plain}
        pieces = iter(lambda: file.read(_PIECE_BYTES), b"")
        if _digest(plain, pieces) != expected:
            raise CorruptObject(
                f"{name or path} is damaged: its values are not those that were "
                "written (the SHA-256 in its header differs)"
            )


def _digest(header: Mapping[str, Any], values: Iterable["Buffer"]) -> str:
    whole = hashlib.sha256(header_bytes(header))
    for piece in values:
        whole.update(piece)
    return whole.hexdigest()
