"""One run of a job: the only place that assembles its round loop.

A simulation, a deployed run and an audit differ in where their sites are, and in what
the aggregator keeps. Each names a ``SiteSource``; gather, checkpoints and the parts of
the server are the same for all.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from aggregator.buffered_sums import BufferedGroups
from aggregator.checkpoint import RunCheckpoints
from aggregator.combine import combine_rule
from aggregator.free_cohorts import FreeCohorts
from aggregator.group_sums import GroupGather
from aggregator.methods import registry
from aggregator.relay import PlainRelay, SecureRelay
from aggregator.secure_sum import SecureGather
from aggregator.weighting import SignedCounts, weight_of
from clients.models.starting_weights import initial_weights
from clients.training.local_federation import Federation
from cloud_adapters.local.faults import FaultInjector, Restartable
from cloud_adapters.local.inproc_grid import InProcessGrid
from cloud_adapters.local.relayed_grid import Combine, RelayedGrid, RelayLine
from cloud_adapters.local.transcript import recorded
from deploy.wiring import parts as wiring
from federation.clock import VirtualClock
from federation.compression.change import first_residual
from federation.errors import QuorumNotMet
from federation.events import Emit, RunExtended
from federation.ids import RunId, SiteId
from federation.job import job_digest
from federation.job.spec import FaultSpec, JobSpec
from federation.messages import LedgerAnchor
from federation.protocols import Clock, Grid, ObjectStore, RunState, SiteHandler
from federation.resources import CLOCK, UsageMeter
from federation.rounds import cost
from federation.rounds.coordinator import ServerParts, run_federation
from federation.rounds.gather import Gather
from federation.rounds.retrying_grid import RetryingGrid
from federation.rounds.server_optimizer import server_optimizer
from federation.vectors import Allocate, in_memory, place
from monitoring.views.round_view import named_metric
from monitoring.views.run_view import DEPLOYED
from privacy.secagg.agreement.contract import Contract
from privacy.secagg.agreement.identity import Identity


def relayed(
    grid: Grid,
    federation: Federation,
    clock: Clock,
    *,
    contract: Contract | None,
    identities: Mapping[SiteId, Identity],
) -> Grid:
    """Put the job's relays between the aggregator and the sites of a grid.

    Args:
        grid: Reaches the sites.
        federation: Job and model.
        clock: The aggregator's; only in virtual time do lines take time.
        contract: With secure aggregation, what all have agreed on.
        identities: With secure aggregation, those of the relays.
    """
    job = federation.job
    if not job.relays:
        return grid

    def combine_of(name: SiteId) -> Combine:
        if contract is not None:
            return SecureRelay(name=name, identity=identities[name], contract=contract)
        return PlainRelay(
            name=name,
            num_values=federation.pool.layout.size,
            layout_digest=federation.pool.layout.digest,
            weight_of=weight_of(job.aggregation.weights),
            combine=combine_rule(job.aggregation),
        )

    takes_time = isinstance(clock, VirtualClock)
    relays = []
    for relay in job.relays:
        speed = cost.relay_speed(job.simulation.relays, relay.name)
        line = {
            "down": speed.down_bytes_per_second,
            "up": speed.up_bytes_per_second,
            "latency_seconds": speed.latency_seconds,
        }
        lost = [r.lost_rounds for r in job.simulation.relays if r.relay == relay.name]
        relays.append(
            RelayLine(
                name=SiteId(relay.name),
                sites=[SiteId(s.name) for s in job.sites if s.name in relay.sites],
                combine=combine_of(SiteId(relay.name)),
                lost_rounds=lost[0] if lost else (),
                **(line if takes_time else {}),
            )
        )
    return RelayedGrid(grid, relays, clock=clock, in_order=not takes_time)


Rounds = Callable[[Grid], RunState]


class SiteSource(Protocol):
    """Where the sites of a run are."""

    @property
    def engine(self) -> str:
        """Its name in the record of the run."""
        ...

    def reach(self, rounds: Rounds) -> RunState:
        """Run the rounds over a grid of the sites, and release them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectedSites:
    """Sites that a grid already reaches."""

    engine: str
    grid: Grid

    def reach(self, rounds: Rounds) -> RunState:
        """Run the rounds; the maker of the grid closes it."""
        return rounds(self.grid)


