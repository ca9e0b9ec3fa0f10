"""The round loop: every implementation is an argument, nothing here does I/O.

FedAvg with server optimiser (McMahan et al. 2017, arXiv:1602.05629, Algorithm 1;
Reddi et al. 2021, arXiv:2003.00295, Algorithm 1):

    theta = initial weights, or the newest checkpoint
    for each round t:
        S       = sample the cohort
        Delta_i = train_i(theta) - theta, for i in S, as answers land
        Delta   = combine over i of Delta_i: sum_i w_i Delta_i / sum_i w_i, or robust
        theta   = theta + step(Delta), by the server optimiser
        save theta

A round without quorum, or whose result is not finite, leaves theta as it was and
counts as one of the planned rounds. A round that too few sites have the privacy
budget for is not counted, and ends the run.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from federation import events
from federation.compression.codec import BeyondCodec
from federation.errors import (
    BudgetExceeded,
    CorruptObject,
    FederationError,
    QuorumNotMet,
    RunConflict,
)
from federation.ids import RunId, SiteId
from federation.job.evaluation_job import evaluates_only
from federation.job.job_extension import may_have_more_rounds
from federation.job.spec import JobSpec
from federation.job.statistics_checks import planned_rounds
from federation.members import Members, Standing
from federation.messages import LedgerAnchor, TaskKind, join_anchors
from federation.protocols import (
    Checkpoints,
    Clock,
    RunProgress,
    RunState,
    ServerOptimizer,
)
from federation.resources import CLOCK, UsageMeter
from federation.rounds.gather import Gather
from federation.rounds.guest import ServerGuest
from federation.rounds.round_record import RoundRecord
from federation.rounds.round_sums import COMPLETED
from federation.rounds.round_verdicts import RoundVerdicts
from federation.rounds.schedule import Done, ScheduleView
from federation.rounds.server_optimizer import take_step
from federation.vectors import Allocate, Layout, Vector, in_memory, is_finite, norm

_LOOK_SECONDS = 1.0  # Between two looks for sites that have left.


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerParts:
    """What the round loop works with; ``deploy.wiring.run`` chooses.

    Attributes:
        engine: Name of the engine, for the record.
        layout: Layout of the model.
        gather: How the cohort's work becomes one update: in the clear, or in secret.
        initial_state: Makes the state before the first round.
        checkpoints: Durable states.
        draw_cohort: Who is asked in the round after a state, that begins at a time.
        optimizer: The combined update to new weights.
        guests: The job's methods, in the order in which they change a model.
        clock: Time.
        emit: Where events go.
        stop_requested: Whether a person wants the run to stop after this round.
        goes_on: Whether another coordinator continues with the run after an error.
        advised: Gives an error the advice of the engine, if it knows better.
        anchors: The largest anchor of each site that is known beside the checkpoints.
        meter: Measures what rounds take of this process.
        returned: Which of some sites are there again before a round: ``Grid.returned``.
        waits: Whether sites that have left come back with time, and not with rounds.
        first_round: Earlier numbers are used up, even without a checkpoint.
        allocate: Makes the vector that updates are combined in.
    """

    run_id: RunId
    engine: str
    layout: Layout
    gather: Gather
    initial_state: Callable[[], RunState]
    checkpoints: Checkpoints
    draw_cohort: Callable[[RunProgress, float], Sequence[SiteId]]
    optimizer: ServerOptimizer
    guests: Sequence[ServerGuest]
    clock: Clock
    emit: events.Emit
    stop_requested: Callable[[], bool]
    goes_on: Callable[[BaseException], bool] = lambda _error: False
    advised: Callable[[QuorumNotMet], QuorumNotMet] = lambda error: error
    anchors: Mapping[SiteId, LedgerAnchor] = field(default_factory=dict)
    meter: UsageMeter = CLOCK
    returned: Callable[[Collection[SiteId], int], Collection[SiteId]] = (
        lambda _sites, _index: ()
    )
    waits: bool = False
    first_round: int = 1
    allocate: Allocate = in_memory


def run_federation(job: JobSpec, parts: ServerParts) -> RunState:
    """Run a job to its end, or until it is stopped.

    Args:
        job: A checked job.
        parts: Everything else.

    Returns:
        The last state; it is also the newest checkpoint. The last event says whether
        the run was completed, stopped, or exhausted its sites' privacy budgets.

    Raises:
        BudgetExceeded: The sites' privacy budgets do not allow a single round.
        QuorumNotMet: Too many rounds in a row, or all of them, had too few answers
            or no finite result.
        RunConflict: Another coordinator works on this run.
        CheckpointMismatch: The run was started from another job.
        StoreError: Checkpoints cannot be read or written.
    """
    start = parts.clock.monotonic()
    saved = parts.checkpoints.load_latest()
    state = _to_begin_with(job, parts, saved)
    _emit_started(job, parts, state)
    spare_d = parts.allocate(parts.layout.size)
    exhausted, complaints = "", list[str]()
    try:
        if saved is None:
            # From here on the run belongs to this job and this coordinator.
            _save(parts, state)
        while not (_is_done(job, parts, state) or _is_stopped(job, parts, state)):
            try:
                state, spare_d, found = _run_round(job, parts, state, spare_d)
            except BudgetExceeded as error:
                if state.rounds_completed == 0:
                    raise
                exhausted = str(error)
                break
            complaints = list(found) or complaints
            _check_progress(job, parts, state, complaints)
        is_complete = _is_done(job, parts, state)
        if is_complete or exhausted:
            _check_result(job, parts, state, complaints)
            # With masks a round is attempted once, and a refusal uses its number.
            state = _evaluate_last(
                job, parts, state, skip=int(_in_secret(job) and not is_complete)
            )
    except (FederationError, KeyboardInterrupt) as error:
        status = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
        if parts.goes_on(error):
            status = "interrupted"
        told = parts.advised(error) if isinstance(error, QuorumNotMet) else error
        _emit_finished(parts, state, status, str(told), start)
        raise told from error.__cause__
    status = "completed" if is_complete else "exhausted" if exhausted else "stopped"
    _emit_finished(parts, state, status, exhausted, start)
    return state


def _to_begin_with(
    job: JobSpec, parts: ServerParts, saved: RunState | None
) -> RunState:
    state = parts.initial_state() if saved is None else saved
    has_failed = state.lost_in_a_row >= job.schedule.max_lost_rounds
    if has_failed and state.round_index < job.rounds:
        # A person resumes it: what was wrong may show in the first round alone.
        state = replace(state, lost_in_a_row=0)
    return replace(
        state,
        anchors=join_anchors(state.anchors, parts.anchors),
        round_index=max(state.round_index, parts.first_round - 1),
    )


def _is_done(job: JobSpec, parts: ServerParts, state: RunState) -> bool:
    """Whether the schedule begins no other round, or a method ends the run."""
    if any(guest.is_over(state) for guest in parts.guests):
        return True
    view = ScheduleView(
        round_index=state.round_index + 1, rounds=job.rounds, cohort=(), open=()
    )
    action = parts.gather.schedule.next(view, (), parts.clock.monotonic())
    return isinstance(action, Done)


def _is_stopped(job: JobSpec, parts: ServerParts, state: RunState) -> bool:
    """Whether a person stops the run, also while it waits for sites that have left.

    A round that needs them begins when they are back, or else after as long as its
    deadline: a site that has just said that it leaves may still be connected, and
    would lose the round.
    """
    end, told = parts.clock.monotonic() + job.schedule.round_deadline_seconds, ""
    while parts.waits and not parts.stop_requested():
        index = state.round_index + 1
        members, _ = _cohort(parts, state)
        absent = members.asked_in_vain(state.members)
        if not absent or parts.clock.monotonic() >= end:
            break
        names = ", ".join(f"{site} ({why})" for site, why in absent.items())
        if names != told:
            message = f"round {index} needs sites that have left: waiting for {names}"
            parts.emit(events.Warned(at=parts.clock.now(), message=message))
        told = names
        parts.clock.sleep(_LOOK_SECONDS)
    return parts.stop_requested()


def _run_round(
    job: JobSpec, parts: ServerParts, state: RunState, spare_d: Vector
) -> tuple[RunState, Vector, Sequence[str]]:
    """Run the next round, with ``spare_d`` as memory for the combined update.

    Returns:
        The new state, already durable; memory for the next round; and what is wrong
        with answers that do not count.

    Raises:
        BudgetExceeded: Too few sites have the privacy budget for the round.
    """
    record = _open(job, parts, state)
    for guest in parts.guests:
        guest.before_round_(record)
    # Values too large for float32 become infinite, which is looked for below.
    with np.errstate(over="ignore", invalid="ignore"):
        try:
            delta_d = parts.gather.update(record, spare_d)
        except QuorumNotMet as error:
            record.finish("lost")
            if record.verdicts.out_of_budget:
                raise _out_of_budget(record.verdicts) from error
            new_state = _without_result(state)
        else:
            new_state = _take_step(parts, record, delta_d)
    new_state = record.add_to(new_state)
    for guest in parts.guests:
        new_state = guest.after_round(new_state, record)
    _save(parts, new_state)
    # Memory that was not touched takes none: it is kept before any other.
    unused_d = state.weights_d if new_state.weights_d is spare_d else spare_d
    return new_state, unused_d, record.verdicts.complaints


def _open(
    job: JobSpec,
    parts: ServerParts,
    state: RunState,
    drawn: Sequence[SiteId] | None = None,
    *,
    kind: TaskKind = TaskKind.TRAIN,
    skip: int = 0,
) -> RoundRecord:
    """Open the record of the round ``skip`` numbers after the next one."""
    members, cohort = _cohort(parts, state, drawn)
    record = RoundRecord(
        job=job,
        state=state,
        run_id=parts.run_id,
        skipped=skip,
        cohort=cohort,
        layout=parts.layout,
        clock=parts.clock,
        emit=parts.emit,
        kind=kind,
        meter=parts.meter,
    )
    record.ask(members)
    return record


def _cohort(
    parts: ServerParts, state: RunState, drawn: Sequence[SiteId] | None = None
) -> tuple[Members, tuple[SiteId, ...]]:
    """See who takes part in the next round, and whom of the drawn sites it asks."""
    gone = state.members.standing(Standing.GONE)
    back = parts.returned(gone.keys(), state.round_index + 1) if gone else ()
    members = state.members.replaced(back)
    if drawn is None:
        seen = replace(state, members=members)
        drawn = parts.draw_cohort(seen, parts.clock.now())
    return parts.gather.cohort(members, drawn)


def _out_of_budget(verdicts: RoundVerdicts) -> BudgetExceeded:
    first = _first(verdicts.out_of_budget)
    return BudgetExceeded(
        f"round {verdicts.round_index} is beyond the privacy budget of {first}"
    )


def _save(parts: ServerParts, state: RunState) -> None:
    """Make a state durable and emit the event."""
    start = parts.clock.monotonic()
    bytes_written = parts.checkpoints.save(state)
    parts.emit(
        events.CheckpointSaved(
            at=parts.clock.now(),
            round_index=state.round_index,
            bytes_written=bytes_written,
            seconds=parts.clock.monotonic() - start,
        )
    )


def _take_step(parts: ServerParts, record: RoundRecord, delta_d: Vector) -> RunState:
    """Take the server's step; a result that no site could be sent is discarded."""
    state = record.state
    record.sums.end_phase("combine")
    record.sums.update_norm = norm(delta_d)
    weights_d = take_step(
        parts.optimizer.of_model(state.rounds_completed + 1),
        parts.layout,
        weights_d=state.weights_d,
        moments=state.optimizer,
        delta_f=delta_d,
        fragment=record.sums.fragment,
    )
    fits = True
    try:
        for guest in parts.guests:
            guest.after_step_(record, weights_d)
    except BeyondCodec as error:
        record.verdicts.complaints.append(f"the model: {error}")
        fits = False
    # An infinite second moment would stop the training and leave finite weights.
    if fits and all(map(is_finite, (weights_d, *state.optimizer.values()))):
        status, new_state = (
            COMPLETED,
            replace(
                state,
                round_index=record.round_index,
                weights_d=weights_d,
                integers_m=record.sums.combined_integers(
                    state.integers_m, parts.layout
                ),
                rounds_completed=state.rounds_completed + 1,
                lost_in_a_row=0,
                update_clip=record.sums.next_clip,
            ),
        )
    else:
        status, new_state = "discarded", _without_result(_before_step(parts, state))
    record.sums.end_phase("apply")
    record.finish(status)
    return new_state


