"""Private selection: the best of a random number of trials, and what it costs.

A mechanism is run K times and only the result with the best score is released. If K is
drawn from one of the distributions here and stays secret, the result costs little more
than one run, however many runs there were: Liu and Talwar 2019 (arXiv:1811.07971) for
the geometric distribution; Papernot and Steinke 2022 (arXiv:2110.03620), whose Theorems
2 and 6 these bounds are. A fixed or published number of runs has no such bound.

The bound holds for those who see the best result alone. The aggregator of a federation
sees all trials: for it, their composition holds.

Shape suffixes: a orders.
"""

import decimal
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from privacy.dp import accountant
from privacy.dp.events import PrivacyEvent, total_slack

Distribution = Literal["logarithmic", "geometric", "poisson"]
DISTRIBUTIONS: tuple[Distribution, ...] = get_args(Distribution)

MIN_MEAN, MAX_MEAN = 2.0, 10_000.0

Curve = NDArray[np.float64]

# eta of Papernot and Steinke, Definition 1.
_SHAPES: Mapping[Distribution, int] = {"logarithmic": 0, "geometric": 1}

_UNIFORM_BYTES = 32
_DIGITS = 60
_HALVINGS = 100
_SLACK_SHARE = 2.0**-6  # of delta


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomTrials:
    """How many trials there are: a random number, of which only the mean is public.

    Attributes:
        distribution: ``geometric`` and ``logarithmic`` are truncated negative binomial
            distributions with the shape eta = 1 and 0; they give at least one trial.
            ``poisson`` is more concentrated, and may give none.
        mean: The expected number of trials, from 2 to 10,000.

    Raises:
        ValueError: A value is out of its range.
    """

    distribution: Distribution
    mean: float

    def __post_init__(self) -> None:
        """Refuse values that the theorems do not cover."""
        if self.distribution not in DISTRIBUTIONS:
            raise ValueError(
                f"distribution is {self.distribution!r}, not one of {DISTRIBUTIONS}"
            )
        if not MIN_MEAN <= self.mean <= MAX_MEAN:
            raise ValueError(
                f"mean is {self.mean}, not from {MIN_MEAN:g} to {MAX_MEAN:g}"
            )

    @property
    def gamma(self) -> float:
        """The parameter gamma of a truncated negative binomial with this mean.

        Papernot and Steinke, Definition 1: E[K] is 1 / gamma for eta = 1, and
        (1 / gamma - 1) / log(1 / gamma) for eta = 0.
        """
        if self.distribution == "geometric":
            return 1 / self.mean
        # Of x = log(1 / gamma), with E[K] = (e^x - 1) / x, which grows with x.
        low, high = 0.0, 2 * math.log(self.mean) + 2
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            is_above = math.expm1(middle) > self.mean * middle
            low, high = (low, middle) if is_above else (middle, high)
        return math.exp(-high)

    def draw(self, random_bytes: Callable[[int], bytes] = os.urandom) -> int:
        """Draw the number of trials; it must stay secret.

        Args:
            random_bytes: Source of 32 uniform bytes.

        Guarantee:
            The distribution is within 2^-170 of the one that the bounds are for.
        """
        raw = int.from_bytes(random_bytes(_UNIFORM_BYTES), "big")
        with decimal.localcontext(prec=_DIGITS):
            left = Decimal(raw) / (1 << (8 * _UNIFORM_BYTES))
            for count, probability in self._probabilities():
                left -= probability
                # Small numbers are as improbable as large ones where many are expected.
                is_tail = count > self.mean and probability.adjusted() < -_DIGITS
                if left < 0 or is_tail:
                    return count
        raise AssertionError("the last probabilities are too small to be reached")

    def renyi_of_best(
        self, orders_a: Curve, single_a: Curve, deltas_of: Callable[[Curve], Curve]
    ) -> Curve:
        """Bound the Renyi divergence of the best of all trials.

        Theorem 2 of Papernot and Steinke for the truncated negative binomial, with the
        order lambda-hat that gives least; Theorem 6 for Poisson, with the smallest
        delta-hat that goes with the largest epsilon-hat permitted.

        Args:
            orders_a: Orders, all above 1.
            single_a: Renyi divergence of one trial at each order; may be infinite.
            deltas_of: The smallest delta of one trial for each of some epsilons; only
                called for Poisson.

        Returns:
            Upper bounds at the same orders, shape ``(a,)``.
        """
        more: Curve | float
        if self.distribution == "poisson":
            more = self.mean * deltas_of(np.log1p(1 / (orders_a - 1)))
        else:
            log_gamma = math.log(self.gamma)
            hats_a = (1 - 1 / orders_a) * single_a - log_gamma / orders_a
            more = (1 + _SHAPES[self.distribution]) * float(hats_a.min())
        found: Curve = single_a + more + math.log(self.mean) / (orders_a - 1)
        return found

    def _probabilities(self) -> Iterator[tuple[int, Decimal]]:
        """Yield each number with its probability, in ascending order."""
        mean, gamma = Decimal(self.mean), Decimal(self.gamma)
        if self.distribution == "poisson":
            probability = (-mean).exp()
            yield 0, probability
            for count in itertools.count(1):
                probability *= mean / count
                yield count, probability
        power = 1 - gamma
        for count in itertools.count(1):
            if self.distribution == "geometric":
                yield count, gamma * power / (1 - gamma)
            else:
                yield count, power / (count * -gamma.ln())
            power *= 1 - gamma


def epsilon_of_best(
    events: Iterable[PrivacyEvent], delta: float, trials: RandomTrials
) -> float:
    """Epsilon of the best of a random number of trials, at one delta.

    Args:
        events: What one trial releases; all trials release the same kinds of events.
        delta: Probability that is left to chance, in (0, 1).
        trials: How their number is drawn.

    Returns:
        An upper bound for those who see the best trial's releases and no other, nor the
        number of trials; infinity if none can be given.
    """
    events = tuple(events)
    if not events:
        return 0.0
    found = _epsilon_without_slack(events, delta * (1 - _SLACK_SHARE), trials)
    # A trial is within its slack of one that the theorems are about, for both of two
    # neighbours; of all trials, E[K] times that.
    missed = trials.mean * total_slack(events) * (1 + math.exp(min(found, 700.0)))
    return found if missed <= delta * _SLACK_SHARE else math.inf


def _epsilon_without_slack(
    events: tuple[PrivacyEvent, ...], delta: float, trials: RandomTrials
) -> float:
    from dp_accounting import rdp  # noqa: PLC0415 -- slow to import

    orders_a, single_a = accountant.renyi(events)
    best_a = trials.renyi_of_best(
        orders_a, single_a, partial(accountant.deltas, events)
    )
    found, _ = rdp.compute_epsilon(orders_a, best_a, delta)
    return float(found)
