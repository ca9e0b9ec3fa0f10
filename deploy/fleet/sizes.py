"""Between rounds, give the slowest site a larger machine and idle sites smaller ones.

A round lasts as long as its slowest site, and every machine is paid for all of it. So a
machine is too large if its site waits most of the time, and too small if all the others
wait for it.

A site is one machine: it grows by moving to a larger one, with its identity and its
ledgers. What it computes is the job's: batch, records, sampling rates, steps and noise
are the same on every machine. ``resize`` is the rule, and pure; ``Sizer`` finds its
inputs in a run's events, and decides once after each round.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from deploy.fleet import prices as price_table, spending
from deploy.fleet.placement import SeenRun
from deploy.fleet.prices import Prices
from deploy.fleet.reconcile import SITE_PREFIX
from deploy.fleet.spec import DeploymentPlan, Tell
from deploy.fleet.spending import machine_hour
from federation.errors import JobError
from federation.events import SiteAnswered
from federation.protocols import Clock
from monitoring.views.round_view import RoundView
from monitoring.views.run_view import RunView

# A change that saves less than this share of the rest is not worth its trouble.
_LEAST_SAVING = 0.05
# A site that is made smaller must not become the straggler by a little noise.
_MARGIN = 0.9

_HOUR = 3600.0
_ROUNDS = 3
# Seconds of each site in a round, and of the whole round.
_Round = tuple[Mapping[str, float], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSize:
    """A machine that a site may have.

    Attributes:
        machine: Its type.
        speed: Work per second, in any unit that is the same for all sizes of a site.
        dollars_per_hour: Its price.
    """

    machine: str
    speed: float
    dollars_per_hour: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSite:
    """What a site did in the last rounds.

    Attributes:
        name: The site.
        busy_seconds: Its own time in each of the last rounds, the oldest first, all on
            the machine that it has now.
        size: That machine.
        sizes: All machines that its policy and its budget allow.
    """

    name: str
    busy_seconds: Sequence[float]
    size: MachineSize
    sizes: Sequence[MachineSize]


@dataclass(frozen=True, slots=True, kw_only=True)
class FederationLoad:
    """A federation between two rounds.

    Attributes:
        other_seconds: What a round takes besides its slowest site.
        other_dollars_per_hour: What runs besides the sites.
        rounds_left: Rounds to come.
        change_seconds: How long all wait while sites move.
        seconds_left: Until the deadline; None if there is none.
    """

    sites: Sequence[MeasuredSite]
    other_seconds: float
    other_dollars_per_hour: float = 0.0
    rounds_left: int
    change_seconds: float
    seconds_left: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize:
    """A site's next machine.

    Attributes:
        size: The machine that it moves to.
        reason: Why, in words.
    """

    site: str
    size: MachineSize
    reason: str


def resize(load: FederationLoad, *, rounds: int = 3) -> Sequence[Resize]:
    """Choose changes that save enough together; none is an empty answer.

    1. Whether there are enough rounds on the present machines: after a change, so many
       pass before the next, so nothing swings.
    2. A step up for the straggler, a step down for each site that would then still not
       be the straggler: one after another, the best first, while each saves something.
    3. All of them at once, for the seconds of one change, if they save enough of the
       rest's cost; of its time, if the deadline would be missed otherwise.

    Args:
        load: What was measured.
        rounds: So many of the last rounds count.
    """
    # 1.
    if any(len(site.busy_seconds) < rounds for site in load.sites):
        return ()
    busy = {site.name: median(site.busy_seconds[-rounds:]) for site in load.sites}
    seconds, _ = _rest(load, busy, {})
    is_late = load.seconds_left is not None and seconds > load.seconds_left
    # 2.
    changed: dict[str, MachineSize] = {}
    goal = start = _rest(load, busy, changed)[not is_late]
    while True:
        tries = [
            {**changed, site.name: size}
            for site in load.sites
            for size in _steps(load, site, busy, changed, rounds)
        ]
        costs = [_rest(load, busy, each)[not is_late] for each in tries]
        if not costs or min(costs) >= goal:
            break
        goal = min(costs)
        changed = tries[costs.index(goal)]
    # 3.
    pause = load.change_seconds / max(seconds, 1e-9)
    share = 1 - goal / start - pause if start else 0.0
    if share < _LEAST_SAVING:
        return ()
    saved = f"saves {share:.0%} of the {'time' if is_late else 'cost'} of the rest"
    return [
        Resize(
            site=site.name,
            size=changed[site.name],
            reason=f"{_why(load, busy, site, changed[site.name])}; {saved}",
        )
        for site in load.sites
        if site.name in changed
    ]


def dollars(
    load: FederationLoad, changes: Sequence[Resize], *, rounds: int = 3
) -> float:
    """Forecast what the rounds left cost on the machines after changes.

    The seconds of the change are paid for on the new machines, and once more for each
    old machine that runs beside its successor until that is launched.
    """
    busy = {site.name: median(site.busy_seconds[-rounds:]) for site in load.sites}
    sizes = {change.site: change.size for change in changes}
    _, rest = _rest(load, busy, sizes)
    if not changes:
        return rest
    hourly = load.other_dollars_per_hour + sum(
        sizes.get(site.name, site.size).dollars_per_hour
        + (site.size.dollars_per_hour if site.name in sizes else 0.0)
        for site in load.sites
    )
    return rest + load.change_seconds * hourly / 3600.0


def _steps(
    load: FederationLoad,
    site: MeasuredSite,
    busy: Mapping[str, float],
    changed: Mapping[str, MachineSize],
    rounds: int,
) -> Iterator[MachineSize]:
    """Yield a site's next machines that are allowed in its part of the federation."""
    size = changed.get(site.name, site.size)
    if all(
        site.busy_seconds[-at] >= max(o.busy_seconds[-at] for o in load.sites)
        for at in range(1, rounds + 1)
    ):
        larger = [each for each in site.sizes if each.speed > size.speed]
        yield from sorted(larger, key=lambda each: each.speed)[:1]
        return
    slowest = max(_busy(load, busy, changed).values())
    smaller = [
        each
        for each in site.sizes
        if each.speed < size.speed
        and busy[site.name] * site.size.speed / each.speed <= _MARGIN * slowest
    ]
    yield from sorted(smaller, key=lambda each: -each.speed)[:1]


