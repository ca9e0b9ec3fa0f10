"""A site's sums: what its records add to the table of a job.

Everything is whole numbers from the first step on, computed in blocks of records.
Products of values of 2^30 do not fit into a float64, so values are cut in two: with
``u = 2^15 p + q``, sums of ``p p'``, ``p q'`` and ``q q'`` over a block are exact in a
float64 whatever the order, and a matrix product computes them.

Shape suffixes: k columns, r records of a block, v sums of a part.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from clients.statistics.columns import SiteColumns
from federation.job.statistics_table import (
    CATEGORIES,
    COARSE,
    COUNTS,
    FINE,
    HISTOGRAMS,
    PRODUCTS,
    QUANTILES,
    SITES,
    SQUARES,
    SUMS,
    Column,
    Stage,
    Sums,
    Table,
    windows,
)

_BLOCK = 1 << 14
_HALF_BITS = 15
_FINE_BITS = 16  # COARSE * FINE bins of the range

Array = NDArray[np.float64]
Integers = NDArray[np.int64]


def sums_of(table: Table, stage: Stage, data: SiteColumns, before: Sums) -> Sums:
    """Add up what a stage asks, without noise.

    Args:
        table: What the job asks.
        stage: What this round asks of it.
        data: The site's columns.
        before: Sums over all sites of the stage before; empty for the first.
    """
    if before:
        fine_v = _fine(table, data, before)
        return {SITES: [1], QUANTILES: fine_v.tolist()}
    found = _Sums(table)
    for values_kr in _blocks(table.numbers, data):
        found.add(values_kr)
    parts = {SITES: [1], **found.parts(data)}
    return {p.name: parts[p.name] for p in stage.parts}


def _blocks(columns: Sequence[Column], data: SiteColumns) -> Iterator[Array]:
    """Values of all columns of numbers, block by block, NaN where one is missing."""
    for start in range(0, data.size, _BLOCK):
        rows = slice(start, min(start + _BLOCK, data.size))
        values_kr = np.empty((len(columns), rows.stop - rows.start))
        for at, column in enumerate(columns):
            values_kr[at] = data.numbers[column.name][rows]
        yield values_kr


class _Sums:
    """The sums of the first stage, over columns of numbers."""

    def __init__(self, table: Table) -> None:
        self._table = table
        columns, num = table.numbers, len(table.numbers)
        bounds = np.array([c.spec.bounds for c in columns]).reshape(num, 2)
        self._low, self._high = bounds[:, :1], bounds[:, 1:]
        self._edges = [np.array(c.spec.bin_edges) for c in columns]
        self._complete = 0
        self._counts = np.zeros((3, num), np.int64)  # present, below, above
        self._sums = np.zeros((2, num), np.int64)  # with a value, complete records
        self._squares = np.zeros((3, num), np.int64)
        self._products = np.zeros((3, num, num), np.int64)
        self._bins = [np.zeros(max(len(e) - 1, 0), np.int64) for e in self._edges]
        self._coarse = [
            np.zeros(COARSE * bool(c.spec.quantiles), np.int64) for c in columns
        ]

    def add(self, values_kr: Array) -> None:
        """Add a block of records."""
        missing_kr = np.isnan(values_kr)
        self._counts[0] += (~missing_kr).sum(axis=1)
        self._counts[1] += (values_kr < self._low).sum(axis=1)
        self._counts[2] += (values_kr > self._high).sum(axis=1)
        np.clip(values_kr, self._low, self._high, out=values_kr)
        self._add_bins(values_kr, missing_kr)
        units_kr = on_grid(self._table, values_kr, self._low, self._high)
        self._sums[0] += units_kr.sum(axis=1).astype(np.int64)
        high_kr = np.rint(units_kr * 2.0**-_HALF_BITS)
        low_kr = units_kr - high_kr * 2.0**_HALF_BITS
        for at, (a, b) in enumerate(
            ((high_kr, high_kr), (high_kr, low_kr), (low_kr, low_kr))
        ):
            self._squares[at] += np.einsum("kr,kr->k", a, b).astype(np.int64)
        whole_r = ~missing_kr.any(axis=0)
        self._complete += int(whole_r.sum())
        if self._table.covariances:
            if not whole_r.all():
                high_kr, low_kr = high_kr[:, whole_r], low_kr[:, whole_r]
                units_kr = units_kr[:, whole_r]
            self._sums[1] += units_kr.sum(axis=1).astype(np.int64)
            self._products[0] += (high_kr @ high_kr.T).astype(np.int64)
            self._products[1] += (high_kr @ low_kr.T).astype(np.int64)
            self._products[2] += (low_kr @ low_kr.T).astype(np.int64)

    def _add_bins(self, values_kr: Array, missing_kr: NDArray[np.bool_]) -> None:
        for at, column in enumerate(self._table.numbers):
            if not (len(self._bins[at]) or len(self._coarse[at])):
                continue
            values_r = values_kr[at]
            if missing_kr[at].any():
                values_r = values_r[~missing_kr[at]]
            if len(self._bins[at]):
                found = _bin(values_r, self._edges[at], equal=not column.spec.edges)
                self._bins[at] += np.bincount(found, minlength=len(self._bins[at]))
            if len(self._coarse[at]):
                found = _fine_bins(self._table, column, values_r) // FINE
                self._coarse[at] += np.bincount(found, minlength=COARSE)

    def parts(self, data: SiteColumns) -> Sums:
        """Sums of all parts, in the order of the table."""
        table, num = self._table, len(self._table.numbers)
        present = {c.name: int((data.codes[c.name] >= 0).sum()) for c in table.words}
        for column, count in zip(table.numbers, self._counts[0], strict=True):
            present[column.name] = int(count)
        beyond = self._counts[1:].flatten().tolist()
        high, mixed, low = self._products.tolist()
        return {
            COUNTS: [
                data.size,
                self._complete,
                *(present[c.name] for c in table.columns),
                *beyond,
            ],
            SUMS: self._sums[: 1 + table.covariances].flatten().tolist(),
            SQUARES: [_joined(h, 2 * m, n) for h, m, n in self._squares.T.tolist()],
            PRODUCTS: [
                _joined(high[i][j], mixed[i][j] + mixed[j][i], low[i][j])
                for i in range(num)
                for j in range(i, num)
            ],
            HISTOGRAMS: [int(n) for row in self._bins for n in row],
            CATEGORIES: [n for c in table.words for n in _cells(c, data.codes)],
            QUANTILES: [int(n) for row in self._coarse for n in row],
        }


def _joined(high: int, mixed: int, low: int) -> int:
    return (high << 2 * _HALF_BITS) + (mixed << _HALF_BITS) + low


def on_grid(table: Table, values_kr: Array, low_k: Array, high_k: Array) -> Array:
    """Whole numbers from -2^h to 2^h for values within bounds; 0 for NaN."""
    scale = 2.0**table.grid_bits
    units_kr = (2 * values_kr - (low_k + high_k)) * (scale / (high_k - low_k))
    np.rint(units_kr, out=units_kr)
    np.clip(units_kr, -scale, scale, out=units_kr)
    return np.nan_to_num(units_kr, copy=False, nan=0.0)


def _bin(values_r: Array, edges: Array, *, equal: bool) -> Integers:
    """Number of the bin of each value: ``[a, b)``, and ``[a, b]`` of the last one."""
    last = len(edges) - 2
    if not equal:
        places: Integers = np.searchsorted(edges, values_r, side="right") - 1
        return np.minimum(places, last, out=places)
    # A division finds the bin but for rounding, as in numpy.histogram.
    scale = (last + 1) / (edges[-1] - edges[0])
    found: Integers = np.clip(((values_r - edges[0]) * scale).astype(np.int64), 0, last)
    found -= values_r < edges[found]
    found += (values_r >= edges[found + 1]) & (found < last)
    return found


def _fine_bins(table: Table, column: Column, values_r: Array) -> Integers:
    """Which of 65,536 equal bins of the range each value is in."""
    low, high = column.spec.bounds
    clipped_r = np.clip(values_r, low, high)
    units_r = on_grid(table, clipped_r, np.array(low), np.array(high))
    shifted_r = units_r.astype(np.int64) + (1 << table.grid_bits)
    shifted_r >>= table.grid_bits + 1 - _FINE_BITS
    found: Integers = np.minimum(shifted_r, (1 << _FINE_BITS) - 1)
    return found


def _fine(table: Table, data: SiteColumns, before: Sums) -> Integers:
    """Count the values of each quantile's coarse bin in fine bins."""
    found = list[Integers]()
    bins: Mapping[str, Integers] = {
        c.name: _fine_bins_of(table, c, data) for c in table.numbers if c.spec.quantiles
    }
    for column, _, at, _, _ in windows(table, before):
        inside = bins[column.name] - at * FINE
        inside = inside[(inside >= 0) & (inside < FINE)]
        found.append(np.bincount(inside, minlength=FINE))
    return np.concatenate(found)


def _fine_bins_of(table: Table, column: Column, data: SiteColumns) -> Integers:
    values = np.asarray(data.numbers[column.name], np.float64)
    return _fine_bins(table, column, values[~np.isnan(values)])


def _cells(column: Column, codes: Mapping[str, NDArray[np.int32]]) -> list[int]:
    """Records of each category, and of all others together."""
    found = codes[column.name]
    size = len(column.spec.categories) + 1
    return [int(n) for n in np.bincount(found[found >= 0], minlength=size)]
