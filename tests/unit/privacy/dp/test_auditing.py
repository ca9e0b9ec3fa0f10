"""Lower bounds on epsilon: against published figures, brute force, and the mechanism.

Release seeds are fixed: the figures are those of these very draws.
"""

import math
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
from scipy import stats

from privacy.dp.accountant import epsilon
from privacy.dp.auditing import (
    MAX_EPSILON,
    clopper_pearson,
    epsilon_lower_bound,
    epsilon_of_independent,
    guess,
    largest_true_positives,
    p_value,
    roc,
)
from privacy.dp.events import PrivacyEvent
from privacy.dp.mechanism import GaussianMechanism

DELTA = 1e-5

Cheat = Callable[[int, int, float, float], float]


def test_bound_is_the_published_one():
    """The worked example of arXiv:2305.08846v1, Appendix D."""
    found = epsilon_lower_bound(1000, 100, 75, delta=1e-4, confidence=0.95)
    assert found == pytest.approx(0.673, abs=5e-4)


@pytest.mark.parametrize("level", [0.0, 0.5, 2.0])
def test_p_value_is_exact_for_randomised_response(level: float):
    """Every outcome of every canary counted out; delta is 0."""
    canaries = 5
    right = math.exp(level) / (1 + math.exp(level))
    for correct in range(canaries + 1):
        exact = sum(
            math.prod(right if hit else 1 - right for hit in hits)
            for hits in product((True, False), repeat=canaries)
            if sum(hits) >= correct
        )
        found = p_value(canaries, canaries, correct, epsilon=level, delta=0.0)
        assert found == pytest.approx(exact)


@pytest.mark.parametrize(("guesses", "correct"), [(1, 1), (60, 44), (2000, 1990)])
@pytest.mark.parametrize("level", [0.0, 1.0, 100.0])
def test_p_value_is_that_of_its_formula(guesses: int, correct: int, level: float):
    """Binomial probabilities by ``scipy.stats``, up to where they are 0 or 1."""
    rate = 1 / (1 + math.exp(-level))
    below = np.cumsum(stats.binom.pmf(np.arange(correct)[::-1], guesses, rate))
    steepest = float((below / np.arange(1, correct + 1)).max())
    by_chance = float(stats.binom.sf(correct - 1, guesses, rate))
    expected = min(1.0, by_chance + 2 * 2000 * DELTA * steepest)
    found = p_value(2000, guesses, correct, epsilon=level, delta=DELTA)
    assert found == pytest.approx(expected, rel=1e-10)


def reveals_each(correct: int, canaries: int, right: float, delta: float) -> float:
    """Each canary is shown with probability delta, or answers at random."""
    return float(stats.binom.sf(correct - 1, canaries, delta + (1 - delta) * right))


def reveals_all(correct: int, canaries: int, right: float, delta: float) -> float:
    """All are shown at once with probability delta, or answer at random."""
    by_chance = float(stats.binom.sf(correct - 1, canaries, right))
    return delta + (1 - delta) * by_chance


def reveals_one(correct: int, canaries: int, right: float, delta: float) -> float:
    """With probability m delta one canary is shown, and that one is guessed."""
    by_chance = stats.binom.sf(
        np.array([correct - 2, correct - 1]), canaries - 1, right
    )
    shown = min(1.0, canaries * delta)
    rest = float(stats.binom.sf(correct - 1, canaries, right))
    return shown * float(by_chance[0]) + (1 - shown) * rest


