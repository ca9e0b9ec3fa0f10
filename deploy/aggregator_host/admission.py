"""What the scheduler is given, from the files of an aggregator's runs."""

import functools
import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from cloud_adapters.flower.facts import FlowerRun, not_connected
from deploy.aggregator_host import owners, run_notes, run_queue, scheduler
from deploy.aggregator_host.config import AggregatorConfig
from deploy.aggregator_host.enrolment_book import BookFile
from deploy.aggregator_host.owners import Owner, Owners, Usage
from deploy.aggregator_host.run_queue import Queue, QueuedRun
from deploy.aggregator_host.scheduler import Candidate, Plan, Rules, Share, Wait
from federation.errors import FederationError, JobError
from federation.events import RoundFinished, RunStarted
from federation.job import job_file
from federation.job.spec import JobSpec
from federation.job.statistics_checks import planned_rounds
from federation.rounds import cost
from federation.rounds.cost import Speeds
from monitoring.runs.run_folder import RunFolder
from monitoring.units import format_duration
from monitoring.views import run_plan

_HOUR, _GIGABYTE, _MIB = 3600.0, 1e9, float(1 << 20)
_RECENT = 5  # Rounds that show a run's pace.


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Every run that has not ended, and what decides whose turn it is.

    Attributes:
        candidates: The runs.
        shares: Of every owner.
        slots: How many runs each site takes at once.
        rules: The operator's.
        now: When all this is so.
    """

    candidates: Sequence[Candidate]
    shares: Mapping[str, Share]
    slots: Mapping[str, int]
    rules: Rules
    now: float

    def plan(self) -> Plan:
        """Decide whose turn it is."""
        return scheduler.plan(
            self.candidates, self.shares, self.slots, self.rules, now=self.now
        )

    def forecast(self) -> Mapping[str, float]:
        """Predict when the turns of waiting runs begin."""
        return scheduler.forecast(
            self.candidates, self.shares, self.slots, self.rules, now=self.now
        )


def admission(
    config: AggregatorConfig,
    runs: Sequence[QueuedRun],
    flower: Mapping[int, FlowerRun] | None,
    *,
    now: float,
    lengths: bool = False,
) -> Admission:
    """Gather what decides whose turn it is.

    Args:
        config: The operator's ``aggregator.toml``.
        runs: All runs.
        flower: What the SuperLink says of its runs; None if it is not asked.
        now: Seconds since 1970.
        lengths: Whether to find out how long runs will still work.

    Raises:
        CorruptObject: The file of the owners is damaged.
    """
    known, used = owners.read(config.folder), defaultdict[str, float](float)
    for one in runs:
        used[one.request.owner] += scheduler.used_now(
            one.held_seconds(now), len(one.request.sites), ended=one.ended(now), now=now
        )
    memory = run_queue.memory_of(runs)
    limited = any(most < math.inf for most, _ in memory.values())
    took = _memory_taken(runs) if limited else {}
    refused = {name: _refused(config, known, name, runs, now) for name in used}
    paces = _paces(runs, now) if lengths else {}
    queue = config.file.queue
    return Admission(
        candidates=[
            replace(
                _candidate(one, flower, refused[one.request.owner], paces, now),
                needs=_needs(one, took),
            )
            for one in runs
            if _takes_turns(one, flower)
        ],
        shares={
            name: Share(weight=_known(known, name).weight, used=seconds)
            for name, seconds in used.items()
        },
        slots=run_queue.slots_of(runs),
        rules=Rules(
            max_runs=queue.max_runs,
            slice_seconds=queue.slice_seconds,
            age_seconds=queue.age_seconds,
            memory=memory,
        ),
        now=now,
    )


def rows(
    config: AggregatorConfig,
    runs: Sequence[QueuedRun],
    *,
    now: float,
    owner: str | None = None,
) -> list[dict[str, Any]]:
    """Describe runs for ``crossfed ps``, the oldest first.

    Args:
        config: The operator's ``aggregator.toml``.
        runs: All runs.
        now: Seconds since 1970.
        owner: Only whose runs are described, and named where others wait for them;
            None for everybody's.
    """
    order = admission(config, runs, None, now=now, lengths=True)
    waits, starts = order.plan().waits, order.forecast()
    mine = [one for one in runs if owner is None or one.request.owner == owner]
    names, gone = {one.name for one in mine}, revoked(config)
    found: list[dict[str, Any]] = []
    for one in mine:
        wait, begins = waits.get(one.name), starts.get(one.name)
        found.append(
            {
                "run": one.name,
                "job": one.run.path.parent.name,
                "owner": one.request.owner,
                "priority": one.request.priority,
                "status": one.status,
                "age_seconds": max(0.0, now - one.request.at),
                "rounds": one.rounds,
                "loss": one.loss,
                "is_noisy": one.is_noisy,
                "without": _without(one, gone),
                "back": one.back,
                "waits": "" if wait is None else wait.text(names.__contains__),
                "starts_in_seconds": (
                    None if wait is None or begins is None else max(0.0, begins - now)
                ),
                "reason": one.reason,
            }
        )
    return found


def revoked(config: AggregatorConfig) -> frozenset[str]:
    """Names of the revoked sites; none where that cannot be read."""
    try:
        return BookFile(folder=config.folder).read().revoked_names
    except FederationError:  # Verbs and the service say what is damaged.
        return frozenset()


def _without(one: QueuedRun, revoked_sites: Collection[str]) -> list[str]:
    """Sites that a run does without or waits for, each with the reason."""
    if one.outcome is not None:
        return []
    gone = [site for site in one.request.sites if site in revoked_sites]
    rest = (text for text in one.away if text.partition(" (")[0] not in gone)
    return [*(f"{site} (revoked)" for site in gone), *rest]


def queue(config: AggregatorConfig, *, now: float) -> list[dict[str, Any]]:
    """Describe the runs that wait, for a page: for what, and until when.

    Args:
        config: The operator's ``aggregator.toml``.
        now: Seconds since 1970.
    """
    found = run_queue.handed_over(config.runs)
    order = admission(config, found.runs, None, now=now, lengths=True)
    waits, starts = order.plan().waits, order.forecast()
    return [
        {
            "run": one.name,
            "job": one.run.path.parent.name,
            "owner": one.request.owner,
            "priority": one.request.priority,
            "waits": waits_for(one.run, found, waits),
            "starts_in_seconds": max(0.0, starts[one.name] - now)
            if one.name in waits and one.name in starts
            else None,
        }
        for one in found.runs
        if one.outcome is None and (one.name in waits or not one.run.exists())
    ]


def waits_for(run: RunFolder, queue: Queue, turns: Mapping[str, Wait]) -> str:
    """Say what a run waits for that has not begun, or whose turn it is not.

    Args:
        run: Its folder.
        queue: All runs.
        turns: What runs wait for whose turn it is not.
    """
    name = run.path.name
    for each in queue.damaged:
        if each.run.path == run.path:
            return f"run {name} is not started: {each.reason}"
    if name in turns:
        return f"run {name} waits for {turns[name].text()}"
    found = run_queue.connected(run)
    if found is None:
        return f"run {name} waits for its coordinator, and then for its sites"
    there = ", ".join(found.there)
    if not found.missing:
        return f"run {name} has its sites: {there}" if there else ""
    seconds, missing = format_duration(found.seconds), ", ".join(found.missing)
    texts = [f"run {name} waits up to {seconds} for answers of {missing}"]
    texts += [not_connected(found.absent)] if found.absent else []
    texts += [f"answered: {there}"] if there else []
    return "; ".join(texts)


def check_submission(
    config: AggregatorConfig, job: JobSpec, owner: str, priority: int, *, now: float
) -> str:
    """Refuse a run that its owner may not have; return the owner's name.

    Raises:
        JobError: The message names the key or quota.
        CorruptObject: The file of the owners is damaged.
    """
    found = owners.read(config.folder).find(owner)
    runs = run_queue.handed_over(config.runs).runs
    used, reserved = Usage(), 0.0
    if found and found.quota != Usage():
        reserved = sum(_epsilon_left(one) for one in runs if one.request.owner == owner)
        priced = found.quota.dollars is not None
        used = usage(config, runs, owner, now, priced=priced)
        if _prices(config, job) is None:
            used = replace(used, dollars=None)
    known = owners.check_submission(found, owner, priority, used)
    owners.check_epsilon(known, job, used, reserved)
    return owner


def usage(
    config: AggregatorConfig,
    runs: Sequence[QueuedRun],
    owner: str,
    now: float,
    *,
    priced: bool = True,
) -> Usage:
    """Add up what an owner's runs have used; in dollars, too, if that is asked."""
    mine = [one for one in runs if one.request.owner == owner]
    prices = [_dollars(config, one, now) for one in mine] if priced else [None]
    known = [price for price in prices if price is not None]
    logs = [one.run.events for one in mine]
    held = sum(one.held_seconds(now) * len(one.request.sites) for one in mine)
    return Usage(
        site_hours=held / _HOUR,
        gigabytes=sum(map(run_notes.num_bytes, logs)) / _GIGABYTE,
        epsilon=sum(run_notes.read(log).epsilon for log in logs),
        dollars=sum(known) if len(known) == len(prices) else None,
    )


