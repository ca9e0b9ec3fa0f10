"""The folder of a run: job, events, result, model, checkpoints, report."""

import contextlib
import json
import os
import platform
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import tomli_w

from federation import folder_lock
from federation.durable_files import flush, replace_file, unavailable
from federation.errors import (
    CorruptObject,
    JobError,
    RunConflict,
    RunNotFound,
    StoreUnavailable,
    os_errors,
)
from federation.event_log import KINDS, from_line, no_collection, read_events
from federation.events import (
    CheckpointSaved,
    Event,
    ModelEvaluated,
    RunEvent,
    RunExtended,
    RunFinished,
    RunStarted,
    SiteAnswered,
)
from federation.ids import RunId, SiteId, new_run_id
from federation.job import job_file
from federation.job.spec import JobSpec
from federation.messages import LedgerAnchor, join_anchors
from monitoring.runs import fold_cache
from monitoring.runs.run_reader import RunReader
from monitoring.views import run_plan
from monitoring.views.run_fold import fold
from monitoring.views.run_view import COMPLETED, EXHAUSTED, RunView
from monitoring.views.statistics_view import RunStatistics

if TYPE_CHECKING:
    from monitoring.pages.comparison import ComparedRun

# What the aggregator's service has a run from; see ``deploy.aggregator_host``.
REQUEST = "request.json"
COMPARISON = Path("comparison.html")
_Event = TypeVar("_Event", bound=RunEvent)
_RUN_ID = re.compile(r"\d{8}-\d{6}-[0-9a-f]{6}")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder of one run.

    Attributes:
        path: The folder.
    """

    path: Path

    @property
    def job(self) -> Path:
        """The resolved job, in TOML."""
        return self.path / "job.toml"

    @property
    def memory(self) -> Path:
        """What simulated sites remember of it, and of other runs beside it."""
        return self.path.parent / ".memory"

    @property
    def events(self) -> Path:
        """Everything that happened, a JSON line each."""
        return self.path / "events.jsonl"

    @property
    def result(self) -> Path:
        """The run's result, in JSON."""
        return self.path / "result.json"

    @property
    def model(self) -> Path:
        """The final model."""
        return self.path / "model.safetensors"

    @property
    def report(self) -> Path:
        """The report's page."""
        return self.path / "report.html"

    @property
    def statistics(self) -> Path:
        """What a run of statistics found, in JSON."""
        return self.path / "statistics.json"

    @property
    def lock(self) -> Path:
        """Empty; the process that works on the run holds a lock on it."""
        return self.path / ".lock"

    def exists(self) -> bool:
        """Whether a run has begun here."""
        return self.events.is_file()

    def read_events(
        self,
        *,
        without: Collection[type[Event]] = (),
        only: Collection[type[Event]] = (),
    ) -> list[Event]:
        """Everything that happened so far, but for some kinds; see ``event_log``.

        Raises:
            RunNotFound: No run has begun here.
            CorruptObject: The record is damaged.
            StoreUnavailable: The record cannot be read.
        """
        if not self.exists():
            raise RunNotFound(f"there is no run in {self.path} (no events.jsonl)")
        return read_events(self.events, without=without, only=only)

    def view(self, *, without: Collection[type[Event]] = ()) -> RunView:
        """The view of the events.

        Args:
            without: Kinds of events that are not read; see ``read_events``.

        Raises:
            RunNotFound: There is none, or it ended before its first event.
            CorruptObject: The record is damaged.
            StoreUnavailable: The record cannot be read.
        """
        found = self.read_events(without=without)
        if not any(isinstance(event, RunStarted) for event in found):
            raise RunNotFound(f"the run in {self.path} ended before its first event")
        return fold(found)

    def settled_view(self, *, without: Collection[type[Event]] = ()) -> RunView:
        """The view of the events; of a long log, one with settled rounds.

        It takes a second where a long log has left what its rounds came to.

        Args:
            without: Kinds of events that are not read if the log is short.

        Raises:
            RunNotFound: There is none, or it ended before its first event.
            CorruptObject: The record is damaged.
            StoreUnavailable: The record cannot be read.
        """
        with os_errors(StoreUnavailable, f"read {self.events}"):
            if self.exists() and self.events.stat().st_size >= fold_cache.WORTH_BYTES:
                reader = RunReader(self.events)
                reader.look()
                if reader.fold.has_started and not reader.tail.damaged:
                    return reader.fold.view()
        return self.view(without=without)  # Or what is wrong with it.

    def whole_view(
        self, *, without: Collection[type[Event]] = ()
    ) -> tuple[RunView, str]:
        """The view of what is whole, and where the record is damaged.

        Only for display: what decides how a run goes on reads all of it.

        Args:
            without: Kinds of events that are not read if the log is short.

        Returns:
            The view; and file, line and reason of the first damage, or nothing.

        Raises:
            RunNotFound: There is none, or no event that begins it is whole.
            StoreUnavailable: The record cannot be read.
        """
        try:
            return self.settled_view(without=without), ""
        except CorruptObject as damage:
            with os_errors(StoreUnavailable, f"read {self.events}"):
                reader = RunReader(self.events)
                reader.look()
            if not reader.fold.has_started:
                raise
            return reader.fold.view(), str(damage)

    def is_ended(self) -> bool:
        """Whether nothing is left to do, by the last line of the record."""
        # Who resumes the run is told what cannot be read.
        with contextlib.suppress(OSError), self.events.open("rb") as file:
            file.seek(max(0, self.events.stat().st_size - LAST_BYTES))
            return ends_run(file.read())
        return False

    def is_submitted(self) -> bool:
        """Whether the run belongs to an aggregator's service."""
        return (self.path / REQUEST).exists()

    def engines(self) -> set[str]:
        """Every engine that a coordinator of the run has used.

        Raises:
            CorruptObject: The record is damaged.
            StoreUnavailable: The record cannot be read.
        """
        return {event.engine for event in self._read_only(RunStarted)}

    def anchors(self) -> dict[SiteId, LedgerAnchor]:
        """Return the largest anchor of each site that an answer has brought.

        It is noted here before the answer is used, so also where a coordinator was
        killed before it saved the round, or when the final model was evaluated.

        Raises:
            CorruptObject: The record is damaged.
            StoreUnavailable: The record cannot be read.
        """
        found: dict[SiteId, LedgerAnchor] = {}
        kinds = (SiteAnswered, ModelEvaluated)
        for event in self.read_events(only=kinds) if self.exists() else []:
            spent = []
            if isinstance(event, SiteAnswered):
                spent = [(event.site, event.spent)]
            elif isinstance(event, ModelEvaluated):
                spent = [*zip(event.sites, event.spent, strict=False)]
            known = {SiteId(site): each.anchor for site, each in spent if each}
            found = join_anchors(found, known)
        return found

    def newest_saved(self) -> int | None:
        """The newest round with a checkpoint, by the record; None if there is none.

        Raises:
            CorruptObject: The record is damaged.
            StoreUnavailable: The record cannot be read.
        """
        rounds = (event.round_index for event in self._read_only(CheckpointSaved))
        return max(rounds, default=None)

    def extensions(self) -> Sequence[RunExtended]:
        """How the run was extended, in order.

        Raises:
            CorruptObject: The record is damaged.
            StoreUnavailable: The record cannot be read.
        """
        return self._read_only(RunExtended)

    def _read_only(self, kind: type[_Event]) -> list[_Event]:
        kinds = [each for each in KINDS.values() if each is kind]
        found = self.read_events(only=kinds) if self.exists() else []
        return [event for event in found if isinstance(event, kind)]

    def new_run_id(self, unix_seconds: float) -> RunId:
        """Return the ID of a new run: the folder's name if it is a valid one."""
        return self.named_id() or new_run_id(unix_seconds, os.urandom(3))

    def named_id(self) -> RunId | None:
        """The run ID in the folder's name, if it is one."""
        name = self.path.name
        return RunId(name) if _RUN_ID.fullmatch(name) else None

    def run_id(self) -> RunId | None:
        """ID of the run that started here; None if none has."""
        started = self._read_only(RunStarted)
        return RunId(started[0].run_id) if started else None

    def completed(self, job: JobSpec) -> RunView | None:
        """The view of a finished run of exactly this job."""
        files = (self.events, self.job, self.model, self.result, self.report)
        if not all(file.is_file() for file in files):
            return None
        try:
            kept = tomllib.loads(self.job.read_text())
        except (OSError, ValueError):
            return None
        if job_file.differences(job_file.document(job), kept):
            return None
        view = self.view()
        return view if view.status == COMPLETED else None

    def read_job(self) -> str:
        """The resolved job, as text.

        Raises:
            RunNotFound: The file is missing.
            CorruptObject: It is not UTF-8.
        """
        try:
            return self.job.read_text(encoding="utf-8")
        except OSError as error:
            raise RunNotFound(
                f"the run in {self.path} has lost its job.toml ({error.strerror}): "
                "resume it with its job file, which writes it again"
            ) from error
        except UnicodeDecodeError as error:
            raise CorruptObject(
                f"{self.job} is damaged ({error}): resume the run with its job file, "
                "which writes it again"
            ) from error

    def read_spec(self) -> JobSpec:
        """The resolved job.

        Raises:
            RunNotFound: The file is missing.
            CorruptObject: It is not UTF-8.
            JobError: It is not that of a job.
        """
        try:
            return job_file.loads(self.read_job())
        except JobError as error:
            raise JobError(f"{error.reason} ({self.job})", key=error.key) from error

    def write_job(self, job: JobSpec) -> None:
        """Write the resolved job."""
        text = tomli_w.dumps(job_file.document(job))
        replace_file(self.job, [text.encode()])

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Write the run's result."""
        text = json.dumps(result, indent=2, allow_nan=False) + "\n"
        replace_file(self.result, [text.encode()])

    def write_statistics(self, found: RunStatistics) -> None:
        """Write what a run of statistics found."""
        text = json.dumps(found.document(), indent=2, allow_nan=False) + "\n"
        replace_file(self.statistics, [text.encode()])

    def read_statistics(self) -> RunStatistics | None:
        """Read what a run of statistics found; None if there is nothing.

        Raises:
            CorruptObject: The file is damaged.
        """
        if not self.statistics.is_file():
            return None
        try:
            return RunStatistics.parse(json.loads(self.statistics.read_text("utf-8")))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise CorruptObject(
                f"{self.statistics} is damaged ({error}): resume the run to write it "
                "again"
            ) from error

    def forget_model(self) -> None:
        """Remove the model of an earlier end, as of a run that was extended.

        Called before the record says that the run has ended again: if its process is
        killed before the new model is written, the old one must not pass for it.

        Raises:
            StoreUnavailable: The folder cannot be written.
        """
        try:
            self.model.unlink(missing_ok=True)
            flush(self.path)
        except OSError as error:
            raise unavailable(self.model, error) from error

    def flush_events(self) -> None:
        """Make the events durable.

        Checkpoints outlive a power cut and name their run, so the name must too.

        Raises:
            StoreUnavailable: The disk is full or reports an error.
        """
        try:
            for path in (self.events, self.path):
                flush(path)
        except OSError as error:
            raise unavailable(self.events, error) from error

    def is_locked(self) -> bool:
        """Whether a process works on the run."""
        return folder_lock.is_held(self.lock)

    def holder(self) -> str | None:
        """Who works on the run, as ``locked`` was given; None if nobody does.

        Empty if that is not known, as on a full disk.
        """
        if not self.is_locked():
            return None
        with contextlib.suppress(OSError):
            return self.lock.read_text("ascii", errors="replace")
        return ""

    @contextmanager
    def locked(self, holder: str = "") -> Iterator[None]:
        """Lock the folder for one coordinator of this machine.

        Args:
            holder: Who locks it, in ASCII; for ``holder``.

        Raises:
            RunConflict: Another process holds it.
            StoreUnavailable: The folder cannot be made, written or locked.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            # No link: it is emptied, and others may write where the folder is.
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            handle = os.open(self.lock, flags, 0o644)
        except OSError as error:
            raise unavailable(self.path, error) from error
        try:
            self._take(handle)
            with contextlib.suppress(OSError):  # A full disk keeps nobody from working.
                os.ftruncate(handle, 0)
                os.pwrite(handle, holder.encode("ascii"), 0)
            yield
        finally:
            os.close(handle)

    def _take(self, handle: int) -> None:
        try:
            is_ours = folder_lock.acquire(handle)
        except OSError as error:
            raise unavailable(self.lock, error) from error
        if not is_ours:
            raise RunConflict(
                f"another process is using {self.path}; wait for it, or choose another "
                "folder with --out"
            )


# More than the last event of a run takes.
LAST_BYTES = 1 << 16


def ends_run(events: bytes) -> bool:
    """Whether the last line of a run's events says that nothing is left to do."""
    _, _, last = events.rstrip(b"\n").rpartition(b"\n")
    with contextlib.suppress(ValueError):
        event = from_line(last)
        return isinstance(event, RunFinished) and event.status in {COMPLETED, EXHAUSTED}
    return False


