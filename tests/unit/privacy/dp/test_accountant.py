"""Epsilon agrees with published numbers, closed forms and two other libraries."""

import math
import time

import numpy as np
import pytest

from privacy.dp import accountant, composition, cross_check
from privacy.dp.events import PrivacyEvent

# Sampling rate, noise multiplier, steps, delta; then epsilon by Renyi divergence, by
# privacy loss distribution, and by privacy loss random variables (estimate, upper).
# The last is the Gaussian mechanism, whose epsilon has a closed form: 4.37718.
TABLE = [
    (256 / 60000, 1.1, 14100, 1e-5, 2.6003, 2.3852, 2.3851, 2.3953),
    (0.01, 1.0, 1000, 1e-5, 2.1014, 1.8282, 1.8282, 1.8384),
    (0.001, 0.7, 10000, 1e-6, 2.4730, 1.6370, 1.6369, 1.6471),
    (0.05, 2.0, 500, 1e-6, 3.1019, 2.8726, 2.8726, 2.8828),
    (1.0, 10.0, 100, 1e-5, 4.7285, 4.37718, 4.37718, 4.3874),
]
TOLERANCE = 0.005


def event(rate: float, noise: float, steps: int, slack: float = 0.0) -> PrivacyEvent:
    return PrivacyEvent(
        noise_multiplier=noise, sampling_rate=rate, steps=steps, slack=slack
    )


def gaussian_delta(epsilon: float, mu: float) -> float:
    """Closed form of the Gaussian mechanism (arXiv:1805.06530, Theorem 8)."""

    def below(x: float) -> float:
        return math.erfc(-x / math.sqrt(2)) / 2

    tail = math.exp(epsilon) * below(-epsilon / mu - mu / 2)
    return below(-epsilon / mu + mu / 2) - tail


@pytest.mark.slow
@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"q={row[0]:.3g}")
def test_three_libraries_agree_with_the_table(row: tuple[float, ...]):
    """Half a percent; each upper bound is on its side."""
    rate, noise, steps, delta, renyi, loss, estimate, upper = row
    events = [event(rate, noise, int(steps))]
    found = accountant.epsilon(events, delta)
    bound = accountant.epsilon(events, delta, "rdp")
    prv = cross_check.epsilon(events, delta)
    assert found == pytest.approx(loss, rel=TOLERANCE)
    assert bound == pytest.approx(renyi, rel=TOLERANCE)
    assert prv.estimate == pytest.approx(estimate, rel=TOLERANCE)
    assert prv.upper == pytest.approx(upper, rel=TOLERANCE)
    assert found == pytest.approx(prv.estimate, rel=TOLERANCE)
    assert bound >= found >= 0.99999 * loss


@pytest.mark.slow
@pytest.mark.parametrize(
    "row",
    [TABLE[1], pytest.param(TABLE[2], marks=pytest.mark.long), TABLE[3]],
    ids=lambda row: f"q={row[0]:.3g}",
)
def test_composition_agrees_with_the_library_at_a_finer_grid(row: tuple[float, ...]):
    """Never below its bound on a grid that is finer, and 0.1 % above at most."""
    from dp_accounting.pld import privacy_loss_distribution as pld  # noqa: PLC0415

    rate, noise, steps, delta, *_ = row
    fine = pld.from_gaussian_mechanism(
        noise, sampling_prob=rate, value_discretization_interval=5e-5
    ).self_compose(int(steps))
    want = fine.get_epsilon_for_delta(delta)
    found = accountant.epsilon([event(rate, noise, int(steps))], delta)
    assert want * (1 - 1e-5) <= found <= want * 1.001


@pytest.mark.parametrize("mu", [0.01, 0.5, 1.0, 4.0, 15.0])
@pytest.mark.parametrize("delta", [1e-9, 1e-5, 1e-2])
def test_gaussian_has_its_closed_form(mu: float, delta: float):
    """The inverse of the closed form, from above."""
    found = accountant.epsilon([event(1.0, 1 / mu, 1)], delta)
    assert gaussian_delta(found, mu) <= delta * 1.0001
    assert found == 0 or gaussian_delta(found * 0.999, mu) > delta


@pytest.mark.parametrize("noise", [0.1, 0.5, 2.0, 20.0])
@pytest.mark.parametrize("delta", [1e-9, 1e-4])
def test_no_sampling_is_the_limit_of_sampling(noise: float, delta: float):
    """One is in closed form, the other on a grid, which is never below."""
    found = accountant.epsilon([event(1.0, noise, 1)], delta)
    on_grid = accountant.epsilon([event(1 - 1e-9, noise, 1)], delta)
    assert found <= on_grid * (1 + 1e-7)
    assert on_grid == pytest.approx(found, rel=1e-3)


def test_a_gaussian_beyond_all_epsilons():
    """Tails that underflow tell of no privacy, not of a perfect one."""
    assert accountant.epsilon([event(1.0, 0.025, 1)], 1e-5) == math.inf
    assert accountant.epsilon([event(1.0, 0.034, 1)], 1e-5) == math.inf
    assert accountant.epsilon([event(1.0, 1e5, 1)], 1e-5) == 0


