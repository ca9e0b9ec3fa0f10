"""Move sites between spot machines and machines on demand, so that a run is in time.

The rule is ``choosing.choice``, as in the study of ``benchmarks/spot_policy.py``, where
the row `as deployed` knows what is known here: prices that the cloud publishes, or the
price table, and what was seen of own machines (``spot_record``). Every decision that
changes something is a line of ``decisions.jsonl`` in the deployment's folder.

A round is the unit of work that is kept: a machine that is lost costs a start and the
round that it was in. A site moves between two rounds if the deadline could still be
kept after such a loss; between spot machines it does not move.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from statistics import median

from cloud_adapters.compute.pool import Market, Node, NodeState
from deploy.fleet.choosing import decision_log
from deploy.fleet.choosing.choice import Choice, MachineOffer, decide
from deploy.fleet.choosing.decision_log import DecisionRow
from deploy.fleet.choosing.spot_history import (
    RestOfWork,
    Sighting,
    history,
    is_believed,
    place_of,
    situation,
)
from deploy.fleet.deployment_file import DeploymentPlan, SiteMachine
from deploy.fleet.keeping.spot_record import SpotRecord
from deploy.fleet.prices import Prices
from deploy.fleet.reconcile import ROLE, SITE_PREFIX
from federation.errors import JobError
from monitoring.runs.run_folder import RunFolder

_HOUR = 3600.0
_MOST_SLOTS = 200
# A round may take longer than the median one, of which this is a share.
_MARGIN = 0.25

Tell = Callable[[str], None]


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

    def done_hours(self, now: float) -> float:
        """How much of the round in progress is done, at the median pace."""
        if self.round_began is None:
            return 0.0
        return min(max(0.0, now - self.round_began), self.round_seconds) / _HOUR


class ReadProgress:
    """Reads a run's progress from its events, when there are new ones."""

    def __init__(self, run: RunFolder, rounds: int) -> None:
        """Of a run with a number of rounds."""
        self._run, self._rounds = run, rounds
        self._size = -1
        self._found: WorkLeft | None = None

    def __call__(self) -> WorkLeft | None:
        """How far it is; None before the end of its first round."""
        if not self._run.exists():
            return None
        size = self._run.events.stat().st_size
        if size != self._size:
            self._size, self._found = size, self._read()
        return self._found

    def _read(self) -> WorkLeft | None:
        view = self._run.view()
        took = [each.finished.seconds for each in view.rounds if each.finished]
        if not took:
            return None
        return WorkLeft(
            started=view.first_started_at,
            rounds_left=max(0, self._rounds - len(took)),
            round_seconds=median(took),
            round_began=None if view.current is None else view.current.started_at,
        )


