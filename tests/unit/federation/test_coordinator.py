"""The round loop, walked through with toy sites."""

import gc
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support import toy
from support.scripted_grid import ScriptedGrid, reply_to

from cloud_adapters.local.faults import FaultInjector
from federation.clock import VirtualClock
from federation.errors import (
    BudgetExceeded,
    CorruptObject,
    InvalidUpdate,
    QuorumNotMet,
    RunConflict,
    StoreUnavailable,
)
from federation.events import (
    CheckpointSaved,
    ModelEvaluated,
    RoundFinished,
    RoundStarted,
    RunFinished,
    RunStarted,
    SiteAnswered,
    SiteFailed,
    SitesLeftOut,
    Warned,
)
from federation.ids import SiteId, TaskId
from federation.job.spec import JobSpec
from federation.messages import (
    FailureKind,
    LeaveReason,
    LedgerAnchor,
    PrivacySpent,
    Reply,
    RoundTask,
    SiteEvaluation,
    SiteMessage,
    SiteUpdate,
    Task,
    TaskKind,
)
from federation.protocols import (
    OptimizerState,
    RunProgress,
    RunState,
    ServerOptimizer,
    WeightedUpdate,
)
from federation.rounds.coordinator import run_federation
from federation.vectors import Vector
from federation.wire import frame as wire

C, A, B = toy.SITES
OPTIMIZERS = ["average", "momentum", "nesterov", "adagrad", "adam", "yogi"]


def bits(state: RunState) -> tuple[object, ...]:
    """Everything in a state, to the last bit."""
    return (
        (state.round_index, state.rounds_completed, state.lost_in_a_row),
        (state.weights_d.tobytes(), state.integers_m.tobytes()),
        {name: vector_d.tobytes() for name, vector_d in state.optimizer.items()},
    )


def same(one: RunState, other: RunState) -> bool:
    """Whether two states are equal to the last bit."""
    return bits(one) == bits(other)


def failing(*cases: tuple[str, int]) -> dict[str, Any]:
    """A fault under which sites fail in given rounds."""

    def fail(message: SiteMessage) -> SiteMessage:
        return toy.failure(message.site, round_index=message.round_index)

    return {"fault": toy.faults(*((site, r, fail) for site, r in cases))}


def changing(site: str, round_index: int, **fields: Any) -> dict[str, Any]:
    """A fault under which a site's update has other fields."""

    def change(message: SiteMessage) -> SiteMessage:
        return replace(message, **fields)  # type: ignore[arg-type]

    return {"fault": toy.faults((site, round_index, change))}


def quorum(minimum_sites: int, **schedule: int) -> dict[str, Any]:
    """Keys of a job with a quorum."""
    return {"schedule": {"minimum_sites": minimum_sites, **schedule}}


def by_hand(job: JobSpec) -> Vector:
    """FedAvg over all sites in ten lines of float64."""
    trainers = {site: toy.QuadraticTrainer(site, job) for site in toy.SITES}
    theta_d = np.zeros(toy.LAYOUT.size, dtype=np.float32)
    for round_index in range(1, job.rounds + 1):
        total_d, total = np.zeros(toy.LAYOUT.size), 0
        for trainer in trainers.values():
            integers_m = np.zeros(2, dtype=np.int64)
            result = trainer.fit(theta_d, integers_m, round_index=round_index)
            total_d += result.num_examples * (result.weights_d - theta_d)
            total += result.num_examples
        theta_d = (theta_d + total_d / total).astype(np.float32)
    return theta_d


# A run without misfortune.


def test_run_is_fedavg():
    """The same as by hand."""
    job = toy.job({"rounds": 5})
    state = toy.Toy(job=job).run()
    np.testing.assert_allclose(state.weights_d, by_hand(job), rtol=1e-5)
    assert (state.round_index, state.rounds_completed, state.lost_in_a_row) == (5, 5, 0)


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_result_does_not_depend_on_threads(workers: int, optimizer: str):
    """To the last bit."""
    job = toy.job({"aggregation": {"server_optimizer": {"name": optimizer}}})
    one, many = toy.Toy(job=job).run(), toy.Toy(job=job, workers=workers).run()
    assert same(one, many)


def test_last_state_is_the_newest_checkpoint():
    """What is returned is durable."""
    run = toy.Toy(job=toy.job())
    state = run.run()
    saved = run.checkpoints().load_latest()
    assert saved is not None
    assert same(state, saved)


def test_integers_follow_their_roles():
    """The largest batch count of any site; the server's version."""
    job = toy.job()
    state = toy.Toy(job=job).run()
    most = max(toy.QuadraticTrainer(s, job)._num_examples for s in toy.SITES)
    assert state.integers_m.tolist() == [3 * 2 * most, 42]


