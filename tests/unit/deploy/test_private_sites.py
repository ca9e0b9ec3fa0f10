"""What a run says of its promises before it begins is true of what it does."""

from typing import Any

import pytest
from support.small_jobs import small_job

from clients.privacy.site_plans import PrivateSites
from deploy.wiring import parts as wiring
from federation.clock import SystemClock
from federation.errors import JobError
from federation.events import PrivacyPlanned
from federation.ids import RunId
from monitoring import privacy_words

_TRAINING = {"local_steps": 1, "batch_size": 8, "optimizer": {"lr": 0.5}}
_TRAINING_LOSSES = "training losses never leave a site"


def _planned(every: int = 1, **private: Any) -> PrivacyPlanned:
    table = {"target_epsilon": 8.0, "accept_low_signal": private["unit"] == "site"}
    job = small_job(
        num_sites=4,
        training=_TRAINING,
        aggregation={"weights": "uniform"},
        evaluation={"every": every},
        privacy={
            "secure_aggregation": {"enabled": True},
            "differential_privacy": table | private,
        },
    )
    with PrivateSites(
        wiring.build_federation(job),
        run_id=RunId("run-1"),
        folder=None,
        clock=SystemClock(),
    ) as sites:
        return sites.planned(at=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["record", "joint"])
def test_held_out_results_are_said_to_have_noise_where_they_have(unit: str):
    """And to leave as they are, or not at all, where a job says so."""
    noisy = _planned(unit=unit)
    assert privacy_words.has_noise(noisy)
    assert "leave with noise" in noisy.withheld[1]
    public = _planned(unit=unit, held_out="public")
    assert not privacy_words.has_noise(public)
    assert "declares the held-out data" in public.withheld[1]
    nothing = _planned(unit=unit, every=0)
    assert not privacy_words.has_noise(nothing)
    assert nothing.withheld[1] == "held-out results never leave a site"
    for planned in (noisy, public, nothing):
        assert planned.withheld[0].startswith(_TRAINING_LOSSES)


def test_whole_sites_say_what_their_bits_tell():
    """Where the clip norm follows the updates, and only there."""
    fixed = _planned(unit="site", held_out="public")
    assert len(fixed.withheld) == 2
    assert fixed.signal_to_noise is not None
    assert fixed.relation == "one site's data present or absent"
    adapts = _planned(unit="site", held_out="public", adaptive_clip=True)
    assert "which counts towards epsilon" in adapts.withheld[2]
    assert adapts.signal_to_noise is not None
    assert adapts.signal_to_noise < fixed.signal_to_noise


@pytest.mark.slow
def test_joint_noise_is_one_for_all_and_epsilon_is_not():
    """Whom it holds against depends on how many may collude."""
    one = _planned(unit="joint")
    assert len({site.noise_multiplier for site in one.sites}) == 1
    assert "one of the sites" in one.holds_against
    two = _planned(unit="joint", colluding_sites=2)
    assert "together with 2 of the sites" in two.holds_against
    assert one.signal_to_noise is None


@pytest.mark.parametrize("key", ["clip_norm", "noise_multiplier"])
def test_noise_beyond_the_grid_is_refused_with_its_key(key: str):
    """Where a search, for one, may have drawn it."""
    with pytest.raises(JobError, match=f"site-0.*{key} must be in"):
        _planned(unit="record", **{key: 1e30})
