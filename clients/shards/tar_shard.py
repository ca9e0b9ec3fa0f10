"""Shards as WebDataset has them: a tar file with a few members for each example.

Example 7 is ``000000007.x.npy`` (inputs, NumPy's format 1.0) with ``000000007.cls``
(its class, decimal) or ``000000007.y.npy`` (targets). Members of one example follow
each other and have one stem, which is all that WebDataset asks for
(https://github.com/webdataset/webdataset, "The WebDataset Format"), so its loader and
``tar xf`` read them. All examples of a shard take the same number of bytes, so we read
them as one array without looking at the members.

The bytes depend only on the examples: no times, no owners.
"""

import io
import tarfile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clients.shards.index import RowLayout, Rows

_BLOCK = 512
_END = b"\0" * (2 * _BLOCK)


def encode(rows: Rows, *, first: int) -> bytes:
    """Make a shard.

    Args:
        rows: Its examples.
        first: Number of the first one in its split.
    """
    # Not ascontiguousarray, which makes a scalar a vector.
    inputs = np.asarray(rows.inputs, order="C")
    input_header = _npy_header(inputs.dtype, inputs.shape[1:])
    targets = None if rows.targets is None else np.asarray(rows.targets, order="C")
    target_header = (
        b"" if targets is None else _npy_header(targets.dtype, targets.shape[1:])
    )
    pieces: list[bytes] = []
    for i in range(len(inputs)):
        number = first + i
        pieces += _member(f"{number:09d}.x.npy", input_header + inputs[i].tobytes())
        if targets is not None:
            content = target_header + targets[i].tobytes()
            pieces += _member(f"{number:09d}.y.npy", content)
        elif rows.classes is not None:
            pieces += _member(f"{number:09d}.cls", str(int(rows.classes[i])).encode())
    return b"".join([*pieces, _END])


def decode(content: bytes | memoryview, layout: RowLayout) -> Rows:
    """View a shard's examples, without a copy.

    Args:
        content: The shard, whose digest has been checked.
        layout: What the index says of it.

    Raises:
        ValueError: It is laid out in another way.
    """
    input_type = np.dtype(layout.input_type)
    input_header = _npy_header(input_type, layout.input_shape)
    input_bytes = len(input_header) + _size(input_type, layout.input_shape)
    stride = target_at = _BLOCK + _padded(input_bytes)
    target_type = np.dtype(layout.target_type or "u1")
    target_header = b""
    if layout.target_type:
        target_header = _npy_header(target_type, layout.target_shape)
        target_bytes = len(target_header) + _size(target_type, layout.target_shape)
        stride += _BLOCK + _padded(target_bytes)
    elif layout.has_classes:
        stride += 2 * _BLOCK
    if len(content) != layout.examples * stride + len(_END):
        raise ValueError(
            f"{len(content)} bytes do not hold {layout.examples} examples of {stride}"
        )
    _check_member(content, 0, f"{layout.first:09d}.x.npy", input_header)
    last = layout.examples - 1
    name = f"{layout.first + last:09d}.x.npy"
    _check_member(content, last * stride, name, input_header)
    if layout.target_type:
        name = f"{layout.first:09d}.y.npy"
        _check_member(content, target_at, name, target_header)

    def view(
        at: int, header: bytes, dtype: np.dtype[Any], shape: tuple[int, ...]
    ) -> NDArray[Any]:
        inner = np.empty(shape, dtype).strides if 0 not in shape else (0,) * len(shape)
        return np.ndarray(
            (layout.examples, *shape),
            dtype,
            buffer=content,
            offset=at + _BLOCK + len(header),
            strides=(stride, *inner),
        )

    targets = (
        view(target_at, target_header, target_type, layout.target_shape)
        if layout.target_type
        else None
    )
    inputs = view(0, input_header, input_type, layout.input_shape)
    return Rows(inputs=inputs, targets=targets)


def classes_of(content: bytes | memoryview) -> NDArray[np.int64]:
    """Read the classes of a shard as any reader of tar files does.

    Raises:
        ValueError: It is no tar file, or a class is not a number.
    """
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
            named = [m for m in archive if m.name.endswith(".cls")]
            files = [archive.extractfile(member) for member in named]
            return np.array([int(f.read()) for f in files if f], dtype=np.int64)
    except tarfile.TarError as error:
        raise ValueError(f"it is not a tar file: {error}") from error


def example_bytes(rows: Rows) -> int:
    """Bytes that each of some examples takes."""
    one = Rows(
        inputs=rows.inputs[:1],
        targets=None if rows.targets is None else rows.targets[:1],
        classes=None if rows.classes is None else rows.classes[:1],
    )
    return len(encode(one, first=0)) - len(_END)


def _member(name: str, content: bytes) -> tuple[bytes, bytes, bytes]:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(content), 0o444
    padding = b"\0" * (_padded(len(content)) - len(content))
    return info.tobuf(tarfile.USTAR_FORMAT), content, padding


def _check_member(
    content: bytes | memoryview, at: int, name: str, header: bytes
) -> None:
    found = bytes(content[at : at + len(name) + 1])
    start = at + _BLOCK
    if (
        found != name.encode() + b"\0"
        or bytes(content[start : start + len(header)]) != header
    ):
        raise ValueError(f"there is no member {name!r} as the index describes it")


def _npy_header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    buffer = io.BytesIO()
    described = {
        "descr": np.lib.format.dtype_to_descr(dtype),
        "fortran_order": False,
        "shape": shape,
    }
    np.lib.format.write_array_header_1_0(buffer, described)
    return buffer.getvalue()


def _size(dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    return dtype.itemsize * int(np.prod(shape, dtype=np.int64))


def _padded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK
