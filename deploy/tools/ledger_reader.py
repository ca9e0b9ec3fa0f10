"""``crossfed ledger``: check what sites have spent, and count it again three ways.

The numbers are computed from the events in the ledger and not read from it; those that
were written at the time are checked against them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from clients.privacy import ledger_memory
from clients.privacy.ledger_memory import (
    LifetimeBudget,
    LifetimeSpent,
    dataset_of,
    known_anchor,
    one_budget,
)
from clients.privacy.site_memory import FileMemory
from deploy.site_host import (
    config as site_file,
    home as site_home,
    run as site_run,
)
from deploy.site_host.run import LedgerKey
from federation.epsilon_text import format_epsilon
from federation.errors import FederationError, RunNotFound
from federation.ids import RunId, SiteId
from federation.messages import NO_ANCHOR, LedgerAnchor
from monitoring.runs.find import find_run
from monitoring.runs.run_folder import RunFolder
from privacy.dp import accountant, cross_check
from privacy.dp.errors import LedgerDamaged
from privacy.dp.events import PrivacyEvent
from privacy.dp.ledger.ledger import check_number
from privacy.dp.ledger.ledger_files import (
    HEAD_NAME,
    LEDGER_NAME,
    HeadKey,
    read_file,
)
from privacy.dp.ledger.ledger_format import PURPOSES, Contents, Purpose
from privacy.secagg.agreement import identity

# Ledgers of a run, from its folder.
_SITES = "sites"
PLACES = f"{_SITES}/*/{LEDGER_NAME}"

# Who knows how many charges a ledger held.
_BY_RECORD = "the run's record knows of no charge that is missing here"
_BY_MEMORY = (
    "the site's memory knows of no charge that is missing here; only the run's "
    "aggregator knows whether both were restored from a backup"
)
_BY_NOBODY = (
    "nothing here knows how many charges it held: a copy that was restored from a "
    "backup looks the same; the run's aggregator knows"
)

_DECIMALS = 4  # of an epsilon: three accountants are compared

# Another version's accountant may differ by a little.
_AGREEMENT = 0.005


@dataclass(frozen=True, slots=True)
class Finding:
    """The findings on one ledger.

    Attributes:
        path: The file.
        contents: What it says; None if it is damaged.
        error: What is wrong; empty if it is sound.
        lifetime: What all runs on the data have spent; None if no memory is left.
        checked: What is known of the number of its charges, beside its own files.
    """

    path: Path
    contents: Contents | None
    error: str
    lifetime: LifetimeSpent | None = None
    checked: str = ""


def only_run(root: Path) -> str:
    """Return the only run below a folder that has ledgers.

    Raises:
        RunNotFound: There are none, or several.
    """
    runs = sorted({path.parents[2] for path in root.glob(f"**/{PLACES}")})
    if len(runs) == 1:
        return str(runs[0])
    found = f"choose one of {', '.join(run.name for run in runs)}" if runs else ""
    raise RunNotFound(found or f"no run in {root} has a ledger ({PLACES})")


def find(name: str, root: Path) -> list[Path]:
    """Find the ledgers of a name from the command line.

    Args:
        name: A ledger, a folder that holds one, or a run: folder, id or job's name.
        root: Folder of all runs.

    Raises:
        RunNotFound: There is no such run, or it has no ledgers.
    """
    direct = Path(name)
    if direct.is_file():
        return [direct]
    if (direct / LEDGER_NAME).is_file():
        return [direct / LEDGER_NAME]
    if direct.name == LEDGER_NAME:
        raise RunNotFound(f"there is no ledger {name}: give a ledger or a run")
    # A site keeps no events of a run, so its folder is not a run folder.
    for folder in (direct, root / name):
        if found := below(folder):
            return found
    if ids := site_runs(root):
        raise RunNotFound(
            f"there is no run {name!r} in {root}: a site stores no job names, so give "
            f"a run ID; it has ledgers of {', '.join(ids)}"
        )
    run = find_run(name, root)
    if not (found := below(run.path)):
        raise RunNotFound(
            f"the run in {run.path} has no ledger ({PLACES}): its job has no "
            "differential privacy, or its sites keep their own ledgers: add --config "
            "site.toml on a site's machine"
        )
    return found


def site_runs(root: Path) -> list[str]:
    """IDs of the runs in a deployed site's folder of runs; none in another folder."""
    folders = {path.parents[2] for path in root.glob(f"*/{PLACES}")}
    return sorted(path.name for path in folders if not RunFolder(path).exists())


