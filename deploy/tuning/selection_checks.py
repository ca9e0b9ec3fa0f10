"""What a search with private selection must not ask for.

The bounds are for one mechanism that is run again and again (Papernot and Steinke 2022,
arXiv:2110.03620): it may draw values at random, but must not look at earlier trials,
and must not spend more with some values than with others.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from federation.errors import JobError
from federation.job.selection_checks import goal_of
from federation.job.selection_job import SelectionSpec
from federation.job.spec import JobSpec
from privacy.dp.selection import MAX_MEAN, MIN_MEAN

if TYPE_CHECKING:
    from deploy.tuning.space import Choice, Space, TuneSpec

# Keys that change no event of a ledger, whatever their value.
SAME_COST = (
    "training.optimizer.",
    "training.learning_rate.",
    "training.proximal_mu",
    "aggregation.server_optimizer.",
    "privacy.differential_privacy.clip_norm",
)

_TABLE = "privacy.selection"


def check_selection(spec: "TuneSpec", job: JobSpec) -> None:
    """Refuse what makes trials unlike each other, or their number known.

    Args:
        spec: The search, with ``privacy.selection``.
        job: Its job, without the keys that are searched.

    Raises:
        JobError: The first such thing.
    """
    for key, reason in (*_faults_of_search(spec), *_faults_of_job(job)):
        raise JobError(reason, key=key)
    _check_metric(spec, job)
    for name in spec.space:
        if not name.startswith(SAME_COST):
            raise JobError(
                "may change what a trial spends, and the best of trials with different "
                f"costs has no bound: with {_TABLE} search only keys that begin with "
                f"{', '.join(SAME_COST)}",
                key=f"space.{name}",
            )


def check_sound(space: "Space", number: int, values: "Mapping[str, Choice]") -> None:
    """Check the values of a trial before any record is read.

    Only such an error may end a search: it says nothing of the records. All others are
    results of a trial.

    Args:
        space: What is searched.
        number: Number of the trial, from 0.
        values: That were drawn for it.

    Raises:
        JobError: They do not fit the job.
    """
    try:
        space.job(values)
    except JobError as error:
        raise JobError(
            f"trial {number + 1} is no sound job: {error}. Its values alone decide "
            "this, and no record does, so the search ends and releases nothing: change "
            "the ranges in [space], and name a new folder with --out"
        ) from error


def _check_metric(spec: "TuneSpec", job: JobSpec) -> None:
    """Refuse a metric that no trial can have: all would fail, and be charged.

    Raises:
        JobError: The job does not measure it, or no model is evaluated.
    """
    if not job.evaluation.every:
        raise JobError(
            "trials are compared by held-out results, and the job's evaluation.every "
            "is 0: set it to 1 or more",
            key="metric",
        )
    try:
        goal_of(SelectionSpec(metric=spec.metric), job.training)
    except JobError as error:
        # That only a goal is missing, which the search has, is no fault.
        if error.key == "selection.metric":
            raise JobError(error.reason, key="metric") from error


def _faults_of_search(spec: "TuneSpec") -> Iterator[tuple[str, str]]:
    if spec.sampler != "random":
        yield (
            "sampler",
            (
                f"{spec.sampler!r} learns from earlier trials, so that the best one "
                f"depends on all of them: use 'random' with {_TABLE}"
            ),
        )
    if spec.pruner.min_rounds:
        yield (
            "pruner.min_rounds",
            (
                "compares trials with each other before they end: leave it out with "
                f"{_TABLE}"
            ),
        )
    if spec.seed:
        yield (
            "seed",
            (
                f"is drawn secretly with {_TABLE}, since values that follow from a "
                "known seed would reveal which trial was the best: remove this key"
            ),
        )
    if spec.privacy.max_epsilon:
        yield (
            "privacy.max_epsilon",
            (
                "ends a search after a number of trials that can be computed: with "
                f"{_TABLE}, set target_epsilon of the job and `trials` instead"
            ),
        )
    if not MIN_MEAN <= spec.trials <= MAX_MEAN:
        yield (
            "trials",
            f"is the mean number with {_TABLE}: give {MIN_MEAN:g} to {MAX_MEAN:g}",
        )


def _faults_of_job(job: JobSpec) -> Iterator[tuple[str, str]]:
    if not job.privacy.differential_privacy.enabled:
        yield (
            _TABLE,
            "needs a job with differential privacy: without, no trial is charged",
        )
    if job.selection is not None and job.selection.patience is not None:
        yield (
            _TABLE,
            (
                "the job's selection.patience ends trials after rounds that depend on "
                "the data, and the bound is for trials that all cost the same: remove "
                "it"
            ),
        )
    if job.simulation.live_metrics:
        yield (
            _TABLE,
            (
                "the job's simulation.live_metrics would show every trial to anyone "
                "who reads the metrics, and the bound is for the best trial alone: "
                "remove it"
            ),
        )
    if job.simulation.total_epsilon is not None:
        yield (
            _TABLE,
            (
                "the job's simulation.total_epsilon would refuse trials after a number "
                "that can be computed: remove it"
            ),
        )
