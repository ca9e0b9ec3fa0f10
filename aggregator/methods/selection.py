"""Which of a run's models it leaves, and whether it stops early: pure decisions.

The model that a round starts with is evaluated in that round, so its score is known
one round later. What is decided depends only on models and pooled results that the
aggregator has anyway: it is post-processing of what the run releases.

Shape suffixes: d float values of the model, c those of a chunk.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

from federation.events import Emit, ModelSelected
from federation.job.method_checks import MEANS
from federation.job.selection_checks import goal_of
from federation.job.selection_job import SelectionSpec
from federation.job.spec import JobSpec
from federation.messages import MetricSums
from federation.protocols import KeptModel, RunProgress, RunState
from federation.rounds.guest import ServerGuest
from federation.rounds.round_record import RoundRecord
from federation.rounds.round_sums import COMPLETED, RoundSums
from federation.vectors import Vector, chunks

Score = Callable[[MetricSums], float | None]
# Finds a metric by its name; None if results lack it.
MetricOf = Callable[[MetricSums, str], float | None]


@dataclass(frozen=True)
class Selection(ServerGuest):
    """Judges and averages the models of a run.

    Attributes:
        spec: The job's table.
        metric_of: Finds the metric that models are compared by.
    """

    spec: SelectionSpec
    metric_of: MetricOf

    def is_over(self, state: RunProgress) -> bool:
        """Whether the run stops early."""
        patience = self.spec.patience
        return patience is not None and state.selection.stale >= patience

    def after_round(self, new_state: RunState, record: RoundRecord) -> RunState:
        """Judge the model that the round began with, and average the one that it made.

        A round without result leaves both for the next one, which begins with the same
        model.
        """
        if record.status != COMPLETED:
            return new_state
        judged = self._judged(record.state, record)
        new_state = replace(new_state, selection=judged.selection, kept=judged.kept)
        return average(self.spec, new_state)

    def last_evaluated(self, state: RunState) -> RunState:
        """Return the average, if the run leaves one; else the newest model."""
        return state.with_model_left() if self.spec.averages else state

    def after_run(
        self, state: RunState, record: RoundRecord | None, *, at: float, emit: Emit
    ) -> RunState:
        """Compare the newest model with the best one, and emit which one is left."""
        # The evaluation of the last model ends nothing early any more.
        is_early = self.is_over(state) and state.round_index < self.job.rounds
        spec = self.spec
        if record is not None and not spec.averages:
            state = self._judged(state, record)
        progress = state.selection
        best = progress.best_round if spec.model == "best" else None
        averaged = progress.averaged
        emit(
            ModelSelected(
                at=at,
                round_index=state.round_index if best is None else best,
                model="last" if best is None and not averaged else spec.model,
                models=max(1, averaged),
                metric=spec.metric if spec.compares else "",
                best_round=progress.best_round,
                best_score=progress.best_score,
                stopped_early=is_early,
            )
        )
        return state

    def _judged(self, state: RunState, record: RoundRecord) -> RunState:
        def score(sums: MetricSums) -> float | None:
            return self.metric_of(sums, self.spec.metric)

        return judge(self.job, state, score_of(self.job, record.sums, score))


def begin(job: JobSpec, metric_of: MetricOf) -> ServerGuest | None:
    """Begin a run that selects a model."""
    spec = job.selection
    return None if spec is None else Selection(job, spec, metric_of)


def score_of(job: JobSpec, sums: RoundSums, score: Score) -> float | None:
    """The metric of the model that the sites of a round have evaluated.

    That of the pooled results. With a robust rule it is the median over sites, as long
    as results of single sites are known: then no minority of them decides which model
    is the best by reporting false ones (Yin et al. 2018, arXiv:1803.01498,
    Definition 1).

    Args:
        job: Names the metric and the combine rule.
        sums: Sums of the round.
        score: The job's metric of results; None if they lack it.

    Returns:
        The metric; None if no site has it.
    """
    pooled = sums.pooled_evaluation()
    is_pooled = job.aggregation.combine in MEANS or sums.secret_evaluation is not None
    if pooled is None or is_pooled:
        return None if pooled is None else score(pooled)
    by_site = [score(each) for each in sums.evaluations.values()]
    # Sites that diverged, and those that say so, take no part in the median.
    known = [one for one in by_site if one is not None and math.isfinite(one)]
    return median(known) if known else math.nan


def judge(job: JobSpec, state: RunState, score: float | None) -> RunState:
    """Compare the model of a state with the best one so far.

    Args:
        job: Says which model to keep, and whether a larger score is better.
        state: Its model was evaluated.
        score: The job's metric of it; None if no site evaluated it.

    Returns:
        The state, with the model kept if it is the best and the job keeps that one.
    """
    spec = job.selection
    if spec is None or score is None or not spec.compares:
        return state
    before = state.selection
    if not _is_better(job, spec, score, before.best_score):
        stale = replace(before, stale=before.stale + 1)
        return replace(state, selection=stale)
    found = replace(before, best_round=state.round_index, best_score=score, stale=0)
    kept = state.kept
    if spec.model == "best":
        # A copy: the round loop overwrites the model of the round before.
        kept = KeptModel(weights_d=state.weights_d.copy(), integers_m=state.integers_m)
    return replace(state, selection=found, kept=kept)


def _is_better(
    job: JobSpec, spec: SelectionSpec, score: float, best: float | None
) -> bool:
    if not math.isfinite(score):
        return False
    if best is None:
        return True
    gain = score - best if goal_of(spec, job.training) == "max" else best - score
    return gain > spec.min_change


def average(spec: SelectionSpec, state: RunState) -> RunState:
    """Add the model of a completed round to the average, if the job keeps one.

    ``ema``: ``mean = decay * mean + (1 - decay) * theta``. ``swa``: the mean of all
    models so far, Izmailov et al. 2018, arXiv:1803.05407, Algorithm 1. Statistics of
    batch normalisation are averaged too; integer values are those of the newest model.

    Args:
        spec: The job's table.
        state: The state after the round; its kept model is overwritten.
    """
    if not spec.averages or state.round_index < spec.average_from:
        return state
    number = state.selection.averaged + 1
    if state.kept is None:
        mean_d = state.weights_d.copy()
    else:
        share = 1 / number if spec.model == "swa" else 1 - spec.decay
        mean_d = _moved_(state.kept.weights_d, state.weights_d, share)
    return replace(
        state,
        selection=replace(state.selection, averaged=number),
        kept=KeptModel(weights_d=mean_d, integers_m=state.integers_m),
    )


def _moved_(mean_d: Vector, weights_d: Vector, share: float) -> Vector:
    """Move the mean by a share of the way, in place: a model can be large."""
    for piece in chunks(mean_d.size):
        step_c = weights_d[piece] - mean_d[piece]
        step_c *= share
        mean_d[piece] += step_c
    return mean_d
