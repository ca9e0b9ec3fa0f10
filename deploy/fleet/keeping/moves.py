"""Move sites between spot machines and machines on demand, so that a run is in time.

The rule is ``choosing.choice``, as in the study of ``benchmarks/spot_policy.py``, where
the row `as deployed` knows what is known here: prices that the cloud publishes, or the
price table, and what was seen of own machines (``spot_record``). Every decision that
changes something is a line of ``decisions.jsonl`` in the deployment's folder.

A round is the unit of work that is kept: a machine that is lost costs a start and the
round that it was in. A site moves between two rounds if the deadline could still be
kept after such a loss. To another zone it moves only then, because that saves money
and is never urgent. A site whose machine was lost may wait for a lower price.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from cloud_adapters.compute.pool import Market, Node
from deploy.fleet.choosing import decision_log
from deploy.fleet.choosing.choice import Action, Choice, MachineOffer, decide
from deploy.fleet.choosing.decision_log import DecisionRow
from deploy.fleet.choosing.spot_history import (
    Sighting,
    history,
    is_believed,
    place_of,
    situation,
)
from deploy.fleet.deployment_file import DeploymentPlan
from deploy.fleet.keeping.missed_deadline import MissedDeadline
from deploy.fleet.keeping.run_progress import WorkLeft
from deploy.fleet.keeping.site_machines import (
    own_machine,
    rest_of_work,
    role_of,
    tried_first,
)
from deploy.fleet.keeping.site_offers import SiteOffers
from deploy.fleet.keeping.spot_record import SpotRecord
from deploy.fleet.prices import Prices
from deploy.fleet.reconcile import ROLE
from deploy.fleet.tables.site_machine import SiteMachine

_HOUR = 3600.0

Tell = Callable[[str], None]


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
            tell: Called with a word about every move, and about a missed deadline.
        """
        self._folder, self._hours = plan.folder, plan.file.deadline_hours or math.inf
        self._missed = MissedDeadline(self._hours, tell)
        self._boot_hours = plan.file.start.machine_minutes / 60.0
        self._progress, self._tell, self._record = progress, tell, record
        self._movable = {s.name: s for s in plan.file.sites if s.is_movable}
        self._offers = SiteOffers(movable=self._movable, prices=prices, record=record)
        self._alive: dict[str, Node] = {}
        self._is_first = True
        self._changes: Counter[str] = Counter()
        self._decided: tuple[int, Counter[str]] | None = None
        # Decisions are made again after a slot: prices change.
        self._decided_at, self._due = -math.inf, math.inf
        self.waiting: frozenset[str] = frozenset()
        # What was last reported of each role: the same decision is not news.
        self._told: dict[str, tuple[Action, str]] = {}

    def moved(
        self, plan: DeploymentPlan, nodes: Sequence[Node], now: float
    ) -> DeploymentPlan:
        """Return the deployment with the machines that it should have now.

        Nothing is decided again before a round has ended, a machine was lost or
        refused, or a slot of the policy's time is over. Roles in ``waiting`` shall have
        no machine until then, although there may be one.
        """
        self._note(plan, nodes, now)
        progress = self._progress()
        if progress is None:
            return plan
        self._missed.look(progress, now)
        state = progress.rounds_left, self._changes.copy()
        # A deadline also comes nearer when no round ends; clocks are set back, too.
        is_over = not self._decided_at <= now < self._due
        is_due = is_over or self._is_late(progress, now)
        if state == self._decided and not is_due:
            return plan
        if self._decided is None or self._decided[1] != state[1]:
            self._told.clear()
        self._decided, self._decided_at, self._due = state, now, math.inf
        self.waiting = frozenset()
        sites = [
            self._site(site, plan, nodes, progress, now)
            if site.name in self._movable and progress.rounds_left
            else site
            for site in plan.file.sites
        ]
        return replace(plan, file=replace(plan.file, sites=tuple(sites)))

    def leaving(self, plan: DeploymentPlan, nodes: Sequence[Node]) -> frozenset[str]:
        """IDs of machines in zones that their sites shall leave, as ``moved`` said."""
        return frozenset(
            node.id
            for site in plan.file.sites
            if site.machine.market == Market.SPOT.value
            for node in nodes
            if node.labels.get(ROLE) == role_of(site)
            and node.state.works
            and node.market is Market.SPOT
            and self._is_left(site, node)
        )

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
        round_hours, done = progress.round_seconds / _HOUR, progress.done_hours(now)
        spare = self._left_hours(progress, now) - self._boot_hours
        spare -= progress.rounds_left * round_hours - done
        return spare >= round_hours

    def reconsider(self) -> None:
        """Decide again at the next look: the last decision was not carried out."""
        self._decided = None
        self._told.clear()

    def note_refused(
        self, plan: DeploymentPlan, roles: Collection[str], now: float
    ) -> None:
        """Note that spot machines of some roles were refused in all their zones."""
        for site in plan.file.sites:
            role, is_spot = role_of(site), site.machine.market == Market.SPOT.value
            if role in roles and site.name in self._movable and is_spot:
                seen = [
                    Sighting(zone=place_of(offer), at=now, has_capacity=False)
                    for offer in self._offers.spots(site, now)
                ]
                self._record.note(site, *seen)
                self._changes[role] += 1

    def note_ended(self, now: float) -> None:
        """Note that the spot machines of the last look worked until now.

        They are ended with their run, and the next run on this deployment needs to know
        how long they had lasted.

        Args:
            now: Seconds since 1970.
        """
        for site in self._movable.values():
            seen = [
                Sighting(
                    zone=node.zone or site.machine.region,
                    at=now,
                    has_capacity=True,
                    is_given_up=True,
                )
                for node in self._alive.values()
                if node.labels.get(ROLE) == role_of(site) and node.market is Market.SPOT
            ]
            self._record.note(site, *seen)
        self._alive = {}

    def _is_late(self, progress: WorkLeft, now: float) -> bool:
        work = progress.rounds_left * progress.round_seconds / _HOUR
        left = self._left_hours(progress, now)
        return left < work + 2 * self._boot_hours

    def _left_hours(self, progress: WorkLeft, now: float) -> float:
        return max(0.0, self._hours - (now - progress.started) / _HOUR)

    def _note(self, plan: DeploymentPlan, nodes: Sequence[Node], now: float) -> None:
        """Note spot machines that are there for the first time, or no longer."""
        alive = {node.id: node for node in nodes if node.state.works}
        if (
            self._is_first
        ):  # An earlier command may have seen machines that ended since.
            for site in self._movable.values():
                self._record.note_ended_unseen(site, alive.values(), now)
        self._is_first = False
        ended = {node.id for node in nodes if node.failed or node.finished}
        new = [node for node in alive.values() if node.id not in self._alive]
        gone = [node for node in self._alive.values() if node.id not in alive]
        for site in plan.file.sites:
            role = role_of(site)
            seen = [
                Sighting(
                    zone=node.zone or site.machine.region,
                    at=now,
                    has_capacity=node in new or is_given_up,
                    is_given_up=is_given_up,
                )
                for node in (*new, *gone)
                if node.labels.get(ROLE) == role and node.market is Market.SPOT
                # Its zone took back none that was replaced or has ended by itself.
                for is_given_up in [
                    node in gone and (node.id in ended or self._is_left(site, node))
                ]
            ]
            if site.name in self._movable:
                self._record.note(site, *seen)
            self._changes[role] += sum(n.labels.get(ROLE) == role for n in gone)
        self._alive = alive

    def _is_left(self, site: SiteMachine, node: Node) -> bool:
        """Whether a spot machine is in a market or a zone that its site has left."""
        if site.machine.market != Market.SPOT.value:
            return True
        movable = self._movable.get(site.name)
        zones = () if movable is None else movable.machine.zones
        return node.zone in zones and node.zone not in site.machine.zones

    def _site(
        self,
        site: SiteMachine,
        plan: DeploymentPlan,
        nodes: Sequence[Node],
        progress: WorkLeft,
        now: float,
    ) -> SiteMachine:
        own = own_machine(site, nodes)
        spots = self._offers.spots(self._in_file(site), now)
        if own is not None and own.market is Market.SPOT:
            is_known = any(o.zone in {own.zone, ""} for o in spots)
            # From a zone that the file does not name, it only moves to on demand.
            spots = spots if is_known else [replace(spots[0], zone=own.zone)]
        reserve = self._offers.reserve(site)
        rest = rest_of_work(
            progress,
            own,
            [*spots, reserve],
            left_hours=self._left_hours(progress, now),
            boot_hours=self._boot_hours,
            now=now,
        )
        stall = self._offers.others_hourly(plan, site)
        rest = replace(rest, stall_dollars_per_hour=stall)
        self._due = min(self._due, now + rest.slot_hours * _HOUR)
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
        if own is None:
            return self._replaced(site, choice, spots, now)
        return self._changed(site, own, choice, now)

    def _replaced(
        self,
        site: SiteMachine,
        choice: Choice,
        spots: Sequence[MachineOffer],
        now: float,
    ) -> SiteMachine:
        """The site without a machine: which to launch now, or to launch none."""
        # If none seems to be available, to wait is to go on asking for one.
        if choice.offer is None and any(offer.is_available for offer in spots):
            self.waiting |= {role_of(site)}
            self._log(role_of(site), choice, now)
            return site
        market = Market.SPOT if choice.offer is None else choice.offer.market
        if market.value != site.machine.market:
            self._log(role_of(site), choice, now)
            site = self._movable[site.name].in_market(market.value)
        zone = "" if choice.offer is None else choice.offer.zone
        return tried_first(self._in_file(site), zone)

    def _changed(
        self,
        site: SiteMachine,
        own: Node,
        choice: Choice,
        now: float,
    ) -> SiteMachine:
        """The site with a machine, which it keeps until it has the next one."""
        offer = choice.offer
        if offer is None:
            return site
        in_file = self._movable[site.name]
        if offer.market.value != site.machine.market:
            self._log(role_of(site), choice, now)
            return tried_first(in_file.in_market(offer.market.value), offer.zone)
        is_between_zones = choice.action is Action.MOVE and own.market is Market.SPOT
        # A loss of the round can be made up for: else it would stay, or be on demand.
        if not is_between_zones or offer.zone not in in_file.machine.zones:
            return site
        self._log(role_of(site), choice, now)
        return replace(site, machine=replace(site.machine, zones=(offer.zone,)))

    def _in_file(self, site: SiteMachine) -> SiteMachine:
        """The site with all zones of the deployment file."""
        zones = self._movable[site.name].machine.zones
        return replace(site, machine=replace(site.machine, zones=zones))

    def _log(self, role: str, choice: Choice, now: float) -> None:
        news = choice.action, "" if choice.offer is None else choice.offer.name
        if self._told.get(role) == news:
            return
        self._told[role] = news
        self._tell(f"{role}: {choice.action.value}: {choice.reason}")
        row = DecisionRow(
            at=now,
            role=role,
            action=choice.action.value,
            offer=None if choice.offer is None else choice.offer.name,
            reason=choice.reason,
        )
        decision_log.append(self._folder, row)
