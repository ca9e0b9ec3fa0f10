"""``crossfed plan``: what a run will send, take and cost, and what else one could do.

On the one model of bytes, seconds and dollars, ``federation.rounds.cost``. Bytes are
computed. Seconds come from stated speeds, or from an earlier run's measurements.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from clients.training.local_federation import Federation
from cloud_adapters.compute.pool import Market
from deploy.fleet.deployment_file import LOCAL, DeploymentFile, SiteMachine
from deploy.fleet.prices import Prices
from federation.errors import FederationError, JobError
from federation.events import SiteAnswered
from federation.ids import SiteId
from federation.job import job_file
from federation.job.spec import JobSpec
from federation.rounds import cost
from federation.rounds.cost import Cost, SiteSpeed, Speeds
from federation.rounds.traffic import Traffic, examples_trained
from monitoring import units
from monitoring.views.run_view import RunView

# Sizes the messages of a job; None if they cannot be predicted.
SizesOf = Callable[[Federation], Traffic | None]

# Of a line that nobody has stated: its time is in what an earlier run took besides.
_NO_LIMIT = 1e15

# What could be done instead, by the keys of the job that it changes.
_ALTERNATIVES: Mapping[str, Mapping[str, Any]] = {
    "updates in bf16": {"communication.codec.name": "bf16"},
    "both directions in 16 bits": {
        "communication.codec.name": "bf16",
        "communication.down_codec.name": "bf16",
    },
    "secure sums in 16 bits": {"privacy.secure_aggregation.ring_bits": 16},
    "twice the local steps, half the rounds": {},
    "no evaluation until the end": {"evaluation.every": 0},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A way to run a job.

    Attributes:
        name: In words.
        changes: Keys of the job with other values; empty for the job itself.
        traffic: What it sends.
        cost: Seconds and dollars; None without speeds.
    """

    name: str
    changes: Mapping[str, Any]
    traffic: Traffic
    cost: Cost | None

    @property
    def num_bytes(self) -> int:
        """Bytes in both directions, at most."""
        down, up = self.traffic.of_run()
        return down.high + up.high


def alternatives(
    federation: Federation, speeds: Speeds | None, sizes_of: SizesOf
) -> Sequence[Alternative]:
    """Predict a job as it is, and the ways of running it that it allows.

    Args:
        federation: The job, its model and its data.
        speeds: Of sites and lines, with prices; None if they are not known.
        sizes_of: Sizes the messages of a job, as ``check-job`` does.

    Returns:
        The job itself first.

    Raises:
        JobError: The job itself cannot be predicted.
    """
    as_it_is = _predict("as it is", {}, sizes_of(federation), speeds)
    found = [as_it_is]
    for name, changes in _ALTERNATIVES.items():
        given = changes or _half_the_rounds(federation.job)
        if not given:
            continue
        # Not every job allows each, and then it is no alternative.
        try:
            job = _changed(federation.job, given)
            traffic = sizes_of(replace(federation, job=job))
            one = _predict(name, given, traffic, speeds)
        except FederationError:
            continue
        if (one.num_bytes, one.cost) != (as_it_is.num_bytes, as_it_is.cost):
            found.append(one)
    return found


def measured_speeds(view: RunView, traffic: Traffic) -> Speeds:
    """Take the speeds of sites from an earlier run of the same job.

    A site's rate of training is that of the median round. All else that a round took,
    lines included, becomes ``combine_seconds``. With secure aggregation sites report no
    phases: then a site's whole answer counts as training.

    Raises:
        JobError: The run has no round after the first, or has other sites.
    """
    answers: dict[str, list[tuple[float, float]]] = {}
    others = []
    for each in view.rounds:
        if each.finished is None or each.index == 1:
            continue
        found = {r.site: _work(r) for r in each.reports if isinstance(r, SiteAnswered)}
        for site, work in found.items():
            answers.setdefault(site, []).append(work)
        slowest = max((sum(work) for work in found.values()), default=0.0)
        others.append(max(0.0, each.finished.seconds - slowest))
    names = [site.name for site in traffic.job.sites]
    if not set(names) <= answers.keys():
        raise JobError(
            "tells no speeds: it needs two rounds or more, with an answer of every "
            "site of the job",
            key="--like",
        )
    return Speeds(
        combine_seconds=median(others),
        sites=tuple(_speed_of(name, answers[name], traffic) for name in names),
    )


def _work(answer: SiteAnswered) -> tuple[float, float]:
    """Seconds of training and of evaluation."""
    phases = {phase.name: phase.seconds for phase in answer.phases}
    whole = answer.answered_seconds - answer.asked_seconds
    return phases.get("train", whole), phases.get("evaluate", 0.0)


def _speed_of(
    name: str, answers: Sequence[tuple[float, float]], traffic: Traffic
) -> SiteSpeed:
    facts = traffic.facts[SiteId(name)]
    train = median(seconds for seconds, _ in answers)
    evaluate = median(seconds for _, seconds in answers)
    examples = examples_trained(traffic.job.training, facts)
    return SiteSpeed(
        name=name,
        train_examples_per_second=max(examples, 1) / max(train, 1e-9),
        evaluate_examples_per_second=max(facts.held_out, 1) / max(evaluate, 1e-9),
        down_bytes_per_second=_NO_LIMIT,
        up_bytes_per_second=_NO_LIMIT,
    )


def _predict(
    name: str,
    changes: Mapping[str, Any],
    traffic: Traffic | None,
    speeds: Speeds | None,
) -> Alternative:
    if traffic is None:
        raise JobError("bytes are predicted neither for groups nor for apps of Flower")
    found = None if speeds is None else cost.of_run(traffic, speeds)
    return Alternative(name=name, changes=changes, traffic=traffic, cost=found)


