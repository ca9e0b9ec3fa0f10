"""Runs that minimise an objective of a user's own, with a metric and nested batches."""

import inspect
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support import users_module
from support.small_jobs import BOUNDS, regression_job, small_job
from support.without_report import simulate

from federation import events
from federation.errors import JobError, QuorumNotMet
from federation.job.spec import JobSpec
from monitoring.runs.run_result import RunResult

pytestmark = pytest.mark.slow

SECURE = {"enabled": True, "clip_norm": 5.0, "max_examples": 100}


def by_hand(result: RunResult, low: float = 0.0, high: float = 2.0) -> float:
    """Mean absolute error of the final model on all held-out data."""
    _, (inputs, targets) = users_module.two_parts()
    weights = result.weights
    found = inputs["point"] @ weights["point.weight"][0] + weights["point.bias"]
    found += inputs["more"][0] @ weights["offset.weight"][0]
    return float(np.abs(found - targets).clip(low, high).mean())


def test_regression_in_the_clear():
    """The metric is the mean over the records of all sites, for people and programs."""
    result = simulate(regression_job())
    assert result.loss < 0.2
    assert result.accuracy is None
    assert result.metrics["absolute_error"] == pytest.approx(by_hand(result), rel=1e-4)
    summary = result.summary()
    assert summary["final"]["metrics"] == dict(result.metrics)
    assert "metrics" in summary["rounds"][0]


def test_metric_beyond_its_bounds_is_clipped():
    """What one record adds is bounded, with and without secrets."""
    metrics = {"loss": [0.0, 4.0], "absolute_error": [0.1, 0.3]}
    result = simulate(regression_job(metrics=metrics, rounds=1))
    assert result.metrics["absolute_error"] == pytest.approx(
        by_hand(result, 0.1, 0.3), rel=1e-4
    )


def test_bounds_do_not_touch_the_gradient():
    """They are of what is reported, not of what is minimised."""
    tight = {"loss": [0.0, 1e-3], "absolute_error": []}
    bounded, plain = (
        simulate(regression_job(metrics=metrics))
        for metrics in (tight, {"absolute_error": []})
    )
    assert bounded.loss <= 1e-3
    for name, values in plain.weights.items():
        np.testing.assert_array_equal(bounded.weights[name], values)


def test_regression_under_secure_aggregation():
    """The same sums come out of the masks, but for the ring's rounding."""
    secure = simulate(regression_job(privacy={"secure_aggregation": SECURE}))
    plain = simulate(regression_job())
    assert secure.metrics["absolute_error"] == pytest.approx(by_hand(secure), rel=1e-4)
    assert secure.loss == pytest.approx(plain.loss, rel=1e-2)
    assert secure.metrics == pytest.approx(plain.metrics, rel=1e-2)


@pytest.mark.parametrize("clipping", ["hooks", "ghost"])
def test_regression_with_record_level_privacy(clipping: str):
    """Both ways of per-record gradients follow two inputs; results carry noise."""
    result = simulate(private_job(clipping=clipping))
    assert result.status == "completed"
    assert 0 <= result.metrics["absolute_error"] <= 2
    assert all(row.finished.training is None for row in result.view.rounds)


def private_job(
    objective: str = "squared_error", *, clipping: str = "auto", **changes: Any
) -> JobSpec:
    """The same with privacy of each record."""
    return regression_job(
        objective,
        num_sites=2,
        rounds=2,
        aggregation={"weights": "uniform"},
        privacy={
            "differential_privacy": {
                "unit": "record",
                "target_epsilon": 8.0,
                "clipping": clipping,
            }
        },
        **changes,
    )


def failure(job: JobSpec) -> str:
    """Why no site trains."""
    seen: list[object] = []
    with pytest.raises(QuorumNotMet):
        simulate(job, listeners=[seen.append])
    failed = {e.message for e in seen if isinstance(e, events.SiteFailed)}
    assert not any(isinstance(e, events.SiteAnswered) for e in seen)
    assert len(failed) == 1
    return failed.pop()


