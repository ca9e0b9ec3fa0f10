"""Noise for release: Gaussians rounded to integers, drawn from AES in counter mode.

No floating-point number is between the keystream and the noise, so the attack of
Mironov (CCS 2012) on the low bits of floating-point noise finds nothing, and no
generator that a seed can repeat takes part: two sites that were given the same seed
draw independent noise.

How a sum gets onto the grid, and how much noise a guarantee needs, are in
``privacy.dp.mechanism``; what follows from the noise is in the accountant.

Shape suffixes: d values, c values of one chunk, m cells of a table.

The probabilities of a rounded Gaussian are computed to 128 bits, with integers only.
Floating-point numbers would not do: their error per draw, times the draws of a training
run, is no small delta.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from privacy.keystream import KEY_BYTES, SPARE_BYTES, Keystream, aligned, open_keystream

WEIGHT_BITS = 128  # weights are in units of 2^-128

_TAIL = 13.3  # standard deviations; beyond them lie less than 2^-131
_TAIL_UNITS = 2  # room for that tail and for the error of the arithmetic, in units
_PRECISE_BITS = 192
_SERIES_BITS = 160


def half_weights(sigma: float) -> list[int]:
    """Weigh 0, 1, 2, ... so that value and sign together follow round(N(0, sigma^2)).

    With u integrated over (-1/2, 1/2) and v = sigma^2,

        P(k) ~ exp(-k^2/2v) int exp(-ku/v - u^2/2v) du
             = exp(-k^2/2v) sum_j (k/v)^2j / (2j)! int u^2j exp(-u^2/2v) du,

    a polynomial in k^2 with positive coefficients only, hence without cancellation.
    The Gaussian factor follows from one k to the next by two products. All is
    fixed-point with 192 bits or more; the sum over k takes the place of sqrt(2 pi).

    Args:
        sigma: Standard deviation, at least 0.5, at most some thousands.

    Returns:
        A power of two of weights, zeros at the end, that sum to 2^127: of k and of
        -k each, in units of 2^-128, and half the weight of 0.
    """
    num = math.ceil(_TAIL * sigma) + 2
    raw = _unnormalised(sigma, num)
    total = raw[0] + 2 * sum(raw[1:])
    weights = [(weight << WEIGHT_BITS) // total for weight in raw]
    weights[0] //= 2
    weights += [0] * ((1 << (num - 1).bit_length()) - num)
    weights[0] += (1 << (WEIGHT_BITS - 1)) - sum(weights)  # What was rounded down.
    return weights


def truncation_distance(sigma: float) -> float:
    """Total variation distance of the weights from the distribution, an upper bound."""
    # Every weight of either sign is off by less than one unit, and zero by their sum.
    num_values = 2 * math.ceil(_TAIL * sigma) + 3
    return (num_values + _TAIL_UNITS) * 2.0**-WEIGHT_BITS


def _unnormalised(sigma: float, num: int) -> list[int]:
    # The polynomial's terms grow before they fall; small sigmas need more bits.
    bits = _PRECISE_BITS + math.ceil(256 / sigma)
    first, *others = reversed(_coefficients(sigma, num, bits))
    rate = _half_rate(sigma, bits)
    gauss, decay, ratio = 1 << bits, _exp_minus(rate, bits), _exp_minus(2 * rate, bits)
    square_step, weights = 4 * rate * rate >> bits, []
    for k in range(num):
        square, value = k * k * square_step, first
        for coefficient in others:
            value = (value * square >> bits) + coefficient
        weights.append(gauss * value >> bits)
        gauss = gauss * decay >> bits
        decay = decay * ratio >> bits
    return weights


def _coefficients(sigma: float, num: int, bits: int) -> list[int]:
    """Coefficients of (k/v)^2j until none matters for any k below ``num``."""
    largest = (num / sigma**2) ** 2
    found: list[int] = []
    factorial, log_bound = 1, 0.0
    # int u^2j exp(-u^2/2v) du is at most 2^-2j, and past its peak the series halves.
    while not found or 2 * len(found) ** 2 < largest or log_bound > -_SERIES_BITS:
        j = len(found)
        found.append(_moment(j, sigma, bits) // factorial)
        factorial *= (2 * j + 1) * (2 * j + 2)
        log_bound += math.log2(largest / (4 * (2 * j + 1) * (2 * j + 2)))
    return found


def _moment(j: int, sigma: float, bits: int) -> int:
    """``int u^2j exp(-u^2/2v) du`` over (-1/2, 1/2), by its power series."""
    terms = _exponential_terms(_half_rate(sigma, bits), bits)
    return sum(
        (-1) ** i * ((term >> 2 * (i + j)) // (2 * (i + j) + 1))
        for i, term in enumerate(terms)
    )


def _exp_minus(rate: int, bits: int) -> int:
    """``exp(-rate)``, by its power series; both fixed-point."""
    terms = _exponential_terms(rate, bits)
    return sum((-1) ** i * term for i, term in enumerate(terms))


def _exponential_terms(rate: int, bits: int) -> Iterator[int]:
    """``rate^i / i!`` until it vanishes."""
    term, i = 1 << bits, 0
    while term:
        yield term
        i += 1
        term = term * rate // i >> bits


def _half_rate(sigma: float, bits: int) -> int:
    """``1/2v``, fixed-point."""
    rate = 1 / (2 * Fraction(sigma) ** 2)
    return (rate.numerator << bits) // rate.denominator


MIN_SIGMA = 0.5
MAX_SIGMA = 2.0**26  # 16 standard deviations fit in 30 bits beside a value of 30 bits

# Tables of half a megabyte. Larger ones are faster than two levels only as long as
# nothing else needs the cache.
_MAX_TABLE_SIGMA = 1024.0
_COARSE_TO_FINE = 3  # sigma of the finer level over the coarser one's spacing
_CHUNK = 1 << 14  # the buffers and a middle-sized table fit in that cache together
_WORD_BYTES = 8
_WORD_BITS = 64

IntegerArray = NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundedGaussian:
    """``round(N(0, sigma^2))``, exactly but for a stated distance.

    **Why rounded.** For an integer x, ``x + round(Z) = round(x + Z)``: what is released
    is a function of the continuous Gaussian mechanism's output, and all that is known
    about that mechanism, amplification by sampling included, holds unchanged
    (post-processing). The discrete Gaussian of Canonne, Kamath and Steinke
    (arXiv:2004.00010), which Kairouz, Liu and Steinke (arXiv:2102.06387) add up over
    clients, needs a theorem of its own for either.

    **Sampling.** Walker's alias method (ACM TOMS 3(3), 1977): m = 2^b cells of equal
    probability hold two values each. A 64-bit word gives the cell by its lower b bits
    and is compared, by the others, with the first 64 - b bits of the threshold of
    128 - b; if these are equal, 64 further bits decide.

    **Large sigma.** Above 1024 the draw is ``k R1 + R2`` with two independent rounded
    Gaussians, s2 = 3 k, and ``(k s1)^2 + s2^2 >= sigma^2``. It is ``round(N(0, std^2) +
    k U)`` with U uniform on (-1/2, 1/2) and independent: a post-processing of the
    Gaussian again. Proof idea: ``k R1`` samples the density of ``N(0, (k s1)^2) + k U``
    at the multiples of k. By Poisson's summation the sampled density is the sum, over
    integers j, of its copies modulated by ``e^(2 pi i j t / k)``; j = 0 is the claim,
    and convolved with N2 the others shrink to ``exp(-2 pi^2 j^2 (s1 s2 / std)^2)`` of
    it, pointwise. This is below 2^-250 here. R2 may be made of two levels in turn.

    Not constant time: reads of the tables depend on the noise, so a process that
    shares the processor's cache may learn something about it.

    Attributes:
        sigma: Standard deviation asked for, in steps of the grid, at least
            ``MIN_SIGMA`` and at most ``MAX_SIGMA``.

    Guarantee:
        A draw's total variation distance from a post-processing, that does not
        depend on the data, of N(0, ``std``^2) is at most ``distance``, given that
        AES-256 in counter mode is indistinguishable from random bytes. ``std >=
        sigma``.

    Raises:
        ValueError: ``sigma`` is out of range.
    """

    sigma: float

    def __post_init__(self) -> None:
        """Refuse what the tables or 32 bits cannot hold."""
        if not MIN_SIGMA <= self.sigma <= MAX_SIGMA:
            raise ValueError(
                f"noise on the grid needs a standard deviation of {MIN_SIGMA} to "
                f"{MAX_SIGMA:.0f} steps, not {self.sigma}: choose another step"
            )

    @property
    def std(self) -> float:
        """Standard deviation of the Gaussian before rounding, which privacy needs."""
        levels = _levels(self.sigma)
        # Never above the truth, and sigma is below it.
        return max(self.sigma, math.sqrt(_squares(levels)) * (1 - 2.0**-50))

    @property
    def variance(self) -> float:
        """Variance of a draw: rounding adds 1/12, a spacing of k adds k^2/12."""
        levels = _levels(self.sigma)
        return float(_squares(levels)) + sum(k * k for k, _ in levels) / 12

    @property
    def largest(self) -> int:
        """Bound on the absolute value of a draw."""
        return sum(k * _table(sigma).largest for k, sigma in _levels(self.sigma))

    @property
    def distance(self) -> float:
        """Total variation distance per draw of the guarantee: 2^-110 or less."""
        return sum(truncation_distance(s) for _, s in _levels(self.sigma)) + 2.0**-248

    @property
    def bytes_per_draw(self) -> int:
        """Bytes of the keystream that a draw takes, except for ties."""
        return _WORD_BYTES * len(_levels(self.sigma))

    def draw(self, keystream: Keystream) -> int:
        """Draw one value."""
        one = np.zeros(1, np.int32)
        self.add_(one, keystream)
        return int(one[0])

    def add_(self, values_d: IntegerArray, keystream: Keystream) -> None:
        """Add a fresh draw to every value, in place, modulo 2^32.

        How the stream is split depends on the size: values that are passed
        in two calls get different noise than in one.

        Args:
            values_d: ``int32``, or words of a ring in ``uint32``; flat.
            keystream: Where the randomness comes from, used for nothing else.

        Raises:
            ValueError: The array is none of these.
        """
        if values_d.dtype not in (np.int32, np.uint32) or values_d.ndim != 1:
            raise ValueError(
                "noise can be added only to a flat array of int32 or uint32, not to "
                f"{values_d.dtype}{values_d.shape}"
            )
        signed_d = values_d.view(np.int32)
        sampler = _Sampler(keystream)
        levels = [(k, _table(sigma)) for k, sigma in _levels(self.sigma)]
        for start in range(0, signed_d.size, _CHUNK):
            chunk_c = signed_d[start : start + _CHUNK]
            for k, table in levels:
                draw_c = sampler.draw(table, chunk_c.size)
                if k > 1:
                    np.multiply(draw_c, np.int32(k), out=draw_c)
                np.add(chunk_c, draw_c, out=chunk_c)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    """Walker's table; the cells of a value's two signs are adjacent.

    Attributes:
        thresholds_m: First bits of a cell's threshold above the cell's own number.
            A word whose lower bits name the cell is below it if its fraction is.
        low_m: The threshold's other 64 bits.
        values_2m: The cells' own values, then their aliases.
    """

    thresholds_m: NDArray[np.uint64]
    low_m: NDArray[np.uint64]
    values_2m: NDArray[np.int32]

    @property
    def largest(self) -> int:
        """Largest value that has a weight."""
        return int(self.values_2m.max())


class _Sampler:
    """One caller's buffers."""

    def __init__(self, keystream: Keystream) -> None:
        self._keystream = keystream
        self._raw = aligned(_WORD_BYTES * _CHUNK + SPARE_BYTES, np.uint8)
        self._more = np.empty(_WORD_BYTES + SPARE_BYTES, np.uint8)
        self._cells_c = aligned(_CHUNK, np.int64)
        self._thresholds_c = aligned(_CHUNK, np.uint64)
        self._flags_c = aligned(_CHUNK, np.bool_)
        self._draw_c = aligned(_CHUNK, np.int32)

    def draw(self, table: _Table, size: int) -> NDArray[np.int32]:
        """Draw at most ``_CHUNK`` values; the next call writes over them."""
        words_c = self._raw[: _WORD_BYTES * size].view(np.uint64)
        cells_c, flags_c = self._cells_c[:size], self._flags_c[:size]
        thresholds_c, draw_c = self._thresholds_c[:size], self._draw_c[:size]
        num_cells = table.thresholds_m.size
        self._keystream.read_into(self._raw, _WORD_BYTES * size)
        np.bitwise_and(words_c.view(np.int64), num_cells - 1, out=cells_c)
        # "clip" never clips here; it saves take a copy of its output.
        np.take(table.thresholds_m, cells_c, out=thresholds_c, mode="clip")
        np.equal(words_c, thresholds_c, out=flags_c)
        tied = np.flatnonzero(flags_c) if flags_c.any() else ()
        np.greater_equal(words_c, thresholds_c, out=flags_c)
        for index in tied:
            flags_c[index] = self._word() >= int(table.low_m[cells_c[index]])
        offsets_c = thresholds_c.view(np.int64)
        np.multiply(flags_c, num_cells, out=offsets_c)
        np.add(cells_c, offsets_c, out=cells_c)
        return np.take(table.values_2m, cells_c, out=draw_c, mode="clip")

    def _word(self) -> int:
        self._keystream.read_into(self._more, _WORD_BYTES)
        return int.from_bytes(self._more[:_WORD_BYTES].tobytes(), "little")


