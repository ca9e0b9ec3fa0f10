"""One run at a site: what it is told of it, and what answers its tasks."""

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from clients.kept_integers import KeptIntegers
from clients.secure_site import Protection, SecureSite
from cloud_adapters.storage.local import LocalStore
from deploy import site_ranks
from deploy.private_sites import PrivateSites
from deploy.protection import check_layout
from deploy.site_file import FloorSpec, SiteConfig, SiteFile
from deploy.site_floor import contract_floor
from deploy.sum_privacy import SumPrivacy
from deploy.wiring import Federation
from federation.errors import JobError
from federation.events import SitePrivacy
from federation.ids import RunId, SiteId
from federation.job import JobSpec
from federation.protocols import Clock, SiteHandler, Trainer
from federation.vectors import Layout
from privacy.secagg.floor import LocalFloor
from privacy.secagg.identity import Identity
from privacy.secagg.roster import Roster
from privacy.secagg.round_memory import FileRounds


@dataclass(frozen=True, kw_only=True)
class MetRun:
    """A run that was proposed to a site, and that it has model and data for.

    Attributes:
        run_id: The run.
        sealed: Its proposal, as the aggregator signed it.
        federation: Its job and model, and the data of this site alone.
    """

    run_id: RunId
    sealed: bytes
    federation: Federation

    @property
    def job(self) -> JobSpec:
        """The job."""
        return self.federation.job


@dataclass(frozen=True, kw_only=True)
class OpenRun:
    """A run that a site takes part in.

    Attributes:
        met: What it was told of it.
        handler: Answers its tasks.
        promise: What it has promised; None without differential privacy.
        stack: Closed when the site leaves the run: keys go, and ledgers are closed.
    """

    met: MetRun
    handler: SiteHandler
    promise: SitePrivacy | None
    stack: ExitStack


@dataclass(frozen=True, kw_only=True)
class SiteKeys:
    """Who a site is, and whom it trusts.

    Attributes:
        identity: Its own key.
        roster: Pins those of the others.
    """

    identity: Identity
    roster: Roster


def open_run(
    met: MetRun,
    *,
    config: SiteConfig,
    keys: SiteKeys,
    folder: Path,
    clock: Clock,
    stated: Mapping[SiteId, float] | None,
    stack: ExitStack,
) -> OpenRun:
    """Plan what the site promises, open its ledger and build what answers tasks.

    Args:
        met: The run.
        config: The operator's ``site.toml``.
        keys: Under secure aggregation.
        folder: What the site keeps of this run.
        clock: Of the ledger.
        stated: What all sites have stated that they need; None unless noise is in the
            sum.
        stack: Closes what was opened.

    Raises:
        FederationError: The site does not or cannot take part.
    """
    job, name = met.job, SiteId(config.file.name)
    private: PrivateSites | None = None
    if job.privacy.differential_privacy.enabled:
        private = PrivateSites(
            met.federation, run_id=met.run_id, folder=folder, clock=clock, stated=stated
        )
        stack.enter_context(private)
    promise = None if private is None else _promise(private, config.file.floor)
    make_trainer = _trainer_maker(met.federation, private, config.file, stack)
    handler: SiteHandler
    if job.privacy.secure_aggregation.enabled:
        in_sum = None if private is None else private.in_sum
        handler = _secure_site(
            met,
            make_trainer,
            config=config,
            keys=keys,
            folder=folder,
            in_sum=in_sum,
        )
    else:
        handler = met.federation.site(
            name,
            make_trainer=make_trainer,
            store=LocalStore(folder),
            clock=clock,
            tells_all=False,
        )
    stack.callback(handler.close)
    return OpenRun(met=met, handler=handler, promise=promise, stack=stack)


def _promise(private: PrivateSites, floor: FloorSpec) -> SitePrivacy:
    """What the site promises, held against the floor: some of it only a plan tells."""
    (promise,) = private.promises()
    if floor.demands_privacy and promise.delta > floor.max_delta:
        raise JobError(
            f"comes to {promise.delta:.1e} at site {promise.site!r}, "
            f"which allows {floor.max_delta:g} (floor.max_delta)",
            key="privacy.differential_privacy.delta",
        )
    return promise


def _trainer_maker(
    federation: Federation,
    private: PrivateSites | None,
    file: SiteFile,
    stack: ExitStack,
) -> Callable[[], Trainer]:
    if private is None:
        return site_ranks.trainer_of(federation, file, stack)
    make = site_ranks.private_maker(federation, file, stack)
    trainer = private.trainer(SiteId(file.name), make)
    return lambda: trainer


def _secure_site(
    met: MetRun,
    make_trainer: Callable[[], Trainer],
    *,
    config: SiteConfig,
    keys: SiteKeys,
    folder: Path,
    in_sum: SumPrivacy | None,
) -> SecureSite:
    layout, name = met.federation.pool.layout, SiteId(config.file.name)
    check_layout(layout)

    def floor_of(layout: Layout) -> LocalFloor:
        return contract_floor(
            met.job,
            layout,
            floor=config.file.floor,
            roster=keys.roster,
            noise_share=None if in_sum is None else in_sum.share,
        )

    return SecureSite(
        name,
        make_trainer=make_trainer,
        kept=KeptIntegers(name, layout, LocalStore(folder)),
        protection=Protection(
            identity=keys.identity,
            floor_of=floor_of,
            memory=FileRounds(folder / "sites" / name / "rounds"),
            random_bytes=os.urandom,
            noise=None if in_sum is None else in_sum.noise,
            threads=met.job.training.threads,
        ),
    )