def test_kinds_of_events_add_up():
    """Many Gaussians are one; their order and their grouping do not matter."""
    parts = [event(1.0, 4.0, 3), event(1.0, 8.0, 4), event(1.0, 4.0, 1)]
    whole = event(1.0, 1 / math.sqrt(4 / 16 + 4 / 64), 1)
    want = accountant.epsilon([whole], 1e-6)
    assert accountant.epsilon(parts, 1e-6) == pytest.approx(want, rel=1e-9)
    assert accountant.epsilon(parts[::-1], 1e-6) == accountant.epsilon(parts, 1e-6)


def test_sampled_and_whole_releases_compose():
    """Together more than each, and less than their sum at half of delta each."""
    sampled, whole = event(0.05, 1.0, 50), event(1.0, 5.0, 2)
    both = accountant.epsilon([sampled, whole], 1e-6)
    alone = [accountant.epsilon([one], 1e-6) for one in (sampled, whole)]
    basic = [accountant.epsilon([one], 5e-7) for one in (sampled, whole)]
    assert max(alone) < both < sum(basic)


def test_events_that_differ_in_slack_alone_add_up():
    """They are steps of one mechanism; none of them may be forgotten."""
    mixed = [event(0.1, 1.0, 30), event(0.1, 1.0, 40, slack=1e-20)]
    assert accountant.epsilon(mixed, 1e-5) == pytest.approx(
        accountant.epsilon([event(0.1, 1.0, 70)], 1e-5), rel=1e-6
    )


def test_slack_is_taken_from_delta():
    """Delta less the slack of every step; nothing is left in the end."""
    with_slack = accountant.epsilon([event(1.0, 1.0, 4, slack=1e-6)], 1e-5)
    assert with_slack == pytest.approx(
        accountant.epsilon([event(1.0, 1.0, 4)], 6e-6), rel=1e-6
    )
    for name in ("pld", "rdp"):
        spent = accountant.epsilon([event(1.0, 1.0, 11, slack=1e-6)], 1e-5, name)
        assert spent == math.inf


def test_nothing_costs_nothing():
    """No event, no epsilon; and a release that is nearly all noise costs none."""
    assert accountant.epsilon([], 1e-5) == 0
    assert accountant.epsilon([], 1e-5, "rdp") == 0
    assert accountant.epsilon([event(1.0, 1e6, 1)], 1e-5) == 0


def test_silly_noise_has_no_epsilon():
    """Infinite rather than a number that protects nobody."""
    assert accountant.epsilon([event(1.0, 0.001, 1)], 1e-5) == math.inf
    assert accountant.epsilon([event(1.0, 0.2, 60)], 1e-5) == math.inf


@pytest.mark.parametrize("delta", [0.0, 1e-11, 1.0, 2.0, math.nan])
def test_delta_is_a_probability_that_can_be_resolved(delta: float):
    """Refused otherwise."""
    with pytest.raises(ValueError, match="delta"):
        accountant.epsilon([event(1.0, 1.0, 1)], delta)


def test_other_accountants_are_refused():
    """Among them the approximation that under-reports."""
    with pytest.raises(ValueError, match="gdp"):
        accountant.epsilon([], 1e-5, "gdp")  # type: ignore[arg-type]


def test_orders_that_are_left_out_are_not_news(caplog: pytest.LogCaptureFixture):
    """A person who reads a ledger is not shown the library's search."""
    bound = accountant.epsilon([event(0.02785, 0.527, 60)], 8e-5, "rdp")
    assert caplog.records == []
    assert bound > accountant.epsilon([event(0.02785, 0.527, 60)], 8e-5)


def test_a_curve_is_the_accountant_event_by_event():
    """Added or asked for, one by one or at once: the same number."""
    curve, step = accountant.EpsilonCurve(1e-5), event(0.05, 1.0, 5, slack=1e-12)
    for count in range(1, 6):
        asked = curve.epsilon(step)
        curve.add(step)
        assert asked == curve.epsilon()
        assert asked == accountant.epsilon([step] * count, 1e-5)


@pytest.mark.slow
def test_a_round_costs_milliseconds():
    """The best of many: a busy machine fails no test."""
    curve, step = accountant.EpsilonCurve(1e-5), event(0.02, 1.0, 20, slack=1e-15)
    curve.epsilon(step)
    seconds = []
    for _ in range(20):
        begin = time.perf_counter()
        curve.epsilon(step)
        curve.add(step)
        seconds.append(time.perf_counter() - begin)
    assert min(seconds) < 0.010


def test_powers_are_powers():
    """By squaring as by logarithms."""
    values = np.exp(1j * np.linspace(0, 3, 7)) * 0.999
    for count in (1, 2, 3, 100, 4097):
        np.testing.assert_allclose(
            composition._power(values, count), values**count, rtol=1e-10
        )


def test_grids_are_kept_as_slack_shrinks_delta():
    """A new grid every round would cost a hundred times as much."""
    curve, step = accountant.EpsilonCurve(1e-5), event(0.5, 2.0, 1, slack=1e-12)
    curve.add(step)
    curve.epsilon(step)
    before = composition._grid.cache_info().misses
    for _ in range(3):
        curve.epsilon(step)
        curve.add(step)
    assert composition._grid.cache_info().misses == before
