"""What a site's operator can see of its runs at any time: ``crossfed site status``.

The agent notes it in ``status.json`` of the run's folder. It never leaves the site, and
nothing depends on it: one that is missing or damaged is only not shown.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from clients.privacy.ledger_memory import lifetime
from deploy.site_host import enrol, folder as site_folder, machine_use
from deploy.site_host.config import SiteConfig
from deploy.site_host.machine_use import MachineUse
from deploy.site_host.run import lifetime_budget, runs_folder, site_memory
from federation import folder_lock
from federation.durable_files import replace_file
from federation.epsilon_text import format_cap, format_epsilon, format_left
from federation.errors import StoreUnavailable
from federation.job.disclosure import Form, forms
from federation.job.evaluation_job import evaluates_only
from federation.job.spec import JobSpec
from federation.typed_json import decode, encode
from federation.wire import frame as wire
from monitoring.units import format_duration

SILENT_SECONDS = 60.0  # An agent hears from the aggregator every three.
# The end of a run does not reach a site that is away. After so long without a word
# about a run, the status says that the end may have been missed.
QUIET_SECONDS = 3600.0
_OPEN = frozenset({"accepted", "begun", "answered"})
STATUS, REFUSED = "status.json", "refused.json"
_MOST_REFUSED, _ID_CHARS = 10, 100
_RESULTS, _NOISED_RESULTS = "held-out results", "held-out results with noise"
_ONLY_SUMS = ", readable only in a sum"
# Of each answer, if a setting does not withhold it: field, and what a person calls it.
_SENT = {
    "num_examples": "the number of training examples",
    "num_steps": "the number of steps",
    "training": "the training loss",
    "evaluation": _RESULTS,
    "phases": "how long it worked on what",
    "resources": "processor time and memory",
    "spent": "its spent epsilon",
}
_TRAINS = frozenset({"num_steps", "training", "evaluation"})  # Not in statistics.


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """One run at this site.

    Attributes:
        job: Name of its job.
        state: ``accepted``, ``begun``, ``answered``; ``completed``, ``stopped``,
            ``exhausted`` or ``failed``, as its aggregator has signed; or how this site
            left it.
        rounds: Rounds of the job.
        answered: Rounds that this site has answered, each counted once.
        last_round: The newest of them; 0 for none.
        spans: The first and the last of them in each row without a gap, so that
            a later process of the agent can go on counting.
        at: When this was noted, seconds since 1970.
        data: On which data it trains.
        sent: What leaves the site with each answer, in words.
        epsilon_cap: What the site has promised; None without differential privacy.
        epsilon: Spent on training records.
        held_out_epsilon: Spent on held-out records.
    """

    run_id: str
    job: str
    state: str
    rounds: int
    answered: int
    last_round: int
    at: float
    data: str
    sent: tuple[str, ...]
    spans: tuple[tuple[int, int], ...] = ()
    epsilon_cap: float | None = None
    epsilon: float | None = None
    held_out_epsilon: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedRun:
    """A run that the site does not take part in.

    Attributes:
        reason: Why, in words.
        at: When this was noted, seconds since 1970.
    """

    run_id: str
    reason: str
    at: float


def sent_by(job: JobSpec, *, reports_energy: bool = False) -> tuple[str, ...]:
    """What leaves a site with each answer to a job, in words."""
    private, secret = job.privacy.differential_privacy, job.privacy.secure_aggregation
    left, found = forms(job), dict[str, str]()
    for name, words in _SENT.items():
        if left[name] is not Form.NEVER and (name != "spent" or private.enabled):
            found[name] = words + _ONLY_SUMS * (left[name] is Form.SUM)
    if reports_energy and "resources" in found:
        found["resources"] = "processor time, memory and energy"
    noised = private.enabled and private.held_out == "noise"
    if noised and "evaluation" in found:
        found["evaluation"] = found["evaluation"].replace(_RESULTS, _NOISED_RESULTS)
    if job.evaluation.every == 0:
        found.pop("evaluation", None)
    if evaluates_only(job):
        kept = ("evaluation", "phases", "spent")
        return tuple(found[name] for name in kept if name in found)
    what = "its update"
    if job.statistics is not None:
        what = "sums over its records" + " with noise" * private.enabled
        found = {name: words for name, words in found.items() if name not in _TRAINS}
    what += _ONLY_SUMS * secret.enabled
    return what, *found.values()


def saver(folder: Path) -> Callable[[RunStatus], None]:
    """Return what notes the status of the run in a folder."""

    def save(status: RunStatus) -> None:
        # A full disk stops training where that matters, and not here.
        with contextlib.suppress(StoreUnavailable):
            replace_file(folder / STATUS, [json.dumps(encode(status)).encode()])

    return save


def note_refused(config: SiteConfig, run_id: str, reason: str, at: float) -> bool:
    """Note why a site does not take part in a run; false if it was known."""
    path, last = config.folder / REFUSED, refused(config)
    with contextlib.suppress(StoreUnavailable):  # It is in the log, too.
        reason, run_id = wire.one_line(reason), run_id[:_ID_CHARS]
        known = [one for one in last if one.run_id != run_id][1 - _MOST_REFUSED :]
        found = [*known, RefusedRun(run_id=run_id, reason=reason, at=at)]
        replace_file(path, [json.dumps([encode(one) for one in found]).encode()])
    return (run_id, reason) not in {(one.run_id, one.reason) for one in last}


def refused(config: SiteConfig) -> Sequence[RefusedRun]:
    """The last runs that the site does not take part in, the oldest first."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        found = json.loads((config.folder / REFUSED).read_bytes())
        return [decode(each, RefusedRun, where=REFUSED) for each in found]
    return ()