def _busy(
    load: FederationLoad,
    busy: Mapping[str, float],
    changed: Mapping[str, MachineSize],
) -> Mapping[str, float]:
    """Seconds of each site in a round, on the machines that it would have."""
    return {
        site.name: busy[site.name]
        * site.size.speed
        / changed.get(site.name, site.size).speed
        for site in load.sites
    }


def _rest(
    load: FederationLoad,
    busy: Mapping[str, float],
    changed: Mapping[str, MachineSize],
) -> tuple[float, float]:
    """Seconds and dollars of the rounds left, without those of a change."""
    a_round = max(_busy(load, busy, changed).values()) + load.other_seconds
    seconds = a_round * load.rounds_left
    hourly = load.other_dollars_per_hour + sum(
        changed.get(site.name, site.size).dollars_per_hour for site in load.sites
    )
    return seconds, seconds * hourly / 3600.0


def _why(
    load: FederationLoad,
    busy: Mapping[str, float],
    site: MeasuredSite,
    size: MachineSize,
) -> str:
    slowest = max(busy.values())
    change = f"{size.machine} instead of {site.size.machine}"
    if size.speed > site.size.speed:
        return f"{site.name} is the slowest site ({slowest:.1f} s a round): {change}"
    idle = 1 - busy[site.name] / (slowest + load.other_seconds)
    return f"{site.name} waits {idle:.0%} of a round: {change}"


