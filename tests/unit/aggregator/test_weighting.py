"""Weights of sites, and claims that are not believed."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.small_jobs import small_job

from aggregator.weighting import MAX_EXAMPLES, SignedCounts, sums_fault, weight_of
from federation.errors import InvalidUpdate
from federation.ids import RunId, SiteId
from federation.job.metrics import MAX_PREDICTIONS, evaluated_of
from federation.job.spec import JobSpec
from federation.messages import MetricSums, SiteUpdate


def _sums(loss: float, count: int = 10) -> MetricSums:
    return MetricSums(count=count, loss_sum=loss * count, metrics={"correct": 0})


def _update(
    num_examples: int = 100,
    before: MetricSums | None = None,
    after: MetricSums | None = None,
) -> SiteUpdate:
    return SiteUpdate(
        run_id=RunId("run"),
        round_index=1,
        site=SiteId("site"),
        layout_digest="0" * 64,
        delta_d=np.zeros(1, np.float32),
        integers_m=np.zeros(0, np.int64),
        num_examples=num_examples,
        num_steps=1,
        training=_sums(1.0),
        evaluation=before,
        evaluation_after=after,
        phases=(),
    )


def test_uniform_counts_every_site_once():
    """What a site claims does not matter."""
    assert weight_of("uniform")(_update(123)) == 1.0


@pytest.mark.parametrize("rule", ["examples", "dynamic"])
@pytest.mark.parametrize("num_examples", [-1, 0, MAX_EXAMPLES + 1])
def test_unbelievable_counts_are_refused(rule: str, num_examples: int):
    """No examples, less than none, or too many."""
    update = _update(num_examples, before=_sums(2.0), after=_sums(1.0))
    with pytest.raises(InvalidUpdate, match="claims"):
        weight_of(rule)(update)


HUNDRED = SignedCounts(examples=100, held_out=0)


@pytest.mark.parametrize("rule", ["examples", "uniform", "dynamic"])
def test_site_is_held_to_what_it_introduced_itself_with(rule: str):
    """Whatever its weight is made of; of a site that said nothing nothing is known."""
    held = weight_of(rule, introduced={SiteId("site"): HUNDRED})
    sums = {"before": _sums(2.0), "after": _sums(1.0)}
    assert held(_update(100, **sums)) == weight_of(rule)(_update(100, **sums))
    said = "claims 101 training examples, but introduced itself with 100: if its data"
    with pytest.raises(InvalidUpdate, match=said):
        held(_update(101, **sums))
    elsewhere = weight_of(rule, introduced={SiteId("other"): HUNDRED})
    assert elsewhere(_update(101, **sums)) > 0


@pytest.mark.parametrize(
    ("before", "after", "factor"),
    [
        (2.0, 1.5, 0.25),
        (2.0, 0.0, 1.0),
        (2.0, 1.999, 0.01),
        (2.0, 2.0, 0.01),
        (2.0, 7.0, 0.01),
        (0.0, 0.0, 0.01),
        (5e-324, 1e300, 0.01),
    ],
)
def test_dynamic_counts_relative_improvement(
    before: float, after: float, factor: float
):
    """Examples times the improvement, between 0.01 and 1."""
    update = _update(100, before=_sums(before), after=_sums(after))
    assert weight_of("dynamic")(update) == pytest.approx(100 * factor)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, _sums(1.0)),
        (_sums(1.0), None),
        (_sums(1.0, count=0), _sums(1.0, count=0)),
        (_sums(math.nan), _sums(1.0)),
        (_sums(1.0), _sums(math.inf)),
        (_sums(1.0), _sums(-1.0)),
        (_sums(1.0, count=10), _sums(1.0, count=11)),
    ],
)
def test_dynamic_refuses_bad_evaluations(
    before: MetricSums | None, after: MetricSums | None
):
    """Missing, empty, not finite, negative, or of other data."""
    with pytest.raises(InvalidUpdate, match="site 'site'"):
        weight_of("dynamic")(_update(before=before, after=after))


IN_EPOCHS = small_job(training={"local_epochs": 3})
IN_STEPS = small_job(training={"local_steps": 4, "batch_size": 8})
TOKENS_IN_EPOCHS = small_job(
    training={"task": "causal_lm", "max_tokens": 7, "local_epochs": 3}
)
TOKENS_IN_STEPS = small_job(
    training={"task": "causal_lm", "max_tokens": 7, "local_steps": 4, "batch_size": 8}
)
SAID = {SiteId("site"): SignedCounts(examples=100, held_out=20)}


@pytest.mark.parametrize(
    ("job", "kind", "most"),
    [
        (IN_EPOCHS, "evaluation", 20),
        (IN_EPOCHS, "evaluation_after", 20),
        (IN_EPOCHS, "training", 300),
        (IN_STEPS, "training", 32),
        (TOKENS_IN_EPOCHS, "evaluation", 140),
        (TOKENS_IN_EPOCHS, "training", 2100),
        (TOKENS_IN_STEPS, "training", 224),
    ],
)
def test_site_counts_no_more_predictions_than_it_has_data_for(
    job: JobSpec, kind: str, most: int
):
    """It would make the run's loss and accuracy its own."""
    fault = sums_fault(job, SAID)
    within, beyond = (
        replace(_update(100), **{kind: _sums(1.0, n)}) for n in (most, most + 1)
    )
    assert fault(within, None) == ""
    assert f"counts {most + 1} predictions in {kind.partition('_')[0]}" in fault(
        beyond, None
    )
    assert f"at most {most}" in fault(beyond, None)