def leave_report(
    run: RunFolder, path: Path | None = None, view: RunView | None = None
) -> Path:
    """Write the report of a run from its files, or a view of it; return its path.

    Raises:
        RunNotFound: There is no run in the folder, or its job file is missing.
        CorruptObject: What was predicted of it is damaged.
        StoreUnavailable: The report cannot be written.
    """
    from monitoring.pages.report import write_report  # noqa: PLC0415 -- slow to import

    path = path or run.report
    with no_collection():
        view = view or run.settled_view()
        plan, found = run_plan.read(run.path), run.read_statistics()
        job = run.read_job()
        write_report(view, job, _versions(), path, plan=plan, statistics=found)
    return path


def leave_comparison(runs: Sequence[RunFolder], path: Path | None = None) -> Path:
    """Write the comparison of runs from their files, and return its path.

    Args:
        runs: At least two.
        path: Where to write; ``comparison.html`` in the working folder by default.

    Raises:
        RunNotFound: A folder holds no run, or has lost its job file.
        StoreUnavailable: The page cannot be written.
    """
    from monitoring.pages.report import write_page  # noqa: PLC0415 -- slow to import

    path = path or COMPARISON
    write_page(render_comparison(runs), path)
    return path


def leave_sweep(runs: Sequence[RunFolder], folder: Path) -> Sequence[Path]:
    """Draw the figures of a sweep; see ``monitoring.pages.sweep.write_sweep``."""
    from monitoring.pages.sweep import write_sweep  # noqa: PLC0415 -- slow to import

    return write_sweep(_compared(runs), folder)


def render_comparison(runs: Sequence[RunFolder]) -> str:
    """Return the comparison of runs as a page, from their files.

    Raises:
        RunNotFound: A folder holds no run, or has lost its job file.
    """
    from monitoring.pages.comparison import render  # noqa: PLC0415 -- slow to import

    return render(_compared(runs))


def _compared(runs: Sequence[RunFolder]) -> "list[ComparedRun]":
    from monitoring.pages.comparison import ComparedRun  # noqa: PLC0415 -- slow to import

    return [
        ComparedRun(
            folder=str(run.path),
            view=run.view(),
            job_toml=run.read_job(),
            plan=run_plan.read(run.path),
        )
        for run in runs
    ]


def _versions() -> dict[str, str]:
    """Versions of software that the numbers depend on."""
    packages = ("crossfed", "numpy", "torch", "scikit-learn", "safetensors")
    found = {name: metadata.version(name) for name in packages}
    return {"python": platform.python_version(), **found}
