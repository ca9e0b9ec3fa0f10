"""The runs of this machine: their folders, and a summary of each."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deploy.aggregator_host import run_queue
from federation.errors import RunNotFound, StoreError
from monitoring.runs.find import find_runs
from monitoring.runs.run_folder import RunFolder
from monitoring.views.result_json import result
from monitoring.views.run_view import RunView
from monitoring.web.app import Action, Shown


def summary(run: RunFolder) -> dict[str, Any]:
    """One row of the list of runs; numbers that are not finite become None."""
    try:
        view = run.view()
        status = _status(view, run)
    except (RunNotFound, StoreError) as error:
        return {
            "run_id": run.path.name,
            "job": run.path.parent.name,
            "status": "unreadable",
            "error": str(error),
            "folder": str(run.path),
        }
    final = result(view)["final"]
    return {
        "run_id": view.started.run_id,
        "job": view.started.job_name,
        "status": status,
        "rounds_completed": view.rounds_completed,
        "rounds": view.started.rounds,
        "loss": final["loss"],
        "accuracy": final["accuracy"],
        "seconds": view.seconds,
        "folder": str(run.path),
    }


def _status(view: RunView, run: RunFolder) -> str:
    """``interrupted`` for an unfinished run without a process.

    The service resumes a run that it was handed: what ``crossfed ps`` says holds.

    Raises:
        CorruptObject: A file of it is damaged.
    """
    handed = run_queue.read(run)
    if handed is not None:
        return handed.status
    if view.finished is not None or run.is_locked():
        return view.status
    return "interrupted"


def shown(
    root: Path, actions: Mapping[str, Action], run: RunFolder | None = None
) -> Shown:
    """What live pages show of the runs of a folder.

    Args:
        root: Folder of all runs.
        actions: What a person may do with a run that goes on.
        run: One more run, which may be elsewhere and not begun.
    """

    def all_runs() -> dict[str, RunFolder]:
        found = {each.path.name: each for each in find_runs(root)}
        return found if run is None else {**found, run.path.name: run}

    return Shown(
        rows=lambda: [
            {**summary(each), "name": name} for name, each in all_runs().items()
        ],
        find=lambda name: all_runs().get(name),
        actions=actions,
    )
