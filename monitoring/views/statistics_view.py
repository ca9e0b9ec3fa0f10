"""What a run of statistics found: moments, histograms and quantiles from its sums.

Sums are whole numbers, so that moments are computed without rounding and rounded once
at the end. With noise, counts may be negative and moments impossible. The noise on what
follows from several sums is that of its first-order (delta method) approximation, which
holds while counts and variances are far larger than their noise: what needs one that is
less than three times its noise is not known (None), nor is a correlation beyond 1.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from typing import Any

from federation.events import SiteSummed
from federation.job.spec import JobSpec
from federation.job.statistics_checks import table
from federation.job.statistics_job import CATEGORY, OTHER
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
    Sums,
    Table,
    windows,
)
from federation.vectors import Vector
from monitoring.views.run_view import COMPLETED, RunView
from privacy.dp.tables import mechanism_of

_ROUNDING = 1e-9  # By which roots and quotients may pass 1.
_CLEAR = 3.0  # Times its noise, from where a figure is told from 0.


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnStatistics:
    """Statistics of one column over all sites.

    Attributes:
        name: As in the job.
        kind: ``number`` or ``category``.
        unit: Unit of measurement, as in the job.
        count: Records with a value.
        missing: Records without one, or of sites that leave the column out, since too
            few of their records have a value, or another than most.
        hidden: Records in cells of a histogram or of categories that sites leave out,
            which count as 0; None without such cells, and with noise.
        below: Records below the lower bound, which count as it.
        above: Records above the upper bound, likewise.
        sum: Sum of the values; None of categories, as all that follow.
        mean: Their mean.
        variance: Their variance, divided by the count less 1.
        deviation: Its square root.
        edges: Edges of the histogram's bins.
        histogram: Records in each bin.
        quantiles: Value of each quantile; None where it could be anywhere.
        quantile_ranges: Between which values each is: with 95 % for noise, and surely
            where sites count few records together; empty if it is exact.
        categories: Records of each category.
        other: Records of all other categories.
        noise: Standard deviation of the noise on each kind of figure, by its name, in
            records or the unit of the figure; empty without differential privacy.
    """

    name: str
    kind: str
    unit: str
    count: int
    missing: int
    hidden: int | None = None
    below: int | None = None
    above: int | None = None
    sum: float | None = None
    mean: float | None = None
    variance: float | None = None
    deviation: float | None = None
    edges: tuple[float, ...] = ()
    histogram: tuple[int, ...] = ()
    quantiles: Mapping[str, float | None] = field(default_factory=dict)
    quantile_ranges: Mapping[str, Sequence[float]] = field(default_factory=dict)
    categories: Mapping[str, int] = field(default_factory=dict)
    other: int | None = None
    noise: Mapping[str, float] = field(default_factory=dict)

    @property
    def sizes(self) -> Mapping[str, int]:
        """Records of each category, and of all others as ``OTHER``."""
        others = {} if self.other is None else {OTHER: self.other}
        return {**self.categories, **others}


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """How far a site's records are from those of all other sites, in one column.

    Attributes:
        column: Name of the column.
        site: The site for which it is largest.
        difference: Its mean less that of the others, divided by the root of the mean of
            both variances (standardised difference: Austin 2009,
            doi:10.1002/sim.3697); None of categories and constants.
        distance: Jensen-Shannon distance of the histograms, or of the shares of the
            categories, from 0 to 1 (Endres and Schindelin 2003,
            doi:10.1109/TIT.2003.813506); None without them. Cells that may be left out
            at some site are compared as one.
    """

    column: str
    site: str
    difference: float | None = None
    distance: float | None = None

    @property
    def size(self) -> float:
        """By which columns are ordered."""
        return max(abs(self.difference or 0.0), self.distance or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatistics:
    """The statistics of a run.

    Attributes:
        sites: Sites whose records they are of.
        records: Records of all sites.
        columns: In the order of the job.
        complete: Records without a missing number: those of the covariances.
        numbers: Columns of the covariances, in their order; empty if there are none.
        covariances: Of each pair of columns, divided by the count less 1; None where
            a variance is not known.
        covariance_noise: Standard deviation of the noise on each covariance.
        correlations: Likewise; None also where a column is constant.
        correlation_noise: Standard deviation of the noise on each.
        rank_error: By how many records the rank of a quantile may be off, since sites
            count few records together; 0 where no site leaves out small cells.
        sites_left_out: Sites that have too few records, and leave out all of them.
        noise: Standard deviation of the noise on a number of records, by kind; empty
            without differential privacy. Other figures: see ``ColumnStatistics``.
        drift: How far sites are apart, a row for each column, the largest first; empty
            where the sums of single sites are not known.
        epsilon: Largest epsilon that a site has spent; None likewise.
        delta: The delta that goes with it.
    """

    sites: int
    records: int
    columns: tuple[ColumnStatistics, ...]
    complete: int | None = None
    numbers: tuple[str, ...] = ()
    covariances: tuple[tuple[float | None, ...], ...] = ()
    covariance_noise: tuple[tuple[float, ...], ...] = ()
    correlations: tuple[tuple[float | None, ...], ...] = ()
    correlation_noise: tuple[tuple[float | None, ...], ...] = ()
    rank_error: int = 0
    sites_left_out: int = 0
    noise: Mapping[str, float] = field(default_factory=dict)
    drift: tuple[Drift, ...] = ()
    epsilon: float | None = None
    delta: float | None = None

    def class_weights(self, column: str) -> list[float]:
        """Weights for ``training.options.class_weights``, in the order of the job.

        Each class counts the same in all: n / (k n_c) for k classes. A class without
        records, or whose count noise made negative, counts as one record.

        Args:
            column: A column of categories.

        Raises:
            ValueError: There is no such column.
        """
        counts = [
            max(1, size)
            for each in self.columns
            if each.name == column
            for size in each.categories.values()
        ]
        if not counts:
            raise ValueError(f"there is no column {column!r} of categories")
        return [sum(counts) / (len(counts) * size) for size in counts]

    @property
    def left_out(self) -> str:
        """What sites have left out of exact sums, in words; empty if nothing."""
        if not self.rank_error:
            return ""
        hidden = [f"{c.hidden:,} of {c.name}" for c in self.columns if c.hidden]
        said = (
            f"cells of few records of a site ({', '.join(hidden)}); " if hidden else ""
        )
        said += "few records below or above the bounds"
        if self.sites_left_out:
            said += f"; all records of {self.sites_left_out} of the sites"
        return said

    def document(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    @classmethod
    def parse(cls, document: Mapping[str, Any]) -> "RunStatistics":
        """Read what ``document`` wrote."""
        columns = tuple(ColumnStatistics(**each) for each in document["columns"])
        drift = tuple(Drift(**each) for each in document.get("drift", ()))
        return cls(**{**document, "columns": columns, "drift": drift})

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A row for each column, ready for ``pandas.DataFrame``."""
        nested = {"edges", "histogram", "quantiles", "categories", "noise"}
        nested.add("quantile_ranges")
        return [
            {k: v for k, v in asdict(each).items() if k not in nested}
            | {f"q{q}": value for q, value in each.quantiles.items()}
            | {f"q{q}_low": low for q, (low, _) in each.quantile_ranges.items()}
            | {f"q{q}_high": high for q, (_, high) in each.quantile_ranges.items()}
            | {f"{name}_noise": value for name, value in each.noise.items()}
            for each in self.columns
        ]


