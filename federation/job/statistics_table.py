"""The sums of a job of statistics, and how they travel as an update.

All sums are whole numbers: values are rounded to a public grid before they are added,
so that sums over sites are exact, and noise can be whole numbers too. A number x of a
column with bounds a < b is ``u = rint(2^h (2 x - a - b) / (b - a))``, from -2^h to 2^h.

A round sends a *stage*: *parts* one after another, of which each record changes a
bounded amount. Sums are sent as digits to a base 2^k, each digit a value of the update:
float32, the mean over sites and the ring of a secure sum all keep integers of so few
bits exactly. Carrying is left to whoever reads the sums.

Shape suffixes: d values of the update, v sums of a part.
"""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from federation.job.statistics_job import CATEGORY, NUMBER, ColumnSpec, StatisticsSpec
from federation.vectors import Vector

Sums = Mapping[str, Sequence[int]]

MAX_RECORDS = 1 << 28  # of a site
COARSE, FINE = 256, 128  # Bins that find a quantile: of the range, of one such bin.
# Bits of h. With noise the grid is far finer than the noise even so, and the noise of
# products fits into 48 bits.
_GRID_BITS, _NOISED_GRID_BITS = 30, 16
_COUNT_BITS, _ROOM_BITS = 32, 30  # The number of records, and a sign or noise.
_DIGIT_BITS = 20  # Of the sum of a digit over all sites.
_MOST_NORM = 8.0  # Of an update; sites accept 10.

