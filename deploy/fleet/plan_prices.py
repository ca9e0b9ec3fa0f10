"""Prices of a run: machines and traffic where speeds do not state them, and buckets."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from aggregator.checkpoint import CHUNK_BYTES
from cloud_adapters.urls import parse_url
from deploy.fleet import spending
from deploy.fleet.machine_spec import AWS, GCP, SiteMachine
from deploy.fleet.plan import Alternative
from deploy.fleet.prices import HOURS_PER_MONTH, Place, Prices
from deploy.fleet.spec import DeploymentFile
from federation.errors import JobError
from federation.job.spec import JobSpec
from federation.rounds import cost
from federation.rounds.cost import SiteSpeed, Speeds
from federation.rounds.server_optimizer import server_optimizer
from federation.rounds.traffic import Traffic

_GIGA, _MINUTE, _HOUR = 1e9, 60.0, 3600.0
_FLOAT_BYTES = 4

_MONTH = HOURS_PER_MONTH * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceTerms:
    """What prices depend on besides the deployment file.

    Attributes:
        spot: Whether all machines of clouds are spot machines; None for what the file
            says.
        aggregator: Where the aggregator is.
        gigabytes_before: GB that have left each cloud in the month before the run;
            None if unknown, and then nothing is free.
    """

    spot: bool | None = None
    aggregator: Place = ("", "")
    gigabytes_before: float | None = None


NO_TERMS = PriceTerms()
"""Markets as in the file, the aggregator in no cloud, no month before."""


def with_prices(
    speeds: Speeds,
    file: DeploymentFile,
    prices: Prices,
    *,
    traffic: Traffic,
    terms: PriceTerms = NO_TERMS,
    missing: list[str] | None = None,
) -> Speeds:
    """Add what machines and traffic cost, where the speeds do not say it.

    Args:
        speeds: Stated or measured.
        file: The deployment: its own prices come before those of the table.
        prices: The table.
        traffic: What is sent: a month's tiers follow from it.
        terms: What the prices depend on.
        missing: Takes a word about each price that the table lacks, and which key
            states it; the price is then ``UNKNOWN``. None for an error.

    Raises:
        JobError: The table lacks a price.
    """
    stated = {site.name: site for site in file.sites}
    sent = cost.bytes_of_sites(traffic)

    price = partial(_price, missing=missing)

    def priced(speed: SiteSpeed) -> SiteSpeed:
        site = stated.get(speed.name)
        if site is None:
            return speed
        table = f"sites[{file.sites.index(site)}]"
        hour, gigabyte = (f"{table}.dollars_per_{x}" for x in ("hour", "gigabyte"))
        return replace(
            speed,
            dollars_per_hour=speed.dollars_per_hour
            or price(hour, partial(_hourly, site, file, prices, terms)),
            dollars_per_gigabyte=speed.dollars_per_gigabyte
            or price(gigabyte, partial(_from_site, site, stated, sent, prices, terms)),
            dollars_per_gigabyte_received=speed.dollars_per_gigabyte_received
            or price(gigabyte, partial(_to_site, site, prices, terms)),
        )

    own = file.aggregator
    return replace(
        speeds,
        start_seconds=speeds.start_seconds
        or file.has_clouds * file.start.machine_minutes * _MINUTE,
        dollars_per_hour=speeds.dollars_per_hour or own.dollars_per_hour,
        dollars_per_gigabyte=speeds.dollars_per_gigabyte
        or own.dollars_per_gigabyte
        or price(
            "aggregator.dollars_per_gigabyte",
            partial(_from_aggregator, stated, sent, prices, terms),
        ),
        sites=tuple(map(priced, speeds.sites)),
    )


def _price(
    key: str, look_up: Callable[[], float], *, missing: list[str] | None
) -> float:
    """Look a price up; see ``with_prices`` for one that is missing."""
    try:
        return look_up()
    except JobError as error:
        if missing is None:
            raise
        word = f"{error.reason}; or state {key}"
        if word not in missing:
            missing.append(word)
        return cost.UNKNOWN


def _hourly(
    site: SiteMachine, file: DeploymentFile, prices: Prices, terms: PriceTerms
) -> float:
    """Dollars of an hour of a machine, and of its share of its region's NAT gateway."""
    hourly = spending.machine_hour(site, prices, spot=terms.spot)
    is_stated = site.dollars_per_hour is not None and terms.spot is None
    if is_stated or not site.is_of_cloud:
        return hourly
    neighbours = sum(place_of(other) == place_of(site) for other in file.sites)
    return hourly + prices.nat_hour(site.provider) / neighbours


def place_of(site: SiteMachine) -> Place:
    """Cloud and region of a site; both empty outside of clouds."""
    if not site.is_of_cloud:
        return "", ""
    return site.provider, site.machine.region


def _from_site(
    site: SiteMachine,
    stated: Mapping[str, SiteMachine],
    sent: Mapping[str, tuple[int, int]],
    prices: Prices,
    terms: PriceTerms,
) -> float:
    """Dollars per GB from a site; the sites of one cloud go through tiers together."""
    if site.dollars_per_gigabyte is not None:
        return site.dollars_per_gigabyte
    volume = sum(
        sent.get(name, (0, 0))[1] / _GIGA
        for name, other in stated.items()
        if other.provider == site.provider
    )
    sent_there = prices.between(
        place_of(site), terms.aggregator, volume, before=terms.gigabytes_before
    )
    return sent_there + prices.through_nat(place_of(site), terms.aggregator)