def statistics_of(job: JobSpec, table_d: Vector, view: RunView) -> RunStatistics | None:
    """Read the statistics of a finished run.

    Args:
        job: The job, which asks for them.
        table_d: The sums that the run leaves, shape ``(d,)``.
        view: The run.

    Returns:
        None if the run has not come to its end.
    """
    asked = table(job)
    if asked.due(table_d) is not None:
        return None
    sums = [asked.read(stage, table_d) for stage in asked.stages]
    noise = list(_noises(asked, view))
    spent = view.guaranteed
    reader = _Reader(asked, sums, noise)
    return RunStatistics(
        sites=sums[0][SITES][0],
        records=sums[0][COUNTS][0],
        columns=tuple(map(reader.column, asked.columns)),
        **reader.matrices(),
        rank_error=reader.rank_error,
        sites_left_out=reader.sites_left_out,
        noise=reader.noise_on_records(),
        drift=tuple(_drift(asked, view)),
        epsilon=None if spent is None else spent.epsilon,
        delta=None if spent is None else spent.delta,
    )


def _drift(asked: Table, view: RunView) -> Iterator[Drift]:
    """Compare each site with all others together; see ``Drift``."""
    done = (r.finished for r in view.rounds if r.finished and r.status == COMPLETED)
    first = next(done, None)
    of_site = {
        name: _sums_of(view.summed[name])
        for name in (first.answered if first else ())
        if name in view.summed
    }
    if len(of_site) < 2:  # noqa: PLR2004 -- one site and others
        return
    readers = {}
    for name, own in of_site.items():
        others = [sums for other, sums in of_site.items() if other != name]
        rest = {
            part: [sum(each) for each in zip(*(o[part] for o in others), strict=True)]
            for part in own
        }
        readers[name] = _Reader(asked, [own], []), _Reader(asked, [rest], [])
    rows = list[Drift]()
    for column in asked.columns:
        pairs = {
            name: (own.column(column), rest.column(column))
            for name, (own, rest) in readers.items()
        }
        shown = _shown([own for own, _ in pairs.values()])
        of_sites = (_apart(name, *pair, shown) for name, pair in pairs.items())
        rows.append(max(of_sites, key=lambda row: row.size))
    yield from sorted(rows, key=lambda row: -row.size)


