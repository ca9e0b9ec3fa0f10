"""The deployment file: which machines a federation runs on, for how long, and when.

What a run computes is in its job, which the deployment file names. Nothing here is
part of what sites agree on. Tables of machines are in ``machine_spec``.

``on_this_host`` turns a plan into a rehearsal of it: the same file, without machines
that cost. Keys, runs and ledgers of a rehearsal are in a folder of its own, so nothing
of it is mistaken for that of the sites themselves; and it neither reads what only a
site's own machine may, nor writes where that does.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, time, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from deploy.aggregator_host.config import (
    AlertSpec,
    MonitorSpec,
    PlatformsSpec,
    check_watching,
)
from deploy.fleet import machine_spec
from deploy.fleet.machine_spec import LOCAL, AggregatorMachine, SiteMachine
from deploy.site_host.config import LocalDataSpec
from deploy.site_host.home_spec import HomeSpec
from deploy.wiring import exchange
from deploy.wiring.exchange import ExchangeSpec
from federation.errors import JobError
from federation.ids import check_name
from federation.job import job_file
from federation.job.job_keys import key
from federation.job.spec import JobSpec

_WINDOW = re.compile(r"(\d\d:\d\d)-(\d\d:\d\d) ([A-Za-z0-9_+/-]+)")

# Called with a word for the person who runs the command.
Tell = Callable[[str], None]
# Those of site.toml that a site here may have.
_OF_AGGREGATOR = ("platforms", "monitor", "alerts")
_TABLES = ("data", "compute", "policy", "home")
# What clouds take in a label's value.
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
# What of a cloud's machine is not on this host.
_OF_MACHINES = ("notices", "gpus")


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWindow:
    """Hours of every day.

    Attributes:
        begin: When it opens.
        end: When it closes; before ``begin`` for a window over midnight.
        zone: Whose time.
    """

    begin: time
    end: time
    zone: ZoneInfo

    def opens(self, now: float) -> float:
        """When machines may be started: ``now`` if it is open, in seconds since 1970.

        Days on which the clocks change count as the zone's rules say.
        """
        here = datetime.fromtimestamp(now, UTC).astimezone(self.zone)
        at = here.time().replace(tzinfo=None)
        if self.begin <= self.end:
            is_open = self.begin <= at < self.end
        else:
            is_open = at >= self.begin or at < self.end
        if is_open:
            return now
        day = here.date() if at < self.begin else here.date() + timedelta(days=1)
        begin = datetime.combine(day, self.begin, tzinfo=self.zone)
        if begin.timestamp() <= now:  # In the hour that comes twice.
            begin = begin.replace(fold=1)
        return begin.timestamp()

    def text(self, seconds: float) -> str:
        """Write a time as people of the place do."""
        here = datetime.fromtimestamp(seconds, UTC).astimezone(self.zone)
        return f"{here:%Y-%m-%d %H:%M} {self.zone.key}"


def parse_window(text: str, *, key: str) -> StartWindow | None:
    """Read a window; None for an empty text.

    Raises:
        JobError: It is no window, or its zone is not known here.
    """
    if not text:
        return None
    found = _WINDOW.fullmatch(text)
    refusal = JobError(
        f"{text!r:.100} is no window: write it as '22:00-06:00 Europe/Berlin'", key=key
    )
    if found is None:
        raise refusal
    try:
        begin, end = (time.fromisoformat(found[group]) for group in (1, 2))
    except ValueError as error:
        raise refusal from error
    if begin == end:
        raise JobError(f"{text!r} is empty: its hours must differ", key=key)
    try:
        zone = ZoneInfo(found[3])
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise JobError(
            f"{found[3]!r} is no time zone that this machine knows: name one such as "
            "Europe/Berlin or UTC",
            key=key,
        ) from error
    return StartWindow(begin=begin, end=end, zone=zone)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartSpec:
    """When `crossfed up` may start machines; running ones and replacements do not wait.

    Attributes:
        window: Daily hours with a time zone, for example `22:00-06:00 Europe/Berlin`.
            Default: any time.
        max_spot_dollars_per_hour: Highest price of each spot machine at which machines
            are started: on AWS that of its most expensive zone now, on Google Cloud
            that of the price table. Default: any price.
        max_grams_per_kwh: Highest carbon intensity of the electricity in each region of
            a cloud's machine, in grams of CO2-equivalent per kWh. Default: any.
        carbon: Table of carbon intensity, relative to this file; yours, since none is
            in the release. It is read again every 30 seconds while `crossfed up` waits.
        at_latest_hours: After this many hours of waiting, only the window counts. They
            are counted from the first `crossfed up` that waits until machines start or
            `crossfed down` runs. Default: wait as long as it takes.
        machine_minutes: Time from the request for a machine until its site works.
            `crossfed up --keep` counts it for each move before a deadline and for each
            change of size.
    """

    window: str = ""
    max_spot_dollars_per_hour: float | None = key(default=None, above=0.0)
    max_grams_per_kwh: float | None = key(default=None, above=0.0)
    carbon: str = ""
    at_latest_hours: float | None = key(default=None, above=0.0)
    machine_minutes: float = key(default=15.0, above=0.0, high=600.0)


def check_start(start: StartSpec, sites: Sequence[SiteMachine]) -> None:
    """Refuse conditions of a start that could hold back nothing.

    Args:
        start: The table.
        sites: Sites of the file.

    Raises:
        JobError: A key is missing, wrong or without effect.
    """
    parse_window(start.window, key="start.window")
    has_price = start.max_spot_dollars_per_hour is not None
    has_grams = start.max_grams_per_kwh is not None
    for name, is_wrong, why in (
        (
            "max_spot_dollars_per_hour",
            has_price and not any(site.is_spot for site in sites),
            "is for spot machines of clouds, and no site has one",
        ),
        (
            "max_grams_per_kwh",
            has_grams and not any(site.is_of_cloud for site in sites),
            "is for machines of clouds, and no site has one",
        ),
        ("carbon", has_grams and not start.carbon, "is missing: name your table"),
        (
            "carbon",
            bool(start.carbon) and not has_grams,
            "has no effect without max_grams_per_kwh",
        ),
        (
            "at_latest_hours",
            start.at_latest_hours is not None and not (has_price or has_grams),
            "has no effect without a ceiling: the window always counts",
        ),
    ):
        if is_wrong:
            raise JobError(why, key=f"start.{name}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseSpec:
    """What cloud machines and pods install: a wheel or a container image, not both.

    Attributes:
        wheel: URL of a wheel of crossfed: `https://`, `s3://BUCKET/KEY` or
            `gs://BUCKET/KEY` that the machines' own identities may read.
        sha256: Digest of the wheel, 64 hexadecimal digits.
        extras: Extras of crossfed to install with the wheel; that of the machine's
            cloud is added.
        image: Container image of a site with its digest, `NAME@sha256:...`.
    """

    wheel: str = ""
    sha256: str = ""
    extras: tuple[str, ...] = ("flower",)
    image: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentFile:
    """A deployment.

    Attributes:
        name: Name of the deployment, which labels all its machines: lower-case letters,
            digits and hyphens, at most 40.
        job: The job file, relative to this file.
        organisation: Who operates the aggregator and the sites.
        max_hours: Every machine ends itself after this many hours.
        max_dollars: Budget of all machines of this deployment and their disks in all
            its runs; traffic, NAT gateways and storage are not counted. When it is
            spent, machines end. Needs prices younger than 90 days. Default: no budget.
        deadline_hours: Target for the end of the run, in hours from its beginning:
            `crossfed up --keep` moves spot machines of sites with a home to on-demand
            machines in time to meet it. Default: no deadline.
        prices: Price table to use instead of the release's, relative to this file;
            `tools/refresh_prices.py` writes one.
        start: When `crossfed up` may start machines.
        folder: Folder for keys, runs and the state of local sites, relative to this
            file; by default `deployments/NAME`.
        aggregator: The aggregator, which runs on this host.
        sites: Sites to start, one `[[sites]]` table each. Other sites of the job
            join with their own operators.
        exchange: As `[exchange]` in `aggregator.toml` and every `site.toml`.
        release: What machines of clouds install.
        platforms: As `[platforms]` in `aggregator.toml`.
        monitor: As `[monitor]` in `aggregator.toml`.
        alerts: As `[[alerts]]` in `aggregator.toml`. `crossfed up --keep` also tells
            these places when 80 % and all of `max_dollars` or `max_hours` are used.
    """

    name: str
    job: str
    organisation: str = ""
    max_hours: float = key(default=12.0, above=0.0, high=24.0 * 30)
    max_dollars: float | None = key(default=None, above=0.0)
    deadline_hours: float | None = key(default=None, above=0.0)
    prices: str = ""
    start: StartSpec = StartSpec()
    folder: str = ""
    aggregator: AggregatorMachine = AggregatorMachine()
    sites: tuple[SiteMachine, ...]
    exchange: ExchangeSpec = ExchangeSpec()
    release: ReleaseSpec = ReleaseSpec()
    platforms: PlatformsSpec = PlatformsSpec()
    monitor: MonitorSpec = MonitorSpec()
    alerts: tuple[AlertSpec, ...] = ()

    @property
    def has_clouds(self) -> bool:
        """Whether a cloud runs one of its machines, so that prices matter."""
        return any(site.is_of_cloud for site in self.sites)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentPlan:
    """A deployment file, with its paths made whole.

    Attributes:
        file: What was read.
        path: Where from.
        folder: Keys, runs and the state of local sites.
        job: The job file.
        settings: For each site, the tables of its ``site.toml`` as they were written:
            ``data``, ``compute``, ``policy`` and ``exchange``.
        exchange: The table ``exchange`` of every party, in one of that name; empty if
            there is none.
        aggregator_tables: The same of tables for the aggregator alone.
        prices: The price table; None for that of this release.
    """

    file: DeploymentFile
    path: Path
    folder: Path
    job: Path
    settings: Mapping[str, Mapping[str, Any]]
    exchange: Mapping[str, Any]
    aggregator_tables: Mapping[str, Any] = field(default_factory=dict)
    prices: Path | None = None

    @property
    def aggregator(self) -> Path:
        """Folder of the aggregator."""
        return self.folder / "aggregator"

    def site(self, name: str) -> Path:
        """Folder of a site on this host."""
        return self.folder / "sites" / name

    @property
    def max_seconds(self) -> float:
        """After so long each node ends by itself."""
        return 3600.0 * self.file.max_hours


def load(path: Path) -> DeploymentPlan:
    """Read a deployment file.

    Raises:
        JobError: It cannot be read, or a key is unknown, missing or wrong; the
            message names file and key.
    """
    file = job_file.load_table(path, DeploymentFile, _check)
    document = job_file.read_toml(path)
    shared = {name: document[name] for name in ("exchange",) if name in document}
    # In one order: a node whose settings read differently is replaced.
    settings = {
        table["name"]: {**shared, **{n: table[n] for n in _TABLES if n in table}}
        for table in document["sites"]
    }
    # A link to the file means the same deployment.
    here = path.resolve().parent
    folder = here / (file.folder or f"deployments/{file.name}")
    return DeploymentPlan(
        file=file,
        path=path,
        # Without "..", since both are shown. The folder itself may be a link, which
        # is for others to refuse.
        folder=folder.parent.resolve() / folder.name,
        job=(here / file.job).resolve(),
        settings=settings,
        exchange=shared,
        aggregator_tables={n: document[n] for n in _OF_AGGREGATOR if n in document},
        prices=here / file.prices if file.prices else None,
    )


def load_job(plan: DeploymentPlan) -> JobSpec:
    """Read the job of a deployment.

    Raises:
        JobError: It cannot be read, or is not one that can be run; the message names
            the job file.
    """
    try:
        return job_file.load(plan.job)
    except JobError as error:
        if str(plan.job) in error.reason:
            raise
        raise JobError(f"{plan.job}: {error}") from error


def _check(file: DeploymentFile) -> None:
    check_watching(file.monitor, file.alerts)
    if not _NAME.fullmatch(file.name):
        raise JobError(
            "must be 1 to 40 lower-case letters, digits and hyphens, and begin with a "
            "letter: clouds take nothing else as a label",
            key="name",
        )
    machine_spec.check_addresses(file.aggregator)
    if not file.job:
        raise JobError("must name the job file", key="job")
    _check_names(file)
    check_start(file.start, file.sites)
    has_deadline = file.deadline_hours is not None
    for index, site in enumerate(file.sites):
        machine_spec.check_site(site, f"sites[{index}]", has_deadline=has_deadline)
    exchange.check(file.exchange)


def _check_names(file: DeploymentFile) -> None:
    names = [site.name for site in file.sites]
    if not names:
        raise JobError("name at least one site to start", key="sites")
    for index, name in enumerate(names):
        try:
            check_name(name)
        except ValueError as error:
            raise JobError(str(error), key=f"sites[{index}].name") from None
        if name in names[:index]:
            raise JobError(f"names {name!r} twice", key=f"sites[{index}].name")


def on_this_host(plan: DeploymentPlan) -> DeploymentPlan:
    """Have a deployment run on this host, whatever its sites' providers are.

    Sites that the file has on this host keep their form and their data. Others have the
    part of the job's dataset that a simulation gives them.
    """
    file = plan.file
    settings = {
        site.name: _local_settings(site, plan.settings[site.name])
        for site in file.sites
    }
    return replace(
        plan,
        file=replace(
            file,
            sites=tuple(map(_local_site, file.sites)),
            aggregator=AggregatorMachine(
                connect_seconds=file.aggregator.connect_seconds
            ),
            max_dollars=None,
            deadline_hours=None,
            start=StartSpec(),
            exchange=ExchangeSpec(),
            platforms=type(file.platforms)(),
        ),
        # No deployment's name has a dot: it is the folder of no other one.
        folder=Path(f"{plan.folder}.local"),
        settings=settings,
        exchange={},
        aggregator_tables={},
    )


def _local_site(site: SiteMachine) -> SiteMachine:
    if site.provider == LOCAL:
        return replace(site, home=HomeSpec())
    return SiteMachine(
        name=site.name,
        organisation=site.organisation,
        data=LocalDataSpec(name=site.data.name),
        compute=replace(site.compute, notices="none", gpus=0),
        policy=site.policy,
    )


def _local_settings(site: SiteMachine, tables: Mapping[str, Any]) -> Mapping[str, Any]:
    """The tables of ``site.toml`` that a rehearsal takes over."""
    kept = {name: tables[name] for name in ("compute", "policy") if name in tables}
    if site.provider == LOCAL:
        return {**kept, **({"data": tables["data"]} if "data" in tables else {})}
    if "compute" in kept:
        kept["compute"] = {
            name: value
            for name, value in kept["compute"].items()
            if name not in _OF_MACHINES
        }
    if "name" in tables.get("data", {}):
        kept["data"] = {"name": tables["data"]["name"]}
    return kept