def read(config: SiteConfig) -> Iterator[RunStatus]:
    """Yield the status of each run, the oldest first."""
    for path in sorted(runs_folder(config).glob(f"*/{STATUS}")):
        if (found := read_one(path.parent)) is not None:
            yield found


def read_one(folder: Path) -> RunStatus | None:
    """The status of the run in a folder; None if there is none that can be read."""
    path = folder / STATUS
    with contextlib.suppress(OSError, ValueError):
        kept: RunStatus = decode(
            json.loads(path.read_bytes()), RunStatus, where=str(path)
        )
        return kept
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteStatus:
    """A site as a whole.

    Attributes:
        site: Its name.
        is_up: Whether an agent or relay runs in its folder.
        last_contact: When the aggregator or the relay answered it last, seconds since
            1970; None if never.
        ended: Why its last agent ended by itself, and when, seconds since 1970; None if
            the aggregator has answered one since.
        certificate_ends: Seconds since 1970; None without a certificate.
        dataset: What the budget of all runs is called; empty without one.
        epsilon_cap: That budget.
        epsilon: What all runs on the dataset have spent together.
        runs: Its runs, the oldest first.
        refused: The last runs that it does not take part in, the oldest first.
        use: What its machine does; None if that was never measured.
        grams_per_kwh: gCO2e of a kWh there; 0 if that is not known.
    """

    site: str
    is_up: bool
    last_contact: float | None
    certificate_ends: float | None
    dataset: str
    epsilon_cap: float | None
    epsilon: float | None
    runs: Sequence[RunStatus]
    refused: Sequence[RefusedRun] = ()
    ended: tuple[str, float] | None = None
    use: MachineUse | None = None
    grams_per_kwh: float = 0.0


def status(config: SiteConfig) -> SiteStatus:
    """Look at a site's folder.

    Raises:
        FederationError: A file that holds keys or budgets is damaged.
    """
    budget = lifetime_budget(config)
    spent = None if budget.epsilon is None else lifetime(site_memory(config), budget)
    return SiteStatus(
        site=config.file.name,
        is_up=folder_lock.is_held(config.folder / "agent.lock"),
        last_contact=site_folder.last_contact(config.folder),
        ended=site_folder.last_end(config.folder),
        certificate_ends=enrol.certificate_ends(config),
        dataset="" if budget.epsilon is None else budget.dataset,
        epsilon_cap=budget.epsilon,
        epsilon=None if spent is None else spent.epsilon,
        runs=list(read(config)),
        refused=refused(config),
        use=machine_use.read_use(config.folder),
        grams_per_kwh=config.file.compute.grams_per_kwh,
    )


