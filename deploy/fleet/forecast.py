"""The prediction of a deployment's run: its own sites' data, machines and prices.

``crossfed plan`` shows it, and ``crossfed up`` keeps it beside the run, so that the
report compares it with what happened.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from aggregator.checkpoint import CHUNK_BYTES
from clients.training.local_federation import Federation
from clients.user_code import unable_to_exit
from cloud_adapters.compute.pool import Market
from cloud_adapters.urls import parse_url
from deploy.fleet import prices as price_table
from deploy.fleet.deployment_file import DeploymentFile, DeploymentPlan
from deploy.fleet.plan import Alternative, SizesOf
from deploy.fleet.prices import Place, Prices
from deploy.fleet.tables.providers import AWS, CLOUDS, GCP
from deploy.fleet.tables.site_machine import SiteMachine
from deploy.wiring import parts as wiring
from federation.errors import JobError
from federation.job import job_file
from federation.job.spec import JobSpec, SiteDataSpec
from federation.protocols import Clock
from federation.rounds import bucket, cost
from federation.rounds.cost import Speeds
from federation.rounds.server_optimizer import server_optimizer
from federation.rounds.traffic import Traffic
from monitoring.views.run_plan import LinkBytes, RunPlan

_GIGA, _HOUR, _FLOAT_BYTES = 1e9, 3600.0, 4
_MONTH = 730 * _HOUR

SPEEDS = "speeds.toml"
"""File in a deployment's folder that ``crossfed plan --probe`` writes."""


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


_NO_TERMS = PriceTerms()


