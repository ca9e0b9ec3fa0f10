"""What a site's operator can see of its runs at any time: ``crossfed site status``.

The agent notes it in ``status.json`` of the run's folder. It never leaves the site, and
nothing depends on it: one that is missing or damaged is only not shown.
"""

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from clients.privacy import ledger_memory
from deploy.site_host import enrol, folder as site_folder, machine_use
from deploy.site_host.config import SiteConfig
from deploy.site_host.machine_use import MachineUse
from deploy.site_host.run import lifetime_budget, runs_folder, site_memory
from federation import folder_lock
from federation.durable_files import replace_file
from federation.epsilon_text import format_cap, format_epsilon, format_left
from federation.errors import StoreUnavailable
from federation.ids import RunId
from federation.job.disclosure import Form, forms
from federation.job.evaluation_job import evaluates_only
from federation.job.spec import JobSpec
from federation.typed_json import decode, encode
from federation.wire import frame as wire
from monitoring.units import format_bytes, format_duration
from privacy.membership.certificates import RENEW_BEFORE_SECONDS

SILENT_SECONDS = 60.0  # An agent hears from the aggregator every three.
# The end of a run does not reach a site that is away. After so long without a word
# about a run, the status says that the end may have been missed.
QUIET_SECONDS = 3600.0
_OPEN = frozenset({"accepted", "begun", "answered"})
STATUS, REFUSED = "status.json", "refused.json"
_MOST_REFUSED, _ID_CHARS = 10, 100
_RESULTS, _NOISED_RESULTS = "held-out results", "held-out results with noise"
_ONLY_SUMS = ", readable only in a sum"
# A line, and labelled rows below it, each of one or more texts.
Rows = Sequence[tuple[str, Sequence[str]]]
Part = tuple[str, Rows]
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
        bytes_down: Of all tasks that came, with those of secure aggregation.
        bytes_up: Of all answers to them.
        seconds: In which this site was at work on them.
        failure: Why the newest task of a round has failed here, and which; empty if it
            has not.
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
    bytes_down: int = 0
    bytes_up: int = 0
    seconds: float = 0.0
    failure: str = ""


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


def forget_refused(config: SiteConfig, run_id: str) -> None:
    """Forget that a site did not take part in a run, since it does now."""
    known = refused(config)
    found = [encode(one) for one in known if one.run_id != run_id]
    if len(found) < len(known):
        with contextlib.suppress(StoreUnavailable):
            replace_file(config.folder / REFUSED, [json.dumps(found).encode()])


def refused(config: SiteConfig) -> Sequence[RefusedRun]:
    """The last runs that the site does not take part in, the oldest first."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        found = json.loads((config.folder / REFUSED).read_bytes())
        return [decode(each, RefusedRun, where=REFUSED) for each in found]
    return ()


def read(config: SiteConfig, newest: int = 0) -> Iterator[RunStatus]:
    """Yield the status of each run, the oldest first; with ``newest``, of so many."""
    names: list[str] = []
    with contextlib.suppress(FileNotFoundError):  # No run has come yet.
        names = sorted(path.name for path in runs_folder(config).iterdir())
    found = (read_one(runs_folder(config) / name) for name in reversed(names))
    known = (one for one in found if one is not None)
    yield from reversed([*islice(known, newest or None)])


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
class DatasetSpent:
    """What all runs on a dataset have spent together.

    Attributes:
        name: What the operator calls the dataset, or has called it.
        epsilon: Spent.
        epsilon_cap: What they may spend, by today's ``policy.total_epsilon``; None for
            no limit.
    """

    name: str
    epsilon: float
    epsilon_cap: float | None


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
        datasets: What runs have spent on each dataset of the site.
        runs: Its runs, the oldest first.
        refused: The last runs that it does not take part in, the oldest first.
        use: What its machine does; None if that was never measured.
        grams_per_kwh: gCO2e of a kWh there; 0 if that is not known.
    """

    site: str
    is_up: bool
    last_contact: float | None
    certificate_ends: float | None
    datasets: Sequence[DatasetSpent]
    runs: Sequence[RunStatus]
    refused: Sequence[RefusedRun] = ()
    ended: tuple[str, float] | None = None
    use: MachineUse | None = None
    grams_per_kwh: float = 0.0

    @property
    def certificate_renewal(self) -> float | None:
        """From when on an agent renews the certificate, seconds since 1970."""
        ends = self.certificate_ends
        return None if ends is None else ends - RENEW_BEFORE_SECONDS