def _epsilon_left(one: QueuedRun) -> float:
    """What a run that has not ended may still spend, or two could exceed a quota."""
    if one.outcome is not None:
        return 0.0
    private = one.run.read_spec().privacy.differential_privacy
    target = (private.target_epsilon or 0.0) if private.enabled else 0.0
    return max(0.0, target - run_notes.read(one.run.events).epsilon)


def _prices(config: AggregatorConfig, job: JobSpec) -> Speeds | None:
    """The operator's prices; None if one of a job's sites has none."""
    path = config.folder / config.file.queue.prices
    if not config.file.queue.prices:
        return None
    try:
        found = job_file.load_table(path, Speeds, lambda _: None)
    except JobError:  # Its owners are refused, with the key.
        return None
    priced = {site.name for site in found.sites}
    return found if {site.name for site in job.sites} <= priced else None


def _dollars(config: AggregatorConfig, one: QueuedRun, now: float) -> float | None:
    """What a run's machines and bytes have cost; None if a price is not known."""
    seconds = one.held_seconds(now)
    if not seconds:
        return 0.0
    # Of a run at work the bytes are counted once a minute: reading its log takes time.
    until = now if one.outcome is None else one.ended(now)
    try:
        plan = run_plan.read(one.run.path)
        speeds = None if plan is None else plan.speeds
        speeds = speeds or _prices(config, one.run.read_spec())
        if speeds is None:
            return None
        counted = until // 60 if one.outcome is None else until
        sites = _bytes_of_sites(one.run.path, counted)
        total = sum(cost.dollars(seconds, sites, speeds).values())
    except FederationError:  # A damaged file, or prices of other sites.
        return None
    return None if math.isnan(total) else total