def lines(found: SiteStatus, now: float) -> Iterator[str]:
    """Say it in lines for a terminal.

    Args:
        found: The site.
        now: Seconds since 1970.
    """
    yield f"site {found.site}: {_agent(found, now)}"
    if found.certificate_ends is not None:
        left = format_duration(max(0.0, found.certificate_ends - now))
        how = "the agent renews" if found.is_up else "no agent runs that renews"
        yield f"certificate: ends in {left}; {how} it before"
    if found.epsilon_cap is not None and found.epsilon is not None:
        spent = found.epsilon
        yield (
            f"all runs on {found.dataset!r}: epsilon {format_epsilon(spent)} of "
            f"{format_cap(found.epsilon_cap)} spent, "
            f"{format_left(found.epsilon_cap, spent)} left"
        )
    if found.use is not None:
        yield from machine_use.lines(found.use, found.grams_per_kwh, now)
    if not found.runs:
        yield "no run has been accepted here"
    for run in found.runs:
        yield from _run_lines(run, state(run, now, is_up=found.is_up))
    begun = {run.run_id: run.at for run in found.runs}
    for one in found.refused:
        if one.at > begun.get(one.run_id, 0.0):
            ago = format_duration(max(0.0, now - one.at))
            yield ""
            yield f"run {one.run_id} without this site, {ago} ago: {one.reason}"


def _agent(found: SiteStatus, now: float) -> str:
    """Whether an agent runs and is in touch: a frozen one keeps its lock."""
    if found.ended is not None and not found.is_up:
        reason, at = found.ended
        since = format_duration(max(0.0, now - at))
        return f"no agent runs; the last one ended {since} ago: {wire.one_line(reason)}"
    if found.last_contact is None:
        return "its agent runs; not connected yet" if found.is_up else "no agent runs"
    ago = max(0.0, now - found.last_contact)
    if found.is_up and ago > SILENT_SECONDS:
        return (
            f"its agent runs, but has had no answer for {format_duration(ago)}: the "
            "process is frozen, or the aggregator cannot be reached; see its log"
        )
    runs = "its agent runs" if found.is_up else "no agent runs"
    return f"{runs}; last contact {format_duration(ago)} ago"


def state(run: RunStatus, now: float, *, is_up: bool) -> str:
    """How a run stands at this site, and since when.

    Args:
        run: As it was noted last.
        now: Seconds since 1970.
        is_up: Whether an agent runs.
    """
    seconds = max(0.0, now - run.at)
    ago = f"{format_duration(seconds)} ago"
    if run.state in _OPEN and (not is_up or seconds > QUIET_SECONDS):
        return f"{run.state}; last heard of {ago}, end not known"
    return f"{run.state}, {ago}"


def _run_lines(run: RunStatus, how: str) -> Iterator[str]:
    yield ""
    yield f"run {run.run_id}: job {run.job!r}, {how}"
    last = f", the last one {run.last_round}" if run.last_round else ""
    if run.rounds:  # Otherwise it only evaluates.
        yield f"  rounds   {run.answered} of {run.rounds} answered{last}"
    yield f"  data     {run.data}"
    yield f"  leaves   {', '.join(run.sent)}"
    if run.epsilon_cap is not None:
        spent = format_epsilon(run.epsilon or 0.0)
        text = f"{spent} of {format_cap(run.epsilon_cap)} on training"
        if run.held_out_epsilon is not None:
            text += f", {format_epsilon(run.held_out_epsilon)} on evaluations"
        yield f"  epsilon  {text}"