def status(config: SiteConfig, newest: int = 0) -> SiteStatus:
    """Look at a site's folder.

    Args:
        config: The operator's ``site.toml``.
        newest: How many runs to read; 0 for all.

    Raises:
        FederationError: A file that holds keys or budgets is damaged.
    """
    return SiteStatus(
        site=config.file.name,
        is_up=folder_lock.is_held(config.folder / "agent.lock"),
        last_contact=site_folder.last_contact(config.folder),
        ended=site_folder.last_end(config.folder),
        certificate_ends=enrol.certificate_ends(config),
        datasets=[*_datasets(config)],
        runs=[*_with_known_charges(config, read(config, newest))],
        refused=refused(config),
        use=machine_use.read_use(config.folder),
        grams_per_kwh=config.file.compute.grams_per_kwh,
    )


def _datasets(config: SiteConfig) -> Iterator[DatasetSpent]:
    budget, memory = lifetime_budget(config), site_memory(config)
    for name in ledger_memory.datasets(memory):
        spent = ledger_memory.lifetime(memory, replace(budget, dataset=name))
        if spent is not None:
            yield DatasetSpent(
                name=name, epsilon=spent.epsilon, epsilon_cap=budget.epsilon
            )


def _with_known_charges(
    config: SiteConfig, runs: Iterable[RunStatus]
) -> Iterator[RunStatus]:
    """Runs with no less epsilon than the site's memory knows of.

    A run's folder may have been restored from a backup, with this status in it. What
    is charged and not answered counts whole, as if all of it was about training.
    """
    memory = site_memory(config)
    for run in runs:
        known, shown = RunId(run.run_id), run
        charges = ledger_memory.known_anchor(memory, known).train
        if run.epsilon_cap is not None and charges > run.answered:
            spent = ledger_memory.run_epsilon(memory, known)
            shown = replace(run, epsilon=max(spent, run.epsilon or 0.0))
        yield shown


def lines(found: SiteStatus, now: float) -> Iterator[str]:
    """Say it in lines for a terminal.

    Args:
        found: The site.
        now: Seconds since 1970.
    """
    for head, rows in about(found, now):
        yield head
        yield from _in_lines(rows)
    for head, rows in of_runs(found, now):
        yield ""
        yield head
        yield from _in_lines(rows)


def _in_lines(rows: Rows) -> Iterator[str]:
    width = max((len(label) for label, _ in rows), default=0)
    for label, texts in rows:
        yield f"  {label:<{width}} {', '.join(texts)}"


def about(found: SiteStatus, now: float) -> Iterator[Part]:
    """What the status says of the site itself, for the terminal and its page.

    Args:
        found: The site.
        now: Seconds since 1970.
    """
    yield f"site {found.site}: {_agent(found, now)}", ()
    if found.certificate_ends is not None and found.certificate_renewal is not None:
        left = format_duration(max(0.0, found.certificate_ends - now))
        how = "no agent runs that renews it before"
        if found.is_up:
            due = found.certificate_renewal - now
            when = f"in {format_duration(due)}" if due > 0 else "now"
            how = f"the agent renews it {when}"
        yield f"certificate: ends in {left}; {how}", ()
    for one in found.datasets:
        text = f"epsilon {format_epsilon(one.epsilon)}"
        if one.epsilon_cap is None:
            text += " spent, no limit"
        else:
            left = format_left(one.epsilon_cap, one.epsilon)
            text += f" of {format_cap(one.epsilon_cap)} spent, {left} left"
        yield f"all runs on {one.name!r}: {text}", ()
    if found.use is not None:
        yield from machine_use.parts(found.use, found.grams_per_kwh, now)
    if not found.runs:
        yield "no run has been accepted here", ()


def of_runs(found: SiteStatus, now: float) -> Iterator[Part]:
    """What it says of each run, the oldest first; see ``about``."""
    for run in found.runs:
        how = state(run, now, is_up=found.is_up)
        yield f"run {run.run_id}: job {run.job!r}, {how}", [*_run_rows(run)]
    for one in found.refused:
        ago = format_duration(max(0.0, now - one.at))
        yield f"run {one.run_id} without this site, {ago} ago: {one.reason}", ()


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


def _run_rows(run: RunStatus) -> Iterator[tuple[str, Sequence[str]]]:
    last = f", the last one {run.last_round}" if run.last_round else ""
    if run.rounds:  # Otherwise it only evaluates.
        yield "rounds", [f"{run.answered} of {run.rounds} answered{last}"]
    if run.failure:
        yield "failed", [run.failure]
    yield "data", [run.data]
    yield "leaves", run.sent
    down, up = format_bytes(run.bytes_down), format_bytes(run.bytes_up)
    yield "traffic", [f"{down} received, {up} sent"]
    yield "work", [format_duration(run.seconds)]
    if run.epsilon_cap is not None:
        spent, cap = run.epsilon or 0.0, run.epsilon_cap
        text = f"{format_epsilon(spent)} of {format_cap(cap)} on training"
        text += f", {format_left(cap, spent)} left"
        if run.held_out_epsilon is not None:
            text += f"; {format_epsilon(run.held_out_epsilon)} on evaluations"
        yield "epsilon", [text]
