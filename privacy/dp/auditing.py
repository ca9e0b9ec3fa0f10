"""Lower bounds on epsilon, from attacks that were carried out.

An accountant says what cannot be learned; an audit tries to learn it. If an attack
succeeds more often than (epsilon, delta) allows, noise, clipping, sampling or
accounting are wrong. If it does not, nothing is proved: better attacks may exist.

Canaries are records made for the attack, each of which is in the data with
probability 1/2. Their bound holds for any training algorithm. Where the
scores come from is in ``clients.audit.canaries`` and
``clients.audit.membership_scores``.

Shape suffixes: m canaries, i scores of records that were in, o of records that were
not.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import betainc, betaincinv, gammaln, xlog1py, xlogy

Scores = NDArray[np.float64]
Truth = NDArray[np.bool_]

MAX_EPSILON = 100.0  # No audit with fewer than 10^40 canaries could show more.
_BISECTIONS = 60
_LEAST_RECORDS = 4  # In each group: half of them choose a threshold, half test it.


@dataclass(frozen=True, slots=True, kw_only=True)
class Guesses:
    """An attacker's guesses about canaries, and how many are right.

    Attributes:
        canaries: m, all of them.
        guesses: r, those about which the attacker said something.
        correct: v of the guesses.
        low: Scores up to this one were guessed to be out.
        high: Scores from this one on were guessed to be in.
    """

    canaries: int
    guesses: int
    correct: int
    low: float
    high: float

    def epsilon(self, *, delta: float, confidence: float) -> float:
        """Lower bound on epsilon; see ``epsilon_lower_bound``."""
        return epsilon_lower_bound(
            self.canaries,
            self.guesses,
            self.correct,
            delta=delta,
            confidence=confidence,
        )

    def largest_epsilon(self, *, delta: float, confidence: float) -> float:
        """The bound if every guess had been right: what this audit could show."""
        return epsilon_lower_bound(
            self.canaries,
            self.guesses,
            self.guesses,
            delta=delta,
            confidence=confidence,
        )


def guess(scores_m: Scores, is_in_m: Truth, *, num_guesses: int) -> Guesses:
    """Guess "in" for the highest scores, "out" for the lowest, and abstain between.

    arXiv:2305.08846, Algorithm 1, with as many guesses of one kind as of the other.
    Canaries of the same score are taken in their own order, which knows nothing of
    the truth.

    Args:
        scores_m: Shape ``(m,)``; the higher, the more a canary seems to be in.
        is_in_m: Shape ``(m,)``; whether it is.
        num_guesses: r, from 2 to m, rounded down to an even number. Fix it before
            looking at scores: a bound for the best of several numbers is no bound.

    Raises:
        ValueError: Shapes differ, a score is NaN, or ``num_guesses`` is out of range.
    """
    if scores_m.shape != is_in_m.shape or scores_m.ndim != 1:
        raise ValueError(f"{scores_m.shape} scores for {is_in_m.shape} canaries")
    if np.isnan(scores_m).any():
        raise ValueError("a canary's score is not a number")
    half = num_guesses // 2
    if not 1 <= half <= len(scores_m) // 2:
        raise ValueError(
            f"{num_guesses} guesses are not possible for {len(scores_m)} canaries"
        )
    order = np.argsort(scores_m, kind="stable")
    out, inside = order[:half], order[-half:]
    return Guesses(
        canaries=len(scores_m),
        guesses=2 * half,
        correct=int(is_in_m[inside].sum() + (~is_in_m[out]).sum()),
        low=float(scores_m[out[-1]]),
        high=float(scores_m[inside[0]]),
    )


def p_value(
    canaries: int, guesses: int, correct: int, *, epsilon: float, delta: float
) -> float:
    """Largest probability of so many right guesses under (epsilon, delta)-DP.

    Steinke, Nasr and Jagielski 2023, arXiv:2305.08846v1, Theorem 5.2 in the form of
    Corollary 5.4 and Appendix D: with B ~ Binomial(r, e^eps / (1 + e^eps)) it is
    ``P[B >= v] + 2 m delta max_i P[v > B >= v - i] / i``.

    Args:
        canaries: m, each in the data with probability 1/2, independently.
        guesses: r at most m; which canaries are guessed may depend on the output.
        correct: v at most r.
        epsilon: At least 0, of adding or removing one canary.
        delta: From 0 to 1.

    Returns:
        At most 1. It is an upper bound, exact for delta 0 and randomised response.

    Raises:
        ValueError: A number is out of range.
    """
    if not 0 <= correct <= guesses <= canaries:
        raise ValueError(
            f"{correct} correct of {guesses} guesses are not possible for {canaries} "
            "canaries"
        )
    if not (epsilon >= 0 and 0 <= delta <= 1):
        raise ValueError(f"epsilon {epsilon} or delta {delta} is out of range")
    rate = 1 / (1 + math.exp(-epsilon))
    if not correct:
        return 1.0
    found = float(betainc(correct, guesses - correct + 1, rate))  # P[B >= v].
    if delta:
        below = np.cumsum(_binomial(np.arange(correct - 1, -1, -1), guesses, rate))
        steepest = float((below / np.arange(1, correct + 1)).max())
        found += 2 * canaries * delta * steepest
    return min(found, 1.0)


def _binomial(successes: NDArray[np.int64], trials: int, rate: float) -> Scores:
    """Probability of each number of successes.

    ``scipy.stats`` has it, too, and takes a second to import.
    """
    failures = trials - successes
    ways = gammaln(trials + 1) - gammaln(successes + 1) - gammaln(failures + 1)
    found: Scores = np.exp(ways + xlogy(successes, rate) + xlog1py(failures, -rate))
    return found


def epsilon_lower_bound(
    canaries: int, guesses: int, correct: int, *, delta: float, confidence: float
) -> float:
    """Epsilon that so many right guesses contradict.

    Args:
        canaries: m, see ``p_value``.
        guesses: r.
        correct: v.
        delta: Delta of the guarantee in question.
        confidence: Above 0 and below 1, 0.95 for instance.

    Returns:
        At least 0, at most ``MAX_EPSILON``. An algorithm that is (epsilon,
        delta)-private gives a larger bound than its epsilon with probability at most
        ``1 - confidence``.

    Raises:
        ValueError: A number is out of range.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"the confidence must be between 0 and 1, not {confidence}")

    def is_contradicted(epsilon: float) -> bool:
        found = p_value(canaries, guesses, correct, epsilon=epsilon, delta=delta)
        return found < 1 - confidence

    low, high = 0.0, MAX_EPSILON
    if not is_contradicted(low):
        return 0.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if is_contradicted(middle):
            low = middle
        else:
            high = middle
    return low


