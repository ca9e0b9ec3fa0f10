"""What every schedule promises.

To add one, list it in ``SCHEDULES``. Each is asked in every state that a run of three
sites and two rounds can reach, whatever arrives in whatever order.
"""

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from support import toy
from support.scripted_grid import ScriptedGrid, reply_to

from federation.clock import VirtualClock
from federation.events import (
    ModelEvaluated,
    RoundFinished,
    SiteAnswered,
    SiteFailed,
    Warned,
)
from federation.ids import SiteId, TaskId
from federation.messages import (
    RelayedSum,
    Reply,
    RoundTask,
    SiteMessage,
    SiteUpdate,
    Task,
    TaskKind,
)
from federation.rounds.coordinator import run_federation
from federation.rounds.gather import PlainGather
from federation.rounds.round_record import RoundRecord
from federation.rounds.schedule import (
    BARRIER,
    Action,
    Apply,
    Arrival,
    Barrier,
    Buffered,
    Dispatcher,
    Done,
    OpenTask,
    Schedule,
    ScheduleView,
    Send,
    Wait,
    evaluation_schedule,
    schedule_of,
    waits_for_all,
)
from federation.vectors import Vector

A, B, C = toy.SITES
ROUNDS = 2

SCHEDULES = [
    pytest.param(BARRIER, id="barrier"),
    pytest.param(Buffered(size=1, max_staleness=10), id="buffered-1"),
    pytest.param(Buffered(size=2, max_staleness=1), id="buffered-2"),
]


@pytest.fixture(params=SCHEDULES)
def schedule(request: pytest.FixtureRequest) -> Schedule:
    """One of the schedules."""
    return request.param


def step(
    schedule: Schedule,
    round_index: int,
    waiting: list[OpenTask],
    inbox: list[Arrival],
):
    """What a schedule says, twice the same and whatever the time."""
    view = ScheduleView(
        round_index=round_index, rounds=ROUNDS, cohort=toy.SITES, open=waiting
    )
    action = schedule.next(view, inbox, 0.0)
    assert schedule.next(view, list(inbox), 1e9) == action
    return action


def histories(
    schedule: Schedule,
    round_index: int = 1,
    waiting: tuple[OpenTask, ...] = (),
    inbox: tuple[Arrival, ...] = (),
) -> Iterator[int]:
    """Play every order of arrivals; yield the number of models made."""
    action = step(schedule, round_index, [*waiting], [*inbox])
    if isinstance(action, Done):
        yield round_index - 1
    elif isinstance(action, Apply):
        yield from histories(schedule, round_index + 1, waiting)
    elif isinstance(action, Send):
        assert action.sites
        assert set(action.sites) <= set(toy.SITES) - {t.site for t in waiting}
        sent = [OpenTask(s, round_index, round_index - 1, 0) for s in action.sites]
        yield from histories(schedule, round_index, (*waiting, *sent), inbox)
    else:
        assert isinstance(action, Wait)
        assert waiting, "nothing can arrive"
        for task, counts in product(waiting, (True, False)):
            left = tuple(t for t in waiting if t is not task)
            arrived = (*inbox, Arrival(task, counts=counts))
            yield from histories(schedule, round_index, left, arrived)


def test_every_history_ends_after_the_last_round(schedule: Schedule):
    """Nobody is sent two tasks at once, and nobody waits for nothing."""
    assert {*histories(schedule)} == {ROUNDS}


def test_no_answer_ends_a_round_all_the_same(schedule: Schedule):
    """The caller says that the quorum is not met."""
    task = [OpenTask(site, 1, 0, 0) for site in toy.SITES]
    failed = [Arrival(one, counts=False) for one in task]
    assert step(schedule, 1, [], failed) == Apply()


def test_nothing_is_sent_after_the_last_round(schedule: Schedule):
    """A run that is resumed at its end is done."""
    assert step(schedule, ROUNDS + 1, [], []) == Done()


def test_what_is_new_counts_in_full_and_what_is_old_never_more(schedule: Schedule):
    """Late is a degree."""
    shares = [schedule.share(staleness) for staleness in range(20)]
    assert shares[0] == 1.0
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] == 0.0


def test_barrier_counts_the_newest_model_alone():
    """An answer to an older one is late."""
    assert BARRIER.share(1) == 0.0


