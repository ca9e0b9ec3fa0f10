"""Seconds and dollars of a run's rounds, from its bytes and from stated speeds.

Pure functions. A speeds file states what a user knows or has measured of sites and
lines, and what they pay; no price and no speed is assumed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from federation.errors import JobError
from federation.ids import SiteId
from federation.job.job_keys import key
from federation.job.spec import MachineSpec, TrainingSpec
from federation.rounds.traffic import SiteFacts, Span, Traffic, examples_trained

_GIGA = 1e9
_HOUR = 3600
_BYTES_PER_MBIT = 125_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteSpeed:
    """One site: its speed, its connection and its prices.

    Attributes:
        name: Name of the site.
        train_examples_per_second: Examples per second in training.
        evaluate_examples_per_second: Examples per second in evaluation.
        down_bytes_per_second: Bandwidth to the site.
        up_bytes_per_second: Bandwidth from the site.
        latency_seconds: One-way delay of a message.
        dollars_per_hour: Price of its machines during rounds.
        dollars_per_gigabyte: Price of traffic that leaves the site.
    """

    name: str
    train_examples_per_second: float = key(above=0.0)
    evaluate_examples_per_second: float = key(above=0.0)
    down_bytes_per_second: float = key(above=0.0)
    up_bytes_per_second: float = key(above=0.0)
    latency_seconds: float = key(default=0.0, low=0.0)
    dollars_per_hour: float = key(default=0.0, low=0.0)
    dollars_per_gigabyte: float = key(default=0.0, low=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """A speeds file.

    Attributes:
        combine_seconds: Time that the aggregator needs after the last answer of a
            round.
        dollars_per_hour: Price of the aggregator during rounds.
        dollars_per_gigabyte: Price of traffic that leaves the aggregator.
        sites: One `[[sites]]` table for each site.
    """

    combine_seconds: float = key(default=0.0, low=0.0)
    dollars_per_hour: float = key(default=0.0, low=0.0)
    dollars_per_gigabyte: float = key(default=0.0, low=0.0)
    sites: tuple[SiteSpeed, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Time and money of a round or a run.

    Attributes:
        seconds: From its beginning to its end.
        dollars: By ``machines``, ``aggregator``, ``traffic up`` and ``traffic down``.
    """

    seconds: float
    dollars: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class WorkSeconds:
    """Seconds of a round's training, and of one evaluation."""

    train: float
    evaluate: float


def machine_speeds(machines: Sequence[MachineSpec]) -> Speeds:
    """State the speeds of simulated machines as a speeds file would."""
    return Speeds(
        sites=tuple(
            SiteSpeed(
                name=machine.site,
                train_examples_per_second=machine.examples_per_second,
                evaluate_examples_per_second=machine.examples_per_second,
                down_bytes_per_second=machine.down_mbit * _BYTES_PER_MBIT,
                up_bytes_per_second=machine.up_mbit * _BYTES_PER_MBIT,
                latency_seconds=machine.latency_seconds,
            )
            for machine in machines
        )
    )


def speed_of(speeds: Speeds, site: SiteId) -> SiteSpeed:
    """Find the stated speed of a site.

    Raises:
        JobError: Nothing is.
    """
    for speed in speeds.sites:
        if speed.name == site:
            return speed
    raise JobError(f"has no table for site {site!r}: state its speeds", key="sites")


def work_seconds(
    training: TrainingSpec, facts: SiteFacts, speed: SiteSpeed
) -> WorkSeconds:
    """Seconds of a site's work: as predicted, and as virtual time passes."""
    return WorkSeconds(
        train=examples_trained(training, facts) / speed.train_examples_per_second,
        evaluate=facts.held_out / speed.evaluate_examples_per_second,
    )


def site_seconds(
    traffic: Traffic, site: SiteId, round_index: int, speed: SiteSpeed
) -> Mapping[str, float]:
    """Seconds of a site in a round: ``send``, ``evaluate``, ``train``, ``return``."""
    legs, facts = traffic.legs(site, round_index), traffic.facts[site]
    latency = len(legs) * speed.latency_seconds
    down = sum((leg.down for leg in legs), Span()).high
    up = sum((leg.up for leg in legs), Span()).high
    trains = round_index <= traffic.job.rounds
    work = work_seconds(traffic.job.training, facts, speed)
    return {
        "send": latency + down / speed.down_bytes_per_second,
        "evaluate": traffic.evaluations(round_index) * work.evaluate,
        "train": trains * work.train,
        "return": latency + up / speed.up_bytes_per_second,
    }


def of_round(traffic: Traffic, round_index: int, speeds: Speeds) -> Cost:
    """Cost of a round that asks every site, and waits for the slowest."""
    slowest = machines = up = down = 0.0
    for name in (SiteId(site.name) for site in traffic.job.sites):
        speed = speed_of(speeds, name)
        took = site_seconds(traffic, name, round_index, speed)
        slowest = max(slowest, sum(took.values()))
        machines += speed.dollars_per_hour / _HOUR
        for leg in traffic.legs(name, round_index):
            up += leg.up.high / _GIGA * speed.dollars_per_gigabyte
            down += leg.down.high / _GIGA * speeds.dollars_per_gigabyte
    seconds = slowest + speeds.combine_seconds
    return Cost(
        seconds=seconds,
        dollars={
            "machines": seconds * machines,
            "aggregator": seconds * speeds.dollars_per_hour / _HOUR,
            "traffic up": up,
            "traffic down": down,
        },
    )


def of_run(traffic: Traffic, speeds: Speeds) -> Cost:
    """Cost of all rounds, one after another, and of the final evaluation."""
    seconds, dollars = 0.0, dict[str, float]()
    for round_index, times in traffic.kinds_of_round().items():
        one = of_round(traffic, round_index, speeds)
        seconds += times * one.seconds
        for resource, price in one.dollars.items():
            dollars[resource] = dollars.get(resource, 0.0) + times * price
    return Cost(seconds=seconds, dollars=dollars)