@dataclass(frozen=True, slots=True, kw_only=True)
class Roc:
    """How well scores separate members from non-members.

    Attributes:
        false_positives: Shares of the records that were out, ascending from 0 to 1,
            one for each distinct threshold.
        true_positives: Shares of the records that were in, at the same thresholds.
        num_in: Records that were in.
        num_out: Records that were out.
        auc: Area under the curve: probability that a record that was in has the
            higher score, ties halved. 0.5 is guessing.
        auc_error: Standard error of ``auc``.
    """

    false_positives: Scores
    true_positives: Scores
    num_in: int
    num_out: int
    auc: float
    auc_error: float

    def true_positives_at(
        self, false_positives: float, *, confidence: float = 0.95
    ) -> tuple[float, float, float]:
        """Find the true positive rate at a false positive rate.

        Args:
            false_positives: Largest share of the records that were out to be taken
                for records that were in. With fewer than its inverse of these
                records, not one may be.
            confidence: Confidence of the interval.

        Returns:
            The rate, and the ends of its Clopper-Pearson interval for this threshold.
        """
        allowed = self.false_positives <= false_positives
        rate = float(self.true_positives[allowed].max())
        hits = round(rate * self.num_in)
        return rate, *clopper_pearson(hits, self.num_in, confidence)


def roc(in_i: Scores, out_o: Scores) -> Roc:
    """Compute the ROC curve of a score.

    The error of the area is Hanley and McNeil's (1982, "The Meaning and Use of the
    Area under a Receiver Operating Characteristic (ROC) Curve", equations 1 and 2).

    Args:
        in_i: Scores of records that were in, shape ``(i,)``, not empty.
        out_o: Scores of records that were out, shape ``(o,)``, not empty.

    Raises:
        ValueError: A group is empty, or a score is NaN.
    """
    num_in, num_out = len(in_i), len(out_o)
    if not num_in or not num_out:
        raise ValueError("a ROC curve needs members and non-members")
    both = np.concatenate((in_i, out_o))
    if np.isnan(both).any():
        raise ValueError("a score is not a number")
    rising, places, counts = np.unique(both, return_inverse=True, return_counts=True)
    falling = rising[::-1]
    ranks = np.cumsum(counts) - (counts - 1) / 2  # From 1, the mean of those of a tie.
    area = float(ranks[places[:num_in]].sum()) - num_in * (num_in + 1) / 2
    auc = area / (num_in * num_out)
    return Roc(
        false_positives=_shares(out_o, falling),
        true_positives=_shares(in_i, falling),
        num_in=num_in,
        num_out=num_out,
        auc=auc,
        auc_error=_auc_error(auc, num_in, num_out),
    )