def test_barrier_gives_late_sites_up_some_time_after_the_quorum():
    """The grace is a part of what the quorum took, at least a second."""
    graceful = Barrier(quorum=2, grace=0.5)
    first, second, late = (OpenTask(site, 1, 0, 0) for site in toy.SITES)

    def at(now: float, *counted: tuple[OpenTask, bool, float]) -> Action:
        inbox = [Arrival(*one) for one in counted]
        view = ScheduleView(
            round_index=1, rounds=2, cohort=toy.SITES, open=[late], begin=100.0
        )
        return graceful.next(view, inbox, now)

    one, two = (first, True, 104.0), (second, True, 110.0)
    assert at(1e9, one) == Wait()
    assert at(1e9, one, (second, False, 110.0)) == Wait()
    assert at(114.9, one, two) == Wait(115.0)
    assert at(115.0, one, two) == Apply(gives_up=True)
    quick = (first, True, 100.1), (second, True, 100.2)
    assert at(101.0, *quick) == Wait(pytest.approx(101.2))


def learnt(
    now: float, known: Mapping[SiteId, float], *counted: tuple[SiteId, float]
) -> Action:
    """What a barrier with learnt deadlines says of a round that began at 100 s."""
    done = {site for site, _ in counted}
    view = ScheduleView(
        round_index=1,
        rounds=2,
        cohort=toy.SITES,
        open=[OpenTask(site, 1, 0, 0) for site in toy.SITES if site not in done],
        begin=100.0,
        patience=known,
    )
    inbox = [
        Arrival(OpenTask(site, 1, 0, 0), counts=True, seconds=at)
        for site, at in counted
    ]
    return Barrier(quorum=1, grace="learnt").next(view, inbox, now)


def test_barrier_waits_for_each_site_until_its_own_learnt_deadline():
    known = {A: 20.0, B: 30.0, C: 60.0}
    assert learnt(1e9, known) == Wait(), "there is no quorum"
    assert learnt(101.0, known, (A, 101.0)) == Wait(160.0)
    assert learnt(101.0, known, (A, 101.0), (C, 101.0)) == Wait(130.0)
    assert learnt(130.0, known, (A, 101.0), (C, 101.0)) == Apply(gives_up=True)


def test_barrier_gives_the_rest_of_a_quorum_a_second_whatever_was_learnt():
    known = {A: 20.0, B: 3.0, C: 0.0}
    assert learnt(110.0, known, (A, 110.0)) == Wait(111.0)


def test_learnt_deadline_of_a_site_that_is_not_known_is_that_of_the_grid():
    assert learnt(1e9, {A: 20.0, B: 30.0}, (A, 101.0)) == Wait()


def test_learnt_deadlines_follow_a_round_that_is_slow_for_all_who_answer():
    """One that evaluates, say; a single slow site moves none."""
    known = {A: 20.0, B: 30.0, C: 40.0}
    assert learnt(160.0, known, (A, 160.0), (B, 175.0)) == Wait(200.0)
    assert learnt(125.0, known, (A, 160.0), (B, 120.0)) == Wait(161.0)


@pytest.mark.parametrize(
    ("schedule", "may_be"),
    [
        ({}, True),
        ({"minimum_sites": 2, "grace": 0.0}, False),
        ({"minimum_sites": 2, "grace": "learnt"}, False),
        ({"mode": "buffered"}, False),
    ],
)
def test_answers_are_held_back_only_where_a_round_waits_for_all(
    schedule: dict[str, object], *, may_be: bool
):
    """Or a frozen site would hold up a round that can do without it."""
    assert waits_for_all(toy.job({"schedule": schedule})) == may_be


SECONDS = {A: 1.0, B: 1.0, C: 2.5}


