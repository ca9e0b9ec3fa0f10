"""A digest in the header of a safetensors file, which shows that the file was damaged.

The format has no checksum: a changed bit in its values is read as another number, and
the model only predicts worse. So the header of a model's file has an entry with a
SHA-256 of all else: its other texts, then name, type, shape and values of each tensor,
in the order of names. Writers of the format differ in the order of tensors, so a file
that is written again with the same content is still whole. The entry protects against
accidents, not against a person who changes both; ``crossfed export --sign`` does.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
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


def sealed(header: Mapping[str, Any], values: Mapping[str, "Buffer"]) -> dict[str, Any]:
    """Add the entry to a header.

    Args:
        header: Of the file.
        values: Bytes of each tensor that has any.
    """
    texts = header.get(METADATA, {})
    digest = _digest(header, texts, lambda name: [values[name]])
    return {**header, METADATA: {**texts, _ENTRY: digest}}


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

        def values(tensor: str) -> Iterator[bytes]:
            begin, end = header[tensor]["data_offsets"]
            file.seek(_LENGTH_BYTES + length + begin)
            for left in range(end - begin, 0, -_PIECE_BYTES):
                yield file.read(min(left, _PIECE_BYTES))

        if _digest(header, texts, values) != expected:
            raise CorruptObject(
                f"{name or path} is damaged: its values are not those that were "
                "written (the SHA-256 in its header differs)"
            )


def _digest(
    header: Mapping[str, Any],
    texts: Mapping[str, str],
    values: Callable[[str], Iterable["Buffer"]],
) -> str:
    whole = hashlib.sha256(json.dumps(texts, sort_keys=True).encode())
    for name in sorted(header.keys() - {METADATA}):
        tensor = header[name]
        head = json.dumps([name, tensor["dtype"], tensor["shape"]])
        whole.update(head.encode())
        if 0 not in tensor["shape"]:
            for piece in values(name):
                whole.update(piece)
    return whole.hexdigest()
