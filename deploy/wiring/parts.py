"""Build a job's model, data and gather; ``run`` makes a run of them."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import torch

from aggregator import sampling
from aggregator.combine import combine_rule
from aggregator.exact_adapters import ExactAdapters
from aggregator.methods.statistics import noting
from aggregator.weighting import SignedCounts, sums_fault, weight_of
from clients import randomness
from clients.data.partition import count_labels, partition
from clients.factories import import_factory
from clients.models.model_pool import ModelPool
from clients.models.tokenizers import check_alike, check_tokenizers, noted_tokenizers
from clients.privacy.public_moments import standardised
from clients.privacy.source_check import check_simulated
from clients.statistics import columns
from clients.training.local_federation import Federation, SiteData
from deploy.wiring import store_meters
from deploy.wiring.job_data import load_data
from deploy.wiring.store_meters import StoreMeters, User, Watch
from federation.errors import JobError, SiteError
from federation.events import DataDistributed, Emit, SiteShare
from federation.ids import SiteId
from federation.job.metrics import TRAINER
from federation.job.spec import DataSpec, JobSpec
from federation.job.statistics_checks import table
from federation.protocols import Clock, CombineRule, Grid
from federation.rounds.gather import Gather, PlainGather
from federation.rounds.local_work import moves_data
from federation.rounds.schedule import schedule_of


def build_federation(
    job: JobSpec,
    meters: StoreMeters | None = None,
    data: Mapping[SiteId, SiteData] | None = None,
) -> Federation:
    """Build the model and split the data of a simulation.

    Args:
        job: Job of the simulation.
        meters: Note what the stores of the sites' data are used for.
        data: Data of each site that were dealt and checked before, as ``deal_data``
            returns them.

    Raises:
        JobError: A factory cannot be imported or called, or the job's unit of privacy
            does not permit how the data were prepared.
        SiteError: The data is not what a site can use, or a site gets none.
    """
    if data is None:
        data = deal_data(job, meters)
        check_simulated(job, data)
    data = {n: standardised(job, pair, f"site {n!r}") for n, pair in data.items()}
    if job.statistics is not None:
        columns.check(table(job), {name: pair[0] for name, pair in data.items()})
    return Federation(job=job, pool=ModelPool(job), site_data=data)


def check_sites_are_here(job: JobSpec) -> None:
    """Refuse sites that cannot run here.

    Raises:
        JobError: A site runs an app of Flower.
    """
    for index, site in enumerate(job.sites):
        if site.flower_app is not None:
            raise JobError(
                f"site {site.name!r} runs a Flower app, which a simulation cannot run: "
                "remove this key to rehearse with the job's own model",
                key=f"sites[{index}].flower_app",
            )


def deal_data(
    job: JobSpec, meters: StoreMeters | None = None
) -> Mapping[SiteId, SiteData]:
    """Load the data and give every site its own; apps of Flower bring theirs.

    Raises:
        JobError: A source cannot be called, or sites have loaded different tokenisers.
        SiteError: A source failed.
    """
    own: dict[SiteId, SiteData] = {}
    tokenizers: dict[str, Sequence[str]] = {}
    for index, site in enumerate(job.sites):
        if site.data is not None:
            try:
                with noted_tokenizers() as tokenizers[site.name]:
                    own[SiteId(site.name)] = load_data(
                        site.data.source,
                        site.data.options,
                        key=f"sites[{index}].data",
                        watch=_watch(meters, store_meters.site(site)),
                    )
            except SiteError as error:
                if type(error) is not SiteError:
                    raise
                place = f"site {site.name!r}: "
                raise SiteError(
                    f"{place}{error}", outside=place + error.outside
                ) from error
            check_tokenizers(job, tokenizers[site.name], source=site.data.source)
    trained_here = [site for site in job.sites if site.flower_app is None]
    names = [
        SiteId(site.name)
        for site in trained_here
        if site.data is None and site.name not in job.replica_of
    ]
    if lacking := without_data(job):
        raise JobError(
            f"site {lacking[0]!r} has no data: add a [data] table for a simulation to "
            "split, or give the site its own `data`. Deployed sites need neither: each "
            "loads what its site.toml names (data.source)",
            key="data",
        )
    if job.data is not None and names:
        with noted_tokenizers() as tokenizers[names[0]]:
            own |= _deal(job, job.data, names, meters)
        check_tokenizers(job, tokenizers[names[0]], source=job.data.source)
    check_alike(tokenizers)
    own |= {
        SiteId(site): own[SiteId(first)]
        for site, first in job.replica_of.items()
        if first in own
    }
    return {SiteId(site.name): own[SiteId(site.name)] for site in trained_here}


def without_data(job: JobSpec) -> Sequence[SiteId]:
    """Find the sites that train on data which only their own ``site.toml`` names."""
    return [
        SiteId(site.name)
        for site in job.sites
        if job.data is None and site.data is None and site.flower_app is None
    ]


def deal_part(job: JobSpec, site: SiteId) -> SiteData:
    """Deal a deployed site its part of the job's dataset, as a simulation would.

    What the job names for single sites is not loaded.

    Raises:
        JobError: The source cannot be called, or loads another tokeniser.
        SiteError: The source failed.
    """
    sharing = tuple(each for each in job.sites if each.data is None)
    return deal_data(replace(job, sites=sharing))[site]


def _watch(meters: StoreMeters | None, user: User) -> Watch | None:
    return None if meters is None else meters.watch(user)


def _deal(
    job: JobSpec, data: DataSpec, names: Sequence[SiteId], meters: StoreMeters | None
) -> dict[SiteId, SiteData]:
    train, held_out = load_data(
        data.source,
        data.options,
        watch=_watch(meters, store_meters.all_sites(job)),
    )
    parts = partition(
        train,
        held_out,
        data.partition,
        site_names=names,
        rng=randomness.stream(job.seed, "partition"),
    )
    if moves_data(job):
        if "://" not in data.source:  # In shards, neighbours stay together.
            mixed = randomness.stream(job.seed, "placement")
            train = train.subset(mixed.permutation(len(train)))
        return {
            name: (train, held_out.subset(indices))
            for name, (_, indices) in zip(names, parts, strict=True)
        }
    return {
        name: (train.subset(train_indices), held_out.subset(held_out_indices))
        for name, (train_indices, held_out_indices) in zip(names, parts, strict=True)
    }


def data_distributed(federation: Federation, *, at: float) -> DataDistributed:
    """Describe the sites' data; that of Flower apps is unknown here."""
    held, job = [train for train, _ in federation.site_data.values()], federation.job
    if moves_data(job):  # As in the first round.
        bounds = np.linspace(0, len(held[0]), len(held) + 1, dtype=int)
        held = [held[0].subset(np.arange(*pair)) for pair in pairwise(bounds)]
    counts = count_labels(held)
    sites = [s for s in job.sites if s.flower_app is None]
    shares = [
        SiteShare(
            site=site.name,
            cloud=site.cloud,
            region=site.region,
            train_examples=len(train),
            held_out_examples=len(federation.site_data[SiteId(site.name)][1]),
            counts=row,
        )
        for site, train, row in zip(sites, held, counts.by_site, strict=True)
    ]
    return DataDistributed(
        at=at, label_kind=counts.kind, labels=counts.labels, shares=tuple(shares)
    )