class Pacing(ScriptedGrid):
    """Every site answers in its own time; the slowest last."""

    def __init__(self) -> None:
        """Begin at 0 s with nothing sent."""
        super().__init__()
        self.now = 0.0
        self._due: list[tuple[float, Reply]] = []

    def send(
        self, tasks: Sequence[Task], *, deadline_seconds: float
    ) -> Sequence[TaskId]:
        """Note when each answer is due."""
        del deadline_seconds
        ids = self.number(tasks)
        for task_id, task in zip(ids, tasks, strict=True):
            assert isinstance(task, RoundTask)
            due = self.now + SECONDS[task.site]
            times = {"asked_seconds": self.now, "answered_seconds": due}
            self._due.append((due, reply_to(answer(task), task_id, **times)))
        self._due.sort(key=lambda one: (one[0], one[1].task_id))
        return ids

    def receive(self, timeout_seconds: float | None = None) -> deque[Reply]:
        """Let time pass until the next answer."""
        del timeout_seconds
        if not self._due:
            return deque()
        self.now, first = self._due.pop(0)
        return deque([first])

    def withdraw(self, task_ids: Collection[TaskId]) -> Mapping[TaskId, int]:
        """Forget the answers."""
        self._due = [one for one in self._due if one[1].task_id not in {*task_ids}]
        return super().withdraw(task_ids)


class Together(Pacing):
    """All answers that are under way come at one look."""

    def receive(self, timeout_seconds: float | None = None) -> deque[Reply]:
        """Return them."""
        del timeout_seconds
        found = deque(replace(reply, bytes_up=7) for _, reply in self._due)
        self._due.clear()
        return found


class Slow(Pacing):
    """Waits for a site that has just gone before it sends anything."""

    def __init__(self, clock: VirtualClock) -> None:
        """Move this clock, too."""
        super().__init__()
        self.clock = clock

    def send(
        self, tasks: Sequence[Task], *, deadline_seconds: float
    ) -> Sequence[TaskId]:
        """Wait first."""
        self.clock.sleep(30.0)
        return super().send(tasks, deadline_seconds=deadline_seconds)

    def receive(self, timeout_seconds: float | None = None) -> deque[Reply]:
        """Take the next answer, or none in time."""
        if timeout_seconds is not None and self._due[0][0] > self.now + timeout_seconds:
            self.clock.sleep(timeout_seconds)
            return deque()
        before = self.now
        replies = super().receive()
        self.clock.sleep(self.now - before)
        return replies


def test_learnt_deadline_counts_from_when_tasks_were_sent():
    clock = VirtualClock()
    run = toy.Toy(job=toy.job({"rounds": 1}), clock=clock)
    dispatcher = Dispatcher(Slow(clock), deadline_seconds=600.0)
    record = RoundRecord(
        job=run.job,
        run_id=toy.RUN,
        state=toy.initial_state(run.job),
        cohort=toy.SITES,
        layout=toy.LAYOUT,
        clock=clock,
        emit=run.events.append,
    )
    known = dict.fromkeys(toy.SITES, 3.0)
    replies = dispatcher.replies(
        Barrier(quorum=1, grace="learnt"),
        ScheduleView(
            round_index=1,
            rounds=1,
            cohort=toy.SITES,
            open=dispatcher.open,
            patience=known,
        ),
        write=lambda sites: [toy.task(site) for site in sites],
        tally=record,
        now=clock.monotonic,
    )
    assert [update.site for update, _ in record.sound(replies, SiteUpdate)] == [A, B, C]


def answer(task: RoundTask) -> SiteMessage:
    """A sound answer to a task."""
    fields = {"round_index": task.round_index, "based_on": task.based_on}
    if task.kind is TaskKind.EVALUATE:
        return toy.evaluation(task.site, **fields)
    return toy.update(task.site, **fields)


def run_of(schedule: Schedule, rounds: int, seen: list[tuple[SiteId, float]]):
    """A run of the product's own coordinator over sites of different speed."""
    run = toy.Toy(job=toy.job({"rounds": rounds, "schedule": {"minimum_sites": 1}}))
    grid = Pacing()

    def weigh(update: SiteUpdate) -> float:
        seen.append((update.site, update.based_on))
        return 1.0

    parts = run.parts(grid)
    gather = PlainGather(
        run.job,
        grid=grid,
        weight_of=weigh,
        combine=toy.combine_rule(run.job.aggregation),
        schedule=schedule,
    )
    state = run_federation(run.job, replace(parts, gather=gather))
    return run, grid, state