@pytest.mark.parametrize("delta", [1e-4, 0.01, 0.2])
@pytest.mark.parametrize("level", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("cheat", [reveals_each, reveals_all, reveals_one])
def test_p_value_covers_mechanisms_that_use_up_delta(
    cheat: Cheat, level: float, delta: float
):
    """The chance of so many right guesses is never above the p-value."""
    right = 1 / (1 + math.exp(-level))
    for canaries in (1, 2, 7, 40):
        for correct in range(1, canaries + 1):
            truth = cheat(correct, canaries, right, delta)
            found = p_value(canaries, canaries, correct, epsilon=level, delta=delta)
            assert truth <= found + 1e-12


def test_p_value_falls_with_hits_and_rises_with_epsilon():
    """More right guesses say more against a promise, and less against a weaker one."""
    by_hits = [p_value(60, 20, v, epsilon=1.0, delta=DELTA) for v in range(21)]
    by_level = [p_value(60, 20, 18, epsilon=e, delta=DELTA) for e in (0, 1, 2, 4)]
    assert by_hits == sorted(by_hits, reverse=True)
    assert by_level == sorted(by_level)


def test_bound_is_where_the_p_value_reaches_the_risk():
    """Just below it the promise is contradicted, just above it is not."""
    bound = epsilon_lower_bound(500, 60, 55, delta=DELTA, confidence=0.9)
    assert p_value(500, 60, 55, epsilon=bound - 1e-6, delta=DELTA) < 0.1
    assert p_value(500, 60, 55, epsilon=bound + 1e-6, delta=DELTA) >= 0.1


def test_guessing_at_random_bounds_nothing():
    """Half of the guesses right is what anyone has."""
    assert epsilon_lower_bound(1000, 100, 50, delta=DELTA, confidence=0.95) == 0


def test_guesses_are_of_the_extremes():
    """Two of six each way, one of them wrong."""
    scores = np.array([5.0, -3.0, 0.1, 4.0, 0.0, -9.0])
    truth = np.array([True, True, False, True, True, False])
    found = guess(scores, truth, num_guesses=5)
    assert (found.guesses, found.correct) == (4, 3)
    assert (found.low, found.high) == (-3.0, 4.0)


@pytest.mark.parametrize(
    "call",
    [
        lambda: guess(np.zeros(4), np.zeros(3, bool), num_guesses=2),
        lambda: guess(np.zeros(4), np.zeros(4, bool), num_guesses=1),
        lambda: guess(np.zeros(4), np.zeros(4, bool), num_guesses=6),
        lambda: guess(np.full(4, np.nan), np.zeros(4, bool), num_guesses=2),
        lambda: p_value(4, 5, 1, epsilon=1.0, delta=0.0),
        lambda: p_value(4, 4, 1, epsilon=-1.0, delta=0.0),
        lambda: epsilon_lower_bound(4, 4, 4, delta=0.0, confidence=1.0),
        lambda: roc(np.zeros(0), np.zeros(2)),
        lambda: roc(np.array([np.nan]), np.zeros(2)),
        lambda: clopper_pearson(3, 2, 0.95),
    ],
)
def test_nonsense_is_refused(call: Callable[[], object]):
    """What would give a number that means nothing."""
    with pytest.raises(ValueError, match=r"\w"):
        call()


def test_roc_counts_records():
    """Three thresholds, a tie, and the area by pairs."""
    inside, out = np.array([3.0, 2.0, 2.0]), np.array([2.0, 1.0])
    curve = roc(inside, out)
    pairs = [(i > o) + 0.5 * (i == o) for i in inside for o in out]
    assert curve.auc == pytest.approx(np.mean(pairs))
    assert curve.false_positives.tolist() == [0, 0, 0.5, 1]
    assert curve.true_positives.tolist() == pytest.approx([0, 1 / 3, 1, 1])
    assert curve.true_positives_at(0.4)[0] == pytest.approx(1 / 3)
    assert curve.true_positives_at(0.5)[0] == 1.0


def test_standard_error_of_the_area_is_that_of_repetitions():
    """Within a fifth, on normal scores."""
    rng = np.random.default_rng(3)
    drawn = [roc(rng.normal(1, 1, 80), rng.normal(0, 1, 50)) for _ in range(300)]
    spread = np.std([curve.auc for curve in drawn])
    assert np.mean([curve.auc_error for curve in drawn]) == pytest.approx(spread, 0.2)


def test_clopper_pearson_is_the_published_interval():
    """Of 4 in 10, by the tails themselves; and at both ends."""
    low, high = clopper_pearson(4, 10, 0.95)
    assert stats.binom.sf(3, 10, low) == pytest.approx(0.025)
    assert stats.binom.cdf(4, 10, high) == pytest.approx(0.025)
    assert clopper_pearson(0, 10, 0.95)[0] == 0
    assert clopper_pearson(10, 10, 0.95)[1] == 1


def test_largest_true_positives_are_those_of_randomised_response():
    """Its one corner lies on the curve; without privacy everything is possible."""
    level, delta = 1.5, 0.01
    wrong = (1 - delta) / (1 + math.exp(level))
    corner = largest_true_positives(np.array([wrong]), epsilon=level, delta=delta)
    assert corner[0] == pytest.approx(1 - wrong)
    rates = np.array([0.0, 0.3, 1.0])
    free = largest_true_positives(rates, epsilon=math.inf, delta=0.0)
    none = largest_true_positives(rates, epsilon=0.0, delta=0.0)
    assert free.tolist() == [0.0, 1.0, 1.0]
    assert none.tolist() == pytest.approx(rates.tolist())


def test_bound_from_a_roc_covers_and_finds():
    """Over repetitions it exceeds the truth seldom, and is not empty."""
    rng, level = np.random.default_rng(5), 1.0
    keep = math.exp(level) / (1 + math.exp(level))
    found = []
    for _ in range(60):
        truth = rng.random(1000) < 0.5
        said = np.where(rng.random(1000) < keep, truth, ~truth).astype(float)
        inside, out = said[truth], said[~truth]
        found.append(epsilon_of_independent(inside, out, delta=0.0, confidence=0.9))
    assert np.mean(np.array(found) > level) <= 0.1
    assert np.median(found) > 0.5
    assert epsilon_of_independent(found[:3], found[:3], delta=0.0, confidence=0.9) == 0


def dirac_bound(
    noise: float, *, canaries: int, sharers: int = 1, seed: int = 0
) -> float:
    """Bound by one release of canaries that have a coordinate each."""
    rng = np.random.default_rng(seed)
    is_in = rng.random(canaries) < 0.5
    total = np.zeros(canaries, np.float32)
    mechanism = GaussianMechanism(
        clip_norm=1.0, noise_multiplier=noise / math.sqrt(sharers), size=canaries
    )
    for _ in range(sharers):
        part = np.zeros(canaries, np.float32)
        if not total.any():
            part[is_in] = 1.0
        mechanism.release_(part, rng.bytes)
        total += part
    guesses = guess(total.astype(np.float64), is_in, num_guesses=int(0.05 * canaries))
    return guesses.epsilon(delta=DELTA, confidence=0.95)


def promised(noise: float) -> float:
    """Epsilon of one Gaussian release."""
    event = PrivacyEvent(noise_multiplier=noise, sampling_rate=1.0, steps=1, slack=0.0)
    return epsilon([event], DELTA)


def test_mechanism_keeps_its_promise_and_too_little_noise_does_not():
    """A quarter of the noise, which few canaries find."""
    assert dirac_bound(3.0, canaries=20_000) < promised(3.0)
    assert dirac_bound(0.75, canaries=20_000) > promised(3.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("noise", "level", "right", "halved"),
    [(1.0, 4.38, 2.43, 4.80), (2.0, 1.99, None, 2.41), (3.0, 1.27, None, 1.56)],
)
def test_audit_separates_right_from_half_the_noise(
    noise: float, level: float, right: float | None, halved: float
):
    """A hundred thousand canaries, 5 % guessed, ten seeds."""
    kept = [dirac_bound(noise, canaries=100_000, seed=s) for s in range(10)]
    broken = [dirac_bound(noise / 2, canaries=100_000, seed=s) for s in range(10)]
    assert promised(noise) == pytest.approx(level, abs=0.01)
    assert max(kept) < promised(noise) < min(broken)
    assert np.mean(broken) == pytest.approx(halved, abs=0.1)
    if right is not None:
        assert np.mean(kept) == pytest.approx(right, abs=0.1)


@pytest.mark.slow
def test_audit_finds_noise_shared_by_eight():
    """Each adds noise / sqrt(8), as if all eight were honest; one sum is right."""
    whole = dirac_bound(1.0, canaries=100_000, sharers=8)
    alone = dirac_bound(1.0 / math.sqrt(8), canaries=100_000)
    assert whole < promised(1.0) < alone


def test_bound_has_an_end():
    """Guesses that no number of canaries could make."""
    many = 10**6
    found = epsilon_lower_bound(many, many, many, delta=0.0, confidence=0.95)
    assert 10 < found < MAX_EPSILON
