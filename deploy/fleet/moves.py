"""Move sites between spot machines and machines on demand, so that a run is in time.

The rule is ``choosing.choice``; here are its inputs. Of the market no more is known
than the price table and the losses that were seen, so a site stays on spot machines as
long as the loss of one could still be made up for. Every decision that changes
something is a line of ``decisions.jsonl`` in the deployment's folder.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from cloud_adapters.compute.pool import Market, Node, NodeState
from deploy.fleet.choosing import decision_log
from deploy.fleet.choosing.choice import Choice, MachineOffer, Situation, decide
from deploy.fleet.choosing.decision_log import DecisionRow
from deploy.fleet.choosing.outlook import Left, MarketHistory, foresee
from deploy.fleet.deployment_file import CLOUDS, DeploymentPlan, SiteMachine
from deploy.fleet.prices import Prices
from deploy.fleet.reconcile import ROLE, SITE_PREFIX
from federation.errors import JobError
from monitoring.runs.run_folder import RunFolder

_HOUR = 3600.0
_MOST_SLOTS = 200
# Slots that every offer is taken to have lasted before anything was seen of it.
_HOPED_SLOTS = 40

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkLeft:
    """How far a run is.

    Attributes:
        started: When it began, in seconds since 1970.
        rounds_left: Rounds to come.
        round_seconds: Median time of a round so far.
    """

    started: float
    rounds_left: int
    round_seconds: float


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
        )


class Mover:
    """Decides for all sites of a deployment that a deadline may move."""

    def __init__(
        self,
        plan: DeploymentPlan,
        prices: Prices,
        progress: Callable[[], WorkLeft | None],
        tell: Tell,
    ) -> None:
        """Begin.

        Args:
            plan: The deployment, which has a deadline.
            prices: The table.
            progress: How far its run is.
            tell: Called with a word about every move.
        """
        self._folder, self._hours = plan.folder, plan.file.deadline_hours or math.inf
        self._boot_hours = plan.file.start.machine_minutes / 60.0
        self._prices, self._progress, self._tell = prices, progress, tell
        self._movable = {s.name: s for s in plan.file.sites if is_movable(s)}
        self._alive: dict[str, str] = {}
        self._losses: Counter[str] = Counter()
        self._round: tuple[int, Counter[str]] | None = None

    def moved(
        self, plan: DeploymentPlan, nodes: Sequence[Node], now: float
    ) -> DeploymentPlan:
        """Return the deployment with the machines that it should have now.

        Nothing is decided again before a round has ended or a machine was lost.
        """
        self._note_losses(nodes)
        progress = self._progress()
        if progress is None:
            return plan
        state = progress.rounds_left, self._losses.copy()
        # A deadline also comes nearer when no round ends.
        if state == self._round and not self._is_late(progress, now):
            return plan
        self._round = state
        sites = [
            self._site(site, nodes, progress, now)
            if site.name in self._movable and progress.rounds_left
            else site
            for site in plan.file.sites
        ]
        return replace(plan, file=replace(plan.file, sites=tuple(sites)))

    def _is_late(self, progress: WorkLeft, now: float) -> bool:
        work = progress.rounds_left * progress.round_seconds / _HOUR
        left = self._hours - (now - progress.started) / _HOUR
        return left < work + 2 * self._boot_hours

    def _note_losses(self, nodes: Sequence[Node]) -> None:
        alive = {n.id: n.labels.get(ROLE, "") for n in nodes if n.state in _WORKS}
        for gone in self._alive.keys() - alive.keys():
            self._losses[self._alive[gone]] += 1
        self._alive = alive

    def _site(
        self,
        site: SiteMachine,
        nodes: Sequence[Node],
        progress: WorkLeft,
        now: float,
    ) -> SiteMachine:
        role = f"{SITE_PREFIX}{site.name}"
        offers = [self._offer(site, market) for market in Market]
        ours = [n for n in nodes if n.labels.get(ROLE) == role and n.state in _WORKS]
        own = ours[-1] if ours else None
        current = [o.name for o in offers if own is not None and o.market is own.market]
        situation = self._situation(offers, self._losses[role], progress, now)
        age = math.inf if own is None else (now - own.launched) / _HOUR
        situation = replace(
            situation,
            current=current[0] if current else "",
            boot_left_hours=max(0.0, situation.boot_hours - age),
        )
        choice = decide(situation, offers, now)
        # To wait is to try spot machines: none is there unless a launch succeeds.
        market = Market.SPOT if choice.offer is None else choice.offer.market
        if market.value == site.machine.market:
            return site
        self._log(role, choice, now)
        return self._movable[site.name].in_market(market.value)

    def _situation(
        self,
        offers: Sequence[MachineOffer],
        losses: int,
        progress: WorkLeft,
        now: float,
    ) -> Situation:
        deadline = progress.started + self._hours * _HOUR
        left_hours = max(0.0, (deadline - now) / _HOUR)
        work_hours = progress.rounds_left * progress.round_seconds / _HOUR
        slot_hours = max(
            self._boot_hours, left_hours / _MOST_SLOTS, work_hours / _MOST_SLOTS
        )
        prices = {offer.market: offer.dollars_per_hour * slot_hours for offer in offers}
        names = [offer.name for offer in offers if offer.market is Market.SPOT]
        seen = [*[True] * _HOPED_SLOTS, *[False, True] * losses]
        left = Left(
            slots=int(left_hours / slot_hours), work=math.ceil(work_hours / slot_hours)
        )
        outlook = foresee(
            MarketHistory(
                names=names,
                prices_zt=np.full((1, len(seen)), prices[Market.SPOT]),
                available_zt=np.array([seen]),
            ),
            left,
            boot=1,
            on_demand=prices[Market.ON_DEMAND],
        )
        return Situation(
            work_hours=work_hours,
            deadline=deadline,
            boot_hours=self._boot_hours,
            # A look is every few seconds, but a round is not moved in its middle.
            slot_hours=slot_hours,
            outlook=outlook,
        )

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
        if not is_movable(site):
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


def is_movable(site: SiteMachine) -> bool:
    """Whether a deadline may move a site: its file says spot, and it has a home.

    What a cluster's machines cost is not known well enough to choose between them.
    """
    is_spot = site.machine.market == Market.SPOT.value
    return site.provider in CLOUDS and is_spot and bool(site.home.url)
