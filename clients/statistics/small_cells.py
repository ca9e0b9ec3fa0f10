"""Cells of exact statistics that too few of a site's records are in.

The counts of a column's cells add up to the number of its values, which is known. So a
single hidden cell would be what is left over. Here cells are hidden, the smallest
first, until those that are left have enough records, and all hidden ones together too,
or there are none (complementary suppression: Cox 1980, doi:10.1080/01621459.1980.
10477481). A hidden cell counts as 0, and the result is too small by it.

A quantile needs the rank of every value, so nothing is hidden from it: neighbouring
values are counted together (see ``grouped``), and both rounds count the same groups.
So ranks are off by fewer records than a cell must have, which the site states.

Sums are hidden, too, where they are those of a few records: of the only values that are
within a column's bounds, or that are not its most common one, as with a rare word. All
else of such a column is hidden with them. So are sums over the records without a gap,
if a column has few others: a subtraction would show them. What is not seen here:
products of columns with few different values count small groups, and so do sums and
squares of a column with three. An operator who has such columns gives no ``products``
and no ``squares``.

With differential privacy nothing is hidden: whether a cell is would tell its size.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from clients.statistics.columns import SiteColumns
from clients.statistics.sums import (
    Array,
    Integers,
    fine_cells,
    on_grid,
    quantile_sums,
)
from federation.job.statistics_table import (
    CATEGORIES,
    COUNTS,
    HISTOGRAMS,
    PRODUCTS,
    QUANTILES,
    SITES,
    SMALL,
    SQUARES,
    SUMS,
    Sums,
    Table,
)

Ends = dict[str, tuple[int, int]]


def hide_small(
    table: Table, sums: Sums, data: SiteColumns, least: int, before: Sums
) -> Sums:
    """Hide cells of fewer than ``least`` records of a site, and sums over so few.

    A column with fewer values is hidden as a whole, and so is a site with fewer
    records. What is left of a count below or above the bounds is at least as large.

    Args:
        table: What the job asks.
        sums: Without noise.
        data: The site's columns.
        least: Fewest records of a cell.
        before: Sums over all sites of the stage before; empty for the first.
    """
    found = {name: list(part) for name, part in sums.items()}
    if data.size < least:
        found = {n: p if n == SITES else [0] * len(p) for n, p in found.items()}
        return found if before else {**found, SMALL: [least - 1, 1]}
    few, is_hidden = _of_few(table, data, least)
    ends = _ends(table, data, least)
    ends = {name: each for name, each in ends.items() if name not in few}
    if QUANTILES in found:
        cells = _quantile_cells(table, data, least, ends)
        found[QUANTILES] = quantile_sums(table, cells, before)
    if not before:
        found[SMALL] = [least - 1, 0]
        _hide_cells(table, found, least, ends)
        _hide_sums(table, found, least, ends)
        if is_hidden or _few_have_gaps(table, sums[COUNTS], least):
            found[COUNTS][1] = 0
            found[SUMS][len(table.numbers) :] = [0] * (
                len(found[SUMS]) - len(table.numbers)
            )
            found |= {n: [0] * len(p) for n, p in found.items() if n == PRODUCTS}
    return found


def grouped(cells_c: Integers, least: int) -> Integers:
    """Count neighbouring records together, so that no cell has fewer than ``least``.

    From the lowest cell on, a group ends as soon as it has enough records; what is left
    over joins the last one. All records of a group count in one cell between those of
    its ``least``-th highest and its ``least``-th lowest record, so at any edge fewer
    than ``least`` records change sides. It is that of its median, to about an eighth of
    the way between the two, so that it does not show in which cell a record is.

    A table whose records are all in the cells of their groups has the same groups, and
    no small cell. So no small count follows from them, whatever is asked of them.

    Shape suffix: c cells.

    Args:
        cells_c: Records in each cell.
        least: Fewest records of a group.
    """
    found_c = np.zeros_like(cells_c)
    places = np.flatnonzero(cells_c)
    upto = np.cumsum(cells_c[places])
    enough = np.searchsorted(upto, upto - cells_c[places] + least).tolist()
    ends, begin = list[int](), 0
    while begin < len(places) and enough[begin] < len(places):
        ends.append(enough[begin])
        begin = ends[-1] + 1
    if not ends:
        return found_c
    ends[-1] = len(places) - 1
    # Shape suffix: g groups.
    end_g = upto[ends]
    done_g = np.append(0, end_g[:-1])
    low_g, high_g = end_g - least + 1, done_g + least
    half_g = np.minimum(np.maximum((done_g + end_g + 1) // 2, low_g), high_g)
    first_g, middle_g, last_g = (
        places[np.searchsorted(upto, rank_g)] for rank_g in (low_g, half_g, high_g)
    )
    step_g = 1 << np.maximum(np.frexp(np.abs(last_g - first_g))[1] - 3, 0)
    middle_g += step_g // 2 - middle_g % step_g
    middle_g += step_g * ((middle_g < first_g) * 1 - (middle_g > last_g))
    np.add.at(found_c, middle_g, end_g - done_g)
    return found_c


def _ends(table: Table, data: SiteColumns, least: int) -> Ends:
    """Count the values below and above the bounds of each column; few as none.

    Columns are left out that have too few values, or too few within the bounds.
    """
    found = Ends()
    for column in table.numbers:
        values_r = np.array(data.numbers[column.name], np.float64)
        low, high = column.spec.bounds
        size = int(np.count_nonzero(~np.isnan(values_r)))
        below = int(np.count_nonzero(values_r < low))
        above = int(np.count_nonzero(values_r > high))
        if size < least or 0 < size - below - above < least:
            continue
        found[column.name] = (
            below if below >= least else 0,
            above if above >= least else 0,
        )
    return found


def _quantile_cells(
    table: Table, data: SiteColumns, least: int, ends: Ends
) -> Mapping[str, Integers]:
    """Group the values of each column; those told to be beyond a bound stay there."""
    found = dict[str, Integers]()
    for column in table.numbers:
        if column.spec.quantiles:
            cells_c = fine_cells(table, column, data)
            below, above = ends.get(column.name, (0, 0))
            beyond_c = np.zeros_like(cells_c)
            beyond_c[0], beyond_c[-1] = below, above
            is_told = column.name in ends
            groups_c = grouped(cells_c - beyond_c, least)
            found[column.name] = (groups_c + beyond_c) * is_told
    return found


def _hide_cells(
    table: Table, found: dict[str, list[int]], least: int, ends: Ends
) -> None:
    """Hide small cells of histograms and categories, and counts that would show them.

    All cells of a column that is left out are hidden. A count below or above the bounds
    is, where the cell that it is in is hidden or has few other records.
    """
    if CATEGORIES in found:
        sizes = [len(c.spec.categories) + 1 for c in table.words]
        found[CATEGORIES] = list(_hidden(found[CATEGORIES], sizes, least))
    if HISTOGRAMS not in found:
        return
    binned = [c for c in table.numbers if c.spec.bin_edges]
    sizes = [len(c.spec.bin_edges) - 1 for c in binned]
    exact, start = found[HISTOGRAMS], 0
    shown = found[HISTOGRAMS] = list(_hidden(exact, sizes, least))
    for column, size in zip(binned, sizes, strict=True):
        places, stop = (start, start + size - 1), start + size
        if column.name in ends:
            below, above = (
                0 if not shown[at] or 0 < exact[at] - beyond < least else beyond
                for at, beyond in zip(places, ends[column.name], strict=True)
            )
            ends[column.name] = below, above
        else:
            shown[start:stop] = [0] * size
        start = stop


def _hide_sums(
    table: Table, found: dict[str, list[int]], least: int, ends: Ends
) -> None:
    """Hide counts and sums of columns that are left out."""
    counts, num = found[COUNTS], len(table.numbers)
    first = 2 + len(table.columns)
    for place in range(2, first):
        if counts[place] < least:
            counts[place] = 0
    for at, column in enumerate(table.numbers):
        counts[first + at], counts[first + num + at] = ends.get(column.name, (0, 0))
        if column.name not in ends:
            counts[2 + table.columns.index(column)] = 0
            found[SUMS][at] = found[SQUARES][at] = 0


def _few_have_gaps(table: Table, counts: Sequence[int], least: int) -> bool:
    """Whether sums over records without a gap, or over all others, are of few."""
    complete, sizes = counts[1], dict(zip(table.columns, counts[2:], strict=False))
    gaps = (sizes[column] - complete for column in table.numbers)
    return complete < least or any(0 < gap < least for gap in gaps)


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
