"""Sums of independent rounded Gaussians against the rounded Gaussian they stand for.

What is proved in ``docs/explanation/differential-privacy.md``, with 120 digits.
"""

from itertools import product

import mpmath
import pytest
from support.noise_oracles import rounded_pmf

from privacy.dp.mechanism import SLACK

DIGITS = 120


def _sum_pmf(num_sites: int, sigma: float) -> dict[int, mpmath.mpf]:
    """P[R_1 + ... + R_N = k] by convolution."""
    reach = int(14 * sigma) + 4
    one = {k: rounded_pmf(sigma, k) for k in range(-reach, reach + 1)}
    total = dict(one)
    for _ in range(num_sites - 1):
        longer: dict[int, mpmath.mpf] = {}
        for (a, x), (b, y) in product(total.items(), one.items()):
            longer[a + b] = longer.get(a + b, 0) + x * y
        total = longer
    return total


def _stand_in_pmf(num_sites: int, sigma: float, k: int) -> mpmath.mpf:
    """P[round(N(0, N sigma^2) + V) = k], V a sum of N - 1 uniforms.

    The density of the Gaussian and N uniforms at k: an N-th central difference of the
    Gaussian's N-fold integral, ``(n - 1) I_n(z) = z I_{n-1}(z) + I_{n-2}(z)``.
    """
    std = sigma * mpmath.sqrt(num_sites)

    def integral(z: mpmath.mpf) -> mpmath.mpf:
        before, last = mpmath.npdf(z), mpmath.erfc(-z / mpmath.sqrt(2)) / 2
        for n in range(2, num_sites + 1):
            before, last = last, (z * last + before) / (n - 1)
        return last

    # On the negative side, where the integral is small, less cancels.
    highest = -abs(k) + mpmath.mpf(num_sites) / 2
    terms = (
        (-1) ** j * mpmath.binomial(num_sites, j) * integral((highest - j) / std)
        for j in range(num_sites + 1)
    )
    return mpmath.fsum(terms) * std ** (num_sites - 1)


def _bound(num_sites: int, sigma: float) -> mpmath.mpf:
    """The proof's sum over all other terms, up to 4 in every direction."""
    scale = 2 * (mpmath.pi * sigma) ** 2
    squares = (
        sum(x * x for x in m) - mpmath.mpf(sum(m)) ** 2 / num_sites
        for m in product(range(-4, 5), repeat=num_sites - 1)
        if any(m)
    )
    return mpmath.fsum(mpmath.exp(-scale * square) for square in squares)


@pytest.mark.parametrize("sigma", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("num_sites", [2, 3])
def test_every_probability_is_within_the_bound(num_sites: int, sigma: float):
    """Relative error of every probability, eight standard deviations far out."""
    with mpmath.workdps(DIGITS):
        found = _sum_pmf(num_sites, sigma)
        reach = int(8 * sigma * num_sites**0.5)
        worst = max(
            abs(found[k] / _stand_in_pmf(num_sites, sigma, k) - 1)
            for k in range(reach + 1)
        )
        bound = _bound(num_sites, sigma)
        assert bound / 100 < worst <= bound


@pytest.mark.parametrize(
    ("sigma", "want"), [(0.5, "0.069"), (1.0, "4.2e-5"), (2.0, "5.8e-18")]
)
def test_distance_for_two_sites(sigma: float, want: str):
    """Sum of all differences: the figures on the page, below ``2 e^(-pi^2 s^2)``."""
    with mpmath.workdps(DIGITS):
        found = _sum_pmf(2, sigma)
        distance = mpmath.fsum(
            abs(found[k] - _stand_in_pmf(2, sigma, k))
            for k in range(-int(8 * sigma) - 4, int(8 * sigma) + 5)
        )
        assert mpmath.nstr(distance, 2) == want
        assert distance < 2 * mpmath.exp(-((mpmath.pi * sigma) ** 2))


@pytest.mark.parametrize("num_sites", [2, 3, 4])
@pytest.mark.parametrize("sigma", [0.5, 1.0, 4.0])
def test_bounds_for_any_number_of_sites(num_sites: int, sigma: float):
    """The two closed forms of the page are above the sum that they stand for."""
    with mpmath.workdps(DIGITS):
        exact = _bound(num_sites, sigma)
        theta = mpmath.jtheta(3, 0, mpmath.exp(-((mpmath.pi * sigma) ** 2)))
        assert exact <= theta**num_sites - 1
        scale = 2 * (mpmath.pi * sigma) ** 2
        if scale >= 2 * mpmath.log(4 * num_sites):
            least = mpmath.mpf(num_sites - 1) / num_sites
            assert exact <= 16 * num_sites**2 * mpmath.exp(-scale * least)


def test_four_steps_of_noise_are_enough():
    """From sigma = 4 on the error is below 2^-226 for every number of sites."""
    with mpmath.workdps(DIGITS):
        scale = 2 * (mpmath.pi * 4) ** 2
        for num_sites in range(2, 65):
            least = mpmath.mpf(num_sites - 1) / num_sites
            bound = 16 * num_sites**2 * mpmath.exp(-scale * least)
            if num_sites == 2:
                bound = _bound(2, 4.0)
            assert bound < mpmath.mpf(2) ** -226, num_sites


@pytest.mark.parametrize(("draws", "most"), [(1, 2**32), (4, 2**30)])
def test_slack_covers_the_shares_of_a_sum(draws: int, most: int):
    """Shares times values, each off by at most 2^-110, for an epsilon of 12."""
    distance = draws * most * mpmath.mpf(2) ** -110
    assert distance * (1 + mpmath.exp(12)) < SLACK
