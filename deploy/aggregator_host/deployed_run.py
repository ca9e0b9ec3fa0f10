"""One run across machines, from the coordinator's side.

The same round loop as in a simulation; the sites are elsewhere, so what a simulation
knows of their data is learned from their introductions, or not at all.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Protocol

from clients.models.model_pool import ModelPool
from clients.models.starting_weights import initial_weights, notice
from clients.privacy import site_plans as private_sites, sum_plan as sum_privacy
from clients.privacy.stated_bounds import dominance_notice
from clients.privacy.sum_plan import SumPrivacy
from clients.training.local_federation import Federation
from clients.user_code import unable_to_exit
from cloud_adapters.flower.facts import Connected
from deploy import audit_log
from deploy.aggregator_host import run_queue
from deploy.aggregator_host.enrolment_book import BookFile
from deploy.aggregator_host.handshake import SignedHandshake
from deploy.aggregator_host.parties import Parties, cannot_continue, check, fewest
from deploy.wiring import parts as wiring, store_meters
from deploy.wiring.begun_run import check_engine
from deploy.wiring.rehearsal import dropout_notice, predicted, traffic_of
from deploy.wiring.run import ConnectedSites, Run, SecureContext
from deploy.wiring.run_record import RunRecord
from deploy.wiring.store_meters import StoreMeters
from federation.errors import FederationError, QuorumNotMet
from federation.events import Emit, Event, SitePrivacy, SitesIntroduced, Warned
from federation.ids import SiteId
from federation.job.spec import JobSpec
from federation.messages import LedgerAnchor, join_anchors
from federation.protocols import Clock, Grid, RunState
from federation.resources import PROCESS
from federation.rounds.traffic import SiteFacts, Traffic
from federation.vectors import Allocate, Layout, in_memory
from monitoring.runs.run_folder import RunFolder
from monitoring.runs.run_result import RunResult
from monitoring.units import format_duration
from monitoring.views.run_view import DEPLOYED
from privacy.membership import introduction
from privacy.secagg.agreement.contract import Contract
from privacy.secagg.agreement.roster import Roster
from privacy.secagg.protocol.of_job import check_layout, contract_of


class Connect(Protocol):
    """Makes a grid whose sites have answered a handshake."""

    def __call__(
        self,
        handshake: SignedHandshake,
        sites: Sequence[SiteId],
        *,
        required: int,
        quorum: int,
    ) -> Grid:
        """Do the handshake.

        Args:
            handshake: Tells which node is which site.
            sites: In the order of the job.
            required: How many must answer.
            quorum: Without how many a round is of no use; 0 to wait for nobody.
        """
        ...


class DeployedRun:
    """Coordinates one run; see ``run``.

    Attributes:
        begun: Whether an earlier coordinator has begun it.
        watch: Notes what the coordinator uses stores for, for the run's events.
    """

    def __init__(
        self,
        run: RunFolder,
        parties: Parties,
        *,
        clock: Clock,
        holder: str = "",
        listeners: Sequence[Emit] = (),
        stop_requested: Callable[[], bool] = lambda: False,
        goes_on: Callable[[BaseException], bool] = lambda _error: False,
        report: bool = True,
        allocate: Allocate = in_memory,
    ) -> None:
        """Read a run's job and build its model.

        Args:
            run: Holds ``job.toml``, and whatever an earlier coordinator has left.
            parties: The aggregator's key and roster.
            clock: Tells time.
            holder: Who works on the run, for those who find it locked.
            listeners: Called with every event.
            stop_requested: Asked after every round.
            goes_on: Whether another coordinator continues the run after an error.
            report: Whether to write ``report.html`` at the end.
            allocate: Makes the vectors of the model and of the server optimiser.

        Raises:
            JobError: The job cannot be run.
            CheckpointMismatch: A simulation has worked on the run.
        """
        self._run, self._holder = run, holder
        self._parties = parties
        self._clock = clock
        self._job = run.read_spec()
        begun = run.run_id()
        check_engine(run, DEPLOYED)
        check(self._job, parties, resumed=begun is not None)
        self._federation = _built(self._job, is_new=begun is None)
        run_id = begun or run.new_run_id(clock.now())
        # What the sites have promised to this run, as an earlier coordinator noted it.
        planned = None if begun is None else run.settled_view().privacy
        self._promised = {p.site: p for p in planned.sites} if planned else {}
        self.begun = begun is not None
        self._anchors: Mapping[SiteId, LedgerAnchor] = {}
        self._handshake: SignedHandshake
        self._in_sum: SumPrivacy | None = None
        meters = StoreMeters(clock)
        self.watch = meters.watch(store_meters.coordinator(self._job))
        self._record = RunRecord(
            self._job,
            run,
            run_id,
            pool=self._federation.pool,
            clock=clock,
            meters=meters,
            introduce=self._facts,
            listeners=listeners,
            goes_on=goes_on,
            report=report,
        )
        self._assembly = Run(
            federation=self._federation,
            run_id=run_id,
            clock=clock,
            store=self._record.store,
            emit=self._record.emit,
            stop_requested=stop_requested,
            goes_on=goes_on,
            advised=self.failed,
            meter=PROCESS,
            extensions=run.extensions(),
            newest_saved=run.newest_saved(),
            allocate=allocate,
        )

    @property
    def job(self) -> JobSpec:
        """The job."""
        return self._job

    @property
    def layout(self) -> Layout:
        """Layout of the model."""
        return self._federation.pool.layout

    def sealed_end(self, *, outcome: str = "", reason: str = "") -> bytes:
        """Return what tells sites that no more tasks of the run will come for them."""
        run_id, identity = self._assembly.run_id, self._parties.identity
        return introduction.seal_end(run_id, identity, outcome=outcome, reason=reason)

    def with_site(self, job: JobSpec, members: Roster) -> SignedHandshake:
        """Propose the run to a site that may join it.

        Args:
            job: The run's, and the site.
            members: Pins the site's key.
        """
        return SignedHandshake.of(
            job,
            self._assembly.run_id,
            aggregator=self._parties.identity,
            roster=members,
            spares=True,
        )

    def warn(self, text: str, awaited: Sequence[str] = ()) -> None:
        """Note something for people."""
        event = Warned(at=self._clock.now(), message=text, awaited=tuple(awaited))
        self._record.emit(event)

    def revoked(self) -> frozenset[SiteId]:
        """Sites whose keys in the run's roster are revoked by now."""
        book = BookFile(folder=run_queue.folder_of(self._run))
        found = self._parties.revoked
        with suppress(FederationError):  # The service says what cannot be read.
            found |= book.noted_revoked(self._parties.roster)
        return found

    def note_connected(self, found: Connected) -> None:
        """Note for people which sites the run waits for."""
        gone = self.revoked().intersection(found.missing)
        found = replace(found, revoked=tuple(sorted(gone)))
        if found.what == f"round {self._job.rounds + 1}":
            found = replace(found, what="the final evaluation")
        run_queue.note_connected(self._run, found)
        if found.what and found.missing:
            text = (
                f"{found.what} waits up to "
                f"{format_duration(found.seconds)} for {', '.join(found.missing)}, "
                f"which {'is' if len(found.missing) == 1 else 'are'} disconnected"
            )
            if found.revoked:
                text += f"; revoked: {', '.join(found.revoked)}"
            self.warn(text, found.missing)

    def failed(self, error: QuorumNotMet) -> QuorumNotMet:
        """The error; where revoked sites forbid to resume, with that as its advice."""
        fault = cannot_continue(self._job, self.revoked())
        return QuorumNotMet(error.fault, fault) if fault else error

    def _can_spare_sites(self) -> bool:
        """Whether a started run can continue without some of its sites.

        What it claims of privacy rests on promises of all of them.
        """
        job = self._job
        known = self._promised.keys() >= {site.name for site in job.sites}
        private = job.privacy.differential_privacy.enabled
        return fewest(job) < len(job.sites) and (known or not private)

    def run(self, connect: Connect) -> RunResult:
        """Start the run, or resume it from its newest checkpoint.

        Args:
            connect: Makes the grid.

        Raises:
            SiteError: A site refuses the run, or too few are there.
            FederationError: Whatever ends a run before its time.
        """
        job = self._job
        names = [SiteId(site.name) for site in job.sites]
        # Promises of all sites are part of what the run claims.
        private = job.privacy.differential_privacy.enabled
        spares = self.begun and self._can_spare_sites()
        required = len(names) if private and not spares else job.minimum_sites
        with ExitStack() as stack:
            stack.enter_context(wiring.torch_threads(job))
            stack.enter_context(self._run.locked(self._holder))
            self._anchors = self._known_anchors()
            self._handshake = SignedHandshake.of(
                job,
                self._assembly.run_id,
                aggregator=self._parties.identity,
                roster=self._parties.roster,
                revoked=self._parties.revoked,
                spares=spares,
                anchors=self._anchors,
                num_values=self.layout.size if job.relays else 0,
                audit_head=audit_log.head(run_queue.folder_of(self._run)),
            )
            quorum = job.minimum_sites if job.buffer_size is None else 0
            grid = connect(self._handshake, names, required=required, quorum=quorum)
            if job.relays:
                self._handshake.check_present(required)
            if self._handshake.needs is not None:
                self._in_sum = sum_privacy.plan(self._federation, self._handshake.needs)
            return self._record.keep(partial(self._coordinate, grid))

    def _known_anchors(self) -> Mapping[SiteId, LedgerAnchor]:
        """How many charges each site's ledger must hold."""
        if not self.begun or not self._job.privacy.differential_privacy.enabled:
            return {}
        checkpoints = self._assembly.checkpoints()
        return join_anchors(checkpoints.anchors(), self._run.anchors())

    def _facts(self) -> Iterator[Event]:
        needs = self._handshake.needs
        odd = dominance_notice(needs) if needs else ""
        for text in (dropout_notice(self._job), notice(self._job), odd):
            if text:
                yield Warned(at=self._clock.now(), message=text)
        for reason in self._handshake.absent.values():
            text = f"{reason}; the run continues without it"
            yield Warned(at=self._clock.now(), message=text)
        told = {name: n for name, n in self._handshake.examples().items() if n}
        if told:
            yield SitesIntroduced(
                at=self._clock.now(),
                sites=tuple(told),
                num_examples=tuple(told.values()),
            )
        promises = self._promises()
        if promises:
            in_sum = self._in_sum
            yield private_sites.planned(
                self._job,
                promises,
                replaced=self._federation.pool.replaced,
                signal_to_noise=None if in_sum is None else in_sum.signal_to_noise,
                at=self._clock.now(),
            )
        traffic = self._traffic()
        if traffic is not None:
            yield predicted(traffic, at=self._clock.now(), virtual=False)

    def _traffic(self) -> Traffic | None:
        """Sizes of the run's messages; None where they depend on unknown counts."""
        contract, data = self._contract(), self._handshake.data
        stated = {site: SiteFacts(n.examples, n.held_out) for site, n in data.items()}
        is_known = all(each.train and each.held_out for each in stated.values())
        if contract is None and not is_known:
            return None
        return traffic_of(self._federation, contract, stated=stated)

    def _promises(self) -> tuple[SitePrivacy, ...]:
        """The promises of the sites; of absent ones, their earlier promises."""
        new = {promise.site: promise for promise in self._handshake.promises()}
        return tuple(each for _, each in sorted((self._promised | new).items()))

    def _contract(self) -> Contract | None:
        """The contract of this run; None without secure aggregation."""
        job, in_sum = self._federation.job, self._in_sum
        if not job.privacy.secure_aggregation.enabled:
            return None
        return contract_of(
            job,
            self.layout,
            run_id=self._assembly.run_id,
            roster=self._parties.roster,
            promises=self._promises(),
            ring_noise_std=0.0 if in_sum is None else in_sum.ring.noise_std,
        )

    def _secret(self) -> SecureContext | None:
        contract = self._contract()
        if contract is None:
            return None
        return SecureContext(identity=self._parties.identity, contract=contract)

    def _coordinate(self, grid: Grid) -> RunState:
        self._handshake.promised = {one.site: one for one in self._promises()}
        return self._assembly.drive(
            ConnectedSites(engine=DEPLOYED, grid=grid),
            secret=self._secret(),
            introduced=self._handshake.data,
            anchors=self._anchors,
        )


def _built(job: JobSpec, *, is_new: bool) -> Federation:
    """Build the model of a run, and check it before a site is asked."""
    with unable_to_exit():
        pool = ModelPool(job)
    if job.privacy.secure_aggregation.enabled:
        check_layout(job, pool.layout)
    if is_new:
        initial_weights(job, pool)
    return Federation(job=job, pool=pool, site_data={})
