"""Cells of exact statistics that too few of a site's records are in.

The counts of a column's cells add up to the number of its values, which is known. So a
single hidden cell would be what is left over. Here cells are hidden, the smallest
first, until those that are left have enough records, and all hidden ones together too,
or there are none (complementary suppression: Cox 1980, doi:10.1080/01621459.1980.
10477481). A hidden cell counts as 0, and the result is too small by it.

Sums are hidden, too, where they are those of a few records: of the only values that are
within a column's bounds, or that are not its most common one, as with a rare word. So
are sums over the records without a gap, if a column has few others: a subtraction
would show them. What is not seen here: products of columns with few different values
count small groups. An operator who has such columns gives no ``products``.

With differential privacy nothing is hidden: whether a cell is would tell its size.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from clients.statistics.columns import SiteColumns
from clients.statistics.sums import Array, on_grid
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
    Sums,
    Table,
)


def hide_small(table: Table, sums: Sums, data: SiteColumns, least: int) -> Sums:
    """Hide cells of fewer than ``least`` records of a site, and sums over so few.

    A column with fewer values is hidden as a whole, and so is a site with fewer
    records. What is left of a count below or above the bounds is at least as large.

    Args:
        table: What the job asks.
        sums: Without noise.
        data: The site's columns.
        least: Fewest records of a cell.
    """
    found = {name: list(part) for name, part in sums.items()}
    if COUNTS not in found:
        cells = [FINE] * (len(found[QUANTILES]) // FINE)
        return {**found, QUANTILES: list(_hidden(found[QUANTILES], cells, least))}
    counts = found[COUNTS]
    records, complete = counts[:2]
    if records < least:
        return {n: p if n == SITES else [0] * len(p) for n, p in found.items()}
    ends = _hide_cells(table, found, least)
    few, is_hidden = _of_few(table, data, least)
    is_hidden |= complete < least
    num, first = len(table.numbers), 2 + len(table.columns)
    for at, column in enumerate(table.numbers):
        place, beyond = 2 + table.columns.index(column), (first + at, first + num + at)
        size, sizes = counts[place], [counts[each] for each in beyond]
        is_hidden |= 0 < size - complete < least
        is_narrow = 0 < size - sum(sizes) < least
        for each, cell in zip(beyond, ends.get(column.name, ((), ())), strict=True):
            if is_narrow or _is_told(counts[each], cell, least):
                counts[each] = 0
        if size < least or is_narrow or column.name in few:
            found[SUMS][at] = found[SQUARES][at] = counts[place] = 0
    if is_hidden:
        counts[1] = 0
        found[SUMS][num:] = [0] * (len(found[SUMS]) - num)
        found |= {n: [0] * len(p) for n, p in found.items() if n == PRODUCTS}
    return found


def _is_told(beyond: int, cell: Sequence[int], least: int) -> bool:
    """Whether records beyond a bound, or the others in the cell beside it, are few.

    Args:
        beyond: Records beyond the bound.
        cell: Size of the cell, which they are in, and of what is shown of it; empty
            without cells.
        least: Fewest records of a cell.
    """
    if not cell:
        return beyond < least
    size, shown = cell
    return beyond < least or not shown or 0 < size - beyond < least


def _hide_cells(
    table: Table, found: dict[str, list[int]], least: int
) -> Mapping[str, tuple[tuple[int, int], ...]]:
    """Hide small cells of the first stage.

    Returns:
        Of the first and the last cell of each column of numbers, its size and what is
        shown of it.
    """
    sizes = {
        HISTOGRAMS: {c.name: len(c.spec.bin_edges) - 1 for c in table.numbers},
        CATEGORIES: {c.name: len(c.spec.categories) + 1 for c in table.words},
        QUANTILES: {c.name: COARSE for c in table.numbers if c.spec.quantiles},
    }
    ends = dict[str, tuple[tuple[int, int], ...]]()
    for name in sizes.keys() & found.keys():
        cells = {column: size for column, size in sizes[name].items() if size > 0}
        exact = found[name]
        found[name] = list(_hidden(exact, [*cells.values()], least))
        start = 0
        for column, size in cells.items():
            last = start + size - 1
            ends[column] = tuple((exact[at], found[name][at]) for at in (start, last))
            start += size
    return ends


def _of_few(table: Table, data: SiteColumns, least: int) -> tuple[set[str], bool]:
    """Find sums that tell of fewer than ``least`` records.

    Returns:
        Columns whose sums over all values do, and whether some sum over the records
        without a gap does.
    """
    whole_r = np.full(data.size, fill_value=table.covariances)
    for column in table.numbers if table.covariances else ():
        whole_r &= ~np.isnan(np.asarray(data.numbers[column.name], np.float64))
    few, is_of_few = set[str](), False
    for column in table.numbers:
        values_r = np.array(data.numbers[column.name], np.float64)
        low, high = column.spec.bounds
        inside = int(((values_r >= low) & (values_r <= high) & whole_r).sum())
        known_r, units_r = ~np.isnan(values_r), np.empty_like(values_r)
        on_grid(table, column, np.clip(values_r, low, high), None, out=units_r)
        few |= {column.name} if _differ_few(units_r[known_r], least) else set()
        is_of_few |= 0 < inside < least or _differ_few(units_r[whole_r], least)
    return few, is_of_few


def _differ_few(values_r: Array, least: int) -> bool:
    """Whether some values, but fewer than ``least``, differ from the most common one.

    If so few differ in all, that one has the majority of any ``2 least - 1`` values.
    """
    values, sizes = np.unique(values_r[: 2 * least - 1], return_counts=True)
    if not values.size:
        return False
    return 0 < int(np.count_nonzero(values_r != values[sizes.argmax()])) < least


def _hidden(counts: Sequence[int], sizes: Sequence[int], least: int) -> Iterator[int]:
    """Counts of several columns, of so many cells each, with small ones as 0."""
    start = 0
    for size in sizes:
        cells = list(counts[start : start + size])
        start, gone = start + size, 0
        for at in sorted(range(size), key=cells.__getitem__):
            if cells[at] >= least and not 0 < gone < least:
                break
            gone, cells[at] = gone + cells[at], 0
        yield from cells
