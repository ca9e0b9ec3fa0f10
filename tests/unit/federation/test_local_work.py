"""How many local steps a round takes, chosen from what earlier rounds took."""

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
from support import toy

from aggregator.manifest import _encode_work, _parse_work
from aggregator.methods import chosen_steps
from aggregator.methods.chosen_steps import (
    Pace,
    choose,
    is_typical,
    observe,
    pace_of,
)
from aggregator.weighting import most_trained_on
from federation.errors import JobError, ProtocolError
from federation.job import job_file
from federation.job.job_digest import deciding, digest
from federation.job.spec import JobSpec
from federation.messages import RoundTask
from federation.protocols import RoundTime, RunProgress
from federation.rounds import local_work
from federation.rounds.local_work import (
    accumulate_in,
    batches_before,
    check_task,
    in_round,
)
from federation.wire import frame as wire
from privacy.secagg.protocol.train import TrainBody, task_digest

STEP, WAITING = 0.1, 0.5


def auto(low: int = 2, high: int = 100, **training: Any) -> JobSpec:
    return toy.job(
        {
            "rounds": 100,
            "training": {"local_steps": low, **training},
            "schedule": {"local_work": "auto", "max_local_steps": high},
        }
    )


def took(*lengths: int, says: bool = False, more: float = 0.0) -> tuple[RoundTime, ...]:
    """Rounds of so many steps at a constant pace, ``more`` in the last one."""
    return tuple(
        RoundTime(
            round_index=index,
            num_steps=steps,
            seconds=WAITING + STEP * steps + more * (index == len(lengths)),
            train_seconds=STEP * steps if says else None,
        )
        for index, steps in enumerate(lengths, start=1)
    )


def after(*times: RoundTime, taken: int = 10) -> RunProgress:
    return RunProgress(
        round_index=len(times) + 1,
        rounds_completed=len(times) + 1,
        lost_in_a_row=0,
        steps_taken=taken,
        times=times,
    )


def next_steps(job: JobSpec, *times: RoundTime, taken: int = 10) -> tuple[int, str]:
    choice = choose(job, after(*times, taken=taken))
    assert choice is not None
    assert choice.steps.start == taken
    return len(choice.steps), choice.reason


def test_steps_for_a_share_are_the_fewest():
    """By the formula, and no fewer."""
    pace = Pace(STEP, WAITING)
    steps = pace.steps_for(0.97)
    assert pace.share(steps) >= 0.97 > pace.share(steps - 1)


def test_arrival_times_show_the_pace():
    """Also if one round of eight took ten times as long."""
    for more in (0.0, 10.0):
        times = took(2, 4, 8, 16, 30, 31, 32, 33, more=more)
        pace = pace_of(times, overlap_steps=0)
        assert pace is not None
        assert pace.step_seconds == pytest.approx(STEP)
        assert pace.waiting_seconds == pytest.approx(WAITING)


def test_one_round_shows_the_pace_if_sites_say_how_long_they_trained():
    pace = pace_of(took(7, says=True), overlap_steps=0)
    assert pace == Pace(pytest.approx(STEP), pytest.approx(WAITING))


@pytest.mark.parametrize(("overlap", "waiting"), [(2, 0.3), (5, 0.0), (8, 0.0)])
def test_steps_that_overlap_with_messages_hide_them(overlap: int, waiting: float):
    """What is left of them when the model arrives counts as training."""
    hidden = min(WAITING, overlap * STEP)
    trained = 10 * STEP - hidden
    time = RoundTime(
        round_index=2, num_steps=10, seconds=trained + WAITING, train_seconds=trained
    )
    pace = pace_of([time], overlap_steps=overlap)
    assert pace == Pace(pytest.approx(STEP), pytest.approx(waiting))


@pytest.mark.parametrize(
    "times", [(), took(5, 5), (*took(4), replace(took(8)[0], seconds=0.1))]
)
def test_rounds_that_do_not_show_a_pace(times: tuple[RoundTime, ...]):
    """None, only ones of one length, or longer ones that took less."""
    assert pace_of(times, overlap_steps=0) is None


def test_a_second_length_is_tried_where_only_arrival_times_are_known():
    assert next_steps(auto(), *took(2, 2)) == (4, "probe")


def test_rounds_get_longer_until_steps_show_beside_the_waiting():
    """On lines whose times vary by more than a few steps take."""
    noisy = [replace(time, seconds=6.0 - time.num_steps) for time in took(2, 2, 4, 4)]
    assert pace_of(noisy, overlap_steps=0) is None
    assert next_steps(auto(), *noisy) == (8, "probe")
    assert next_steps(auto(high=6), *noisy) == (6, "probe")


def test_a_site_that_claims_to_take_no_time_stops_nothing():
    """The number of steps is finite, and the job's limit holds."""
    times = replace(took(2, says=True)[0], train_seconds=1e-308)
    assert next_steps(auto(), times) == (4, "measured")
    assert Pace(1e-308, WAITING).steps_for(0.97) > 10**15