def _before_step(parts: ServerParts, state: RunState) -> RunState:
    """Undo a step, which has overwritten the optimiser's state, not the weights.

    Raises:
        RunConflict: Another coordinator has saved a later round.
        CorruptObject: The checkpoint of the round before is damaged or gone.
    """
    if not state.optimizer:
        return state
    saved = parts.checkpoints.load_latest()
    if saved is None or saved.round_index < state.round_index:
        raise CorruptObject(
            f"the result of round {state.round_index + 1} is not finite, and the "
            f"checkpoint of round {state.round_index} is damaged or missing; resume "
            "the run from the newest intact checkpoint"
        )
    if saved.round_index > state.round_index:
        raise RunConflict(
            f"round {saved.round_index} was saved by another coordinator of this run, "
            f"{parts.run_id}; leave the run to it, or stop it and resume"
        )
    return replace(state, optimizer=saved.optimizer)


def _without_result(state: RunState) -> RunState:
    return replace(
        state,
        round_index=state.round_index + 1,
        lost_in_a_row=state.lost_in_a_row + 1,
    )


def _evaluate_last(
    job: JobSpec, parts: ServerParts, state: RunState, *, skip: int
) -> RunState:
    """Have every site evaluate the final model, ``skip`` rounds after the next.

    Methods decide which model that is, and what follows from it.
    """
    record = None
    if evaluates_only(job):
        state, record = _evaluate_given(job, parts, state)
    elif job.evaluation.every:
        record = _evaluation(job, parts, state, skip=skip)
    for guest in parts.guests:
        state = guest.after_run(state, record, at=parts.clock.now(), emit=parts.emit)
    return state


