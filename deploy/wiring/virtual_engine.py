"""``--engine virtual``: the same job and code in virtual time.

The clocks of the aggregator and of every site are virtual: they move on by what the
job says that work and messages take, and by nothing else.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial

from clients.training import surrogate
from clients.training.local_federation import Federation
from clients.training.timed_trainer import TimedTrainer
from cloud_adapters.local.faults import FaultInjector, Restartable
from cloud_adapters.local.virtual_grid import (
    Absences,
    KnownAbsences,
    Machine,
    VirtualGrid,
    away_seconds,
)
from deploy.wiring.run import Rounds
from federation.clock import VirtualClock
from federation.errors import JobError
from federation.events import Emit, SitesPaid, Warned
from federation.ids import SiteId
from federation.job.spec import SURROGATE, JobSpec, MachineSpec
from federation.protocols import RunState, SiteHandler, Trainer
from federation.rounds import cost
from federation.rounds.cost import SiteSpeed, Speeds
from federation.rounds.local_work import PARTS, accumulate_in, moves_data
from federation.rounds.traffic import SiteFacts
from monitoring.runs.run_folder import RunFolder
from monitoring.views.run_view import VIRTUAL, RunView


def clock(job: JobSpec, run: RunFolder | None) -> VirtualClock:
    """Make the aggregator's clock: at 0, or at the time that a resumed run reached.

    Raises:
        JobError: The job does not say how fast every site is.
    """
    speeds = speeds_of(job)
    for site in job.sites:
        if site.name not in speeds:
            raise JobError(
                f"virtual time needs the speed of every site, but {site.name!r} has "
                "none: add an entry with its name and examples_per_second, or use "
                "--engine inproc",
                key="simulation.machines",
            )
    told = run.read_events() if run is not None and run.exists() else []
    return VirtualClock(max((event.at for event in told), default=0.0))


@dataclass(frozen=True, kw_only=True)
class VirtualMachines:
    """Sites on the machines and lines of the job; a ``SiteSource``.

    Attributes:
        make: Makes a site, at first and after a restart.
        clock: The aggregator's.
        clocks: The sites' own, in the order of the job.
        speeds: See ``speeds_of``.
        emit: Receives for which sites a round waits.
    """

    job: JobSpec
    make: Callable[[SiteId], SiteHandler]
    clock: VirtualClock
    clocks: Mapping[SiteId, VirtualClock]
    speeds: Mapping[str, SiteSpeed]
    emit: Emit

    @property
    def engine(self) -> str:
        """Its name in the record of the run."""
        return VIRTUAL

    def reach(self, rounds: Rounds) -> RunState:
        """Make the sites, run the rounds and close the sites."""
        with ExitStack() as stack:
            sites = {
                name: Restartable(partial(self.make, name)) for name in self.clocks
            }
            faults = {
                name: FaultInjector(
                    self.job.simulation.faults,
                    clock=self.clocks[name],
                    seed=self.job.seed,
                    restart=lambda name: sites[name].restart(),
                )
                for name in sites
            }
            for site in sites.values():
                stack.callback(site.close)
            machines = {name: self._machine(name, site) for name, site in sites.items()}
            return rounds(
                VirtualGrid(
                    machines,
                    clock=self.clock,
                    fault=lambda task, answer: faults[task.site](task, answer),
                    returned=faults[next(iter(sites))].returned,
                    combine_seconds=self.job.simulation.combine_seconds,
                    quorum=self.job.fewest_updates,
                    tell_awaited=self._note_awaited,
                )
            )

    def _note_awaited(self, sites: Sequence[SiteId]) -> None:
        text = f"the quorum waits for sites that are away: {', '.join(sites)}"
        at = self.clock.now()
        self.emit(Warned(at=at, message=text, awaited=tuple(sites)))

    def _machine(self, name: SiteId, handler: SiteHandler) -> Machine:
        speed = self.speeds[name]
        return Machine(
            handler=handler,
            clock=self.clocks[name],
            down=speed.down_bytes_per_second,
            up=speed.up_bytes_per_second,
            latency_seconds=speed.latency_seconds,
            absences=_absences(self.job, self._specs[name]),
        )

    @cached_property
    def _specs(self) -> Mapping[str, MachineSpec]:
        return {machine.site: machine for machine in self.job.simulation.machines}


def _absences(job: JobSpec, spec: MachineSpec) -> Absences | KnownAbsences | None:
    if spec.away_share:
        return Absences(
            share=spec.away_share,
            seconds=spec.away_seconds,
            seed=job.seed,
            site=spec.site,
        )
    if not spec.away:
        return None
    return KnownAbsences(spells=spec.away, every=spec.away_every or math.inf)


def sites_paid(job: JobSpec, view: RunView, *, at: float) -> Iterator[SitesPaid]:
    """Price the machine and the traffic of each site; nothing if no price is stated.

    Args:
        job: States prices and absences: a site that is away is not paid for.
        view: What was sent, also by rounds that ran again.
        at: When the run ends, in seconds; it began at 0.
    """
    speeds = cost.virtual_speeds(job)
    if not speeds.has_prices:
        return
    sent = {site.site: (site.bytes_down, site.bytes_up) for site in view.sites}
    dollars = []
    for spec, speed in zip(job.simulation.machines, speeds.sites, strict=True):
        absences, site = _absences(job, spec), {spec.site: sent[spec.site]}
        seconds = at - (away_seconds(absences, at) if absences else 0.0)
        parts = cost.dollars(seconds, site, Speeds(sites=(speed,)))
        dollars.append(sum(parts.values()))
    sites = tuple(speed.name for speed in speeds.sites)
    yield SitesPaid(at=at, sites=sites, dollars=tuple(dollars))


def trainers(federation: Federation) -> Callable[[SiteId], Trainer]:
    """Return what makes a site's trainer, or a surrogate of it."""
    job, layout = federation.job, federation.pool.layout
    if job.simulation.training != SURROGATE:
        return federation.trainer
    table = surrogate.draws(job, layout)

    def make(name: SiteId) -> Trainer:
        train, held_out = federation.site_data[name]
        return surrogate.SurrogateTrainer(
            job=job,
            site=name,
            of_layout=layout,
            table=table,
            num_examples=len(train),
            num_held_out=len(held_out),
        )

    return make


def timed(
    federation: Federation,
    name: SiteId,
    trainer: Trainer,
    clock: VirtualClock,
    speed: SiteSpeed,
) -> Trainer:
    """Let a site's work take virtual time."""
    train, held_out = federation.site_data[name]
    job, facts = federation.job, SiteFacts(len(train), len(held_out))
    work = cost.work_seconds(job.training, facts, speed)
    return TimedTrainer(
        trainer=trainer,
        clock=clock,
        work=replace(work, num_steps=PARTS) if moves_data(job) else work,
        relative=lambda index: (
            accumulate_in(job.training, index) / job.training.accumulate
        ),
    )


def speeds_of(job: JobSpec) -> Mapping[str, SiteSpeed]:
    """The speeds of sites in virtual time, by name."""
    return cost.by_site(cost.virtual_speeds(job))
