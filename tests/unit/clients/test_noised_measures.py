"""Measures of held-out records that get noise: those that are one sum each."""

from typing import Any

import pytest
from support.small_jobs import small_job
from support.without_report import simulate

from clients.privacy.site_plans import PrivateSites
from deploy.wiring.parts import build_federation
from federation.clock import VirtualClock
from federation.ids import RunId, SiteId
from federation.job.spec import JobSpec

PRIVATE = {"unit": "record", "target_epsilon": 60.0, "delta": 1e-5, "clip_norm": 1.0}
SECURE = {"enabled": True, "clip_norm": 5.0, "two_sites_waiver": True}


def job_of(*measures: str, **privacy: Any) -> JobSpec:
    return small_job(
        num_sites=2,
        data={
            "source": "support.small_jobs:blobs",
            "options": {"num_train": 240, "num_held_out": 4000},
        },
        training={"local_steps": 2, "batch_size": 32, "measures": list(measures)},
        aggregation={"weights": "uniform"},
        privacy=privacy,
    )


def test_noise_grows_with_each_sum_that_is_released():
    """A record adds 1 to the count, the loss, the hits, and to each recall."""

    def of(*measures: str) -> Any:
        federation = build_federation(job_of(*measures, differential_privacy=PRIVATE))
        with PrivateSites(
            federation, run_id=RunId("r"), folder=None, clock=VirtualClock(1.8e9)
        ) as sites:
            return sites.plans[SiteId("site-0")].held_out

    plain, more = of(), of("recall_at_1", "recall_at_2")
    assert [*more.metrics] == ["correct", "recall_at_1", "recall_at_2"]
    assert more.event() == plain.event()  # The same epsilon, by more noise.
    ratio = more.standard_deviation() / plain.standard_deviation()
    assert ratio == pytest.approx((5 / 3) ** 0.5, rel=1e-3)


@pytest.mark.parametrize("masks", [{}, {"secure_aggregation": SECURE}])
def test_recall_leaves_with_noise(masks: dict[str, Any]):
    """In the clear and in a secure sum; with little noise it is as without."""
    exact = simulate(job_of("recall_at_1", "recall_at_2"))
    noised = simulate(
        job_of("recall_at_1", "recall_at_2", differential_privacy=PRIVATE, **masks)
    )
    assert noised.metrics.keys() == exact.metrics.keys()
    found = noised.metrics
    assert found["recall_at_1"] == pytest.approx(noised.accuracy, abs=0.02)
    assert found["recall_at_1"] + 0.1 < found["recall_at_2"] < 1