def _evaluate_given(
    job: JobSpec, parts: ServerParts, state: RunState
) -> tuple[RunState, RoundRecord]:
    """Have every site evaluate the given model; as in training, repeat a lost round.

    Raises:
        QuorumNotMet: As many attempts as may be lost in a row had no result.
        BudgetExceeded: The sites' privacy budgets do not allow another one.
    """
    for left in reversed(range(job.schedule.max_lost_rounds)):
        index = state.round_index
        begun = replace(state, round_index=index + 1)
        if _in_secret(job):
            # With masks a round is attempted once. So a coordinator notes the number
            # that it uses, and one that resumes the run takes the next.
            state = begun
            _save(parts, state)
        record = _evaluation(job, parts, replace(state, round_index=0), skip=index)
        verdicts = record.verdicts
        if _is_evaluated(job, record):
            return state, record
        state = record.add_to(begun)
        if not left or verdicts.out_of_budget or _is_stopped(job, parts, state):
            break
        record.events.warned(
            f"round {index + 1} has no result: the sites evaluate the model again"
        )
    raise _not_evaluated(job, verdicts)


def _evaluation(
    job: JobSpec, parts: ServerParts, state: RunState, *, skip: int
) -> RoundRecord:
    """Have every site evaluate a state's model, ``skip`` rounds after the next."""
    for guest in parts.guests:
        state = guest.last_evaluated(state)
    kind = TaskKind.EVALUATE
    record = _open(job, parts, state, _evaluators(job), kind=kind, skip=skip)
    # The record tells who failed, and that there are no metrics.
    with suppress(QuorumNotMet):
        parts.gather.evaluation(record)
    record.finish_evaluation()
    return record