def below(folder: Path) -> list[Path]:
    """Find the ledgers of a run's folder, also those of which files are missing."""
    folders = {
        path.parent
        for left in (LEDGER_NAME, HEAD_NAME)
        for path in folder.glob(f"{_SITES}/*/{left}")
    }
    if folders:  # Otherwise the sites are machines of their own.
        folders |= {folder / _SITES / site for site in RunFolder(folder).anchors()}
    return sorted(folder / LEDGER_NAME for folder in folders)


@contextmanager
def of_site(
    config_path: Path, listener: Callable[[str], None]
) -> Iterator[tuple[Path, HeadKey]]:
    """Find the folder of a site's runs, and the key that signs its ledgers.

    If another machine has the site's newest ledgers, they are read from its home.

    Raises:
        JobError: The configuration is wrong.
        KeyFileRefused: The site's key is missing, open to others or damaged.
        StoreError: The home cannot be read.
    """
    with site_home.newest(site_file.load(config_path), listener) as config:
        yield site_run.runs_folder(config), LedgerKey(identity.load(config.identity))


def examine(path: Path, key: HeadKey | None = None) -> Finding:
    """Check one ledger.

    Args:
        path: The file.
        key: Key of the site, which must have signed its head; None to believe the head.
    """
    try:
        # Before the ledger, to which a run that goes on adds charges first.
        known, checked = _known_number(path)
        contents = read_file(path, key)
        _check_place(contents, path)
        _check_sums(contents, path)
        check_number(contents.charges, contents.terms, known, str(path))
        lifetime = _lifetime(path, contents.terms.run_id)
    except FederationError as error:
        return Finding(path, None, str(error))
    return Finding(path, contents, "", lifetime, checked)


def _run_of(path: Path) -> RunFolder | None:
    """The run that a ledger's place is in; None for a ledger that is elsewhere."""
    site = path.absolute().parent
    return RunFolder(site.parents[1]) if site.parent.name == _SITES else None


def _site_memory(run: RunFolder) -> FileMemory:
    """The memory of a deployed site, by the folder of one of its runs."""
    return FileMemory(run.path.parents[1] / "memory")


def _lifetime(path: Path, run_id: str) -> LifetimeSpent | None:
    """Read the memory of the site, or that of a simulated run."""
    run = _run_of(path)
    if run is None:
        return None
    simulated = FileMemory(run.memory / path.absolute().parent.name)
    for memory in (simulated, _site_memory(run)):
        dataset = dataset_of(memory, run_id)
        if dataset is not None:
            return ledger_memory.lifetime(memory, LifetimeBudget(dataset=dataset))
    return None


def _known_number(path: Path) -> tuple[LedgerAnchor, str]:
    """How many charges a ledger is known to have held, and who knows it.

    A ledger that was restored from a backup, with its head, looks whole.
    """
    run = _run_of(path)
    if run is not None and run.exists():
        site = SiteId(path.absolute().parent.name)
        return run.anchors().get(site, NO_ANCHOR), _BY_RECORD
    if run is not None:
        anchor = known_anchor(_site_memory(run), RunId(run.path.name))
        if anchor != NO_ANCHOR:
            return anchor, _BY_MEMORY
    return NO_ANCHOR, _BY_NOBODY


def _check_place(contents: Contents, path: Path) -> None:
    """Check that a ledger in a run's folder is of that run, and of that site."""
    run, site = _run_of(path), path.absolute().parent.name
    if run is None:
        return  # It is elsewhere, a copy or a site's own: any run's will do.
    terms = contents.terms
    if terms.site != site:
        raise LedgerDamaged(
            f"{path} is the ledger of site {terms.site!r}: restore that of site "
            f"{site!r}, whose spending is unknown"
        )
    run_id = run.run_id()
    if run_id is not None and terms.run_id != run_id:
        raise LedgerDamaged(
            f"{path} is the ledger of run {terms.run_id}, but this is run {run_id}: "
            "restore this run's own ledger; what the site has spent in it is unknown"
        )


def _check_sums(contents: Contents, path: Path) -> None:
    """Check the last epsilon that was written of each purpose."""
    for purpose in PURPOSES:
        written = [c.epsilon_after for c in contents.charges if c.purpose == purpose]
        if not written:
            continue
        again = accountant.epsilon(contents.events(purpose), contents.terms.delta)
        if abs(again - written[-1]) > _AGREEMENT * max(again, written[-1]):
            raise LedgerDamaged(
                f"{path} states an epsilon of {written[-1]:.4g} for {purpose}, but its "
                f"events give {again:.4g}: another accountant wrote it"
            )


