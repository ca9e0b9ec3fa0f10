"""Runs that were submitted to the aggregator, as files in their folders.

``crossfed run`` writes ``job.toml`` and ``request.json``; the service starts a
coordinator and notes it in ``coordinator.json``; the coordinator leaves
``outcome.json`` when there is nothing more to do, whether it went well or not. A
coordinator that ends without an outcome was killed, or found the disk full, and the
service starts another once there is room, which continues from the newest checkpoint.
``stop`` asks it to end after its round, and ``yield`` to wait for its next turn.
"""

import contextlib
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cloud_adapters.flower.facts import Connected, FlowerRun
from cloud_adapters.storage.disk.part_file import file_errors
from deploy import audit_log
from deploy.aggregator_host import run_notes
from deploy.exit_codes import FAILED, STOPPED, status_of
from deploy.wiring import extension
from federation import durable_files
from federation.durable_files import replace_file
from federation.errors import (
    CheckpointMismatch,
    CorruptObject,
    FederationError,
    JobError,
    RunConflict,
    RunNotFound,
    is_full,
)
from federation.event_log import EventWriter
from federation.events import (
    RoundFinished,
    RunFinished,
    RunStarted,
    SitesLeftOut,
    recalled,
)
from federation.ids import SiteId
from federation.job import job_file
from federation.job.spec import JobSpec
from federation.rounds.round_sums import completed_rounds
from monitoring.runs.run_folder import REQUEST, RunFolder
from monitoring.views.result_json import result
from monitoring.views.run_view import INTERRUPTED

COORDINATOR = "coordinator.json"
OUTCOME, STOP, CONNECTED = "outcome.json", "stop", "connected.json"
YIELD, SLOTS = "yield", "slots.json"
OPERATOR = "operator"  # Whoever can write the aggregator's folder.
_PAUSE = b"pause\n"  # What the file says if the run is to be resumed.

# What a run's disk must have room for before a coordinator is started.
ROOM_BYTES = 1 << 20

# Looks, a second each, after which a coordinator without the lock has died; one that
# has noted its end usually tells Flower within some seconds.
MISSED_LOOKS, ENDED_LOOKS = 3, 8

# After so many of its rounds in a row without an update a site is named.
_FAILING_ROUNDS = 3

# How long a coordinator may note nothing in its own work: it tries again for so long
# what a store refuses (``cloud_adapters.storage.retry``). It notes begin and end of its
# waits for sites that may come back, which are shorter (``flower.presence``).
PATIENCE_SECONDS = 120.0

# Starts of a coordinator without a single round in between.
MAX_FRUITLESS_STARTS = 5

# Without an event for the deadline of a round and so much more, a coordinator hangs.
MARGIN_SECONDS, MARGIN_SHARE = 30.0, 0.2


class TurnOver(FederationError):
    """A run makes way for another, and continues from its checkpoint later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """A request for a run.

    Attributes:
        at: When; seconds since 1970.
        owner: Who wants it.
        priority: Runs of a higher one go first.
        sites: Sites and relays of the job.
        deadline_seconds: That of the job's rounds.
        since: When it began to wait for its turn; as ``at`` for 0.
        used: How many seconds it held its sites in earlier turns.
        memory_mib: Memory that it takes at each site; None if the job does not say.
        gpu_memory_mib: The same of GPUs' memory.
    """

    at: float
    owner: str = OPERATOR
    priority: int = 0
    sites: tuple[str, ...] = ()
    deadline_seconds: float = 600.0
    since: float = 0.0
    used: float = 0.0
    memory_mib: int | None = None
    gpu_memory_mib: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinator:
    """The coordinator that was started last.

    Attributes:
        flower_run: Flower's number for it, as text: it has 64 bits.
        fruitless: Starts since the last one after which a round was completed.
        rounds: Rounds that were completed when it was started.
        at: When it was started; seconds since 1970.
        begun: When the run's turn began, perhaps with an earlier one.
        used: How many seconds earlier ones of this turn held the sites.
    """

    flower_run: str
    fruitless: int
    rounds: int
    at: float = 0.0
    begun: float = 0.0
    used: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended.

    Attributes:
        code: One of ``deploy.exit_codes``.
        message: What happened, and what to do.
    """

    code: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedRun:
    """A submitted run, and its progress.

    Attributes:
        run: Its folder.
        request: That it is wanted.
        coordinator: Who works on it; None if it has not started.
        outcome: How it ended; None if it has not.
        stop: Whether it was asked to end after its round.
        yields: Whether it was asked to make way after its round.
    """

    run: RunFolder
    request: RunRequest
    coordinator: Coordinator | None
    outcome: Outcome | None
    stop: bool = False
    yields: bool = False

    @property
    def name(self) -> str:
        """Its ID."""
        return self.run.path.name

    def works(self, flower: Mapping[int, FlowerRun]) -> bool:
        """Whether a coordinator works on it, according to the SuperLink."""
        if self.coordinator is None or self.outcome is not None:
            return False
        now = flower.get(int(self.coordinator.flower_run))
        return now is not None and not now.is_over

    def ended(self, now: float) -> float:
        """When it ended; ``now`` if it has not."""
        return now if self.outcome is None else _written(self.run.path / OUTCOME)

    def held_seconds(self, now: float) -> float:
        """How long it has held its sites."""
        before = self.coordinator
        if before is None or not before.at:
            return self.request.used
        turn = before.used + max(0.0, self.ended(now) - before.at)
        return self.request.used + turn

    @property
    def has_begun(self) -> bool:
        """Whether its coordinator has noted anything."""
        before = self.coordinator
        return before is not None and _written(self.run.events) >= before.at

    @property
    def is_finishing(self) -> bool:
        """Whether its coordinator has done all rounds: it needs its sites no longer."""
        return self.has_begun and self.run.is_ended()

    @property
    def has_made_way(self) -> bool:
        """Whether its coordinator has ended so that another one may continue."""
        last = run_notes.read(self.run.events).events[-1:]
        return self.has_begun and any(
            isinstance(e, RunFinished) and e.status == INTERRUPTED for e in last
        )

    def hangs(self, now: float, *, connect_seconds: float) -> bool:
        """Whether its coordinator has noted nothing for longer than a round may take.

        A round ends at its deadline. What may come before and after it, a wait for
        sites that were disconnected and a checkpoint, is noted apart.
        """
        if self.coordinator is None or self.is_finishing:
            return False
        started = self.coordinator.at
        limit = connect_seconds
        if self.has_begun:
            limit = max(self.request.deadline_seconds, PATIENCE_SECONDS)
        limit += max(MARGIN_SECONDS, MARGIN_SHARE * limit)
        return now - max(started, _progressed(self.run)) > limit

    @property
    def ended_at(self) -> float:
        """When its outcome was left, seconds since 1970; 0 before."""
        return _written(self.run.path / OUTCOME)

    @property
    def rounds(self) -> int:
        """Rounds that are completed; counted from all events at each call."""
        return _completed_rounds(self.run)

    @property
    def away(self) -> Sequence[str]:
        """Sites that the run does without or waits for, each with the reason."""
        if self.outcome is not None:
            return []
        event, awaited = _left_out(self.run)
        named = () if event is None else event.named()
        waits = (f"{site} (round {index} waits)" for site, index in awaited.items())
        found = connected(self.run)
        missing = () if found is None else map(found.lack, found.missing)
        texts = [*named, *waits, *missing]
        known = {text.partition(" (")[0] for text in texts}
        unheard = run_notes.read(self.run.events).unheard.items()
        failing = (
            f"{site} (no update in its last {number} rounds)"
            for site, number in sorted(unheard)
            if number >= _FAILING_ROUNDS and site not in known
        )
        return [*texts, *failing]

    @property
    def back(self) -> Sequence[str]:
        """Sites that left the run and take part again, each with how often."""
        event, _ = _left_out(self.run) if self.outcome is None else (None, {})
        return () if event is None else event.back()

    @property
    def reason(self) -> str:
        """Why it did not complete; empty if it did or has not ended."""
        return self.outcome.message if self.outcome and self.outcome.code else ""

    @property
    def loss(self) -> float | None:
        """The newest mean held-out loss; None if there is none yet."""
        return run_notes.read(self.run.events).loss

    @property
    def is_noisy(self) -> bool:
        """Whether that loss contains noise of sites."""
        return run_notes.read(self.run.events).is_noisy

    @property
    def status(self) -> str:
        """``waiting``, ``running``, ``finishing`` or how it ended.

        A run waits until a coordinator has met its sites and begun it, or continued
        with it. A coordinator that finishes has done all rounds and writes model and
        report.
        """
        if self.outcome is not None:
            return status_of(self.outcome.code)
        if self.coordinator is None or not self.run.exists():
            return "waiting"
        if _written(self.run.events) < self.coordinator.at:
            return "waiting"
        if _is_finishing(self.run):
            return "finishing"
        return "running" if self.run.is_locked() else "waiting"


@dataclass(frozen=True, slots=True, kw_only=True)
class DamagedRun:
    """A run with a damaged file: it waits until that is fixed.

    Attributes:
        run: Its folder.
        reason: Which file, and what to do.
    """

    run: RunFolder
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """Every submitted run.

    Attributes:
        runs: The oldest first.
        damaged: Those that cannot be read; they do not delay other runs.
    """

    runs: tuple[QueuedRun, ...]
    damaged: tuple[DamagedRun, ...]

    @property
    def never_begun(self) -> tuple[QueuedRun, ...]:
        """Runs that ended before their first event: sites refused them, for example."""
        over = (one for one in self.runs if one.outcome is not None)
        return tuple(one for one in over if not one.run.exists())


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorStart:
    """Start a coordinator for a run."""

    handed: QueuedRun
    fruitless: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderInUse:
    """Wait for a process that works in a run's folder.

    Flower takes a coordinator for dead whose host stood still for a minute. It still
    holds the lock until it notices, and the next one could only make way.
    """

    handed: QueuedRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Requeue:
    """Let a run wait for its next turn: its coordinator has made way."""

    handed: QueuedRun


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """Write an outcome for a run that no coordinator will finish."""

    handed: QueuedRun
    code: int
    reason: str
    at_work: int | None = None  # Flower's number of a coordinator that is to end.


def submit(
    job: JobSpec,
    run: RunFolder,
    *,
    at: float,
    owner: str = OPERATOR,
    priority: int = 0,
) -> None:
    """Submit a job.

    Raises:
        RunConflict: There is a run in the folder.
        StoreUnavailable: The folder cannot be written.
    """
    if run.exists() or run.is_submitted():
        raise RunConflict(f"{run.path} already holds a run: choose another folder")
    with file_errors("make", run.path):
        run.path.mkdir(parents=True, exist_ok=True)
    run.write_job(job)
    request = _of_job(RunRequest(at=at, owner=owner, priority=priority), job)
    durable_files.write_json(run.path / REQUEST, request)


def _of_job(request: RunRequest, job: JobSpec) -> RunRequest:
    names = [*(each.name for each in job.sites), *(each.name for each in job.relays)]
    return replace(
        request,
        sites=tuple(names),
        deadline_seconds=job.schedule.round_deadline_seconds,
        memory_mib=job.schedule.memory_mib,
        gpu_memory_mib=job.schedule.gpu_memory_mib,
    )


def note_job(run: RunFolder) -> None:
    """Note that sites have joined a run: it needs slots at them, too.

    Raises:
        StoreUnavailable: Its folder cannot be written.
    """
    request = _read(run.path / REQUEST, RunRequest)
    durable_files.write_json(run.path / REQUEST, _of_job(request, run.read_spec()))


def find_ended(
    job: JobSpec, root: Path, *, owner: str = OPERATOR, extend: bool = False
) -> RunFolder:
    """Find an owner's newest run of a job, which ended before its last round.

    Args:
        job: The job that it was started with.
        root: Folder of all runs.
        owner: Whose run it is.
        extend: Whether the job may have more rounds than the run started with, which
            may then be completed.

    Raises:
        RunNotFound: The owner has submitted none.
        RunConflict: It has not ended, or has come to its end.
        CheckpointMismatch: It was started with another job.
        CorruptObject: A file of it is damaged.
    """
    found, others = None, set[str]()
    for path in sorted(root.glob(f"{job.name}/*/{REQUEST}"), reverse=True):
        one = read(RunFolder(path.parent))
        if one is not None and one.request.owner == owner:
            found = one
            break
        others |= set() if one is None else {one.request.owner}
    if found is None:
        told = f"; --owner may be {' or '.join(sorted(others))}" if others else ""
        raise RunNotFound(
            f"{root} has no run of the job {job.name!r} of owner {owner!r} to "
            f"resume{told}"
        )
    run, name = found.run, found.run.path.name
    check_resumable(found, extend=extend)
    if extend:
        extension.check(job, run)
        return run
    kept = job_file.document(run.read_spec())
    changes = job_file.differences(job_file.document(job), kept)
    if changes:
        raise CheckpointMismatch(
            f"run {name} was started with another job: {'; '.join(changes)} (there: "
            "the run). Set these keys back to resume, or submit it without --resume"
        )
    return run


def folder_of(run: RunFolder) -> Path:
    """The aggregator's folder."""
    return run.path.parents[2]


def check_resumable(found: QueuedRun, *, extend: bool = False) -> None:
    """Refuse to resume a run that goes on, or has nothing left to do.

    Raises:
        RunConflict: It has not ended; or has come to its end, and gets no more rounds.
    """
    name = found.run.path.name
    if found.outcome is None:
        raise RunConflict(f"run {name} has not ended: crossfed watch {name} shows it")
    if found.outcome.code == 0 and not extend:
        raise RunConflict(
            f"run {name} is completed: omit --resume to start a new run, or add rounds "
            "with --extend"
        )


def take_up(run: RunFolder, *, at: float, who: str | None = None) -> None:
    """Submit a run again that ``find_ended`` has found; ``who`` as in the audit log.

    Raises:
        StoreUnavailable: Its folder cannot be written.
    """
    audit_log.note(folder_of(run), "run.resume", run.path.name, at=at, who=who)
    before = read(run)
    request = RunRequest(at=at) if before is None else _waiting(before, at)
    request = _of_job(request, run.read_spec())  # Sites may have joined it.
    for name in (COORDINATOR, STOP, YIELD, CONNECTED):
        (run.path / name).unlink(missing_ok=True)
    durable_files.write_json(run.path / REQUEST, replace(request, at=at))
    # The outcome goes last: until then it is not wanted.
    (run.path / OUTCOME).unlink(missing_ok=True)


def requeue(handed: QueuedRun, *, at: float) -> None:
    """Let a run that has made way wait for its next turn.

    Raises:
        StoreUnavailable: Its folder cannot be written.
    """
    path, request = handed.run.path, _waiting(handed, at)
    for name in (COORDINATOR, CONNECTED):
        (path / name).unlink(missing_ok=True)
    durable_files.write_json(path / REQUEST, request)
    (path / YIELD).unlink(missing_ok=True)


def _waiting(handed: QueuedRun, at: float) -> RunRequest:
    return replace(handed.request, since=at, used=handed.held_seconds(at))


def ask_to_yield(run: RunFolder) -> None:
    """Ask a run to make way after its round."""
    replace_file(run.path / YIELD, [b""])


def is_to_stop(run: RunFolder) -> bool:
    """Whether a coordinator is to end after its round.

    Raises:
        TurnOver: It is to make way.
    """
    if (run.path / STOP).exists():
        return True
    if (run.path / YIELD).exists():
        raise TurnOver(
            "the run makes way (crossfed ps says why), and continues from its newest "
            "checkpoint"
        )
    return False


def note_slots(run: RunFolder, slots: Mapping[SiteId, tuple[int, int, int]]) -> None:
    """Note what the sites of a run have room for; see ``SignedHandshake.slots``."""
    replace_file(run.path / SLOTS, [json.dumps(slots).encode()])


def slots_of(runs: Iterable[QueuedRun]) -> dict[str, int]:
    """How many runs at once each site takes, as it stated last."""
    return {site: max(1, most) for site, (most, *_) in _stated(runs).items()}


def memory_of(runs: Iterable[QueuedRun]) -> dict[str, tuple[float, float]]:
    """MiB of memory and GPU memory that runs may take at each site together."""
    return {
        site: (float(memory) or math.inf, float(gpu) or math.inf)
        for site, (_, memory, gpu) in _stated(runs).items()
    }


def _stated(runs: Iterable[QueuedRun]) -> dict[str, tuple[int, int, int]]:
    found: dict[str, tuple[int, int, int]] = {}
    for path in sorted((one.run.path / SLOTS for one in runs), key=_written):
        with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):
            for site, stated in json.loads(path.read_bytes()).items():
                # Earlier releases noted the number of runs alone.
                runs_, memory, gpu = (
                    [stated, 0, 0] if isinstance(stated, int) else stated
                )
                found[site] = int(runs_), int(memory), int(gpu)
    return found


def note_connected(run: RunFolder, found: Connected) -> None:
    """Note for people which sites a run has and still waits for."""
    durable_files.write_json(run.path / CONNECTED, found)


def connected(run: RunFolder) -> Connected | None:
    """What was noted last; None if nothing was.

    Raises:
        CorruptObject: The file is damaged.
    """
    advice = "remove the file: it only informs people"
    return durable_files.read_json(run.path / CONNECTED, Connected, advice=advice)


def ask_to_stop(run: RunFolder, *, at: float, who: str | None = None) -> None:
    """Ask a run to end after its round; ``who`` as in ``audit_log.note``."""
    audit_log.note(folder_of(run), "run.stop", run.path.name, at=at, who=who)
    replace_file(run.path / STOP, [b""])


def page_user() -> str:
    """Who presses a button of a live page, for the audit log."""
    return f"the live page of {audit_log.operator()}"


def ask_to_pause(run: RunFolder) -> None:
    """Ask a run to end after its round, and to be resumed by the command that asks.

    A person's request to stop counts, whether it comes before or after.
    """
    if not (run.path / STOP).exists():
        replace_file(run.path / STOP, [_PAUSE])


def is_pause(run: RunFolder) -> bool:
    """Whether a run that ends after its round is to be resumed."""
    path = run.path / STOP
    return path.exists() and path.read_bytes() == _PAUSE


def note_stopped(run: RunFolder, reason: str, *, at: float) -> None:
    """Record the end of a run whose last coordinator expected another one."""
    with contextlib.suppress(RunConflict), run.locked():
        last = run_notes.read(run.events).events[-1:]
        for end in last:
            if not isinstance(end, RunFinished) or end.status != INTERRUPTED:
                return  # Its coordinator was killed, or has said how it ended.
            with EventWriter(run.events) as write:
                write(replace(end, status="stopped", message=reason, at=at))
            run.write_result(result(run.view()))


def leave_outcome(run: RunFolder, outcome: Outcome) -> None:
    """Write the outcome of a run; the first one counts."""
    if not (run.path / OUTCOME).exists():
        durable_files.write_json(run.path / OUTCOME, outcome)