def test_events_are_in_order():
    """A run, its rounds, its sites."""
    run = toy.Toy(job=toy.job({"rounds": 2}))
    run.run()
    one_round = [
        RoundStarted,
        *[SiteAnswered] * 3,
        ModelEvaluated,
        RoundFinished,
        CheckpointSaved,
    ]
    assert [type(event) for event in run.events] == [
        RunStarted,
        CheckpointSaved,
        *one_round,
        *one_round,
        ModelEvaluated,
        RunFinished,
    ]


def test_bytes_are_exact():
    """Of every site, of the round and of the last evaluation."""
    run = toy.Toy(job=toy.job({"rounds": 1}))
    run.run()
    down = wire.encoded_size(toy.task(C, evaluate=True))
    (finished,) = run.told(RoundFinished)
    answered = run.told(SiteAnswered)
    assert {event.bytes_down for event in answered} == {down}
    assert finished.bytes_down == 3 * down
    assert finished.bytes_up == sum(event.bytes_up for event in answered)
    first, last = run.told(ModelEvaluated)
    evaluate = toy.task(C, kind=TaskKind.EVALUATE, round_index=2, evaluate=True)
    assert (first.bytes_down, first.bytes_up) == ((0,) * 3, (0,) * 3)
    assert last.bytes_down == (wire.encoded_size(evaluate),) * 3
    assert all(up > 0 for up in last.bytes_up)


def test_bytes_of_duplicates_and_failures_are_counted():
    """What was sent twice was paid for twice; the task was sent once."""
    job = toy.job(
        quorum(2)
        | {
            "rounds": 1,
            "simulation": {
                "faults": [
                    {"site": "a", "kind": "duplicate"},
                    {"site": "b", "kind": "nan"},
                ]
            },
        }
    )
    faults = FaultInjector(job.simulation.faults, clock=VirtualClock(), seed=0)
    run = toy.Toy(job=job, fault=faults)
    run.run()
    (finished,) = run.told(RoundFinished)
    reports = [*run.told(SiteAnswered), *run.told(SiteFailed)]
    assert len(reports) == 4
    assert finished.bytes_down == 3 * wire.encoded_size(toy.task(C, evaluate=True))
    assert finished.bytes_down == sum(report.bytes_down for report in reports)
    assert finished.bytes_up == sum(report.bytes_up for report in reports)
    assert finished.failed == (("duplicate", 1), ("not_finite", 1))


def test_tasks_cannot_be_written_to():
    """A site in the same process must not train the server's own weights."""
    seen: list[RoundTask] = []

    def spy(
        task: RoundTask, answer: Callable[[], SiteMessage]
    ) -> Sequence[SiteMessage]:
        seen.append(task)
        return (answer(),)

    toy.Toy(job=toy.job(), fault=spy).run()
    assert len(seen) == 4 * 3
    assert not any(task.weights_d.flags.writeable for task in seen)
    assert not any(task.integers_m.flags.writeable for task in seen)


def test_weights_of_the_cohort():
    """Each site counts what the job says."""
    job = toy.job({"rounds": 1})
    run = toy.Toy(job=job)
    run.run()
    weights = {event.site: event.weight for event in run.told(SiteAnswered)}
    expected = {s: toy.QuadraticTrainer(s, job)._num_examples for s in toy.SITES}
    assert weights == expected


# Evaluation.


@pytest.mark.parametrize(
    ("every", "expected"),
    [(0, []), (1, [0, 1, 2, 3, 4, 5]), (2, [0, 2, 4, 5]), (5, [0, 5]), (9, [0, 5])],
)
def test_evaluation_every_so_many_rounds(every: int, expected: list[int]):
    """And after the last."""
    run = toy.Toy(job=toy.job({"rounds": 5, "evaluation": {"every": every}}))
    run.run()
    assert [event.round_index for event in run.told(ModelEvaluated)] == expected


def test_dynamic_weights_evaluate_after_training():
    """They compare before and after."""
    job = toy.job({"rounds": 1, "aggregation": {"weights": "dynamic"}})
    run = toy.Toy(job=job)
    run.run()
    assert len(run.told(SiteAnswered)) == 3
    assert run.told(SiteFailed) == []


# Misfortune.


def test_failed_sites_do_not_count():
    """The round continues with the others, and their weights alone."""
    job = toy.job(quorum(2) | {"rounds": 1})
    run = toy.Toy(job=job, **failing((A, 1)))
    with_fault = run.run()
    others = toy.job({"rounds": 1}, sites=[C, B])
    assert np.array_equal(with_fault.weights_d, toy.Toy(job=others).run().weights_d)
    (finished,) = run.told(RoundFinished)
    assert (finished.asked, finished.answered) == (toy.SITES, (C, B))
    assert (finished.status, finished.failed) == ("completed", (("crashed", 1),))
    (failed,) = run.told(SiteFailed)
    assert (failed.site, failed.message) == (A, "no disk")