@functools.lru_cache(maxsize=4096)
def _bytes_of_sites(path: Path, _at: float) -> Mapping[str, tuple[float, float]]:
    """Bytes to and from each site of a run, so far."""
    run = RunFolder(path)
    names = [site.name for site in run.read_spec().sites]
    sites = run.settled_view().sites if run.exists() else ()
    found = {site.site: (site.bytes_down, site.bytes_up) for site in sites}
    return {name: found.get(name, (0, 0)) for name in names}


def _needs(
    one: QueuedRun, took: Mapping[str, Mapping[str, float]]
) -> Mapping[str, tuple[float, float]]:
    """MiB of memory and GPU memory that a run takes at its sites, if that is known."""
    stated, gpu = one.request.memory_mib, float(one.request.gpu_memory_mib or 0)
    measured = took.get(one.run.path.parent.name, {})
    return {
        site: (measured.get(site, 0.0) if stated is None else float(stated), gpu)
        for site in one.request.sites
    }


def _memory_taken(runs: Sequence[QueuedRun]) -> Mapping[str, Mapping[str, float]]:
    """MiB that sites took in the newest run of each job that has ended.

    It is the most that an agent's process has held, so with whatever else ran in it.
    Sites do not report it in runs with differential privacy.
    """
    ended = [one.run for one in runs if one.outcome is not None and one.run.exists()]
    return {run.path.parent.name: _peaks(run.events) for run in ended}


@functools.lru_cache(maxsize=4096)
def _peaks(path: Path) -> Mapping[str, float]:
    try:
        sites = RunFolder(path.parent).settled_view().sites
    except FederationError:  # A damaged log is for those to name who need all of it.
        return {}
    used = {site.site: site.used.peak_memory_bytes for site in sites if site.used}
    return {site: peak / _MIB for site, peak in used.items() if peak}


