"""More local steps at faster sites."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from support import toy
from support.scripted_grid import reply_to

from aggregator.methods import capacity, site_times
from aggregator.methods.capacity import Capacity, allocate
from aggregator.methods.chosen_steps import Pace
from federation.clock import VirtualClock
from federation.ids import SiteId
from federation.job import job_file
from federation.job.spec import JobSpec
from federation.messages import FailureKind, SiteUpdate
from federation.protocols import RoundTime, RunState
from federation.rounds.failures import failure
from federation.rounds.local_work import (
    PARTS,
    allocated,
    bounds,
    fewest_parts,
    schedule_step,
    steps_each,
)
from federation.rounds.round_record import RoundRecord
from federation.rounds.schedule import OpenTask

A, B, C = toy.SITES


def job_of(each: int = 20, **schedule: int) -> JobSpec:
    return toy.job(
        {
            "rounds": 4,
            "training": {"local_steps": each},
            "schedule": {"allocation": "capacity", **schedule},
        }
    )


def took(
    num_steps: int, seconds: float, train_seconds: float | None = None
) -> RoundTime:
    return RoundTime(
        round_index=1,
        num_steps=num_steps,
        seconds=seconds,
        train_seconds=train_seconds,
    )


def noted(before: Sequence[RoundTime], time: RoundTime) -> tuple[RoundTime, ...]:
    """What a run knows of site A after one more round."""
    job = job_of()
    record = opened(job, replace(toy.initial_state(job), site_times={A: (*before,)}))
    record.times[A] = time
    return site_times.SiteTimes(job).after_round(record.state, record).site_times[A]


def opened(job: JobSpec, state: RunState | None = None) -> RoundRecord:
    return RoundRecord(
        job=job,
        run_id=toy.RUN,
        state=state or toy.initial_state(job),
        cohort=toy.SITES,
        layout=toy.LAYOUT,
        clock=VirtualClock(),
        emit=lambda _: None,
    )


def seconds_of(steps: Mapping[SiteId, int], paces: Mapping[SiteId, Pace]):
    return [
        pace.waiting_seconds + steps[site] * pace.step_seconds
        for site, pace in paces.items()
    ]


def test_all_sites_end_together_and_take_the_steps_of_equal_work():
    paces = {A: Pace(0.1, 0.5), B: Pace(0.4, 0.0), C: Pace(0.2, 2.0)}
    steps = allocate(job_of(200), toy.SITES, paces)
    assert sum(steps.values()) == 600
    found = seconds_of(steps, paces)
    assert max(found) - min(found) < 2 * 0.4
    assert steps[A] > steps[C] > steps[B]


def test_nothing_known_is_equal_work_and_new_sites_are_as_fast_as_most():
    assert allocate(job_of(), toy.SITES, {}) == dict.fromkeys(toy.SITES, 20)
    paces = {A: Pace(0.1, 0.0), B: Pace(0.1, 0.0)}
    assert allocate(job_of(), toy.SITES, paces) == dict.fromkeys(toy.SITES, 20)


def test_bounds_hold_whatever_a_site_says_of_itself():
    claims = {A: Pace(1e-300, 0.0), B: Pace(1.0, 0.0), C: Pace(1e6, 1e6)}
    steps = allocate(job_of(), toy.SITES, claims)
    assert sum(steps.values()) <= 81
    assert steps[C] == 5, "an update of fewer steps would be scaled too much"
    assert set(steps.values()) <= set(range(5, 81))
    assert max(allocate(job_of(max_local_steps=25), toy.SITES, claims).values()) <= 25


@pytest.mark.parametrize("count", [10, 1000, 10_000])
def test_slower_site_is_known_after_three_rounds(count: int):
    sites = [SiteId(f"site-{i}") for i in range(count)]
    speeds = {site: 1.0 + i % 4 for i, site in enumerate(sites)}
    job, times = job_of(40), dict[SiteId, tuple[RoundTime, ...]]()

    def play(rounds: int) -> Mapping[SiteId, int]:
        for _ in range(rounds):
            paces = {site: capacity._pace(found) for site, found in times.items()}
            steps = allocate(job, sites, {s: p for s, p in paces.items() if p})
            for site, num_steps in steps.items():
                seconds = num_steps / speeds[site]
                time = took(num_steps, seconds + 0.1, seconds)
                times[site] = (*times.get(site, ()), time)[-3:]
        return steps

    play(4)
    speeds[sites[3]] /= 4
    found = play(4)  # Three show it, the fourth follows them.
    best = allocate(job, sites, {site: Pace(1 / v, 0.1) for site, v in speeds.items()})
    assert found[sites[3]] == pytest.approx(best[sites[3]], rel=0.1, abs=1)


@pytest.mark.parametrize("waiting_s", [0.0, 2.0, 20.0])
def test_arrival_times_alone_lead_to_the_same_end_without_swinging(waiting_s: float):
    """Seconds of a step are up to 3 % off: soon that is all that rounds differ by."""
    sites = [SiteId(f"site-{i}") for i in range(4)]
    speeds = dict(zip(sites, (1.0, 1.0, 2.0, 4.0), strict=True))
    job, rng = job_of(100), np.random.default_rng(5)
    times = dict[SiteId, tuple[RoundTime, ...]]()
    ends, shares = [], []
    for _ in range(30):
        paces = {site: capacity._pace(found) for site, found in times.items()}
        steps = allocate(job, sites, {s: p for s, p in paces.items() if p})
        ends.append([waiting_s + n / speeds[site] for site, n in steps.items()])
        shares.append(steps[sites[3]])
        for site, num_steps in steps.items():
            seconds = waiting_s + num_steps / speeds[site] * rng.uniform(0.97, 1.03)
            times[site] = (*times.get(site, ()), took(num_steps, seconds))[-3:]
    assert max(max(end) / min(end) for end in ends[8:]) < 1.12
    assert max(shares[8:]) / min(shares[8:]) < 1.12
    assert all(later >= 0.95 * sooner for sooner, later in pairwise(shares))


def test_times_with_and_without_the_sites_word_count_alike():
    """One that was late is the aggregator's own estimate."""
    known = (took(10, 5.0), took(10, 20.0, 20.0), took(8, 4.0))
    assert capacity._pace(known) == Pace(0.5, 0.0)
    assert capacity._pace(()) is None