def _shown(sites: Sequence[ColumnStatistics]) -> Sequence[int]:
    """Cells that no site has left out: a 0 is none where something is hidden."""
    rows = [(_cells(each), each.hidden) for each in sites]
    return [
        at
        for at in range(len(rows[0][0]))
        if all(cells[at] or not hidden for cells, hidden in rows)
    ]


def _cells(column: ColumnStatistics) -> Sequence[int]:
    return column.histogram or [*column.sizes.values()]


def _sums_of(event: SiteSummed) -> Sums:
    names = (COUNTS, SUMS, SQUARES, HISTOGRAMS, CATEGORIES)
    return {name: getattr(event, name) for name in names}


def _apart(
    site: str, own: ColumnStatistics, rest: ColumnStatistics, shown: Sequence[int]
) -> Drift:
    difference = None
    if own.mean is not None and rest.mean is not None:
        spread = ((own.variance or 0.0) + (rest.variance or 0.0)) / 2
        if spread > 0:
            difference = (own.mean - rest.mean) / math.sqrt(spread)
    cells = [[max(0, _cells(each)[at]) for at in shown] for each in (own, rest)]
    distance = None
    if all(map(sum, cells)):
        for row, each in zip(cells, (own, rest), strict=True):
            row.append(max(0, each.count - sum(row)))
        distance = _distance(*cells)
    return Drift(column=own.name, site=site, difference=difference, distance=distance)


def _distance(first: Sequence[int], second: Sequence[int]) -> float:
    """Root of the Jensen-Shannon divergence of two histograms, in bits."""
    total = 0.0
    for a, b in zip(first, second, strict=True):
        p, q = a / sum(first), b / sum(second)
        total += sum(x * math.log2(2 * x / (p + q)) for x in (p, q) if x > 0) / 2
    return math.sqrt(min(1.0, max(0.0, total)))


def _noises(asked: Table, view: RunView) -> Iterator[Mapping[str, float]]:
    """Standard deviation of the noise of each part, over sites, by stage."""
    if view.privacy is None:
        return
    promised = {each.site: each.noise_multiplier for each in view.privacy.sites}
    done = [r.finished for r in view.rounds if r.finished and r.status == COMPLETED]
    for stage, finished in zip(asked.stages, done, strict=False):
        found: dict[str, float] = {}
        for site in finished.answered:
            mechanism = mechanism_of(asked, stage, promised[site])
            for name in mechanism.parts:
                square = mechanism.standard_deviation(name) ** 2
                found[name] = found.get(name, 0.0) + square
        yield {name: math.sqrt(square) for name, square in found.items()}