def test_update_of_an_unbelievable_weight_is_refused():
    """It was sound until it was weighed, and does not count for the quorum."""
    job = toy.job(quorum(2) | {"rounds": 1})
    run = toy.Toy(job=job, **changing(A, 1, num_examples=0))
    run.run()
    (finished,) = run.told(RoundFinished)
    assert (finished.answered, finished.failed) == ((C, B), (("invalid", 1),))
    assert "claims 0 training examples" in run.told(SiteFailed)[0].message
    first = run.told(ModelEvaluated)[0]
    assert first.sites == (C, B)


def test_lost_round_leaves_everything_as_it_was():
    """It counts as one of the planned rounds."""
    job = toy.job({"aggregation": {"server_optimizer": {"name": "adam"}}})
    run = toy.Toy(job=job, **failing((A, 3)))
    state = run.run()
    shorter = toy.Toy(job=replace(job, rounds=2)).run()
    assert same(state, replace(shorter, round_index=3, lost_in_a_row=1))
    assert [e.status for e in run.told(RoundFinished)] == ["completed"] * 2 + ["lost"]
    lost = run.told(RoundFinished)[-1]
    assert (lost.update_norm, lost.answered) == (None, (C, B))
    assert "combine" not in [phase.name for phase in lost.phases]


@pytest.mark.parametrize("rule", ["trimmed_mean", "median", "krum", "multi_krum"])
def test_lost_round_under_a_robust_rule(rule: str):
    """The quorum is checked before the rule sees too few updates."""
    aggregation = {"combine": rule, "weights": "uniform", "byzantine_sites": 1}
    job = toy.job({"aggregation": aggregation}, sites=(A, B, C, "d", "e"))
    run = toy.Toy(job=job, **failing((A, 2)))
    assert run.run().rounds_completed == 2


@pytest.mark.parametrize("name", ["momentum", "nesterov", "adagrad", "adam", "yogi"])
def test_buffers_are_averaged_and_never_stepped(name: str):
    """One round moves running statistics as plain averaging does; weights not."""
    averaged = toy.Toy(job=toy.job({"rounds": 1})).run()
    optimizer = {"server_optimizer": {"name": name, "lr": 0.1}}
    stepped = toy.Toy(job=toy.job({"rounds": 1, "aggregation": optimizer})).run()
    (weight, mean), (other_weight, other_mean) = (
        [view for _, view in toy.LAYOUT.float_views(state.weights_d)]
        for state in (averaged, stepped)
    )
    assert np.array_equal(mean, other_mean)
    assert not np.allclose(weight, other_weight)


def test_completed_round_forgets_the_lost_ones():
    """Only rounds in a row stop a run."""
    lost = [(A, r) for r in (1, 2, 4, 5, 7)]
    run = toy.Toy(job=toy.job({"rounds": 8}), **failing(*lost))
    state = run.run()
    assert (state.rounds_completed, state.lost_in_a_row) == (3, 0)


def test_too_many_lost_rounds_stop_the_run():
    """With the last checkpoint intact."""
    job = toy.job({"rounds": 9})
    run = toy.Toy(job=job, **failing((A, 2), (A, 3), (A, 4)))
    with pytest.raises(QuorumNotMet, match=r"3 rounds .*no result") as caught:
        run.run()
    (finished,) = run.told(RunFinished)
    assert (finished.status, finished.message) == ("failed", str(caught.value))
    assert f"{A}: " in finished.message  # What the site said last.
    assert "with --resume from round 5 of 9, or with --extend" in finished.message
    assert (finished.last_round, finished.rounds_completed) == (4, 1)
    saved = run.checkpoints().load_latest()
    assert saved is not None
    one = toy.Toy(job=replace(job, rounds=1)).run()
    assert np.array_equal(saved.weights_d, one.weights_d)


def test_advice_of_the_engine_is_in_the_error_and_in_the_last_event():
    """Who was revoked, for instance, the round loop does not know."""
    run = toy.Toy(job=toy.job({"rounds": 9}), **failing((A, 2), (A, 3), (A, 4)))
    with pytest.raises(QuorumNotMet) as caught:
        run.run(advised=lambda error: QuorumNotMet(error.fault, "start a new run"))
    (finished,) = run.told(RunFinished)
    assert finished.message == str(caught.value)
    assert finished.message.endswith("; start a new run")