def _known(known: Owners, name: str) -> Owner:
    return known.find(name) or Owner(name=name)


def _refused(
    config: AggregatorConfig,
    known: Owners,
    name: str,
    runs: Sequence[QueuedRun],
    now: float,
) -> str:
    """Why no run of an owner may work now; empty if they may."""
    owner = _known(known, name)
    if owner.quota == Usage():
        return ""
    priced = owner.quota.dollars is not None
    return owners.exceeded(owner, usage(config, runs, name, now, priced=priced))


def _takes_turns(one: QueuedRun, flower: Mapping[int, FlowerRun] | None) -> bool:
    """Whether a run needs its sites, now or later.

    Not if its coordinator only writes a report, nor while one that Flower has given up
    keeps others from it.
    """
    if one.outcome is not None:
        return False
    if flower is not None and not one.works(flower):
        return not one.run.is_locked()
    return one.coordinator is None or not one.is_finishing


def _candidate(
    one: QueuedRun,
    flower: Mapping[int, FlowerRun] | None,
    refused: str,
    paces: Mapping[str, "Pace"],
    now: float,
) -> Candidate:
    before, request = one.coordinator, one.request
    works = before is not None if flower is None else one.works(flower)
    pace = paces.get(one.run.path.parent.name)
    return Candidate(
        name=one.name,
        owner=request.owner,
        priority=request.priority,
        submitted=request.at,
        since=request.since or request.at,
        sites=frozenset(request.sites),
        begun=None if before is None else before.begun,
        is_fruitless=before is not None and not _ended_rounds(one, before.begun),
        holds=works,
        refused=refused,
        round_seconds=0.0 if pace is None else pace.round_seconds,
        seconds_left=None if pace is None else _left(one, pace, works=works, now=now),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What a run took, as its events say.

    Attributes:
        round_seconds: From the end of a round to that of the next one.
        before: What its last coordinator took until its first round began.
        after: What it took after the last round; 0 where no run of the job has ended.
        last: When a round of this coordinator ended last; None if none has.
    """

    round_seconds: float
    before: float
    after: float = 0.0
    last: float | None = None


def _pace(one: QueuedRun, now: float) -> Pace | None:
    began = 0.0 if one.coordinator is None else one.coordinator.at
    took, first, last = list[float](), None, None
    for event in run_notes.progress(one.run.events):
        if isinstance(event, RunStarted):
            first = last = None
        else:
            took.append(event.seconds if last is None else event.at - last)
            first, last = first or event.at, event.at
    if not took:
        return None
    each = median(took[-_RECENT:])
    is_over = one.outcome is not None and last is not None
    return Pace(
        round_seconds=each,
        before=max(0.0, first - began - each) if first and began else 0.0,
        after=max(0.0, one.ended(now) - last) if is_over and last else 0.0,
        last=last,
    )


def _ended_rounds(one: QueuedRun, since: float) -> bool:
    progress = reversed(run_notes.progress(one.run.events))
    last = next((e for e in progress if isinstance(e, RoundFinished)), None)
    return last is not None and last.at >= since


def _paces(runs: Sequence[QueuedRun], now: float) -> Mapping[str, Pace]:
    """The pace of each job, from its newest run with rounds."""
    found: dict[str, Pace] = {}
    for one in runs:
        pace, job = _pace(one, now), one.run.path.parent.name
        if pace is not None:
            after = pace.after or (found[job].after if job in found else 0.0)
            found[job] = replace(pace, after=after)
    return found


def _left(one: QueuedRun, pace: Pace, *, works: bool, now: float) -> float:
    """Seconds until a run ends: what its rounds take, less what this one has taken."""
    rounds = (
        max(0.0, planned_rounds(one.run.read_spec()) - one.rounds) * pace.round_seconds
    )
    if not works or one.coordinator is None:
        return pace.before + rounds + pace.after
    own = _pace(one, now)
    if own is None or own.last is None or own.last < one.coordinator.at:
        left = pace.before + rounds - max(0.0, now - one.coordinator.at)
        return max(rounds, left) + pace.after
    spent = min(max(0.0, now - own.last), pace.round_seconds if rounds else pace.after)
    return rounds + pace.after - spent