@pytest.mark.parametrize("objective", ["error_to_the_mean", "gradient_of_others"])
def test_objective_that_mixes_records_takes_no_private_step(objective: str):
    """The promise of single records would be void; nothing is trained."""
    assert "batch has other records" in failure(private_job(objective))


def test_metric_that_mixes_records_gets_no_noise():
    """Nor is it evaluated: one record changes more of it than its bounds say."""
    assert "batch has other records" in failure(private_job("rank_of_error"))


def test_mistake_shows_the_users_own_line():
    """The file's name and the line of the objective, not one of ours."""
    source = inspect.getsource(users_module).splitlines()
    line = 1 + next(i for i, text in enumerate(source) if "no_such_thing" in text)
    said = failure(regression_job("broken"))
    assert "support.users_module:broken failed with AttributeError" in said
    assert said.endswith(f"(users_module.py, line {line})")


@pytest.mark.parametrize(
    ("objective", "said"),
    [
        ("mean_error", r"one value per record.*returned a tensor of shape \(\)"),
        ("detached", "loss without a gradient.*detach"),
        ("wrong_name", "name its metrics in training.metrics"),
    ],
)
def test_values_of_another_form_are_explained(objective: str, said: str):
    """One value for each record, under the names that the job gives."""
    assert re.search(said, failure(regression_job(objective)))


@pytest.mark.parametrize(
    ("task", "metrics", "said"),
    [
        ("support.users_module:nowhere", BOUNDS, "has no 'nowhere'"),
        ("no_such_module:loss", BOUNDS, "there is no module"),
    ],
)
def test_objective_is_found_before_anything_runs(
    task: str, metrics: dict[str, list[float]], said: str
):
    """As a model is."""
    job = regression_job(metrics=metrics)
    job = replace(job, training=replace(job.training, task=task))
    with pytest.raises(JobError, match=said) as caught:
        simulate(job)
    assert caught.value.key == "training.task"


@pytest.mark.parametrize("secure", [False, True])
def test_logits_of_an_own_objective_give_matrix_and_measures(*, secure: bool):
    """As the built-in task: the same model, and the same sums of all sites."""
    keys: dict[str, Any] = {
        "classes": ["ash", "birch", "cedar"],
        "measures": ["recall_at_2"],
    }
    privacy: dict[str, Any] = {}
    if secure:
        keys |= {"metrics": {"loss": [0.0, 32.0], "hit": [0.0, 1.0]}}
        privacy = {"privacy": {"secure_aggregation": SECURE}}
    else:
        keys |= {"metrics": {"hit": []}}
    own = {"task": "support.users_module:with_logits", **keys}
    built_in = {name: keys[name] for name in ("classes", "measures")}
    found, wanted = (
        simulate(
            small_job(
                num_sites=3, rounds=2, training={"local_steps": 5, **t}, **privacy
            )
        ).summary()["final"]
        for t in (own, built_in)
    )
    assert found["confusion"] == wanted["confusion"]
    for name in ("macro_f1", "recall_at_2"):
        assert found["metrics"][name] == pytest.approx(wanted["metrics"][name])


def test_weighted_steps_with_record_level_privacy():
    """The probe before the first private step accepts them; results carry noise."""
    options = {"class_weights": [1.0, 5.0, 2.0], "label_smoothing": 0.1}
    private = {"unit": "record", "target_epsilon": 8.0}
    training = {"local_steps": 3, "batch_size": 4, "options": options}
    result = simulate(
        small_job(
            num_sites=2,
            rounds=2,
            training=training,
            aggregation={"weights": "uniform"},
            privacy={"differential_privacy": private},
        )
    )
    assert result.status == "completed"


def test_logits_that_mix_records_get_no_noise():
    """One record would change more cells than the noise is made for."""
    job = small_job(
        num_sites=2,
        rounds=2,
        training={
            "task": "support.users_module:logits_of_others",
            "classes": ["ash", "birch", "cedar"],
            "metrics": {"loss": [0.0, 6.0]},
            "local_steps": 2,
            "batch_size": 4,
        },
        aggregation={"weights": "uniform"},
        privacy={"differential_privacy": {"unit": "record", "target_epsilon": 8.0}},
    )
    assert "batch has other records" in failure(job)
