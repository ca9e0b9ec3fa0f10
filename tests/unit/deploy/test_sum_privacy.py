"""Noise of all sites together, planned from a job: the figures of the design."""

import math
from collections.abc import Mapping
from typing import Any

import pytest
from support.noisy_jobs import noisy_job

from clients.privacy import sum_plan as sum_privacy
from clients.privacy.sum_plan import SumPrivacy
from deploy.wiring import parts as wiring
from federation.errors import JobError
from privacy.dp.accountant import epsilon
from privacy.dp.adaptive_clip import BIT_SHARE, together
from privacy.dp.calibration import noise_multiplier
from privacy.dp.events import PrivacyEvent
from privacy.dp.mechanism import SLACK

HERE = "support.small_jobs:blobs"
DP = "privacy.differential_privacy"


def _planned(unit: str, *, private: Mapping[str, Any], **tables: Any) -> SumPrivacy:
    job = noisy_job(unit, private=private, **tables)
    return sum_privacy.plan(wiring.build_federation(job))


def _sites(num_sites: int, inputs: int, **private: Any) -> SumPrivacy:
    """A plan for sites of ten records each, and four weights for each input."""
    return _planned(
        "site",
        num_sites=num_sites,
        private={"accept_low_signal": True, "reserve_rounds": 0} | private,
        rounds=100,
        model={"options": {"inputs": inputs, "classes": 4}},
        data={
            "source": "support.noisy_jobs:one_each",
            "options": {"num_sites": num_sites, "inputs": inputs},
        },
    )


@pytest.mark.parametrize(
    ("num_sites", "inputs", "ratio"), [(64, 249, 0.42), (16, 249, 0.105), (64, 2, 3.85)]
)
def test_signal_to_noise_of_whole_sites(num_sites: int, inputs: int, ratio: float):
    """N / (z sqrt d) with z = 4.80, lower by sqrt(h / N): not all shares count."""
    found = _sites(num_sites, inputs, delta=1e-3)
    assert found.share.multiplier == pytest.approx(4.80, abs=0.005)
    assert found.share.size == 4 * (inputs + 1)
    exact = num_sites / (found.share.multiplier * math.sqrt(found.share.size))
    assert exact == pytest.approx(ratio, rel=0.01)
    counted = math.sqrt((num_sites - 1) / num_sites)
    assert found.signal_to_noise == pytest.approx(exact * counted, rel=0.01)


def test_a_million_values_drown():
    """N = 64: 0.013, from the same plan with a larger size."""
    found = _sites(64, 249, delta=1e-3)
    assert found.signal_to_noise is not None
    grown = found.signal_to_noise * math.sqrt(found.share.size / 10**6)
    assert f"{grown:.3f}" == "0.013"


def test_adaptive_clip_keeps_the_promise():
    """A tenth of what the noise is worth goes to the bits, and epsilon is the same."""
    plain, adaptive = (
        _sites(16, 2, delta=1e-3, adaptive_clip=adapts) for adapts in (False, True)
    )
    (event,) = set(adaptive.events.values())
    assert event.noise_multiplier == pytest.approx(plain.share.multiplier, rel=1e-9)
    assert adaptive.share.multiplier == pytest.approx(
        plain.share.multiplier / math.sqrt(1 - BIT_SHARE)
    )
    assert adaptive.noise.bit_std is not None
    bits = adaptive.noise.bit_std * math.sqrt(adaptive.share.honest)
    assert together(adaptive.share.multiplier, bits) >= event.noise_multiplier
    assert epsilon([event] * 100, 1e-3) == pytest.approx(8.0, rel=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_sites", "honest", "expected"),
    [(2, 1, 10.3), (4, 2, 5.0), (8, 5, 2.5), (16, 10, 1.65), (64, 42, 0.73)],
)
def test_joint_noise_at_equal_utility(num_sites: int, honest: int, expected: float):
    """As much noise in the sum as of sites with 0.8 each: epsilon of section 4.3."""
    share = sum_privacy.NoiseShare(  # type: ignore[attr-defined]
        multiplier=0.8 * math.sqrt(honest),
        sensitivity=1.0,
        size=1000,
        threshold=max(2, 2 * num_sites // 3 + 1),
        colluding=1,
    )
    ring = share.ring_spec(bits=32, num_sites=num_sites, clip_norm=2.0)
    assert share.honest == honest
    assert ring.noise_std / ring.scale == pytest.approx(0.8, rel=1e-3)
    event = PrivacyEvent(
        noise_multiplier=share.effective_multiplier(ring),
        sampling_rate=0.02,
        steps=2000,
        slack=SLACK,
    )
    assert epsilon([event], 1e-6) == pytest.approx(expected, rel=0.02)


@pytest.mark.slow
def test_joint_noise_is_what_the_neediest_site_needs():
    """Each is charged with its own sampling; nobody exceeds the target."""
    found = _planned(
        "joint",
        private={},
        rounds=20,
        data={
            "source": HERE,
            "options": {"num_train": 400, "num_held_out": 80},
            "partition": {"kind": "dirichlet", "alpha": 1.0},
        },
        model={"options": {"inputs": 4, "classes": 3}},
    )
    rates = {event.sampling_rate for event in found.events.values()}
    assert len(rates) > 1
    needed = [
        noise_multiplier(8.0, found.deltas[name], e.sampling_rate, 21, slack=SLACK)
        for name, e in found.events.items()
    ]
    assert found.share.multiplier == max(needed)
    spent = [epsilon([e] * 21, found.deltas[name]) for name, e in found.events.items()]
    assert max(spent) <= 8.0
    assert max(spent) == pytest.approx(8.0, rel=2e-3)


def test_share_is_smaller_than_noise_of_ones_own():
    """By the root of h: what joint noise is for."""
    found = _planned("joint", private={})
    own = found.share.multiplier * found.share.sensitivity
    share = found.ring.noise_std / found.ring.scale
    assert share == pytest.approx(own / math.sqrt(3), rel=1e-2)


def test_advice_for_a_low_signal_is_about_right():
    """The model that would do has half the ratio's square of the values."""
    with pytest.raises(JobError, match="a model that trains 179 values") as caught:
        _sites(64, 249, delta=1e-3, accept_low_signal=False, noise_multiplier=9.5)
    assert caught.value.key == f"{DP}.accept_low_signal"
    small = _sites(64, 43, delta=1e-3, accept_low_signal=False, noise_multiplier=9.5)
    assert small.signal_to_noise is not None
    assert small.signal_to_noise >= 0.5


def test_small_ring_for_a_large_model_is_the_jobs_mistake():
    """With the table to change and no traceback."""
    with pytest.raises(JobError, match="to 24 bits adds") as caught:
        _planned(
            "joint",
            private={},
            training={"batch_size": 100},
            privacy={"secure_aggregation": {"ring_bits": 24, "clip_norm": 100.0}},
        )
    assert caught.value.key == "privacy.secure_aggregation"