def _shares(scores: Scores, thresholds: Scores) -> Scores:
    """Share of scores that reach each threshold; none reaches the first."""
    below = np.searchsorted(np.sort(scores), thresholds, side="left")
    return np.concatenate(([0.0], 1 - below / len(scores)))


def _auc_error(auc: float, num_in: int, num_out: int) -> float:
    over_two_in = auc / (2 - auc) - auc**2
    over_two_out = 2 * auc**2 / (1 + auc) - auc**2
    variance = auc * (1 - auc)
    variance += (num_in - 1) * over_two_in + (num_out - 1) * over_two_out
    return math.sqrt(max(variance, 0.0) / (num_in * num_out))


def clopper_pearson(
    successes: int, trials: int, confidence: float
) -> tuple[float, float]:
    """Confidence interval of a probability; never too narrow.

    Clopper and Pearson 1934, "The Use of Confidence or Fiducial Limits Illustrated in
    the Case of the Binomial".

    Raises:
        ValueError: There are more successes than trials, or no trial.
    """
    if not 0 <= successes <= trials or not trials:
        raise ValueError(f"{successes} successes in {trials} trials are not possible")
    tail = (1 - confidence) / 2
    failures = trials - successes
    low = betaincinv(successes, failures + 1, tail) if successes else 0.0
    high = betaincinv(successes + 1, failures, 1 - tail) if failures else 1.0
    return float(low), float(high)


def largest_true_positives(
    false_positives: Scores, *, epsilon: float, delta: float
) -> Scores:
    """Largest true positive rate of any attack on (epsilon, delta)-DP.

    ``TPR <= e^eps FPR + delta``, and the same of the attack that says the opposite
    (Kairouz, Oh and Viswanath 2015, arXiv:1311.0776, Theorem 2.1).

    Args:
        false_positives: Shares from 0 to 1.
        epsilon: May be infinite.
        delta: From 0 to 1.

    Returns:
        The largest true positive rate at each of them.
    """
    shrink = math.exp(-epsilon)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        left = np.where(false_positives > 0, false_positives / shrink, 0.0) + delta
    right = 1 - shrink * (1 - delta - false_positives)
    return np.clip(np.minimum(left, right), 0.0, 1.0)


def epsilon_of_independent(
    in_i: Scores, out_o: Scores, *, delta: float, confidence: float
) -> float:
    """Lower bound on epsilon from a ROC curve, if scores do not depend on each other.

    Half of the records choose the threshold and the direction, the other half test
    ``TPR <= e^eps FPR + delta`` there, with Clopper-Pearson limits for both rates
    that hold together. It says more than ``epsilon_lower_bound`` and assumes more.

    Args:
        in_i: Scores of records that were in, shape ``(i,)``, in an order that says
            nothing of them.
        out_o: Scores of records that were out, shape ``(o,)``, likewise.
        delta: Delta of the guarantee in question.
        confidence: Above 0 and below 1.

    Returns:
        At least 0; 0 if there are too few records.
    """
    if min(len(in_i), len(out_o)) < _LEAST_RECORDS:
        return 0.0
    # Each direction has half of the risk, and each limit half of that.
    tail = (1 - confidence) / 4
    return max(_one_way(in_i, out_o, delta, tail), _one_way(-out_o, -in_i, delta, tail))


def _one_way(first: Scores, second: Scores, delta: float, tail: float) -> float:
    """Bound by the share of ``first`` over that of ``second`` above a threshold."""
    thresholds = np.unique(second[::2])
    chosen = _bounds(first[::2], second[::2], thresholds, delta, tail).argmax()
    tested = _bounds(
        first[1::2], second[1::2], thresholds[chosen : chosen + 1], delta, tail
    )
    return float(tested[0])


def _bounds(
    first: Scores, second: Scores, thresholds: Scores, delta: float, tail: float
) -> Scores:
    hits, errors = _reached(first, thresholds), _reached(second, thresholds)
    # Without a hit, or without a record that is none, the limit is 0 or 1.
    low = betaincinv(np.maximum(hits, 1), len(first) - hits + 1, tail)
    low = np.where(hits > 0, low, 0.0)
    high = betaincinv(errors + 1, np.maximum(len(second) - errors, 1), 1 - tail)
    high = np.where(errors < len(second), high, 1.0)
    with np.errstate(divide="ignore"):
        found: Scores = np.log(np.maximum(low - delta, 0.0) / high)
    return np.maximum(found, 0.0)


def _reached(scores: Scores, thresholds: Scores) -> NDArray[np.int64]:
    return len(scores) - np.searchsorted(np.sort(scores), thresholds, side="left")
