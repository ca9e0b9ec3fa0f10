"""What a run of statistics found: moments, histograms and quantiles from its sums.

Sums are whole numbers, so that moments are computed without rounding and rounded once
at the end. With noise, counts may be negative and moments impossible: a count is then
taken as 1, a variance as 0, a correlation as -1 or 1.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from typing import Any

from federation.job.spec import JobSpec
from federation.job.statistics_checks import table
from federation.job.statistics_job import CATEGORY
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
        mean_noise: Standard deviation of the noise on the mean; 0 without noise.
        edges: Edges of the histogram's bins.
        histogram: Records in each bin.
        quantiles: Value of each quantile.
        categories: Records of each category.
        other: Records of all other categories.
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
    mean_noise: float | None = None
    edges: tuple[float, ...] = ()
    histogram: tuple[int, ...] = ()
    quantiles: Mapping[str, float] = field(default_factory=dict)
    categories: Mapping[str, int] = field(default_factory=dict)
    other: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatistics:
    """The statistics of a run.

    Attributes:
        sites: Sites whose records they are of.
        records: Records of all sites.
        columns: In the order of the job.
        complete: Records without a missing number: those of the covariances.
        numbers: Columns of the covariances, in their order; empty if there are none.
        covariances: Of each pair of columns, divided by the count less 1.
        correlations: Likewise; None where a column is constant.
        noise: Standard deviation of the noise on a count, by part of the table; empty
            without differential privacy.
        epsilon: Largest epsilon that a site has spent; None likewise.
        delta: The delta that goes with it.
    """

    sites: int
    records: int
    columns: tuple[ColumnStatistics, ...]
    complete: int | None = None
    numbers: tuple[str, ...] = ()
    covariances: tuple[tuple[float, ...], ...] = ()
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
        nested = ("edges", "histogram", "quantiles", "categories")
        return [
            {k: v for k, v in asdict(each).items() if k not in nested}
            | {f"q{q}": value for q, value in each.quantiles.items()}
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
        noise={n: round(s, 6) for n, s in (noise[0] if noise else {}).items()},
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
        if spec.kind == CATEGORY:
            *cells, other = self._cells[name]
            listed = dict(zip(spec.categories, cells, strict=True))
            return ColumnStatistics(**facts, categories=listed, other=other)
        at, num = self._number[name], len(self._number)
        beyond = 2 + len(self._asked.columns) + at
        low, high = spec.bounds
        middle, half = (Fraction(low) + Fraction(high)) / 2, _half(column)
        scale = 1 << self._asked.grid_bits
        total, square = self._sums[SUMS][at], self._sums[SQUARES][at]
        whole, known = max(count, 1), count > 0 or not self._noise
        centre = Fraction(total, scale * whole)
        spread = _variance(whole, total, total, square) / scale**2 * half**2
        noise = self._noise.get(SUMS, 0.0) / scale
        from_count = float(centre) * self._noise.get(COUNTS, 0.0)
        has_mean = count > 0 or (known and self._noise)
        deviation = math.sqrt(max(0.0, float(spread)))
        return ColumnStatistics(
            **facts,
            below=counts[beyond],
            above=counts[beyond + num],
            sum=float(middle * count + half * Fraction(total, scale)),
            mean=float(middle + half * centre) if has_mean else None,
            variance=max(0.0, float(spread)) if count > 1 else None,
            deviation=deviation if count > 1 else None,
            mean_noise=math.hypot(noise, from_count) / whole * float(half),
            edges=spec.bin_edges,
            histogram=self._bins[name],
            quantiles=self._quantiles.get(name, {}),
        )

    def matrices(self) -> dict[str, Any]:
        """Covariances and correlations; empty if the job asks for none."""
        if not self._asked.covariances:
            return {}
        numbers, scale = self._asked.numbers, 1 << self._asked.grid_bits
        num, complete = len(numbers), self._sums[COUNTS][1]
        sums, products = self._sums[SUMS][num:], iter(self._sums[PRODUCTS])
        halves = [_half(c) for c in numbers]
        found = [[0.0] * num for _ in numbers]
        for i in range(num):
            for j in range(i, num):
                value = _variance(max(complete, 1), sums[i], sums[j], next(products))
                value = value / scale**2 * halves[i] * halves[j]
                found[i][j] = found[j][i] = float(value)
        roots = [math.sqrt(max(0.0, found[i][i])) for i in range(num)]
        ratios = [
            [_correlation(found[i][j], roots[i] * roots[j]) for j in range(num)]
            for i in range(num)
        ]
        return {
            "complete": complete,
            "numbers": tuple(c.name for c in numbers),
            "covariances": tuple(map(tuple, found)),
            "correlations": tuple(map(tuple, ratios)),
        }


def _half(column: Column) -> Fraction:
    low, high = column.spec.bounds
    return (Fraction(high) - Fraction(low)) / 2


def _variance(count: int, first: int, second: int, product: int) -> Fraction:
    """Covariance from sums, in steps of the grid, divided by the count less 1."""
    return Fraction(count * product - first * second, count * max(count - 1, 1))


def _correlation(covariance: float, roots: float) -> float | None:
    return max(-1.0, min(1.0, covariance / roots)) if roots > 0 else None


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