def test_stopped_by_lost_rounds_and_resumed():
    """The sites are back, and the run continues."""
    run = toy.Toy(job=toy.job({"rounds": 6}), **failing((A, 2), (A, 3), (A, 4)))
    with pytest.raises(QuorumNotMet):
        run.run()
    state = run.run()
    assert (state.round_index, state.rounds_completed, state.lost_in_a_row) == (6, 3, 0)
    assert run.told(RunStarted)[1].first_round == 5


def test_lost_rounds_at_the_end_leave_none_to_resume():
    """Only an extension adds some."""
    run = toy.Toy(job=toy.job({"rounds": 4}), **failing((A, 2), (A, 3), (A, 4)))
    with pytest.raises(QuorumNotMet, match=r"No round is left: .* with --extend"):
        run.run()


@pytest.mark.parametrize("rounds", [4, 9])
def test_no_extension_is_advised_that_would_be_refused(rounds: int):
    """A schedule that ends with the last round allows none."""
    job = toy.job({"rounds": rounds, "training": {"learning_rate": {"name": "cosine"}}})
    run = toy.Toy(job=job, **failing((A, 2), (A, 3), (A, 4)))
    with pytest.raises(QuorumNotMet) as caught:
        run.run()
    assert "--extend" not in str(caught.value)
    assert ("--resume" in str(caught.value)) is (rounds == 9)
    assert ("model.weights" in str(caught.value)) is (rounds == 4)


def test_run_that_another_coordinator_goes_on_with_has_not_failed():
    """Its record says that this attempt has ended, and nothing of the run's end."""
    run = toy.Toy(job=toy.job({"rounds": 6}), **failing((A, 2), (A, 3), (A, 4)))
    with pytest.raises(QuorumNotMet):
        run.run(goes_on=lambda error: isinstance(error, QuorumNotMet))
    assert [event.status for event in run.told(RunFinished)] == ["interrupted"]


def test_run_without_one_completed_round_fails():
    """However few rounds it had."""
    run = toy.Toy(job=toy.job({"rounds": 2}), **failing((A, 1), (A, 2)))
    with pytest.raises(QuorumNotMet, match="none of the 2 rounds had a result"):
        run.run()
    (finished,) = run.told(RunFinished)
    assert finished.status == "failed"
    assert f"; {A}: " in finished.message  # Its cause.


# Results that are not finite.


def huge(value: float) -> Vector:
    """An update that no model survives, and every single value of it finite."""
    return np.full(toy.LAYOUT.size, value, dtype=np.float32)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_result_that_is_not_finite_is_discarded(optimizer: str):
    """Weights and the optimiser's state are those of the round before."""
    server = {"server_optimizer": {"name": optimizer, "lr": 10.0}}
    job = toy.job({"rounds": 2, "aggregation": server})

    def blow_up(message: SiteMessage) -> SiteMessage:
        return replace(message, delta_d=huge(3e38))  # type: ignore[arg-type]

    run = toy.Toy(job=job, fault=toy.faults(*((s, 2, blow_up) for s in toy.SITES)))
    state = run.run()
    one = toy.Toy(job=replace(job, rounds=1)).run()
    assert same(state, replace(one, round_index=2, lost_in_a_row=1))
    last = run.told(RoundFinished)[-1]
    assert (last.status, last.update_norm) == ("discarded", None)
    assert last.answered == toy.SITES


def test_infinite_second_moment_is_discarded():
    """The weights would stay finite, and never move again."""
    job = toy.job({"rounds": 3, "aggregation": {"server_optimizer": {"name": "adam"}}})

    def blow_up(message: SiteMessage) -> SiteMessage:
        return replace(message, delta_d=huge(1e30))  # type: ignore[arg-type]

    run = toy.Toy(job=job, fault=toy.faults(*((s, 2, blow_up) for s in toy.SITES)))
    state = run.run()
    statuses = [event.status for event in run.told(RoundFinished)]
    assert statuses == ["completed", "discarded", "completed"]
    assert np.isfinite(state.optimizer["second_moment"]).all()


def test_run_after_a_discarded_round_is_that_of_a_resumed_one():
    """The memory that the round loop reuses holds nothing of the lost round."""
    job = toy.job({"rounds": 4, "aggregation": {"server_optimizer": {"name": "yogi"}}})

    def blow_up(message: SiteMessage) -> SiteMessage:
        return replace(message, delta_d=huge(3e38))  # type: ignore[arg-type]

    fault = toy.faults(*((s, 2, blow_up) for s in toy.SITES))
    whole = toy.Toy(job=job, fault=fault).run()
    pieces = toy.Toy(job=job, fault=fault)
    assert same(whole, in_pieces(pieces))


