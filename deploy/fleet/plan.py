"""``crossfed plan``: what a run will send, take and cost, and what else one could do.

On the one model of bytes, seconds and dollars, ``federation.rounds.cost``. Bytes are
computed. Seconds come from stated speeds, or from an earlier run's measurements.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from clients.training.local_federation import Federation
from federation.errors import FederationError, JobError
from federation.ids import SiteId
from federation.job import job_file
from federation.job.spec import JobSpec
from federation.rounds import cost
from federation.rounds.cost import Cost, Speeds
from federation.rounds.local_work import is_by_capacity
from federation.rounds.traffic import Traffic
from monitoring import units

# Sizes the messages of a job; None if they cannot be predicted.
SizesOf = Callable[[Federation], Traffic | None]

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

_LATER = 5  # A round by capacity that takes as many steps as most.


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
        speeds: Speeds of sites and lines, with prices; None if they are not known.
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
            job = changed(federation.job, given)
            traffic = sizes_of(replace(federation, job=job))
            one = _predict(name, given, traffic, speeds)
        except FederationError:
            continue
        if (one.num_bytes, one.cost) != (as_it_is.num_bytes, as_it_is.cost):
            found.append(one)
    return found


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
    changes: dict[str, Any] = {
        "rounds": job.rounds // 2,
        "training.local_steps": 2 * steps,
    }
    larger = job.training.accumulate_from
    if any(not first_round % 2 for first_round, _ in larger):
        return {}  # Steps would grow within a round.
    if larger:
        halved = [[(first_round + 1) // 2, value] for first_round, value in larger]
        changes["training.accumulate_from"] = halved
    return changes


def changed(job: JobSpec, changes: Mapping[str, Any]) -> JobSpec:
    """Change keys of a job.

    Raises:
        JobError: The job does not allow it.
    """
    document = job_file.document(job)
    for name, value in changes.items():
        job_file.override(document, name, value)
    return job_file.parse(document)


def round_lines(traffic: Traffic, speeds: Speeds) -> Iterator[tuple[str, ...]]:
    """Yield a row for each site: its name, and seconds by phase of a later round."""
    index = min(_LATER if is_by_capacity(traffic.job) else 2, traffic.job.rounds)
    stated, shares = cost.by_site(speeds), cost.work_shares(traffic, index, speeds)
    for site in traffic.job.sites:
        name = SiteId(site.name)
        took = cost.site_seconds(traffic, name, index, cost.speed_of(stated, name))
        took = {**took, "train": shares[name] * took["train"]}
        yield site.name, *(f"{seconds:.2f}" for seconds in took.values())


def lines(
    name: str, found: Sequence[Alternative], speeds: Speeds | None
) -> Iterator[str]:
    """Say what the job itself sends, takes and costs."""
    own = found[0]
    job = own.traffic.job
    rounds = units.format_count(job.rounds, "round")
    sites = units.format_count(len(job.sites), "site")
    yield f"deployment {name}: {job.name}, {rounds}, {sites}"
    down, up = own.traffic.of_run()
    spans = (units.format_span((span.low, span.high)) for span in (down, up))
    yield "the whole run sends {} bytes to the sites and {} back".format(*spans)
    if speeds is None or own.cost is None:
        yield (
            "for time and cost: --like takes speeds from a run, --speeds from a file"
        )
        return
    for site, *seconds in round_lines(own.traffic, speeds):
        send, evaluate, train, back = seconds
        yield (
            f"a round of {site}: {train} s training, {evaluate} s evaluating, "
            f"{send} s receiving, {back} s returning"
        )
    parts = ", ".join(
        f"{what} {in_dollars(price)}" for what, price in own.cost.dollars.items()
    )
    yield f"dollars: {parts}"
    if speeds.start_seconds:
        minutes = speeds.start_seconds / 60.0
        yield (
            f"machines are also paid for {minutes:g} minutes in which they start: "
            "start.machine_minutes"
        )


def beyond_budget(limit: float | None, own: Alternative) -> Iterator[str]:
    """Say what ``max_dollars`` does not count, so that nobody takes it for the bill."""
    if limit is None:
        return
    sent = ""
    if own.cost is not None:
        known = own.cost.dollars
        traffic = in_dollars(known["traffic up"] + known["traffic down"])
        sent = f" ({traffic} dollars of traffic in this run)"
    yield (
        f"max_dollars = {limit:g} counts machines and their disks only: traffic, NAT "
        f"gateways and storage cost more than that{sent}"
    )


def in_dollars(price: float) -> str:
    """A number of dollars, or a word for one that nobody knows."""
    return "unknown" if math.isnan(price) else f"{price:,.4f}"


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
            took = units.format_duration(one.cost.seconds)
            cells += [took, in_dollars(one.cost.total)]
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
        found |= {
            "seconds": one.cost.seconds,
            "phases": dict(one.cost.phases),
            "dollars": {
                what: None if math.isnan(price) else price
                for what, price in one.cost.dollars.items()
            },
        }
    return found
