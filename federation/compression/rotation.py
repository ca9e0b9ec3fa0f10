"""A shared randomised rotation, which spreads each value over a block.

Blocks of 4,096 values are multiplied by random signs and by a Hadamard matrix. What was
concentrated in a few values is then nearly Gaussian for any model, so that a few
levels of one step per block suit all of them (Suresh et al. 2017, arXiv:1611.00429,
section 3). The signs follow from a public seed of the run: all parties rotate alike,
and a sum of rotated vectors is the rotated sum.

The Hadamard matrix of 4,096 rows is the Kronecker product of two of 64, so a block is a
square of 64 x 64 values ``X``, and its rotation two matrix products. With the signs
``D``, ``R(X) = ((D X) H)^T H / 64``; the transpose saves a product from the left and
only permutes what comes out. As ``H H = 64 I``, twice the same product is 4,096 times
the identity, which gives the inverse, ``D ((Z H)^T H) / 64``.

Shape suffixes: d values of a vector, b its blocks of 4,096 values.
"""

import hashlib
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from federation.vectors import Vector

SIDE = 64
BLOCK_VALUES = SIDE * SIDE


def num_blocks(size: int) -> int:
    """Blocks that hold ``size`` values; the last one is filled up with zeros."""
    return -(-size // BLOCK_VALUES)


def padded(size: int) -> int:
    """Length of a rotated vector of ``size`` values."""
    return num_blocks(size) * BLOCK_VALUES


class Rotation:
    """The rotation of one run; not for several threads at a time.

    Args:
        seed: Public bytes that every party of the run knows.
    """

    def __init__(self, seed: bytes) -> None:
        """Derive the signs, the same for every block."""
        bits = hashlib.shake_256(b"crossfed/rotation" + seed).digest(BLOCK_VALUES // 8)
        ones = np.unpackbits(np.frombuffer(bits, np.uint8)).reshape(SIDE, SIDE)
        self._signs = (1 - 2 * ones.astype(np.float32)).astype(np.float32)
        self._hadamard = {
            np.dtype(kind): _hadamard(SIDE).astype(kind)
            for kind in (np.float32, np.float64)
        }

    def forward(self, blocks_b: Vector, *, out: Vector, factor: float = 1.0) -> Vector:
        """Rotate blocks, norms unchanged but for ``factor``.

        Args:
            blocks_b: Whole blocks, flat; overwritten.
            out: As many values, float32.
            factor: What the result is multiplied by.
        """
        signed = self._signs * np.float32(factor / SIDE)
        square = blocks_b.reshape(-1, SIDE, SIDE)
        np.multiply(square, signed, out=square)
        self._product(square, out=out)
        return out

    def backward(
        self, blocks_b: Vector, steps_b: NDArray[np.float64], *, exact: bool
    ) -> Vector:
        """Rotate whole numbers back, and multiply each block by its step.

        Args:
            blocks_b: Whole numbers as float32, flat, in whole blocks; overwritten.
            steps_b: What one unit of each block is worth.
            exact: Whether partial sums of a block stay below 2^24 in magnitude: the
                products are then exact in float32, in any order, so that all machines
                find the same bits. Otherwise they are made in float64, which is exact
                up to 2^53.

        Returns:
            Values in new memory, float32, each rounded once from an exact product.
        """
        kind: np.dtype[Any] = np.dtype(np.float32 if exact else np.float64)
        square = blocks_b.reshape(-1, SIDE, SIDE).astype(kind, copy=False)
        whole = np.empty(blocks_b.size, kind)
        self._product(square, out=whole)
        # A sign changes no bit but one: each value is multiplied once, in float64.
        factors = self._signs.astype(np.float64) * (steps_b / SIDE)[:, None, None]
        found = np.empty(blocks_b.size, np.float32)
        np.multiply(
            whole.reshape(factors.shape),
            factors,
            out=found.reshape(factors.shape),
            casting="same_kind",
        )
        return found

    def _product(self, square: NDArray[Any], *, out: NDArray[Any]) -> None:
        """``(X H)^T H`` of each block."""
        hadamard = self._hadamard[square.dtype]
        # One small product a block: BLAS then works on one thread, as on busy cores it
        # should, and the result stays in the cache.
        first = np.matmul(square, hadamard)
        turned = np.ascontiguousarray(first.swapaxes(1, 2))
        np.matmul(turned, hadamard, out=out.reshape(-1, SIDE, SIDE))


def _hadamard(order: int) -> NDArray[np.float64]:
    """Sylvester's matrix, of entries +-1."""
    matrix = np.ones((1, 1))
    for _ in range(int(math.log2(order))):
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix
