"""The long-lived process of a site, which takes part in runs.

Bytes in, bytes out: Flower's connection is in ``cloud_adapters.flower.node``. For each
run that was proposed and accepted the agent keeps the proposal, the ledger and what the
protocol must remember in ``runs/RUN`` of its folder, and continues after a restart.
Model, data and keys of a run at work are in memory, of as many runs as ``max_runs``
allows: where another begins, the one that was used longest ago makes room, and comes
back with its next task.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

from clients.models.model_pool import ModelPool
from clients.models.model_size import LimitedSize
from clients.privacy import sum_plan as sum_privacy
from clients.privacy.ledger_memory import Reservation, lifetime
from clients.privacy.policy_spec import PolicySpec
from clients.privacy.site_policy import (
    Faults,
    check_job,
    rehearses,
)
from clients.privacy.source_check import check_deployed
from clients.privacy.stated_bounds import need_fault
from clients.training.kept_steps import KeptSteps
from clients.training.local_federation import Federation, SiteData
from clients.user_code import unable_to_exit
from cloud_adapters.storage.disk import scratch
from cloud_adapters.storage.disk.part_file import file_errors
from cloud_adapters.storage.disk.store import LocalStore
from deploy import audit_log
from deploy.site_host import (
    config as site_file,
    data as site_data,
    enrolment_roster,
    ranks as site_ranks,
    run_status,
)
from deploy.site_host.config import SiteConfig, SiteFile
from deploy.site_host.departure import Departure
from deploy.site_host.run import (
    OpenRun,
    ProposedRun,
    lifetime_budget,
    name_data,
    note_limits,
    open_run,
    order_seed,
    places_noted,
    private_sites,
    runs_folder,
    site_memory,
)
from deploy.site_host.run_lines import RunLines, lost_work
from deploy.wiring import parts as wiring, store_meters
from deploy.wiring.rehearsal import dropout_notice
from deploy.wiring.store_meters import StoreMeters, User, Watch
from federation.durable_files import replace_file
from federation.epsilon_text import format_cap, format_epsilon, format_left
from federation.errors import (
    CheckpointMismatch,
    FederationError,
    JobError,
    PrivacyError,
    ProtocolError,
    StoreUnavailable,
    is_passing,
)
from federation.event_log import EventWriter
from federation.events import SitePrivacy
from federation.ids import RunId, SiteId, check_name
from federation.job import job_digest, job_file
from federation.job.job_extension import check_extension
from federation.job.spec import JobSpec
from federation.messages import UNKNOWN_ENERGY, Energy, SiteMessage, Task
from federation.protocols import Clock
from federation.vectors import Layout
from federation.wire import frame as wire
from privacy.dp.ledger.ledger_recovery import RecoveryResult
from privacy.membership import introduction, releases
from privacy.membership.introduction import Introduction, Proposal, Statements
from privacy.secagg.agreement.code_hash import code_hash
from privacy.secagg.agreement.identity import Identity
from privacy.secagg.agreement.roster import Roster
from privacy.secagg.protocol.of_job import check_roles

# A site keeps so many runs, and so many bytes of what the aggregator has sent of them.
MAX_RUNS, MAX_SENT_BYTES = 10_000, 1 << 28

PROPOSAL, _STATEMENTS, _USE = "proposal", "statements", "storage.jsonl"

_LOG = logging.getLogger(__name__)


@dataclass(kw_only=True)
class SiteAgent:
    """Answers proposals and tasks, one after another, of one run or of several.

    Attributes:
        config: The operator's ``site.toml``.
        identity: The site's own key.
        roster: Whom it trusts; read again for every run, which then keeps it.
        clock: Tells time.
        listener: Called with a word about every run that is proposed.
        refresh: Called before the roster is read for a proposal: an operator's
            signature may make a newer one acceptable.
        departure: Whether the site is about to leave, also before its training ends.
        energy: What this machine has taken so far.
    """

    config: SiteConfig
    identity: Identity
    roster: Roster
    clock: Clock
    listener: Callable[[str], None] = _LOG.info
    refresh: Callable[[], None] = lambda: None
    departure: Departure = field(default_factory=Departure)
    energy: Callable[[], Energy] = lambda: UNKNOWN_ENERGY
    _meters: StoreMeters = field(init=False)
    # Runs at work, the one used longest ago first; not opened yet are those whose
    # sites state what they need.
    _runs: OrderedDict[RunId, OpenRun | ProposedRun] = field(
        default_factory=OrderedDict, init=False
    )
    # The settings that are on record.
    _noted: SiteFile | None = field(default=None, init=False)
    _lines: dict[RunId, RunLines] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        """Start measuring the use of stores."""
        self._meters = StoreMeters(self.clock)

    @property
    def name(self) -> SiteId:
        """The site's name."""
        return SiteId(self.config.file.name)

    @property
    def watch(self) -> Watch:
        """Measures the use of a store by more than one run."""
        return self._meters.watch(User(name=self.name))

    def introduce(self, sealed: bytes) -> bytes:
        """Answer a proposal, or the statements of all sites.

        With a promise, with a statement where a promise needs those of all, or with
        the reason against taking part. The end of a run has an empty answer.

        Raises:
            ProtocolError: It is not from this site's aggregator; it gets no answer.
        """
        if introduction.is_end(sealed):
            end = introduction.open_end(sealed, self.roster)
            ended = RunId(end.ended)
            if end.reason and ended not in self._runs:
                why = wire.one_line(f"cannot be joined: {end.reason}")
                if run_status.note_refused(self.config, ended, why, self.clock.now()):
                    self.listener(f"run {ended} {why}")
                return b""
            self._close_run(ended)
            self._tell_ended(ended, end.outcome)
            return b""
        if introduction.are_statements(sealed):
            statements = introduction.open_statements(sealed, self.roster)
            run_id = statements.run_id
            answer = partial(self._answer_statements, statements)
        else:
            roster = self._roster_for(sealed)
            proposal = introduction.open_proposal(sealed, roster)
            run_id = proposal.run_id
            answer = partial(self._answer_proposal, proposal, roster)
        try:
            with unable_to_exit():
                found = answer(sealed)
            self.config.confirm()
        except FederationError as error:
            self.listener(f"run {wire.one_line(run_id)} is refused: {error}")
            run_status.note_refused(self.config, run_id, str(error), self.clock.now())
            for line in getattr(error, "__notes__", ()):
                self.listener(line)
            found = self._introduction(sealed, refused=error.outside)
            found = replace(found, temporary=is_passing(error))
        return introduction.seal_introduction(found, self.identity)

    def answer(self, task: Task) -> SiteMessage:
        """Answer a task of a run that was proposed before.

        Raises:
            ProtocolError: It was not, or the task is for another site.
            HomeConflict: Another machine holds the site's home.
            StoreError: Its home cannot be written.
        """
        if task.site != self.name:
            raise ProtocolError(f"site {self.name!r} received a task for {task.site!r}")
        run = self._current(task.run_id)
        lines = self._lines.get(task.run_id)
        if lines is not None:
            lines.begin()
        lost, began = lost_work(run.met.job, task), self.clock.monotonic()
        with self.departure.at_work(lost), wiring.torch_threads(run.met.job):
            answer = run.handler.handle(task)
        if lines is not None:
            lines.note(task, answer, self.clock.monotonic() - began)
        self._tell_use(run)
        self.config.confirm()  # Before it leaves.
        return answer

    def recover(self, run_id: RunId) -> RecoveryResult:
        """Charge again what the ledger of a run has lost, as far as that is known.

        Raises:
            FederationError: The run was not proposed to this site, or what is missing
                cannot be charged.
        """
        met = self._meet_again(run_id)
        if not met.job.privacy.differential_privacy.enabled:
            raise ProtocolError(
                f"run {run_id!r} has no differential privacy, so no ledger"
            )
        private = private_sites(
            met,
            identity=self.identity,
            folder=self._folder(run_id),
            clock=self.clock,
            stated=self._stated_before(met),
        )
        return private.recover(self.name, met.anchor)

    def layout(self, run_id: RunId) -> Layout:
        """Layout of the model of a run that was proposed before.

        Raises:
            ProtocolError: It was not.
        """
        return self._current(run_id).met.federation.pool.layout

    def close(self) -> None:
        """Leave all runs: keys go, ledgers are closed."""
        for run_id in [*self._lines]:
            self._lines.pop(run_id).leave()
        for run_id in [*self._runs]:
            self._close_run(run_id)

    def _tell_ended(self, run_id: RunId, outcome: str) -> None:
        lines = self._lines.pop(run_id, None)
        if lines is not None:
            lines.end(outcome)
        elif outcome and (known := run_status.read_one(self._folder(run_id))):
            # Of before a restart.
            ended = replace(known, state=outcome, at=self.clock.now())
            run_status.saver(self._folder(run_id))(ended)

    def _tell_accepted(self, run: OpenRun) -> None:
        """Say that the site takes part; not when a coordinator has only restarted."""
        run_id, config = run.met.run_id, run.met.config
        run_status.forget_refused(config, run_id)
        lines = self._lines.get(run_id)
        if lines is not None and lines.job == run.met.job:
            return  # Otherwise it was extended.
        for other in [*self._lines]:
            if other not in self._runs:
                self._lines.pop(other).leave(for_another=True)
        self._lines[run_id] = RunLines(
            run_id,
            job=run.met.job,
            promise=run.promise,
            data=site_data.describe(config.file, run.met.federation),
            listener=self.listener,
            total=partial(self._total_spent, config),
            save=run_status.saver(self._folder(run_id)),
            clock=self.clock,
            audit=partial(self._note_end, run_id),
            before=run_status.read_one(self._folder(run_id)),
            reports_energy=config.file.policy.report_energy,
        )
        self._lines[run_id].accept()

    def _note_accepted(self, met: ProposedRun) -> None:
        """Put a run on record, and what the aggregator's own log has last.

        Raises:
            StoreUnavailable: It cannot be written: the site does not take part.
        """
        lines = self._lines.get(met.run_id)
        if lines is not None and lines.job == met.job:
            return
        digest = job_digest.digest(met.job).hex()
        about = {"job": met.job.name, "digest": digest, "rounds": met.job.rounds}
        known = introduction.kept_proposal(met.sealed).audit_head
        about |= {audit_log.HEAD: known} if known else {}
        folder, who, now = self.config.folder, audit_log.AGENT, self.clock.now()
        audit_log.note(folder, "run.accept", met.run_id, at=now, who=who, **about)

    def _note_end(self, run_id: RunId, how: str, rounds: int) -> None:
        folder, who, now = self.config.folder, audit_log.AGENT, self.clock.now()
        about = {"run": how, "rounds": rounds}
        try:
            audit_log.note(folder, "run.end", run_id, at=now, who=who, **about)
        except FederationError as error:  # It has ended even so.
            self.listener(f"the end of run {run_id} is not in the audit log: {error}")

    def _note_settings(self) -> None:
        if self._noted == self.config.file:
            return
        folder, who, now = self.config.folder, audit_log.AGENT, self.clock.now()
        audit_log.note_settings(folder, asdict(self.config.file), at=now, who=who)
        self._noted = self.config.file

    def _total_spent(self, config: SiteConfig) -> str:
        """Say what all runs on the site's records have spent, and what is allowed."""
        budget = lifetime_budget(config)
        found = lifetime(site_memory(config), budget)
        if found is None or budget.epsilon is None:
            return ""
        spent = format_epsilon(found.epsilon)
        left = format_left(budget.epsilon, found.epsilon)
        return (
            f"; all runs on {budget.dataset!r} together {spent} of "
            f"{format_cap(budget.epsilon)}, {left} left (policy.total_epsilon)"
        )

    def _close_run(self, run_id: RunId) -> None:
        run = self._runs.pop(run_id, None)
        if isinstance(run, OpenRun):
            self._tell_use(run)
            run.stack.close()

    def _make_room(self, run_id: RunId) -> None:
        """Close a run, and of the others those that there is no room for beside it."""
        self._close_run(run_id)
        while len(self._runs) >= self.config.file.max_runs:
            self._close_run(next(iter(self._runs)))

    def _reserved(self, config: SiteConfig) -> tuple[Reservation, ...]:
        """What the runs at work on the site's data have planned to spend."""
        return tuple(
            run.reservation
            for run in self._runs.values()
            if isinstance(run, OpenRun)
            and run.reservation is not None
            and not self._lines[run.met.run_id].is_over
            and name_data(run.met.config) == name_data(config)
        )

    def _roster_for(self, sealed: bytes) -> Roster:
        """The roster for a proposal: the newest, unless its run is open.

        Contracts are between holders of the same roster: a run keeps that which it
        has begun with here.
        """
        self.refresh()
        try:
            newest = enrolment_roster.newest(self.config, self.roster, self.identity)
        except FederationError as error:
            path, serial = self.config.roster, self.roster.serial
            self.listener(f"roster {serial} stays in use, {path} is refused: {error}")
            return self.roster
        # Whose proposal it is has not been checked yet; nothing else is read of it.
        met = self._at_work(RunId(introduction.kept_proposal(sealed).run_id))
        return newest if met is None else met.roster

    def _at_work(self, run_id: RunId) -> ProposedRun | None:
        """A run that has begun here: it keeps the roster and policy of then."""
        run = self._runs.get(run_id)
        return run.met if isinstance(run, OpenRun) else run

    def _tell_use(self, run: OpenRun) -> None:
        """Note in the site's own folder what stores were used for since the last time.

        It is never reported: how a site reads its data reveals something of it, and the
        cost is on the site's own bill.
        """
        used = [*self._meters.used()]
        if not used:
            return
        path = self._folder(run.met.run_id) / _USE
        try:
            with EventWriter(path) as note:
                for each in used:
                    note(each)
        except StoreUnavailable as error:  # No reason to lose a round.
            _LOG.warning("cannot record how stores were used: %s", error)

    def _folder(self, run_id: RunId) -> Path:
        try:
            return runs_folder(self.config) / check_name(run_id)
        except ValueError as error:
            raise ProtocolError(f"a run without a valid name: {error}") from None

    def _current(self, run_id: RunId) -> OpenRun:
        run = self._runs.get(run_id)
        if not isinstance(run, OpenRun):
            run = self._open_again(run_id)
        self._runs.move_to_end(run_id)
        return run

    def _open_again(self, run_id: RunId) -> OpenRun:
        """Resume a run after a restart of this process."""
        met = self._meet_again(run_id)
        return self._open(met, keep={}, stated=self._stated_before(met))

    def _stated_before(self, met: ProposedRun) -> Mapping[SiteId, float] | None:
        """What all sites have stated to a run; None unless noise is in the sum."""
        if not met.job.privacy.differential_privacy.in_sum:
            return None
        try:
            sealed = (self._folder(met.run_id) / _STATEMENTS).read_bytes()
        except OSError:
            raise ProtocolError(
                f"site {self.name!r} has not received the other sites' noise "
                f"statements for run {met.run_id!r}"
            ) from None
        statements = introduction.open_statements(sealed, met.roster)
        return self._stated(statements, met)

    def _meet_again(self, run_id: RunId) -> ProposedRun:
        try:
            sealed = (self._folder(run_id) / PROPOSAL).read_bytes()
        except OSError:
            raise ProtocolError(
                f"run {run_id!r} has not been proposed to site {self.name!r}"
            ) from None
        proposal = introduction.open_proposal(sealed, self.roster)
        return self._meet(proposal, self.roster, sealed)

    def _answer_proposal(
        self, proposal: Proposal, roster: Roster, sealed: bytes
    ) -> Introduction:
        met = self._meet(proposal, roster, sealed, is_new=True)
        if met.job.privacy.differential_privacy.in_sum:
            needs = sum_privacy.needs(met.federation)[self.name]
            self._keep(met.run_id, {PROPOSAL: sealed})
            self._runs[met.run_id] = met
            return self._introduction(sealed, needs=needs)
        run = self._open(met, keep={PROPOSAL: sealed})
        tells = run.promise is None and not met.job.privacy.secure_aggregation.enabled
        train, held_out = met.federation.site_data[self.name]
        counts = (len(train), len(held_out)) if tells else (0, 0)
        return self._introduction(sealed, privacy=run.promise, counts=counts)

    def _answer_statements(self, statements: Statements, sealed: bytes) -> Introduction:
        """Plan the noise that all sites make together, and promise what follows."""
        run_id = RunId(statements.run_id)
        met = self._at_work(run_id) or self._meet_again(run_id)
        stated = self._stated(statements, met)
        run = self._open(met, keep={_STATEMENTS: sealed}, stated=stated)
        return self._introduction(sealed, privacy=run.promise)

    def _stated(
        self, statements: Statements, met: ProposedRun
    ) -> Mapping[SiteId, float]:
        """What each site of the job has stated and signed.

        Raises:
            ProtocolError: One is not signed by its site, belongs to another run, or
                states more than any site of the job may need.
            JobError: They are not those of all sites.
        """
        stated = introduction.stated_needs(
            statements, proposal=met.sealed, roster=met.roster
        )
        names = {SiteId(site.name) for site in met.job.sites}
        if stated.keys() != names:
            odd = ", ".join(sorted(stated.keys() ^ names))
            raise JobError(
                f"site {self.name!r} must plan its noise with exactly the sites of the "
                f"job, but these differ: {odd}",
                key="sites",
            )
        for name, need in sorted(stated.items()):
            fault = need_fault(met.job, need)
            if fault:
                raise ProtocolError(f"site {name!r} {fault}: nothing was planned")
        return stated

    def _meet(
        self,
        proposal: Proposal,
        roster: Roster,
        sealed: bytes,
        *,
        is_new: bool = False,
    ) -> ProposedRun:
        """Check a proposal, load model and data of its run, and use its roster.

        Raises:
            FederationError: The site does not or cannot take part.
        """
        run_id = RunId(proposal.run_id)
        folder = self._folder(run_id)
        self._check_code(proposal)
        self._check_room(folder)
        job = job_file.loads(proposal.job)
        check_roles(job, roster)
        _check_same_job(job, folder, roster)
        notice = dropout_notice(job)
        if notice:
            self.listener(f"run {run_id}: {notice}")
        before = self._at_work(run_id)
        if before is None:
            self.config = site_file.read_again(self.config)
            self._note_settings()
        config = self.config if before is None else before.config
        self._make_room(run_id)
        pool, data = self._loaded(job, proposal, roster, config, is_new=is_new)
        if roster != self.roster:
            self.listener(f"roster {roster.serial} is in use from run {run_id} on")
            self.roster = roster
        federation = Federation(
            job=job,
            pool=pool,
            site_data={self.name: data},
            order_seed=order_seed(config, job, sealed),
            ends_early=self.departure.hurry.is_set,
            kept_steps=self._kept_steps(run_id, job),
            allocate=scratch.allocator(
                self.config.file.disk_mib, self.config.folder / "scratch"
            ),
            least_count=config.file.policy.statistics.min_count,
            tell=lambda text: self.listener(f"run {run_id}: {text}"),
            note_places=places_noted(config, job),
        )
        return ProposedRun(
            run_id=run_id,
            sealed=sealed,
            federation=federation,
            config=config,
            roster=roster,
            anchor=proposal.anchor_of(self.name),
        )

    def _loaded(
        self,
        job: JobSpec,
        proposal: Proposal,
        roster: Roster,
        config: SiteConfig,
        *,
        is_new: bool,
    ) -> tuple[ModelPool, SiteData]:
        """Load model and data of a job, and check it against what the operator allows.

        Raises:
            FederationError: Everything that keeps the site from the run, in one error.
        """
        file, has_data = config.file, bool(config.file.data.source)
        faults = Faults(job=job, site=self.name, has_data=has_data)
        with faults.noted():
            check_job(job, file.policy, self.name, has_data=has_data)
        own = [each for each in job.sites if each.name == self.name]
        if not own:
            faults.check()
        with faults.noted():
            self._check_total(job, file)
        with faults.noted():
            self._check_memory(job, file)
        with faults.noted():
            if is_new and job.privacy.secure_aggregation.enabled:
                enrolment_roster.check_same(config, roster, proposal)
        public = PolicySpec().functions  # Datasets of crossfed are for rehearsals.
        if not has_data and (job.data is None or job.data.source not in public):
            faults.own_data = site_data.own_data(file, job)
        # Nothing is called that the operator does not accept.
        may_call = faults.may_call(file.policy)
        pools, data = list[ModelPool](), list[SiteData]()
        if may_call:
            with faults.noted(), LimitedSize(file.policy.max_values):
                pools.append(ModelPool(site_ranks.agents_job(job, file), starts=False))
        if may_call or has_data or not rehearses(job, self.name):
            with faults.noted():
                watch = self._meters.watch(store_meters.site(own[0]))
                data.append(site_data.load(file, job, watch))
        is_private = job.privacy.differential_privacy.enabled
        with faults.noted():
            source, vouched = file.data.source, file.data.preprocessing
            known = data[0] if data else None
            kind = site_data.declared(file, job, known) if is_private else ""
            check_deployed(job, file.name, kind, source=source, vouched=vouched)
        if not data:
            faults.is_unseen = is_private
            faults.check()
        if is_new and is_private:
            reserved = self._reserved(config)
            note_limits(faults, RunId(proposal.run_id), data[0], config, reserved)
        faults.check()
        return pools[0], data[0]

    def _kept_steps(self, run_id: RunId, job: JobSpec) -> KeptSteps | None:
        if not job.continues_rounds:
            return None
        return KeptSteps(
            self.name,
            LocalStore(self._folder(run_id)),
            run_id=run_id,
            job=job,
            clock=self.clock,
            leaves=self.departure.stopped.is_set,
            confirm=self.config.confirm,
            steps=self.departure.steps,
            writing=self.departure.writing,
            every_seconds=self.config.file.compute.keep_steps_seconds,
        )

    def _open(
        self,
        met: ProposedRun,
        *,
        keep: Mapping[str, bytes],
        stated: Mapping[SiteId, float] | None = None,
    ) -> OpenRun:
        """Build what a run needs, and store what a restart needs.

        Raises:
            FederationError: The site does not or cannot take part.
        """
        self._close_run(met.run_id)
        # Others may have begun while this one waited for what sites need.
        met = replace(met, reserved=self._reserved(met.config))
        with ExitStack() as stack:
            try:
                run = open_run(
                    met,
                    identity=self.identity,
                    folder=self._folder(met.run_id),
                    clock=self.clock,
                    stated=stated,
                    energy=self.energy,
                    stack=stack,
                )
            except PrivacyError:  # A recovery has to know what the run is.
                self._keep(met.run_id, keep)
                raise
            self._keep(met.run_id, keep)
            self._note_accepted(met)
            run = replace(run, stack=stack.pop_all())
        self._runs[met.run_id] = run
        self._tell_accepted(run)
        return run

    def _keep(self, run_id: RunId, files: Mapping[str, bytes]) -> None:
        folder = self._folder(run_id)
        with file_errors("write below", folder):
            folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            replace_file(folder / name, [content])

    def _check_room(self, folder: Path) -> None:
        """Refuse a new run where earlier ones have taken the room for all."""
        if folder.exists():
            return
        with file_errors("read below", folder.parent):
            num_runs = len([*folder.parent.glob("*")])
            sent = [*folder.parent.glob(f"*/{PROPOSAL}")]
            sent += folder.parent.glob(f"*/{_STATEMENTS}")
            num_bytes = sum(path.stat().st_size for path in sent)
        if num_runs >= MAX_RUNS or num_bytes >= MAX_SENT_BYTES:
            raise ProtocolError(
                f"{folder.parent} holds {num_runs} runs and {num_bytes >> 20} MiB of "
                f"proposals, and may hold {MAX_RUNS} and {MAX_SENT_BYTES >> 20}: move "
                "folders of old runs elsewhere",
                outside="the site holds as many runs as it may",
            )

    def _check_memory(self, job: JobSpec, file: SiteFile) -> None:
        """Refuse a run that needs more than all runs together may take."""
        for name in ("memory_mib", "gpu_memory_mib"):
            needed, limit = getattr(job.schedule, name), getattr(file, name)
            if limit and (needed or 0) > limit:
                raise JobError(
                    f"site {self.name!r} lets all runs together take {limit} MiB "
                    f"({name} in site.toml), and this one needs {needed}",
                    key=f"schedule.{name}",
                )

    def _check_total(self, job: JobSpec, file: SiteFile) -> None:
        """Require a limit for all runs together.

        Whether this one is within the limit is looked at when its ledger is opened.
        """
        private = job.privacy.differential_privacy
        target = private.target_epsilon
        if private.enabled and file.policy.total_epsilon is None:
            raise JobError(
                f"site {self.name!r} states no limit for all runs on its records "
                "together: its operator must set policy.total_epsilon in site.toml",
                key="privacy.differential_privacy.unit",
                # A run that also evaluates spends less than this.
                remedy={"policy.total_epsilon": 2 * (target or 0.0)},
            )

    def _introduction(
        self,
        sealed: bytes,
        *,
        refused: str = "",
        privacy: SitePrivacy | None = None,
        counts: tuple[int, int] = (0, 0),
        needs: float | None = None,
    ) -> Introduction:
        return Introduction(
            version=introduction.VERSION,
            site=self.name,
            proposal=introduction.digest(sealed),
            release=introduction.release(),
            refused=refused,
            privacy=privacy,
            num_examples=counts[0],
            num_held_out=counts[1],
            needs=needs,
            max_runs=self.config.file.max_runs,
            memory_mib=self.config.file.memory_mib,
            gpu_memory_mib=self.config.file.gpu_memory_mib,
        )

    def _check_code(self, proposal: Proposal) -> None:
        if proposal.code_hash == code_hash().hex():
            return
        raise ProtocolError(
            releases.advice(
                site=self.name, here=introduction.release(), there=proposal.release
            )
        )


def _check_same_job(job: JobSpec, folder: Path, roster: Roster) -> None:
    """Check that a run's job has not changed."""
    try:
        before = introduction.open_proposal((folder / PROPOSAL).read_bytes(), roster)
    except FileNotFoundError:
        return
    known = job_file.loads(before.job)
    if job_digest.digest(known) == job_digest.digest(job):
        return
    try:
        check_extension(known, job)
    except CheckpointMismatch as error:
        raise ProtocolError(
            f"the run was proposed with a different job: {error}"
        ) from None
