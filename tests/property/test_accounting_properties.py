"""What holds for every epsilon, whatever the numbers."""

import pytest
from hypothesis import given, settings, strategies as st

from privacy.dp import accountant, calibration, composition
from privacy.dp.events import PrivacyEvent

pytestmark = [pytest.mark.slow]

DELTAS = st.sampled_from([1e-8, 1e-6, 1e-5, 1e-3])
EVENTS = st.builds(
    PrivacyEvent,
    noise_multiplier=st.floats(0.6, 20),
    sampling_rate=st.floats(0.001, 1),
    steps=st.integers(1, 3000),
)
# What the grid may cost, which does not fall as the number of steps grows.
GRID = 3e-4


def least(value: float) -> float:
    """What another result has to reach; infinity stays itself."""
    return value * (1 - GRID) - 1e-9


def most(value: float) -> float:
    """What another result must not pass."""
    return value * (1 + GRID) + 1e-9


@settings(max_examples=15)
@given(event=EVENTS, delta=DELTAS)
def test_renyi_is_never_below(event: PrivacyEvent, delta: float):
    """The other bound is looser; above 500 there is no number to compare."""
    found = accountant.epsilon([event], delta)
    bound = accountant.epsilon([event], delta, "rdp")
    assert bound >= min(found, composition.MAX_EPSILON) * (1 - GRID)


@settings(max_examples=12)
@given(event=EVENTS, delta=DELTAS, more=st.integers(1, 3000))
def test_more_steps_cost_more(event: PrivacyEvent, delta: float, more: int):
    """And so does a smaller delta."""
    before = accountant.epsilon([event], delta)
    longer = PrivacyEvent.parse(event.document() | {"steps": event.steps + more})
    assert accountant.epsilon([longer], delta) >= least(before)
    assert accountant.epsilon([event], delta / 2) >= least(before)


@settings(max_examples=8)
@given(event=EVENTS, delta=DELTAS, factor=st.floats(1.01, 3))
def test_more_noise_costs_less(event: PrivacyEvent, delta: float, factor: float):
    """As does a smaller batch."""
    before = accountant.epsilon([event], delta)
    quieter = event.noise_multiplier * factor
    for change in (
        {"noise_multiplier": quieter},
        {"sampling_rate": event.sampling_rate / factor},
    ):
        after = accountant.epsilon(
            [PrivacyEvent.parse(event.document() | change)], delta
        )
        assert after <= most(before)


@settings(max_examples=6)
@given(
    target=st.floats(0.3, 20),
    delta=DELTAS,
    rate=st.floats(0.002, 1),
    steps=st.integers(1, 2000),
)
def test_calibration_is_the_inverse(
    target: float, delta: float, rate: float, steps: int
):
    """Within the target, and by less than a thousandth of it."""
    try:
        noise = calibration.noise_multiplier(target, delta, rate, steps)
    except calibration.PrivacyUnreachable:  # type: ignore[attr-defined]
        top = calibration.MAX_NOISE_MULTIPLIER
        event = PrivacyEvent(noise_multiplier=top, sampling_rate=rate, steps=steps)
        assert accountant.epsilon([event], delta) > target * 0.999
        return
    event = PrivacyEvent(noise_multiplier=noise, sampling_rate=rate, steps=steps)
    spent = accountant.epsilon([event], delta)
    assert spent <= target
    assert spent >= target * (1 - 1e-3) or noise == calibration.MIN_NOISE_MULTIPLIER