def _is_evaluated(job: JobSpec, record: RoundRecord) -> bool:
    """Whether a secure sum was opened, or a quorum has answered in the clear."""
    sums = record.sums
    is_opened = sums.secret_evaluation is not None
    return is_opened or len(sums.evaluations) >= job.minimum_sites


def _not_evaluated(job: JobSpec, verdicts: RoundVerdicts) -> FederationError:
    """Say why a run that only evaluates has no result."""
    if verdicts.out_of_budget:
        return _out_of_budget(verdicts)
    return QuorumNotMet(
        f"too few sites evaluated the model (the quorum is {job.minimum_sites} of "
        f"{len(job.sites)} sites){_said(verdicts.complaints)}",
        "fix the cause, then continue with --resume",
    )


def _evaluators(job: JobSpec) -> tuple[SiteId, ...]:
    """Leave out Flower apps that do not evaluate."""
    apps = ((site, site.flower_app) for site in job.sites)
    return tuple(SiteId(site.name) for site, app in apps if app is None or app.evaluate)


def _in_secret(job: JobSpec) -> bool:
    return job.privacy.secure_aggregation.enabled


def _check_progress(
    job: JobSpec, parts: ServerParts, state: RunState, complaints: Sequence[str]
) -> None:
    if state.lost_in_a_row >= job.schedule.max_lost_rounds:
        raise QuorumNotMet(
            f"{state.lost_in_a_row} rounds in a row had no result, the last of them "
            f"round {state.round_index} (the quorum is {job.fewest_updates} of "
            f"{job.cohort_size} sites){_said(complaints)}",
            _what_is_left(job, parts, state),
        )


