"""Deadlines of sites that follow from what their rounds took."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st
from support import toy
from support.scripted_grid import reply_to

from aggregator.methods import site_times
from aggregator.methods.site_times import SiteTimes, patience
from federation.clock import VirtualClock
from federation.ids import SiteId
from federation.job.spec import JobSpec
from federation.messages import FailureKind, SiteUpdate
from federation.protocols import RoundTime, RunState
from federation.rounds.failures import failure
from federation.rounds.round_record import RoundRecord

A, B, C = toy.SITES
SECONDS = st.lists(st.floats(0.0, 1e6), min_size=1, max_size=5)


def job_of(**schedule: Any) -> JobSpec:
    learnt = {"minimum_sites": 2, "grace": "learnt", **schedule}
    return toy.job({"rounds": 40, "schedule": learnt})


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


def answered(*seconds: float) -> list[RoundTime]:
    return [
        RoundTime(round_index=1, num_steps=3, seconds=each, train_seconds=None)
        for each in seconds
    ]


def missed(seconds: float, *, in_round: int = 1) -> RoundTime:
    return RoundTime(round_index=in_round, num_steps=0, seconds=seconds, missed=True)


def after(record: RoundRecord) -> RunState:
    """The state with which the next round begins."""
    found = SiteTimes(record.job).after_round(record.state, record)
    return replace(found, round_index=record.round_index)


def deadlines(job: JobSpec, state: RunState) -> Mapping[SiteId, float]:
    record = opened(job, state)
    SiteTimes(job).before_round_(record)
    return record.patience


@pytest.mark.parametrize(
    ("seconds", "given_seconds"),
    [
        ([10.0], 15.0),
        ([0.2], 1.2),
        ([10.0, 70.0], 15.0),
        ([70.0, 10.0], 15.0),
        ([10.0, 12.0, 70.0, 8.0, 10.0], 18.0),
        ([10.0, 40.0, 10.0, 44.0, 10.0], 60.0),
    ],
)
def test_deadline_is_half_as_long_again_as_all_times_but_one(
    seconds: list[float], given_seconds: float
):
    assert patience(answered(*seconds)) == pytest.approx(given_seconds)


@given(SECONDS)
def test_a_site_always_has_a_second_more_than_it_usually_takes(seconds: list[float]):
    least = min(seconds)
    assert patience(answered(*seconds)) >= max(least + 1.0, 1.5 * least)
    assert patience(answered(*seconds)) <= max(max(seconds) + 1.0, 1.5 * max(seconds))


@given(SECONDS, st.data())
def test_a_slower_answer_shortens_no_deadline(
    seconds: list[float], data: st.DataObject
):
    place = data.draw(st.integers(0, len(seconds) - 1))
    slower = [*seconds]
    slower[place] += data.draw(st.floats(0.0, 1e6))
    assert patience(answered(*slower)) >= patience(answered(*seconds))


@given(SECONDS, st.floats(0.0, 1e9))
def test_one_stall_adds_nothing_to_the_longest_of_the_others(
    seconds: list[float], stall: float
):
    longest = max(seconds)
    assert patience(answered(*seconds, stall)) <= max(longest + 1.0, 1.5 * longest)


def test_no_deadline_is_longer_than_that_of_the_round():
    job = job_of(round_deadline_seconds=50.0)
    times = {A: (*answered(40.0, 40.0),), B: (*answered(10.0),)}
    state = replace(toy.initial_state(job), site_times=times)
    assert deadlines(job, state) == {A: 50.0, B: 15.0}, "C has never been asked"


@pytest.mark.parametrize(
    ("changes", "steps", "given_seconds"),
    [
        ({"training": {"accumulate_from": [[2, 3]]}}, None, 45.0),
        ({"schedule": {"allocation": "capacity"}}, 6, 30.0),
        ({"schedule": {"allocation": "capacity"}}, 1, 15.0),
        ({"schedule": {"local_work": "auto", "max_local_steps": 9}}, 6, 30.0),
        ({}, None, 15.0),
    ],
    ids=["larger steps", "more steps", "fewer steps", "chosen steps", "equal work"],
)
def test_deadline_of_a_round_of_more_work_is_longer_in_proportion(
    changes: dict[str, Any], steps: int | None, given_seconds: float
):
    """A round of fewer steps has that of the longer one: it may be due to waiting."""
    learnt = {"schedule": {"minimum_sites": 2, "grace": "learnt"}}
    job = toy.job(toy.merged({"rounds": 40, **learnt}, changes))
    times = {A: (*answered(10.0),), B: (replace(*answered(10.0), train_seconds=8.0),)}
    state = replace(toy.initial_state(job), round_index=1, site_times=times)
    record = opened(job, state)
    record.steps = steps and range(steps)
    SiteTimes(job).before_round_(record)
    more = (given_seconds - 15.0) * 0.8  # B waits for two of its ten seconds.
    assert record.patience == pytest.approx({A: given_seconds, B: 15.0 + more})


def test_deadline_of_a_round_that_evaluates_is_longer_by_the_evaluation():
    """Of which the sites' own word is known; what rounds take is noted without it."""
    job = toy.job(
        {
            "rounds": 9,
            "evaluation": {"every": 2},
            "schedule": {"minimum_sites": 2, "grace": "learnt"},
        }
    )
    record = opened(job)
    record.times[A] = replace(answered(16.0)[0], evaluate_seconds=6.0)
    record.times[B] = answered(16.0)[0]
    state = after(record)
    assert deadlines(job, state) == {A: 15.0, B: 24.0}
    assert deadlines(job, replace(state, round_index=2)) == {A: 24.0, B: 24.0}