def test_damaged_checkpoint_when_a_round_is_discarded():
    """An older state would be a wrong one: the run stops and can be resumed."""
    run = unsound_second_round()

    def damage() -> None:
        run.store.delete("checkpoints/round-000001.json")

    with pytest.raises(CorruptObject, match="checkpoint of round 1"):
        run.run(optimizer=breaking(run, damage))


def test_other_coordinator_when_a_round_is_discarded():
    """Its state is not taken over."""
    run = unsound_second_round()

    def overtake() -> None:
        state = run.checkpoints().load_latest()
        assert state is not None
        run.checkpoints().save(replace(state, round_index=2))

    with pytest.raises(RunConflict, match="round 2 was saved by another"):
        run.run(optimizer=breaking(run, overtake))


def unsound_second_round() -> toy.Toy:
    """A run with a server optimiser that has state."""
    adam = {"server_optimizer": {"name": "adam"}}
    return toy.Toy(job=toy.job({"aggregation": adam}))


def breaking(run: toy.Toy, then: Callable[[], None]) -> ServerOptimizer:
    """An optimiser whose second step is not finite, while something else happens."""
    sound = run.parts(grid=None).optimizer  # type: ignore[arg-type]
    steps = [0]

    def step(state_c: OptimizerState, update_c: Vector) -> None:
        steps[0] += 1  # The model is one chunk.
        sound.step(state_c, update_c)
        if steps[0] == 2:
            then()
            update_c.fill(np.nan)

    return ServerOptimizer(init=sound.init, step=step)


# Stopping, resuming, conflicts.


def in_pieces(run: toy.Toy) -> RunState:
    """Stop after every round and resume."""
    while True:
        before = len(run.told(RoundFinished))
        run.stop_requested = lambda before=before: len(run.told(RoundFinished)) > before
        state = run.run()
        if state.round_index >= run.job.rounds:
            return state


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_resumed_at_every_round_is_the_same_run(optimizer: str):
    """Bit by bit, lost rounds and sampled cohorts included."""
    job = toy.job(
        {
            "rounds": 6,
            "aggregation": {"server_optimizer": {"name": optimizer}},
            "schedule": {"sites_per_round": 2, "minimum_sites": 2},
        }
    )
    faults = failing((A, 2), (B, 3), (C, 2))
    assert same(toy.Toy(job=job, **faults).run(), in_pieces(toy.Toy(job=job, **faults)))


def test_stop_request_ends_the_run_after_its_round():
    """With a checkpoint and without an evaluation of its own."""
    run = toy.Toy(job=toy.job())
    run.stop_requested = lambda: bool(run.told(RoundFinished))
    state = run.run()
    (finished,) = run.told(RunFinished)
    assert (state.round_index, finished.status, finished.message) == (1, "stopped", "")
    assert [event.round_index for event in run.told(ModelEvaluated)] == [0]


def test_completed_run_is_only_evaluated_again():
    """No round is run twice."""
    run = toy.Toy(job=toy.job())
    first = run.run()
    run.events.clear()
    assert same(first, run.run())
    assert [type(event) for event in run.events] == [
        RunStarted,
        ModelEvaluated,
        RunFinished,
    ]
    assert run.told(RunStarted)[0].first_round == 4


def test_two_coordinators_begin_the_same_run():
    """The second is told before it asks anybody."""
    run = toy.Toy(job=toy.job())

    def begin() -> RunState:
        run.checkpoints().save(toy.initial_state(run.job))
        return toy.initial_state(run.job)

    with pytest.raises(RunConflict):
        run.run(initial_state=begin)
    assert [type(event) for event in run.events] == [RunStarted, RunFinished]
    assert run.told(RunFinished)[0].status == "failed"


def test_store_that_fails_ends_the_run():
    """With its own words."""
    run = toy.Toy(job=toy.job())

    def fail(state: RunProgress, now: float) -> Sequence[SiteId]:
        raise StoreUnavailable("the disk is full")

    with pytest.raises(StoreUnavailable):
        run.run(draw_cohort=fail)
    assert run.told(RunFinished)[0].message == "the disk is full"


def test_keyboard_interrupt_is_a_stop():
    """In the middle of a round, which is run again."""
    run = toy.Toy(job=toy.job())
    calls = [0]

    def interrupt(update: SiteUpdate) -> float:
        calls[0] += 1
        if calls[0] == 5:
            raise KeyboardInterrupt
        return 1.0

    with pytest.raises(KeyboardInterrupt):
        run.run(weight_of=interrupt)
    (finished,) = run.told(RunFinished)
    assert (finished.status, finished.last_round) == ("stopped", 1)
    uninterrupted = toy.Toy(job=run.job).run(weight_of=lambda _update: 1.0)
    assert same(run.run(weight_of=lambda _update: 1.0), uninterrupted)