class _Reader:
    """Reads the sums of a table column by column."""

    def __init__(
        self, asked: Table, sums: Sequence[Sums], noise: Sequence[Mapping[str, float]]
    ) -> None:
        self._asked, self._sums = asked, sums[0]
        self._noise = noise[0] if noise else {}
        self._place = {c.name: at for at, c in enumerate(asked.columns)}
        self._number = {c.name: at for at, c in enumerate(asked.numbers)}
        cells = iter(self._sums.get(CATEGORIES, ()))
        self._cells = {
            c.name: [next(cells) for _ in range(len(c.spec.categories) + 1)]
            for c in asked.words
        }
        self.rank_error, self.sites_left_out = self._sums.get(SMALL, (0, 0))
        bins = iter(self._sums.get(HISTOGRAMS, ()))
        self._bins = {
            c.name: tuple(next(bins) for _ in c.spec.bin_edges[1:])
            for c in asked.numbers
        }
        self._quantiles, self._ranges = (
            _quantiles(asked, sums, noise) if len(sums) > 1 else ({}, {})
        )

    def column(self, column: Column) -> ColumnStatistics:
        """Statistics of a column."""
        counts, name, spec = self._sums[COUNTS], column.name, column.spec
        count = counts[2 + self._place[name]]
        facts: dict[str, Any] = {
            "name": name,
            "kind": spec.kind,
            "unit": spec.unit,
            "count": count,
            "missing": counts[0] - count,
        }
        of_count = self._noise.get(COUNTS, 0.0)
        noise = {"count": of_count, "missing": of_count * math.sqrt(2)}
        if spec.kind == CATEGORY:
            *cells, other = self._cells[name]
            listed = dict(zip(spec.categories, cells, strict=True))
            noise["categories"] = self._noise.get(CATEGORIES, 0.0)
            facts["noise"] = noise if self._noise else {}
            facts["hidden"] = self._hidden(count, self._cells[name])
            return ColumnStatistics(**facts, categories=listed, other=other)
        at, num = self._number[name], len(self._number)
        beyond = 2 + len(self._asked.columns) + at
        low, high = spec.bounds
        middle, half = (Fraction(low) + Fraction(high)) / 2, _half(column)
        scale = 1 << self._asked.grid_bits
        total, square = self._sums[SUMS][at], self._sums[SQUARES][at]
        whole = max(count, 1)
        centre = Fraction(total, scale * whole)
        spread = _variance(whole, total, total, square) / scale**2 * half**2
        of_spread = float(half) ** 2 * self._spread_noise(
            whole, (total, total), square, SQUARES, is_one=True
        )
        is_many = count > _CLEAR * of_count
        variance = float(spread) if is_many and count > 1 else None
        if variance is not None and self._noise and variance <= _CLEAR * of_spread:
            variance = None
        of_sum, size = self._noise.get(SUMS, 0.0) / scale, float(half)
        noise |= {"below": of_count, "above": of_count}
        noise["sum"] = math.hypot(float(middle) * of_count, size * of_sum)
        if is_many:
            noise["mean"] = math.hypot(of_sum, float(centre) * of_count) / whole * size
        if variance:
            noise["variance"] = of_spread
            noise["deviation"] = of_spread / (2 * math.sqrt(variance))
        if spec.bin_edges:
            noise["histogram"] = self._noise.get(HISTOGRAMS, 0.0)
        return ColumnStatistics(
            **facts,
            noise=noise if self._noise else {},
            hidden=self._hidden(count, self._bins[name]),
            below=counts[beyond],
            above=counts[beyond + num],
            sum=float(middle * count + half * Fraction(total, scale)),
            mean=float(middle + half * centre) if is_many else None,
            variance=variance,
            deviation=None if variance is None else math.sqrt(variance),
            edges=spec.bin_edges,
            histogram=self._bins[name],
            quantiles=self._quantiles.get(name, {}),
            quantile_ranges=self._ranges.get(name, {}),
        )

    def _hidden(self, count: int, cells: Sequence[int]) -> int | None:
        return count - sum(cells) if cells and not self._noise else None

    def noise_on_records(self) -> Mapping[str, float]:
        """Standard deviation of the noise on each kind of number of records."""
        kinds = (COUNTS, HISTOGRAMS, CATEGORIES, QUANTILES)
        return {k: round(self._noise[k], 6) for k in kinds if k in self._noise}

    def _correlation(self, covariance: float, roots: float) -> float | None:
        """None for a constant, and if noise has made it impossible."""
        if roots <= 0 or (self._noise and abs(covariance) > roots * (1 + _ROUNDING)):
            return None
        return max(-1.0, min(1.0, covariance / roots))

    def _correlation_noise(
        self,
        count: int,
        ratio: float,
        means: tuple[float, float],
        roots: tuple[float, float],
        *,
        is_one: bool,
    ) -> float:
        """Noise on a correlation; none on that of a column with itself.

        From the derivatives of ``r = (Q/n - S T / n^2) / (s t)`` by all sums that are
        in it, those in the deviations s and t as well; see ``_spread_noise``.

        Args:
            count: n.
            ratio: r.
            means: Of both columns, in halves of their range from its middle.
            roots: Their deviations s and t, likewise.
            is_one: Whether both columns are the same.
        """
        if is_one:
            return 0.0
        scale = 1 << self._asked.grid_bits
        (s, t), (a, b) = roots, (means[0] / roots[0], means[1] / roots[1])
        of_product = self._noise[PRODUCTS] / scale**2
        of_sum, of_count = self._noise[SUMS] / scale, self._noise[COUNTS]
        return (
            math.hypot(
                of_product / (s * t),
                of_product * ratio / (2 * s**2),
                of_product * ratio / (2 * t**2),
                of_sum * (ratio * a - b) / s,
                of_sum * (ratio * b - a) / t,
                of_count * (a * b - ratio * (a**2 + b**2) / 2),
            )
            / count
        )

    def _spread_noise(
        self,
        count: int,
        sums: tuple[int, int],
        product: int,
        part: str,
        *,
        is_one: bool,
    ) -> float:
        """Noise on a (co)variance, in squares of half the range.

        From the derivatives of ``Q/n - S T / n^2`` by Q, S, T and n, whose noise is
        independent; in a variance, S and T are one sum.
        """
        scale = 1 << self._asked.grid_bits
        first, second = (float(Fraction(each, scale * count)) for each in sums)
        mixed = float(Fraction(product, scale**2 * count)) - 2 * first * second
        of_sum = self._noise.get(SUMS, 0.0) / scale
        terms = [first * of_sum, second * of_sum]
        if is_one:
            terms = [sum(terms)]
        of_product = self._noise.get(part, 0.0) / scale**2
        return math.hypot(of_product, *terms, mixed * self._noise.get(COUNTS, 0.0)) / (
            count
        )

    def matrices(self) -> dict[str, Any]:
        """Covariances and correlations; empty if the job asks for none."""
        if not self._asked.covariances:
            return {}
        numbers, scale = self._asked.numbers, 1 << self._asked.grid_bits
        num, complete = len(numbers), self._sums[COUNTS][1]
        sums, products = self._sums[SUMS][num:], iter(self._sums[PRODUCTS])
        halves, whole = [_half(c) for c in numbers], max(complete, 1)
        found, noise = ([[0.0] * num for _ in numbers] for _ in range(2))
        for i in range(num):
            for j in range(i, num):
                product, units = next(products), halves[i] * halves[j]
                value = _variance(whole, sums[i], sums[j], product) / scale**2 * units
                found[i][j] = found[j][i] = float(value)
                noise[i][j] = noise[j][i] = float(units) * self._spread_noise(
                    whole, (sums[i], sums[j]), product, PRODUCTS, is_one=i == j
                )
        roots = [math.sqrt(max(0.0, found[i][i])) for i in range(num)]
        means = [float(Fraction(total, scale * whole)) for total in sums]
        is_many = complete > _CLEAR * self._noise.get(COUNTS, 0.0)
        is_known = [
            not self._noise or (is_many and found[i][i] > _CLEAR * noise[i][i])
            for i in range(num)
        ]
        covariances, ratios, of_ratios = (_unknown(num) for _ in range(3))
        for i, j in itertools.product(range(num), repeat=2):
            if not (is_known[i] and is_known[j]):
                continue
            covariances[i][j] = found[i][j]
            ratio = self._correlation(found[i][j], roots[i] * roots[j])
            ratios[i][j] = ratio
            if self._noise and ratio is not None:
                sizes = (roots[i] / float(halves[i]), roots[j] / float(halves[j]))
                of_ratios[i][j] = self._correlation_noise(
                    whole, ratio, (means[i], means[j]), sizes, is_one=i == j
                )
        return {
            "complete": complete,
            "numbers": tuple(c.name for c in numbers),
            "covariances": tuple(map(tuple, covariances)),
            "covariance_noise": tuple(map(tuple, noise)) if self._noise else (),
            "correlations": tuple(map(tuple, ratios)),
            "correlation_noise": tuple(map(tuple, of_ratios)) if self._noise else (),
        }