class Mover:
    """Decides for all sites of a deployment that a deadline may move."""

    def __init__(
        self,
        plan: DeploymentPlan,
        prices: Prices,
        progress: Callable[[], WorkLeft | None],
        record: SpotRecord,
        tell: Tell,
    ) -> None:
        """Begin.

        Args:
            plan: The deployment, which has a deadline.
            prices: The table.
            progress: How far its run is.
            record: What is known of spot machines.
            tell: Called with a word about every move.
        """
        self._folder, self._hours = plan.folder, plan.file.deadline_hours or math.inf
        self._boot_hours = plan.file.start.machine_minutes / 60.0
        self._prices, self._progress, self._tell = prices, progress, tell
        self._record = record
        self._movable = {s.name: s for s in plan.file.sites if s.is_movable}
        self._alive: dict[str, Node] = {}
        self._changes: Counter[str] = Counter()
        self._decided: tuple[int, Counter[str]] | None = None

    def moved(
        self, plan: DeploymentPlan, nodes: Sequence[Node], now: float
    ) -> DeploymentPlan:
        """Return the deployment with the machines that it should have now.

        Nothing is decided again before a round has ended, or a machine was lost or
        refused.
        """
        self._note(plan, nodes, now)
        progress = self._progress()
        if progress is None:
            return plan
        state = progress.rounds_left, self._changes.copy()
        # A deadline also comes nearer when no round ends.
        if state == self._decided and not self._is_late(progress, now):
            return plan
        self._decided = state
        sites = [
            self._site(site, nodes, progress, now)
            if site.name in self._movable and progress.rounds_left
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
        if progress is None or any(_own(site, nodes) is None for site in moving):
            return False
        round_hours, done = progress.round_seconds / _HOUR, progress.done_hours(now)
        spare = self._left_hours(progress, now) - self._boot_hours
        spare -= progress.rounds_left * round_hours - done
        return spare >= round_hours

    def reconsider(self) -> None:
        """Decide again at the next look: the last decision was not carried out."""
        self._decided = None

    def note_refused(
        self, plan: DeploymentPlan, roles: Collection[str], now: float
    ) -> None:
        """Note that spot machines of some roles were refused in all their zones."""
        for site in plan.file.sites:
            role, is_spot = _role(site), site.machine.market == Market.SPOT.value
            if role in roles and site.name in self._movable and is_spot:
                seen = [
                    Sighting(zone=place_of(offer), at=now, has_capacity=False)
                    for offer in self._spots(site, now)
                ]
                self._record.note(site, *seen)
                self._changes[role] += 1

    def _is_late(self, progress: WorkLeft, now: float) -> bool:
        work = progress.rounds_left * progress.round_seconds / _HOUR
        left = self._left_hours(progress, now)
        return left < work + 2 * self._boot_hours

    def _left_hours(self, progress: WorkLeft, now: float) -> float:
        return max(0.0, self._hours - (now - progress.started) / _HOUR)

    def _note(self, plan: DeploymentPlan, nodes: Sequence[Node], now: float) -> None:
        """Note spot machines that are there for the first time, or no longer."""
        alive = {node.id: node for node in nodes if node.state in _WORKS}
        ended = {node.id for node in nodes if node.failed or node.finished}
        for site in plan.file.sites:
            role = _role(site)
            is_spot = site.machine.market == Market.SPOT.value
            new = [n for n in alive.values() if n.id not in self._alive]
            gone = [n for n in self._alive.values() if n.id not in alive]
            # Those that have ended by themselves say nothing about their zone.
            lost = [n for n in gone if n.id not in ended]
            seen = [
                Sighting(
                    zone=node.zone or site.machine.region, at=now, has_capacity=has
                )
                for has, found in ((True, new), (False, lost))
                for node in found
                # Of those that went, none is meant that was to be replaced.
                if node.labels.get(ROLE) == role
                and node.market is Market.SPOT
                and is_spot
            ]
            if site.name in self._movable:
                self._record.note(site, *seen)
            self._changes[role] += sum(n.labels.get(ROLE) == role for n in gone)
        self._alive = alive

    def _site(
        self,
        site: SiteMachine,
        nodes: Sequence[Node],
        progress: WorkLeft,
        now: float,
    ) -> SiteMachine:
        own = _own(site, nodes)
        spots = self._spots(site, now)
        if own is not None and own.market is Market.SPOT:
            # It stays where it is, or moves to a machine on demand.
            spots = [o for o in spots if o.zone in {own.zone, ""}] or spots[:1]
        reserve = self._offer(site, Market.ON_DEMAND)
        rest = self._rest(own, [*spots, reserve], progress, now)
        sightings = self._record.sightings(site)
        spots = [
            replace(
                offer,
                is_available=offer.name == rest.current
                or is_believed(offer, sightings, now=now, slot_hours=rest.slot_hours),
            )
            for offer in spots
        ]
        known = history(
            spots,
            self._record.prices(site, now),
            sightings,
            now=now,
            slot_hours=rest.slot_hours,
        )
        offers = [*spots, reserve]
        choice = decide(situation(rest, known, offers, now=now), offers, now)
        # To wait is to try spot machines: none is there unless a launch succeeds.
        market = Market.SPOT if choice.offer is None else choice.offer.market
        if market.value != site.machine.market:
            self._log(_role(site), choice, now)
            return self._movable[site.name].in_market(market.value)
        if own is None and choice.offer is not None:
            return _tried_first(site, choice.offer.zone)
        return site

    def _rest(
        self,
        own: Node | None,
        offers: Sequence[MachineOffer],
        progress: WorkLeft,
        now: float,
    ) -> RestOfWork:
        left_hours = self._left_hours(progress, now)
        round_hours = lost_hours = progress.round_seconds / _HOUR
        work_hours = progress.rounds_left * round_hours
        slots = max(left_hours, work_hours) / _MOST_SLOTS
        current = [] if own is None else [o for o in offers if o.market is own.market]
        age = math.inf if own is None else (now - own.launched) / _HOUR
        if own is not None and own.market is Market.SPOT:
            work_hours -= progress.done_hours(now)
            # So that it is known a round before it has to leave.
            lost_hours += _MARGIN * round_hours
        return RestOfWork(
            work_hours=work_hours,
            left_hours=left_hours,
            boot_hours=self._boot_hours,
            lost_hours=lost_hours,
            slot_hours=max(self._boot_hours, slots),
            current=current[0].name if current else "",
            boot_left_hours=max(0.0, self._boot_hours - age),
        )

    def _spots(self, site: SiteMachine, now: float) -> Sequence[MachineOffer]:
        """A spot machine in each zone, at the price that is published there."""
        newest = {
            each.zone: each.dollars_per_hour for each in self._record.prices(site, now)
        }
        zones = site.machine.zones or sorted(newest) or ("",)
        offer = self._offer(site, Market.SPOT)
        return [
            replace(
                offer,
                zone=zone,
                dollars_per_hour=newest.get(zone, offer.dollars_per_hour),
            )
            for zone in zones
        ]

    def _offer(self, site: SiteMachine, market: Market) -> MachineOffer:
        machine = site.machine
        return MachineOffer(
            provider=site.provider,
            region=machine.region,
            machine=machine.type,
            market=market,
            dollars_per_hour=_hourly(
                self._movable[site.name], market.value, self._prices
            ),
        )

    def _log(self, role: str, choice: Choice, now: float) -> None:
        self._tell(f"{role}: {choice.action.value}: {choice.reason}")
        row = DecisionRow(
            at=now,
            role=role,
            action=choice.action.value,
            offer=None if choice.offer is None else choice.offer.name,
            reason=choice.reason,
        )
        decision_log.append(self._folder, row)


def check_prices(plan: DeploymentPlan, prices: Prices) -> None:
    """Refuse a deadline for machines of unknown price, before anything is started.

    Args:
        plan: The deployment.
        prices: The table.

    Raises:
        JobError: The price of a machine that a deadline may move is neither stated nor
            in the table, in one market or the other.
    """
    if plan.file.deadline_hours is None:
        return
    for index, site in enumerate(plan.file.sites):
        if not site.is_movable:
            continue
        for market, name in (
            (Market.SPOT, "dollars_per_hour"),
            (Market.ON_DEMAND, "on_demand_dollars_per_hour"),
        ):
            try:
                _hourly(site, market.value, prices)
            except JobError as error:
                raise JobError(
                    f"{plan.path}: is missing: deadline_hours weighs machines by their "
                    f"prices, and {error.reason}",
                    key=f"sites[{index}].{name}",
                ) from None


def _hourly(site: SiteMachine, market: str, prices: Prices) -> float:
    """Dollars of an hour of a site's machine in a market: stated, or of the table.

    Raises:
        JobError: Neither.
    """
    wanted = site.in_market(market)
    if wanted.dollars_per_hour is not None:
        return wanted.dollars_per_hour
    place = (site.provider, site.machine.region, site.machine.priced_as)
    return prices.hourly(*place, spot=market == Market.SPOT.value)


_WORKS = frozenset({NodeState.STARTING, NodeState.RUNNING})


def _role(site: SiteMachine) -> str:
    return f"{SITE_PREFIX}{site.name}"


def _own(site: SiteMachine, nodes: Sequence[Node]) -> Node | None:
    """The newest machine of a site that works."""
    own = [n for n in nodes if n.labels.get(ROLE) == _role(site) and n.state in _WORKS]
    return own[-1] if own else None


def _tried_first(site: SiteMachine, zone: str) -> SiteMachine:
    """The site with a zone before its others, as a launch tries them."""
    zones = site.machine.zones
    if zone not in zones:
        return site
    others = (each for each in zones if each != zone)
    return replace(site, machine=replace(site.machine, zones=(zone, *others)))
