"""Shards as Parquet files, for tabular data and tools that read tables.

One row for each example: ``x`` is a list of fixed length (inputs, flattened),
``class`` an integer or ``y`` a list like ``x``, ``group`` the index of its group.
Shapes are in the index.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from clients.shards.index import RowLayout, Rows
from cloud_adapters.extras import naming_extras


def encode(rows: Rows, *, first: int) -> bytes:
    """Make a shard.

    Args:
        rows: Its examples.
        first: Number of the first one in its split; not kept.

    Raises:
        MissingExtra: pyarrow is not installed.
    """
    pa, parquet = _pyarrow()
    del first
    columns = {"x": _as_lists(pa, rows.inputs)}
    if rows.targets is not None:
        columns["y"] = _as_lists(pa, rows.targets)
    elif rows.classes is not None:
        columns["class"] = pa.array(rows.classes)
    if rows.groups is not None:
        columns["group"] = pa.array(rows.groups)
    sink = pa.BufferOutputStream()
    # Measurements hardly repeat, so a dictionary costs time and saves nothing.
    parquet.write_table(
        pa.table(columns), sink, compression="zstd", use_dictionary=False
    )
    return bytes(sink.getvalue())


def decode(content: bytes | memoryview, layout: RowLayout) -> Rows:
    """Read a shard's examples into arrays.

    Args:
        content: The shard, whose digest has been checked.
        layout: What the index says of it.

    Raises:
        ValueError: It is laid out in another way.
        MissingExtra: pyarrow is not installed.
    """
    pa, parquet = _pyarrow()
    names = ["x", "y"] if layout.target_type else ["x"]
    try:
        # Threads of its own would fight for the cores with the training.
        table = parquet.read_table(
            pa.BufferReader(pa.py_buffer(content)), columns=names, use_threads=False
        )
        lists = {name: table[name].combine_chunks() for name in names}
    except (pa.ArrowException, KeyError) as error:
        raise ValueError(f"it is not a table with {' and '.join(names)}") from error
    inputs = _as_array(
        lists["x"], layout.examples, layout.input_shape, layout.input_type
    )
    if not layout.target_type:
        return Rows(inputs=inputs)
    return Rows(
        inputs=inputs,
        targets=_as_array(
            lists["y"], layout.examples, layout.target_shape, layout.target_type
        ),
    )


@naming_extras()
def _pyarrow() -> tuple[Any, Any]:
    import pyarrow as pa  # noqa: PLC0415 -- slow to import, and rarely needed
    from pyarrow import parquet  # noqa: PLC0415

    return pa, parquet


def example_bytes(rows: Rows) -> int:
    """Bytes that each of some examples takes before compression."""
    arrays = (rows.inputs, rows.targets, rows.classes, rows.groups)
    return max(1, sum(a.nbytes // len(a) for a in arrays if a is not None))


def _as_lists(pa: Any, values: NDArray[Any]) -> Any:
    flat = np.asarray(values, order="C").reshape(len(values), -1)
    return pa.FixedSizeListArray.from_arrays(pa.array(flat.reshape(-1)), flat.shape[1])


def _as_array(
    lists: Any, examples: int, shape: tuple[int, ...], dtype: str
) -> NDArray[Any]:
    values = lists.flatten().to_numpy(zero_copy_only=False)
    if values.dtype != np.dtype(dtype):
        raise ValueError(f"values are {values.dtype}, and the index says {dtype}")
    return np.asarray(values.reshape((examples, *shape)))
