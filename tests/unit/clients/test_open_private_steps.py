"""Private rounds whose tasks say how many steps they take: none is free, none extra."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.small_jobs import small_job

from clients.privacy.site_plans import PrivateSites
from clients.privacy.stated_bounds import promise_bounds
from deploy.wiring.parts import build_federation
from federation.clock import VirtualClock
from federation.errors import BudgetExceeded, JobError
from federation.ids import RunId, SiteId
from federation.job.spec import JobSpec
from federation.protocols import LocalWeights
from federation.rounds.local_work import allocated
from privacy.dp import accountant
from privacy.dp.events import PrivacyEvent

SITE, RECORDS, PERSONS, TARGET, DELTA = SiteId("site-0"), 448, 64, 3.0, 1e-5
ROUNDS, EACH, MOST = 4, 3, 9
AUTO = {"local_work": "auto", "max_local_steps": MOST}
CAPACITY = {"allocation": "capacity", "max_local_steps": MOST}

each_schedule = pytest.mark.parametrize("schedule", [AUTO, CAPACITY], ids=str)


def job_of(
    schedule: dict[str, Any], *, num_train: int = RECORDS, **private: Any
) -> JobSpec:
    table = {"unit": "record", "target_epsilon": TARGET, "delta": DELTA, **private}
    secure = {"enabled": table["unit"] in {"joint", "site"}}
    data: dict[str, Any] = {
        "source": "support.small_jobs:blobs",
        "options": {"num_train": num_train},
        "partition": {"kind": "iid"},
    }
    if table["unit"] == "person":
        data = {
            "source": "support.small_jobs:visits",
            "options": {"num_persons": PERSONS},
            "partition": {"kind": "by_person"},
        }
    return small_job(
        rounds=ROUNDS,
        num_sites=1,
        data=data,
        training={"local_steps": 1 if table["unit"] == "joint" else EACH}
        | {"batch_size": 8, "optimizer": {"lr": 0.1}},
        aggregation={"weights": "uniform"},
        evaluation={"every": 0},
        schedule=schedule,
        privacy={"differential_privacy": table, "secure_aggregation": secure},
    )


def sites_of(job: JobSpec) -> PrivateSites:
    clock = VirtualClock(1.8e9)
    return PrivateSites(
        build_federation(job), run_id=RunId("run"), folder=None, clock=clock
    )


def total(events: tuple[PrivacyEvent, ...]) -> int:
    return sum(event.steps for event in events)


def ask(sites: PrivateSites, wanted: list[int]) -> list[int]:
    """Ask for rounds of so many steps until one is refused; return those allowed."""
    trainer, allowed = sites.trainer(SITE), list[int]()
    for index, steps in enumerate(wanted, 1):
        try:
            trainer.pay(round_index=index, trains=True, evaluations=0, steps=steps)
        except BudgetExceeded:
            break
        allowed.append(steps)
    return allowed


def test_noise_is_planned_for_all_steps_that_a_run_may_take():
    """With `auto` they are fixed, but for a round in reserve; by capacity the most."""
    for schedule, num_steps in (
        (AUTO, ROUNDS * EACH + MOST),
        (CAPACITY, (ROUNDS + 1) * MOST),
        ({}, (ROUNDS + 1) * EACH),
    ):
        sites = sites_of(job_of(schedule))
        plan = sites.plans[SITE]
        assert total(plan.training_events) == num_steps
        spent = accountant.epsilon(plan.training_events, DELTA)
        assert 0.998 * TARGET <= spent <= TARGET
        (promise,) = sites.promises()
        most = MOST if schedule else EACH
        assert promise.steps_per_round == plan.largest_event.steps == most
        told = "at most so many steps" in " ".join(sites.planned(at=0.0).withheld)
        assert told == bool(schedule)
        bounds = promise_bounds(job_of(schedule), promise)
        assert bounds["steps_per_round"] == (1, most)


@each_schedule
def test_persons_are_charged_for_the_steps_that_are_taken(schedule: dict[str, Any]):
    """Each of which draws persons at the rate of the event."""
    job = job_of(schedule, unit="person")
    with sites_of(job) as sites:
        trainer, start = sites.trainer(SITE), sites.federation.pool.initial_weights()
        trainer.pay(round_index=1, trains=True, evaluations=0, steps=5)
        result = trainer.fit(*start, round_index=1, steps=allocated(job, 1, 5))
        assert result.num_steps == 5
        (charge,) = sites._ledgers[SITE].charges()
        assert (charge.event.steps, charge.event.sampling_rate) == (5, 8 / PERSONS)


@each_schedule
def test_no_choice_of_steps_leads_beyond_the_target(schedule: dict[str, Any]):
    """Long rounds, short ones, and rounds again: a refusal depends on the sum alone."""
    for wanted in ([MOST] * 99, [1] * 99, [1, MOST] * 50, [MOST, MOST, 1, 1, 2] * 20):
        with sites_of(job_of(schedule)) as sites:
            plan, allowed = sites.plans[SITE], ask(sites, wanted)
            planned, found = total(plan.training_events), sum(allowed)
            assert found + wanted[len(allowed)] > planned
            (spent,) = (ledger.epsilon("train") for ledger in sites._ledgers.values())
            by_hand = replace(plan.round_event, steps=found)
            assert spent == pytest.approx(accountant.epsilon([by_hand], DELTA))
            assert spent <= TARGET
            charged = [c.event.steps for c in sites._ledgers[SITE].charges()]
            assert charged == allowed


@each_schedule
def test_what_is_charged_does_not_depend_on_a_record(schedule: dict[str, Any]):
    """One record fewer, in the same cell of the grid of numbers, changes no charge."""
    charges = []
    for num_train in (RECORDS, RECORDS - 1):
        with sites_of(job_of(schedule, num_train=num_train)) as sites:
            ask(sites, [4, 1, MOST, 2])
            charges.append(sites._ledgers[SITE].charges())
    assert charges[0] == charges[1]


@each_schedule
def test_a_round_takes_the_steps_that_were_charged(schedule: dict[str, Any]):
    """Neither another number than was paid for, nor a number that was not said."""
    job = job_of(schedule)
    with sites_of(job) as sites:
        trainer, start = sites.trainer(SITE), sites.federation.pool.initial_weights()
        steps = allocated(job, 1, 5)
        for given in ({"steps": steps[:4]}, {"steps": range(6)}, {}):
            trainer.pay(round_index=1, trains=True, evaluations=0, steps=5)
            with pytest.raises(RuntimeError, match="steps were charged"):
                trainer.fit(*start, round_index=1, **given)
        trainer.pay(round_index=1, trains=True, evaluations=0, steps=5)
        result = trainer.fit(*start, round_index=1, steps=steps)
        assert isinstance(result, LocalWeights)
        assert result.num_steps == 5


@pytest.mark.slow
def test_steps_of_a_round_are_the_same_whoever_chose_their_number():
    """With the same keys: as many noisy steps as a job that fixes them, bit for bit."""
    found = []
    for job, given in ((job_of({}), {}), (job_of(AUTO), {"steps": range(EACH)})):
        with sites_of(job) as sites:
            plan = sites.plans[SITE]
            assert plan.training is not None
            training = replace(
                plan.training,
                noise_multiplier=1.0,
                random_bytes=np.random.default_rng(1).bytes,
            )
            sites.plans = {SITE: replace(plan, training=training)}
            trainer = sites.trainer(SITE)
            steps = len(given.get("steps", ()))
            trainer.pay(round_index=1, trains=True, evaluations=0, steps=steps)
            start = sites.federation.pool.initial_weights()
            result = trainer.fit(*start, round_index=1, **given)
            assert isinstance(result, LocalWeights)
            found.append(result.weights_d)
    np.testing.assert_array_equal(*found)


def test_noise_in_the_sum_is_refused_by_name():
    for schedule in (AUTO, CAPACITY):
        for unit in ("joint", "site"):
            with pytest.raises(JobError, match="noise") as refused:
                job_of(schedule, unit=unit)
            assert "schedule." in str(refused.value)
