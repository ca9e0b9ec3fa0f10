"""What the sums of a header may be, slot by slot and beside each other."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from support.secagg_parties import RECORD, Parties
from support.small_jobs import small_job

from aggregator.sum_bounds import SumTerms, check_totals
from federation.job.metrics import MAX_PREDICTIONS
from federation.job.spec import JobSpec
from federation.messages import MetricSums
from privacy.counts import coarse
from privacy.dp import adaptive_clip
from privacy.secagg.arithmetic.ring import WEIGHT_ERROR, SumOutOfRange
from privacy.secagg.protocol import train
from privacy.secagg.protocol.of_job import header_slots

HONEST: Mapping[str, float] = {
    "weight": 1.5,
    "training_count": 60,
    "training_loss": 5_000_000,
    "training_correct": 40,
    "evaluation_count": 30,
    "evaluation_loss": 1,
    "evaluation_correct": 30,
}


def asked(**changes: Any) -> SumTerms:
    """Four sites that trained, and evaluated the model before."""
    job = small_job(num_sites=4, training={"local_steps": 3, "batch_size": 8})
    values: dict[str, Any] = {
        "job": job,
        "contract": Parties(4).contract(header_slots=train.HEADER_SLOTS, threshold=4),
        "num_updates": 4,
        "round_index": 1,
        "training": True,
        "evaluation": True,
    }
    return SumTerms(**(values | changes))


def private_job(**table: Any) -> JobSpec:
    """A job whose held-out results leave with noise."""
    document: dict[str, Any] = {
        "privacy": {
            "secure_aggregation": {"enabled": True, "clip_norm": 1.0},
            "differential_privacy": {"unit": "record", "target_epsilon": 8.0} | table,
        },
        "aggregation": {"weights": "uniform"},
    }
    return small_job(num_sites=4, **document)


def private() -> SumTerms:
    """Four sites under record-level privacy."""
    contract = Parties(4).contract(
        weight_rule="uniform", max_examples=1, differential_privacy=RECORD
    )
    return asked(job=private_job(), contract=contract)


QUIET: Mapping[str, float] = {
    **dict.fromkeys(HONEST, 0),
    "weight": 4.0,
    "evaluation_count": 100,
    "evaluation_loss": 600_000_000,
    "evaluation_correct": 7,
}


def refused(totals: Mapping[str, float], said: str, asked: SumTerms) -> None:
    """Each refusal says what is wrong, and that it is a lie."""
    with pytest.raises(SumOutOfRange, match=f"{said}.*: a site lied"):
        check_totals(totals, asked)


def test_honest_sums_pass():
    """With and without differential privacy."""
    check_totals(HONEST, asked())
    check_totals(QUIET, private())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"weight": 0.0003}, "each of them being from 1/10000 to 1"),
        ({"weight": 4.001}, "each of them being from"),
        ({"weight": 0.0}, "each of them being from"),
        ({"training_correct": 61}, "60 predictions in training have correct of 61"),
        ({"training_count": 97}, "97 predictions in training, 24 at most each"),
        ({"evaluation_correct": 31}, "30 predictions in evaluation have correct of 31"),
        (
            {"evaluation_count": 0, "evaluation_correct": 0},
            "no prediction in evaluation has a loss",
        ),
    ],
)
def test_sums_of_no_honest_sites(changes: Mapping[str, float], said: str):
    """One slot beyond what all sites have, or two that contradict each other."""
    refused({**HONEST, **changes}, said, asked())


def test_evaluation_counts_for_what_the_job_lets_a_site_hold():
    """On the grid; and where the job does not say, for what anybody could hold."""
    secure = {"enabled": True, "clip_norm": 1.0, "max_examples": 9}
    job = small_job(num_sites=4, privacy={"secure_aggregation": secure})
    bounded = asked(job=job, training=False)
    none = dict.fromkeys(HONEST, 0.0)
    check_totals({**none, "evaluation_count": 40}, bounded)
    said = "41 predictions in evaluation, 10 at most each"
    refused({**none, "evaluation_count": 41}, said, bounded)
    most = coarse(MAX_PREDICTIONS)
    check_totals({**HONEST, "evaluation_count": 4 * most}, asked())
    lie = {**HONEST, "evaluation_count": 4 * most + 1}
    refused(lie, f"predictions in evaluation, {most} at most each", asked())


@pytest.mark.parametrize("kind", ["training", "evaluation"])
def test_no_site_alone_makes_the_loss_of_a_built_in_task(kind: str):
    """Of all sites together it is 32 nats for each prediction at most."""
    most = round(32e6 * HONEST[f"{kind}_count"])
    check_totals({**HONEST, f"{kind}_loss": most + 4}, asked())
    said = f"in {kind} have a loss that is not from 0.0 to 32.0 each"
    refused({**HONEST, f"{kind}_loss": 1.001 * most}, said, asked())


@pytest.mark.parametrize("loss", [40.0, 1e9])
def test_model_that_diverged_reports_the_largest_loss_in_a_sum(loss: float):
    """An honest site is never taken for a liar; what is below stays as it is."""
    sums = MetricSums(count=10, loss_sum=10 * loss, metrics={"correct": 1})
    written = train.write_sums("training", sums, train.HEADER_SLOTS)
    assert written["training_loss"] == 320_000_000
    small = replace(sums, loss_sum=319.0)
    written = train.write_sums("training", small, train.HEADER_SLOTS)
    assert written["training_loss"] == 319_000_000
    own = replace(sums, metrics={"error": 1.0})
    written = train.write_sums("training", own, train.slots_of(["error"]))
    assert written["training_loss"] == round(10e6 * loss)


@pytest.mark.parametrize(("loss", "is_lie"), [(59, True), (60, False), (121, True)])
def test_loss_of_an_objective_stays_within_its_bounds(loss: int, is_lie: bool):  # noqa: FBT001
    """A user's own, whose job states them."""
    own = {"task": "own:loss", "metrics": {"loss": [1, 2]}, "local_steps": 3}
    job = small_job(num_sites=4, training={**own, "batch_size": 20})
    contract = Parties(4).contract(header_slots=train.slots_of([]), threshold=4)
    totals = {
        "weight": 1.5,
        "training_count": 60,
        "training_loss": loss * 1_000_000,
        "evaluation_count": 0,
        "evaluation_loss": 0,
    }
    terms = asked(job=job, contract=contract)
    if is_lie:
        refused(totals, r"60 predictions in training .* from 1.0 to 2.0 each", terms)
    else:
        check_totals(totals, terms)


