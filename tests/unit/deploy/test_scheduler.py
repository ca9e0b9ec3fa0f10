"""Whose turn it is, decided over a simulated clock."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest

from deploy.aggregator_host import scheduler
from deploy.aggregator_host.scheduler import Candidate, Rules, Share

SECONDS = 12_000
RULES = Rules(max_runs=1, slice_seconds=60.0, age_seconds=600.0)
SITES = frozenset({"a", "b"})


def run(name: str, owner: str = "ann", **changes: object) -> Candidate:
    """A run that waits since the beginning."""
    made = Candidate(
        name=name, owner=owner, priority=0, submitted=0.0, since=0.0, sites=SITES
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def shares(*owners: str, **weights: float) -> Mapping[str, Share]:
    equal = {owner: Share(weight=1.0, used=0.0) for owner in (*owners, "ann")}
    return equal | {name: Share(weight=w, used=0.0) for name, w in weights.items()}


def planned(
    *runs: Candidate,
    rules: Rules = RULES,
    slots: Mapping[str, int] | None = None,
    owners: Mapping[str, Share] | None = None,
    now: float = 0.0,
) -> scheduler.Plan:
    known = shares(*(one.owner for one in runs)) if owners is None else owners
    return scheduler.plan(runs, known, slots or {}, rules, now=now)


@dataclass
class Sites:
    """Plays plans over a clock: a run pauses at the end of a round only."""

    owners: dict[str, Share]
    rules: Rules = RULES
    slots: Mapping[str, int] = field(default_factory=dict)
    round_seconds: float = 10.0
    now: float = 0.0
    runs: list[Candidate] = field(default_factory=list)
    turns: Counter[str] = field(default_factory=Counter)
    waited: Counter[str] = field(default_factory=Counter)
    most_held: int = 0

    def step(self, seconds: float = 1.0) -> None:
        plan = scheduler.plan(
            self.runs, self.owners, self.slots, self.rules, now=self.now
        )
        self.now += seconds
        after = [self._worked(one, plan, seconds) for one in self.runs]
        self.runs = [one for one in after if one.seconds_left]
        held = [one for one in self.runs if one.holds]
        self.most_held = max(self.most_held, len(held))
        at = Counter(site for one in held for site in one.sites)
        assert all(at[site] <= self.slots.get(site, 1) for site in at)

    def _worked(
        self, one: Candidate, plan: scheduler.Plan, seconds: float
    ) -> Candidate:
        if one.name in plan.start:
            self.turns[one.name] += 1
            one = replace(one, holds=True, begun=self.now - seconds)
        elif one.name in plan.pause and self._ends_round(one):
            one = replace(one, holds=False, begun=None, since=self.now)
        if not one.holds:
            self.waited[one.name] += int(seconds)
            return one
        share = self.owners[one.owner]
        used = share.used + seconds * len(one.sites)
        self.owners[one.owner] = replace(share, used=used)
        assert one.seconds_left is not None
        return replace(one, seconds_left=max(0.0, one.seconds_left - seconds))

    def _ends_round(self, one: Candidate) -> bool:
        assert one.begun is not None
        return (self.now - one.begun) % self.round_seconds < 1.0


def jain(values: Sequence[float]) -> float:
    """The fairness index of Jain, Chiu and Hawe (1984), equation 1."""
    return sum(values) ** 2 / (len(values) * sum(v * v for v in values))


def test_the_oldest_begins_and_the_next_waits_for_it():
    plan = planned(run("late", submitted=2.0), run("early", submitted=1.0))
    assert plan.start == ["early"]
    assert "early" in plan.waits["late"].text()
    assert not plan.pause


@pytest.mark.slow
@pytest.mark.parametrize(
    "max_runs", [1, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 3))]
)
def test_shares_are_those_of_the_weights(max_runs: int):
    """Within a tenth, for owners that always have runs to do, of any length."""
    weights = {"ann": 1.0, "bob": 2.0, "cyd": 3.0, "dan": 2.0}
    rules = replace(RULES, max_runs=max_runs)
    site = Sites(dict(shares(**weights)), rules, slots={"a": max_runs, "b": max_runs})
    lengths = {"ann": 5000.0, "bob": 130.0, "cyd": 40.0, "dan": 900.0}
    for second in range(SECONDS):
        for owner in weights:
            mine = [one for one in site.runs if one.owner == owner]
            if len(mine) < max_runs:
                name = f"{owner}-{second}-{len(mine)}"
                site.runs.append(
                    run(
                        name,
                        owner,
                        submitted=site.now,
                        since=site.now,
                        seconds_left=lengths[owner],
                    )
                )
        site.step()
    total = sum(share.used for share in site.owners.values())
    assert total == pytest.approx(SECONDS * max_runs * 2, rel=0.01)  # Nothing idles.
    for owner, share in site.owners.items():
        part = share.used / total
        assert part == pytest.approx(weights[owner] / sum(weights.values()), rel=0.1)
    assert jain([s.used / s.weight for s in site.owners.values()]) >= 0.99
    assert site.most_held == max_runs


def test_a_higher_priority_pauses_what_is_at_work():
    """At once, whatever is left of its slice; only as many as are in the way."""
    low = run("low", holds=True, begun=0.0)
    other = run("other", holds=True, begun=0.0, sites=frozenset({"c"}))
    urgent = run("urgent", "bob", priority=2, submitted=5.0, since=5.0)
    rules = replace(RULES, max_runs=3)
    plan = planned(low, other, urgent, rules=rules, now=6.0)
    assert (plan.start, plan.pause) == ([], ["low"])
    assert plan.waits["urgent"].text() == "a slot at a, b (run low)"
    two = [replace(urgent, name=name) for name in ("u1", "u2")]
    plan = planned(low, other, *two, rules=replace(RULES, max_runs=2), now=6.0)
    assert plan.pause == ["low"]  # The second could not begin even so.


def test_no_priority_waits_for_ever():
    """One more urgent run after another: a run of none gets its turn by its age."""
    site = Sites(dict(shares("ann", "bob")))
    site.runs = [run("patient", seconds_left=30.0)]
    for second in range(3000):
        if len(site.runs) < 3:
            site.runs.append(
                run(
                    f"u{second}",
                    "bob",
                    priority=3,
                    submitted=site.now,
                    since=site.now,
                    seconds_left=100.0,
                )
            )
        site.step()
    assert site.turns["patient"] == 1
    bound = 3 * RULES.age_seconds + RULES.slice_seconds + site.round_seconds
    assert site.waited["patient"] <= bound


def test_a_run_of_many_sites_is_not_passed_for_ever():
    """Slots that are free for it are kept, or small runs would always be before it."""
    site = Sites(dict(shares("ann", "bob")), replace(RULES, max_runs=5))
    site.runs = [run("wide", "ann", submitted=1.0, seconds_left=50.0)]
    for second in range(2000):
        for place in ("a", "b"):
            if not any(one.sites == {place} for one in site.runs):
                site.runs.append(
                    run(
                        f"{place}{second}",
                        "bob",
                        submitted=site.now - 2.0,
                        since=site.now,
                        sites=frozenset({place}),
                        seconds_left=45.0 if place == "a" else 37.0,
                    )
                )
        site.step()
    assert site.turns["wide"] == 1
    assert site.waited["wide"] <= 3 * RULES.slice_seconds


def test_a_site_takes_as_many_runs_as_it_says():
    rules = replace(RULES, max_runs=4)
    runs = [run(f"r{n}", submitted=float(n)) for n in range(4)]
    plan = planned(*runs, rules=rules, slots={"a": 3, "b": 2})
    assert plan.start == ["r0", "r1"]
    assert plan.waits["r2"].text() == "a slot at b (runs r0, r1)"


def test_what_is_refused_waits_with_the_reason_and_holds_nothing_up():
    spent = run("spent", submitted=0.0, refused="ann has used 9 of 8 site-hours")
    plan = planned(spent, run("next", "bob", submitted=1.0))
    assert plan.start == ["next"]
    assert plan.waits["spent"].text() == f"a quota that allows it: {spent.refused}"
    at_work = replace(spent, holds=True, begun=0.0)
    assert planned(at_work).pause == ["spent"]


def test_an_owner_who_has_used_little_is_next():
    owners = {"ann": Share(weight=1.0, used=500.0), "bob": Share(weight=1.0, used=9.0)}
    old, new = run("old", "ann"), run("new", "bob", submitted=9.0)
    assert planned(old, new, owners=owners).start == ["new"]
    heavy = {**owners, "ann": Share(weight=100.0, used=500.0)}
    assert planned(old, new, owners=heavy).start == ["old"]


def test_a_forecast_ends_where_a_length_is_unknown():
    at_work = run("now", holds=True, begun=0.0, seconds_left=100.0)
    known = run("known", submitted=1.0, seconds_left=50.0)
    unknown = run("unknown", submitted=2.0)
    last = run("last", submitted=3.0, seconds_left=1.0)
    owners = shares("ann")
    found = scheduler.forecast(
        [at_work, known, unknown, last], owners, {}, RULES, now=10.0
    )
    assert found == {"known": 110.0, "unknown": 160.0}


def test_a_forecast_is_when_turns_really_begin():
    """Within a quarter, also where runs of equal owners take turns."""
    owners = shares("ann", "bob", "cyd")
    site = Sites(dict(owners), round_seconds=20.0)
    lengths = {"a": ("ann", 900.0), "b": ("bob", 300.0), "c": ("cyd", 50.0)}
    lengths |= {"d": ("ann", 200.0)}
    site.runs = [
        run(name, owner, submitted=index, seconds_left=left, round_seconds=20.0)
        for index, (name, (owner, left)) in enumerate(lengths.items())
    ]
    site.step()
    found = scheduler.forecast(site.runs, site.owners, {}, RULES, now=site.now)
    assert found.keys() == {"b", "c", "d"}
    began = dict[str, float]()
    while found.keys() - began.keys():
        site.step()
        new = site.turns.keys() & found.keys() - began.keys()
        began |= dict.fromkeys(new, site.now)
    for name, at in began.items():
        assert found[name] == pytest.approx(at, rel=0.25), (found, began)
