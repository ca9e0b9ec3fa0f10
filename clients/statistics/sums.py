"""A site's sums: what its records add to the table of a job.

Everything is whole numbers from the first step on, computed in blocks of records.
Products of values of 2^30 do not fit into a float64, so values are cut in two: with
``u = 2^15 p + q``, sums of ``p p'``, ``p q'`` and ``q q'`` over a block are exact in a
float64 whatever the order, and a matrix product computes them.

Shape suffixes: k columns, r records of a block, v sums of a part.
"""

import math
from collections.abc import Mapping

import numpy as np
import torch
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
    SMALL,
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
_FINE_BITS = 15  # COARSE * FINE bins of the range
_CLOSE = 1e-3  # Of a bin's width: far more than rounding moves a value.

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
        sought = [c for c in table.numbers if c.spec.quantiles]
        cells = {c.name: fine_cells(table, c, data) for c in sought}
        return {SITES: [1], QUANTILES: quantile_sums(table, cells, before)}
    found = _Sums(table)
    for start in range(0, data.size, _BLOCK):
        found.add(data, slice(start, min(start + _BLOCK, data.size)))
    parts = {SITES: [1], SMALL: [0, 0], **found.parts(data)}
    return {p.name: parts[p.name] for p in stage.parts}


class _Sums:
    """The sums of the first stage, over columns of numbers."""

    def __init__(self, table: Table) -> None:
        self._table = table
        columns, num = table.numbers, len(table.numbers)
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

    def add(self, data: SiteColumns, rows: slice) -> None:
        """Add a block of records, column by column: a column stays in the cache."""
        num, size = len(self._table.numbers), rows.stop - rows.start
        num_kept = num if self._table.covariances else 1
        high_kr, low_kr = np.empty((num_kept, size)), np.empty((num_kept, size))
        units_kr = np.empty((num_kept, size))
        whole_r = np.ones(size, np.bool_)
        for at, column in enumerate(self._table.numbers):
            values_r = np.array(data.numbers[column.name][rows], np.float64)
            missing_r = self._add_values(at, column, values_r)
            if missing_r is not None:
                whole_r &= ~missing_r
            kept = at if self._table.covariances else 0
            units_r, high_r, low_r = units_kr[kept], high_kr[kept], low_kr[kept]
            on_grid(self._table, column, values_r, missing_r, out=units_r)
            self._sums[0, at] += int(units_r.sum())
            np.multiply(units_r, 2.0**-_HALF_BITS, out=high_r)
            np.rint(high_r, out=high_r)
            np.multiply(high_r, -(2.0**_HALF_BITS), out=low_r)
            np.add(low_r, units_r, out=low_r)
            for row, (a_r, b_r) in enumerate(_pairs(high_r, low_r)):
                self._squares[row, at] += int(torch.dot(a_r, b_r))
        self._complete += int(whole_r.sum())
        if self._table.covariances:
            if not whole_r.all():
                parts = (units_kr, high_kr, low_kr)
                units_kr, high_kr, low_kr = (part[:, whole_r] for part in parts)
            self._sums[1] += units_kr.sum(axis=1).astype(np.int64)
            for row, (a_kr, b_kr) in enumerate(_pairs(high_kr, low_kr)):
                self._products[row] += (a_kr @ b_kr.T).numpy().astype(np.int64)

    def _add_values(
        self, at: int, column: Column, values_r: Array
    ) -> NDArray[np.bool_] | None:
        """Count a column's values and clip them, in place.

        Returns:
            Which are missing; None if none is.
        """
        low, high = column.spec.bounds
        least, most = values_r.min(), values_r.max()  # NaN if there is one.
        missing_r, known_r = None, values_r
        if math.isnan(least):
            missing_r = np.isnan(values_r)
            known_r = values_r[~missing_r]
        self._counts[0, at] += known_r.size
        if not (least >= low and most <= high):
            self._counts[1, at] += int((known_r < low).sum())
            self._counts[2, at] += int((known_r > high).sum())
            np.clip(values_r, low, high, out=values_r)
            known_r = values_r if missing_r is None else values_r[~missing_r]
        if len(self._bins[at]):
            found = _bin(known_r, self._edges[at], equal=not column.spec.edges)
            self._bins[at] += np.bincount(found, minlength=len(self._bins[at]))
        if len(self._coarse[at]):
            found = _fine_bins(self._table, column, known_r)
            found >>= _FINE_BITS - COARSE.bit_length() + 1
            self._coarse[at] += np.bincount(found, minlength=COARSE)
        return missing_r

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


