"""The parties of runs, and which jobs they can run.

Nothing here imports torch: ``crossfed run`` hands a job over and trains nothing.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from deploy import audit_log
from deploy.aggregator_host import run_queue
from deploy.aggregator_host.enrolment_book import BookFile
from federation.durable_files import replace_file
from federation.errors import JobError
from federation.ids import SiteId, new_run_id
from federation.job import job_digest
from federation.job.spec import SURROGATE, JobSpec
from monitoring.runs.run_folder import RunFolder
from privacy.keystream import RandomBytes
from privacy.membership import roster_file
from privacy.secagg.agreement import identity, roster
from privacy.secagg.agreement.identity import Identity
from privacy.secagg.agreement.roster import Roster
from privacy.secagg.errors import RosterRefused
from privacy.secagg.protocol.of_job import check_roles, max_examples_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Parties:
    """The aggregator's identity, and the sites that it trusts.

    Attributes:
        identity: The aggregator's own key.
        roster: Pins the sites' keys and its own.
        revoked: Sites whose key is not believed any more, whatever the roster says.
    """

    identity: Identity
    roster: Roster
    revoked: frozenset[SiteId] = frozenset()

    @classmethod
    def of_run(cls, folder: Path, run: RunFolder) -> "Parties":
        """Read a folder's key, and the roster that a run started with.

        A site that enrols meanwhile changes the folder's roster; the sites of the run
        hold the one before, and a contract is between holders of the same.

        Raises:
            FederationError: See ``load``; or the run's folder cannot be written, or
                has lost the roster of a begun run, or pins another aggregator.
        """
        found = cls.load(folder)
        kept = run.path / "roster.toml"
        if run.run_id() is None:
            found.keep(run)
        elif not kept.exists():
            raise JobError(
                f"{kept} is missing, the roster that this run began with: restore it "
                "from a backup, or start a new run"
            )
        members = roster.load(kept)
        found.check_pinned(members, kept, folder)
        book = BookFile(folder=folder).read()
        return replace(found, roster=members, revoked=book.revoked_sites(members))

    def keep(self, run: RunFolder) -> None:
        """Have a run go by this roster from now on.

        Raises:
            StoreUnavailable: Its folder cannot be written.
        """
        text = roster.dumps(self.roster).encode()
        replace_file(run.path / "roster.toml", [text])

    @classmethod
    def load(cls, folder: Path) -> "Parties":
        """Read ``aggregator.pem``, ``roster.toml`` and ``sites.json`` of a folder.

        Raises:
            KeyFileRefused: The key is missing or open to others.
            BookDamaged: The record of sites cannot be read.
            JobError: The roster has no sites yet, is malformed or cannot be read, or
                pins another aggregator.
        """
        pinned = folder / "roster.toml"
        try:
            serial, digest = roster_file.describe(pinned)
            if serial and not digest:
                raise JobError(
                    "no site is enrolled yet: invite one with crossfed aggregator "
                    f"invite SITE --config {folder / 'aggregator.toml'}"
                )
            members = roster.load(pinned)
        except RosterRefused as error:
            raise JobError(f"{pinned}: {error}; restore it from a backup") from error
        book = BookFile(folder=folder).read()
        found = cls(
            identity=identity.load(folder / "aggregator.pem"),
            roster=members,
            revoked=book.revoked_sites(members),
        )
        found.check_pinned(
            members, pinned, folder, "pin this one with crossfed keys trust"
        )
        return found

    def check_pinned(
        self,
        members: Roster,
        path: Path,
        folder: Path,
        advice: str = "resume the run with the aggregator that began it",
    ) -> None:
        """Check that a roster pins this aggregator.

        Raises:
            JobError: It pins another one.
        """
        if self.identity.public.key != members.aggregator_key:
            raise JobError(
                f"{path} pins another aggregator than {folder / 'aggregator.pem'}: "
                f"{advice}"
            )


def check(job: JobSpec, parties: Parties, *, resumed: bool = False) -> None:
    """Refuse what a deployed run cannot do.

    Args:
        job: As submitted, before the run starts or resumes.
        parties: Whom the aggregator believes.
        resumed: Whether the run has begun, so that it may do without a site.

    Raises:
        JobError: The job asks for it; ``key`` says where.
    """
    _check_revoked(job, parties.revoked, resumed=resumed)
    names = {site.name for site in job.sites} | {each.name for each in job.relays}
    known = {entry.site for entry in parties.roster.sites}
    if not names <= known:
        raise JobError(
            f"{', '.join(sorted(names - known))} are not in the roster: enrol them",
            key="sites",
        )
    check_roles(job, parties.roster)
    check_job(job)


def check_job(job: JobSpec) -> None:
    """Refuse what no deployed run can do, with any sites.

    Raises:
        JobError: The job asks for it; ``key`` says where.
    """
    if job.simulation.faults:
        raise JobError("are for simulations only", key="simulation.faults")
    if job.simulation.training == SURROGATE:
        raise JobError("is for simulations only", key="simulation.training")
    if job.simulation.live_metrics:
        raise JobError(
            "is for simulations only: remove it, and run crossfed export-metrics with "
            "--follow beside the run",
            key="simulation.live_metrics",
        )
    if job.privacy.secure_aggregation.enabled:
        max_examples_of(job, None)


def _check_revoked(job: JobSpec, revoked: frozenset[SiteId], *, resumed: bool) -> None:
    for relay in job.relays:
        if relay.name in revoked:
            raise JobError(
                f"relay {relay.name!r} was revoked: invite it again with crossfed "
                f"aggregator invite {relay.name} and start a new run",
                key="relays",
            )
    gone = [site.name for site in job.sites if site.name in revoked]
    names = ", ".join(gone)
    if gone and not resumed:
        raise JobError(
            f"revoked: {names}; invite again with crossfed aggregator invite "
            f"{gone[0]}. A job without it has a different cohort; without differential "
            "privacy, sites that were in a sum with it refuse such a job",
            key="sites",
        )
    fault = cannot_continue(job, revoked)
    if fault:
        raise JobError(fault, key="sites")


def cannot_continue(job: JobSpec, revoked: Collection[str]) -> str:
    """Why a run that has begun cannot do without revoked sites; empty if it can."""
    gone = [site.name for site in job.sites if site.name in revoked]
    if not gone or len(job.sites) - len(gone) >= fewest(job):
        return ""
    # A site that comes back has new keys, and the run's roster pins the old ones.
    return (
        f"revoked: {', '.join(gone)}; this run needs {fewest(job)} of its "
        f"{len(job.sites)} sites to continue: invite them again with crossfed "
        "aggregator invite SITE and start a new run"
    )


def fewest(job: JobSpec) -> int:
    """How many sites a started run needs when its coordinator starts.

    Under secure aggregation all: they make new keys together, and where noise is in
    the sum they state together what they need.
    """
    secure = job.privacy.secure_aggregation.enabled
    return len(job.sites) if secure else job.minimum_sites


def submitted(
    job: JobSpec,
    folder: Path,
    runs: Path,
    *,
    at: float,
    random_bytes: RandomBytes,
    owner: str = run_queue.OPERATOR,
    priority: int = 0,
    who: str | None = None,
) -> RunFolder:
    """Submit a new run of a job that the parties of an aggregator can run.

    Args:
        job: Its model's first weights, if it names a file, are below ``folder``.
        folder: The aggregator's folder.
        runs: Folder of all runs.
        at: Seconds since 1970.
        random_bytes: ``os.urandom``.
        owner: Who wants it.
        priority: Runs of a higher one go first.
        who: Whose request it is; by default the user of this host, for the owner.

    Raises:
        FederationError: The job cannot be run so, or the folder cannot be written.
    """
    check(job, Parties.load(folder))
    if job.model.weights is not None:  # The coordinator looks for it there.
        from clients.models import starting_weights  # noqa: PLC0415 -- imports torch

        starting_weights.find(job, folder)
    run = RunFolder(runs / job.name / new_run_id(at, random_bytes(3)))
    if who is None and owner != run_queue.OPERATOR:
        who = f"{audit_log.operator()} for owner {owner}"
    details = {
        "job": job.name,
        "digest": job_digest.digest(job).hex(),
        "priority": priority,
    }
    audit_log.note(folder, "run.submit", run.path.name, at=at, who=who, **details)
    run_queue.submit(job, run, at=at, owner=owner, priority=priority)
    return run