@pytest.mark.parametrize(("index", "most"), [(1, 16), (2, 64)])
def test_site_counts_no_more_predictions_than_its_round_takes(index: int, most: int):
    """The larger steps of later rounds are no excuse in an earlier one."""
    training = {"local_steps": 2, "batch_size": 8, "accumulate_from": [[2, 4]]}
    fault = sums_fault(small_job(rounds=2, training=training), SAID)
    for count in (most, most + 1):
        answer = replace(_update(100), round_index=index, training=_sums(1.0, count))
        assert bool(fault(answer, None)) == (count > most)


@pytest.mark.parametrize(
    "said", [{}, {SiteId("site"): SignedCounts(examples=0, held_out=0)}]
)
def test_site_that_tells_nothing_counts_no_more_than_anybody_could(said: Any):
    """As under differential privacy."""
    fault = sums_fault(IN_EPOCHS, said)
    for count in (MAX_PREDICTIONS, MAX_PREDICTIONS + 1):
        answer = replace(_update(100), evaluation=_sums(1.0, count))
        assert bool(fault(answer, None)) == (count > MAX_PREDICTIONS)


BOUNDED = small_job(
    training={
        "local_steps": 1,
        "task": "m:f",
        "metrics": {"error": [-1.0, 2.0], "free": []},
    }
)


def judged(job: JobSpec, metrics: dict[str, float]) -> str:
    """What is said of ten predictions."""
    sums = MetricSums(count=10, loss_sum=1.0, metrics=metrics)
    return sums_fault(job)(replace(_update(100), training=sums), None)


@pytest.mark.parametrize(
    ("job", "metrics"),
    [
        (IN_STEPS, {"correct": 0}),
        (IN_STEPS, {"correct": 10}),
        (BOUNDED, {"error": 20.0, "free": math.inf}),
        (BOUNDED, {"error": -10.0, "free": math.nan}),
    ],
)
def test_possible_metrics(job: JobSpec, metrics: dict[str, float]):
    """Of a metric without bounds anything is believed."""
    assert judged(job, metrics) == ""


@pytest.mark.parametrize(
    ("job", "metrics"),
    [
        (IN_STEPS, {"correct": 11}),
        (IN_STEPS, {"correct": -1}),
        (IN_STEPS, {"correct": 5.0}),
        (IN_STEPS, {"correct": math.nan}),
        (IN_STEPS, {}),
        (IN_STEPS, {"correct": 1, "other": 1}),
        (BOUNDED, {"error": 20.1, "free": 0.0}),
        (BOUNDED, {"error": -10.1, "free": 0.0}),
        (BOUNDED, {"error": math.nan, "free": 0.0}),
        (BOUNDED, {"correct": 1}),
    ],
)
def test_impossible_metrics(job: JobSpec, metrics: dict[str, float]):
    """Beyond their bounds, of another kind, or not the job's."""
    assert judged(job, metrics) == "reported an impossible number of predictions"


@pytest.mark.parametrize("held_out", ["noise", "public"])
def test_cells_of_histograms_may_be_negative_with_noise_only(held_out: str):
    """By no more than the number of predictions."""
    private = {"unit": "record", "target_epsilon": 8.0, "held_out": held_out}
    job = small_job(
        training={"local_steps": 1, "task": "binary", "measures": ["auc"]},
        aggregation={"weights": "uniform"},
        privacy={"differential_privacy": private},
    )
    for cell, is_noised in ((10, False), (0, False), (-10, True), (-11, None)):
        metrics = dict.fromkeys(evaluated_of(job.training), 0) | {"auc_neg_3": cell}
        sums = MetricSums(count=10, loss_sum=1.0, metrics=metrics)
        answer = replace(_update(100), training=None, evaluation=sums)
        fault = sums_fault(job)(answer, None)
        is_possible = is_noised is False or (is_noised and held_out == "noise")
        assert bool(fault) != bool(is_possible)


def test_count_below_zero_is_none():
    """Not even of no predictions."""
    sums = MetricSums(count=-1, loss_sum=1.0, metrics={"correct": -1})
    fault = sums_fault(IN_STEPS)(replace(_update(100), training=sums), None)
    assert fault == "reported an impossible number of predictions"
