"""Which model a run leaves, and when it stops early."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support import toy

from aggregator.methods import selection
from aggregator.methods.selection import MetricOf
from federation.clock import VirtualClock
from federation.errors import JobError
from federation.events import ModelEvaluated, ModelSelected, RunFinished
from federation.ids import SiteId
from federation.job import job_digest
from federation.job.selection_checks import counts_for_nan, goal_of
from federation.job.selection_job import SelectionSpec
from federation.job.spec import JobSpec, TrainingSpec
from federation.messages import MetricSums, SiteMessage, Task, TaskKind
from federation.protocols import RunState
from federation.rounds.round_sums import RoundSums
from federation.vectors import Vector


def job(*, rounds: int = 6, **keys: Any) -> JobSpec:
    """A toy job that selects a model."""
    return toy.job({"rounds": rounds, "selection": keys})


def scores(*values: float | None) -> MetricOf:
    """The result of each evaluation in turn, the model before round 1 first."""
    left: Iterator[float | None] = iter(values)
    return lambda _sums, _name: next(left)


class Models:
    """Notes the model of every task, by the round that it is of."""

    def __init__(self) -> None:
        """Nothing is sent yet."""
        self.trained: dict[int, Vector] = {}
        self.evaluated: dict[int, Vector] = {}

    def __call__(
        self, task: Task, answer: Callable[[], SiteMessage]
    ) -> Sequence[SiteMessage]:
        """Note the model, and let the site answer."""
        by_kind = {TaskKind.TRAIN: self.trained, TaskKind.EVALUATE: self.evaluated}
        by_kind[task.kind][task.based_on] = np.array(task.weights_d)  # type: ignore[union-attr]
        return (answer(),)


def left(state: RunState) -> Vector:
    """Weights of the model that a run leaves."""
    return state.with_model_left().weights_d


def test_the_best_model_is_left():
    """That of round 2, although four rounds followed."""
    spec, models = job(metric="accuracy"), Models()
    run = toy.Toy(job=spec, fault=models)
    state = run.run(metric_of=scores(0.1, 0.2, 0.9, 0.3, 0.9, 0.5, 0.6))
    np.testing.assert_array_equal(left(state), models.trained[2])
    (event,) = run.told(ModelSelected)
    assert (event.model, event.round_index, event.best_score) == ("best", 2, 0.9)
    assert (event.models, event.stopped_early) == (1, False)


def test_the_best_model_is_copied():
    """The round loop overwrites the memory of the newest one."""
    spec = job(metric="accuracy")
    state = toy.Toy(job=spec).run(metric_of=lambda _sums, _name: 0.5)
    kept = selection.judge(spec, state, 0.9).kept
    assert kept is not None
    np.testing.assert_array_equal(kept.weights_d, state.weights_d)
    assert not np.shares_memory(kept.weights_d, state.weights_d)


def test_results_that_are_not_finite_or_missing_are_never_best():
    """A missing one is not judged; the other is no improvement."""
    run = toy.Toy(job=job(rounds=3))
    state = run.run(metric_of=scores(5.0, float("nan"), None, float("-inf")))
    assert (state.selection.best_round, state.selection.stale) == (0, 2)


def test_a_small_change_is_no_improvement():
    """It must be larger than min_change."""
    run = toy.Toy(job=job(rounds=2, min_change=0.5))
    state = run.run(metric_of=scores(5.0, 4.5, 4.25))
    assert state.selection.best_round == 2


def test_a_run_stops_early():
    """After two results that are not better, known a round later each."""
    spec = job(rounds=50, patience=2)
    run = toy.Toy(job=spec)
    state = run.run(metric_of=scores(5.0, 4.0, 6.0, 7.0, 8.0))
    assert (state.round_index, state.selection.best_round) == (4, 1)
    (event,), (end,) = run.told(ModelSelected), run.told(RunFinished)
    assert (event.stopped_early, event.round_index) == (True, 1)
    assert (end.status, end.last_round) == ("completed", 4)
    again = run.run(metric_of=scores(8.0))
    assert again.round_index == 4  # It stays stopped.
    np.testing.assert_array_equal(left(again), left(state))


@pytest.mark.parametrize("kind", ["ema", "swa"])
def test_averages_are_those_of_float64(kind: str):
    """From the given round on, and the final evaluation is of the average."""
    keys = {"decay": 0.75} if kind == "ema" else {}
    spec, models = job(model=kind, average_from=2, **keys), Models()
    state = toy.Toy(job=spec, fault=models).run()
    theta = [models.trained[i].astype(np.float64) for i in range(2, 6)]
    theta.append(state.weights_d.astype(np.float64))
    expected = theta[0]
    for one in theta[1:]:
        expected = 0.75 * expected + 0.25 * one
    expected = np.mean(theta, axis=0) if kind == "swa" else expected
    np.testing.assert_allclose(left(state), expected, rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(models.evaluated[6], left(state))
    assert state.selection.averaged == 5


@pytest.mark.parametrize("keys", [{}, {"model": "ema"}, {"model": "swa"}])
def test_a_resumed_run_selects_the_same_model(keys: dict[str, Any]):
    """To the last bit; what is kept is in the checkpoints."""
    spec, found = job(**keys), (9.0, 4.0, 7.0, 8.0, 5.0, 6.0, 4.5)
    whole = toy.Toy(job=spec).run(metric_of=scores(*found))
    stops = iter([False, False, False, True])
    run = toy.Toy(job=spec, stop_requested=lambda: next(stops))
    run.run(metric_of=scores(*found[:3]))
    run.stop_requested = lambda: False
    state = run.run(metric_of=scores(*found[3:]))
    assert state.selection == whole.selection
    assert left(state).tobytes() == left(whole).tobytes()


def test_a_lost_round_is_not_judged():
    """The same model is evaluated again in the next one."""
    one = toy.SITES[0]
    fail = toy.faults((one, 2, lambda m: toy.failure(m.site, round_index=2)))
    run = toy.Toy(job=job(rounds=3, patience=1), fault=fail)
    state = run.run(metric_of=scores(5.0, 4.0, 3.0))
    assert (state.round_index, state.selection.stale) == (3, 0)
    assert len(run.told(ModelEvaluated)) == 4


def test_jobs_without_the_table_keep_their_digest():
    """Runs of earlier releases continue; with it, it is a part of the contract."""
    assert "selection" not in job_digest.deciding(toy.job())
    one, other = job(), job(patience=3)
    assert len({job_digest.digest(j) for j in (toy.job(), one, other)}) == 3


@pytest.mark.parametrize(
    ("keys", "more", "message"),
    [
        ({"metric": "acuracy"}, {}, "did you mean 'accuracy'"),
        ({"metric": "f1"}, {}, "choose loss, accuracy"),
        ({"model": "last"}, {}, "or set patience"),
        ({"goal": "max"}, {}, "'loss' is better the smaller"),
        ({"metric": "accuracy", "goal": "min"}, {}, "better the larger it"),
        ({"model": "swa", "average_from": 9}, {}, "the job has 3 rounds"),
        (
            {"metric": "gain"},
            {"training": {"task": "m:f", "metrics": {"gain": [0, 1]}}},
            "min or max",
        ),
    ],
)
def test_tables_that_cannot_work_are_refused(
    keys: dict[str, Any], more: dict[str, Any], message: str
):
    """With what to write instead."""
    with pytest.raises(JobError, match=message):
        toy.job({"selection": keys, **more})


@pytest.mark.parametrize(
    ("training", "metrics"),
    [
        ({"task": "binary", "measures": ["auc", "calibration"]}, "f1 auc"),
        ({"task": "classification", "classes": ["a", "b"]}, "macro_f1 mean_iou"),
        ({"task": "contrastive", "measures": ["recall_at_5"]}, "recall_at_5"),
        ({"task": "causal_lm"}, "accuracy"),
    ],
)
def test_results_of_tasks_can_be_compared(training: dict[str, Any], metrics: str):
    """More is better."""
    for name in metrics.split():
        spec = toy.job({"training": training, "selection": {"metric": name}})
        assert spec.selection is not None
        state = selection.judge(spec, toy.initial_state(spec), 0.5)
        better = selection.judge(spec, replace(state, round_index=1), 0.6)
        assert better.selection.best_round == 1


def test_metrics_of_a_users_loop_can_be_compared():
    """They are reported on held-out data only, and need a goal."""
    training = TrainingSpec(task="trainer", metrics={"f1": (0.0, 1.0)})
    spec = SelectionSpec(metric="f1", goal="max")
    assert goal_of(spec, training) == "max"
    with pytest.raises(JobError, match="min or max"):
        goal_of(replace(spec, goal=None), training)


def reported(*losses: float) -> RoundSums:
    """What so many sites have reported of a model, each over ten records."""
    clock = VirtualClock()
    found = RoundSums(clock=clock, start=clock.monotonic())
    for number, loss in enumerate(losses):
        found.evaluations[SiteId(f"site-{number}")] = MetricSums(
            count=10, loss_sum=10 * loss, metrics={"correct": 5}
        )
    return found


def loss(sums: MetricSums) -> float | None:
    """The mean loss."""
    return sums.loss


def test_no_minority_of_false_results_selects_a_model_under_a_robust_rule():
    """The median over sites; a mean is of all records, and one site can move it."""
    sums, mean = reported(2.0, 2.2, 2.1, -1e9, math.nan), toy.job()
    aggregation = {"combine": "median", "weights": "uniform"}
    robust = toy.job({"aggregation": aggregation})
    assert selection.score_of(robust, sums, loss) == pytest.approx(2.05)
    assert selection.score_of(mean, reported(2.0, -8.0), loss) == -3.0
    assert selection.score_of(robust, reported(), loss) is None
    assert math.isnan(selection.score_of(robust, reported(math.nan), loss) or 0.0)


def test_a_secret_sum_is_compared_as_it_is():
    """Results of single sites are not known."""
    sums = reported()
    sums.secret_evaluation = MetricSums(count=4, loss_sum=8.0, metrics={})
    robust = toy.job({"aggregation": {"combine": "median", "weights": "uniform"}})
    assert selection.score_of(robust, sums, loss) == 2.0


@pytest.mark.parametrize(("goal", "counts"), [(None, 9.0), ("min", 9.0), ("max", -1.0)])
def test_nan_counts_as_the_worse_bound(goal: str | None, counts: float):
    """As the job's goal says, or the metric's name; no model wins by being NaN."""
    metrics = {"loss": [0.0, 32.0], "score": [-1.0, 9.0], "accuracy": [0.0, 1.0]}
    keys: dict[str, Any] = {"training": {"task": "m:f", "metrics": metrics}}
    if goal:
        keys["selection"] = {"metric": "score", "goal": goal}
    assert counts_for_nan(toy.job(keys)) == {"score": counts, "accuracy": 0.0}