def _said(complaints: Sequence[str]) -> str:
    return f"; {_first(complaints)}" if complaints else ""


def _first(complaints: Sequence[str]) -> str:
    more = f" (and {len(complaints) - 1} more)" if complaints[1:] else ""
    return f"{complaints[0]}{more}"


def _what_is_left(job: JobSpec, parts: ServerParts, state: RunState) -> str:
    """Say what is safe, and how to continue: lost rounds count as planned ones."""
    if not state.rounds_completed:
        return "no round was completed"
    safe = "the model of the last completed round is safe in the checkpoints"
    left = job.rounds - state.round_index
    if left <= 0 or any(guest.is_over(state) for guest in parts.guests):
        more = (
            "add some with --extend"
            if may_have_more_rounds(job)
            else "start a new run from its model (model.weights)"
        )
        return f"{safe}. No round is left: fix the cause, then {more}"
    more = (
        ", or with --extend to add rounds for those that were lost"
        if may_have_more_rounds(job)
        else ""
    )
    return (
        f"{safe}. Fix the cause, then continue with --resume from round "
        f"{state.round_index + 1} of {job.rounds}{more}"
    )


def _check_result(
    job: JobSpec, parts: ServerParts, state: RunState, complaints: Sequence[str]
) -> None:
    """Check that a finished run has a result; also called for a resumed run."""
    _check_progress(job, parts, state, complaints)
    if state.rounds_completed == 0 and not evaluates_only(job):
        one = job.rounds == 1
        none = (
            "the only round had no" if one else f"none of the {job.rounds} rounds had a"
        )
        raise QuorumNotMet(
            f"{none} result (the quorum is "
            f"{job.fewest_updates} of {job.cohort_size} sites){_said(complaints)}",
            "nothing was trained",
        )


def _emit_started(job: JobSpec, parts: ServerParts, state: RunState) -> None:
    parts.emit(
        events.RunStarted(
            at=parts.clock.now(),
            run_id=parts.run_id,
            job_name=job.name,
            rounds=planned_rounds(job),
            first_round=state.round_index + 1,
            sites=tuple(site.name for site in job.sites),
            parameters=parts.layout.size,
            frozen=parts.layout.num_frozen,
            engine=parts.engine,
            task=job.training.task,
            classes=job.training.classes,
            secure_aggregation=_in_secret(job),
            weights=job.model.weights or "",
            relays=tuple(relay.name for relay in job.relays),
            relayed=tuple(relay.sites for relay in job.relays),
            subgroups=job.training.subgroups,
            replicas=job.schedule.replicas,
        )
    )
    if state.members.away():
        index = state.round_index + 1
        parts.emit(events.left_out(state.members, index, at=parts.clock.now()))


def _emit_finished(
    parts: ServerParts, state: RunState, status: str, message: str, start: float
) -> None:
    parts.emit(
        events.RunFinished(
            at=parts.clock.now(),
            status=status,
            rounds_completed=state.rounds_completed,
            last_round=state.round_index,
            message=message,
            seconds=parts.clock.monotonic() - start,
        )
    )
