"""Training jobs that use what a run of statistics has found."""

from dataclasses import replace
from pathlib import Path

from federation.errors import JobError
from federation.job.spec import JobSpec
from monitoring.runs.find import LOCAL_ROOT, find_run
from monitoring.runs.run_folder import RunFolder

_PREFIX = "stats:"
_KEY = "training.standardise"


def with_moments(job: JobSpec) -> JobSpec:
    """Put the moments of the run that ``training.standardise`` names into a job.

    Raises:
        JobError: It names no run of statistics, or one without a deviation.
        RunNotFound: There is no such run.
    """
    name = job.training.standardise.removeprefix(_PREFIX)
    if not job.training.standardise or job.training.moments:
        return job
    if name == job.training.standardise:
        raise JobError(f'must be "{_PREFIX}RUN"', key=_KEY)
    run = find_run(name, LOCAL_ROOT)
    found = run.read_statistics()
    columns = () if found is None else found.columns
    moments = {
        column.name: (column.mean, column.deviation)
        for column in columns
        if column.kind == "number"
    }
    flat = [name for name, (_, deviation) in moments.items() if not deviation]
    if not moments or flat:
        what = f"found no deviation of {', '.join(flat)}" if flat else "has no numbers"
        raise JobError(f"the run in {run.path} {what}", key=_KEY)
    training = replace(
        job.training,
        moments={n: (float(m or 0), float(d or 0)) for n, (m, d) in moments.items()},
    )
    return replace(job, training=training)


def check_alike(job: JobSpec, model: str) -> None:
    """Refuse to evaluate a run's model on records that it was not trained on alike.

    Args:
        job: The evaluation's.
        model: The folder of the run; a file or a URL says nothing of its training.

    Raises:
        JobError: Records are standardised in another way than in that run.
        RunNotFound: The run's job cannot be read.
    """
    run = RunFolder(Path(model))
    if not run.job.is_file():
        return
    trained = run.read_spec()
    here, there = (each.privacy.differential_privacy for each in (job, trained))
    differs = {
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