class Sizer:
    """Decides on the sizes of all sites of a deployment that state ``sizes``."""

    def __init__(
        self,
        plan: DeploymentPlan,
        prices: Prices | None,
        run: SeenRun,
        rounds: int,
        tell: Tell,
    ) -> None:
        """Begin; rounds that have ended before do not count.

        Args:
            plan: The deployment.
            prices: The table; None if every machine has a stated price.
            run: Its events are read after each round.
            rounds: Rounds of the job.
            tell: Called with a word about every change.
        """
        self._folder, self._prices = plan.folder, prices
        self._run, self._rounds, self._tell = run, rounds, tell
        self._refused = set[tuple[str, str]]()
        # The first round on new machines is longer than the others.
        self._skipped = self._looked = max(1, self._ended())

    def wanted(self, plan: DeploymentPlan, now: float) -> DeploymentPlan:
        """The deployment with the machines that it should have after this round.

        The clock counts only for a deadline: a clock that jumps changes nothing before
        the next round has ended.
        """
        view, ended = self._run.view(), self._ended()
        if view is None or ended <= self._looked or ended >= self._rounds:
            return plan
        self._looked = ended
        changes = self._changes(plan, view, ended, now)
        for change in changes:
            self._tell(
                f"{SITE_PREFIX}{change.site}: {change.reason}; the run pauses after "
                "its round"
            )
        return _changed(plan, changes)

    def changed(self) -> None:
        """Count rounds again, because machines have changed."""
        self._skipped = self._looked = self._ended() + 1

    def refused(self, old: DeploymentPlan, new: DeploymentPlan, why: str) -> None:
        """Never ask again for the machines that a service has refused.

        Args:
            old: The machines that are kept.
            new: Those that were asked for.
            why: What the service said.
        """
        for before, after in zip(old.file.sites, new.file.sites, strict=True):
            if before.machine.type != after.machine.type:
                self._refused.add((after.name, after.machine.type))
                self._tell(
                    f"{after.role}: keeps {before.machine.type}: "
                    f"{after.machine.type} is not available: {why}"
                )

    def _ended(self) -> int:
        view = self._run.view()
        rows = () if view is None else view.rounds
        return max((row.index for row in rows if row.finished), default=0)

    def _changes(
        self, plan: DeploymentPlan, view: RunView, ended: int, now: float
    ) -> Sequence[Resize]:
        """Changes to make."""
        names = [site.name for site in plan.file.sites]
        rows = [row for row in view.rounds if row.index > self._skipped]
        measured = [found for row in rows if (found := _measured(row, names))]
        if len(measured) < _ROUNDS:
            return ()
        load = self._load(plan, measured[-_ROUNDS:], self._rounds - ended)
        if plan.file.deadline_hours is not None:
            end = view.first_started_at + plan.file.deadline_hours * _HOUR
            load = replace(load, seconds_left=max(0.0, end - now))
        changes = resize(load, rounds=_ROUNDS)
        if not changes:
            return ()
        rest, limit = dollars(load, changes, rounds=_ROUNDS), plan.file.max_dollars
        spent = spending.read(self._folder).dollars
        is_dearer = rest > dollars(load, (), rounds=_ROUNDS)
        if limit is not None and is_dearer and spent + rest > limit:
            return ()
        forecast = f"the rest is expected to cost ${rest:,.2f}"
        return [replace(c, reason=f"{c.reason}; {forecast}") for c in changes]

    def _load(
        self, plan: DeploymentPlan, rounds: Sequence[_Round], rounds_left: int
    ) -> FederationLoad:
        sites = []
        for site in plan.file.sites:
            sizes = [
                MachineSize(
                    machine=each.type,
                    speed=each.speed,
                    dollars_per_hour=machine_hour(site.sized(each.type), self._prices),
                )
                for each in site.sizes
                if (site.name, each.type) not in self._refused
            ]
            own = [each for each in sizes if each.machine == site.machine.type]
            fixed = MachineSize(
                machine=site.machine.type,
                speed=1.0,
                dollars_per_hour=0.0 if own else machine_hour(site, self._prices),
            )
            sites.append(
                MeasuredSite(
                    name=site.name,
                    busy_seconds=[busy[site.name] for busy, _ in rounds],
                    size=own[0] if own else fixed,
                    sizes=sizes if own else (),
                )
            )
        return FederationLoad(
            sites=sites,
            other_seconds=median(
                max(0.0, seconds - max(busy.values())) for busy, seconds in rounds
            ),
            other_dollars_per_hour=plan.file.aggregator.dollars_per_hour,
            rounds_left=rounds_left,
            change_seconds=plan.file.start.machine_minutes * 60.0,
        )


def is_elastic(plan: DeploymentPlan) -> bool:
    """Whether any site may have machines of other sizes."""
    return any(site.sizes for site in plan.file.sites)


def check_sizes(plan: DeploymentPlan, clock: Clock) -> None:
    """Refuse sizes of unknown price, before anything is started.

    Args:
        plan: The deployment.
        clock: Tells the day: a budget needs prices that are new enough.

    Raises:
        JobError: The price of a size is neither stated nor in the table, or is too old
            for ``max_dollars``.
    """
    if not is_elastic(plan):
        return
    now = clock.now()
    # Its age is reported by what reads it first.
    prices = price_table.load(
        plan.prices, today=price_table.day_of(now), warn=lambda _: None
    )
    for index, site in enumerate(plan.file.sites):
        for each in site.sizes:
            sized = site.sized(each.type)
            try:
                machine_hour(sized, prices)
            except JobError as error:
                raise JobError(
                    f"{plan.path}: {error.reason}; or state its dollars_per_hour here",
                    key=f"sites[{index}].sizes",
                ) from None
            sites = [s.sized(s.machine.type) if s.sizes else s for s in plan.file.sites]
            sites[index] = sized
            changed = replace(plan, file=replace(plan.file, sites=tuple(sites)))
            spending.budget_prices(changed, now=now)


def _measured(row: RoundView, names: Sequence[str]) -> _Round | None:
    """What a round took; None unless every site has answered it."""
    busy = {
        each.site: each.answered_seconds - each.asked_seconds
        for each in row.reports
        if isinstance(each, SiteAnswered)
    }
    if row.finished is None or not {*names} <= busy.keys():
        return None
    return {name: busy[name] for name in names}, row.finished.seconds


def _changed(plan: DeploymentPlan, changes: Sequence[Resize]) -> DeploymentPlan:
    types = {change.site: change.size.machine for change in changes}
    sites = tuple(
        site.sized(types[site.name]) if site.name in types else site
        for site in plan.file.sites
    )
    return replace(plan, file=replace(plan.file, sites=sites)) if types else plan