# Cohorts.


def test_only_the_cohort_is_asked():
    """And all sites evaluate the final model."""
    job = toy.job({"rounds": 6, "schedule": {"sites_per_round": 2}})
    run = toy.Toy(job=job)
    run.run()
    cohorts = [event.cohort for event in run.told(RoundStarted)]
    assert {len(cohort) for cohort in cohorts} == {2}
    assert len(set(cohorts)) > 1
    assert [e.asked for e in run.told(RoundFinished)] == cohorts
    answered = [(e.round_index, e.site) for e in run.told(SiteAnswered)]
    asked = [(r, site) for r, cohort in enumerate(cohorts, 1) for site in cohort]
    assert answered == asked
    assert run.told(ModelEvaluated)[-1].sites == toy.SITES


# Memory and strange grids.


class LoneUpdates(ScriptedGrid):
    """A grid that makes an update when it is asked for the next, and watches them.

    Attributes:
        keeps: Whether it continues using them, so that they come read-only.
        alive: Vectors of this round and of those before that are there, at each step.
    """

    def __init__(self, *, keeps: bool = False) -> None:
        """Begin with no update."""
        super().__init__()
        self.keeps = keeps
        self.alive: list[tuple[int, int]] = []
        self._made: list[tuple[int, weakref.ref[Any]]] = []

    def play(self, tasks: Sequence[tuple[TaskId, Task]]) -> Iterable[Reply]:
        """Answer, and note which updates are still there."""
        for task_id, task in tasks:
            self._note()
            yield self._reply(task, task_id)

    def send(
        self, tasks: Sequence[Task], *, deadline_seconds: float
    ) -> Sequence[TaskId]:
        """Look which ones of the rounds before are still there."""
        self._note()
        return super().send(tasks, deadline_seconds=deadline_seconds)

    def _note(self) -> None:
        there = [number for number, vector in self._made if vector() is not None]
        last = self._made[-1][0] if self._made else 0
        self.alive.append((there.count(last), len(there) - there.count(last)))

    def _reply(self, task: Task, task_id: TaskId) -> Reply:
        assert isinstance(task, RoundTask)
        message: SiteMessage = toy.evaluation(task.site, round_index=task.round_index)
        if task.kind is TaskKind.TRAIN:
            update = toy.update(task.site, round_index=task.round_index)
            if task.site == B:
                update = replace(update, num_examples=0)  # Refused when weighed.
            update.delta_d.flags.writeable = not self.keeps
            self._made.append((task.round_index, weakref.ref(update.delta_d)))
            message = update
        return reply_to(message, task_id)


@pytest.mark.parametrize(("keeps", "mean", "model"), [(True, 0, 0), (False, 1, 1)])
def test_one_update_is_alive_at_a_time(*, keeps: bool, mean: int, model: int):
    """Each is let go before the next is waited for; without the collector's help.

    The mean is in an update's memory, or in the aggregator's own; so does the model.
    """
    run = toy.Toy(job=toy.job(quorum(2)))
    grid = LoneUpdates(keeps=keeps)
    gc.disable()
    try:
        run_federation(run.job, run.parts(grid))
    finally:
        gc.enable()
    assert tuple(map(max, zip(*grid.alive, strict=True))) == (mean, model)
    assert len(grid.alive) == 4 * 4


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("rule", ["mean", "median"])
def test_bad_last_value_leaves_the_mean_as_it_was(rule: str, *, keeps: bool):
    """Whether updates are folded in their own memory or not; the site is named."""
    aggregation = {"combine": rule, "weights": "uniform"}
    job = toy.job(quorum(2) | {"rounds": 2, "aggregation": aggregation})

    def weights(delta_d: Vector | None) -> bytes:
        """Train; in round 1 a site sends this, or nothing that counts."""

        def spoilt(_task: Task, answer: Callable[[], SiteMessage]) -> list[SiteMessage]:
            message = answer()
            if isinstance(message, SiteUpdate):
                message.delta_d.flags.writeable = not keeps
                if (message.site, message.round_index) == (A, 1):
                    if delta_d is None:
                        return [toy.failure(A, round_index=1)]
                    message = replace(message, delta_d=delta_d)
            return [message]

        run = toy.Toy(job=job, fault=spoilt)
        state = run.run()
        (failed,) = run.told(SiteFailed)
        assert failed.site == A
        if delta_d is not None:
            assert failed.kind is FailureKind.NOT_FINITE
            assert failed.message == "sent NaN or infinite values"
        return state.weights_d.tobytes()

    bad_d = np.ones(toy.LAYOUT.size, np.float32)
    bad_d[-1] = np.inf
    assert weights(bad_d) == weights(None)


