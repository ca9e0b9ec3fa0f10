"""What clouds charge: a dated table with its sources, and what follows from it."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

from federation.errors import JobError
from federation.job import job_file
from federation.job.job_keys import key

PACKAGED = Path(__file__).with_name("prices.toml")
OLD_DAYS = 90
HOURS_PER_MONTH = 730.0
# What no machine and no gigabyte costs: a slip of the decimal point must not pass.
_MOST_DOLLARS_PER_HOUR, _MOST_DOLLARS_PER_GIGABYTE = 400.0, 0.5
# A cloud, and its region; both empty outside of clouds.
Place = tuple[str, str]
_MOST_PER_THOUSAND, _MOST_DOLLARS_PER_KEY, _MOST_PER_NAT_HOUR = 1.0, 10.0, 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MachinePrice:
    """Price of an hour of one machine.

    Attributes:
        provider: The cloud.
        region: As its cloud names it, such as `us-east-1`.
        machine: Type of machine.
        gpus: Number of its GPUs.
        gpu: Their model.
        on_demand: Dollars per hour.
        spot: Dollars per hour of a spot machine when the table was made; none if not
            known.
        source: Where the price is from.
        as_of: Its day; by default, the table's.
    """

    provider: str
    region: str
    machine: str
    gpus: int = key(default=0, low=0)
    gpu: str = ""
    on_demand: float = key(above=0.0, high=_MOST_DOLLARS_PER_HOUR)
    spot: float | None = key(default=None, above=0.0, high=_MOST_DOLLARS_PER_HOUR)
    source: str = ""
    as_of: str = ""


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
        as_of: Their day; by default, the table's.
    """

    provider: str
    tiers: tuple[EgressTier, ...]
    source: str = ""
    as_of: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Price of traffic that stays in a cloud; each GB once, at its source.

    Attributes:
        provider: The cloud.
        between_zones: Dollars per GB between zones of a region, both sides together.
        between_regions: Dollars per GB between regions of a continent.
        through_nat: Dollars per GB that machines without a public address exchange
            with the internet, in either direction, besides the traffic's own price;
            none if not known.
        nat_per_hour: Dollars of an hour of a region's NAT gateway and its public
            address; none if not known.
        source: Where the prices are from.
        as_of: Their day; by default, the table's.
    """

    provider: str
    between_zones: float = key(low=0.0, high=_MOST_DOLLARS_PER_GIGABYTE)
    between_regions: float = key(low=0.0, high=_MOST_DOLLARS_PER_GIGABYTE)
    through_nat: float | None = key(
        default=None, low=0.0, high=_MOST_DOLLARS_PER_GIGABYTE
    )
    nat_per_hour: float | None = key(default=None, low=0.0, high=_MOST_PER_NAT_HOUR)
    source: str = ""
    as_of: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """Price of a cloud's object storage in its standard class, and of disks.

    Attributes:
        provider: The cloud.
        per_gigabyte_month: Dollars of a GB that is kept for a month.
        per_thousand_writes: Dollars of 1,000 requests that write or list.
        per_thousand_reads: Dollars of 1,000 requests that read.
        disk_per_gigabyte_month: Dollars of a GB of a machine's disk for a month; none
            if not known.
        source: Where the prices are from.
        as_of: Their day; by default, the table's.
    """

    provider: str
    per_gigabyte_month: float = key(low=0.0, high=_MOST_DOLLARS_PER_GIGABYTE)
    per_thousand_writes: float = key(default=0.0, low=0.0, high=_MOST_PER_THOUSAND)
    per_thousand_reads: float = key(default=0.0, low=0.0, high=_MOST_PER_THOUSAND)
    disk_per_gigabyte_month: float | None = key(
        default=None, low=0.0, high=_MOST_DOLLARS_PER_GIGABYTE
    )
    source: str = ""
    as_of: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """Price of a cloud's key service.

    Attributes:
        provider: The cloud.
        per_month: Dollars of a key's version that exists for a month.
        per_thousand_requests: Dollars of 1,000 requests.
        source: Where the prices are from.
        as_of: Their day; by default, the table's.
    """

    provider: str
    per_month: float = key(low=0.0, high=_MOST_DOLLARS_PER_KEY)
    per_thousand_requests: float = key(default=0.0, low=0.0, high=_MOST_PER_THOUSAND)
    source: str = ""
    as_of: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """A price table.

    Attributes:
        as_of: Day of the newest price.
        currency: Always `USD`.
        machines: One `[[machines]]` table for each type and region.
        egress: Traffic, one `[[egress]]` table for each cloud.
        transfer: Traffic inside clouds, one `[[transfer]]` table for each cloud.
        storage: Object storage, one `[[storage]]` table for each cloud.
        keys: Key services, one `[[keys]]` table for each cloud.
    """

    as_of: str
    currency: str = key(default="USD", choices=("USD",))
    machines: tuple[MachinePrice, ...]
    egress: tuple[Egress, ...]
    transfer: tuple[Transfer, ...] = ()
    storage: tuple[Storage, ...] = ()
    keys: tuple[Keys, ...] = ()

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
        price = self.machine_price(provider, region, machine, spot=spot)
        if price is None:
            places = ", ".join(each.region for each in same) or "no region"
            kind = "a spot" if spot else "an on-demand"
            raise JobError(
                f"the price table has no price of {kind} {machine} of {provider} in "
                f"{region!r} (it has {places}): add it to your own table and name "
                "that with --prices",
                key="machines",
            )
        return price

    def machine_price(
        self, provider: str, region: str, machine: str, *, spot: bool
    ) -> float | None:
        """Dollars of an hour of a machine; None if the table does not know them."""
        for each in self.machines:
            known = (each.provider, each.region, each.machine)
            if known == (provider, region, machine):
                return each.spot if spot else each.on_demand
        return None

    def per_gigabyte(
        self,
        provider: str,
        gigabytes: float = 0.0,
        *,
        before: float | None = None,
    ) -> float:
        """Dollars per GB that leaves a cloud for the internet, over a month's tiers.

        Args:
            provider: The cloud.
            gigabytes: How much leaves.
            before: GB that have left it in the month before. None if unknown:
                the free part is then used up, and the tiers begin behind it.

        Raises:
            JobError: The table does not know the cloud.
        """
        tiers = [each.tiers for each in self.egress if each.provider == provider]
        if not tiers:
            raise JobError(
                f"the price table has no traffic of {provider!r}", key="egress"
            )
        begin = before
        if begin is None:
            free = [tier.up_to or 0.0 for tier in tiers[0] if tier.dollars == 0]
            begin = max(free, default=0.0)
        end, low, dollars = begin + gigabytes, 0.0, 0.0
        first = next(tier for tier in tiers[0] if begin < (tier.up_to or math.inf))
        if end <= (first.up_to or math.inf):
            return first.dollars
        for tier in tiers[0]:
            high = tier.up_to or math.inf
            dollars += tier.dollars * max(0.0, min(end, high) - max(begin, low))
            low = high
        return dollars / gigabytes

    def between(
        self, one: Place, other: Place, gigabytes: float, *, before: float | None
    ) -> float:
        """Dollars per GB that goes from one place to another.

        Args:
            one: Where it leaves; traffic that leaves no cloud costs nothing here.
            other: Where it goes.
            gigabytes: How much; see ``per_gigabyte``.
            before: See ``per_gigabyte``.

        Raises:
            JobError: The table does not know the cloud.
        """
        provider, region = one
        if not provider:
            return 0.0
        inside = [each for each in self.transfer if each.provider == provider]
        if other[0] != provider or not inside:
            return self.per_gigabyte(provider, gigabytes, before=before)
        is_same = region == other[1]
        return inside[0].between_zones if is_same else inside[0].between_regions

    def through_nat(self, one: Place, other: Place) -> float:
        """Dollars per GB, in either direction, that NAT adds between two places.

        Args:
            one: Where a machine without a public address is.
            other: Where it connects to; inside its cloud by its private address.

        Raises:
            JobError: The table does not know the price.
        """
        if not one[0] or one[0] == other[0]:
            return 0.0
        return _known(self, "transfer", "through_nat", one[0])

    def nat_hour(self, provider: str) -> float:
        """Dollars of an hour of a region's NAT gateway.

        Raises:
            JobError: The table does not know the price.
        """
        return _known(self, "transfer", "nat_per_hour", provider)

    def disk_hour(self, provider: str, gigabytes: float) -> float:
        """Dollars of an hour of a machine's disk.

        Raises:
            JobError: The table does not know the price.
        """
        month = _known(self, "storage", "disk_per_gigabyte_month", provider)
        return gigabytes * month / HOURS_PER_MONTH

    def gpus(self, provider: str, machine: str) -> int:
        """GPUs of a type of machine; 0 if the table does not know it."""
        found = (
            each.gpus
            for each in self.machines
            if (each.provider, each.machine) == (provider, machine)
        )
        return next(found, 0)

    def days(self, clouds: Collection[str] | None) -> tuple[date, date]:
        """Days of the oldest and of the newest price of clouds; None for all.

        Of machines and traffic, and of the table if it has neither of them.
        """
        rows: list[MachinePrice | Egress] = [*self.machines, *self.egress]
        days = [
            date.fromisoformat(row.as_of or self.as_of)
            for row in rows
            if clouds is None or row.provider in clouds
        ] or [date.fromisoformat(self.as_of)]
        return min(days), max(days)

    def storage_month(self, provider: str) -> float | None:
        """Dollars of a GB that a cloud keeps for a month; None if not known."""
        return _price(self, "storage", "per_gigabyte_month", provider)

    def requests(self, provider: str, *, writes: int, reads: int) -> float:
        """Dollars of requests to a cloud's object storage; NaN if not known."""
        names = ("per_thousand_writes", "per_thousand_reads")
        per_write, per_read = (_price(self, "storage", x, provider) for x in names)
        if per_write is None or per_read is None:
            return math.nan
        return (writes * per_write + reads * per_read) / 1000

    def key_month(self, provider: str) -> float | None:
        """Dollars of a key that a cloud keeps for a month; None if not known."""
        return _price(self, "keys", "per_month", provider)


