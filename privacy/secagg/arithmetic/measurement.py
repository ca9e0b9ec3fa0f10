"""Norm and bounds of an update, which are found before it is clipped and rounded.

Shape suffixes: d values of the update, c values of one chunk.
"""

import math
from dataclasses import dataclass

import numpy as np

from federation.mapped import give_back
from federation.vectors import Vector, is_finite, squared_norm
from privacy.keystream import CHUNK_WORDS, in_ranges
from privacy.secagg.arithmetic.ring import UpdateNotFinite

# Squares are added in float32 within rows of 256, which loses at most 256 * 2^-24
# of the sum, 2^-17 of the norm; rows are added in float64.
NORM_ERROR = 2.0**-16  # relative

_ROW_VALUES = 256
_CHUNK_ROWS = CHUNK_WORDS // _ROW_VALUES
_BLOCK_CHUNKS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The result of one pass over an update; private to the site.

    Attributes:
        norm: Euclidean norm.
        bounds: For each chunk, a bound on the absolute value of its elements.
    """

    norm: float
    bounds: Vector


def measure(update_d: Vector, *, threads: int = 1) -> Measurement:
    """Find an update's norm and bounds on its elements.

    Raises:
        UpdateNotFinite: A value is NaN or infinite.
    """
    return _measure(update_d, None, threads=threads)


def measure_exactly(update_d: Vector) -> Measurement:
    """Find an update's norm to 2^-36 of itself, in float64; slower than ``measure``.

    Clipping by such a norm is a projection onto a ball but for that error, and so
    moves no two updates further apart, which noise inside a sum relies on.

    Raises:
        UpdateNotFinite: A value is NaN or infinite.
    """
    if not is_finite(update_d):
        raise UpdateNotFinite(
            "the update holds NaN or infinity: this site declines the round"
        )
    squares, bounds = [], []
    for begin in range(0, update_d.size, CHUNK_WORDS):
        exact_c = update_d[begin : begin + CHUNK_WORDS].astype(np.float64)
        squares.append(float(exact_c @ exact_c))
        bounds.append(float(np.abs(exact_c).max()))
    return Measurement(
        norm=math.sqrt(math.fsum(squares)),
        bounds=np.array(bounds, np.float32) * np.float32(1 + NORM_ERROR),
    )


def subtract_(local_d: Vector, global_d: Vector, *, threads: int = 1) -> Measurement:
    """Take the global weights from the local ones, in place, and measure the rest.

    Measuring while a chunk is in the cache costs a third of a pass of its own.

    Raises:
        UpdateNotFinite: A difference is NaN or infinite.
        ValueError: The vectors differ in length.
    """
    if local_d.shape != global_d.shape:
        raise ValueError(f"{local_d.size} local and {global_d.size} global weights")
    return _measure(local_d, global_d, threads=threads)


def _measure(
    update_d: Vector, subtrahend_d: Vector | None, *, threads: int
) -> Measurement:
    num_chunks = -(-update_d.size // CHUNK_WORDS)
    squares, bounds = np.zeros(num_chunks), np.zeros(num_chunks, np.float32)
    # A difference must be in the cache to be measured; a pass alone goes in blocks.
    step = CHUNK_WORDS * (_BLOCK_CHUNKS if subtrahend_d is None else 1)

    @np.errstate(over="ignore", invalid="ignore", under="ignore")
    def measure_range(start: int, stop: int) -> None:
        row_squares = np.zeros(_BLOCK_CHUNKS * _CHUNK_ROWS, np.float32)
        first_rows = np.arange(0, row_squares.size, _CHUNK_ROWS)
        for begin in range(start, stop, _BLOCK_CHUNKS * CHUNK_WORDS):
            end = min(begin + _BLOCK_CHUNKS * CHUNK_WORDS, stop)
            row_squares[:] = 0
            for first in range(begin, end, step):
                here = slice(first, min(first + step, end))
                if subtrahend_d is not None:
                    np.subtract(update_d[here], subtrahend_d[here], out=update_d[here])
                    give_back(subtrahend_d[here])
                first_row = (first - begin) // _ROW_VALUES
                _write_row_squares(update_d[here], row_squares[first_row:])
            chunk = begin // CHUNK_WORDS
            done = slice(chunk, chunk + -(-(end - begin) // CHUNK_WORDS))
            sums = np.add.reduceat(row_squares, first_rows, dtype=np.float64)
            largest = np.maximum.reduceat(row_squares, first_rows)
            squares[done] = sums[: done.stop - chunk]
            bounds[done] = np.sqrt(largest[: done.stop - chunk])

    in_ranges(measure_range, update_d.size, threads=threads)
    norm = math.sqrt(squares.sum())
    if not math.isfinite(norm):
        # A value is not finite, or squares overflowed in float32.
        if not is_finite(update_d):
            raise UpdateNotFinite(
                "the update holds NaN or infinity: this site declines the round"
            )
        norm = math.sqrt(squared_norm(update_d))
    return Measurement(norm=norm, bounds=bounds * np.float32(1 + NORM_ERROR))


def _write_row_squares(chunk_c: Vector, out: Vector) -> None:
    """Write sums of squares of rows of 256 values, the last one possibly shorter."""
    num_rows, rest = divmod(chunk_c.size, _ROW_VALUES)
    rows = chunk_c[: num_rows * _ROW_VALUES].reshape(num_rows, _ROW_VALUES)
    np.vecdot(rows, rows, out=out[:num_rows])
    if rest:
        out[num_rows] = np.dot(chunk_c[-rest:], chunk_c[-rest:])
