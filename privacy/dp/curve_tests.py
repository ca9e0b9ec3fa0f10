"""Tests of a claimed trade-off curve by canaries.

Null hypothesis: what the attacker saw bounds every attack on one record as the curve
says. A small p-value contradicts it. There are two tests, because a stronger assumption
buys much more power:

- ``one_run`` assumes nothing but the coins that put canaries in (Mahloujifar, Melis and
  Chaudhuri 2024, arXiv:2410.22235). Scores may depend on each other in any way. One
  accident may then make all guesses right at once, so that its p-values fall slowly
  with the number of canaries: half the noise gives about 0.01.
- ``independent`` assumes that canaries do not influence each other: given the coins,
  scores are independent. That is part of what DP-SGD claims if each canary has a
  coordinate of its own: sampling and noise are independent for each.

A sum over rounds does not show that noise repeats, nor how records are drawn. Two more
tests look at what the curve takes for granted: ``repeated_noise`` and ``sampling``.

Shape suffixes: m canaries, i scores of canaries that were in, o of those that were out,
t thresholds.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaincinv, ndtr

from privacy.dp.auditing import Guesses, Scores, Truth
from privacy.dp.events import PrivacyEvent
from privacy.dp.trade_off import TradeOff

# Logarithm of the least p-value that is distinguished from 0; halvings to find one.
_LEAST_LOG, _HALVINGS = -60.0, 24

# Thresholds that are looked at together when the first half of the canaries chooses.
_THRESHOLDS = 32

_GOLDEN = (math.sqrt(5) - 1) / 2

_LEAST_SCORES = 4  # Of each kind: half of them choose a threshold, half test it.


@dataclass(frozen=True, slots=True, kw_only=True)
class PValues:
    """Largest probabilities, under the hypothesis, of scores as clear as these.

    Attributes:
        one_run: Valid even if canaries influence each other.
        independent: If they do not influence each other.
    """

    one_run: float
    independent: float


def scores_without_noise(is_in_m: Truth, events: Iterable[PrivacyEvent]) -> Scores:
    """Scores as if from training without noise, rather understated.

    A canary that was drawn in some step is seen, and one that was never drawn looks
    like one that is out. As few were drawn as would be likely at the least: four
    standard errors of half of the canaries below the mean.

    Args:
        is_in_m: Which canaries are in, shape ``(m,)``.
        events: Events of the run.
    """
    never = math.prod((1 - e.sampling_rate) ** e.steps for e in events)
    error = math.sqrt(2 * never * (1 - never) / max(1, int(is_in_m.sum())))
    places = np.cumsum(is_in_m) * _GOLDEN % 1  # Even, and in step with nothing.
    return np.where(is_in_m & (places >= never + 4 * error), 1.0, 0.0)


def one_run(curve: TradeOff, guesses: Guesses) -> float:
    """Test a curve by the number of right guesses, for any dependence of canaries.

    Args:
        curve: Curve of adding or removing one canary.
        guesses: Their number was fixed before scores were looked at.

    Returns:
        The p-value; see ``p_value_of_guesses``.
    """
    return p_value_of_guesses(curve, guesses.canaries, guesses.guesses, guesses.correct)


def p_value_of_guesses(
    curve: TradeOff, canaries: int, guesses: int, correct: int
) -> float:
    """Largest probability of so many right guesses under the curve.

    arXiv:2410.22235, Theorem 8 and Algorithm 3. Let ``p_i`` be the probability of
    exactly i right guesses out of r about m canaries, and

        right(i) = sum over j >= i of p_j * j / m
        wrong(i) = sum over j >= i of p_j * (r - j) / m

    the probabilities, for the average canary, of at least i right guesses and of one
    right or wrong about this canary. If its coin alone were turned, a right guess with
    i right ones in all would be a wrong one with i - 1; so ``wrong(i - 1)`` is a false
    positive rate, and ``right(i)`` the true positive rate of the same attack. From the
    probability of at least v right guesses follow, one by one, the least probabilities
    of v - 1, v - 2, ..., and their sum must not exceed 1.

    Args:
        curve: Curve of adding or removing one canary.
        canaries: m, each in the data with probability 1/2, independently.
        guesses: r at most m; which canaries are guessed may depend on the output.
        correct: v at most r.

    Returns:
        At most 1; an upper bound.

    Raises:
        ValueError: A number is out of range.
    """
    if not 0 <= correct <= guesses <= canaries:
        raise ValueError(
            f"{correct} correct of {guesses} guesses are not possible for {canaries} "
            "canaries"
        )
    low, high = _LEAST_LOG, 0.0
    if _is_possible(curve, canaries, guesses, correct, 1.0):
        return 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _is_possible(curve, canaries, guesses, correct, math.exp(middle)):
            low = middle
        else:
            high = middle
    return math.exp(high)


def _is_possible(
    curve: TradeOff, canaries: int, guesses: int, correct: int, probability: float
) -> bool:
    """Whether so many right guesses or more may have this probability."""
    right = probability * correct / canaries
    wrong = probability * (guesses - correct) / canaries
    for fewer in range(correct - 1, -1, -1):
        least = curve.least_false_positives(right)
        if least > wrong:
            right += (least - wrong) * fewer / (guesses - fewer)
            wrong = least
        if right + wrong > guesses / canaries:
            return False
    return right + wrong <= guesses / canaries


def independent(curve: TradeOff, scores_m: Scores, is_in_m: Truth) -> float:
    """Test a curve by the rates of an attack, if canaries are independent.

    The first half of the canaries chooses a threshold, and the second half tests the
    curve there: Clopper-Pearson limits of both rates, each with half of the risk. It
    is done for "in" above a threshold and for "out" below one, and the p-value is
    twice the smaller one.

    Args:
        curve: Curve of adding or removing one canary.
        scores_m: Shape ``(m,)``; the higher, the more a canary seems to be in.
        is_in_m: Shape ``(m,)``; whether it is.

    Returns:
        The p-value.
    """
    in_i, out_o = scores_m[is_in_m], scores_m[~is_in_m]
    if min(len(in_i), len(out_o)) < _LEAST_SCORES:
        return 1.0
    found = min(_one_way(curve, in_i, out_o), _one_way(curve, -out_o, -in_i))
    return min(1.0, 2 * found)


def repeated_noise(products_o: Scores) -> float:
    """Test whether the noise of different rounds is independent, or repeats.

    Args:
        products_o: Sum over pairs of rounds of the product of both updates, of each
            canary that was out: only noise moved it, so that the mean is 0. Shape
            ``(o,)``.

    Returns:
        The p-value of a mean above 0; noise that cancels out is found by the curve.
        1 without two rounds that moved anything.
    """
    if len(products_o) < _LEAST_SCORES or not (spread := products_o.std(ddof=1)):
        return 1.0
    z = products_o.mean() / spread * math.sqrt(len(products_o))
    return float(ndtr(-z))


def sampling(
    draws_u: NDArray[np.int64],
    claimed: Iterable[PrivacyEvent],
    *,
    share_of_rate: float = 1.0,
) -> float:
    """Test whether steps drew each record independently, at no more than their rate.

    How often a record is drawn is a sum of independent coins, one for each step. Two
    statistics, normal for many records: the mean number, and the variance, which is
    too small where steps work through a shuffled list and too large where they draw
    the same records again.

    Args:
        draws_u: How often each record was drawn, or each person, shape ``(u,)``.
        claimed: Events of the run.
        share_of_rate: The rate that steps sample with, over the claimed one.

    Returns:
        The p-value.
    """
    events = [(event.steps, event.sampling_rate) for event in claimed]
    most = sum(steps * rate for steps, rate in events)
    coins = [(steps, share_of_rate * rate) for steps, rate in events]
    mean = sum(steps * rate for steps, rate in coins)
    variance = sum(steps * rate * (1 - rate) for steps, rate in coins)
    if not variance:
        return float((draws_u == most).all())
    fourth = sum(
        steps * rate * (1 - rate) * (1 - 6 * rate * (1 - rate)) for steps, rate in coins
    )
    root = math.sqrt(len(draws_u))
    too_many = (draws_u.mean() - most) / math.sqrt(variance) * root
    ratio = ((draws_u - mean) ** 2).mean() / variance
    uneven = (ratio - 1) / math.sqrt(2 + fourth / variance**2) * root
    return min(1.0, 2 * float(min(ndtr(-too_many), 2 * ndtr(-abs(uneven)))))


def _one_way(curve: TradeOff, first: Scores, second: Scores) -> float:
    """Test the share of ``first`` over that of ``second`` above a threshold."""
    threshold = _best_threshold(curve, first[::2], second[::2])
    tested = np.array([threshold])
    return float(_p_values(curve, first[1::2], second[1::2], tested)[0])


def _best_threshold(curve: TradeOff, first: Scores, second: Scores) -> float:
    """Find the score at which the rates contradict the curve most.

    Among evenly spaced ranks at first, and then ever closer to the best of them.
    """
    ranked = np.sort(np.concatenate((first, second)))
    low, high = 0, len(ranked) - 1
    while True:
        ranks = np.unique(np.rint(np.linspace(low, high, _THRESHOLDS)).astype(np.int64))
        best = int(_p_values(curve, first, second, ranked[ranks]).argmin())
        if high - low < _THRESHOLDS:
            return float(ranked[ranks[best]])
        low = int(ranks[max(best - 1, 0)])
        high = int(ranks[min(best + 1, len(ranks) - 1)])


def _p_values(
    curve: TradeOff, first: Scores, second: Scores, thresholds_t: Scores
) -> Scores:
    hits_t, errors_t = _reached(first, thresholds_t), _reached(second, thresholds_t)
    low_t = np.full(len(thresholds_t), _LEAST_LOG)
    high_t = np.zeros(len(thresholds_t))
    for _ in range(_HALVINGS):
        middle_t = (low_t + high_t) / 2
        tails_t = np.exp(middle_t) / 2
        least_t = _least_rate(hits_t, len(first), tails_t)
        most_t = 1 - _least_rate(len(second) - errors_t, len(second), tails_t)
        is_contradicted_t = least_t > curve.most_true_positives(most_t)
        low_t = np.where(is_contradicted_t, low_t, middle_t)
        high_t = np.where(is_contradicted_t, middle_t, high_t)
    return np.exp(high_t)


def _least_rate(hits_t: NDArray[np.int64], trials: int, tails_t: Scores) -> Scores:
    """Clopper-Pearson's lower limit for each number of hits."""
    least = betaincinv(np.maximum(hits_t, 1), trials - hits_t + 1, tails_t)
    return np.where(hits_t > 0, least, 0.0)


def _reached(scores: Scores, thresholds_t: Scores) -> NDArray[np.int64]:
    return len(scores) - np.searchsorted(np.sort(scores), thresholds_t, side="left")