@functools.cache
def _levels(sigma: float) -> tuple[tuple[int, float], ...]:
    """Factors and standard deviations whose weighted sum is at least ``sigma``."""
    if sigma <= _MAX_TABLE_SIGMA:
        return ((1, sigma),)
    # Balanced: both tables are for about the same sigma.
    balanced = math.sqrt(_COARSE_TO_FINE * sigma)
    k = math.ceil(sigma / min(_MAX_TABLE_SIGMA, balanced))
    finer = _levels(float(_COARSE_TO_FINE * k))
    coarse = math.sqrt(sigma**2 - float(_squares(finer))) / k
    while _squares(((k, coarse), *finer)) < Fraction(sigma) ** 2:
        coarse = math.nextafter(coarse, math.inf)
    return ((k, coarse), *finer)


def _squares(levels: Sequence[tuple[int, float]]) -> Fraction:
    return sum((Fraction(k) * Fraction(sigma)) ** 2 for k, sigma in levels) + Fraction()


@functools.lru_cache(maxsize=8)
def _table(sigma: float) -> _Table:
    """Build the table of one level: 0.03 s for the largest."""
    weights = half_weights(sigma)
    half = len(weights)
    bits = (2 * half).bit_length() - 1
    thresholds, aliases = _alias(weights, 1 << (WEIGHT_BITS - bits))
    mask = (1 << _WORD_BITS) - 1
    high = np.array([t >> _WORD_BITS for t in thresholds] * 2, np.uint64)
    other = np.array(aliases, np.int32)
    own = np.where(np.array(weights, bool), np.arange(half, dtype=np.int32), other)
    return _Table(
        thresholds_m=high << np.uint64(bits) | np.arange(2 * half, dtype=np.uint64),
        low_m=np.array([t & mask for t in thresholds] * 2, np.uint64),
        values_2m=np.concatenate([own, -own, other, -other]),
    )