def test_rounds_of_one_length_are_followed_by_a_short_one():
    """Where sites say how long they trained, none is needed."""
    lengths = (2, 4, *(100,) * 7)
    assert next_steps(auto(), *took(*lengths)) == (2, "probe")
    assert next_steps(auto(), *took(*lengths, says=True)) == (100, "measured")


def test_every_run_ends_with_its_last_step():
    """Each round is within its limits, and there are no more than planned."""
    for low, more, rounds in product((1, 2, 3), (0, 1, 5), (1, 4, 7)):
        high = 2 * low + more
        for wanted in range(low, high + 1):
            left, lengths = low * rounds, list[int]()
            while left:
                lengths.append(chosen_steps._of_what_is_left(wanted, left, low))
                left -= lengths[-1]
            assert all(low <= length <= high for length in lengths)
            assert len(lengths) <= rounds


def test_a_job_with_a_fixed_number_has_nothing_to_choose():
    job = toy.job()
    assert chosen_steps.begin(job) is None
    assert local_work.fewest_rounds(job) == job.rounds
    assert local_work.fewest_rounds(auto()) == 2
    guest = chosen_steps.begin(auto())
    assert guest is not None
    assert not guest.is_over(after(taken=199))
    assert guest.is_over(after(taken=200))


def test_only_typical_rounds_are_measured():
    """Not the first; nor those that evaluate, if others do not; nor unusual ones."""
    job, seldom = (
        auto(),
        replace(auto(), evaluation=replace(auto().evaluation, every=4)),
    )
    usual = partial(is_typical, is_usual=True)
    assert not usual(job, after(taken=0), evaluates=True)
    assert usual(job, after(), evaluates=True)
    assert usual(seldom, after(), evaluates=False)
    assert not usual(seldom, after(), evaluates=True)
    assert not is_typical(job, after(), evaluates=True, is_usual=False)


def test_no_site_trains_for_longer_than_the_round():
    """The sum of the times that it claims may be infinite."""
    (kept,) = observe(after(), range(4), seconds=2.0, train_seconds=float("inf"))
    assert kept.train_seconds == 2.0
    assert _parse_work(_encode_work(after(kept)))["times"] == (kept,)


# What a site accepts.


@pytest.mark.parametrize(
    ("steps", "first"), [(0, 0), (1, 0), (101, 0), (50, 151), (2, 199)]
)
def test_steps_that_the_job_does_not_allow_are_refused(steps: int, first: int):
    task = toy.task(num_steps=steps, first_step=first)
    with pytest.raises(ProtocolError, match="local steps"):
        check_task(auto(), task)


def test_steps_by_capacity_begin_where_the_round_does():
    """Or an aggregator could choose the records of a round, or go back to some."""
    job = toy.job(
        {"training": {"local_steps": 20}, "schedule": {"allocation": "capacity"}}
    )

    def asked(steps: int, first: int) -> RoundTask:
        return toy.task(round_index=3, num_steps=steps, first_step=first)

    for steps in (5, 20, 80):
        check_task(job, asked(steps, 160))
    for steps, first in (
        (81, 160),
        (4, 160),
        (20, 159),
        (20, 161),
        (20, 0),
        (5, 235),
        (5, 240),
    ):
        with pytest.raises(ProtocolError, match="allows 5 to 80 in a round, from 160"):
            check_task(job, asked(steps, first))


def test_a_job_with_a_fixed_number_is_asked_for_no_other():
    with pytest.raises(ProtocolError, match="does not leave open"):
        check_task(toy.job(), toy.task(num_steps=3))


def test_steps_are_in_every_mask_key():
    """Or one site could be made to train for longer, and its part read off the sum."""
    tasks = [toy.task(num_steps=n, first_step=f) for n, f in ((0, 0), (2, 0), (2, 4))]
    body = TrainBody(setup_hash=b"", confirms=b"", certificate=b"", update_clip=1.0)
    assert len({task_digest(task, body) for task in tasks}) == len(tasks)


def test_bounds_of_sums_follow_the_steps_of_their_round():
    """A short round allows no more than it asked for; a late answer, the most."""
    job = auto(low=2, high=100, batch_size=8)
    for steps, most in ((range(40, 47), 7), (None, 100)):
        assert most_trained_on(job, None, round_index=3, steps=steps) == most * 8


def test_bounds_of_sums_follow_the_batches_of_their_round():
    """A site of the first rounds cannot claim the large steps of the last ones."""
    job = toy.job({"rounds": 8, "training": {**GROWING, "batch_size": 3}})
    found = [most_trained_on(job, None, round_index=r) for r in (1, 2, 3, 5, 6, 8)]
    assert found == [5 * 3 * batches for batches in (2, 2, 4, 4, 1, 1)]


# What a checkpoint keeps.


@pytest.mark.parametrize("says", [True, False])
def test_a_checkpoint_keeps_what_choices_follow_from(says: bool):  # noqa: FBT001
    times = [replace(time, evaluate_seconds=0.5) for time in took(2, 4, says=says)]
    progress = after(*times)
    found = _parse_work(_encode_work(progress))
    assert found == {"steps_taken": progress.steps_taken, "times": progress.times}
    assert _parse_work({}) == {"steps_taken": 0, "times": ()}
    (older,) = _parse_work({"times": [[1, 2, 0.5, None]]})["times"]
    assert older.evaluate_seconds == 0.0


