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


@pytest.mark.parametrize(
    ("tables", "key"),
    [
        ({"training": {"optimizer": {"lr": 0.5}}}, "training.optimizer"),
        ({"training": {"learning_rate": {"name": "linear"}}}, "training.learning_rate"),
        ({"training": {"clip_grad_norm": 1.0}}, "training.clip_grad_norm"),
        ({"training": {"precision": "bf16"}}, "training.precision"),
        ({"training": {"options": {"a": 1}}}, "training.options"),
        ({"training": {"proximal_mu": 1.0}}, "training.proximal_mu"),
        ({"training": {"overlap_steps": 1}}, "training.overlap_steps"),
        ({"evaluation": {"batch_size": 8}}, "evaluation.batch_size"),
    ],
)
def test_keys_of_another_loop_are_refused(tables: dict[str, Any], key: str):
    """A key without effect is an error, which says where the value belongs."""
    with pytest.raises(JobError, match='no effect with task = "trainer"') as caught:
        loop_job(**tables)
    assert caught.value.key == key


@pytest.mark.parametrize("unit", ["record", "joint"])
def test_single_records_cannot_be_protected(unit: str):
    """What one record adds to a batch's gradient is unknown."""
    private = {"unit": unit, "clip_norm": 1.0, "target_epsilon": 1.0, "delta": 1e-3}
    with pytest.raises(JobError, match="cannot be clipped") as caught:
        loop_job(privacy={"differential_privacy": private})
    assert caught.value.key == "training.task"


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


@pytest.mark.parametrize(
    ("tables", "key"),
    [
        (
            {"schedule": {"local_work": "auto", "max_local_steps": 4}},
            "schedule.local_work",
        ),
        ({"model": {"factory": "net:make", "personal": ["*"]}}, "model.personal"),
        (
            {"model": {"factory": "net:make", "weights": "w", "keep_zeros": True}},
            "model.keep_zeros",
        ),
    ],
)
def test_rounds_and_state_of_another_loop_are_refused(tables: dict[str, Any], key: str):
    with pytest.raises(JobError, match="Trainer") as caught:
        loop_job(**tables)
    assert caught.value.key == key
