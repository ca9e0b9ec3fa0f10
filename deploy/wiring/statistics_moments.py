"""Training jobs that use what a run of statistics has found."""

import json
from dataclasses import replace
from pathlib import Path

from federation.errors import JobError
from federation.job.job_checks import check
from federation.job.spec import JobSpec
from monitoring.runs.find import LOCAL_ROOT, find_run
from monitoring.runs.run_folder import RunFolder
from monitoring.views.statistics_view import RunStatistics

_PREFIX = "stats:"
_KEY = "training.standardise"


def with_moments(job: JobSpec) -> JobSpec:
    """Put the moments of the run that ``training.standardise`` names into a job.

    Raises:
        JobError: It names no run of statistics, or one without a deviation; or its
            sums are exact, and the job has a unit of privacy.
        RunNotFound: There is no such run.
    """
    name = job.training.standardise.removeprefix(_PREFIX)
    if not job.training.standardise or job.training.moments:
        return job
    if name == job.training.standardise:
        raise JobError(f'must be "{_PREFIX}RUN"', key=_KEY)
    run = find_run(name, LOCAL_ROOT)
    found = run.read_statistics()
    if found is None:
        raise JobError(f"the run in {run.path} has no statistics", key=_KEY)
    training = replace(
        job.training,
        moments=_moments(job, found, run),
        moments_privacy=()
        if found.epsilon is None
        else (found.epsilon, found.delta or 0.0),
    )
    return check(replace(job, training=training))


def _moments(
    job: JobSpec, found: RunStatistics, run: RunFolder
) -> dict[str, tuple[float, float]]:
    """Mean and deviation of the columns that a job takes."""
    numbers = {each.name: each for each in found.columns if each.kind == "number"}
    wanted = job.training.inputs or tuple(numbers)
    if lacking := [name for name in wanted if name not in numbers]:
        raise JobError(
            f"the run in {run.path} has no numbers called {', '.join(lacking)}: it has "
            f"{', '.join(numbers) or 'none'}",
            key="training.inputs",
        )
    if not wanted:
        raise JobError(f"the run in {run.path} has no numbers", key=_KEY)
    moments = {
        name: (numbers[name].mean or 0.0, numbers[name].deviation or 0.0)
        for name in wanted
    }
    if flat := [name for name in wanted if not moments[name][1]]:
        why = (
            "they are constant"
            if found.epsilon is None
            else "the noise hides it: to learn it, ask again with closer bounds, a "
            "larger target_epsilon or more of it for squares (statistics.split)"
        )
        rest = [name for name in wanted if name not in flat]
        raise JobError(
            f"the run in {run.path} found no deviation of {', '.join(flat)}; {why}. To "
            "train without these columns, set training.inputs = "
            f"{json.dumps(rest)}",
            key=_KEY,
        )
    return moments


def check_alike(job: JobSpec, model: str) -> None:
    """Refuse to evaluate a run's model on records that it was not trained on alike.

    Args:
        job: The evaluation's.
        model: The folder of the run; a file or a URL says nothing of its training.

    Raises:
        JobError: Records are standardised in another way than in that run, or it has
            no whole model.
        RunNotFound: The run's job cannot be read.
    """
    run = RunFolder(Path(model))
    if not run.job.is_file():
        return
    trained = run.read_spec()
    if trained.model.personal:
        raise JobError(
            f"the sites of the run in {run.path} keep parts of the model for "
            "themselves, so it has no whole model: write that of one site with "
            "`crossfed site model`, and evaluate the file",
            key="model.personal",
        )
    here, there = (each.privacy.differential_privacy for each in (job, trained))
    differs = {
        "training.inputs": job.training.inputs != trained.training.inputs,
        _KEY: job.training.moments != trained.training.moments,
        "privacy.differential_privacy.standardise": (
            here.standardise != there.standardise
        ),
    }
    for key, does in differs.items():
        if does:
            raise JobError(
                f"is not as in the run that trained the model, {run.path}, so the "
                "model would be evaluated on other numbers than it knows: take it from "
                f"that run's job.toml, or, if records need no such step now, name "
                f"{run.model} instead of the run",
                key=key,
            )
