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
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from federation import events
from federation.compression.change import NO_WORDS, RESIDUAL, digest, settle
from federation.compression.codec import BeyondCodec, Links
from federation.errors import (
    BudgetExceeded,
    CorruptObject,
    FederationError,
    QuorumNotMet,
    RunConflict,
)
from federation.ids import RunId, SiteId
from federation.job.adapter_ranks import codecs_by_site
from federation.job.spec import JobSpec
from federation.members import Members, Standing
from federation.messages import LedgerAnchor, MetricSums, TaskKind, join_anchors
from federation.methods.registry import follows_counted
from federation.protocols import (
    Checkpoints,
    Clock,
    ModelChange,
    RunState,
    ServerOptimizer,
)
from federation.resources import CLOCK, UsageMeter
from federation.rounds import local_work, selection
from federation.rounds.gather import Gather, evaluates
from federation.rounds.round_record import RoundRecord
from federation.rounds.round_sums import COMPLETED
from federation.rounds.round_verdicts import RoundVerdicts
from federation.rounds.schedule import Done, ScheduleView
from federation.rounds.server_optimizer import keep_zeros_, take_step
from federation.vectors import Allocate, Layout, Vector, in_memory, is_finite, norm

_LOOK_SECONDS = 1.0  # Between two looks for sites that have left.
_NEARLY = 0.9  # Of the clip norm: no mean of shorter updates comes so near.


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerParts:
    """What the round loop works with; ``deploy.wiring.run`` chooses.

    Attributes:
        engine: Name of the engine, for the record.
        layout: Layout of the model.
        gather: How the cohort's work becomes one update: in the clear, or in secret.
        initial_state: Makes the state before the first round.
        checkpoints: Durable states.
        draw_cohort: Who is asked in a round: a function of job and round index.
        optimizer: The combined update to new weights.
        clock: Time.
        emit: Where events go.
        stop_requested: Whether a person wants the run to stop after this round.
        goes_on: Whether another coordinator continues with the run after an error.
        anchors: The largest anchor of each site that is known beside the checkpoints.
        meter: Measures what rounds take of this process.
        returned: Which of some sites are there again before a round: ``Grid.returned``.
        waits: Whether sites that have left come back with time, and not with rounds.
        first_round: Earlier numbers are used up, even without a checkpoint.
        score: The metric of a pooled result that the job's models are compared by.
        allocate: Makes the vector that updates are combined in.
    """

    run_id: RunId
    engine: str
    layout: Layout
    gather: Gather
    initial_state: Callable[[], RunState]
    checkpoints: Checkpoints
    draw_cohort: Callable[[JobSpec, int], Sequence[SiteId]]
    optimizer: ServerOptimizer
    clock: Clock
    emit: events.Emit
    stop_requested: Callable[[], bool]
    goes_on: Callable[[BaseException], bool] = lambda _error: False
    anchors: Mapping[SiteId, LedgerAnchor] = field(default_factory=dict)
    meter: UsageMeter = CLOCK
    returned: Callable[[Collection[SiteId], int], Collection[SiteId]] = (
        lambda _sites, _index: ()
    )
    waits: bool = False
    first_round: int = 1
    score: Callable[[MetricSums], float | None] = lambda _sums: None
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
            _check_progress(job, state, complaints)
        is_complete = _is_done(job, parts, state)
        if is_complete or exhausted:
            _check_result(job, state, complaints)
            # The evaluation that follows ends nothing early any more.
            is_early = _stops_early(job, state)
            # With masks a round is attempted once, and a refusal uses its number.
            state = _evaluate_last(
                job, parts, state, skip=int(_in_secret(job) and not is_complete)
            )
            _emit_selected(job, parts, state, is_early=is_early)
    except (FederationError, KeyboardInterrupt) as error:
        status = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
        if parts.goes_on(error):
            status = "interrupted"
        _emit_finished(parts, state, status, str(error), start)
        raise
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
    """Whether the schedule begins no other round, or the run stops early."""
    if selection.is_over(job.selection, state.selection):
        return True
    if local_work.is_complete(job, state):
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
        members, _ = _cohort(parts, state, parts.draw_cohort(job, index))
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
    """Run the next round.

    Args:
        job: Sets the cohort, the quorum and the deadline.
        parts: Everything else.
        state: The state after the round before.
        spare_d: Memory for the combined update, shape ``(d,)``.

    Returns:
        The new state, already durable; memory for the next round; and what is wrong
        with answers that do not count.

    Raises:
        BudgetExceeded: Too few sites have the privacy budget for the round.
    """
    drawn = parts.draw_cohort(job, state.round_index + 1)
    members, cohort = _cohort(parts, state, drawn)
    choice = local_work.choose(job, state)
    record = RoundRecord(
        run_id=parts.run_id,
        round_index=state.round_index + 1,
        cohort=cohort,
        layout=parts.layout,
        clock=parts.clock,
        emit=parts.emit,
        in_secret=_in_secret(job),
        links=job.communication.links,
        codecs=codecs_by_site(job, parts.layout),
        meter=parts.meter,
        members=state.members,
        steps=choice.steps if choice else None,
        epsilon_cap=job.privacy.differential_privacy.target_epsilon or 0.0,
        states=state.states,
    )
    record.ask(members)
    if choice is not None:
        record.events.chose(choice, job.schedule.training_share)
    # Values too large for float32 become infinite, which is looked for below.
    with np.errstate(over="ignore", invalid="ignore"):
        try:
            # w_i and Delta_i of the answers that count, and Delta of them all.
            updates, combine = parts.gather.updates(state, record)
            delta_d = combine(updates, spare_d)
            record.sums.end_phase("combine")
        except QuorumNotMet as error:
            if record.verdicts.out_of_budget:
                record.finish("lost")
                raise _out_of_budget(record.verdicts) from error
            new_state = _without_result(state, record.links)
            status, unused_d = "lost", spare_d
        else:
            record.sums.update_norm = norm(delta_d)
            _note_clipped(job, state, record)
            weights_d = take_step(
                parts.optimizer,
                parts.layout,
                weights_d=state.weights_d,
                moments=state.optimizer,
                delta_f=delta_d,
                fragment=record.sums.fragment,
            )
            if job.model.keep_zeros:
                keep_zeros_(parts.layout, before_d=state.weights_d, after_d=weights_d)
            new_state, status = _next_state(parts, state, weights_d, record)
            # Memory that was not touched takes none: it is kept before any other.
            is_taken = status == "completed" and delta_d is spare_d
            unused_d = state.weights_d if is_taken else spare_d
            record.sums.end_phase("apply")
    record.finish(status)
    new_state = replace(
        new_state,
        anchors=join_anchors(state.anchors, record.sums.anchors),
        counted=_counted(job, state, record, status),
        states=record.states,
        suspicions=record.verdicts.suspicions or state.suspicions,
        members=record.members.end_round(),
        **_after_steps(job, state, record, status),
    )
    new_state = _select(job, parts, state, new_state, record)
    _save(parts, new_state)
    return new_state, unused_d, record.verdicts.complaints