def test_combine_rule_gets_updates_and_may_refuse_them():
    """As they land, with their weights; what it refuses does not count."""
    job = toy.job(quorum(2) | {"rounds": 1})
    run = toy.Toy(job=job, **changing(B, 1, delta_d=huge(1.0)[:-1]))
    seen: list[WeightedUpdate] = []

    def combine(updates: Iterable[WeightedUpdate], out_d: Vector) -> Vector:
        for update in updates:
            seen.append(update)
            if update.site == A:
                assert update.refuse is not None
                update.refuse()
        out_d.fill(0)
        return out_d

    with pytest.raises(QuorumNotMet):
        run.run(combine=combine, weight_of=lambda _update: 2.5)
    assert [(u.site, u.weight) for u in seen] == [(C, 2.5), (A, 2.5)]
    kinds = {event.site: event.kind for event in run.told(SiteFailed)}
    assert kinds == {A: FailureKind.NOT_FINITE, B: FailureKind.INVALID}
    assert [event.site for event in run.told(SiteAnswered)] == [C]


def test_refused_weight_names_its_reason():
    """Whatever the weighting objects to."""
    run = toy.Toy(job=toy.job(quorum(2) | {"rounds": 1}))

    def weight_of(update: SiteUpdate) -> float:
        if update.site == A:
            raise InvalidUpdate("too good to be true")
        return 1.0

    run.run(weight_of=weight_of)
    (failed,) = run.told(SiteFailed)
    assert (failed.kind, failed.message) == (FailureKind.INVALID, "too good to be true")


# The end of a privacy budget.


def spent_from(first_round: int, *sites: str) -> dict[str, Any]:
    """A fault under which sites have no budget left from some round on."""

    def refuse(message: SiteMessage) -> SiteMessage:
        if message.round_index < first_round or isinstance(message, SiteEvaluation):
            return message
        return toy.failure(
            message.site,
            FailureKind.BUDGET,
            round_index=message.round_index,
            message="epsilon 8.1 is beyond the cap of 8",
        )

    rounds = range(1, 10)
    return {"fault": toy.faults(*((site, r, refuse) for site in sites for r in rounds))}


def test_app_that_does_not_evaluate_is_not_asked_for_the_last_model():
    """Its answer would be an error, or the deadline."""
    sites = [{"name": C}, {"name": A, "flower_app": {"evaluate": False}}, {"name": B}]
    run = toy.Toy(job=toy.job({"sites": sites}))
    run.run()
    last = run.told(ModelEvaluated)[-1]
    assert last.round_index == 3
    assert sorted(last.sites) == sorted([B, C])


def test_run_ends_where_the_budget_does():
    """With the model of the round before, evaluated, and as no failure."""
    run = toy.Toy(job=toy.job({"rounds": 5}), **spent_from(3, A))
    state = run.run()
    assert (state.round_index, state.rounds_completed) == (2, 2)
    assert same(state, run.checkpoints().load_latest())
    finished = run.events[-1]
    assert isinstance(finished, RunFinished)
    assert finished.status == "exhausted"
    assert finished.message == (
        f"round 3 is beyond the privacy budget of {A}: epsilon 8.1 is beyond the cap "
        "of 8"
    )
    evaluated = [event for event in run.events if isinstance(event, ModelEvaluated)]
    assert evaluated[-1].round_index == 2


def test_anchors_of_sites_that_miss_a_round_are_kept():
    """Their ledgers must still hold what they charged for earlier rounds."""

    def charge(message: SiteMessage) -> SiteMessage:
        if not isinstance(message, SiteUpdate):
            return message
        anchor = LedgerAnchor(train=message.round_index)
        return replace(
            message,
            spent=PrivacySpent(
                epsilon=0.0, delta=1e-5, held_out_epsilon=None, anchor=anchor
            ),
        )

    def fail(message: SiteMessage) -> SiteMessage:
        return toy.failure(message.site, round_index=message.round_index)

    cases = [(site, r, charge) for site in toy.SITES for r in (1, 2, 3)]
    missed = [(A, 2, fail), (A, 3, fail), (B, 3, fail)]
    faults = {(site, r): fault for site, r, fault in [*cases, *missed]}
    fault = toy.faults(*((site, r, each) for (site, r), each in faults.items()))
    run = toy.Toy(job=toy.job(quorum(1)), fault=fault)
    expected = {A: 1, B: 2, C: 3}
    state = run.run()
    assert {site: each.train for site, each in state.anchors.items()} == expected
    saved = run.checkpoints().load_latest()
    assert saved is not None
    assert saved.anchors == state.anchors


