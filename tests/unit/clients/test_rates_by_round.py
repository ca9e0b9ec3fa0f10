"""Private steps that grow by a schedule: each round is charged for its own rate."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.small_jobs import small_job

from clients.privacy.site_plans import PrivateSites, SitePlan
from clients.privacy.spending import Releases
from clients.training.private_steps import largest_batch, sampling_rate
from deploy.wiring.parts import build_federation
from federation.clock import VirtualClock
from federation.errors import BudgetExceeded, JobError
from federation.ids import RunId, SiteId
from federation.job.spec import JobSpec
from privacy.dp import accountant
from privacy.dp.events import PrivacyEvent

SITE, RECORDS, TARGET = SiteId("site-0"), 448, 3.0  # On the grid of numbers.
ROUNDS, RESERVE, STEPS = 4, 1, 5


def growing_job(unit: str = "record", **tables: Any) -> JobSpec:
    """Steps of 8 records, from round 3 on of 32, and in round 4 of 16."""
    private = {
        "unit": unit,
        "target_epsilon": TARGET,
        "delta": 1e-5,
        "reserve_rounds": RESERVE,
        **tables.pop("private", {}),
    }
    training = {"local_steps": STEPS, "batch_size": 8}
    training |= {"accumulate_from": [[3, 4], [4, 2]]} | tables.pop("training", {})
    return small_job(
        rounds=ROUNDS,
        num_sites=1,
        data={
            "source": "support.small_jobs:blobs",
            "options": {"num_train": RECORDS},
            "partition": {"kind": "iid"},
        },
        training=training,
        aggregation={"weights": "uniform"},
        evaluation={"every": 0},
        privacy={"differential_privacy": private},
        **tables,
    )


def sites_of(job: JobSpec) -> PrivateSites:
    return PrivateSites(
        build_federation(job),
        run_id=RunId("run"),
        folder=None,
        clock=VirtualClock(1.8e9),
    )


def by_hand(plan: SitePlan, records: list[int]) -> list[PrivacyEvent]:
    """One event for each round, from the records of its steps."""
    return [
        replace(plan.round_event, sampling_rate=size / RECORDS, steps=STEPS)
        for size in records
    ]


def renyi(events: list[PrivacyEvent], order: int) -> float:
    """Renyi divergence of all steps: arXiv:1908.10530, equation 30, summed up."""
    found = 0.0
    for event in events:
        rate, noise = event.sampling_rate, event.noise_multiplier
        moment = math.fsum(
            math.comb(order, k)
            * (1 - rate) ** (order - k)
            * rate**k
            * math.exp(k * (k - 1) / (2 * noise**2))
            for k in range(order + 1)
        )
        found += event.steps * math.log(moment) / (order - 1)
    return found


def test_noise_is_planned_for_the_rates_of_all_rounds():
    """And for the largest one again, in reserve; checked by another method, by hand."""
    plan = sites_of(growing_job()).plans[SITE]
    events = by_hand(plan, [8, 8, 32, 16, 32])
    found = accountant.epsilon(plan.training_events, 1e-5)
    assert found == pytest.approx(accountant.epsilon(events, 1e-5), rel=1e-9)
    assert 0.998 * TARGET <= found <= TARGET
    # Renyi divergences bound epsilon from above, and not by much.
    bound = min(
        renyi(events, a) + math.log1p(-1 / a) - math.log(1e-5 * a) / (a - 1)
        for a in range(2, 20)
    )
    assert found < bound < 1.3 * found
    assert plan.planned == plan.training_events


def test_each_round_is_charged_for_its_own_rate():
    """In any order; the round in reserve may be the largest, and then it is over."""
    with sites_of(growing_job()) as sites:
        trainer = sites.trainer(SITE)
        for index, sizes in ((1, [8]), (3, [8, 32]), (4, [8, 32, 16])):
            trainer.pay(round_index=index, trains=True, evaluations=0)
            spent = trainer.spent()
            assert spent is not None
            wanted = accountant.epsilon(by_hand(sites.plans[SITE], sizes), 1e-5)
            assert spent.epsilon == pytest.approx(wanted, rel=1e-9)
        for index in (2, 3):
            trainer.pay(round_index=index, trains=True, evaluations=0)
        with pytest.raises(BudgetExceeded):
            trainer.pay(round_index=3, trains=True, evaluations=0)
    (promise,) = sites.promises()
    assert promise.sampling_rate == 32 / RECORDS  # The largest.


def test_only_rounds_of_the_plan_are_trained():
    """In any order. More of the small ones cost less, but not if results choose."""
    with sites_of(growing_job()) as sites:
        trainer = sites.trainer(SITE)
        for index in (1, 4, 1, 2, 4):  # One in place of round 3, one of the reserve.
            trainer.pay(round_index=index, trains=True, evaluations=0)
        before = trainer.spent()
        assert before is not None
        assert before.epsilon < 0.9 * TARGET
        for index in (1, 3):
            with pytest.raises(BudgetExceeded, match="reserve_rounds"):
                trainer.pay(round_index=index, trains=True, evaluations=0)
        assert trainer.spent() == before


def test_a_smaller_round_may_take_the_place_of_a_larger_one():
    """And none that of a smaller one; statistics before the first round are none."""
    small, large, once = (
        PrivacyEvent(noise_multiplier=1.0, sampling_rate=rate, steps=2)
        for rate in (0.1, 0.2, 1.0)
    )
    releases = Releases(
        round_event=small,
        held_out=None,
        evaluates=False,
        max_loss=1.0,
        later=[(2, large)],
        planned=[small, large],
        once=[once],
    )
    for event, charged, has_room in (
        (small, [once], True),
        (small, [once, small], True),
        (small, [small, small], False),
        (small, [large], True),
        (large, [small], True),
        (large, [large], False),
        (large, [small, small], False),
    ):
        assert releases.has_room(event, charged) is has_room, (event, charged)
    assert replace(releases, later=()).has_room(large, [large] * 9)
    assert not replace(releases, planned=()).has_room(small, [])
    # Of a rate between those of the plan: more steps than it has of larger ones.
    between = replace(large, sampling_rate=0.15, steps=3)
    assert not releases.has_room(between, [])


def test_noise_that_others_state_again_buys_no_rounds():
    """More noise costs less, but results may have chosen it: only the number counts."""
    weak, strong = (
        PrivacyEvent(noise_multiplier=noise, sampling_rate=0.1, steps=1)
        for noise in (1.0, 5.0)
    )
    releases = Releases(
        round_event=strong,
        held_out=None,
        evaluates=False,
        max_loss=1.0,
        planned=[replace(strong, steps=3)],
        noise_varies=True,
    )
    assert releases.has_room(strong, [weak, strong])
    assert not releases.has_room(strong, [weak, weak, strong])
    assert not releases.has_room(strong, [strong, strong, strong])


def test_set_noise_must_cover_the_whole_schedule():
    """Else epsilon would end the run at a mix of rounds that results have chosen."""
    with pytest.raises(JobError, match="in reserve must fit") as refused:
        sites_of(growing_job(private={"noise_multiplier": 0.6}))
    assert refused.value.key == "privacy.differential_privacy.noise_multiplier"
    calm = sites_of(growing_job(private={"noise_multiplier": 6.0})).plans[SITE]
    assert accountant.epsilon(calm.training_events, 1e-5) < TARGET


def test_equal_steps_are_planned_as_before():
    """A schedule that repeats the same number changes nothing."""
    alike, plain = (
        sites_of(growing_job(training={"accumulate_from": schedule})).plans[SITE]
        for schedule in ([[3, 1]], [])
    )
    assert alike.round_event == plain.round_event
    assert (plain.later, plain.num_rounds) == ((), ROUNDS + RESERVE)


def test_a_site_with_too_few_records_for_the_largest_step_is_refused():
    job = growing_job(training={"accumulate_from": [[4, 64]]})
    assert largest_batch(job) == 512
    with pytest.raises(JobError, match="than a batch of 512"):
        sites_of(job)


@pytest.mark.slow
def test_training_takes_the_rate_that_is_charged():
    """As a job whose steps are all of that size, bit for bit."""
    found = []
    for changes in (
        {"accumulate_from": [[3, 4]]},
        {"accumulate_from": [], "accumulate": 4},
        {"accumulate_from": []},
    ):
        job = growing_job(training=changes, private={"noise_multiplier": 1.0})
        with sites_of(job) as sites:
            plan = sites.plans[SITE]
            assert plan.training is not None
            keys = np.random.default_rng(1).bytes
            training = replace(plan.training, random_bytes=keys)
            sites.plans = {SITE: replace(plan, training=training)}
            trainer = sites.trainer(SITE)
            trainer.pay(round_index=3, trains=True, evaluations=0)
            start = sites.federation.pool.initial_weights()
            found.append(trainer.fit(*start, round_index=3).weights_d)
    assert np.array_equal(found[0], found[1])
    assert not np.array_equal(found[0], found[2])
    assert sampling_rate(job, RECORDS) == 8 / RECORDS