def _unknown(num: int) -> list[list[float | None]]:
    return [[None] * num for _ in range(num)]


def _half(column: Column) -> Fraction:
    low, high = column.spec.bounds
    return (Fraction(high) - Fraction(low)) / 2


def _variance(count: int, first: int, second: int, product: int) -> Fraction:
    """Covariance from sums, in steps of the grid, divided by the count less 1."""
    return Fraction(count * product - first * second, count * max(count - 1, 1))


def _quantiles(
    asked: Table, sums: Sequence[Sums], noise: Sequence[Mapping[str, float]]
) -> tuple[dict[str, dict[str, float | None]], dict[str, dict[str, list[float]]]]:
    """The middle of the fine bin in which each quantile is: its lower value.

    Returns:
        It, and between which values it is, unless it is exact; by column and quantile.
    """
    small, _ = sums[0].get(SMALL, (0, 0))
    margins = tuple(_CLEAR * each[QUANTILES] for each in noise) or (0.0, 0.0)
    fine, coarse = iter(sums[1][QUANTILES]), iter(sums[0][QUANTILES])
    counts = {
        c.name: [next(coarse) for _ in range(COARSE)]
        for c in asked.numbers
        if c.spec.quantiles
    }
    found: dict[str, dict[str, float | None]] = {}
    ranges: dict[str, dict[str, list[float]]] = {}
    for column, quantile, at, rank, below in windows(asked, sums[0]):
        name, upto, bin_ = column.name, below, FINE - 1
        sizes = [next(fine) for _ in range(FINE)]
        for number, size in enumerate(sizes):
            upto += size
            if upto >= rank:
                bin_ = min(bin_, number)
        place = at * FINE + bin_
        value: float | None = _value(column, place + 0.5)
        if not (noise or any(sizes)):
            value = None  # No site has values.
        elif noise or small:
            edges = _edges(counts[name], sizes, at, quantile, margins)
            off = ((edge, by, margin + small) for edge, by, margin in edges)
            first, last = _range(off, (place, place + 1))
            if (first, last) == (0, COARSE * FINE):
                value = None
            ends = [_value(column, first), _value(column, last)]
            ranges.setdefault(name, {})[f"{quantile:g}"] = ends
        found.setdefault(name, {})[f"{quantile:g}"] = value
    return found, ranges


