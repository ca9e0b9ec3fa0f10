"""Waits until machines of a deployment may be started, as ``[start]`` says.

The conditions are ``choosing.start_conditions``; here are their inputs: the clouds' own
spot prices, or those of the price table, and the user's table of carbon intensity.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from cloud_adapters.compute.machine_types import SpotMarket
from cloud_adapters.compute.pool import ComputePool, Market
from deploy.fleet import prices as price_table, start_record
from deploy.fleet.choosing import carbon_table, start_window
from deploy.fleet.choosing.carbon_table import CarbonTable
from deploy.fleet.choosing.decision_log import DecisionRow
from deploy.fleet.choosing.start_conditions import (
    Reading,
    StartConditions,
    held_back,
    why_started,
)
from deploy.fleet.deployment_file import DeploymentPlan
from deploy.fleet.reconcile import DEPLOYMENT, ROLE, SITE_PREFIX
from deploy.fleet.tables.providers import CLOUDS
from deploy.fleet.tables.site_machine import SiteMachine
from federation.errors import ComputeError, JobError
from federation.protocols import Clock

# A clock that is set must not make a start late.
_LOOK_SECONDS = 30.0
# Clouds publish a new price every few minutes at most.
_READ_SECONDS = 300.0
_HOUR = 3600.0

Tell = Callable[[str], None]
# Made when a cloud is to be asked: that takes credentials.
PoolsOf = Callable[[], Mapping[str, ComputePool]]


def conditions_of(plan: DeploymentPlan) -> StartConditions:
    """Read the conditions of a deployment file."""
    start = plan.file.start
    latest = start.at_latest_hours
    return StartConditions(
        window=start_window.parse(start.window, key="start.window"),
        max_spot_dollars=start.max_spot_dollars_per_hour,
        max_grams=start.max_grams_per_kwh,
        at_latest_seconds=None if latest is None else latest * _HOUR,
    )


@contextmanager
def allowed_start(
    plan: DeploymentPlan, pools_of: PoolsOf, *, clock: Clock, tell: Tell
) -> Iterator[Sequence[DecisionRow]]:
    """Wait until every condition holds; the machines are started inside.

    The time of the first ask is forgotten when the block has ended without an error. A
    command that is killed before, or whose machines a cloud refuses, has started
    nothing that lasts, and the next one continues its wait.

    Args and errors are those of ``await_start``.

    Yields:
        What was decided, for the log.
    """
    yield await_start(plan, pools_of, clock=clock, tell=tell)
    start_record.forget(plan)


def await_start(
    plan: DeploymentPlan, pools_of: PoolsOf, *, clock: Clock, tell: Tell
) -> Sequence[DecisionRow]:
    """Wait until every condition holds.

    Args:
        plan: The deployment.
        pools_of: Compute services by their names.
        clock: Tells time.
        tell: Called with a word when other conditions hold the start back.

    Returns:
        What was decided, for the log: the folder may not exist yet.

    Raises:
        JobError: At the first look, a price is not in the table, or the table of carbon
            intensity cannot be read or has no row of a region.
        ComputeError: A cloud refuses to tell its prices at the first look. Later
            failures hold the start back.
        CorruptObject: The record of an earlier command that waited is damaged.
    """
    conditions = conditions_of(plan)
    if conditions.is_empty or _has_started(plan, pools_of):
        return ()
    readings = _Readings(plan, pools_of, clock)
    since = clock.now()
    if conditions.at_latest_seconds is not None:
        since = start_record.since(plan, since, tell)
    rows: list[DecisionRow] = []
    known: tuple[str, ...] = ()
    while True:
        now = clock.now()
        held = held_back(
            conditions,
            now=now,
            since=since,
            prices=readings.prices(),
            intensities=readings.intensities(now),
        )
        if not held:
            why = why_started(conditions, now=now, since=since)
            row = DecisionRow(at=now, role="", action="start", offer=None, reason=why)
            return (*rows, row)
        keys = tuple(dict.fromkeys(each.key for each in held))
        if keys != known:
            reason = "; ".join(f"{each.key}: {each.reason}" for each in held)
            tell(f"waits to start machines: {reason}")
            rows.append(
                DecisionRow(
                    at=now,
                    role="",
                    action="wait",
                    offer=None,
                    reason=reason,
                    conditions=keys,
                )
            )
        known = keys
        clock.sleep(_LOOK_SECONDS)


def _has_started(plan: DeploymentPlan, pools_of: PoolsOf) -> bool:
    """Whether a site has a machine: it costs, and what is missing is a replacement."""
    if not plan.folder.exists():  # No command has started any, so no cloud is asked.
        return False
    labels = {DEPLOYMENT: plan.file.name}
    return any(
        node.state.works and node.labels.get(ROLE, "").startswith(SITE_PREFIX)
        for pool in pools_of().values()
        for node in pool.nodes(labels)
    )


class _Readings:
    """Values of now, read again from time to time."""

    def __init__(self, plan: DeploymentPlan, pools_of: PoolsOf, clock: Clock) -> None:
        self._plan, self._pools_of, self._clock = plan, pools_of, clock
        self._pools: Mapping[str, ComputePool] | None = None
        self._prices: Sequence[Reading] | None = None
        self._next_read, self._has_table = 0.0, False

    def prices(self) -> Sequence[Reading]:
        """Dollars of an hour of each spot machine, if there is a ceiling."""
        if self._plan.file.start.max_spot_dollars_per_hour is None:
            return ()
        now = self._clock.monotonic()
        if self._prices is None or now >= self._next_read:
            is_first = self._prices is None
            self._next_read = now + _READ_SECONDS
            self._prices = [*self._read(is_first=is_first)]
        return self._prices

    def intensities(self, now: float) -> Sequence[Reading]:
        """Grams per kWh of each region, if there is a ceiling."""
        if self._plan.file.start.max_grams_per_kwh is None:
            return ()
        is_first, self._has_table = not self._has_table, True
        regions = regions_of(self._plan)
        try:
            table = self._table(regions)
        except JobError as error:
            if is_first:
                raise
            # A program that rewrites it may be half done.
            return [Reading(what=r, value=None, why=str(error)) for r in regions]
        return [table.reading(region, now) for region in regions]

    def _table(self, regions: Sequence[str]) -> CarbonTable:
        path = self._plan.path.resolve().parent / self._plan.file.start.carbon
        table = carbon_table.load(path)
        known = {row.region for row in table.intensity}
        for region in regions:
            if region not in known:
                raise JobError(
                    f"{path}: has no [[intensity]] of {region!r}, in which machines "
                    "would be started: add it",
                    key="start.carbon",
                )
        return table

    def _read(self, *, is_first: bool) -> Iterator[Reading]:
        if self._pools is None:
            self._pools = self._pools_of()
        for site in spot_sites(self._plan):
            machine = site.machine
            what = f"a spot {machine.type} in {machine.region}"
            try:
                yield Reading(what=what, value=self._price(site))
            except (ComputeError, JobError) as error:
                if is_first:
                    raise
                # The price table may be rewritten just now.
                yield Reading(what=what, value=None, why=str(error))

    def _price(self, site: SiteMachine) -> float:
        """The highest of the zones in which it may be launched."""
        machine, now = site.machine, self._clock.now()
        pool = (self._pools or {})[site.pool]
        if isinstance(pool, SpotMarket):
            found = pool.spot_prices(machine.type, machine.zones, now)
            newest = {each.zone: each.dollars_per_hour for each in found}
            if newest:
                return max(newest.values())
        if site.dollars_per_hour is not None:
            return site.dollars_per_hour
        today = price_table.day_of(now)
        table = price_table.load(self._plan.prices, today=today, warn=lambda _: None)
        place = (site.provider, machine.region, machine.priced_as)
        return table.hourly(*place, spot=True)


def spot_sites(plan: DeploymentPlan) -> Sequence[SiteMachine]:
    """Sites on spot machines of clouds."""
    return [
        site
        for site in plan.file.sites
        if site.provider in CLOUDS and site.machine.market == Market.SPOT.value
    ]


def regions_of(plan: DeploymentPlan) -> Sequence[str]:
    """Regions of clouds in which machines are started."""
    return [
        *dict.fromkeys(
            site.machine.region for site in plan.file.sites if site.provider in CLOUDS
        )
    ]
