"""The runs of this machine: their folders, and a summary of each."""

import contextlib
import functools
from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from textwrap import shorten
from typing import Any

from deploy.aggregator_host import (
    admission,
    disk_reserve,
    enrolment_operator,
    run_queue,
)
from deploy.aggregator_host.config import AggregatorConfig
from deploy.aggregator_host.parties import Parties, check
from deploy.aggregator_host.run_queue import QueuedRun
from federation.errors import FederationError, RunNotFound, StoreError
from federation.events import SiteAnswered, SiteFailed, StepTaken
from federation.protocols import Clock
from monitoring.privacy_words import has_noise
from monitoring.runs.find import find_runs
from monitoring.runs.run_folder import RunFolder
from monitoring.views.result_json import finite
from monitoring.views.round_view import RUNNING, accuracy_of, loss_of
from monitoring.views.run_view import INTERRUPTED, VIRTUAL
from monitoring.web.app import Action, Shown
from monitoring.web.run_metrics import WAIT_SECONDS, RunsCollector

MAX_NOTE_CHARS = 300  # A hundred sites may refuse, with a line for each.


def summary(run: RunFolder) -> dict[str, Any]:
    """One row of the list of runs; numbers that are not finite become None."""
    try:
        numbers, handed = _numbers(run), run_queue.read(run)
        return {
            **numbers,
            "status": _status(run, handed, str(numbers["status"])),
            "note": _note(handed, numbers.get("error", "")),
            "folder": str(run.path),
        }
    except (RunNotFound, StoreError) as error:
        return {
            "run_id": run.path.name,
            "job": run.path.parent.name,
            "started_at": 0.0,
            "status": "unreadable",
            "error": str(error),
            "note": str(error),
            "folder": str(run.path),
        }


def by_time(row: Mapping[str, Any]) -> tuple[float, str]:
    """The place of a row in a list, however the run's folder is called."""
    return row["started_at"], str(row["run_id"])


def _note(handed: QueuedRun | None, damage: str) -> str:
    """What is damaged, why the run ended, and which sites it does without."""
    reason, away = (handed.reason, handed.away) if handed else ("", ())
    without = f"without {', '.join(away)}" if away else ""
    return "; ".join(filter(None, (damage, reason, without)))


def _status(run: RunFolder, handed: QueuedRun | None, status: str) -> str:
    """``interrupted`` for an unfinished run without a process.

    The service resumes a run that it was handed: what ``crossfed ps`` says holds.
    """
    if handed is not None:
        return handed.status
    return INTERRUPTED if status == RUNNING and not run.is_locked() else status


def _numbers(run: RunFolder) -> Mapping[str, Any]:
    """What the events of a run come to; from memory if there are no new ones."""
    try:
        found = run.events.stat()
    except OSError as error:
        raise RunNotFound(f"there is no run in {run.path} (no events.jsonl)") from error
    return _folded(run, found.st_size, found.st_mtime_ns)


@functools.lru_cache(maxsize=4096)
def _folded(run: RunFolder, _size: int, changed_ns: int) -> Mapping[str, Any]:
    view, damage = run.whole_view(without=(SiteAnswered, SiteFailed, StepTaken))
    sums = None if view.last_evaluated is None else view.last_evaluated.pooled
    return {
        "run_id": view.started.run_id,
        "job": view.started.job_name,
        # In virtual time every run begins at the same moment.
        "started_at": changed_ns / 1e9
        if view.started.engine == VIRTUAL
        else view.first_started_at,
        "status": view.status,
        "rounds_completed": view.rounds_completed,
        "rounds": view.started.rounds,
        "loss": finite(loss_of(sums)),
        "accuracy": finite(accuracy_of(sums)),
        "is_noisy": has_noise(view.privacy),
        "seconds": view.seconds,
        **({"error": damage} if damage else {}),
    }


def of_aggregator(
    config: AggregatorConfig,
    clock: Clock,
    run: RunFolder | None = None,
    collector: RunsCollector | None = None,
) -> Shown:
    """Return what live pages of an aggregator show.

    Args:
        config: The operator's ``aggregator.toml``.
        clock: Tells time.
        run: See ``shown``.
        collector: Has the numbers of the newest runs; one of its own by default.
    """
    numbers = collector or RunsCollector(lambda: find_runs(config.runs))

    def resume(folder: RunFolder) -> None:
        handed = run_queue.read(folder)
        if handed is None:
            raise RunNotFound(f"{folder.path} was not submitted to the aggregator")
        run_queue.check_resumable(handed)
        begun = folder.run_id() is not None
        check(folder.read_spec(), Parties.of_run(config.folder, folder), resumed=begun)
        run_queue.take_up(folder, at=clock.now(), who=run_queue.page_user())

    def stop(folder: RunFolder) -> None:
        run_queue.ask_to_stop(folder, at=clock.now(), who=run_queue.page_user())

    actions = {"stop": stop, "resume": resume}
    pages = shown(config.runs, actions, run)
    return replace(
        pages,
        rows=lambda: sorted([*pages.rows(), *_never_begun(config.runs)], key=by_time),
        revoked=lambda: admission.revoked(config),
        missing=missing,
        queued=queued,
        queue=lambda: admission.queue(config, now=clock.now()),
        sites=lambda: _sites(config, clock, numbers),
        trouble=lambda: disk_reserve.shortage(config),
    )


def _sites(
    config: AggregatorConfig, clock: Clock, numbers: RunsCollector
) -> list[dict[str, Any]]:
    runs = numbers.look(WAIT_SECONDS).values()
    with contextlib.suppress(FederationError):  # Verbs say what is damaged.
        found = enrolment_operator.overview(config, clock=clock, runs=runs)
        return [asdict(row) for row in found.sites]
    return []


def _never_begun(root: Path) -> list[dict[str, Any]]:
    """Rows of runs that ended before their first event: sites refused them, say."""
    return [
        {
            "name": one.name,
            "run_id": one.name,
            "job": one.run.path.parent.name,
            "started_at": one.request.at,
            "status": one.status,
            "note": shorten(one.reason, MAX_NOTE_CHARS, placeholder=" ..."),
            "folder": str(one.run.path),
        }
        for one in run_queue.handed_over(root).never_begun
    ]


def missing(run: RunFolder) -> Collection[str]:
    """Sites that a run waits for because they are away, as its coordinator noted."""
    try:
        found = run_queue.connected(run)
    except FederationError:  # It only informs people; verbs say what is damaged.
        return ()
    return () if found is None else found.missing


def queued(run: RunFolder) -> str:
    """What ``crossfed ps`` says of a run that has not ended; empty of others."""
    try:
        handed = run_queue.read(run)
    except FederationError:  # As above.
        return ""
    return handed.status if handed is not None and handed.outcome is None else ""


def shown(
    root: Path, actions: Mapping[str, Action], run: RunFolder | None = None
) -> Shown:
    """What live pages show of the runs of a folder.

    Args:
        root: Folder of all runs.
        actions: What a person may do with a run; see ``ACTIONS``.
        run: One more run, which may be elsewhere and not begun.
    """

    def all_runs() -> dict[str, RunFolder]:
        found = {each.path.name: each for each in find_runs(root)}
        return found if run is None else {**found, run.path.name: run}

    return Shown(
        rows=lambda: sorted(
            ({**summary(each), "name": name} for name, each in all_runs().items()),
            key=by_time,
        ),
        find=lambda name: all_runs().get(name),
        actions=actions,
    )