def goes_on(error: BaseException) -> bool:
    """Whether a run continues after an error that ends its coordinator.

    The service starts another one: where this one was ended from outside, met an error
    that crossfed does not expect, found the disk full, or found another at work.
    """
    if not isinstance(error, FederationError):
        return True
    return isinstance(error, RunConflict | TurnOver) or is_full(error)


def check_room(run: RunFolder) -> None:
    """Refuse to start a coordinator that could not write anything.

    Nor could its start be noted, and another one would follow it immediately.

    Raises:
        StoreUnavailable: The folder cannot be written, for example since its disk is
            full.
    """
    probe = run.path / "room"
    replace_file(probe, [bytes(ROOM_BYTES)])
    probe.unlink()


class DeadCoordinators:
    """Finds coordinators that have died, from the locks on their runs' folders.

    One that has not been seen to hold the lock, and has noted nothing, is not counted:
    it takes seconds to start, and the one before it may still hold the lock.
    """

    def __init__(self) -> None:
        """Begin with none."""
        self._missed: dict[str, int] = {}  # Looks, by Flower's number.

    def look(
        self, handed: Iterable[QueuedRun], now: float
    ) -> list[tuple[RunFolder, int]]:
        """Runs whose coordinator has not held the lock for some looks, with its number.

        One that has just done its work leaves its outcome immediately. One that was
        started later than ``now`` was started while the service's clock was ahead.
        """
        found, missed = [], {}
        for one in handed:
            if one.outcome is not None or one.coordinator is None:
                continue
            number, holder = one.coordinator.flower_run, one.run.holder()
            if holder in {"", number}:
                missed[number] = 0
            elif number in self._missed or (
                # Known to a service that was killed with it, too. Where another holds
                # the lock, it is that one's note.
                holder is None
                and one.coordinator.at
                and (one.has_begun or one.coordinator.at > now)
            ):
                missed[number] = self._missed.get(number, 0) + 1
                limit = ENDED_LOOKS if one.has_made_way else MISSED_LOOKS
                if missed[number] == limit:
                    found.append((one.run, int(number)))
        self._missed = missed
        return found


def note_start(
    handed: QueuedRun, flower_run: int, *, fruitless: int, at: float = 0.0
) -> None:
    """Record which coordinator works on a run, from a time on."""
    begun, used, before = at, 0.0, handed.coordinator
    if before is not None:
        begun = before.begun
        used = before.used + max(0.0, _progressed(handed.run) - before.at)
    durable_files.write_json(
        handed.run.path / COORDINATOR,
        Coordinator(
            flower_run=str(flower_run),
            fruitless=fruitless,
            rounds=handed.rounds,
            at=at,
            begun=begun,
            used=used,
        ),
    )


def read(run: RunFolder) -> QueuedRun | None:
    """Progress of a run; None if it was not submitted.

    Raises:
        CorruptObject: A file of it is damaged.
    """
    request = _read(run.path / REQUEST, RunRequest)
    if request is None:
        return None
    if not request.sites:  # Of an earlier release.
        request = _of_job(request, run.read_spec())
    return QueuedRun(
        run=run,
        request=request,
        coordinator=_read(run.path / COORDINATOR, Coordinator),
        outcome=_read(run.path / OUTCOME, Outcome),
        stop=(run.path / STOP).exists(),
        yields=(run.path / YIELD).exists(),
    )


def handed_over(root: Path) -> Queue:
    """Every submitted run below a folder."""
    runs, damaged = [], []
    for path in sorted(root.glob(f"*/*/{REQUEST}")):
        run = RunFolder(path.parent)
        try:
            found = read(run)
        except (CorruptObject, JobError) as error:
            damaged.append(DamagedRun(run=run, reason=str(error)))
        else:
            runs += [] if found is None else [found]
    runs.sort(key=lambda handed: (handed.request.at, handed.run.path))
    return Queue(runs=tuple(runs), damaged=tuple(damaged))


