"""Models as safetensors files, without a second copy of the model in memory.

The writer yields the file as a header and views of the arrays; the reader is the
safetensors library's own. The format: an 8-byte little-endian length, that many
bytes of JSON (name -> dtype, shape, offsets), then the raw values
(https://github.com/huggingface/safetensors, "Format"). Nothing in it is code.
"""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import safetensors
from numpy.typing import NDArray

from cloud_adapters.storage.sealed_tensors import METADATA, header_bytes, sealed
from federation.errors import CorruptObject
from federation.protocols import Buffer

Array = NDArray[Any]

MAX_HEADER_BYTES = 100_000_000  # The safetensors library reads no longer one.

_FORMAT_NAMES: Mapping[str, str] = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
_NUMPY_NAMES = {name: dtype for dtype, name in _FORMAT_NAMES.items()} | {
    "BF16": "uint16"
}


def pieces(
    tensors: Mapping[str, Array],
    metadata: Mapping[str, str],
    *,
    bfloat16: Collection[str] = (),
    is_sealed: bool = False,
) -> list[Buffer]:
    """Lay a safetensors file out as buffers, to be written one after another.

    Args:
        tensors: C-contiguous arrays by name. The buffers are views of them, in
            this order: they must not change until the file is written. For
            aligned values put types with longer values first.
        metadata: Texts for the file's header.
        bfloat16: Names of the tensors that are bfloat16, which NumPy lacks: their
            arrays hold the 16 bits of each value as uint16.
        is_sealed: Whether the header has a digest, see ``sealed_tensors``.

    Raises:
        ValueError: An array has a type that the format or this writer lacks, is
            not contiguous, or the header would be too long.
    """
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    buffers: dict[str, Buffer] = {}
    end = 0
    for name, array in tensors.items():
        if name == METADATA:
            raise ValueError(f"a tensor cannot be called {METADATA!r}")
        start, end = end, end + array.nbytes
        header[name] = {
            "dtype": _format_name(name, array, is_bfloat16=name in bfloat16),
            "shape": list(array.shape),
            "data_offsets": [start, end],
        }
        if array.size:
            buffers[name] = array.reshape(-1).view(np.uint8).data
    if is_sealed:
        header = sealed(header, buffers)
    text = header_bytes(header)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"the header has {len(text)} bytes, over {MAX_HEADER_BYTES}")
    return [text, *buffers.values()]


def read(data: bytes) -> dict[str, Array]:
    """Read a safetensors file; bfloat16 values are returned as uint16 bits.

    Raises:
        CorruptObject: The bytes are not a safetensors file, or hold a type that
            NumPy has not.
    """
    try:
        found = safetensors.deserialize(data)  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError as error:
        raise CorruptObject(f"not a safetensors file: {error}") from error
    tensors = {}
    for name, entry in found:
        dtype = _NUMPY_NAMES.get(entry["dtype"])
        if dtype is None:
            raise CorruptObject(
                f"tensor {name!r} has the type {entry['dtype']}, but only these are "
                f"possible: {', '.join(_NUMPY_NAMES)}"
            )
        values = np.frombuffer(entry["data"], dtype=np.dtype(dtype).newbyteorder("<"))
        tensors[name] = values.reshape(entry["shape"])
    return tensors


def _format_name(name: str, array: Array, *, is_bfloat16: bool) -> str:
    if not array.flags.c_contiguous:
        raise ValueError(f"tensor {name!r} is not C-contiguous: a view would be a copy")
    if array.dtype != array.dtype.newbyteorder("<"):
        raise ValueError(f"tensor {name!r} is not little-endian")
    if is_bfloat16:
        if array.dtype != np.uint16:
            raise ValueError(
                f"bfloat16 tensor {name!r} must be passed as uint16, not {array.dtype}"
            )
        return "BF16"
    found = _FORMAT_NAMES.get(array.dtype.name)
    if found is None:
        raise ValueError(f"tensor {name!r} has the type {array.dtype}: cannot write it")
    return found
