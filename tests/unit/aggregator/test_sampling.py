"""Cohorts."""

from collections import Counter
from dataclasses import replace

import pytest

from aggregator.sampling import draw_cohort
from federation.job.spec import (
    JobSpec,
    ModelSpec,
    OptimizerSpec,
    ScheduleSpec,
    SiteSpec,
    TrainingSpec,
)

NAMES = ("c", "a", "e", "b", "d")


def _job(sites_per_round: int | None = None, seed: int = 7) -> JobSpec:
    return JobSpec(
        name="job",
        rounds=3,
        seed=seed,
        model=ModelSpec(factory="module:function"),
        training=TrainingSpec(optimizer=OptimizerSpec(), local_steps=1),
        schedule=ScheduleSpec(sites_per_round=sites_per_round),
        sites=tuple(SiteSpec(name=name) for name in NAMES),
    )


@pytest.mark.parametrize("sites_per_round", [None, 5])
def test_all_sites_in_the_order_of_the_job(sites_per_round: int | None):
    """Nobody is drawn where everybody takes part."""
    assert draw_cohort(_job(sites_per_round), 1) == NAMES


def test_drawn_sites_keep_the_order_of_the_job():
    """Distinct sites, as many as asked for, not sorted by name."""
    for round_index in range(1, 50):
        cohort = draw_cohort(_job(3), round_index)
        assert cohort == tuple(n for n in NAMES if n in cohort)
        assert len(set(cohort)) == 3


def test_draw_depends_on_job_and_round_only():
    """The same twice, another in other rounds and with other seeds."""
    rounds = [draw_cohort(_job(2), r) for r in range(1, 30)]
    assert rounds == [draw_cohort(_job(2), r) for r in range(1, 30)]
    assert rounds != [draw_cohort(_job(2, seed=8), r) for r in range(1, 30)]
    assert len(set(rounds)) > 5


def test_draw_is_uniform():
    """Chi-squared over the ten pairs; 2000 rounds, fixed seed, alarm rate 0.1 %."""
    job = replace(_job(2), seed=11)
    counts = Counter(draw_cohort(job, r) for r in range(1, 2001))
    chi_squared = sum((n - 200) ** 2 / 200 for n in counts.values())
    assert len(counts) == 10
    assert chi_squared < 27.9