@pytest.mark.parametrize(
    "entry",
    [
        {"steps_taken": -1},
        {"steps_taken": 1.5},
        {"steps_taken": 4, "times": [[1, 2, "x", None]]},
        {"steps_taken": 4, "times": [[1, 2, 0.5, True]]},
        {"steps_taken": 4, "times": [[1, -2, 0.5, None]]},
        {"steps_taken": 4, "times": [[1, 2, 0.5, None, None]]},
    ],
)
def test_damaged_work_is_no_checkpoint(entry: dict[str, Any]):
    with pytest.raises(ValueError, match="damaged"):
        _parse_work(entry)


# What a job must not ask for.


@pytest.mark.parametrize(
    ("changes", "key", "text"),
    [
        ({"local_work": "auto"}, "schedule.max_local_steps", "at least 4"),
        (
            {"local_work": "auto", "max_local_steps": 3},
            "schedule.max_local_steps",
            "at least 4",
        ),
    ],
)
def test_ranges_without_a_choice(changes: dict[str, Any], key: str, text: str):
    with pytest.raises(JobError, match=text) as caught:
        toy.job({"schedule": changes})
    assert caught.value.key == key


# What travels.


def test_steps_survive_the_journey():
    """Of a task that has none, no byte is sent for them."""
    task = toy.task(num_steps=7, first_step=40)
    found = wire.decode(wire.encode_bytes(task))
    assert isinstance(found, RoundTask)
    assert found.steps == range(40, 47)
    assert b"_step" in wire.encode_bytes(task)
    assert b"_step" not in wire.encode_bytes(toy.task())


GROWING = {"local_steps": 5, "accumulate": 2, "accumulate_from": [[3, 4], [6, 1]]}


def test_a_step_has_the_batches_of_its_round():
    """A site goes on where it was, whatever the size of steps."""
    job = toy.job({"rounds": 8, "training": GROWING})
    each = [accumulate_in(job.training, index) for index in range(1, 9)]
    assert each == [2, 2, 4, 4, 4, 1, 1, 1]
    for index in range(1, 9):
        before = batches_before(job.training, index, 5 * (index - 1))
        assert before == 5 * sum(each[: index - 1])
        alike = in_round(job, index).training
        assert (alike.accumulate, alike.accumulate_from) == (each[index - 1], ())
    plain = toy.job({"training": {"local_steps": 5, "accumulate": 3}})
    assert batches_before(plain.training, 4, 17) == 51
    assert in_round(plain, 4) is plain


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"training": {"accumulate_from": [[2]]}}, "must be \\[first round"),
        ({"training": {"accumulate_from": [[2, 0]]}}, "at least 1 batch"),
        ({"training": {"accumulate_from": [[1, 2]]}}, "must be after round 1"),
        ({"training": {"accumulate_from": [[3, 2], [3, 4]]}}, "after round 3"),
        ({"training": {"accumulate_from": [[9, 2]]}}, "the last one, 8"),
    ],
)
def test_steps_that_must_be_alike_do_not_grow(tables: dict[str, Any], said: str):
    """No data decides the size of a step."""
    training = {**GROWING, **tables.get("training", {})}
    with pytest.raises(JobError, match=said) as caught:
        toy.job({"rounds": 8, **tables, "training": training})
    assert str(caught.value.key).startswith("training.accumulate_from")


def test_a_job_with_other_sizes_of_steps_is_another_job():
    """And one without the key is that of earlier releases."""
    plain = toy.job({"rounds": 8, "training": {"local_steps": 5, "accumulate": 2}})
    growing = toy.job({"rounds": 8, "training": GROWING})
    assert digest(plain) != digest(growing)
    assert "accumulate_from" not in deciding(plain)["training"]


def test_a_site_takes_no_parts_of_the_data_but_those_of_its_round():
    """Nor so few records that its update would tell what they are."""
    document = toy.document({"data": {"placement": "dynamic"}})
    document["training"].pop("local_steps")
    document["training"]["local_epochs"] = 1
    job, fewest = job_file.parse(document), local_work.PARTS // 12
    for first, number in (
        (local_work.PARTS, fewest),
        (2 * local_work.PARTS - 400, 400),
    ):
        check_task(job, toy.task(round_index=2, num_steps=number, first_step=first))
    for first, number in (
        (local_work.PARTS, fewest - 1),
        (local_work.PARTS - 1, 400),
        (2 * local_work.PARTS - 399, 400),
        (0, 400),
    ):
        with pytest.raises(ProtocolError, match=rf"parts {first} to"):
            check_task(job, toy.task(round_index=2, num_steps=number, first_step=first))
    everything = [
        record
        for start in range(0, local_work.PARTS, 100)
        for record in local_work.records_of(
            range(start, min(start + 100, local_work.PARTS)), 7919
        )
    ]
    assert everything == list(range(7919))