def rule_of(job: JobSpec) -> CombineRule:
    """Return the job's combine rule, which may be a function of the user's.

    Raises:
        JobError: There is no such function.
    """
    key = "aggregation.combine"
    return combine_rule(job.aggregation, partial(import_factory, key=key))


def cohorts_of(job: JobSpec) -> sampling.Draw:
    """Return what draws a job's cohorts, which may be a function of the user's.

    Raises:
        JobError: It cannot be imported.
    """
    key = "schedule.sampling"
    return sampling.cohorts_of(job, partial(import_factory, key=key))


def plain_gather(
    federation: Federation,
    grid: Grid,
    *,
    emit: Emit,
    clock: Clock,
    introduced: Mapping[SiteId, SignedCounts] | None = None,
) -> Gather:
    """Gather without masks, by the job's rule and weights.

    Args:
        federation: Job and model.
        grid: The way to the sites.
        emit: Takes the sums of sites, in a run of statistics.
        clock: Tells time.
        introduced: What sites have signed of their data, and are held to; none in a
            simulation.
    """
    job, pool = federation.job, federation.pool
    said = {} if introduced is None else introduced  # Sites that come later enter it.
    return PlainGather(
        job,
        grid=grid,
        weight_of=weight_of(job.aggregation.weights, introduced=said),
        combine=noting(job, rule_of(job), emit, clock),
        schedule=schedule_of(job),
        fault_of=sums_fault(job, said),
        rule_of=ExactAdapters(pool.layout, pool.exact) if pool.exact else None,
    )


def num_workers(job: JobSpec) -> int:
    """Sites of a simulation that work at the same time."""
    if job.training.task == TRAINER:
        return 1  # Trainers of one process share accelerate's state.
    if job.simulation.workers:
        return job.simulation.workers
    cores = len(os.sched_getaffinity(0))
    return max(1, min(cores // job.training.threads, len(job.sites)))


@contextmanager
def torch_threads(job: JobSpec) -> Iterator[None]:
    """Use the job's number of threads, and restore the old one afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(job.training.threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
