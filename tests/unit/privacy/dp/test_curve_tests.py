"""Tests of a claimed curve: their level, their power, and what they assume.

Seeds are fixed: every figure is that of these very draws.
"""

import math
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from scipy.optimize import linprog
from scipy.stats import binom, norm

from privacy.dp import accountant
from privacy.dp.auditing import Guesses, guess
from privacy.dp.curve_tests import (
    independent,
    one_run,
    p_value_of_guesses,
    repeated_noise,
    sampling,
    scores_without_noise,
)
from privacy.dp.events import PrivacyEvent
from privacy.dp.trade_off import TradeOff

# One of jobs/private.toml's sites; what one release of the same epsilon would be; and
# steps that seldom draw a record.
PRIVATE = PrivacyEvent(noise_multiplier=2.4957, sampling_rate=0.392, steps=120)
RELEASE = PrivacyEvent(noise_multiplier=0.62, sampling_rate=1.0, steps=1)
SELDOM = PrivacyEvent(noise_multiplier=0.9, sampling_rate=0.02, steps=2000)
ONE = PrivacyEvent(noise_multiplier=1.0, sampling_rate=1.0, steps=1)
EVENTS = {"private": PRIVATE, "release": RELEASE, "seldom": SELDOM}

Draw = tuple[np.ndarray, np.ndarray]


@cache
def curve_of(event: PrivacyEvent) -> TradeOff:
    """What the accountant claims of it: a fifth of a second for many steps."""
    return accountant.trade_off([event])


def drawn(
    event: PrivacyEvent, canaries: int, seed: int, *, noise_times: float = 1.0
) -> Draw:
    """Scores of canaries with coordinates of their own, and their coins."""
    rng = np.random.default_rng(seed)
    is_in = rng.random(canaries) < 0.5
    deviation = noise_times * event.noise_multiplier * math.sqrt(event.steps)
    times_drawn = rng.binomial(event.steps, event.sampling_rate, size=canaries)
    return deviation * rng.normal(size=canaries) + is_in * times_drawn, is_in


