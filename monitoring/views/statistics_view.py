"""What a run of statistics found: moments, histograms and quantiles from its sums.

Sums are whole numbers, so that moments are computed without rounding and rounded once
at the end. With noise, counts may be negative and moments impossible: a variance that
is not above 0 is not known (None), nor is a correlation beyond 1. The noise on what
follows from several sums is that of its first-order (delta method) approximation.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from typing import Any

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnStatistics:
    """Statistics of one column over all sites.

    Attributes:
        name: As in the job.
        kind: ``number`` or ``category``.
        unit: Unit of measurement, as in the job.
        count: Records with a value.
        missing: Records without one.
        below: Records below the lower bound, which count as it.
        above: Records above the upper bound, likewise.
        sum: Sum of the values; None of categories, as all that follow.
        mean: Their mean.
        variance: Their variance, divided by the count less 1.
        deviation: Its square root.
        edges: Edges of the histogram's bins.
        histogram: Records in each bin.
        quantiles: Value of each quantile.
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
    below: int | None = None
    above: int | None = None
    sum: float | None = None
    mean: float | None = None
    variance: float | None = None
    deviation: float | None = None
    edges: tuple[float, ...] = ()
    histogram: tuple[int, ...] = ()
    quantiles: Mapping[str, float] = field(default_factory=dict)
    categories: Mapping[str, int] = field(default_factory=dict)
    other: int | None = None
    noise: Mapping[str, float] = field(default_factory=dict)

    @property
    def sizes(self) -> Mapping[str, int]:
        """Records of each category, and of all others as ``OTHER``."""
        others = {} if self.other is None else {OTHER: self.other}
        return {**self.categories, **others}


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
            noise leaves no positive variance.
        correlations: Likewise; None also where a column is constant.
        covariance_noise: Standard deviation of the noise on each covariance.
        noise: Standard deviation of the noise on a number of records, by kind; empty
            without differential privacy. Other figures: see ``ColumnStatistics``.
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
    noise: Mapping[str, float] = field(default_factory=dict)
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

    def document(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    @classmethod
    def parse(cls, document: Mapping[str, Any]) -> "RunStatistics":
        """Read what ``document`` wrote."""
        columns = tuple(ColumnStatistics(**each) for each in document["columns"])
        return cls(**{**document, "columns": columns})

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A row for each column, ready for ``pandas.DataFrame``."""
        nested = ("edges", "histogram", "quantiles", "categories", "noise")
        return [
            {k: v for k, v in asdict(each).items() if k not in nested}
            | {f"q{q}": value for q, value in each.quantiles.items()}
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
        noise=reader.noise_on_records(),
        epsilon=None if spent is None else spent.epsilon,
        delta=None if spent is None else spent.delta,
    )


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
        bins = iter(self._sums.get(HISTOGRAMS, ()))
        self._bins = {
            c.name: tuple(next(bins) for _ in c.spec.bin_edges[1:])
            for c in asked.numbers
        }
        self._quantiles = _quantiles(asked, sums) if len(sums) > 1 else {}

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
        variance = self._known(float(spread)) if count > 1 else None
        of_sum, size = self._noise.get(SUMS, 0.0) / scale, float(half)
        noise |= {"below": of_count, "above": of_count}
        noise["sum"] = math.hypot(float(middle) * of_count, size * of_sum)
        if count > 0:
            noise["mean"] = math.hypot(of_sum, float(centre) * of_count) / whole * size
        if variance:
            noise["variance"] = size**2 * self._spread_noise(
                whole, (total, total), square, SQUARES, is_one=True
            )
            noise["deviation"] = noise["variance"] / (2 * math.sqrt(variance))
        if spec.bin_edges:
            noise["histogram"] = self._noise.get(HISTOGRAMS, 0.0)
        return ColumnStatistics(
            **facts,
            noise=noise if self._noise else {},
            below=counts[beyond],
            above=counts[beyond + num],
            sum=float(middle * count + half * Fraction(total, scale)),
            mean=float(middle + half * centre) if count > 0 else None,
            variance=variance,
            deviation=None if variance is None else math.sqrt(variance),
            edges=spec.bin_edges,
            histogram=self._bins[name],
            quantiles=self._quantiles.get(name, {}),
        )

    def noise_on_records(self) -> Mapping[str, float]:
        """Standard deviation of the noise on each kind of number of records."""
        kinds = (COUNTS, HISTOGRAMS, CATEGORIES, QUANTILES)
        return {k: round(self._noise[k], 6) for k in kinds if k in self._noise}

    def _known(self, variance: float) -> float | None:
        """A variance; None if noise has made it impossible."""
        return None if self._noise and variance <= 0 else variance

    def _correlation(self, covariance: float, roots: float) -> float | None:
        """None for a constant, and if noise has made it impossible."""
        if roots <= 0 or (self._noise and abs(covariance) > roots * (1 + _ROUNDING)):
            return None
        return max(-1.0, min(1.0, covariance / roots))

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
        ratios = [
            [self._correlation(found[i][j], roots[i] * roots[j]) for j in range(num)]
            for i in range(num)
        ]
        is_known = [self._known(found[i][i]) is not None for i in range(num)]
        known = [
            [v if is_known[i] and is_known[j] else None for j, v in enumerate(row)]
            for i, row in enumerate(found)
        ]
        return {
            "complete": complete,
            "numbers": tuple(c.name for c in numbers),
            "covariances": tuple(map(tuple, known)),
            "covariance_noise": tuple(map(tuple, noise)) if self._noise else (),
            "correlations": tuple(map(tuple, ratios)),
        }


def _half(column: Column) -> Fraction:
    low, high = column.spec.bounds
    return (Fraction(high) - Fraction(low)) / 2


def _variance(count: int, first: int, second: int, product: int) -> Fraction:
    """Covariance from sums, in steps of the grid, divided by the count less 1."""
    return Fraction(count * product - first * second, count * max(count - 1, 1))


def _quantiles(asked: Table, sums: Sequence[Sums]) -> dict[str, dict[str, float]]:
    """The middle of the fine bin in which each quantile is: its lower value."""
    fine = iter(sums[1][QUANTILES])
    found: dict[str, dict[str, float]] = {}
    for column, quantile, at, rank, below in windows(asked, sums[0]):
        low, high = column.spec.bounds
        upto, bin_ = below, FINE - 1
        sizes = [next(fine) for _ in range(FINE)]
        if not any(sizes):  # Sites have hidden them: none is known.
            bin_ = FINE // 2
        for number, size in enumerate(sizes):
            upto += size
            if upto >= rank:
                bin_ = min(bin_, number)
        place = (at * FINE + bin_ + 0.5) / (COARSE * FINE)
        found.setdefault(column.name, {})[f"{quantile:g}"] = low + (high - low) * place
    return found