def _alias(weights: Sequence[int], capacity: int) -> tuple[list[int], list[int]]:
    """Fill cells of one capacity with two values each.

    Light values take what their cell lacks from the first heavy value; a heavy one
    that has become light takes it from the next.
    """
    thresholds, aliases = list(weights), list(range(len(weights)))
    heavy = [k for k, weight in enumerate(weights) if weight > capacity]
    giver, left = 0, weights[heavy[0]]
    for k, weight in enumerate(weights):
        if weight > capacity:
            continue
        aliases[k] = heavy[giver]
        left -= capacity - weight
        while left <= capacity and giver + 1 < len(heavy):
            thresholds[heavy[giver]] = left
            aliases[heavy[giver]] = heavy[giver + 1]
            giver += 1
            left -= capacity - weights[heavy[giver]]
    assert left == capacity, "the weights must fill the cells"  # noqa: S101
    thresholds[heavy[giver]] = capacity
    for k, threshold in enumerate(thresholds):
        if threshold == capacity:  # It has one bit too many; its alias is the same.
            thresholds[k], aliases[k] = 0, k
    return thresholds, aliases


_ROUND_UP = 1 + 2.0**-50

_Words = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class RingNoise:
    """Rounded Gaussians for some spans of an update's words.

    A ``privacy.secagg.arithmetic.seal.Noise``. Values outside the spans carry nothing
    of any records and stay as they are. Noise too large for one draw is the sum
    of up to four: of independent draws, as the sum over sites is.

    Attributes:
        noise_std: Standard deviation, in steps of the ring's grid.
        spans: Places ``[start, stop)`` that noise is added to, in order.
        random_bytes: Source of fresh keys, one for each range that is worked on.
    """

    noise_std: float
    spans: Sequence[tuple[int, int]]
    random_bytes: Callable[[int], bytes] = field(repr=False)

    def open(self, num_words: int) -> Callable[[_Words, int], None]:
        """Open a stream with its own key; see ``Noise.open``."""
        num_draws = max(1, math.ceil((self.noise_std / MAX_SIGMA) ** 2))
        part = self.noise_std / math.sqrt(num_draws) * _ROUND_UP
        gaussian = RoundedGaussian(sigma=min(MAX_SIGMA, part))
        keystream = open_keystream(
            self.random_bytes(KEY_BYTES),
            num_bytes=gaussian.bytes_per_draw * num_words * num_draws,
        )

        def add_(words_c: _Words, begin: int) -> None:
            for start, stop in self.spans:
                first, last = max(start - begin, 0), min(stop - begin, words_c.size)
                for _ in range(num_draws if first < last else 0):
                    gaussian.add_(words_c[first:last], keystream)

        return add_