def test_coordinator_runs_every_schedule(schedule: Schedule):
    """The loop is the same; rounds are counted, evaluated and saved."""
    run, _, state = run_of(schedule, 3, [])
    assert (state.round_index, state.rounds_completed) == (3, 3)
    assert [event.status for event in run.told(RoundFinished)] == ["completed"] * 3


def test_buffered_run_does_not_wait_for_the_slowest():
    """Its answer counts two models later, and nobody is said to have failed."""
    seen: list[tuple[SiteId, float]] = []
    run, grid, _ = run_of(Buffered(size=2, max_staleness=10), 4, seen)
    assert (C, 0) in seen
    assert seen.index((C, 0)) > seen.index((A, 1))
    assert {e.kind for e in run.told(SiteFailed)} <= {"surplus"}
    assert grid.now < 3 * SECONDS[C]
    assert {ids for call in grid.withdrawn for ids in call}  # At the end alone.


def test_buffered_run_refuses_what_is_too_old():
    """The policy decides what is late."""
    seen: list[tuple[SiteId, float]] = []
    run, _, _ = run_of(Buffered(size=2, max_staleness=0), 4, seen)
    assert (C, 0) not in seen
    assert {f.site for f in run.told(SiteFailed)} == {C}
    assert "too old" in run.told(SiteFailed)[0].message


def test_of_replicas_one_answer_counts_also_if_both_come_together():
    schedule = {"replicas": [[A, B]], "minimum_sites": 1}
    run = toy.Toy(job=toy.job({"rounds": 1, "schedule": schedule}))
    gather = PlainGather(
        run.job,
        grid=(grid := Together()),
        weight_of=lambda _: 1.0,
        combine=toy.combine_rule(run.job.aggregation),
        schedule=schedule_of(run.job),
    )
    run_federation(run.job, replace(run.parts(grid), gather=gather))
    assert [each.site for each in run.told(SiteAnswered)] == [A, C]
    # In the round, and when the last model is evaluated.
    assert [(e.site, e.kind) for e in run.told(SiteFailed)] == 2 * [(B, "surplus")]
    assert waits_for_all(run.job) is False


def buffers_of_two(run: toy.Toy) -> PlainGather:
    """All answers come at one look."""
    return PlainGather(
        run.job,
        grid=Together(),
        weight_of=lambda _: 1.0,
        combine=toy.combine_rule(run.job.aggregation),
        schedule=Buffered(size=2, max_staleness=10),
    )


def test_buffer_takes_as_many_updates_as_it_holds_of_those_that_come_together():
    """Or a model's bytes would depend on how often the aggregator looks."""
    run = toy.Toy(job=toy.job({"rounds": 2, "schedule": {"minimum_sites": 1}}))
    gather = buffers_of_two(run)
    run_federation(run.job, replace(run.parts(gather.grid), gather=gather))
    answered = [(e.round_index, e.site, e.staleness) for e in run.told(SiteAnswered)]
    assert answered == [(1, A, 0), (1, B, 0), (2, C, 1), (2, A, 0)]
    # The last one came with the model that needed it no more, and its bytes count.
    (left,) = run.told(SiteFailed)
    assert (left.round_index, left.kind, left.bytes_up) == (2, "surplus", 7)


def test_update_that_is_left_when_a_run_stops_early_has_its_bytes_on_record():
    run = toy.Toy(job=toy.job({"rounds": 9, "schedule": {"minimum_sites": 1}}))
    gather, records = buffers_of_two(run), []
    for index, kind in enumerate((TaskKind.TRAIN, TaskKind.EVALUATE)):
        record = RoundRecord(
            job=run.job,
            run_id=toy.RUN,
            state=replace(toy.initial_state(run.job), round_index=index),
            cohort=toy.SITES,
            layout=toy.LAYOUT,
            clock=VirtualClock(),
            emit=run.events.append,
            kind=kind,
        )
        records.append(record)
    gather.update(records[0], np.zeros_like(records[0].state.weights_d))
    gather.evaluation(records[1])
    (left,) = [e for e in run.told(SiteFailed) if e.bytes_up]
    assert (left.site, left.kind, left.bytes_up) == (C, "surplus", 7)


