"""Training jobs that use what a run of statistics has found."""

from dataclasses import replace

from federation.errors import JobError
from federation.job.spec import JobSpec
from monitoring.runs.find import LOCAL_ROOT, find_run

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
