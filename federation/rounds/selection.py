"""Which of a run's models it leaves, and whether it stops early: pure decisions.

The model that a round starts with is evaluated in that round, so its score is known
one round later. What is decided depends only on models and pooled results that the
aggregator has anyway: it is post-processing of what the run releases.

Shape suffixes: d float values of the model, c those of a chunk.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from statistics import median

from federation.job.method_checks import MEANS
from federation.job.selection_checks import goal_of
from federation.job.selection_job import SelectionSpec
from federation.job.spec import JobSpec
from federation.messages import MetricSums
from federation.protocols import KeptModel, RunState, SelectionProgress
from federation.rounds.round_sums import RoundSums
from federation.vectors import Vector, chunks

Score = Callable[[MetricSums], float | None]


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


def average(spec: SelectionSpec | None, state: RunState) -> RunState:
    """Add the model of a completed round to the average, if the job keeps one.

    ``ema``: ``mean = decay * mean + (1 - decay) * theta``. ``swa``: the mean of all
    models so far, Izmailov et al. 2018, arXiv:1803.05407, Algorithm 1. Statistics of
    batch normalisation are averaged too; integer values are those of the newest model.

    Args:
        spec: The job's table.
        state: The state after the round; its kept model is overwritten.
    """
    if spec is None or not spec.averages or state.round_index < spec.average_from:
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


def is_over(spec: SelectionSpec | None, progress: SelectionProgress) -> bool:
    """Whether the run stops early."""
    return (
        spec is not None
        and spec.patience is not None
        and progress.stale >= spec.patience
    )


def model_left(spec: SelectionSpec | None, state: RunState) -> RunState:
    """Return the state with the model that the run leaves in the place of the newest.

    That is the newest if none is kept: no model was evaluated, or the run ended before
    the first round to average.
    """
    kept = state.kept
    if spec is None or kept is None:
        return state
    # A site that has the newest model is sent the whole of this one, and no step
    # begins with it.
    return replace(
        state,
        weights_d=kept.weights_d,
        integers_m=kept.integers_m,
        optimizer={},
        change=None,
    )