def test_group_gets_the_next_model_once_all_its_sites_have_answered():
    """Also where the first answer came before the newest model."""
    pair = Buffered(size=2, max_staleness=10, groups=[frozenset({A, B})])
    first, second = (OpenTask(site, 1, 0, 0) for site in (A, B))
    view = ScheduleView(round_index=2, rounds=9, cohort=(A, B), open=[second])
    assert isinstance(pair.next(view, (), 0.0), Wait)
    ended = replace(view, open=[], buffered=lambda: 2)
    last = [Arrival(second, counts=True)]  # The first came before this model.
    assert pair.next(ended, last, 0.0) == Apply()
    lost = [Arrival(first, counts=False), Arrival(second, counts=False)]
    third = OpenTask(C, 1, 0, 0)
    assert isinstance(pair.next(replace(view, open=[third]), lost, 0.0), Wait)
    few = replace(ended, buffered=lambda: 1)  # B dropped out of the sum.
    assert pair.next(few, last, 0.0) == Apply()  # Nothing is left to wait for.
    assert pair.next(few, (), 0.0) == Send([A, B])


def way_of(**changes: Any) -> tuple[Vector, list[float]]:
    """Run buffers; how far the model went, and each update's part of a round's step."""
    run = toy.Toy(job=toy.job({"rounds": 5, **changes}))
    gather = PlainGather(
        run.job,
        grid=Pacing(),
        weight_of=lambda _: 1.0,
        combine=toy.combine_rule(run.job.aggregation),
        schedule=schedule_of(run.job),
    )
    before_d = toy.initial_state(run.job).weights_d
    state = run_federation(run.job, replace(run.parts(Pacing()), gather=gather))
    ages = [answer.staleness for answer in run.told(SiteAnswered)]
    assert {*ages} > {0}
    parts = [(1 + (age or 0)) ** -0.5 / len(toy.SITES) for age in ages]
    return state.weights_d - before_d, parts


def test_site_whose_updates_are_always_too_old_is_named_once():
    tables = {"mode": "buffered", "buffer_size": 1, "max_staleness": 1}
    run = toy.Toy(job=toy.job({"rounds": 30, "schedule": tables}))
    gather = PlainGather(
        run.job,
        grid=Pacing(),
        weight_of=lambda _: 1.0,
        combine=toy.combine_rule(run.job.aggregation),
        schedule=schedule_of(run.job),
    )
    run_federation(run.job, replace(run.parts(Pacing()), gather=gather))
    told = [event.message for event in run.told(Warned)]
    assert len(told) == 1
    assert f"site {C!r}" in told[0]
    assert "more than 1 models" in told[0]
    assert "schedule.max_staleness" in told[0]


class Relaying(ScriptedGrid):
    """A relay's sum of A and B comes after 1 s, and C answers after 3 s.

    What B says of its part is unsound, which the relay cannot see.
    """

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self.clock = clock
        self._due: list[tuple[float, Reply]] = []

    def send(
        self, tasks: Sequence[Task], *, deadline_seconds: float
    ) -> Sequence[TaskId]:
        del deadline_seconds
        ids = self.number(tasks)
        pairs = {pair[1].site: pair for pair in zip(ids, tasks, strict=True)}
        through = RelayedSum(sites=(A, B), update=toy.update(A))
        for site in (A, B, C):
            task_id, task = pairs[site]
            assert isinstance(task, RoundTask)
            message = answer(task)
            assert isinstance(message, SiteUpdate)
            if site == B:
                message = replace(message, layout_digest="0" * 64)
            due = self.clock.monotonic() + (3.0 if site == C else 1.0)
            reply = reply_to(message, task_id)
            if site != C:
                reply = replace(reply, through=through)
            self._due.append((due, reply))
        return ids

    def receive(self, timeout_seconds: float | None = None) -> deque[Reply]:
        if not self._due:
            return deque()
        now, wait = self.clock.monotonic(), timeout_seconds
        if wait is not None and self._due[0][0] > now + wait:
            self.clock.sleep(wait)
            return deque()
        due, reply = self._due.pop(0)
        self.clock.wait_until(due)
        return deque([reply])


