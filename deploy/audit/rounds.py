"""How an audit runs a job's rounds: in this process, without storing anything.

Without masks, if the promise holds against who sees every update; with the
job's own secure sum and noise shares, if it holds against who sees the opened sums.
"""

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from clients.privacy.masking import SumNoise
from clients.privacy.site_plans import PrivateSites
from clients.training.local_federation import Federation
from cloud_adapters.storage.memory import MemoryStore
from deploy.wiring.rehearsal import rehearse
from deploy.wiring.run import InProcess, Run, SecureContext
from federation.errors import SiteError
from federation.events import Emit, Event, SiteFailed
from federation.ids import RunId, SiteId
from federation.members import Members
from federation.messages import FailureKind
from federation.protocols import (
    Clock,
    ObjectStore,
    RunState,
    SiteHandler,
    Trainer,
)
from federation.rounds.gather import Gather
from federation.rounds.round_record import RoundRecord
from federation.vectors import Vector

SeeSum = Callable[[Vector], None]

# What a colluder's share is worth against its fellows: they take it off again.
_NO_NOISE = SumNoise(spans=())
_NOT_FAILED = FailureKind.BUDGET, FailureKind.SURPLUS


class Stage(Protocol):
    """The sites of an audit's rounds, and the gathering of their answers."""

    @property
    def federation(self) -> Federation:
        """Model, data and job."""
        ...

    @property
    def run_id(self) -> RunId:
        """The run, which is not stored."""
        ...

    def site(
        self, name: SiteId, trainer: Trainer, *, store: ObjectStore, clock: Clock
    ) -> SiteHandler:
        """Make a site of a trainer."""
        ...

    @property
    def secret(self) -> SecureContext | None:
        """The aggregator's half of secure aggregation."""
        ...

    def seen(self, gather: Gather) -> Gather:
        """Observe the aggregator's gathering."""
        ...


class OpenStage:
    """Every update is seen as it is."""

    def __init__(self, federation: Federation) -> None:
        """Take the job as it is, without masks."""
        self.federation = federation
        self.run_id = throwaway_id()
        self.secret = None

    def site(
        self, name: SiteId, trainer: Trainer, *, store: ObjectStore, clock: Clock
    ) -> SiteHandler:
        """Make a site of a trainer."""
        return self.federation.site(
            name, make_trainer=lambda: trainer, store=store, clock=clock
        )

    def seen(self, gather: Gather) -> Gather:
        """Observe only the updates."""
        return gather


class SecretStage:
    """Only sums are opened, with the job's own masks and noise shares."""

    def __init__(
        self,
        federation: Federation,
        private: PrivateSites,
        *,
        silent: Collection[SiteId] = (),
        see: SeeSum | None = None,
    ) -> None:
        """Bring all parties of a run together.

        Args:
            federation: Model and data.
            private: What the sites promise, planned for this very model.
            silent: Sites that bring no share of the noise.
            see: Called with the mean of every sum that is opened, shape ``(d,)``.

        Raises:
            JobError: The model has tensors that masked sums cannot aggregate.
        """
        self.federation = federation
        self.run_id = throwaway_id()
        self._plans = private.plans
        self._rehearsal = rehearse(federation, self.run_id, private)
        self.secret = self._rehearsal.secret
        self._silent = frozenset(silent)
        self._see = see

    def site(
        self, name: SiteId, trainer: Trainer, *, store: ObjectStore, clock: Clock
    ) -> SiteHandler:
        """Make a site of a trainer; masks and noise have the same source."""
        rehearsal, plan = self._rehearsal, self._plans[name]
        if plan.training is not None:
            rehearsal = replace(rehearsal, random_bytes=plan.training.random_bytes)
        if name in self._silent and rehearsal.in_sum is not None:
            in_sum = replace(rehearsal.in_sum, noise=_NO_NOISE)
            rehearsal = replace(rehearsal, in_sum=in_sum)
        return self.federation.site(
            name,
            make_trainer=lambda: trainer,
            store=store,
            clock=clock,
            seal=rehearsal.seal(name, None),
            tells_all=False,
        )

    def seen(self, gather: Gather) -> Gather:
        """Observe the sums that the aggregator opens."""
        return gather if self._see is None else _ObservedGather(gather, self._see)


class _ObservedGather:
    """A gather with a witness of what it opens."""

    def __init__(self, gather: Gather, see: SeeSum) -> None:
        self.schedule = gather.schedule
        self._gather = gather
        self._see = see

    def cohort(
        self, members: Members, drawn: Sequence[SiteId]
    ) -> tuple[Members, tuple[SiteId, ...]]:
        """Ask the same sites as the gather."""
        return self._gather.cohort(members, drawn)

    def update(self, record: RoundRecord, out_d: Vector) -> Vector:
        """Gather, and show what was combined."""
        mean_d = self._gather.update(record, out_d)
        self._see(mean_d)
        return mean_d

    def evaluation(self, record: RoundRecord) -> None:
        """Let the cohort evaluate, unobserved."""
        self._gather.evaluation(record)


def run_rounds(
    stage: Stage,
    trainers: Mapping[SiteId, Trainer],
    listeners: Sequence[Emit],
    clock: Clock,
) -> RunState:
    """Run the job's rounds in this process, without storing anything.

    Raises:
        SiteError: A site failed in some round: the promises were not tested
            as they were made.
    """
    federation, store = stage.federation, MemoryStore()
    failures: list[SiteFailed] = []

    def emit(event: Event) -> None:
        # What a spent budget forbids was not released, and is not to be audited. Tasks
        # that are open at the end of a buffered run are given up.
        if isinstance(event, SiteFailed) and event.kind not in _NOT_FAILED:
            failures.append(event)
        for listener in listeners:
            listener(event)

    run = Run(
        federation=federation,
        run_id=stage.run_id,
        clock=clock,
        store=store,
        emit=emit,
        stop_requested=lambda: bool(failures),
        seen=stage.seen,
    )
    sites = InProcess(
        job=federation.job,
        sites=list(trainers),
        make=lambda name: stage.site(name, trainers[name], store=store, clock=clock),
        clock=clock,
    )
    try:
        return run.drive(sites, secret=stage.secret)
    finally:
        if failures:
            raise absent(failures[0].site, failures[0].message)


def throwaway_id() -> RunId:
    """Name a run that is not stored."""
    return RunId(f"audit-{secrets.token_hex(8)}")


def absent(name: str, message: str) -> SiteError:
    """Report that a site did not take part."""
    why = f": {message}" if message else ""
    return SiteError(f"site {name!r} did not take part in the audit correctly{why}")
