"""Whom a run continues without, from what its rounds have shown."""

import itertools
import random
import time
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, strategies as st
from support.secagg_parties import Parties

from aggregator.blame import Blame
from federation.ids import SiteId

ONE, TWO, THREE, FOUR, FIVE, SIX, SEVEN = (SiteId(f"site-{i}") for i in range(1, 8))


@dataclass
class Shown:
    """What a round has shown."""

    faults: dict[SiteId, str] = field(default_factory=dict)
    disputes: list[tuple[SiteId, SiteId]] = field(default_factory=list)
    silent: frozenset[SiteId] = frozenset()


def blame(num_sites: int = 7, **shown: Any) -> Blame:
    """Seven sites, of which two may be missing."""
    found = Blame(Parties(num_sites).contract())
    found.note(Shown(**shown))  # type: ignore[arg-type]
    return found


def test_nobody_is_left_out_without_a_reason():
    """A run begins with everyone."""
    assert not blame().left_out()


def test_site_at_fault_is_left_out():
    """By its own signature."""
    assert dict(blame(faults={THREE: "lied"}).left_out()) == {THREE: "lied"}


def test_dispute_leaves_out_the_dealer_alone():
    """Never both: one of the two may be honest."""
    found = blame(disputes=[(ONE, TWO)]).left_out()
    assert dict(found) == {TWO: "in dispute with 'site-1'"}


def test_dealer_whom_several_dispute_is_left_out():
    """They are not."""
    found = blame(disputes=[(ONE, TWO), (THREE, TWO)]).left_out()
    assert set(found) == {TWO}


def test_second_lie_of_an_accuser_brings_back_whom_it_accused():
    """The accuser is what its disputes have in common."""
    found = blame(disputes=[(ONE, TWO)])
    assert set(found.left_out()) == {TWO}
    found.note(Shown(disputes=[(ONE, THREE)]))  # type: ignore[arg-type]
    assert set(found.left_out()) == {ONE}


def test_dispute_with_a_site_at_fault_says_nothing_of_the_other():
    """One of the two is left out already."""
    found = blame(faults={ONE: "lied"}, disputes=[(ONE, TWO), (THREE, ONE)])
    assert set(found.left_out()) == {ONE}


def test_site_in_more_disputes_than_sites_may_fail_is_at_fault():
    """Three sites cannot all be faulty where two may be missing."""
    found = blame(disputes=[(ONE, TWO), (THREE, TWO), (FOUR, TWO), (ONE, FIVE)])
    assert set(found.left_out()) == {TWO, FIVE}
    assert set(blame(disputes=[(ONE, TWO), (ONE, FIVE)]).left_out()) == {ONE}


def test_silence_of_one_of_two_in_dispute_tells_whom_to_leave_out():
    """The round needs one of them: the other one may be there."""
    found = blame(disputes=[(ONE, TWO)])
    assert set(found.left_out()) == {TWO}
    found.note(Shown(silent=frozenset({ONE, TWO, FIVE})))  # type: ignore[arg-type]
    assert set(found.left_out()) == {ONE}


def test_fewest_sites_that_settle_all_disputes_are_left_out():
    """Though the one with most disputes is not among them."""
    three = [(ONE, SIX), (TWO, SIX), (THREE, SEVEN), (FOUR, SEVEN), (SIX, SEVEN)]
    assert set(blame(disputes=three).left_out()) == {SIX, SEVEN}
    path = [(ONE, TWO), (TWO, THREE), (THREE, FOUR), (FOUR, FIVE)]
    found = blame(disputes=path)
    assert set(found.left_out()) == {TWO, FOUR}
    found.note(Shown(silent=frozenset({THREE})))  # type: ignore[arg-type]
    assert set(found.left_out()) == {TWO, FOUR}


def test_disputes_that_so_few_cannot_settle_leave_nobody_out():
    """Then more sites are faulty than a round can do without."""
    three = [(ONE, TWO), (THREE, FOUR), (FIVE, SIX)]
    assert not blame(disputes=three).left_out()
    assert set(blame(disputes=three, faults={ONE: "lied"}).left_out()) == {ONE}


def test_no_more_are_left_out_than_a_round_can_do_without():
    """Those whose fault is certain come first."""
    found = blame(
        disputes=[(ONE, TWO)], faults={SIX: "lied", SEVEN: "lied", FIVE: "lied"}
    )
    assert set(found.left_out()) == {SIX, SEVEN}


def test_news_is_said_once():
    """Again in a later round, it is nothing new."""
    shown = Shown(faults={ONE: "lied"}, disputes=[(TWO, THREE)])
    found = Blame(Parties(7).contract())
    said = found.note(shown)  # type: ignore[arg-type]
    assert said == [
        "site 'site-1' is at fault: lied",
        (
            "site 'site-2' says that site 'site-3' sent it a share that does not "
            "match its commitment: one of the two is at fault"
        ),
    ]
    assert not found.note(shown)  # type: ignore[arg-type]


sites = st.sampled_from([ONE, TWO, THREE, FOUR, FIVE, SIX, SEVEN])


@given(
    liars=st.sets(sites, min_size=1, max_size=2),
    pairs=st.lists(st.tuples(sites, sites), max_size=12),
)
def test_liars_keep_no_more_honest_sites_out_than_they_are(
    liars: set[SiteId], pairs: list[tuple[SiteId, SiteId]]
):
    """Whoever they accuse, and whatever they deal to whom."""
    disputes = [(a, b) for a, b in pairs if a != b and liars & {a, b}]
    left_out = set(blame(disputes=disputes).left_out())
    assert len(left_out) <= len(liars)
    assert len(left_out - liars) <= len(liars - left_out)
    assert all(left_out & {*pair} for pair in disputes)


@given(pairs=st.lists(st.tuples(sites, sites), max_size=9))
def test_what_is_left_out_is_the_smallest_set_that_settles_all(
    pairs: list[tuple[SiteId, SiteId]],
):
    """As found by trying all sets of at most two sites."""
    disputes = [pair for pair in pairs if pair[0] != pair[1]]
    names = sorted({site for pair in disputes for site in pair})
    sizes = [
        size
        for size in range(3)
        for chosen in itertools.combinations(names, size)
        if all({*chosen} & {*pair} for pair in disputes)
    ]
    found = blame(disputes=disputes).left_out()
    assert len(found) == min(sizes, default=0)


def test_search_of_many_disputes_ends():
    """The largest contract, with as many liars as it withstands, or more."""
    names = [SiteId(f"site-{i:02d}") for i in range(1, 65)]
    rng = random.Random(7)  # noqa: S311  # No secret.
    for liars, each in ((21, 1), (21, 2), (21, 5), (30, 3), (64, 2), (64, 20)):
        found = Blame(Parties(64).contract())
        disputes = [
            (liar, other)
            for liar in names[:liars]
            for other in rng.sample(names, each)
            if other != liar
        ]
        found.note(Shown(disputes=disputes))  # type: ignore[arg-type]
        start = time.process_time()
        left_out = found.left_out()
        assert time.process_time() - start < 2
        assert len(left_out) <= 21
