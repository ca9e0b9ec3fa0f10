"""What clouds charge: a dated table with its sources, and what follows from it."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path

from federation.errors import JobError
from federation.job import job_file
from federation.job.job_keys import key

PACKAGED = Path(__file__).with_name("prices.toml")
OLD_DAYS = 90
# What no machine and no gigabyte costs: a slip of the decimal point must not pass.
_MOST_DOLLARS_PER_HOUR, _MOST_DOLLARS_PER_GIGABYTE = 400.0, 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class MachinePrice:
    """Price of an hour of one machine.

    Attributes:
        provider: The cloud.
        region: Its region.
        machine: Type of machine.
        gpus: Number of its GPUs.
        gpu: Their model.
        on_demand: Dollars per hour.
        spot: Dollars per hour of a spot machine when the table was made; none if not
            known.
        source: Where the price is from.
    """

    provider: str
    region: str
    machine: str
    gpus: int = key(default=0, low=0)
    gpu: str = ""
    on_demand: float = key(above=0.0, high=_MOST_DOLLARS_PER_HOUR)
    spot: float | None = key(default=None, above=0.0, high=_MOST_DOLLARS_PER_HOUR)
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EgressTier:
    """A part of a month's traffic.

    Attributes:
        up_to: Where it ends, in GB of the month; none for the last tier.
        dollars: Dollars per GB.
    """

    up_to: float | None = key(default=None, above=0.0)
    dollars: float = key(low=0.0, high=_MOST_DOLLARS_PER_GIGABYTE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Egress:
    """Price of traffic that leaves a cloud for the internet.

    Attributes:
        provider: The cloud.
        tiers: The parts of a month's traffic, in their order.
        source: Where the prices are from.
    """

    provider: str
    tiers: tuple[EgressTier, ...]
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """A price table.

    Attributes:
        as_of: Day of the newest price.
        currency: Always `USD`.
        machines: Machines.
        egress: Traffic, one `[[egress]]` table for each cloud.
    """

    as_of: str
    currency: str = key(default="USD", choices=("USD",))
    machines: tuple[MachinePrice, ...]
    egress: tuple[Egress, ...]

    def hourly(self, provider: str, region: str, machine: str, *, spot: bool) -> float:
        """Dollars of an hour of a machine.

        Raises:
            JobError: The table has no such price; the message says what it has.
        """
        same = [
            each
            for each in self.machines
            if (each.provider, each.machine) == (provider, machine)
        ]
        here = [each for each in same if each.region == region]
        price = here[0].spot if spot and here else here[0].on_demand if here else None
        if price is None:
            places = ", ".join(each.region for each in same) or "no region"
            kind = "a spot" if spot else "an on-demand"
            raise JobError(
                f"the price table has no price of {kind} {machine} of {provider} in "
                f"{region!r} (it has {places}): add it to a table of yours and name "
                "that with --prices",
                key="machines",
            )
        return price

    def per_gigabyte(self, provider: str) -> float:
        """Dollars per GB that leaves a cloud, in the first tier that is not free.

        A month's free gigabytes may be used up by others, and few runs get beyond this
        tier; so it is what most runs cost at the most.

        Raises:
            JobError: The table does not know the cloud.
        """
        tiers = [each.tiers for each in self.egress if each.provider == provider]
        if not tiers:
            raise JobError(
                f"the price table has no traffic of {provider!r}", key="egress"
            )
        return next((tier.dollars for tier in tiers[0] if tier.dollars > 0), 0.0)


def load(path: Path | None, *, today: date, warn: Callable[[str], None]) -> Prices:
    """Read a price table.

    Args:
        path: The file; None for that of this release.
        today: To tell how old it is.
        warn: Called with a word about prices that are old.

    Raises:
        JobError: It cannot be read, or a key is unknown, missing or out of bounds.
    """
    path = path or PACKAGED
    prices = job_file.load_table(path, Prices, _check)
    age = (today - date.fromisoformat(prices.as_of)).days
    if age > OLD_DAYS:
        warn(
            f"the prices in {path} are {age} days old: compare them, and name your own "
            "table with --prices"
        )
    return prices


def day_of(seconds: float) -> date:
    """Return the day of a time in seconds since 1970, in UTC."""
    return datetime.fromtimestamp(seconds, UTC).date()


def _check(prices: Prices) -> None:
    try:
        date.fromisoformat(prices.as_of)
    except ValueError:
        raise JobError(
            f"{prices.as_of!r} is not a day, for example 2026-06-17", key="as_of"
        ) from None
    for index, machine in enumerate(prices.machines):
        if machine.spot is not None and machine.spot > machine.on_demand:
            raise JobError(
                f"{machine.spot} is more than on demand ({machine.on_demand})",
                key=f"machines[{index}].spot",
            )
    for index, cloud in enumerate(prices.egress):
        ends = [math.inf if t.up_to is None else t.up_to for t in cloud.tiers]
        is_last_open = ends[-1:] == [math.inf]
        if not is_last_open or ends != sorted(set(ends)):
            raise JobError(
                "must rise, and the last tier must have no up_to",
                key=f"egress[{index}].tiers",
            )
