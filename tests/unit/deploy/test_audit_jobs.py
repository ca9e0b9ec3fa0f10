"""What an audit changes in a job; the audits themselves are slow."""

from typing import Any

import pytest
from support.small_jobs import small_job

from clients.training.private_steps import sampling_rate
from deploy.audit.jobs import MAX_DRAWN, round_weight, with_more_records
from federation.errors import JobError
from federation.job.spec import JobSpec
from federation.rounds.local_work import in_round

ROUNDS = 4


def growing_job(*, unit: str = "record", **training: Any) -> JobSpec:
    """Steps of two batches, from round 2 on of eight, and in round 4 of one."""
    steps = {"local_steps": 3, "batch_size": 8, "accumulate": 2}
    private = {"unit": unit}
    if unit != "none":
        private |= {"target_epsilon": 8.0}
    return small_job(
        rounds=ROUNDS,
        training=steps | {"accumulate_from": [[2, 8], [4, 1]]} | training,
        aggregation={"weights": "uniform"},
        evaluation={"every": 0},
        privacy={"differential_privacy": private},
    )


def test_each_round_keeps_its_sampling_rate_beside_canaries():
    """Never above what the ledger is charged for, and little below."""
    for records, canaries in ((256, 100), (448, 5000), (653, 3000)):
        job = growing_job()
        new, num_empty = with_more_records(job, records, canaries)
        total = records + canaries + num_empty
        for index in range(1, ROUNDS + 1):
            charged = sampling_rate(in_round(job, index), records)
            rate = sampling_rate(in_round(new, index), total)
            assert 0.99 * charged <= rate <= charged, (records, canaries, index)
        assert new.training.batch_size <= 8
        assert new.training.local_steps == 3


def test_without_privacy_steps_grow_in_proportion():
    """By as much in every round, since the site holds that many more records."""
    new, _ = with_more_records(growing_job(unit="none"), 400, 400)
    first, (_, second), (_, third) = (
        new.training.accumulate,
        *new.training.accumulate_from,
    )
    assert (first, second) == (2 * third, 8 * third)
    assert new.training.batch_size * third == 2 * 8


def test_the_largest_step_must_not_draw_too_many_records():
    """Although the first step would draw few enough."""
    job = growing_job(accumulate_from=[[2, 64]])
    small, _ = with_more_records(growing_job(accumulate_from=[]), 512, 100_000)
    assert small.training.batch_size * small.training.accumulate < MAX_DRAWN / 20
    with pytest.raises(JobError, match=r"draws \d+ records: use fewer canaries"):
        with_more_records(job, 512, 100_000)


def test_updates_count_inversely_to_the_variance_of_their_noise():
    """Steps of two, eight and one batch: noise of the mean of their records."""
    job = growing_job()
    weights = [round_weight(job, index) for index in range(1, ROUNDS + 1)]
    assert weights == [1, 16, 16, 1 / 4]
    assert round_weight(growing_job(accumulate_from=[]), ROUNDS) == 1