def test_a_site_that_hangs_is_waited_for_twice_and_again_once_it_is_heard_of():
    job, found = job_of(), []
    record = opened(job)
    record.times[C] = answered(10.0)[0]
    state = after(record)
    for index in range(2, 23):
        found.append(deadlines(job, state)[C])
        record = opened(job, state)
        record.late[C] = 15.0
        if index == 22:
            record.overdue[C, 2] = 70.0
        state = after(record)
    assert found == [15.0] * 2 + [0.0] * 19 + [0.0] * 0
    assert deadlines(job, state)[C] == 15.0, "its usual time is not forgotten"


def test_a_site_that_was_never_heard_of_has_the_whole_round_only_once():
    job = job_of()
    record = opened(job)
    record.late[C] = 600.0
    state = after(record)
    assert deadlines(job, state) == {C: 0.0}
    record = opened(job, state)
    record.overdue[C, 1] = 700.0
    assert deadlines(job, after(record)) == {C: 600.0}


def test_late_answer_takes_the_place_of_the_round_that_it_missed():
    job = toy.job(
        {
            "training": {"local_steps": 20},
            "schedule": {"allocation": "capacity", "minimum_sites": 2},
        }
    )
    first = opened(job)
    first.steps_of[C] = range(20)
    first.late[C] = 8.0
    state = after(first)
    second = opened(job, state)
    second.steps_of[C] = range(5)
    second.clock.sleep(6.0)
    late = failure(toy.update(C, round_index=1), FailureKind.LATE, "came too late")
    reply = reply_to(late, asked_seconds=0.0, answered_seconds=12.0)
    assert not [*second.sound([reply], SiteUpdate)]
    found = after(second).site_times[C]
    assert [(t.num_steps, t.seconds, t.missed) for t in found] == [
        (5, 6.0, True),
        (20, 12.0, False),
    ]


@pytest.mark.parametrize("slowdown", [4.0, 20.0])
def test_a_site_that_stays_slower_is_in_time_after_two_late_answers(slowdown: float):
    """Three others take ten seconds, as it did; each round lasts for as long."""
    job = job_of(round_deadline_seconds=1e4)
    state = replace(toy.initial_state(job), site_times={C: (*answered(*[10.0] * 5),)})
    now = free = 0.0
    works_on, late = None, list[int]()
    for index in range(1, 200):
        end = now + max(11.0, deadlines(job, state)[C])
        record = opened(job, state)
        if works_on is not None and free < end:
            record.overdue[C, works_on[0]] = free - works_on[1]
            works_on = None
        if works_on is None:
            works_on, free = (index, now), max(now, free) + 10.0 * slowdown
        if works_on == (index, now) and free <= end:
            record.times[C] = answered(free - now)[0]
            works_on, now = None, free
        else:
            record.late[C] = end - now
            late.append(index)
            now = end
        state = after(record)
    assert len(late) <= 2 * (slowdown + 1), late
    assert late == [*range(1, len(late) + 1)], "it is in time for good"


def test_a_resumed_run_knows_what_sites_took_and_missed():
    job = job_of()
    times = {A: (*answered(10.0), missed(15.0)), B: (missed(3.0), missed(4.0))}
    run = toy.Toy(job=job)
    run.checkpoints().save(
        replace(toy.initial_state(job), round_index=1, site_times=times)
    )
    loaded = run.checkpoints().load_latest()
    assert loaded is not None
    assert loaded.site_times == times


def test_sites_of_other_jobs_have_no_deadlines_of_their_own():
    job = job_of(grace=0.25)
    assert site_times.begin(job) is None
    assert site_times.begin(job_of()) is not None
    capacity = job_of(grace=0.25, allocation="capacity")
    state = replace(toy.initial_state(job), site_times={A: (*answered(10.0),)})
    record = opened(capacity, state)
    SiteTimes(capacity).before_round_(record)
    assert not record.patience
