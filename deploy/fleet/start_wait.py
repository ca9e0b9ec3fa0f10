"""Wait until machines of a deployment may be started, as ``[start]`` says.

``start.at_latest_hours`` counts from the first ``crossfed up`` that waits. Its machine
may restart, or a person may run the command again: that must not restart the wait. So
the time of the first one is recorded, until the machines of the deployment have been
started, or ``crossfed down``: a command that is killed before that has started nothing
for good.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from cloud_adapters.compute.machine_types import SpotMarket
from cloud_adapters.compute.pool import ComputePool
from cloud_adapters.storage.disk.part_file import file_errors
from deploy.fleet import carbon, prices as price_table, spec
from deploy.fleet.machine_spec import SiteMachine
from deploy.fleet.reconcile import DEPLOYMENT, ROLE, SITE_PREFIX
from deploy.fleet.spec import DeploymentPlan, Tell
from federation import durable_files
from federation.errors import ComputeError, JobError
from federation.protocols import Clock

_DAMAGED = "delete it: the wait then begins now"


# A clock that is set must not make a start late.
_LOOK_SECONDS = 30.0
# Clouds publish a new price every few minutes at most.
_READ_SECONDS = 300.0
_HOUR = 3600.0
# Called when a cloud has to be asked, which takes credentials.
PoolsOf = Callable[[], Mapping[str, ComputePool]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstAsk:
    """When a start was first asked for.

    Attributes:
        at: Seconds since 1970.
        conditions: Digest of the table ``start``: a changed one begins a new wait.
    """

    at: float
    conditions: str


def first_asked(plan: DeploymentPlan, now: float, tell: Tell) -> float:
    """When a deployment's start was first asked for, by this command or an earlier one.

    Args:
        plan: The deployment.
        now: Seconds since 1970; written down if there is no earlier time.
        tell: Called with a word about an earlier command.

    Raises:
        CorruptObject: The record is damaged.
        StoreUnavailable: It cannot be written.
    """
    table = repr(sorted(asdict(plan.file.start).items()))
    conditions = hashlib.sha256(table.encode()).hexdigest()
    path = _record(plan)
    found = durable_files.read_json(path, FirstAsk, advice=_DAMAGED)
    # A clock that was set back must not make the wait longer.
    if found is not None and found.conditions == conditions and found.at <= now:
        hours = (now - found.at) / _HOUR
        tell(
            f"an earlier command began to wait {hours:.1f} h ago, and "
            "start.at_latest_hours counts from then; crossfed down restarts the wait"
        )
        return found.at
    with file_errors("make", path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    durable_files.write_json(path, FirstAsk(at=now, conditions=conditions))
    return now


def forget_wait(plan: DeploymentPlan) -> None:
    """Have the next start begin a new wait.

    Raises:
        StoreUnavailable: The record cannot be removed.
    """
    path = _record(plan)
    with file_errors("remove", path):
        path.unlink(missing_ok=True)


def _record(plan: DeploymentPlan) -> Path:
    """Beside the folder, which is made when the first machine starts."""
    return plan.folder.with_name(f".{plan.folder.name}.start.json")


@contextmanager
def allowed_start(
    plan: DeploymentPlan, pools_of: PoolsOf, *, clock: Clock, tell: Tell
) -> Iterator[None]:
    """Wait until every condition holds; the machines are started inside.

    The time of the first ask is forgotten when the block has ended without an error. A
    command that is killed before, or whose machines a cloud refuses, has started
    nothing that lasts, and the next one continues its wait.

    Args and errors are those of ``await_start``.
    """
    await_start(plan, pools_of, clock=clock, tell=tell)
    yield
    forget_wait(plan)


def await_start(
    plan: DeploymentPlan, pools_of: PoolsOf, *, clock: Clock, tell: Tell
) -> None:
    """Wait until every condition holds.

    Args:
        plan: The deployment.
        pools_of: Compute services by their names.
        clock: Tells time.
        tell: Called with a word when other conditions hold the start back.

    Raises:
        JobError: At the first look, a price is not in the table, or the table of carbon
            intensity cannot be read or has no row of a region.
        ComputeError: A cloud refuses to tell its prices at the first look. Later
            failures hold the start back.
        CorruptObject: The record of an earlier command that waited is damaged.
    """
    start = plan.file.start
    ceilings = (start.max_spot_dollars_per_hour, start.max_grams_per_kwh)
    if not start.window and ceilings == (None, None):
        return
    if _has_started(plan, pools_of):
        return
    prices = _SpotPrices(plan, pools_of, clock)
    since = clock.now()
    if start.at_latest_hours is not None:
        since = first_asked(plan, since, tell)
    told: list[str] = []
    if start.carbon:
        _check_regions(plan)
    while held := list(_held_back(plan, since, clock.now(), prices)):
        keys = [name for name, _ in held]
        if keys != told:  # The same condition is not news although its value changes.
            reasons = "; ".join(f"{name}: {reason}" for name, reason in held)
            tell(f"waits to start machines: {reasons}")
        told = keys
        clock.sleep(_LOOK_SECONDS)


def _held_back(
    plan: DeploymentPlan, since: float, now: float, prices: "_SpotPrices"
) -> Iterator[tuple[str, str]]:
    """Yield each key whose condition does not hold now, with the reason.

    A value that is not known holds a start back: no machine is started on a guess.
    """
    start = plan.file.start
    window = spec.parse_window(start.window, key="start.window")
    if window is not None and (opens := window.opens(now)) > now:
        yield "start.window", f"it opens at {window.text(opens)}"
    latest = start.at_latest_hours
    if latest is not None and now - since >= latest * _HOUR:
        return
    if (ceiling := start.max_spot_dollars_per_hour) is not None:
        above = _above(prices.read(), ceiling, "${:.4g}/h")
        yield from (("start.max_spot_dollars_per_hour", each) for each in above)
    if (ceiling := start.max_grams_per_kwh) is not None:
        above = _above(_intensities(plan, now), ceiling, "{:.4g} g/kWh")
        yield from (("start.max_grams_per_kwh", each) for each in above)


def _above(found: Mapping[str, float | str], ceiling: float, form: str) -> list[str]:
    """The values above a ceiling, in one sentence, if there are any."""
    above = [
        f"{what}: {value if isinstance(value, str) else form.format(value)}"
        for what, value in found.items()
        if isinstance(value, str) or value > ceiling
    ]
    return [f"{', '.join(above)}; at most {form.format(ceiling)}"] if above else []


def _regions(plan: DeploymentPlan) -> list[str]:
    return sorted({s.machine.region for s in plan.file.sites if s.is_of_cloud})


def _table(plan: DeploymentPlan) -> carbon.CarbonTable:
    return carbon.load(plan.path.resolve().parent / plan.file.start.carbon)


def _check_regions(plan: DeploymentPlan) -> None:
    known = {row.region for row in _table(plan).intensity}
    if unknown := [region for region in _regions(plan) if region not in known]:
        raise JobError(
            f"{plan.file.start.carbon} has no row of {', '.join(unknown)}",
            key="start.carbon",
        )


def _intensities(plan: DeploymentPlan, now: float) -> Mapping[str, float | str]:
    """Grams of CO2-equivalent per kWh by region, or why they are not known."""
    try:
        table = _table(plan)
    except JobError as error:  # It may be rewritten just now.
        return {plan.file.start.carbon: f"unknown: {error}"}
    found = {region: table.at(region, now) for region in _regions(plan)}
    unknown = "unknown: no row of the table is for now"
    return {r: unknown if grams is None else grams for r, grams in found.items()}


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


class _SpotPrices:
    """Dollars of an hour of each spot machine, read again from time to time."""

    def __init__(self, plan: DeploymentPlan, pools_of: PoolsOf, clock: Clock) -> None:
        self._plan, self._pools_of, self._clock = plan, pools_of, clock
        self._pools: Mapping[str, ComputePool] | None = None
        self._found: dict[str, float | str] = {}
        self._next_read = -1.0

    def read(self) -> Mapping[str, float | str]:
        """Return the price of each machine, or why it is not known."""
        now = self._clock.monotonic()
        if now >= self._next_read:
            is_first, self._next_read = not self._found, now + _READ_SECONDS
            for site in self._plan.file.sites:
                machine = site.machine
                if not site.is_spot:
                    continue
                what = f"a spot {machine.type} in {machine.region}"
                try:
                    self._found[what] = self._price(site)
                except (ComputeError, JobError) as error:
                    if is_first:
                        raise
                    # The price table may be rewritten just now.
                    self._found[what] = f"unknown: {error}"
        return self._found

    def _price(self, site: SiteMachine) -> float:
        """The highest of the zones in which it may be launched."""
        if self._pools is None:
            self._pools = self._pools_of()
        machine, now = site.machine, self._clock.now()
        pool = self._pools[site.pool]
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
