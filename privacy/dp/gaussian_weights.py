"""The probabilities of a rounded Gaussian, to 128 bits, computed with integers only.

Drawing from them is in ``privacy.dp.noise``. Floating-point numbers would not do:
their error per draw, times the draws of a training run, is no small delta.
"""

import math
from collections.abc import Iterator
from fractions import Fraction

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