SITES = "sites"  # Each site adds 1, and no noise: how many sites a sum has.
# Of exact sums, by how many records the rank of a quantile may be off at a site, and 1
# if the site leaves out all of its records: see ``clients.statistics.small_cells``.
SMALL = "small"
COUNTS, SUMS, SQUARES, PRODUCTS = "counts", "sums", "squares", "products"
HISTOGRAMS, CATEGORIES, QUANTILES = "histograms", "categories", "quantiles"
KINDS = (COUNTS, SUMS, SQUARES, PRODUCTS, HISTOGRAMS, CATEGORIES, QUANTILES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column.

    Attributes:
        name: As the sites' data have it.
        spec: What is asked about it.
        place: The key of the job that asks.
    """

    name: str
    spec: ColumnSpec
    place: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Sums of one kind.

    Attributes:
        name: Its name, as in ``statistics.split``.
        size: v, how many they are.
        bits: Bits of a sum at one site, with its sign.
        most: Most that a record adds to the sum of squares of all of them; 0 for what
            does not depend on records.
    """

    name: str
    size: int
    bits: int
    most: int

    @property
    def largest(self) -> int:
        """Largest absolute value of a sum at one site."""
        return (1 << (self.bits - 1)) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What one round asks.

    Attributes:
        parts: In the order of the update.
        start: Place of its first value.
        digit_bits: k.
    """

    parts: tuple[Part, ...]
    start: int
    digit_bits: int

    @property
    def stop(self) -> int:
        """Place behind its last value."""
        return self.start + sum(self.num_digits(p) * p.size for p in self.parts)

    def num_digits(self, part: Part) -> int:
        """Digits of each sum of a part: the largest one carries into one more bit."""
        return -(-(part.bits + 1) // self.digit_bits)

    def places(self) -> Iterator[tuple[Part, slice]]:
        """Each part, and where its digits are: the lowest digits of all sums first."""
        start = self.start
        for part in self.parts:
            stop = start + self.num_digits(part) * part.size
            yield part, slice(start, stop)
            start = stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """All sums of a job.

    Attributes:
        columns: All columns, in the order of the job.
        stages: One for each round.
        grid_bits: h.
        step: What a digit of 1 is in the update.
        split: Share of each part.
        covariances: As in the job.
    """

    columns: tuple[Column, ...]
    stages: tuple[Stage, ...]
    grid_bits: int
    step: float
    split: Mapping[str, float]
    covariances: bool

    @property
    def numbers(self) -> tuple[Column, ...]:
        """Columns of numbers."""
        return tuple(c for c in self.columns if c.spec.kind == NUMBER)

    @property
    def words(self) -> tuple[Column, ...]:
        """Columns of categories."""
        return tuple(c for c in self.columns if c.spec.kind == CATEGORY)

    @property
    def num_values(self) -> int:
        """d, the length of the update."""
        return self.stages[-1].stop

    @property
    def element_bound(self) -> float:
        """Largest absolute value of the update."""
        return self.step * 2.0 ** (self.stages[0].digit_bits - 1)

    def due(self, table_d: Vector) -> Stage | None:
        """The first stage without sums; None if the table is complete."""
        return next((s for s in self.stages if not table_d[s.start]), None)

    def shares(self, stage: Stage) -> Mapping[str, float]:
        """Share of the privacy of a round that each of its parts takes; 1 in all."""
        given = {p.name: self.split.get(p.name, 1.0) for p in stage.parts if p.most}
        return {name: share / sum(given.values()) for name, share in given.items()}

    def write(self, stage: Stage, sums: Sums) -> Vector:
        """Write one site's sums as an update, shape ``(d,)``; those too large are cut.

        Every step of the base is exact, and the digits are from -2^(k-1) to
        2^(k-1) - 1.
        """
        update_d = np.zeros(self.num_values, np.float32)
        bits = stage.digit_bits
        half, mask = 1 << (bits - 1), (1 << bits) - 1
        for part, place in stage.places():
            rest_v = np.array(
                [
                    max(-part.largest, min(part.largest, int(x)))
                    for x in sums[part.name]
                ],
                object,
            )
            digits = []
            for _ in range(stage.num_digits(part)):
                digit_v = ((rest_v + half) & mask) - half
                digits.append(digit_v.astype(np.float32))
                rest_v = (rest_v - digit_v) >> bits
            update_d[place] = np.concatenate(digits)
        return update_d * np.float32(self.step)

    def read(self, stage: Stage, table_d: Vector) -> Sums:
        """Read sums over all sites from the sum of their updates, shape ``(d,)``."""
        found = {}
        for part, place in stage.places():
            digits = np.rint(table_d[place].astype(np.float64) / self.step)
            total_v = np.zeros(part.size, object)
            for at, digit_v in enumerate(digits.reshape(-1, part.size)):
                total_v += digit_v.astype(np.int64).astype(object) << (
                    at * stage.digit_bits
                )
            found[part.name] = [int(x) for x in total_v]
        return found

    def total_(self, stage: Stage, table_d: Vector, num_sites: int) -> None:
        """Turn a mean over sites into the sum of whole digits, in place."""
        here_d = table_d[stage.start : stage.stop]
        digits = np.rint(here_d.astype(np.float64) * (num_sites / self.step))
        here_d[:] = digits * self.step


@functools.lru_cache(maxsize=8)
def _cached(key: "_Key") -> Table:
    spec, noised = key.spec, key.noised
    columns = tuple(
        Column(name=name, spec=asked, place=f"statistics.columns[{index}]")
        for index, asked in enumerate(spec.columns)
        for name in asked.names
    )
    digit_bits = _DIGIT_BITS - (key.num_sites - 1).bit_length()
    grid_bits = _NOISED_GRID_BITS if noised else _GRID_BITS
    first = [_ONE] if noised else [_ONE, _SMALL]
    first += _first(columns, grid_bits, covariances=spec.covariances)
    stages = [Stage(parts=tuple(first), start=0, digit_bits=digit_bits)]
    if num_fine := sum(len(c.spec.quantiles) for c in columns):
        fine = Part(
            name=QUANTILES, size=FINE * num_fine, bits=_COUNT_BITS, most=num_fine
        )
        stages.append(
            Stage(parts=(_ONE, fine), start=stages[0].stop, digit_bits=digit_bits)
        )
    exponent = math.floor(math.log2(_MOST_NORM / math.sqrt(stages[-1].stop)))
    return Table(
        columns=columns,
        stages=tuple(stages),
        grid_bits=grid_bits,
        step=2.0 ** (exponent - (digit_bits - 1)),
        split=spec.split,
        covariances=spec.covariances,
    )


@dataclass(frozen=True, slots=True)
class _Key:
    """What a table follows from; specs hold mappings, which have no hash."""

    spec: StatisticsSpec
    num_sites: int
    noised: bool

    def __hash__(self) -> int:
        return hash((self.spec.columns, self.num_sites, self.noised))


def table_of(spec: StatisticsSpec, num_sites: int, *, noised: bool) -> Table:
    """Lay out the sums of a job.

    Args:
        spec: What it asks.
        num_sites: Sites of the job.
        noised: Whether sums get noise.
    """
    return _cached(_Key(spec, num_sites, noised))


_ONE = Part(name=SITES, size=1, bits=2, most=0)
_SMALL = Part(name=SMALL, size=2, bits=_COUNT_BITS, most=0)


def _first(
    columns: Sequence[Column], grid_bits: int, *, covariances: bool
) -> Iterator[Part]:
    """Parts of the first round that depend on records and are not empty."""
    numbers = [c.spec for c in columns if c.spec.kind == NUMBER]
    words = [c.spec for c in columns if c.spec.kind == CATEGORY]
    binned = [c for c in numbers if c.bin_edges]
    sought = [c for c in numbers if c.quantiles]
    num, square, count = len(numbers), 1 << 2 * grid_bits, _COUNT_BITS
    pairs = num * (num + 1) // 2 if covariances else 0
    cells = sum(len(c.categories) + 1 for c in words)
    parts = (
        # Records, and those without a missing number; of each column those with a
        # value, and of numbers those below and above the bounds, never both.
        Part(
            name=COUNTS,
            size=2 + len(columns) + 2 * num,
            bits=count,
            most=2 + len(columns) + num,
        ),
        # Over records with a value; with pairs, also over those of the products.
        Part(
            name=SUMS,
            size=num * (1 + bool(pairs)),
            bits=grid_bits + _ROOM_BITS,
            most=num * (1 + bool(pairs)) * square,
        ),
        Part(
            name=SQUARES,
            size=num,
            bits=2 * grid_bits + _ROOM_BITS,
            most=num * square**2,
        ),
        # Of each pair i <= j, over records without a missing number.
        Part(
            name=PRODUCTS,
            size=pairs,
            bits=2 * grid_bits + _ROOM_BITS,
            most=pairs * square**2,
        ),
        # A record is in one bin of each column.
        Part(
            name=HISTOGRAMS,
            size=sum(len(c.bin_edges) - 1 for c in binned),
            bits=count,
            most=len(binned),
        ),
        Part(name=CATEGORIES, size=cells, bits=count, most=len(words)),
        Part(name=QUANTILES, size=COARSE * len(sought), bits=count, most=len(sought)),
    )
    return (part for part in parts if part.size)


def windows(
    table: Table, sums: Sums
) -> Iterator[tuple[Column, float, int, float, int]]:
    """Where the second round looks for each quantile, from the sums of the first.

    Yields:
        Column, quantile, number of the coarse bin, rank of the quantile among the
        column's values, and how many of them are in lower bins.
    """
    counts: NDArray[np.int64] = np.array(sums.get(QUANTILES, ()), np.int64)
    sought = [c for c in table.numbers if c.spec.quantiles]
    for column, row in zip(sought, counts.reshape(-1, COARSE), strict=True):
        upto = np.cumsum(row)
        for quantile in column.spec.quantiles:
            rank = quantile * max(int(upto[-1]), 0)
            # Noise may make a running sum fall: the first that reaches the rank.
            at = int(np.argmax(upto >= rank)) if (upto >= rank).any() else COARSE - 1
            below = int(upto[at - 1]) if at else 0
            yield column, quantile, at, rank, below
