"""Compare runs by the folders that they left."""

from collections.abc import Sequence
from pathlib import Path

from monitoring.runs.run_folder import RunFolder
from monitoring.views import run_plan

DEFAULT_PATH = Path("comparison.html")


def leave_comparison(runs: Sequence[RunFolder], path: Path | None = None) -> Path:
    """Write the comparison of runs, and return its path.

    Args:
        runs: At least two.
        path: Where to write; ``comparison.html`` in the working folder by default.

    Raises:
        RunNotFound: A folder holds no run, or has lost its job file.
        StoreUnavailable: The page cannot be written.
    """
    from monitoring.pages.comparison import ComparedRun, write_comparison  # noqa: PLC0415 -- slow to import

    path = path or DEFAULT_PATH
    compared = [
        ComparedRun(
            folder=str(run.path),
            view=run.view(),
            job_toml=run.read_job(),
            plan=run_plan.read(run.path),
        )
        for run in runs
    ]
    write_comparison(compared, path)
    return path