def _pairs(high: Array, low: Array) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What is multiplied: with torch, whose threads are the job's."""
    p, q = torch.from_numpy(high), torch.from_numpy(low)
    return [(p, p), (p, q), (q, q)]


def _joined(high: int, mixed: int, low: int) -> int:
    return (high << 2 * _HALF_BITS) + (mixed << _HALF_BITS) + low


def on_grid(
    table: Table,
    column: Column,
    values_r: Array,
    missing_r: NDArray[np.bool_] | None,
    *,
    out: Array,
) -> None:
    """Write clipped values as whole numbers from -2^h to 2^h, 0 for a missing one."""
    low, high = column.spec.bounds
    scale = 2.0**table.grid_bits
    np.multiply(values_r, 2 * scale / (high - low), out=out)
    np.subtract(out, (low + high) * (scale / (high - low)), out=out)
    np.rint(out, out=out)
    np.clip(out, -scale, scale, out=out)
    if missing_r is not None:
        out[missing_r] = 0.0


def _bin(values_r: Array, edges: Array, *, equal: bool) -> Integers:
    """Number of the bin of each value: ``[a, b)``, and ``[a, b]`` of the last one."""
    last = len(edges) - 2
    if not equal:
        places: Integers = np.searchsorted(edges, values_r, side="right") - 1
        np.minimum(places, last, out=places)
        return places
    # A division finds the bin, but for values that rounding may move over an edge.
    place_r = (values_r - edges[0]) * ((last + 1) / (edges[-1] - edges[0]))
    found: Integers = place_r.astype(np.int64)
    np.minimum(found, last, out=found)
    np.subtract(place_r, np.rint(place_r), out=place_r)
    close = np.flatnonzero(np.abs(place_r, out=place_r) < _CLOSE)
    if close.size:
        there = np.searchsorted(edges, values_r[close], side="right") - 1
        found[close] = np.minimum(there, last)
    return found


def _fine_bins(table: Table, column: Column, values_r: Array) -> Integers:
    """Which of 32,768 equal bins of the range each clipped value is in."""
    units_r = np.empty(values_r.shape)
    on_grid(table, column, values_r, None, out=units_r)
    shifted_r: Integers = units_r.astype(np.int64)
    shifted_r += 1 << table.grid_bits
    np.right_shift(shifted_r, table.grid_bits + 1 - _FINE_BITS, out=shifted_r)
    np.minimum(shifted_r, (1 << _FINE_BITS) - 1, out=shifted_r)
    return shifted_r


def fine_cells(table: Table, column: Column, data: SiteColumns) -> Integers:
    """Count a column's clipped values in each of the 32,768 fine bins."""
    values = np.array(data.numbers[column.name], np.float64)
    clipped = np.clip(values[~np.isnan(values)], *column.spec.bounds)
    bins = _fine_bins(table, column, clipped)
    return np.bincount(bins, minlength=COARSE * FINE)


def quantile_sums(
    table: Table, cells: Mapping[str, Integers], before: Sums
) -> list[int]:
    """What a stage asks of quantiles, from the fine bins of each column.

    Args:
        table: What the job asks.
        cells: Values in each fine bin, by column.
        before: Sums over all sites of the stage before; empty for the first.
    """
    found: list[Integers] = [
        c.reshape(COARSE, FINE).sum(axis=1) for c in cells.values()
    ]
    if before:
        asked = windows(table, before)
        found = [cells[c.name].reshape(COARSE, FINE)[at] for c, _, at, _, _ in asked]
    return [int(n) for row in found for n in row]


def _cells(column: Column, codes: Mapping[str, NDArray[np.int32]]) -> list[int]:
    """Records of each category, and of all others together."""
    found = codes[column.name]
    size = len(column.spec.categories) + 1
    return [int(n) for n in np.bincount(found[found >= 0], minlength=size)]
