"""Which of many runs may work at the sites now: decided from the queue and the clock.

A run needs a slot at each of its sites and one of the aggregator's. Candidates are
ranked, and slots are given in that order:

1. by level: the priority, raised by one for each ``age_seconds`` that a run has waited,
   up to the highest that is asked for. So a low priority waits, and never for ever;
2. of one level, a run within its time slice: each turn is at least that long, and at
   least one round, or runs whose start takes as long would get nowhere;
3. then by the owner's virtual time, the site-seconds used divided by the weight, as in
   stride scheduling [Waldspurger and Weihl, 1995, section 2]. A run that waits counts
   with the slice that it would use, so that turns do not change for a trifle;
4. then the run at work, and then the oldest.

A candidate that no longer has a slot is asked to pause after its round, if one before
it waits for that slot. One that still waits keeps the slots that are free for it, so
that a run of many sites is not passed by runs of few for ever.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

# Usage counts half after so long: what an owner used last month does not matter.
HALF_LIFE_SECONDS = 86_400.0
_MOST_STEPS = 200  # Of a forecast.
_LOOKS = 4  # Of a forecast in a slice.


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What the aggregator's operator decides.

    Attributes:
        max_runs: How many runs may be at work at once.
        slice_seconds: The shortest turn of a run that an equal one waits for.
        age_seconds: Waiting time that raises a run by one level.
        memory: MiB of memory and GPU memory that all runs may take at a site together;
            no limit where it is missing.
    """

    max_runs: int
    slice_seconds: float
    age_seconds: float
    memory: Mapping[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """An owner's part of the sites.

    Attributes:
        weight: Against those of the other owners.
        used: Site-seconds so far, with older ones counting less.
    """

    weight: float
    used: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A run that has not ended.

    Attributes:
        name: Its ID.
        owner: Who submitted it.
        priority: As it was asked for.
        submitted: When; seconds since 1970.
        since: When it began to wait for its turn, also if the turn has begun by now.
        sites: Where it needs a slot.
        begun: When its turn began; None while it waits.
        is_fruitless: Whether no round has ended in its turn so far.
        holds: Whether a coordinator works on it: it takes up its slots.
        refused: Why it may not work, whatever is free; empty if it may.
        seconds_left: How long it will still work; None if that is not known.
        needs: MiB of memory and GPU memory that it takes at each site; nothing where
            that is not known.
        round_seconds: How long its rounds last; 0 if that is not known.
    """

    name: str
    owner: str
    priority: int
    submitted: float
    since: float
    sites: frozenset[str]
    begun: float | None = None
    is_fruitless: bool = False
    holds: bool = False
    refused: str = ""
    seconds_left: float | None = None
    needs: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    round_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """What a run waits for.

    Attributes:
        what: In words.
        runs: Those that have it, or whose turn comes first.
    """

    what: str
    runs: Sequence[str] = ()

    def text(self, visible: Callable[[str], bool] = lambda _run: True) -> str:
        """Put it into words; runs that a reader may not know of are not named."""
        named = [run for run in self.runs if visible(run)]
        many = "runs" if len(named) > 1 else "run"
        return f"{self.what} ({many} {', '.join(named)})" if named else self.what


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to do now.

    Attributes:
        start: Runs whose turn begins.
        pause: Runs at work that are to make way after their round.
        waits: What each other run waits for.
    """

    start: Sequence[str]
    pause: Sequence[str]
    waits: Mapping[str, Wait]


def plan(
    candidates: Iterable[Candidate],
    shares: Mapping[str, Share],
    slots: Mapping[str, int],
    rules: Rules,
    *,
    now: float,
) -> Plan:
    """Decide whose turn it is.

    Args:
        candidates: Every run that has not ended.
        shares: Of every owner.
        slots: How many runs each site takes at once; 1 where it is missing.
        rules: The operator's.
        now: Seconds since 1970.
    """
    ranked = _ranked(candidates, shares, rules, now)
    chosen = _chosen(ranked, slots, rules)
    held = [one for one in ranked if one.holds]
    start, pause, waits = list[str](), list[str](), dict[str, Wait]()
    for index, one in enumerate(ranked):
        if one.holds:
            pause += [one.name] if one.refused else []
            continue
        blocked = _blocking(one, held, slots, rules)
        if one.refused:
            waits[one.name] = Wait(what=f"a quota that allows it: {one.refused}")
        elif one.name not in chosen or blocked:
            waits[one.name] = _wait(one, blocked, slots, rules)
            if not blocked:
                waits[one.name] = _wait_in_line(one, ranked[:index])
        else:
            start.append(one.name)
        if one.name in chosen:
            late = _late(one, blocked, slots, rules, chosen)
            pause += late
            held = [*(each for each in held if each.name not in late), one]
    return Plan(start=start, pause=pause, waits=waits)


def forecast(
    candidates: Sequence[Candidate],
    shares: Mapping[str, Share],
    slots: Mapping[str, int],
    rules: Rules,
    *,
    now: float,
) -> Mapping[str, float]:
    """Predict when each waiting run's turn begins, if no other is submitted.

    It plays the plan forward, looking whenever a run of known length ends, and a few
    times in each slice; a run behind one of unknown length has no entry.
    """
    # Whatever has not worked yet will have by the end of its slice.
    left = [replace(one, is_fruitless=False) for one in candidates]
    found, at = dict[str, float](), now
    shares = dict(shares)
    waiting = {one.name for one in left if not (one.holds or one.refused)}
    for _ in range(_MOST_STEPS):
        decided = plan(left, shares, slots, rules, now=at)
        begun, ends = {*decided.start}, {*decided.pause}
        found |= {name: at for name in begun & waiting if name not in found}
        if waiting <= found.keys():
            break
        left = [
            replace(one, holds=True, begun=at) if one.name in begun else one
            for one in left
        ]
        held = [one for one in left if one.holds and one.seconds_left is not None]
        if not held:
            break
        lengths = [one.seconds_left or 0.0 for one in held]
        look = max(rules.slice_seconds / _LOOKS, max(lengths) / (_MOST_STEPS / 2))
        # A run makes way when its round ends: half a round later, on average.
        rounds = [one.round_seconds / 2 for one in held if one.name in ends]
        step = min(*lengths, max(rounds) if rounds else look)
        at += step
        for one in (each for each in left if each.holds):
            share = shares[one.owner]
            used = share.used + step * len(one.sites)
            shares[one.owner] = replace(share, used=used)
        left = [_after(one, step) for one in left]
        left = [
            replace(one, holds=False, begun=None, since=at) if one.name in ends else one
            for one in left
        ]
        left = [one for one in left if one.seconds_left is None or one.seconds_left > 0]
    return found


def used_now(seconds: float, num_sites: int, *, ended: float, now: float) -> float:
    """Site-seconds of a run, halved with each half-life since they were used."""
    age = max(0.0, now - ended)
    return float(seconds * num_sites * 0.5 ** (age / HALF_LIFE_SECONDS))


def _after(one: Candidate, step: float) -> Candidate:
    if not one.holds or one.seconds_left is None:
        return one
    return replace(one, seconds_left=max(0.0, one.seconds_left - step))


def _ranked(
    candidates: Iterable[Candidate],
    shares: Mapping[str, Share],
    rules: Rules,
    now: float,
) -> list[Candidate]:
    found = list(candidates)
    top = max((one.priority for one in found if not one.refused), default=0)

    def rank(one: Candidate) -> tuple[int, bool, float, bool, float, str]:
        in_slice = one.begun is not None and (
            now - one.begun < rules.slice_seconds or one.is_fruitless
        )
        level = one.priority
        if one.begun is None or in_slice:
            waited = (now if one.begun is None else one.begun) - one.since
            level = min(level + int(max(0.0, waited) // rules.age_seconds), top)
        share = shares[one.owner]
        ahead = rules.slice_seconds * len(one.sites) if one.begun is None else 0.0
        virtual = (share.used + ahead) / share.weight
        is_new = one.begun is None
        return -level, not in_slice, virtual, is_new, one.submitted, one.name

    return sorted(found, key=rank)


_MEMORY = ("memory", "GPU memory")


def _lack(
    site: str,
    here: Sequence[Candidate],
    one: Candidate,
    slots: Mapping[str, int],
    rules: Rules,
) -> str:
    """What there is too little of for one more run at a site; empty if nothing.

    Args:
        site: The site; empty for the aggregator.
        here: The runs that have a slot there.
        one: The run.
        slots: How many runs each site takes at once.
        rules: The operator's.
    """
    if len(here) >= (slots.get(site, 1) if site else rules.max_runs):
        return "a slot"
    limits = rules.memory.get(site, ())
    for at, (what, limit) in enumerate(zip(_MEMORY, limits, strict=False)):
        needs = [each.needs.get(site, (0.0, 0.0))[at] for each in (*here, one)]
        if here and sum(needs) > limit:
            return f"{needs[-1]:g} MiB of {what}"
    return ""


def _chosen(
    ranked: Sequence[Candidate], slots: Mapping[str, int], rules: Rules
) -> set[str]:
    """Give slots in order; one that does not get all of its own keeps the others."""
    taken, found = defaultdict[str, list[Candidate]](list), set[str]()
    for one in ranked:
        if one.refused:
            continue
        lacks = any(_lack(site, taken[site], one, slots, rules) for site in one.sites)
        if not lacks and len(found) < rules.max_runs:
            found.add(one.name)
        for site in one.sites:
            taken[site].append(one)
    return found


def _blocking(
    one: Candidate, held: Sequence[Candidate], slots: Mapping[str, int], rules: Rules
) -> dict[str, list[Candidate]]:
    """Runs at work in each slot that a candidate lacks; under "" the aggregator's."""
    found = {"": list(held)} if _lack("", held, one, slots, rules) else {}
    for site in sorted(one.sites):
        here = [each for each in held if site in each.sites]
        if _lack(site, here, one, slots, rules):
            found[site] = here
    return found


def _late(
    one: Candidate,
    blocked: Mapping[str, Sequence[Candidate]],
    slots: Mapping[str, int],
    rules: Rules,
    chosen: Collection[str],
) -> list[str]:
    """Runs at work that have to make way: of each kind of slot, the last in order."""
    found: list[str] = []
    for site, here in blocked.items():
        left = [each for each in here if each.name not in found]
        for each in reversed(left[:]):
            if not _lack(site, left, one, slots, rules):
                break
            if each.name not in chosen:
                left.remove(each)
                found.append(each.name)
    return found


def _wait_in_line(one: Candidate, before: Sequence[Candidate]) -> Wait:
    """Name the runs before a candidate for which its slots are kept free."""
    waiting = [each for each in before if not each.holds and not each.refused]
    shared = [each for each in waiting if each.sites & one.sites]
    names = [each.name for each in shared or waiting]
    return Wait(what="runs whose turn comes first", runs=names)


def _wait(
    one: Candidate,
    blocked: Mapping[str, Sequence[Candidate]],
    slots: Mapping[str, int],
    rules: Rules,
) -> Wait:
    lacks = defaultdict[str, list[str]](list)
    for site, here in blocked.items():
        if site:
            lacks[_lack(site, here, one, slots, rules)].append(site)
    names = dict.fromkeys(each.name for found in blocked.values() for each in found)
    texts = [f"{what} at {', '.join(sites)}" for what, sites in lacks.items()]
    what = "; ".join(texts) or f"one of {rules.max_runs} runs at once"
    return Wait(what=what, runs=[*names])