def _select(
    job: JobSpec,
    parts: ServerParts,
    state: RunState,
    new_state: RunState,
    record: RoundRecord,
) -> RunState:
    """Judge the model that the round began with, and average the one that it made.

    A round without result leaves both for the next one, which begins with the same
    model.
    """
    if new_state.rounds_completed > state.rounds_completed:
        judged = selection.judge(job, state, _score(job, parts, record))
        new_state = replace(new_state, selection=judged.selection, kept=judged.kept)
        return selection.average(job.selection, new_state)
    return replace(new_state, selection=state.selection, kept=state.kept)


def _score(job: JobSpec, parts: ServerParts, record: RoundRecord) -> float | None:
    return selection.score_of(job, record.sums, parts.score)


def _after_steps(
    job: JobSpec, state: RunState, record: RoundRecord, status: str
) -> dict[str, Any]:
    """Note the local steps of a round, and what it took if that is typical."""
    if record.steps is None:
        return {}
    times = state.times
    if status == COMPLETED and local_work.is_typical(
        job, state, evaluates=evaluates(job, state), is_usual=record.is_usual
    ):
        times = local_work.observe(
            state,
            record.steps,
            seconds=record.clock.monotonic() - record.sums.start,
            train_seconds=record.sums.last_trained,
        )
    return {"steps_taken": record.steps.stop, "times": times}