def cells(held_out: str, cell: float) -> tuple[Mapping[str, float], SumTerms]:
    """Sums of 100 predictions of a binary task, with one cell that is not 0."""
    training = {"task": "binary", "measures": ["auc"], "local_steps": 3}
    job = private_job(held_out=held_out)
    job = replace(job, training=small_job(training=training).training)
    contract = Parties(4).contract(
        header_slots=header_slots(job),
        weight_rule="uniform",
        max_examples=1,
        differential_privacy=RECORD,
    )
    totals = dict.fromkeys(header_slots(job), 0.0) | {
        "weight": 4.0,
        "evaluation_count": 100,
        "evaluation_auc_pos_7": cell,
    }
    return totals, asked(job=job, contract=contract)


def test_cells_of_histograms_may_be_negative_with_noise_only():
    """By no more than the number of predictions, to which each site cuts them off."""
    for noised in (-100, -1, 100):
        check_totals(*cells("noise", noised))
    for held_out, lie in (("noise", -101), ("noise", 101), ("public", -1)):
        totals, terms = cells(held_out, lie)
        refused(totals, f"have auc_pos_7 of {lie}", terms)


def test_site_with_more_held_out_data_counts_for_no_more():
    """Its mean loss and its accuracy stay."""
    sums = MetricSums(count=400, loss_sum=100.0, metrics={"correct": 300})
    assert train.bounded(sums, 400) == sums
    assert train.bounded(None, 1) is None
    assert train.bounded(sums, 40) == MetricSums(
        count=40, loss_sum=10.0, metrics={"correct": 30}
    )


def test_uniform_weights_sum_to_the_number_of_sites():
    """Exactly: 1 has no rounding error."""
    contract = Parties(4).contract(weight_rule="uniform", max_examples=1)
    uniform = asked(contract=contract)
    check_totals({**HONEST, "weight": 4.0}, uniform)
    for weight in (3.0, 4 - 2.0**-32, 4 + 2.0**-32):
        refused({**HONEST, "weight": weight}, "each of them being 1", uniform)


def test_nothing_is_reported_that_was_not_asked_for():
    """In rounds without evaluation, and in the evaluation of the last model."""
    refused(
        HONEST, "no site was asked for the sums of evaluation", asked(evaluation=False)
    )
    last = asked(training=False)
    refused(HONEST, "no site trained, but the weights sum to 1.5", last)
    refused({**HONEST, "weight": 0}, "sums of training", last)
    none = {n: v if n.startswith("evaluation") else 0 for n, v in HONEST.items()}
    check_totals(none, last)
    # Less than the grid of the header may round, and yet more than nothing.
    refused({**none, "training_correct": 2.0**-40}, "sums of training", last)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"training_count": 1}, "no site was asked for the sums of training"),
        ({"evaluation_loss": 600_001_000}, "a loss that is not from 0.0 to 6.0 each"),
        ({"weight": 3.0}, "each of them being 1"),
    ],
)
def test_sums_under_differential_privacy(changes: Mapping[str, float], said: str):
    """What noise and clipping promise holds for the sums."""
    refused({**QUIET, **changes}, said, private())