def guessed(found: Draw) -> Guesses:
    return guess(*found, num_guesses=len(found[0]) // 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", EVENTS)
def test_correct_mechanisms_are_contradicted_no_more_often_than_the_level_says(
    name: str,
):
    """Of 60 draws with the claimed noise at most 5 % have a p-value below 0.05."""
    curve = curve_of(EVENTS[name])
    found = [drawn(EVENTS[name], 500, seed) for seed in range(60)]
    assert sum(independent(curve, *draw) < 0.05 for draw in found) <= 3
    assert sum(one_run(curve, guessed(d)) < 0.05 for d in found[:20]) <= 1


@pytest.mark.slow
def test_level_is_kept_where_the_attack_reaches_the_curve():
    """One release: the score is the likelihood ratio, and no attack is better."""
    # Of a hundred mechanisms that are what they claim.
    found = [independent(curve_of(ONE), *drawn(ONE, 400, seed)) for seed in range(100)]
    for level in (0.01, 0.05, 0.2):
        below = sum(p_value < level for p_value in found)
        assert below <= binom.ppf(0.999, 100, level), level


@pytest.mark.slow
@pytest.mark.parametrize("name", EVENTS)
def test_half_the_noise_is_found(name: str):
    """Of 20 draws all, by 2,000 independent canaries."""
    event = EVENTS[name]
    curve = curve_of(event)
    found = [drawn(event, 2000, seed, noise_times=0.5) for seed in range(20)]
    assert all(independent(curve, *draw) < 0.05 / 3 for draw in found)


@pytest.mark.slow
def test_half_the_noise_is_found_without_assuming_independence():
    """By 5,000 canaries and an accountant's epsilon of 8."""
    curve = curve_of(PRIVATE)
    draws = [drawn(PRIVATE, 5000, seed, noise_times=0.5) for seed in range(5)]
    found = [one_run(curve, guessed(draw)) for draw in draws]
    assert max(found) < 0.05 / 3
    assert min(found) > 1e-4  # One accident may explain all guesses at once.


@pytest.mark.slow
def test_less_noise_is_clearer():
    """On the same draws, the p-value never rises as noise falls."""
    curve = curve_of(PRIVATE)
    for seed in range(5):
        found = [
            independent(curve, *drawn(PRIVATE, 2000, seed, noise_times=times))
            for times in (1.0, 0.7, 0.5, 0.25)
        ]
        assert found == sorted(found, reverse=True)
        assert found[0] > 0.05 > found[2]


@pytest.mark.slow
def test_more_right_guesses_are_clearer():
    """And fewer guesses, all of them right, are less clear."""
    curve = curve_of(PRIVATE)
    found = [p_value_of_guesses(curve, 1000, 300, right) for right in range(200, 301)]
    assert found == sorted(found, reverse=True)
    assert found[0] == 1.0
    fewer = [p_value_of_guesses(curve, 1000, n, n) for n in (10, 100, 300)]
    assert fewer == sorted(fewer, reverse=True)


def largest_probability(
    curve: TradeOff, canaries: int, guesses: int, correct: int
) -> float:
    """Maximise the probability over all distributions, by linear programming."""
    right_j = np.arange(guesses + 1)
    slack_e = np.linspace(0.001, 0.999, 200)
    most_e = curve.most_true_positives(slack_e)
    rows, limits = [], []
    for i in range(1, guesses + 1):
        hits = np.where(right_j >= i, right_j / canaries, 0)
        errors = np.where(right_j >= i - 1, (guesses - right_j) / canaries, 0)
        # Tangents of the curve, which is concave: between neighbouring points.
        slopes = np.diff(most_e) / np.diff(slack_e)
        for slope, rate, most in zip(slopes, slack_e, most_e, strict=False):
            rows.append((hits - slope * errors) / max(1.0, slope))
            limits.append((most - slope * rate) / max(1.0, slope))
    found = linprog(
        -(right_j >= correct).astype(float),
        A_ub=np.array(rows),
        b_ub=np.array(limits),
        A_eq=np.ones((1, guesses + 1)),
        b_eq=[1],
        bounds=(0, 1),
        method="highs",
    )
    return -float(found.fun)


@pytest.mark.parametrize(
    ("canaries", "guesses"),
    [
        (10, 10),
        (20, 8),
        pytest.param(40, 20, marks=[pytest.mark.slow, pytest.mark.long]),
    ],
)
@pytest.mark.parametrize("name", ["private", "release"])
def test_p_value_of_guesses_is_the_optimum_of_a_linear_program(
    name: str, canaries: int, guesses: int
):
    """Over all distributions of right guesses that the curve allows."""
    curve = curve_of(EVENTS[name])
    for correct in range(guesses // 2, guesses + 1, 2):
        found = p_value_of_guesses(curve, canaries, guesses, correct)
        optimum = largest_probability(curve, canaries, guesses, correct)
        assert found == pytest.approx(optimum, rel=0.02)


def reveals_all(correct: int, canaries: int, right: float, delta: float) -> float:
    """All coins are shown at once with probability delta, or answered at random."""
    return delta + (1 - delta) * float(binom.sf(correct - 1, canaries, right))


def reveals_none(correct: int, canaries: int, right: float, delta: float) -> float:
    """Every answer is at random."""
    return (1 - delta) * float(binom.sf(correct - 1, canaries, right))


@pytest.mark.parametrize("cheat", [reveals_all, reveals_none])
def test_p_value_of_guesses_covers_mechanisms_that_join_canaries(
    cheat: Callable[[int, int, float, float], float],
):
    """Whatever canaries do to each other, the true probability is not above it."""
    delta, level, canaries = 0.01, 1.0, 60
    epsilons = np.linspace(0, 10, 401)
    right = math.exp(level) / (1 + math.exp(level))
    # Delta of randomised response below its epsilon, and the leak on top.
    kept = np.maximum(0.0, right - np.exp(epsilons) * (1 - right))
    curve = TradeOff(delta + (1 - delta) * kept, epsilons)
    for correct in range(30, 61, 5):
        found = p_value_of_guesses(curve, canaries, canaries, correct)
        assert found >= 0.999 * cheat(correct, canaries, right, delta)


def test_one_accident_contradicts_independence_and_not_the_other_test():
    """A mechanism that shows all coins at once, seldom enough for its curve."""
    curve = curve_of(ONE)
    rng = np.random.default_rng(3)
    is_in = rng.random(1000) < 0.5
    all_shown = np.where(is_in, 1.0, 0.0)
    assert independent(curve, all_shown, is_in) < 1e-12
    assert one_run(curve, guessed((all_shown, is_in))) > 1e-5


# Events whose records are drawn often, seldom, and hardly ever; small noise.
OFTEN = PrivacyEvent(noise_multiplier=0.4, sampling_rate=0.3, steps=20)
SOME = PrivacyEvent(noise_multiplier=0.5, sampling_rate=0.01, steps=60)
HARDLY = PrivacyEvent(noise_multiplier=0.3, sampling_rate=0.001, steps=100)


@pytest.mark.slow
@pytest.mark.parametrize("event", [PRIVATE, RELEASE, SELDOM, OFTEN, SOME, HARDLY])
@pytest.mark.parametrize("canaries", [100, 1000, 5000])
def test_what_training_without_noise_would_show_is_not_overstated(
    event: PrivacyEvent, canaries: int
):
    """A canary that is in and was never drawn cannot be told from one that is out.

    Where the p-value to expect is below a tenth of 0.05, the one found is below 0.05.
    """
    curve = curve_of(event)
    for seed in range(5):
        scores, is_in = drawn(event, canaries, seed, noise_times=0.001)
        promised = scores_without_noise(is_in, [event])
        assert not promised[~is_in].any()
        assert promised.sum() <= (scores > 0.5).sum()
        if independent(curve, promised, is_in) < 0.005:
            assert independent(curve, scores, is_in) < 0.05


def test_canary_of_every_step_is_seen_without_noise():
    """And of canaries that are never drawn, none."""
    is_in = np.random.default_rng(2).random(1000) < 0.5
    assert (scores_without_noise(is_in, [RELEASE]) == is_in).all()
    never = PrivacyEvent(noise_multiplier=1.0, sampling_rate=1e-6, steps=1)
    assert not scores_without_noise(is_in, [never]).any()
    some = scores_without_noise(is_in, [SOME]).sum() / is_in.sum()
    assert 0.2 < some < 1 - 0.99**60


def test_canaries_that_choose_a_threshold_do_not_test_it():
    """Every second canary of each kind is told clearly, and the others not at all."""
    curve = curve_of(PRIVATE)
    is_in = np.tile([True, False], 500)
    chooses = np.tile([True, True, False, False], 250)
    scores = np.random.default_rng(4).normal(size=1000)
    clear = np.where(chooses, np.where(is_in, 10.0, -10.0), scores)
    assert independent(curve, clear, is_in) == 1.0
    assert independent(curve, np.where(is_in, 10.0, -10.0), is_in) < 1e-12


def test_scores_upside_down_say_nothing():
    """Nor do those of canaries of one kind, or too few."""
    curve = curve_of(PRIVATE)
    scores, is_in = drawn(PRIVATE, 1000, 7, noise_times=0.1)
    assert independent(curve, scores, is_in) < 1e-9
    assert independent(curve, -scores, is_in) == 1.0
    assert independent(curve, scores, np.ones(1000, np.bool_)) == 1.0
    assert independent(curve, scores[:6], is_in[:6]) == 1.0


@pytest.mark.parametrize("numbers", [(10, 11, 5), (10, 5, 6), (10, 5, -1)])
def test_numbers_of_guesses_that_cannot_be_are_refused(numbers: tuple[int, int, int]):
    """More guesses than canaries, or more right ones than guesses."""
    curve = curve_of(PRIVATE)
    with pytest.raises(ValueError, match="guesses"):
        p_value_of_guesses(curve, *numbers)


def test_rate_at_the_threshold_is_compared_with_the_curve():
    """One release of noise 1, by hand: 50 % against 16 % is what the curve allows."""
    curve = curve_of(ONE)
    hit, error = 0.5, float(norm.cdf(-1.0))
    assert curve.least_false_positives(hit) == pytest.approx(error, rel=1e-3)


def products(noise_ro: np.ndarray) -> np.ndarray:
    """Sum of the products of each two rounds, by canary."""
    return (noise_ro.sum(axis=0) ** 2 - (noise_ro**2).sum(axis=0)) / 2


@pytest.mark.parametrize("rounds", [2, 3, 20])
def test_noise_that_repeats_between_rounds_is_found(rounds: int):
    """Independent noise is flagged at its level, noise in pairs of rounds always."""
    rng = np.random.default_rng(rounds)
    fresh = [
        repeated_noise(products(rng.normal(size=(rounds, 50)))) for _ in range(400)
    ]
    assert np.mean(np.array(fresh) < 0.05) < 0.08
    assert np.mean(np.array(fresh) < 0.01) < 0.025
    for repeats in (2, rounds):
        noise = rng.normal(size=(-(-rounds // repeats), 200))
        again = np.repeat(noise, repeats, axis=0)[:rounds]
        assert repeated_noise(products(again)) < 1e-3
    assert repeated_noise(np.zeros(50)) == 1.0  # A single round; or no noise at all.


def counts(rng: np.random.Generator, event: PrivacyEvent, units: int) -> np.ndarray:
    return rng.binomial(event.steps, event.sampling_rate, size=units)


@pytest.mark.parametrize(("rate", "steps"), [(0.4, 12), (0.02, 50), (0.25, 1)])
def test_sampling_that_is_not_poisson_is_found(rate: float, steps: int):
    """A shuffled list, one sample for all steps, and twice the rate."""
    rng = np.random.default_rng(steps)
    event = PrivacyEvent(noise_multiplier=1.0, sampling_rate=rate, steps=steps)
    right = [sampling(counts(rng, event, 3000), [event]) for _ in range(200)]
    assert np.mean(np.array(right) < 0.05) < 0.09
    assert min(right) > 1e-4
    twice = PrivacyEvent(noise_multiplier=1.0, sampling_rate=2 * rate, steps=steps)
    assert sampling(counts(rng, twice, 3000), [event]) < 1e-9
    if steps > 1:
        shuffled = np.arange(3000) < round(3000 * (rate * steps % 1))
        assert sampling(shuffled + int(rate * steps), [event]) < 1e-9
        same = steps * (rng.random(3000) < rate)
        assert sampling(same, [event]) < 1e-9


def test_steps_of_all_records_draw_each_in_each():
    """There is no chance in it; a rate a little below the claimed one is right."""
    event = PrivacyEvent(noise_multiplier=1.0, sampling_rate=1.0, steps=3)
    assert sampling(np.full(100, 3), [event]) == 1.0
    assert sampling(np.full(100, 4), [event]) == 0.0
    half = PrivacyEvent(noise_multiplier=1.0, sampling_rate=0.5, steps=8)
    rng = np.random.default_rng(1)
    fewer = rng.binomial(8, 0.45, size=9000)
    assert sampling(fewer, [half], share_of_rate=0.9) > 0.01
    assert sampling(rng.binomial(8, 0.5, size=9000), [half]) > 0.01