def _value(column: Column, place: float) -> float:
    low, high = column.spec.bounds
    return low + (high - low) * place / (COARSE * FINE)


def _edges(
    counts: Sequence[int],
    fine: Sequence[int],
    at: int,
    quantile: float,
    margins: Sequence[float],
) -> Iterator[tuple[int, float, float]]:
    """What noised counts say of where a quantile q is.

    Values below an edge, less the share q of all: ``D = A - q (A + B)`` for the sums A
    and B of a and b bins below and above it. Its noise has the variance
    ``s^2 ((1 - q)^2 a + q^2 b)``, and that of the fine bins that are added to A. The
    quantile is below the edge where D without noise is 0 or more. Three deviations at
    each edge, where the noise of neighbours is nearly the same, leave 95 % and more for
    all of them together.

    Args:
        counts: Of each coarse bin.
        fine: Of each fine bin of the coarse bin ``at``.
        at: Where the quantile is.
        quantile: q.
        margins: Three deviations of the noise on a coarse and on a fine bin.

    Yields:
        Number of a fine edge, D, and three deviations of its noise.
    """
    of_coarse, of_fine = margins
    rank, below = quantile * sum(counts), 0
    for a in range(COARSE + 1):
        margin = of_coarse * math.hypot(
            (1 - quantile) * math.sqrt(a), quantile * math.sqrt(COARSE - a)
        )
        yield a * FINE, below - rank, margin
        if a == at:
            inside = below
            for number, size in enumerate(fine, 1):
                inside += size
                beside = of_fine * math.sqrt(number)
                yield a * FINE + number, inside - rank, math.hypot(margin, beside)
        below += counts[a] if a < COARSE else 0


def _range(
    edges: Iterator[tuple[int, float, float]], place: tuple[int, int]
) -> tuple[int, int]:
    """The edges between which a quantile surely is, and its place."""
    first, last = 0, COARSE * FINE
    for edge, found, margin in edges:
        if found + margin < 0:
            first = max(first, edge)
        elif found - margin >= 0:
            last = min(last, edge)
    return min(first, last, place[0]), max(first, last, place[1])