def _half_the_rounds(job: JobSpec) -> Mapping[str, Any]:
    steps = job.training.local_steps
    if steps is None or job.rounds % 2:
        return {}
    return {"rounds": job.rounds // 2, "training.local_steps": 2 * steps}


def _changed(job: JobSpec, changes: Mapping[str, Any]) -> JobSpec:
    document = job_file.document(job)
    for name, value in changes.items():
        job_file.override(document, name, value)
    return job_file.parse(document)


def round_lines(traffic: Traffic, speeds: Speeds) -> Iterator[tuple[str, ...]]:
    """Yield a row for each site: its name, and seconds by phase of a later round."""
    index = min(2, traffic.job.rounds)
    for site in traffic.job.sites:
        name = SiteId(site.name)
        took = cost.site_seconds(traffic, name, index, cost.speed_of(speeds, name))
        yield site.name, *(f"{seconds:.2f}" for seconds in took.values())


def with_prices(
    speeds: Speeds, file: DeploymentFile, prices: Prices, *, spot: bool | None = None
) -> Speeds:
    """Add what machines and traffic cost, where the speeds do not say it.

    Args:
        speeds: Stated or measured.
        file: The deployment: its own prices come before those of the table.
        prices: The table.
        spot: Whether all machines of clouds are spot machines; None for what the
            deployment says.

    Raises:
        JobError: The table lacks a price.
    """
    stated = {site.name: site for site in file.sites}
    aggregator = file.aggregator
    return replace(
        speeds,
        dollars_per_hour=speeds.dollars_per_hour or aggregator.dollars_per_hour,
        dollars_per_gigabyte=speeds.dollars_per_gigabyte
        or aggregator.dollars_per_gigabyte,
        sites=tuple(
            _priced(speed, stated[speed.name], prices, spot=spot)
            if speed.name in stated
            else speed
            for speed in speeds.sites
        ),
    )


def _priced(
    speed: SiteSpeed, site: SiteMachine, prices: Prices, *, spot: bool | None
) -> SiteSpeed:
    hourly, traffic = site.dollars_per_hour, site.dollars_per_gigabyte
    if site.provider != LOCAL:
        machine = site.machine
        is_spot = machine.market == Market.SPOT.value if spot is None else spot
        if hourly is None or spot is not None:
            where = (site.provider, machine.region, machine.type)
            hourly = prices.hourly(*where, spot=is_spot)
        if traffic is None:
            traffic = prices.per_gigabyte(site.provider)
    return replace(
        speed,
        dollars_per_hour=speed.dollars_per_hour or hourly or 0.0,
        dollars_per_gigabyte=speed.dollars_per_gigabyte or traffic or 0.0,
    )


def markets(
    own: Alternative, speeds: Speeds, file: DeploymentFile, prices: Prices
) -> Iterator[Alternative]:
    """Yield the job itself with all machines of clouds on spot, and on demand.

    Args:
        own: The job itself.
        speeds: Without prices of the table.
        file: The deployment.
        prices: The table; a market that it has no price of is left out.
    """
    if all(site.provider == LOCAL for site in file.sites):
        return
    for name, spot in (("all machines on spot", True), ("all on demand", False)):
        try:
            priced = with_prices(speeds, file, prices, spot=spot)
        except JobError:
            continue
        found = cost.of_run(own.traffic, priced)
        if found != own.cost:
            yield replace(own, name=name, cost=found)


def lines(
    name: str, found: Sequence[Alternative], speeds: Speeds | None
) -> Iterator[str]:
    """Say what the job itself sends, takes and costs."""
    own = found[0]
    job = own.traffic.job
    yield f"deployment {name}: {job.name}, {job.rounds} rounds, {len(job.sites)} sites"
    down, up = own.traffic.of_run()
    spans = (units.format_span((span.low, span.high)) for span in (down, up))
    yield "the whole run sends {} bytes to the sites and {} back".format(*spans)
    if speeds is None or own.cost is None:
        yield "for time and cost, state speeds (--speeds) or name a run (--like)"
        return
    for site, *seconds in round_lines(own.traffic, speeds):
        send, evaluate, train, back = seconds
        yield (
            f"a round of {site}: {train} s training, {evaluate} s evaluating, "
            f"{send} s receiving, {back} s returning"
        )
    parts = ", ".join(
        f"{what} {price:,.4f}" for what, price in own.cost.dollars.items()
    )
    yield f"dollars: {parts}"


def table(
    found: Sequence[Alternative],
) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Alternatives side by side: names of columns, and rows."""
    has_cost = found[0].cost is not None
    names = ["", "bytes", *(["time", "dollars"] * has_cost), "keys of the job"]
    rows = []
    for one in found:
        cells = [one.name, units.format_bytes(one.num_bytes)]
        if one.cost is not None:
            dollars = sum(one.cost.dollars.values())
            cells += [units.format_duration(one.cost.seconds), f"{dollars:,.4f}"]
        keys = " ".join(f"{key}={value}" for key, value in one.changes.items())
        rows.append([*cells, keys])
    return names, rows


def document(one: Alternative) -> dict[str, Any]:
    """An alternative as data."""
    spans = one.traffic.of_run()
    found: dict[str, Any] = {"name": one.name, "changes": dict(one.changes)}
    for key, span in zip(("bytes_down", "bytes_up"), spans, strict=True):
        found[key] = [span.low, span.high]
    if one.cost is not None:
        found |= {"seconds": one.cost.seconds, "dollars": dict(one.cost.dollars)}
    return found