def test_most_predictions_of_epochs_follow_from_the_most_examples():
    """Of local steps they follow from the batches."""
    job = small_job(num_sites=4, training={"local_epochs": 2})
    epochs = asked(job=job)
    check_totals({**HONEST, "training_count": 80_000}, epochs)
    refused({**HONEST, "training_count": 80_001}, "20000 at most each", epochs)


def test_counts_of_a_sum_are_bounded_by_their_round():
    """By the batches of its steps, and by the steps that were chosen for it."""
    training = {"local_steps": 3, "batch_size": 8, "accumulate_from": [[2, 4]]}
    job = small_job(num_sites=4, rounds=2, training=training)
    for changes, most in (
        ({"round_index": 1}, 4 * 24),
        ({"round_index": 2}, 4 * 96),
        ({"round_index": 2, "steps": range(3, 5)}, 4 * 64),
    ):
        terms = asked(job=job, **changes)
        check_totals({**HONEST, "training_count": most}, terms)
        beyond = {**HONEST, "training_count": most + 1}
        refused(beyond, f"{most // 4} at most each", terms)


LANGUAGE = {"task": "causal_lm", "max_tokens": 128}


@pytest.mark.parametrize(
    ("training", "kind", "most"),
    [
        ({"local_epochs": 2}, "training", 2 * 10_000 * 128),
        ({"local_steps": 3, "batch_size": 8}, "training", 3 * 8 * 128),
        ({"local_steps": 1}, "evaluation", 10 * 128),
    ],
)
def test_tokens_are_bounded_by_records_and_the_longest_of_them(
    training: Mapping[str, int], kind: str, most: int
):
    """One site of a language model makes the loss its own no more than others can."""
    secure = {"enabled": True, "clip_norm": 1.0, "max_examples": 9}
    job = small_job(
        num_sites=4,
        training=LANGUAGE | training,
        privacy={"secure_aggregation": secure},
    )
    language = asked(job=job)
    check_totals({**HONEST, f"{kind}_count": 4 * most}, language)
    said = f"predictions in {kind}, {most} at most each"
    refused({**HONEST, f"{kind}_count": 4 * most + 1}, said, language)


def test_training_counts_for_what_anybody_could_hold_where_nothing_is_known():
    """In epochs with uniform weights no number of examples is in the contract."""
    contract = Parties(4).contract(weight_rule="uniform", max_examples=1, threshold=4)
    job = small_job(num_sites=4, training={"local_epochs": 2})
    uniform, honest = asked(job=job, contract=contract), {**HONEST, "weight": 4.0}
    most = MAX_PREDICTIONS
    check_totals({**honest, "training_count": 4 * most}, uniform)
    lie = {**honest, "training_count": 4 * most + 1}
    refused(lie, f"training, {most} at most each", uniform)


def test_small_metric_is_rounded_to_the_grid_of_the_header():
    """Values of a metric that are finer than it are no lie."""
    own = {"task": "m:f", "metrics": {"loss": [0.0, 4.0], "error": [0.0, 1e-9]}}
    job = small_job(num_sites=4, training={**own, "local_steps": 3})
    contract = Parties(4).contract(header_slots=header_slots(job), threshold=4)
    terms = asked(job=job, contract=contract, training=False)
    totals = {**dict.fromkeys(header_slots(job), 0.0), "evaluation_count": 30}
    check_totals({**totals, "evaluation_error": 30e-9 + 4 * WEIGHT_ERROR}, terms)
    lie = {**totals, "evaluation_error": 31e-9 + 4 * WEIGHT_ERROR}
    refused(lie, "30 predictions in evaluation have error of", terms)


def test_counts_are_on_the_grid_where_sites_may_be_absent():
    """Of 60 examples each, four sites report 64 at most, and the weights likewise."""
    job = small_job(num_sites=4, training={"local_steps": 6, "batch_size": 10})
    grid = asked(job=job, contract=Parties(4).contract(threshold=3))
    exact = asked(job=job, contract=Parties(4).contract(threshold=4))
    found = {**HONEST, "training_count": 4 * 64}
    check_totals(found, grid)
    refused(found, "60 at most each", exact)
    refused({**found, "training_count": 4 * 64 + 1}, "64 at most each", grid)