def with_prices(
    speeds: Speeds,
    file: DeploymentFile,
    prices: Prices,
    *,
    traffic: Traffic,
    terms: PriceTerms = _NO_TERMS,
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
    found = _Lookup(file, missing)
    stated = {site.name: site for site in file.sites}
    sent = cost.bytes_of_sites(traffic)
    return replace(
        speeds,
        dollars_per_hour=speeds.dollars_per_hour or file.aggregator.dollars_per_hour,
        dollars_per_gigabyte=speeds.dollars_per_gigabyte
        or file.aggregator.dollars_per_gigabyte
        or found.price(
            "aggregator.dollars_per_gigabyte",
            lambda: _from_aggregator(stated, sent, prices, terms),
        ),
        sites=tuple(
            replace(
                speed,
                dollars_per_hour=speed.dollars_per_hour
                or found.price(
                    f"{found.table(speed.name)}.dollars_per_hour",
                    partial(_hourly, stated[speed.name], prices, terms),
                ),
                dollars_per_gigabyte=speed.dollars_per_gigabyte
                or found.price(
                    f"{found.table(speed.name)}.dollars_per_gigabyte",
                    partial(
                        _from_site, stated[speed.name], stated, sent, prices, terms
                    ),
                ),
            )
            if speed.name in stated
            else speed
            for speed in speeds.sites
        ),
    )


class _Lookup:
    """Looks prices up, and remembers those that are missing."""

    def __init__(self, file: DeploymentFile, missing: list[str] | None) -> None:
        self._file, self._missing = file, missing

    def table(self, name: str) -> str:
        """Name the table of a site in the deployment file."""
        names = [site.name for site in self._file.sites]
        return f"sites[{names.index(name)}]"

    def price(self, key: str, look_up: Callable[[], float]) -> float:
        try:
            return look_up()
        except JobError as error:
            if self._missing is None:
                raise
            self._missing.append(f"{error.reason}; or state {key}")
        return cost.UNKNOWN


def _hourly(site: SiteMachine, prices: Prices, terms: PriceTerms) -> float:
    spot = terms.spot
    if site.provider not in CLOUDS or (
        site.dollars_per_hour is not None and spot is None
    ):
        return site.dollars_per_hour or 0.0
    machine = site.machine
    is_spot = machine.market == Market.SPOT.value if spot is None else spot
    kind = machine.priced_as
    return prices.hourly(site.provider, machine.region, kind, spot=is_spot)


def place_of(site: SiteMachine) -> Place:
    """Cloud and region of a site; both empty outside of clouds."""
    if site.provider not in CLOUDS:
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
    return prices.between(
        place_of(site), terms.aggregator, volume, before=terms.gigabytes_before
    )


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


def _bucket_cloud(job: JobSpec) -> str | None:
    """The cloud of a job's bucket; None if it is in none."""
    return {"s3": AWS, "gs": GCP}.get(parse_url(job.storage.url).scheme)


def storage(
    own: Alternative, prices: Prices, speeds: Speeds | None = None
) -> Mapping[str, float] | None:
    """What a run leaves in the bucket of its job; None if it is in no bucket.

    Args:
        own: The job.
        prices: The table.
        speeds: Of the lines; None if they are not known.

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
    asked = bucket.requests_of_run(
        model,
        rounds=job.rounds,
        keep=job.storage.keep_checkpoints,
        vectors=len(server_optimizer(job.aggregation.server_optimizer).init(1)),
        chunk_bytes=CHUNK_BYTES,
    )
    kept = storage(way, prices) or {}
    month = kept.get("dollars_per_month", cost.UNKNOWN)
    more = {
        "requests": prices.requests(cloud, writes=asked.writes, reads=asked.reads),
        "storage": month * way.cost.seconds / _MONTH,
    }
    return replace(way, cost=replace(way.cost, dollars={**way.cost.dollars, **more}))


def gpu_hours(own: Alternative, file: DeploymentFile, prices: Prices) -> float:
    """GPU-hours of a run, on machines that the table knows."""
    seconds = 0.0 if own.cost is None else own.cost.seconds
    gpus = sum(
        prices.gpus(site.provider, site.machine.priced_as) for site in file.sites
    )
    return gpus * seconds / _HOUR


@dataclass(frozen=True, kw_only=True)
class RunForecast:
    """What is known of a deployment's run before it begins.

    Attributes:
        federation: The job, its model and its data.
        traffic: What it sends; None if that cannot be predicted.
        speeds: With prices; None if none were stated or measured.
        prices: The price table, if it was needed.
        missing: A word about each price that nobody has stated, and the table lacks.
    """

    federation: Federation
    traffic: Traffic | None
    speeds: Speeds | None
    prices: Prices | None
    missing: tuple[str, ...] = ()


def federation_of(plan: DeploymentPlan, job: JobSpec) -> Federation:
    """Build a job with the data that the deployment file names for its sites.

    Raises:
        FederationError: Model or data cannot be loaded here.
    """
    own = {site.name: site.data for site in plan.file.sites if site.data.source}
    sites = tuple(
        replace(
            site,
            data=SiteDataSpec(
                source=own[site.name].source, options=own[site.name].options
            ),
        )
        if site.name in own
        else site
        for site in job.sites
    )
    with unable_to_exit():
        return wiring.build_federation(replace(job, sites=sites))


def load_speeds(path: Path) -> Speeds:
    """Read a speeds file.

    Raises:
        JobError: It cannot be read, or a key is unknown, missing or out of bounds.
    """
    return job_file.load_table(path, Speeds, lambda _: None)


def forecast(
    plan: DeploymentPlan,
    job: JobSpec,
    *,
    sizes_of: SizesOf,
    speeds: Speeds | None,
    clock: Clock,
    warn: Callable[[str], None],
    prices: Path | None = None,
    terms: PriceTerms = _NO_TERMS,
    is_decisive: bool = False,
) -> RunForecast:
    """Predict a deployment's run.

    Args:
        plan: The deployment.
        job: Its job.
        sizes_of: Sizes the messages of a job.
        speeds: Stated or measured; None for bytes only.
        clock: To tell how old prices are.
        warn: Called with a word about prices that are old.
        prices: The price table; None for that of the deployment.
        terms: What prices depend on.
        is_decisive: Whether a budget depends on the prices, which may not be old then.

    Raises:
        FederationError: Model or data cannot be loaded here, or a price is missing that
            a budget depends on.
    """
    federation, missing = federation_of(plan, job), list[str]()
    with wiring.torch_threads(job):
        traffic = sizes_of(federation)
    table = None
    if speeds is not None and traffic is not None:
        today = price_table.day_of(clock.now())
        quiet = warn if has_clouds(plan.file) else _ignore
        is_decisive = is_decisive and has_clouds(plan.file)
        table = price_table.load(
            prices or plan.prices,
            today=today,
            warn=quiet,
            is_decisive=is_decisive,
            clouds={site.provider for site in plan.file.sites},
        )
        speeds = with_prices(
            speeds,
            plan.file,
            table,
            traffic=traffic,
            terms=terms,
            missing=None if is_decisive else missing,
        )
    return RunForecast(
        federation=federation,
        traffic=traffic,
        speeds=speeds,
        prices=table,
        missing=tuple(missing),
    )


def has_clouds(file: DeploymentFile) -> bool:
    """Whether a cloud runs one of a deployment's machines, so that prices matter."""
    return any(site.provider in CLOUDS for site in file.sites)


def _ignore(_text: str) -> None:
    """Prices of clouds do not matter here."""


def run_plan(found: RunForecast, *, submitted: float) -> RunPlan | None:
    """The prediction as it is kept beside a run; None if there is none.

    Args:
        found: The prediction.
        submitted: When the job was submitted, in seconds since 1970.
    """
    if found.traffic is None:
        return None
    traffic, speeds = found.traffic, found.speeds
    most = cost.bytes_of_sites(traffic, high=True)
    fewest = cost.bytes_of_sites(traffic, high=False)
    links = tuple(
        LinkBytes(site=name, down=(low[0], high[0]), up=(low[1], high[1]))
        for name, high in most.items()
        for low in (fewest[name],)
    )
    plan = RunPlan(submitted_at=submitted, links=links, speeds=None)
    if speeds is None:
        return plan
    known = cost.of_run(traffic, speeds)
    return replace(
        plan,
        speeds=None if found.missing else speeds,
        seconds=tuple(known.phases.items()),
        dollars=() if found.missing else tuple(known.dollars.items()),
        prices_of="" if found.prices is None else found.prices.as_of,
    )