def _counted(
    job: JobSpec, state: RunState, record: RoundRecord, status: str
) -> Mapping[SiteId, int]:
    """Note whose updates are a part of the model, if sites need to know that."""
    if status != "completed":
        return state.counted
    if follows_counted(job):  # A round of these needs all sites.
        return dict.fromkeys(record.cohort, record.round_index)
    if not record.links.feedback:
        return state.counted
    return {**state.counted, **record.counted}


def _cohort(
    parts: ServerParts, state: RunState, drawn: Sequence[SiteId]
) -> tuple[Members, tuple[SiteId, ...]]:
    """See who takes part in the next round, and whom of the drawn sites it asks."""
    gone = state.members.standing(Standing.GONE)
    back = parts.returned(gone.keys(), state.round_index + 1) if gone else ()
    return parts.gather.cohort(state.members.replaced(back), drawn)


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


def _next_state(
    parts: ServerParts, state: RunState, weights_d: Vector, record: RoundRecord
) -> tuple[RunState, str]:
    """Take new weights; a result that no site could be sent is discarded."""
    change, fits = None, True
    try:
        if record.links.changes:
            change = settle(
                record.links,
                state.weights_d,
                weights_d,
                residual_d=state.optimizer.get(RESIDUAL),
                seed=record.round_index,
            )
        elif record.links.sums and record.sums.opened_w is not None:
            after = digest(weights_d)
            change = ModelChange(words=record.sums.opened_w, after=after)
        else:
            record.links.down.check(weights_d)
    except BeyondCodec as error:
        record.verdicts.complaints.append(f"the model: {error}")
        fits = False
    # An infinite second moment would stop the training and leave finite weights.
    if not (fits and all(map(is_finite, (weights_d, *state.optimizer.values())))):
        return _without_result(_before_step(parts, state), record.links), "discarded"
    return RunState(
        round_index=record.round_index,
        weights_d=weights_d,
        integers_m=record.sums.combined_integers(state.integers_m, parts.layout),
        optimizer=state.optimizer,
        rounds_completed=state.rounds_completed + 1,
        lost_in_a_row=0,
        update_clip=record.sums.next_clip,
        change=change,
    ), "completed"


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


def _without_result(state: RunState, links: Links) -> RunState:
    unchanged = ModelChange(words=NO_WORDS, after=digest(state.weights_d))
    return replace(
        state,
        round_index=state.round_index + 1,
        lost_in_a_row=state.lost_in_a_row + 1,
        # Sites that take the server's steps themselves may still have the model.
        change=unchanged if links.sums else None,
    )


def _evaluate_last(
    job: JobSpec, parts: ServerParts, state: RunState, *, skip: int
) -> RunState:
    """Have every site evaluate the final model, ``skip`` rounds after the next.

    That is the average, if the run leaves one; else the newest model, which is then
    compared with the best one.
    """
    spec = job.selection
    averages = spec is not None and spec.averages
    shown = selection.model_left(spec, state) if averages else state
    if job.evaluation.every == 0:
        return state
    drawn = _evaluators(job, parts.gather.sites())
    members, cohort = _cohort(parts, state, drawn)
    record = RoundRecord(
        run_id=parts.run_id,
        round_index=state.round_index + 1 + skip,
        model_round=state.round_index,
        cohort=cohort,
        layout=parts.layout,
        clock=parts.clock,
        emit=parts.emit,
        kind=TaskKind.EVALUATE,
        in_secret=_in_secret(job),
        links=job.communication.links,
        members=state.members,
        epsilon_cap=job.privacy.differential_privacy.target_epsilon or 0.0,
        states=state.states,
    )
    record.ask(members)
    parts.gather.evaluation(shown, record)
    record.finish_evaluation()
    return (
        state if averages else selection.judge(job, state, _score(job, parts, record))
    )


def _evaluators(job: JobSpec, sites: Sequence[SiteId]) -> tuple[SiteId, ...]:
    """Leave out Flower apps that do not evaluate."""
    apps = {site.name: site.flower_app for site in job.sites}
    return tuple(site for site in sites if (app := apps[site]) is None or app.evaluate)


