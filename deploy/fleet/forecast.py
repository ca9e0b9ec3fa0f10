"""The prediction of a deployment's run: its own sites' data, machines and prices.

``crossfed plan`` shows it, and ``crossfed up`` keeps it beside the run, so that the
report compares it with what happened.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from clients.training.local_federation import Federation
from clients.user_code import unable_to_exit
from deploy.fleet import prices as price_table
from deploy.fleet.plan import SizesOf
from deploy.fleet.plan_prices import NO_TERMS, PriceTerms, with_prices
from deploy.fleet.prices import Prices
from deploy.fleet.spec import DeploymentPlan
from deploy.wiring import parts as wiring
from federation.job import job_file
from federation.job.spec import JobSpec, SiteDataSpec
from federation.protocols import Clock
from federation.rounds import cost
from federation.rounds.cost import Speeds
from federation.rounds.traffic import Traffic
from monitoring.views.run_plan import LinkBytes, RunPlan

SPEEDS = "speeds.toml"
"""File in a deployment's folder that ``crossfed plan --probe`` writes."""


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
    terms: PriceTerms = NO_TERMS,
    is_decisive: bool = False,
) -> RunForecast:
    """Predict a deployment's run.

    Args:
        plan: The deployment.
        job: Its messages and steps are predicted.
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
        quiet = warn if plan.file.has_clouds else lambda _: None
        is_decisive = is_decisive and plan.file.has_clouds
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