def test_late_site_gets_less_work_and_absent_one_does_not():
    job = job_of()
    guest, record = Capacity(job), opened(job)
    guest.before_round_(record)
    assert {len(steps) for steps in record.steps_of.values()} == {5}
    record.late[C] = 8.0
    after = site_times.SiteTimes(job).after_round(record.state, record)
    assert capacity._pace(after.site_times[C]) == Pace(3.2, 0.0)
    assert after.site_times.keys() == {C}
    known = replace(after, site_times={**after.site_times, A: (took(20, 2.0, 2.0),)})
    second = opened(job, replace(known, round_index=1))
    guest.before_round_(second)
    assert len(second.steps_of[C]) < 10 < len(second.steps_of[A])


def test_parts_of_a_site_that_answers_no_more_go_to_the_others():
    """Or nobody would train on its records for the rest of the run."""
    document = toy.document({"rounds": 9, "data": {"placement": "dynamic"}})
    document["training"]["local_epochs"] = 1
    del document["training"]["local_steps"]
    job = job_file.parse(document)

    def dealt(*last: int) -> Mapping[SiteId, range]:
        """The parts of round 5, from 0 on; ``last`` is when each site answered."""
        times = {
            site: (replace(took(PARTS // 3, 2.0), round_index=index),)
            for site, index in zip(toy.SITES, last, strict=False)
        }
        state = replace(toy.initial_state(job), site_times=times, round_index=4)
        record = opened(job, state)
        capacity.Placement(job).before_round_(record)
        begin = 4 * PARTS
        return {
            site: range(parts.start - begin, parts.stop - begin)
            for site, parts in record.steps_of.items()
        }

    usual = dealt(4, 4, 2)
    assert usual[C].stop == PARTS == sum(map(len, usual.values()))
    silent = dealt(4, 4, 1)
    assert silent[A].start == 0
    assert silent[A].stop == silent[B].start
    assert silent[B].stop == PARTS
    assert silent[C] == range(fewest_parts(job))
    never = dealt(4, 4)
    assert never == silent
    nobody = dealt(1, 1, 1)
    assert sum(map(len, nobody.values())) == PARTS


@pytest.mark.parametrize("each", [4, 10, 20, 23])
def test_rounds_make_up_for_the_short_first_one(each: int):
    """Those after it are hardly longer, for sites drift apart; a buffer has none."""
    job = job_of(each)
    means = [steps_each(job, index) for index in range(1, 9)]
    assert means[0] == bounds(job)[0] == each // 4
    assert means[4:] == [each] * 4
    assert sum(means) == 8 * each
    assert max(means) <= 1.25 * each + 1
    schedule = replace(job.schedule, mode="buffered")
    assert steps_each(replace(job, schedule=schedule), 1) == each


@pytest.mark.parametrize(("most", "mean"), [(20, 20), (22, 22), (30, 25)])
def test_mean_of_a_round_is_no_more_than_a_site_may_take(most: int, mean: int):
    """Or updates would be scaled to steps that nobody took."""
    assert [steps_each(job_of(20, max_local_steps=most), i) for i in (2, 3, 4)] == [
        mean
    ] * 3


def test_late_task_of_a_buffer_counts_from_when_it_was_sent():
    """The round in which its deadline passes may last for a moment only."""
    job = toy.job(
        {
            "training": {"local_steps": 20},
            "schedule": {"mode": "buffered", "allocation": "capacity"},
        }
    )
    record = opened(job)
    record.clock.sleep(60.0)
    missed = failure(toy.update(C), FailureKind.DEADLINE, "gave no answer")
    record.verdicts.carry([OpenTask(C, 1, 0, 0)])
    assert not [*record.sound([reply_to(missed, asked_seconds=10.0)], SiteUpdate)]
    assert record.late[C] == 50.0


def test_claimed_time_is_no_longer_than_the_answer_took():
    for claim in (float("nan"), float("inf"), -1.0, 0.0, 3.0):
        (time,) = noted((), took(5, 2.0, claim))
        assert time.train_seconds == 2.0
    (time,) = noted((), took(5, 2.0, 1.5))
    assert time.train_seconds == 1.5
    for claim, left in ((float("nan"), 2.0), (float("inf"), 0.0), (-1.0, 2.0)):
        claimed = replace(took(5, 2.0, 1.5), evaluate_seconds=claim)
        (time,) = noted((), claimed)
        assert time.seconds == left
        assert time.train_seconds == min(left, 1.5)


def test_evaluation_counts_in_the_rounds_that_evaluate():
    """The first of three did; or the others would take it for waiting."""
    first = replace(took(5, 5.5, 2.0), evaluate_seconds=3.0)
    times = noted((), first)
    for _ in range(2):
        assert capacity._pace(times) == Pace(0.4, 0.5)
        assert capacity._pace(times, evaluates=True) == Pace(0.4, 3.5)
        times = noted(times, took(5, 2.5, 2.0))
    job = toy.job(
        {
            "training": {"local_steps": 20},
            "schedule": {"allocation": "capacity"},
            "evaluation": {"every": 2},
        }
    )
    known = {A: times, B: times, C: noted((), took(5, 2.5, 2.0))}
    state = replace(toy.initial_state(job), site_times=known)
    steps = dict[bool, int]()
    for index in (8, 9):
        record = opened(job, replace(state, round_index=index))
        Capacity(job).before_round_(record)
        steps[index == 8] = len(record.steps_of[C])
    assert steps[False] == 20
    # Seconds are 3.5 + 0.4 n at two sites, 0.5 + 0.4 n at one, and n 20 on average.
    assert steps[True] == 25


def test_no_step_of_the_run_is_taken_twice_and_rates_follow_the_round():
    job = job_of()
    first, second = allocated(job, 1, 80), allocated(job, 2, 3)
    assert first.stop == second.start == 80
    places = [schedule_step(job, 2, second, number) for number in second]
    assert places == [20, 26, 33]
    assert [schedule_step(job, 1, range(40), n) for n in (0, 39)] == [0, 19]
    static = toy.job({"training": {"local_steps": 20}})
    assert schedule_step(static, 2, range(20, 40), 27) == 27