def test_hostile_site_behind_a_relay_does_not_end_a_round_before_its_quorum():
    """The sum of its relay counts only when all of its answers are sound."""
    clock = VirtualClock()
    tables = {"rounds": 1, "evaluation": {"every": 0}, "schedule": {"minimum_sites": 1}}
    run = toy.Toy(job=toy.job(tables), clock=clock)
    gather = PlainGather(
        run.job,
        grid=Relaying(clock),
        weight_of=lambda _: 1.0,
        combine=toy.combine_rule(run.job.aggregation),
        schedule=Barrier(quorum=1, grace=0.0),
    )
    run_federation(run.job, replace(run.parts(Relaying(clock)), gather=gather))
    (finished,) = run.told(RoundFinished)
    assert (finished.status, finished.answered) == ("completed", (C,))


def test_update_of_a_buffer_counts_as_in_a_round_of_all_and_less_if_it_is_stale():
    """All updates are alike, so the length of the way shows what each counted."""
    found_d, parts = way_of(schedule={"mode": "buffered", "buffer_size": 2})
    way_d = toy.update().delta_d * np.float32(sum(parts))
    np.testing.assert_allclose(found_d, way_d, rtol=1e-5)


def test_momentum_of_buffers_is_that_of_a_round_of_all_sites():
    """Three sites, one a buffer: the velocity changes with every third model."""
    nesterov = {"name": "nesterov", "lr": 0.5, "momentum": 0.8}
    found_d, parts = way_of(
        schedule={"mode": "buffered", "buffer_size": 1},
        aggregation={"server_optimizer": nesterov},
    )
    length = 0.5 * (sum(parts) + 0.8 * sum(parts[:3]))
    way_d = toy.update().delta_d * np.float32(length)
    np.testing.assert_allclose(found_d[:6], way_d[:6], rtol=1e-5)  # No statistics.


class Freezing(Slow):
    """A site takes 2.5 s for each task, and in vain for the last one if it freezes."""

    def __init__(self, clock: VirtualClock, *, freezes: bool) -> None:
        super().__init__(clock)
        self._freezes = freezes

    def send(
        self, tasks: Sequence[Task], *, deadline_seconds: float
    ) -> Sequence[TaskId]:
        ids = super().send(tasks, deadline_seconds=deadline_seconds)
        if self._freezes and tasks[0].kind is TaskKind.EVALUATE:
            self._due = [one for one in self._due if one[1].message.site != C]
        return ids

    def receive(self, timeout_seconds: float | None = None) -> deque[Reply]:
        if self._due or timeout_seconds is None:
            return super().receive(timeout_seconds)
        self.clock.sleep(timeout_seconds)
        return deque()


@pytest.mark.parametrize(
    ("schedule", "freezes", "seconds"),
    [
        ({"grace": 2.0}, False, 2.5),
        ({"grace": 2.0}, True, 3.5),  # The quorum's second, and what C usually takes.
        ({"grace": "learnt"}, True, 3.5),
        ({"replicas": [[A, C]], "minimum_sites": 2}, True, 1.0),
    ],
)
def test_last_evaluation_waits_as_a_round_does_or_for_the_slowest_site(
    schedule: dict[str, Any], seconds: float, *, freezes: bool
):
    """It waited for a frozen site until the deadline, and for both of a pair."""
    job = toy.job({"rounds": 2, "schedule": {"minimum_sites": 2} | schedule})
    run = toy.Toy(job=job, clock=(clock := VirtualClock()))
    grid = Freezing(clock, freezes=freezes)
    gather = PlainGather(
        job,
        grid=grid,
        weight_of=lambda _: 1.0,
        combine=toy.combine_rule(job.aggregation),
        schedule=schedule_of(job),
    )
    run_federation(job, replace(run.parts(grid), gather=gather))
    end = run.told(RoundFinished)[-1].at
    # The grid waits for half a minute before it sends anything.
    assert clock.now() - end - 30.0 == pytest.approx(seconds)
    evaluated = run.told(ModelEvaluated)[-1]
    assert {*evaluated.sites} == ({A, B} if freezes else {A, B, C})


def test_last_evaluation_after_samples_waits_for_as_many_as_may_fail_in_a_round():
    """All sites are asked, so a sample's quorum would end it early."""
    samples = {"sites_per_round": 2, "minimum_sites": 1, "grace": 0.5}
    job = toy.job({"schedule": samples})
    assert evaluation_schedule(job, 3, 9.0) == Barrier(quorum=2, grace=0.5, least=9.0)