def load(
    path: Path | None,
    *,
    today: date,
    warn: Callable[[str], None],
    clouds: Collection[str] | None = None,
) -> Prices:
    """Read a price table.

    Args:
        path: The file; None for that of this release.
        today: To tell how old it is.
        warn: Called with a word about prices that are old, or of a day to come.
        clouds: Those whose age matters; None for all.

    Raises:
        JobError: It cannot be read, or a key is unknown, missing or out of bounds.
    """
    path = path or PACKAGED
    prices = job_file.load_table(path, Prices, _check)
    if text := _doubt(prices, path, today, clouds):
        warn(text)
    return prices


def _doubt(
    prices: Prices, path: Path, today: date, clouds: Collection[str] | None
) -> str:
    """Why prices may not be those of today; empty if they may be."""
    oldest, newest = prices.days(clouds)
    # Tomorrow has begun east of Greenwich.
    if newest - today > timedelta(days=1):
        return (
            f"the prices in {path} are of {newest}, and it is {today}: correct as_of "
            "there, or the clock of this host, since their age is unknown"
        )
    age = (today - oldest).days
    if age <= OLD_DAYS:
        return ""
    return (
        f"the prices in {path} are {age} days old: compare them, and name your own "
        "table with --prices"
    )


def _price(prices: Prices, table: str, name: str, provider: str) -> float | None:
    """A price of a cloud in one of the tables; None if it is not known."""
    rows = (row for row in getattr(prices, table) if row.provider == provider)
    return getattr(next(rows, None), name, None)