def decide(
    handed: Sequence[QueuedRun],
    flower: Mapping[int, FlowerRun],
    turns: Collection[str] | None = None,
) -> Iterable[CoordinatorStart | FolderInUse | Requeue | GiveUp]:
    """Decide what to do next for each run.

    Args:
        handed: Runs in the order of their requests.
        flower: What the SuperLink says of its runs.
        turns: Runs whose turn it is (see ``scheduler``); all of them by default.
    """
    for one in handed:
        action = None if one.outcome is not None else _next(one, flower, turns)
        if action is not None:
            yield action


_Action = CoordinatorStart | FolderInUse | Requeue | GiveUp


def _next(
    one: QueuedRun, flower: Mapping[int, FlowerRun], turns: Collection[str] | None
) -> _Action | None:
    if one.stop and (one.coordinator is None or not one.run.exists()):
        # It waits for its turn or for sites, and checks for a stop only in rounds.
        return _withdraw(one, flower)
    if one.works(flower):
        return None
    if one.run.is_locked():
        return FolderInUse(handed=one)
    if one.yields:
        return Requeue(handed=one)
    return _begin(one, flower) if turns is None or one.name in turns else None


def _begin(one: QueuedRun, flower: Mapping[int, FlowerRun]) -> _Action:
    before = one.coordinator
    if before is None:
        return CoordinatorStart(handed=one, fruitless=1)
    fruitless = 1 if one.rounds > before.rounds else before.fruitless + 1
    if fruitless <= MAX_FRUITLESS_STARTS:
        return CoordinatorStart(handed=one, fruitless=fruitless)
    now = flower.get(int(before.flower_run))
    said = "it is gone" if now is None else now.status
    return GiveUp(
        handed=one,
        code=FAILED,
        reason=(
            f"{MAX_FRUITLESS_STARTS} coordinators in a row ended without "
            f"completing a round; Flower's message for the last one: {said}; see "
            "logs/superexec.log"
        ),
    )


def _withdraw(one: QueuedRun, flower: Mapping[int, FlowerRun]) -> GiveUp:
    at_work = None
    if one.coordinator is not None and one.works(flower):
        at_work = int(one.coordinator.flower_run)
    begun = one.run.exists()
    reason = "stopped while it waited" if begun else "stopped before it started"
    return GiveUp(handed=one, code=STOPPED, reason=reason, at_work=at_work)


def _written(path: Path) -> float:
    """When a file was written last; 0 if there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _progressed(run: RunFolder) -> float:
    """When a coordinator of a run noted something last."""
    return max(_written(path) for path in (run.events, run.path / CONNECTED))


def _completed_rounds(run: RunFolder) -> int:
    return completed_rounds(run_notes.read(run.events).events)


def _left_out(run: RunFolder) -> tuple[SitesLeftOut | None, dict[str, int]]:
    """Which sites the newest coordinator excludes, according to its events.

    Returns:
        Its newest event, and the round that waits for a site, by site.
    """
    newest: SitesLeftOut | None = None
    awaited = dict[str, int]()
    for event in run_notes.read(run.events).events:
        match event:
            case RunStarted():
                newest, awaited = None, {}
            case SitesLeftOut():
                awaited = dict.fromkeys(recalled(newest, event), event.round_index)
                newest = event
            case RoundFinished():
                awaited = {}
    return newest, awaited


def _is_finishing(run: RunFolder) -> bool:
    last = run_notes.read(run.events).events[-1:]
    return any(isinstance(e, RunFinished) and e.status != INTERRUPTED for e in last)


def _read(path: Path, kind: type) -> Any:
    made: Any = durable_files.read_json(path, kind, advice="remove it")
    if isinstance(made, Coordinator):
        try:
            int(made.flower_run)
        except ValueError as error:
            raise CorruptObject(f"{path} is damaged: {error}; remove it") from error
    return made
