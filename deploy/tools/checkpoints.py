"""The checkpoints of a run in any store: list, check and remove them."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from aggregator import checkpoint_survey
from aggregator.checkpoint_survey import PruneResult, Survey, SurveyEntry
from cloud_adapters.urls import StoreOptions, open_store
from deploy.wiring import run_store
from deploy.wiring.encryption import (
    NO_KEY,
    KeyName,
    encrypted,
    encrypted_with,
    place_of_url,
)
from federation.errors import RunNotFound
from federation.protocols import Clock, ObjectStore
from monitoring.runs.find import find_run
from monitoring.runs.run_folder import RunFolder
from monitoring.units import format_bytes, format_count

PREFIX = "checkpoints/"

_ITSELF = StoreOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFindings:
    """The findings on a run's checkpoints.

    Attributes:
        url: Where they are.
        survey: What is there, after pruning.
        pruned: What was removed; None if that was not asked for.
    """

    url: str
    survey: Survey
    pruned: PruneResult | None

    @property
    def num_damaged(self) -> int:
        """How many checkpoints cannot be used."""
        return sum(bool(found.damage) for found in self.survey.checkpoints)


def examine(
    place: str,
    root: Path,
    *,
    verify: bool,
    keep: int | None,
    clock: Clock,
    encryption: KeyName = NO_KEY,
    service: StoreOptions = _ITSELF,
) -> CheckpointFindings:
    """Examine the checkpoints of a run, and remove old ones if requested.

    Args:
        place: URL of a run's place in a store; or a folder, run id or job's name.
        root: Folder of all runs.
        verify: Read every byte.
        keep: How many to keep; None to remove nothing.
        clock: Says how old left-over objects are.
        encryption: Key of a run that a URL names; the job of another run names it.
        service: Where the store of a URL is, if that is not what the URL says.

    Raises:
        RunNotFound: There is no such run, or it has no checkpoints.
        RunConflict: ``keep`` is given, and a process of this machine works on the run.
        JobError: ``place`` is a URL and names no store.
        KeyRefused: The run's checkpoints are encrypted, and its key cannot be used.
        StoreUnavailable: The store is unreachable.
    """
    is_changed = keep is not None
    with _opened(place, root, encryption, service, is_changed=is_changed) as store:
        pruned = None
        if keep is not None:
            now = clock.now()
            pruned = checkpoint_survey.prune(store, PREFIX, keep=keep, now=now)
        survey = checkpoint_survey.survey(store, PREFIX, verify=verify)
        if not survey.checkpoints:
            raise RunNotFound(
                f"there are no checkpoints in {store.url}/{PREFIX}: give a run, or the "
                "URL of a run's own place, such as s3://BUCKET/PREFIX/JOB/RUNID"
            )
        return CheckpointFindings(url=store.url, survey=survey, pruned=pruned)


def facts(findings: CheckpointFindings) -> dict[str, Any]:
    """The same as plain values."""
    return asdict(findings) | {"damaged": findings.num_damaged}


def lines(findings: CheckpointFindings) -> Iterator[str]:
    """The same for a person."""
    survey = findings.survey
    yield f"{'round':>8}  {'written':<20}  {'size':>9}  {'shared':>9}  state"
    for found in survey.checkpoints:
        index = "?" if found.round_index is None else str(found.round_index)
        size, shared = format_bytes(found.size), format_bytes(found.shared)
        state = found.damage or ("verified" if survey.verified else "all there")
        when = _when(found)
        yield f"{index:>8}  {when:<20}  {size:>9}  {shared:>9}  {state}"
    if survey.num_unnamed:
        objects = format_count(survey.num_unnamed, "object")
        size = format_bytes(survey.unnamed_bytes)
        yield f"{objects} that no checkpoint names, {size}"
    if findings.pruned is not None:
        removed = format_count(len(findings.pruned.checkpoints), "checkpoint")
        yield f"removed {removed}, {format_bytes(findings.pruned.freed_bytes)}"


def _when(found: SurveyEntry) -> str:
    if found.written is None:
        return "-"
    return f"{datetime.fromtimestamp(found.written, UTC):%Y-%m-%d %H:%M:%SZ}"


@contextmanager
def _opened(
    place: str,
    root: Path,
    encryption: KeyName,
    service: StoreOptions,
    *,
    is_changed: bool,
) -> Iterator[ObjectStore]:
    with ExitStack() as stack:
        if "://" in place:
            store = open_store(place, options=service)
            if encryption:
                bound = place_of_url(place)
                store = encrypted_with(encryption, store, place=bound)
        else:
            run = find_run(place, root)
            if is_changed:
                stack.enter_context(run.locked())
            store = _store_of(run)
        stack.callback(store.close)
        yield store


def _store_of(run: RunFolder) -> ObjectStore:
    """The store of a run's checkpoints, decrypted: its folder, or its bucket."""
    job, run_id = run.read_spec(), run.run_id() or ""
    store = run_store.open_kept(job, run, run_id)
    return encrypted(job, store, run_id=run_id)