def test_others_go_on_without_a_site_that_has_spent_its_budget():
    """If the quorum allows."""
    job = toy.job({"rounds": 5} | quorum(2))
    state = toy.Toy(job=job, **spent_from(3, A)).run()
    assert (state.round_index, state.rounds_completed) == (5, 5)


def test_budget_for_no_round_at_all_is_an_error():
    """There is no model to show."""
    run = toy.Toy(job=toy.job(), **spent_from(1, A, B))
    with pytest.raises(BudgetExceeded, match=r"round 1 is beyond .* \(and 1 more\)"):
        run.run()
    assert run.events[-1].status == "failed"


# A site that leaves with its answer, and without which there is no quorum.


class Replaced:
    """The machine of site A: it says good-bye with round 2, and ends soon after it.

    Attributes:
        back_seconds: After so long another one is there; None for never.
    """

    def __init__(self, back_seconds: float | None) -> None:
        self.run = toy.Toy(job=toy.job({"rounds": 4, **quorum(3)}), fault=self.answer)
        self.left: float | None = None
        self.back_seconds = back_seconds

    def is_back(self) -> bool:
        now = self.run.clock.monotonic()
        waited = None if self.left is None else now - self.left
        return None not in {waited, self.back_seconds} and waited >= self.back_seconds

    def answer(
        self, task: RoundTask, answer: Callable[[], SiteMessage]
    ) -> Sequence[SiteMessage]:
        if task.site != A or task.round_index < 2:
            return (answer(),)
        if self.left is None:
            self.left = self.run.clock.monotonic()
            return (replace(answer(), leaving=LeaveReason.SPOT),)
        if self.is_back():
            return (answer(),)
        gone = toy.failure(A, round_index=task.round_index)
        return (replace(gone, kind=FailureKind.DISCONNECTED),)

    def returned(self, sites: Collection[SiteId], _: int) -> Collection[SiteId]:
        return [site for site in sites if self.is_back()]

    def to_the_end(self, **changes: Any) -> RunState:
        return self.run.run(returned=self.returned, waits=True, **changes)

    def statuses(self) -> list[str]:
        return [event.status for event in self.run.told(RoundFinished)]

    def away(self) -> list[tuple[int, tuple[str, ...], tuple[str, ...]]]:
        found = self.run.told(SitesLeftOut)
        return [(event.round_index, event.sites, event.standings) for event in found]


def test_a_round_begins_when_the_site_that_it_needs_is_back():
    """Not while the process that said good-bye is still connected; no round is lost."""
    machine = Replaced(back_seconds=90.0)
    state = machine.to_the_end()
    assert (state.rounds_completed, machine.statuses()) == (4, ["completed"] * 4)
    assert machine.away() == [(2, (A,), ("leaving",)), (3, (), ())]
    assert machine.run.told(SitesLeftOut)[-1].returned == (A,)
    (warned,) = [w.message for w in machine.run.told(Warned)]
    assert f"round 3 needs sites that have left: waiting for {A} (spot)" in warned
    begun = {event.round_index: event.at for event in machine.run.told(RoundStarted)}
    assert begun[3] - begun[2] == pytest.approx(90.0, abs=1.5)


def test_a_site_that_does_not_come_back_stays_away():
    """It is waited for as long as for an answer, then asked as if it were silent."""
    machine = Replaced(back_seconds=None)
    deadline = machine.run.job.schedule.round_deadline_seconds
    machine.to_the_end()
    assert machine.statuses() == ["completed", "completed", "lost", "lost"]
    assert machine.away() == [(2, (A,), ("leaving",))]
    begun = [event.at for event in machine.run.told(RoundStarted)]
    assert begun[2] - begun[1] == pytest.approx(deadline, abs=1.5)


def test_a_run_that_waits_for_a_site_can_be_stopped():
    machine = Replaced(back_seconds=None)
    clock = machine.run.clock
    stop = lambda: machine.left is not None and clock.monotonic() >= 5.0  # noqa: E731
    state = machine.to_the_end(stop_requested=stop)
    assert (state.round_index, machine.statuses()) == (2, ["completed"] * 2)
    assert machine.run.told(RunFinished)[-1].status == "stopped"
    assert clock.monotonic() < 10.0


def test_a_site_that_is_not_needed_is_not_waited_for():
    machine = Replaced(back_seconds=90.0)
    machine.run.job = toy.job({"rounds": 4, **quorum(2)})
    machine.to_the_end()
    assert machine.statuses() == ["completed"] * 4
    assert [{*event.asked} for event in machine.run.told(RoundFinished)] == [
        {*toy.SITES},
        {*toy.SITES},
        {B, C},
        {B, C},
    ]
    assert machine.run.clock.monotonic() < 90.0
