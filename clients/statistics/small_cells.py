"""Cells of exact statistics that too few of a site's records are in.

The counts of a column's cells add up to the number of its values, which is known. So a
single hidden cell would be what is left over. Here cells are hidden, the smallest
first, until those that are left have enough records, and all hidden ones together too,
or there are none (complementary suppression: Cox 1980, doi:10.1080/01621459.1980.
10477481). A hidden cell counts as 0, and the result is too small by it.

With differential privacy nothing is hidden: whether a cell is would tell its size.
"""

from collections.abc import Iterator, Sequence

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


def hide_small(table: Table, sums: Sums, least: int) -> Sums:
    """Hide cells of fewer than ``least`` records of a site.

    A column with fewer values is hidden as a whole, and so is a site with fewer
    records. What is left of a count below or above the bounds is at least as large.
    """
    found = {name: list(part) for name, part in sums.items()}
    if COUNTS not in found:
        cells = [FINE] * (len(found[QUANTILES]) // FINE)
        return {**found, QUANTILES: list(_hidden(found[QUANTILES], cells, least))}
    records, complete = found[COUNTS][:2]
    if records < least:
        return {n: p if n == SITES else [0] * len(p) for n, p in found.items()}
    sizes = {
        HISTOGRAMS: [len(c.spec.bin_edges) - 1 for c in table.numbers],
        CATEGORIES: [len(c.spec.categories) + 1 for c in table.words],
        QUANTILES: [COARSE for c in table.numbers if c.spec.quantiles],
    }
    for name in sizes.keys() & found.keys():
        cells = [size for size in sizes[name] if size > 0]
        found[name] = list(_hidden(found[name], cells, least))
    num, first = len(table.numbers), 2 + len(table.columns)
    beyond = [n if n >= least else 0 for n in found[COUNTS][first:]]
    found[COUNTS][first:] = beyond
    few = [
        at
        for at, column in enumerate(table.numbers)
        if found[COUNTS][2 + table.columns.index(column)] < least
    ]
    for at in few:
        found[SUMS][at] = found[SQUARES][at] = 0
        found[COUNTS][2 + table.columns.index(table.numbers[at])] = 0
    if complete < least:
        found[COUNTS][1] = 0
        found[SUMS][num:] = [0] * (len(found[SUMS]) - num)
        if PRODUCTS in found:
            found[PRODUCTS] = [0] * len(found[PRODUCTS])
    return found


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