def _to_site(site: SiteMachine, prices: Prices, terms: PriceTerms) -> float:
    """Dollars per GB to a site, besides what its sender pays; stated as one price."""
    if site.dollars_per_gigabyte is not None:
        return 0.0
    return prices.through_nat(place_of(site), terms.aggregator)


def _from_aggregator(
    stated: Mapping[str, SiteMachine],
    sent: Mapping[str, tuple[int, int]],
    prices: Prices,
    terms: PriceTerms,
) -> float:
    """Dollars per GB from the aggregator, as a mean over what goes to each site."""
    down = {name: sent.get(name, (0, 0))[0] / _GIGA for name in stated}
    whole = sum(down.values())
    if not terms.aggregator[0] or not whole:
        return 0.0
    dollars = sum(
        down[name]
        * prices.between(
            terms.aggregator, place_of(site), whole, before=terms.gigabytes_before
        )
        for name, site in stated.items()
    )
    return dollars / whole


def ways_to_rent(
    own: Alternative,
    speeds: Speeds,
    file: DeploymentFile,
    prices: Prices,
    terms: PriceTerms,
) -> Iterator[Alternative]:
    """Yield the job itself on other machines: markets, places of the aggregator.

    Args:
        own: The job itself.
        speeds: Without prices of the table.
        file: The deployment.
        prices: The table; what it has no price of is left out.
        terms: Those of the job itself.
    """
    places = sorted({place_of(site) for site in file.sites} - {("", "")})
    ways = {
        "all machines on spot": replace(terms, spot=True),
        "all on demand": replace(terms, spot=False),
        **{
            f"aggregator in {' '.join(place)}": replace(terms, aggregator=place)
            for place in places
        },
    }
    for name, other in ways.items() if places else ():
        try:
            priced = with_prices(speeds, file, prices, traffic=own.traffic, terms=other)
        except JobError:
            continue
        found = cost.of_run(own.traffic, priced)
        if found != own.cost:
            yield replace(own, name=name, cost=found)


def gpu_hours(own: Alternative, file: DeploymentFile, prices: Prices) -> float:
    """GPU-hours of a run, on machines that the table knows."""
    seconds = 0.0 if own.cost is None else own.cost.seconds
    gpus = sum(
        prices.gpus(site.provider, site.machine.priced_as) for site in file.sites
    )
    return gpus * seconds / _HOUR


def storage(
    own: Alternative, prices: Prices, speeds: Speeds | None = None
) -> Mapping[str, float] | None:
    """What a run leaves in the bucket of its job; None if it is in no bucket.

    Args:
        own: The job.
        prices: The table.
        speeds: Speeds of the lines; None if they are not known.

    Returns:
        ``bytes``, D, of the model and of the checkpoints that are kept, which hold the
        model and what the server's optimiser needs besides, so at least so many;
        ``dollars_per_month``, D x C, if the table has the cloud; and with speeds,
        ``access_seconds``, T, to read all of it over the fastest line, and
        ``dollars_per_month_and_second``, S = D x C / T, which grows with the price and
        with the speed that it buys.
    """
    job = own.traffic.job
    cloud = _bucket_cloud(job)
    if cloud is None:
        return None
    model = _FLOAT_BYTES * own.traffic.layout.size
    kept = model * (1 + job.storage.keep_checkpoints)
    found, month = {"bytes": float(kept)}, prices.storage_month(cloud)
    if month is not None:
        found["dollars_per_month"] = kept / _GIGA * month
    if month is not None and speeds is not None:
        fastest = max(site.down_bytes_per_second for site in speeds.sites)
        found["access_seconds"] = kept / fastest
        dollars = found["dollars_per_month"] / found["access_seconds"]
        found["dollars_per_month_and_second"] = dollars
    return found


def with_bucket(way: Alternative, prices: Prices) -> Alternative:
    """Add what the bucket of a job costs during its run: requests, and the bytes kept.

    Args:
        way: A way to run a job; one in no bucket is returned as it is.
        prices: The table; a cloud that it lacks makes the dollars unknown.
    """
    job = way.traffic.job
    cloud = _bucket_cloud(job)
    if cloud is None or way.cost is None:
        return way
    model = _FLOAT_BYTES * way.traffic.layout.size
    optimizer = server_optimizer(
        job.aggregation.server_optimizer, period=job.models_per_round
    )
    asked = cost.requests_of_run(
        model,
        rounds=job.rounds,
        keep=job.storage.keep_checkpoints,
        vectors=len(optimizer.init(1)),
        chunk_bytes=CHUNK_BYTES,
    )
    kept = storage(way, prices) or {}
    month = kept.get("dollars_per_month", cost.UNKNOWN)
    more = {
        "requests": prices.requests(cloud, writes=asked.writes, reads=asked.reads),
        "storage": month * way.cost.seconds / _MONTH,
    }
    return replace(way, cost=replace(way.cost, dollars={**way.cost.dollars, **more}))


def _bucket_cloud(job: JobSpec) -> str | None:
    """The cloud of a job's bucket; None if it is in none."""
    return {"s3": AWS, "gs": GCP}.get(parse_url(job.storage.url).scheme)
