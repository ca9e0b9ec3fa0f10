"""Which site gets a larger machine, and which a smaller one, between two rounds.

Pure. A round lasts as long as its slowest site, and every machine is paid for all of
it. So a machine is too large if its site waits most of the time, and too small if all
the others wait for it.

A site is one machine: it grows by moving to a larger one, with its identity and its
ledgers. What it computes is the job's: batch, records, sampling rates, steps and noise
are the same on every machine.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

# A change that saves less than this share of the rest is not worth its trouble.
_LEAST_SAVING = 0.05
# A site that is made smaller must not become the straggler by a little noise.
_MARGIN = 0.9
# What is left of the speed of twice the GPUs.
SCALING = 0.9


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


def resized(load: FederationLoad, changes: Sequence[Resize]) -> FederationLoad:
    """Return the federation after changes, before any round on the new machines."""
    sizes = {change.site: change.size for change in changes}
    sites = [
        replace(site, busy_seconds=(), size=sizes.get(site.name, site.size))
        for site in load.sites
    ]
    return replace(load, sites=sites)
