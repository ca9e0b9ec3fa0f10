"""The arrays of a site's state as a safetensors file, written and read in pieces.

A state may have several models' worth of values. So it is never a single ``bytes``: its
pieces are views of the arrays, and it is read range by range into arrays that an
allocator makes.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from federation.mapped import give_back
from federation.vectors import Arrays, Vector

PIECE_BYTES = 4 << 20
_ALIGNMENT = 8
_LENGTH_BYTES = 8
# Names of tensors and their places: a site keeps some for each tensor of its model.
_MAX_HEADER_BYTES = 16 << 20
_NAMES: Mapping[str, str] = {
    "float64": "F64",
    "int64": "I64",
    "uint64": "U64",
    "float32": "F32",
    "int32": "I32",
    "uint32": "U32",
    "float16": "F16",
    "int16": "I16",
    "uint16": "U16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
_TYPES = {short: np.dtype(name) for name, short in _NAMES.items()}

ReadRange = Callable[[int, int], bytes]
# Makes the vector of a name, shape (size,).
AllocateNamed = Callable[[str, int], Vector]


def pieces(arrays: Arrays) -> Iterator[memoryview]:
    """Yield a safetensors file, without a copy of the arrays.

    Raises:
        KeyError: An array has a type that is not kept.
    """
    # Long values first, so that all of them are aligned, as the library does it.
    ordered = sorted(arrays.items(), key=lambda item: (-item[1].itemsize, item[0]))
    header: dict[str, Any] = {}
    end = 0
    for name, array in ordered:
        start, end = end, end + array.nbytes
        header[name] = {
            "dtype": _NAMES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    yield memoryview(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
    for _, array in ordered:
        content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        for start in range(0, content.size, PIECE_BYTES):
            piece = content[start : start + PIECE_BYTES]
            yield piece.data
            give_back(piece)


def read(
    read_range: ReadRange, *, start: int, size: int, allocate: AllocateNamed
) -> Arrays:
    """Read what ``pieces`` wrote; also what the library wrote.

    Args:
        read_range: Reads so many bytes from a place on.
        start: Where the file begins.
        size: Bytes of the file.
        allocate: Makes arrays of float32.

    Raises:
        ValueError: It is no such file.
    """
    found: dict[str, NDArray[Any]] = {}
    length = int.from_bytes(read_range(start, _LENGTH_BYTES), "little")
    if length > min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
        raise ValueError(f"its header has {length} bytes")
    header = json.loads(read_range(start + _LENGTH_BYTES, length))
    header.pop("__metadata__", None)
    at, end = _LENGTH_BYTES + length, 0
    for name, about in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, shape = _TYPES[about["dtype"]], tuple(about["shape"])
        num_bytes = dtype.itemsize * math.prod(shape)
        if about["data_offsets"] != [end, end + num_bytes]:
            raise ValueError(f"its tensor {name!r:.80} has no place")
        end += num_bytes
        if at + end > size:
            break
        count = math.prod(shape)
        is_float = dtype == np.float32
        array = allocate(name, count) if is_float else np.empty(count, dtype)
        _fill(array, read_range, start + at + end - num_bytes)
        found[name] = array.reshape(shape)
    if at + end != size:
        raise ValueError(f"it has {size} bytes instead of {at + end}")
    return found


def _fill(array: NDArray[Any], read_range: ReadRange, start: int) -> None:
    content = array.view(np.uint8)
    for place in range(0, content.size, PIECE_BYTES):
        piece = content[place : place + PIECE_BYTES]
        piece[:] = np.frombuffer(read_range(start + place, piece.size), np.uint8)
        give_back(piece)
