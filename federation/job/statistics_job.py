"""The ``[statistics]`` table of a job: what is asked about the sites' records.

A job with this table trains nothing: its rounds add up sums over records, in the place
of updates. Which sums these are is in ``statistics_table``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from federation.job.job_keys import key

MAX_BINS, MAX_CATEGORIES, MAX_QUANTILES = 4096, 4096, 32
NUMBER, CATEGORY = "number", "category"
OTHER = "(other)"  # How results name all categories that are not listed.


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnSpec:
    """Columns that are asked about in the same way: numbers, or words from a list.

    Attributes:
        names: Names of the columns. Columns of an array without names are `0`, `1`, and
            so on; targets are `target`. Of a column of texts, `NAME.length` is its
            number of characters, and `NAME.has.WORD` whether it has a word. Of images,
            `inputs.channel.0` is the mean of a channel, `inputs.channel.0.square` that
            of its squares; `inputs.height` and `inputs.width` are their size.
        low: Least value of a number. Smaller ones count as this one. It is public:
            never take it from the data.
        high: Largest value of a number, likewise.
        unit: Unit of measurement. A site whose data states another one refuses.
        bins: Bins of equal width of a histogram from `low` to `high`; 0 for none.
        edges: Edges of the bins of a histogram instead, which are also the bounds.
        quantiles: Quantiles to find, each above 0 and below 1. They take a second
            round, and are exact to 1/32,768 of the range where sites leave out no
            small cells.
        categories: All values of a column of words, or of whole numbers, whose records
            are counted one by one. Others are counted together.
    """

    names: tuple[str, ...]
    low: float | None = None
    high: float | None = None
    unit: str = ""
    bins: int = key(default=0, low=0, high=MAX_BINS)
    edges: tuple[float, ...] = ()
    quantiles: tuple[float, ...] = ()
    categories: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """What the columns hold."""
        return CATEGORY if self.categories else NUMBER

    @property
    def bounds(self) -> tuple[float, float]:
        """Least and largest value of a number.

        Raises:
            ValueError: A column of words has none.
        """
        if self.edges:
            return self.edges[0], self.edges[-1]
        if self.low is None or self.high is None:
            raise ValueError("a checked column of numbers has bounds")
        return self.low, self.high

    @property
    def bin_edges(self) -> tuple[float, ...]:
        """Edges of the histogram; empty if there is none."""
        if self.edges or not self.bins:
            return self.edges
        low, high = self.bounds
        return equal_edges(low, high, self.bins)


def equal_edges(low: float, high: float, bins: int) -> tuple[float, ...]:
    """Edges of so many bins of equal width, each rounded once: 30 is not 29.99..."""
    first, width = Fraction(low), (Fraction(high) - Fraction(low)) / bins
    return (*(float(first + width * at) for at in range(bins)), high)


@dataclass(frozen=True, slots=True, kw_only=True)
class StatisticsSpec:
    """Statistics of the sites' training records, in place of a training run.

    With differential privacy, all sums of a round are one release: noise is calibrated
    to what a single record can change in all of them together.

    Attributes:
        columns: The columns, one `[[statistics.columns]]` table for those that share
            bounds and questions.
        covariances: Whether to compute covariances and correlations of all columns of
            numbers.
        split: How the privacy of a round is divided among its parts, in proportion to
            these numbers: `counts`, `sums`, `squares`, `products` (of `covariances`),
            `histograms`, `categories` and `quantiles`. Default: 1 for each. A part with
            four times the share has half the noise.
    """

    columns: tuple[ColumnSpec, ...]
    covariances: bool = False
    split: Mapping[str, float] = key(default={})