@dataclass(frozen=True, slots=True, kw_only=True)
class InProcess:
    """Sites in threads of this process.

    Attributes:
        sites: Who they are.
        make: Makes one of them, at first and after a restart.
        clock: Clock of deadlines and faults.
        faults: Misfortunes to rehearse.
        end_early: Has sites that are at work when the run ends take no more steps.
    """

    job: JobSpec
    sites: Sequence[SiteId]
    make: Callable[[SiteId], SiteHandler]
    clock: Clock
    faults: Sequence[FaultSpec] = ()
    end_early: Callable[[], None] = lambda: None

    @property
    def engine(self) -> str:
        """Its name in the record of the run."""
        return "inproc"

    def reach(self, rounds: Rounds) -> RunState:
        """Make the sites, run the rounds and close the sites."""
        with ExitStack() as stack:
            sites = {name: Restartable(partial(self.make, name)) for name in self.sites}
            for site in sites.values():
                stack.callback(site.close)  # After the grid: no thread is at work.
            fault = FaultInjector(
                self.faults,
                clock=self.clock,
                seed=self.job.seed,
                restart=lambda name: sites[name].restart(),
            )
            grid = InProcessGrid(
                sites,
                clock=self.clock,
                workers=wiring.num_workers(self.job),
                fault=fault,
                returned=fault.returned,
            )
            stack.enter_context(grid)
            stack.callback(self.end_early)
            return rounds(grid)