def _known(prices: Prices, table: str, name: str, provider: str) -> float:
    price = _price(prices, table, name, provider)
    if price is None:
        raise JobError(
            f"the price table has no {name} of {provider!r}: add it to its row of "
            f"{table} in your own table and name that with --prices",
            key=table,
        )
    return price


def day_of(seconds: float) -> date:
    """Return the day of a time in seconds since 1970, in UTC."""
    return datetime.fromtimestamp(seconds, UTC).date()


def _check(prices: Prices) -> None:
    rows: Mapping[str, Sequence[MachinePrice | Egress]] = {
        "machines": prices.machines,
        "egress": prices.egress,
    }
    days = {"as_of": prices.as_of} | {
        f"{table}[{index}].as_of": row.as_of
        for table, found in rows.items()
        for index, row in enumerate(found)
        if row.as_of
    }
    for where, text in days.items():
        try:
            date.fromisoformat(text)
        except ValueError:
            raise JobError(
                f"{text!r} is not a day, for example 2026-06-17", key=where
            ) from None
    _check_unique(prices)
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


def _check_unique(prices: Prices) -> None:
    """Refuse a second price of the same: which one counts would depend on its place."""
    tables: Mapping[str, Sequence[tuple[str, ...]]] = {
        "machines": [(m.provider, m.region, m.machine) for m in prices.machines],
        "egress": [(each.provider,) for each in prices.egress],
        "transfer": [(each.provider,) for each in prices.transfer],
        "storage": [(each.provider,) for each in prices.storage],
        "keys": [(each.provider,) for each in prices.keys],
    }
    for table, names in tables.items():
        for index, name in enumerate(names):
            first = names.index(name)
            if first != index:
                raise JobError(
                    f"{' '.join(name)} has a price in {table}[{first}] already: remove "
                    "one of them",
                    key=f"{table}[{index}]",
                )
