"""Where a site's machine runs: a spot machine until the deadline needs one on demand.

One rule for spot: the cheapest zone that has a spot machine, until the latest time from
which a machine on demand can still finish the job after a loss; on demand from then on.
So the deadline is kept whatever the market does. ``benchmarks/spot_policy.py`` compares
its cost with that of hindsight.

A round is the unit of work that is kept: a machine that is lost costs a start and the
round that it was in.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from cloud_adapters.compute.pool import Market, Node
from deploy.fleet import spending
from deploy.fleet.deployment_file import DeploymentPlan
from deploy.fleet.reconcile import ROLE, SITE_PREFIX
from deploy.fleet.run_progress import MissedDeadline, WorkLeft
from deploy.fleet.tables.site_machine import SiteMachine

_HOUR = 3600.0
# A round may take longer than the median one, of which this is a share.
_MARGIN = 0.25

Tell = Callable[[str], None]


def role_of(site: SiteMachine) -> str:
    """Role of a site's machine."""
    return f"{SITE_PREFIX}{site.name}"


def own_machine(site: SiteMachine, nodes: Sequence[Node]) -> Node | None:
    """The newest machine of a site that works; None if it has none."""
    own = [n for n in nodes if n.labels.get(ROLE) == role_of(site) and n.state.works]
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
                f"{role_of(site)}: on demand from now on: {work:.1f} h of work and the "
                f"loss of a spot machine do not fit into the {left:.1f} h before the "
                "deadline"
            )
        self._moved.add(site.name)
        return site.in_market(market.value)

    def _left_hours(self, progress: WorkLeft, now: float) -> float:
        return self._hours - (now - progress.started) / _HOUR