@dataclass(frozen=True, slots=True, kw_only=True)
class SecureContext:
    """What the aggregator needs to gather with secure aggregation.

    Attributes:
        identity: Its own.
        contract: Between it and the sites.
        relays: The identities of the relays, in a simulation.
    """

    identity: Identity
    contract: Contract
    relays: Mapping[SiteId, Identity] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of a job, as seen by its aggregator.

    Attributes:
        federation: Job and model.
        clock: Tells time.
        store: Holds the checkpoints.
        emit: Where events go.
        stop_requested: Asked after every round.
        goes_on: Whether another coordinator continues the run after an error.
        advised: Gives an error the advice of the engine, if it knows better.
        transcript: Folder for every message as the aggregator saw it.
        seen: What looks on as the aggregator gathers; an audit's witness.
        meter: Measures what rounds take of this process.
        extensions: How its job was extended, in their order.
        newest_saved: The newest round with a checkpoint, by the run's record.
        allocate: Makes the vectors of the model, of sums and of the server optimiser.
    """

    federation: Federation
    run_id: RunId
    clock: Clock
    store: ObjectStore
    emit: Emit
    stop_requested: Callable[[], bool] = lambda: False
    goes_on: Callable[[BaseException], bool] = lambda _error: False
    advised: Callable[[QuorumNotMet], QuorumNotMet] = lambda error: error
    transcript: Path | None = None
    seen: Callable[[Gather], Gather] = field(default=lambda gather: gather)
    meter: UsageMeter = CLOCK
    extensions: Sequence[RunExtended] = ()
    newest_saved: int | None = None
    allocate: Allocate = in_memory

    def checkpoints(self) -> RunCheckpoints:
        """Find the run's checkpoints in its store; nothing is read yet."""
        job = self.federation.job
        return RunCheckpoints(
            store=self.store,
            prefix="checkpoints/",
            run_id=self.run_id,
            job=job_digest.deciding(job),
            layout=self.federation.pool.layout,
            keep=job.storage.keep_checkpoints,
            emit=self.emit,
            clock=self.clock,
            extensions=self.extensions,
            newest_saved=self.newest_saved,
            allocate=self.allocate,
        )

    def drive(
        self,
        sites: SiteSource,
        *,
        secret: SecureContext | None = None,
        introduced: Mapping[SiteId, SignedCounts] | None = None,
        anchors: Mapping[SiteId, LedgerAnchor] | None = None,
    ) -> RunState:
        """Run the job's rounds, from the newest checkpoint if there is one.

        Args:
            sites: Where the sites are.
            secret: Key and contract, if the job has secure aggregation.
            introduced: What sites have signed of their data.
            anchors: What is known of the sites' ledgers beside the checkpoints.

        Raises:
            FederationError: Whatever ends a run before its time.
        """

        def rounds(grid: Grid) -> RunState:
            if sites.engine != DEPLOYED:  # There, relays are parties of their own.
                grid = relayed(
                    grid,
                    self.federation,
                    self.clock,
                    contract=None if secret is None else secret.contract,
                    identities={} if secret is None else secret.relays,
                )
            grid = recorded(grid, self.transcript)
            job = self.federation.job
            # A relay's sites are asked together, and some groups may be lost.
            if not job.relays and not job.has_groups:
                needed = job.minimum_sites
                grid = RetryingGrid(grid, needed=needed, clock=self.clock)
            if secret is None:
                gather = wiring.plain_gather(
                    self.federation,
                    grid,
                    emit=self.emit,
                    clock=self.clock,
                    introduced=introduced,
                )
            else:
                gather = _secure_gather(self.federation, grid, secret, self.allocate)
            parts = self._parts(sites.engine, self.seen(gather), anchors or {})
            waits = sites.engine == DEPLOYED
            parts = replace(parts, returned=grid.returned, waits=waits)
            return run_federation(self.federation.job, parts)

        return sites.reach(rounds)

    def _parts(
        self, engine: str, gather: Gather, anchors: Mapping[SiteId, LedgerAnchor]
    ) -> ServerParts:
        pool = self.federation.pool
        job = self.federation.job
        optimizer = server_optimizer(
            job.aggregation.server_optimizer, period=job.models_per_round
        )

        def initial_state() -> RunState:
            weights_d, integers_m = initial_weights(self.federation.job, pool)
            links = self.federation.job.communication.links
            moments = {
                **optimizer.init(pool.layout.size),
                **first_residual(links, pool.layout.size),
            }
            return RunState(
                round_index=0,
                weights_d=place(weights_d, self.allocate),
                integers_m=integers_m,
                optimizer={
                    name: place(values_d, self.allocate)
                    for name, values_d in moments.items()
                },
                rounds_completed=0,
                lost_in_a_row=0,
            )

        return ServerParts(
            run_id=self.run_id,
            engine=engine,
            layout=pool.layout,
            gather=gather,
            initial_state=initial_state,
            checkpoints=self.checkpoints(),
            draw_cohort=wiring.cohorts_of(self.federation.job),
            optimizer=optimizer,
            guests=registry.begin(self.federation.job, named_metric),
            clock=self.clock,
            emit=self.emit,
            stop_requested=self.stop_requested,
            goes_on=self.goes_on,
            advised=self.advised,
            anchors=anchors,
            meter=self.meter,
            allocate=self.allocate,
            first_round=max((one.first_round for one in self.extensions), default=1),
        )


def _secure_gather(
    federation: Federation, grid: Grid, secret: SecureContext, allocate: Allocate
) -> Gather:
    """Make the aggregator's half: for one sum over all sites, or sums over some."""
    job = federation.job
    make: type[GroupGather | SecureGather] = SecureGather
    if job.has_groups:
        make = BufferedGroups if job.schedule.groups else GroupGather
        make = FreeCohorts if job.has_free_cohorts else make
    return make(
        job,
        layout=federation.pool.layout,
        grid=grid,
        identity=secret.identity,
        contract=secret.contract,
        allocate=allocate,
    )