def _in_secret(job: JobSpec) -> bool:
    return job.privacy.secure_aggregation.enabled


def _check_progress(
    job: JobSpec, state: RunState, complaints: Sequence[str] = ()
) -> None:
    if state.lost_in_a_row >= job.schedule.max_lost_rounds:
        raise QuorumNotMet(
            f"{state.lost_in_a_row} rounds in a row had no result, the last of them "
            f"round {state.round_index} (the quorum is {job.minimum_sites} of "
            f"{job.cohort_size} sites); {_said(complaints)}{_what_is_left(job, state)}"
        )


def _said(complaints: Sequence[str]) -> str:
    return f"{_first(complaints)}; " if complaints else ""


def _first(complaints: Sequence[str]) -> str:
    more = f" (and {len(complaints) - 1} more)" if complaints[1:] else ""
    return f"{complaints[0]}{more}"


def _what_is_left(job: JobSpec, state: RunState) -> str:
    """Say what is safe, and how to continue: lost rounds count as planned ones."""
    if not state.rounds_completed:
        return "no round was completed"
    safe = "the model of the last completed round is safe in the checkpoints"
    left = job.rounds - state.round_index
    if local_work.is_complete(job, state) or left <= 0:
        return f"{safe}. No round is left: fix the cause, then add some with --extend"
    return (
        f"{safe}. Fix the cause, then continue with --resume from round "
        f"{state.round_index + 1} of {job.rounds}, or with --extend to add rounds for "
        "those that were lost"
    )


def _check_result(job: JobSpec, state: RunState, complaints: Sequence[str]) -> None:
    """Check that a finished run has a result; also called for a resumed run."""
    _check_progress(job, state, complaints)
    if state.rounds_completed == 0:
        one = job.rounds == 1
        none = (
            "the only round had no" if one else f"none of the {job.rounds} rounds had a"
        )
        raise QuorumNotMet(
            f"{none} result (the quorum is "
            f"{job.minimum_sites} of {job.cohort_size} sites); "
            f"{_said(complaints)}nothing was trained"
        )


def _emit_started(job: JobSpec, parts: ServerParts, state: RunState) -> None:
    parts.emit(
        events.RunStarted(
            at=parts.clock.now(),
            run_id=parts.run_id,
            job_name=job.name,
            rounds=job.rounds,
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
        )
    )
    if state.members.away():
        index = state.round_index + 1
        parts.emit(events.left_out(state.members, index, at=parts.clock.now()))


def _note_clipped(job: JobSpec, state: RunState, record: RoundRecord) -> None:
    """Warn of a first mean update that only clipped ones in one direction can give.

    Nothing but the opened sum shows it. Where noise is in the sum, clipping is meant.
    """
    size, bound = record.sums.update_norm, record.sums.update_clip
    if state.round_index or not size or not bound:
        return
    if size > _NEARLY * bound and not job.privacy.differential_privacy.in_sum:
        record.events.warned(
            f"the mean update has a norm of {size:.3g}, and secure aggregation scales "
            f"every update down to {bound:g}: most are probably larger and count only "
            "in part. Raise privacy.secure_aggregation.clip_norm; or make updates "
            "smaller: normalise inputs and targets, and keep running statistics at the "
            'sites (model.personal = ["*running_*"]). `crossfed check-job` names the '
            "tensor, each site's own log the norm"
        )


def _stops_early(job: JobSpec, state: RunState) -> bool:
    is_over = selection.is_over(job.selection, state.selection)
    return is_over and state.round_index < job.rounds


def _emit_selected(
    job: JobSpec, parts: ServerParts, state: RunState, *, is_early: bool
) -> None:
    spec, progress = job.selection, state.selection
    if spec is None:
        return
    best = progress.best_round if spec.model == "best" else None
    averaged = progress.averaged
    parts.emit(
        events.ModelSelected(
            at=parts.clock.now(),
            round_index=state.round_index if best is None else best,
            model="last" if best is None and not averaged else spec.model,
            models=max(1, averaged),
            metric=spec.metric if spec.compares else "",
            best_round=progress.best_round,
            best_score=progress.best_score,
            stopped_early=is_early,
        )
    )


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
