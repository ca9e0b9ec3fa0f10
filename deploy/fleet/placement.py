"""Where a site's machine runs: its market, and its type if the file leaves that open.

One rule for spot: the cheapest zone that has a spot machine, until the latest time from
which a machine on demand can still finish the job after a loss; on demand from then on.
So the deadline is kept whatever the market does. ``benchmarks/spot_policy.py`` compares
its cost with that of hindsight. A round is the unit of work that is kept: a machine
that is lost costs a start and the round that it was in.

A site states its region and its zones, and no other is looked at: its data does not
leave them. Only types with a price in the table are candidates for an open type.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from cloud_adapters.compute.machine_types import (
    MachineCatalogue,
    MachineType,
    RequiresSpec,
)
from cloud_adapters.compute.pool import ComputePool, Market, Node, NodeState
from deploy.fleet import prices as price_table, spending
from deploy.fleet.machine_spec import SiteMachine
from deploy.fleet.prices import Prices
from deploy.fleet.reconcile import DEPLOYMENT, ROLE
from deploy.fleet.spec import DeploymentPlan, Tell
from deploy.fleet.state import pools_of
from federation.errors import JobError
from federation.protocols import Clock
from monitoring.runs.run_folder import RunFolder
from monitoring.views.run_view import RunView

_HOUR = 3600.0

# A round may take longer than the median one, of which this is a share.
_MARGIN = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkLeft:
    """How far a run is.

    Attributes:
        started: When it began, in seconds since 1970.
        rounds_left: Rounds to come.
        round_seconds: Median time of a round so far.
        round_began: When the round in progress began; None between two rounds.
    """

    started: float
    rounds_left: int
    round_seconds: float
    round_began: float | None = None

    def work_hours(self, now: float) -> float:
        """How much work is left, at the median pace."""
        return self.rounds_left * self.round_seconds / _HOUR - self.done_hours(now)

    def done_hours(self, now: float) -> float:
        """How much of the round in progress is done, at the median pace."""
        if self.round_began is None:
            return 0.0
        return min(max(0.0, now - self.round_began), self.round_seconds) / _HOUR


class SeenRun:
    """A run as its events say, read again when there are new ones."""

    def __init__(self, run: RunFolder) -> None:
        """Begin; nothing is read yet."""
        self._run, self._size = run, -1
        self._view: RunView | None = None

    def view(self) -> RunView | None:
        """Return what its events say; None before it begins."""
        if self._run.exists():
            size = self._run.events.stat().st_size
            if size != self._size:
                self._size, self._view = size, self._run.view()
        return self._view


def work_left(run: SeenRun, rounds: int) -> WorkLeft | None:
    """How far a run with a number of rounds is; None before the end of its first."""
    view = run.view()
    if view is None:
        return None
    took = [each.finished.seconds for each in view.rounds if each.finished]
    if not took:
        return None
    return WorkLeft(
        started=view.first_started_at,
        rounds_left=max(0, rounds - len(took)),
        round_seconds=median(took),
        round_began=None if view.current is None else view.current.started_at,
    )


class MissedDeadline:
    """Reports each of the two once."""

    def __init__(self, hours: float, tell: Callable[[str], None]) -> None:
        """Begin.

        Args:
            hours: ``deadline_hours``, after the run has begun.
            tell: Called with a word about the deadline.
        """
        self._hours, self._tell = hours, tell
        self._is_expected = self._is_past = False

    def look(self, progress: WorkLeft, now: float) -> None:
        """Report what the progress of a run calls for.

        Args:
            progress: How far the run is.
            now: Seconds since 1970.
        """
        count = progress.rounds_left
        if not count or self._is_past:
            return
        work = progress.work_hours(now)
        left = self._hours - (now - progress.started) / _HOUR
        rest = f"{count} round{'s' * (count > 1)} left, {work:.1f} h at the pace so far"
        if left <= 0:
            self._is_past = True
            self._tell(
                f"deadline_hours = {self._hours:g} are over, with {rest}: the run "
                "continues until max_hours or max_dollars"
            )
        elif work > left and not self._is_expected:
            self._is_expected = True
            self._tell(
                f"deadline_hours = {self._hours:g} will probably be missed: {rest}, in "
                f"{left:.1f} h"
            )


def own_machine(site: SiteMachine, nodes: Sequence[Node]) -> Node | None:
    """The newest machine of a site that works; None if it has none."""
    own = [n for n in nodes if n.labels.get(ROLE) == site.role and n.state.works]
    return own[-1] if own else None


def market_now(
    *,
    left_hours: float,
    work_hours: float,
    round_hours: float,
    boot_hours: float,
    boot_left_hours: float,
) -> Market:
    """Choose the market of a site's machine.

    The worst that a spot machine can do is to vanish just before its round ends. Then
    one on demand has to start and do all of that round again.

    Args:
        left_hours: Until the deadline.
        work_hours: What the rounds to come take, less what is done of the present one.
        round_hours: What a round takes, with a margin.
        boot_hours: From the request for a machine until its site works.
        boot_left_hours: How long the site's spot machine still takes to start: all of
            ``boot_hours`` if it has none.

    Returns:
        Spot if the deadline would survive such a loss, else on demand.
    """
    needed = boot_left_hours + work_hours + round_hours + boot_hours
    return Market.SPOT if left_hours >= needed else Market.ON_DEMAND


def check_deadline(plan: DeploymentPlan, *, now: float, tell: Tell) -> None:
    """Refuse a deadline whose machines on demand a budget could not count.

    Args:
        plan: The deployment.
        now: Seconds since 1970, to tell how old prices are.
        tell: Called with a word about a deadline without an effect.

    Raises:
        JobError: There is a budget, and a price of a machine on demand is missing.
    """
    if plan.file.deadline_hours is None:
        return
    if not any(site.is_movable for site in plan.file.sites):
        tell(
            "deadline_hours changes nothing: no site is on a spot machine of a cloud, "
            "from which it could move"
        )
        return
    sites = tuple(
        site.in_market(Market.ON_DEMAND.value) if site.is_movable else site
        for site in plan.file.sites
    )
    moved = replace(plan, file=replace(plan.file, sites=sites))
    spending.budget_prices(moved, now=now)


class Placement:
    """Applies the rule to all sites of a deployment that may move between markets."""

    def __init__(
        self,
        plan: DeploymentPlan,
        progress: Callable[[], WorkLeft | None],
        tell: Tell,
    ) -> None:
        """Begin.

        Args:
            plan: The deployment.
            progress: How far its run is; None before the end of its first round.
            tell: Called with a word about every move, and about a missed deadline.
        """
        self._hours = plan.file.deadline_hours or math.inf
        self._missed = MissedDeadline(self._hours, tell)
        self._boot_hours = plan.file.start.machine_minutes / 60.0
        self._progress, self._tell = progress, tell
        self._moved: set[str] = set()

    def placed(
        self, plan: DeploymentPlan, nodes: Sequence[Node], now: float
    ) -> DeploymentPlan:
        """Return the deployment with the machines that it should have now.

        Args:
            plan: The deployment with the machines that it has, or was to have.
            nodes: All its nodes.
            now: Seconds since 1970.
        """
        progress = self._progress()
        if progress is None:
            return plan
        self._missed.look(progress, now)
        sites = [
            self._site(site, own_machine(site, nodes), progress, now)
            if site.is_movable and progress.rounds_left
            else site
            for site in plan.file.sites
        ]
        return replace(plan, file=replace(plan.file, sites=tuple(sites)))

    def may_wait(
        self,
        old: DeploymentPlan,
        new: DeploymentPlan,
        nodes: Sequence[Node],
        now: float,
    ) -> bool:
        """Whether a move may wait for the end of the round.

        Args:
            old: The machines that there are.
            new: Those that are wanted.
            nodes: All nodes of the deployment.
            now: Seconds since 1970.

        Returns:
            True if all machines that would be replaced work, and the deadline could be
            kept although one is lost just before the round ends.
        """
        progress = self._progress()
        moving = [
            before
            for before, after in zip(old.file.sites, new.file.sites, strict=True)
            if before != after
        ]
        if progress is None or any(own_machine(site, nodes) is None for site in moving):
            return False
        needed = progress.work_hours(now) + progress.round_seconds / _HOUR
        return self._left_hours(progress, now) >= needed + self._boot_hours

    def _site(
        self,
        site: SiteMachine,
        own: Node | None,
        progress: WorkLeft,
        now: float,
    ) -> SiteMachine:
        left, work = self._left_hours(progress, now), progress.work_hours(now)
        boot_left = self._boot_hours
        if own is None:  # Nobody does the present round.
            work += progress.done_hours(now)
        else:
            boot_left = max(0.0, boot_left - (now - own.launched) / _HOUR)
        market = market_now(
            left_hours=left,
            work_hours=work,
            round_hours=(1 + _MARGIN) * progress.round_seconds / _HOUR,
            boot_hours=self._boot_hours,
            boot_left_hours=boot_left,
        )
        if market is Market.SPOT:
            return site
        if site.name not in self._moved:  # Until the move, each look comes here.
            self._tell(
                f"{site.role}: on demand from now on: {work:.1f} h of work and the "
                f"loss of a spot machine do not fit into the {left:.1f} h before the "
                "deadline"
            )
        self._moved.add(site.name)
        return site.in_market(market.value)

    def _left_hours(self, progress: WorkLeft, now: float) -> float:
        return self._hours - (now - progress.started) / _HOUR


def with_types(
    plan: DeploymentPlan, *, clock: Clock, tell: Tell, prices: Path | None = None
) -> DeploymentPlan:
    """Name the type of every machine that the file leaves open; see ``resolved``.

    Clouds are asked, and prices read, only if there is one.
    """
    if not any(_is_kept(plan, site) for site in plan.file.sites):
        return plan
    today = price_table.day_of(clock.now())
    table = price_table.load(prices or plan.prices, today=today, warn=tell)
    return resolved(plan, pools_of(plan, clock), table, tell)


def resolved(
    plan: DeploymentPlan, pools: Mapping[str, ComputePool], prices: Prices, tell: Tell
) -> DeploymentPlan:
    """Name the type of every machine that the file leaves open.

    A machine that runs keeps its type, whatever costs less now: it has the site's keys.
    One that a deadline has moved keeps its market, and one with sizes its size.

    Args:
        plan: The deployment.
        pools: Compute services by their names.
        prices: The table.
        tell: Called with a word about every choice.

    Raises:
        JobError: No machine meets what a site requires; the message names what does.
        ComputeError: A service failed.
    """
    sites = []
    for index, site in enumerate(plan.file.sites):
        own, market = site.machine, site.machine.market
        if _is_kept(plan, site):
            node = _running(plan, site, pools[site.pool])
            if node is not None and node.machine in {each.type for each in site.sizes}:
                # A change of size before has chosen it.
                own = replace(own, type=node.machine)
            elif node is not None:
                kind = node.machine if _is_open(site) else own.type
                market = node.market.value if _may_move(plan, site) else own.market
                own = replace(own, type=kind)
            elif _is_open(site):
                hourly, kind = _chosen(plan, index, pools[site.pool], prices)
                own = replace(own, type=kind)
                tell(
                    f"{site.role}: {site.provider} {own.region} {kind} "
                    f"{market} at ${hourly:.3f} an hour is the cheapest that meets "
                    "machine.requires"
                )
        found = replace(site, machine=own).in_market(market)
        sites.append(found.sized(own.type) if site.sizes else found)
    return replace(plan, file=replace(plan.file, sites=tuple(sites)))


def offers(
    site: SiteMachine, types: Sequence[MachineType], prices: Prices
) -> Sequence[tuple[float, str]]:
    """Machines that meet what a site requires: dollars per hour and type, sorted.

    Args:
        site: The site: its region, zones, market and requirements.
        types: Types that its zones have.
        prices: The table.
    """
    machine = site.machine
    found = []
    for each in types:
        hourly = _table_hourly(site, each.name, prices)
        if hourly is not None and not machine.requires.lacking(each):
            found.append((hourly, each.name))
    return sorted(found)


def _chosen(
    plan: DeploymentPlan, index: int, pool: ComputePool, prices: Prices
) -> tuple[float, str]:
    site = plan.file.sites[index]
    if not isinstance(pool, MachineCatalogue):
        raise TypeError(f"{site.pool} describes no types of machines")
    where = (site.provider, site.machine.region)
    priced = (x for x in prices.machines if (x.provider, x.region) == where)
    names = {each.machine for each in priced}
    types = pool.machine_types(names, site.machine.zones) if names else ()
    found = offers(site, types, prices)
    if found:
        return found[0]
    others = [
        f"{each.name} has {_why_not(site, each, prices)}"
        for each in sorted(types, key=lambda each: each.name)
    ]
    zones = ", ".join(site.machine.zones) or site.machine.region
    raise JobError(
        f"{plan.path}: no {site.machine.market} machine of {site.provider} in {zones} "
        f"with a price in the table meets this: {'; '.join(others) or 'there is none'}"
        ". Require less, name another region that the data may be in, or add prices",
        key=f"sites[{index}].machine.requires",
    )


def _why_not(site: SiteMachine, machine: MachineType, prices: Prices) -> str:
    lacking = list(site.machine.requires.lacking(machine))
    if _table_hourly(site, machine.name, prices) is None:
        lacking.append(f"no {site.machine.market} price")
    return " and ".join(lacking)


def _table_hourly(site: SiteMachine, machine: str, prices: Prices) -> float | None:
    place = (site.provider, site.machine.region, machine)
    return prices.machine_price(*place, spot=site.is_spot)


def _running(plan: DeploymentPlan, site: SiteMachine, pool: ComputePool) -> Node | None:
    """The machine that a site has now."""
    role = site.role
    nodes = pool.nodes({DEPLOYMENT: plan.file.name, ROLE: role})
    alive = [node for node in nodes if node.state is not NodeState.GONE]
    return alive[-1] if alive else None


def _may_move(plan: DeploymentPlan, site: SiteMachine) -> bool:
    return plan.file.deadline_hours is not None and site.is_movable


def _is_kept(plan: DeploymentPlan, site: SiteMachine) -> bool:
    """Whether a running machine may differ from what the file says."""
    return _is_open(site) or _may_move(plan, site) or bool(site.sizes)


def _is_open(site: SiteMachine) -> bool:
    return site.machine.requires != RequiresSpec()
