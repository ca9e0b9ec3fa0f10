"""What a job cannot ask of a loop that is the user's own."""

from typing import Any

import pytest
from support.small_jobs import small_job

from federation.errors import JobError
from federation.job.metrics import evaluated_of, metrics_of
from federation.job.spec import JobSpec


def loop_job(**tables: Any) -> JobSpec:
    training = {"task": "trainer", "local_steps": 2, **tables.pop("training", {})}
    return small_job(num_sites=3, training=training, **tables)


def test_results_of_the_loop_are_reported_on_held_out_data_only():
    job = loop_job(training={"metrics": {"loss": [0.0, 9.0], "f1": [0.0, 1.0]}})
    assert metrics_of(job.training) == {}
    assert evaluated_of(job.training)["f1"].high == 1
    assert not job.continues_rounds


def test_secure_sums_of_results_need_bounds():
    secure = {"enabled": True, "max_examples": 100}
    metrics: dict[str, list[float]] = {"loss": [0.0, 9.0], "f1": []}
    with pytest.raises(JobError, match="has no bounds") as caught:
        loop_job(training={"metrics": metrics}, privacy={"secure_aggregation": secure})
    assert caught.value.key == "training.metrics.f1"