def test_clipping_bits_are_bounded_by_sites_and_noise():
    """Half a bit for each site, and twelve standard deviations of noise."""
    document = {
        "unit": "site",
        "target_epsilon": 8.0,
        "delta": 0.01,
        "clip_norm": 1.0,
        "adaptive_clip": True,
        "held_out": "public",
        "accept_low_signal": True,
    }
    job = small_job(
        num_sites=4,
        aggregation={"weights": "uniform"},
        privacy={
            "secure_aggregation": {"enabled": True},
            "differential_privacy": document,
        },
    )
    terms = replace(RECORD, profile="site", noise_multiplier=2.0, ring_noise_std=1000.0)
    contract = Parties(4).contract(
        weight_rule="uniform",
        max_examples=1,
        threshold=4,
        differential_privacy=terms,
        header_slots=train.slots_of(train.CORRECT, adapts=True),  # type: ignore[attr-defined]
    )
    adaptive = asked(job=job, contract=contract)
    _, together = adaptive_clip.split(2.0)
    most = 2 + 12 * math.sqrt(4 / 3) * together
    quiet = {**QUIET, "evaluation_count": 0, "evaluation_loss": 0}
    quiet["evaluation_correct"] = 0
    for sign in (1, -1):
        check_totals({**quiet, "within_clip": sign * most}, adaptive)
        lie = {**quiet, "within_clip": sign * (1.1 * most)}
        refused(lie, "clipping bits of 4 sites", adaptive)
    evaluated = replace(adaptive, training=False)
    refused({**quiet, "weight": 0, "within_clip": 0.5}, "clipping bits", evaluated)


@pytest.mark.parametrize(
    ("total", "is_lie"),
    [(60.0, False), (60.01, True), (-30.0, False), (-30.01, True)],
)
def test_metric_of_a_job_stays_within_its_bounds(total: float, is_lie: bool):  # noqa: FBT001
    """Of thirty predictions, each within [-1, 2]; the ring rounds a little."""
    secure = {"enabled": True, "clip_norm": 1.0, "max_examples": 9}
    job = small_job(
        num_sites=4,
        training={
            "local_steps": 3,
            "task": "m:f",
            "metrics": {"loss": [0.0, 4.0], "error": [-1.0, 2.0]},
        },
        privacy={"secure_aggregation": secure},
    )
    slots = header_slots(job)
    assert slots == train.slots_of(["error"])
    contract = Parties(4).contract(header_slots=slots, threshold=4)
    terms = asked(job=job, contract=contract, training=False)
    totals = {**dict.fromkeys(slots, 0.0), "evaluation_count": 30}
    totals["evaluation_error"] = total
    if is_lie:
        refused(totals, "30 predictions in evaluation have error of", terms)
    else:
        check_totals(totals, terms)


LEVELS: Mapping[str, float] = {**HONEST, "clipped": 0, "energy": 1.5}


def few_levels(**changes: Any) -> SumTerms:
    """Four sites whose updates are in four levels."""
    names = train.slots_of(("correct",), levels=True)
    contract = Parties(4).contract(levels=4, header_slots=names, threshold=4)
    return asked(contract=contract, **changes)


def test_honest_sums_of_few_levels_pass():
    """Each site clips what values it has, and rounds four clip norms at most."""
    check_totals(LEVELS, few_levels())
    check_totals({**LEVELS, "clipped": 4 * 4096, "energy": 4 * 4.0**2}, few_levels())
    none = {**dict.fromkeys(LEVELS, 0.0), "evaluation_count": 4}
    check_totals(none, few_levels(training=False))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"clipped": 4 * 4096 + 1}, "16385 values were clipped, of 16384"),
        ({"energy": -1e-9}, "squares of 4 updates sum to -1e-09"),
        ({"energy": 4 * 4.1**2}, "squares of 4 updates sum to 67.24 of the clip norm"),
    ],
)
def test_sums_of_few_levels_of_no_honest_sites(changes: Mapping[str, float], said: str):
    """Steps of the next round follow from them."""
    refused({**LEVELS, **changes}, said, few_levels())


@pytest.mark.parametrize("name", ["clipped", "energy"])
def test_evaluations_round_nothing(name: str):
    """There is no update."""
    none = {**dict.fromkeys(LEVELS, 0.0), "evaluation_count": 4, name: 1.0}
    refused(
        none,
        "clipped" if name == "clipped" else "squares of",
        few_levels(training=False),
    )