def facts(finding: Finding) -> dict[str, Any]:
    """Everything about one ledger, for JSON."""
    if finding.contents is None:
        return {"file": str(finding.path), "sound": False, "error": finding.error}
    contents, terms = finding.contents, finding.contents.terms
    return {
        "file": str(finding.path),
        "sound": True,
        "run_id": terms.run_id,
        "site": terms.site,
        "job_digest": terms.job_digest,
        "unit": terms.unit,
        "relation": terms.relation,
        "sampling": terms.sampling,
        "delta": terms.delta,
        "epsilon_cap": terms.epsilon_cap,
        "num_recoveries": contents.num_recoveries,
        "torn_bytes": contents.torn_bytes,
        "head": contents.hashes[-1],
        "checked": finding.checked,
        "spent": {
            purpose: _spent(contents, purpose)
            for purpose in PURPOSES
            if contents.events(purpose)
        },
        "lifetime": None if finding.lifetime is None else asdict(finding.lifetime),
    }


def _spent(contents: Contents, purpose: Purpose) -> dict[str, Any]:
    events, delta = contents.events(purpose), contents.terms.delta
    charged = [c.round_index for c in contents.charges if c.purpose == purpose]
    rounds = {index for index in charged if index}
    prv = cross_check.epsilon(_gathered(events), delta)
    return {
        "rounds": len(rounds),
        "charges": len(events),
        "recovered": charged.count(0),
        "steps": sum(event.steps for event in events),
        "epsilon": accountant.epsilon(events, delta),
        "epsilon_rdp": accountant.epsilon(events, delta, "rdp"),
        "epsilon_prv": prv.estimate,
        "epsilon_prv_upper": prv.upper,
        "events": [event.document() for event in _gathered(events)],
    }


def _gathered(events: tuple[PrivacyEvent, ...]) -> list[PrivacyEvent]:
    """Events of one kind as one."""
    found = []
    for _, same in groupby(sorted(events, key=_kind), key=_kind):
        alike = list(same)
        found.append(
            PrivacyEvent(
                noise_multiplier=alike[0].noise_multiplier,
                sampling_rate=alike[0].sampling_rate,
                slack=alike[0].slack,
                steps=sum(event.steps for event in alike),
            )
        )
    return found


def _kind(event: PrivacyEvent) -> tuple[float, float, float]:
    return event.noise_multiplier, event.sampling_rate, event.slack


def lines(finding: Finding) -> Iterator[str]:
    """Everything about one ledger, for a person."""
    if finding.contents is None:
        yield f"DAMAGED     {finding.error}"
        return
    known = facts(finding)
    yield f"site        {known['site']}"
    yield f"ledger      {known['file']}: sound, {finding.contents.seq} entries"
    yield f"charges     {finding.checked}"
    yield f"run         {known['run_id']}"
    yield f"unit        {known['unit']}; neighbours: {known['relation']}"
    yield f"sampling    {known['sampling']}"
    yield f"delta       {known['delta']:g}"
    yield f"cap         epsilon {known['epsilon_cap']:g}"
    if not known["spent"]:
        yield "spent       nothing"
    for purpose, spent in known["spent"].items():
        yield from _spent_lines(purpose, spent)
    if (all_runs := finding.lifetime) is not None:
        total = format_epsilon(all_runs.epsilon, places=_DECIMALS)
        yield (
            f"lifetime    epsilon {total} at delta {all_runs.delta:g}, "
            f"runs on {all_runs.dataset!r}: {all_runs.num_runs}"
        )
        if all_runs.num_contents > 1:
            yield (
                f"contents    {all_runs.num_contents} since the first run; "
                f"{one_budget(all_runs.dataset)}"
            )
    if known["num_recoveries"] or known["torn_bytes"]:
        yield (
            f"note        {known['num_recoveries']} unfinished lines were removed "
            f"after a stop, and {known['torn_bytes']} bytes of one are at the end now"
        )


def _spent_lines(purpose: str, spent: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{purpose:<11} {spent['rounds']} rounds, {spent['charges']} charges, "
        f"{spent['steps']} steps"
    )
    if spent["recovered"]:
        yield f"  recovered {spent['recovered']} charges, of unknown rounds"
    pld, rdp, prv, prv_upper = (
        format_epsilon(spent[name], places=_DECIMALS)
        for name in ("epsilon", "epsilon_rdp", "epsilon_prv", "epsilon_prv_upper")
    )
    yield (
        f"  epsilon   {pld} (pld); {rdp} (rdp, a bound); {prv}, at most {prv_upper} "
        "(prv)"
    )
    for event in spent["events"]:
        yield (
            f"  event     {event['steps']} x Gaussian, noise multiplier "
            f"{event['noise_multiplier']:.4f}, sampling rate "
            f"{event['sampling_rate']:.4g}, slack {event['slack']:.2g}"
        )
