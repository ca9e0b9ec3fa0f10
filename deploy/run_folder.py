"""The folder that a run leaves: job, events, result, model, checkpoints, report."""

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from federation import job_file
from federation.errors import (
    CorruptObject,
    JobError,
    RunConflict,
    RunNotFound,
    StoreUnavailable,
)
from federation.event_log import read_events
from federation.events import Event, RunStarted
from federation.ids import RunId
from federation.job import JobSpec
from federation.protocols import Buffer
from monitoring.run_view import RunView, fold


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Where one run is kept.

    Attributes:
        path: The folder.
    """

    path: Path

    @property
    def job(self) -> Path:
        """The resolved job, in TOML."""
        return self.path / "job.toml"

    @property
    def events(self) -> Path:
        """Everything that happened, a JSON line each."""
        return self.path / "events.jsonl"

    @property
    def result(self) -> Path:
        """What the run came to, in JSON."""
        return self.path / "result.json"

    @property
    def model(self) -> Path:
        """The final model."""
        return self.path / "model.safetensors"

    @property
    def report(self) -> Path:
        """The page to look at."""
        return self.path / "report.html"

    def exists(self) -> bool:
        """Whether a run has begun here."""
        return self.events.is_file()

    def read_events(self) -> list[Event]:
        """Everything that happened so far.

        Raises:
            RunNotFound: No run has begun here.
            CorruptObject: The record is damaged.
        """
        if not self.exists():
            raise RunNotFound(f"there is no run in {self.path} (no events.jsonl)")
        return read_events(self.events)

    def view(self) -> RunView:
        """What the events add up to."""
        found = self.read_events()
        if not any(isinstance(event, RunStarted) for event in found):
            raise RunNotFound(f"the run in {self.path} ended before its first event")
        return fold(found)

    def run_id(self) -> RunId | None:
        """Name of the run that began here; None if none has."""
        if not self.exists():
            return None
        started = (e for e in self.read_events() if isinstance(e, RunStarted))
        first = next(started, None)
        return None if first is None else RunId(first.run_id)

    def write_job(self, job: JobSpec) -> None:
        """Write the resolved job."""
        text = tomli_w.dumps(job_file.document(job))
        replace_file(self.job, [text.encode()])

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Write what the run came to."""
        text = json.dumps(result, indent=2, allow_nan=False) + "\n"
        replace_file(self.result, [text.encode()])

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for one coordinator of this machine.

        Raises:
            RunConflict: Another process holds it.
            StoreUnavailable: The folder cannot be made or written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise _unavailable(self.path, error) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunConflict(
                f"another process runs in {self.path}; wait for it, or choose "
                "another folder with --out"
            ) from None
        else:
            yield
        finally:
            os.close(handle)


def runs_root(job: JobSpec) -> Path | None:
    """Folder of all runs on this machine; None if the job keeps nothing."""
    scheme, _, rest = job.storage.url.partition("://")
    if scheme == "memory":
        return None
    if scheme != "file" or not rest:
        raise JobError(
            f"{job.storage.url!r} is not built yet: use file:// and a folder, or "
            "memory://",
            key="storage.url",
        )
    return Path(rest)


def find_runs(root: Path) -> list[RunFolder]:
    """Every run under a folder, oldest first."""
    found = [RunFolder(path.parent) for path in root.glob("*/*/events.jsonl")]
    return sorted(found, key=lambda run: (run.path.name, str(run.path)))


def find_run(name: str, root: Path) -> RunFolder:
    """Find the run that a person means.

    Args:
        name: A folder, a run id, or a job's name for its newest run.
        root: Folder of all runs.

    Raises:
        RunNotFound: There is none.
    """
    direct = RunFolder(Path(name))
    if direct.exists():
        return direct
    runs = find_runs(root)
    matches = [run for run in runs if name in {run.path.name, run.path.parent.name}]
    if not matches:
        raise RunNotFound(
            f"there is no run {name!r}: give a run folder, a run id or a job's name "
            f"(`crossfed runs` lists those in {root})"
        )
    return matches[-1]


def replace_file(path: Path, pieces: Iterable[Buffer]) -> None:
    """Write a file whole or not at all.

    Raises:
        StoreUnavailable: The folder is full or cannot be written.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise _unavailable(path, error) from error


def summary(run: RunFolder) -> dict[str, Any]:
    """One row of the list of runs."""
    try:
        view = run.view()
    except (RunNotFound, CorruptObject) as error:
        return {"folder": str(run.path), "status": "unreadable", "error": str(error)}
    last = view.last_evaluated
    return {
        "run_id": view.started.run_id,
        "job": view.started.job_name,
        "status": _status(view, run),
        "rounds_completed": view.rounds_completed,
        "rounds": view.started.rounds,
        "loss": None if last is None else last.pooled.loss,
        "accuracy": None if last is None else last.pooled.accuracy,
        "seconds": view.seconds,
        "folder": str(run.path),
    }


def _status(view: RunView, run: RunFolder) -> str:
    """``interrupted`` for a run that no process works on and that never ended."""
    if view.finished is not None:
        return view.status
    try:
        with run.locked():
            return "interrupted"
    except RunConflict:
        return view.status


def _unavailable(path: Path, error: OSError) -> StoreUnavailable:
    return StoreUnavailable(
        f"cannot write {path}: {error.strerror}; free space, change permissions, or "
        "choose another folder with --out"
    )
