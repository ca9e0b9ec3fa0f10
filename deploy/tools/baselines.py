"""Baselines of a job: pooled data once, each site alone and the federation.

All are simulated, with the work that the federation does: pooled data are trained for
as many steps as all sites together, a site alone for as many as in the federation. So
each record is seen as often in every row. Models are then evaluated at every site,
which for the sites' own models is the cross-site matrix.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from operator import add
from pathlib import Path
from tempfile import TemporaryDirectory

from clients.data.pooled import PooledDataset
from clients.privacy.source_check import check_simulated
from clients.training.local_federation import SiteData
from deploy.tools.site_model import write_site_model
from deploy.wiring import parts as wiring
from deploy.wiring.simulation import simulate
from federation.errors import JobError
from federation.ids import SiteId
from federation.job import job_file
from federation.job.evaluation_job import drop_keys, evaluates_only, make_evaluation
from federation.job.spec import JobSpec
from federation.messages import MetricSums
from federation.protocols import Clock
from monitoring.runs.run_folder import RunFolder
from monitoring.views.baselines import ALL, Baseline, Baselines, Training

FEDERATION, POOLED, ALONE = "federation", "pooled data", "only "

# What only a federation has.
_OF_FEDERATIONS = (
    "aggregation",
    "communication",
    "model.personal",
    "relays",
    "schedule",
    "simulation.faults",
    "simulation.live_metrics",
    "simulation.machines",
    "simulation.relays",
    "simulation.total_epsilon",
    "storage",
    "privacy.secure_aggregation",
    "training.control_variates",
    "training.dynamic_alpha",
    "training.normalized_steps",
    "training.overlap_mix",
    "training.overlap_steps",
    "training.proximal_mu",
)
# Of noise that several sites share.
_OF_SHARED_NOISE = ("unit", "target_epsilon", "delta", "clip_norm", "held_out")


def baselines(
    job: JobSpec, *, seeds: Sequence[int], clock: Clock, say: Callable[[str], None]
) -> Baselines:
    """Train and evaluate all baselines of a job.

    Args:
        job: A job that can be simulated.
        seeds: One run of everything for each.
        clock: The process's.
        say: Takes a line about each model that is trained.

    Raises:
        JobError: The job cannot be simulated.
        FederationError: Anything that ends one of the runs.
    """
    _check(job)
    sites = [site.name for site in job.sites]
    share = job.sites_per_round / len(sites)
    ways: Mapping[str, tuple[JobSpec, Sequence[str]]] = {
        FEDERATION: (job, sites),
        POOLED: (_alone(job, "pooled", job.sites_per_round), sites),
        **{f"{ALONE}{name}": (_alone(job, name, share), [name]) for name in sites},
    }
    found: dict[str, list[Training]] = {}
    for seed in seeds:
        seeded = replace(job, seed=seed)
        data = wiring.deal_data(seeded)
        check_simulated(seeded, data)
        for name, (way, names) in ways.items():
            say(f"seed {seed}: {name}")
            own = {SiteId(each): data[SiteId(each)] for each in names}
            if name == POOLED:
                own = {SiteId("pooled"): _pooled([*own.values()])}
            trained = _trained(replace(way, seed=seed), own, job, data, clock)
            for part, training in trained.items():
                found.setdefault(f"{name}{part}", []).append(training)
    return Baselines(
        job=job.name,
        seeds=seeds,
        work=_work(job),
        notes=_notes(job),
        rows=[
            Baseline(
                name=name,
                steps=_steps(ways[name][0] if name in ways else job),
                trainings=trainings,
            )
            for name, trainings in found.items()
        ],
        sites=sites,
    )


def _check(job: JobSpec) -> None:
    """Refuse jobs that train nothing, or whose data are not here.

    Raises:
        JobError: It is such a job.
    """
    if evaluates_only(job):
        raise JobError("is 0: baselines are trained", key="rounds")
    if lacking := wiring.without_data(job):
        raise JobError(
            f"site {lacking[0]!r} has no data here: baselines pool all data, so they "
            "are for simulations. At deployed sites, each can train alone with "
            "crossfed simulate on its machine, and crossfed run --evaluate compares "
            "models that their operators give away",
            key="data",
        )
    wiring.check_sites_are_here(job)


def _alone(job: JobSpec, name: str, times: float) -> JobSpec:
    """The job of one site, which trains ``times`` as many steps as one in a round."""
    document = job_file.document(job)
    drop_keys(document, _OF_FEDERATIONS)
    training, private = document["training"], document["privacy"]
    if job.training.local_steps is not None:
        training["local_steps"] = max(1, round(job.training.local_steps * times))
    optimizer = training["optimizer"]
    if optimizer["name"] != "sgd" or optimizer["momentum"]:
        optimizer["state"] = "keep"  # Training alone is not interrupted by rounds.
    unit = job.privacy.differential_privacy.unit
    if unit in {"joint", "site"}:
        table = private.pop("differential_privacy")
        if unit == "joint":
            kept = {key: table[key] for key in _OF_SHARED_NOISE if key in table}
            private["differential_privacy"] = {**kept, "unit": "record"}
    if "differential_privacy" in private:
        document["aggregation"] = {"weights": "uniform"}
    document["sites"] = [{"name": name}]
    return job_file.parse(document)


def _pooled(data: Sequence[SiteData]) -> SiteData:
    train, held_out = zip(*data, strict=True)
    return PooledDataset.of(train), PooledDataset.of(held_out)


def _trained(
    way: JobSpec,
    own: Mapping[SiteId, SiteData],
    job: JobSpec,
    data: Mapping[SiteId, SiteData],
    clock: Clock,
) -> Mapping[str, Training]:
    """Train one model, and evaluate it at every site.

    With personal parts each site has another model. All of them are evaluated at every
    site, and the federation's result at a site is that of the site's own.

    Returns:
        By what is added to the name of the row.
    """
    with TemporaryDirectory(prefix="crossfed-baseline-") as folder:
        run = RunFolder(Path(folder) / "run")
        done = simulate(way, folder=run.path, clock=clock, report=False, data=own)
        found: dict[str, Mapping[str, MetricSums]] = {}
        if way.model.personal:
            for name in own:
                file = Path(folder) / f"{name}.safetensors"
                write_site_model(run, name, file)
                found[f" at {name}"] = _evaluated(job, file, data, clock)
            results = {str(name): found[f" at {name}"][name] for name in own}
            found = {"": {ALL: reduce(add, results.values()), **results}, **found}
        else:
            found[""] = _evaluated(job, run.path, data, clock)
    is_alone = len(own) == 1
    return {
        part: Training(
            results=results,
            epsilon=done.epsilon,
            num_bytes=None if is_alone else done.bytes_up + done.bytes_down,
            seconds=done.view.seconds or 0.0,
        )
        for part, results in found.items()
    }


def _evaluated(
    job: JobSpec, model: Path, data: Mapping[SiteId, SiteData], clock: Clock
) -> Mapping[str, MetricSums]:
    """Evaluate a model at every site, exactly: all data are here."""
    document = job_file.document(job)
    make_evaluation(document, str(model))
    drop_keys(document, ("privacy", *_OF_FEDERATIONS))
    done = simulate(job_file.parse(document), clock=clock, report=False, data=data)
    event = done.view.last_evaluated
    if event is None:
        raise RuntimeError("an evaluation that completed has no result")
    return {ALL: event.pooled, **dict(zip(event.sites, event.by_site, strict=True))}


def _steps(job: JobSpec) -> int | None:
    steps = job.training.local_steps
    return None if steps is None else steps * job.rounds


def _work(job: JobSpec) -> str:
    steps = _steps(job)
    if steps is None:
        return (
            f"equal work: {job.rounds * job.training.num_epochs} passes over the data "
            "in every row"
        )
    size, count = job.training.batch_size * job.training.accumulate, job.sites_per_round
    return (
        f"equal work: {steps:,} steps of {size} records at each of {count} sites, "
        f"{steps * count:,} on pooled data"
    )


def _notes(job: JobSpec) -> list[str]:
    """What a reader must know of how the rows differ."""
    notes = ["all models are evaluated on the same held-out data, without noise"]
    if job.model.personal:
        notes.append(
            "each site has its own parts of the federation's model: its row has each "
            "site's own model at that site, and `federation at SITE` one at all sites"
        )
    unit = job.privacy.differential_privacy.unit
    if unit == "site":
        notes.append(
            "noise for whole sites has no meaning at one site: only the federation is "
            "private"
        )
    if unit == "joint":
        notes.append('pooled data and sites alone are protected by unit = "record"')
    return notes
