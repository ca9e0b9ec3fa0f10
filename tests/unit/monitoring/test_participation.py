"""Who took part in a run, and who made others wait."""

import itertools
from dataclasses import replace

import pytest

from federation.events import SiteAnswered, SiteFailed
from federation.messages import FailureKind
from monitoring.views.participation import Participation, waited


def answered(site: str, seconds: float) -> SiteAnswered:
    return SiteAnswered(
        at=0.0,
        round_index=1,
        site=site,
        asked_seconds=0.0,
        answered_seconds=seconds,
        bytes_down=0,
        bytes_up=0,
        num_examples=None,
        num_steps=None,
        weight=None,
        training=None,
        evaluation=None,
        phases=(),
    )


def failed(site: str, seconds: float, kind: str = "deadline") -> SiteFailed:
    return SiteFailed(
        at=0.0,
        round_index=1,
        site=site,
        kind=FailureKind(kind),
        message="",
        asked_seconds=0.0,
        answered_seconds=seconds,
        bytes_down=0,
        bytes_up=0,
    )


def test_a_single_slow_site_is_the_cause_of_all_waiting():
    found = waited([answered("a", 1.0), answered("b", 1.0), answered("c", 4.0)])
    assert found == {"a": 0.0, "b": 0.0, "c": 6.0}


def test_a_site_that_a_round_waits_for_before_it_asks_is_the_cause():
    """Nobody has a task meanwhile; once one is back, the others wait for the rest."""
    reports = [
        replace(answered(site, end), asked_seconds=90.0)
        for site, end in (("a", 91.0), ("b", 92.0), ("c", 92.0))
    ]
    late = failed("c", 89.0, "late")
    found = waited([late, *reports], [(1.0, ("b", "c")), (31.0, ("c",))])
    # For half a minute a alone waits for two, then a and b for one.
    assert found == {"a": 0.0, "b": 15.0 + 0.5, "c": 15.0 + 2 * 59.0 + 0.5}


def test_shares_are_shapley_values_of_the_time_that_sites_waited():
    """Against the definition: the mean over all orders of what each site adds."""
    ends = {"a": 1.0, "b": 2.5, "c": 3.0, "d": 7.0}

    def cost(at_work: frozenset[str]) -> float:
        """What all wait if only these need as long as they do, and others no time."""
        end = max((ends[site] for site in at_work), default=0.0)
        return sum(end - min(ends[site], end) for site in ends)

    # Waiting begins when a site is done, whoever is at work: so by intervals.
    expected = dict.fromkeys(ends, 0.0)
    for before, after in itertools.pairwise([0.0, *sorted(ends.values())]):
        done = [site for site in ends if ends[site] <= before]
        rest = [site for site in ends if ends[site] > before]
        orders = [*itertools.permutations(rest)]
        for order in orders:  # Who comes first opens the interval for the others.
            expected[order[0]] += len(done) * (after - before) / len(orders)
    found = waited(answered(site, seconds) for site, seconds in ends.items())
    assert found == pytest.approx(expected)
    assert sum(found.values()) == pytest.approx(cost(frozenset(ends)))


def test_failures_keep_others_waiting_and_do_not_wait():
    found = waited([answered("a", 1.0), failed("b", 0.5), failed("c", 3.0)])
    assert found == {"a": 0.0, "b": 0.0, "c": 2.0}


@pytest.mark.parametrize("kind", ["late", "surplus", "unknown", "duplicate"])
def test_what_did_not_keep_the_round_open_has_no_share(kind: str):
    found = waited([answered("a", 1.0), answered("b", 2.0), failed("c", 9.0, kind)])
    assert found == {"a": 0.0, "b": 1.0}


def test_words_name_the_cause():
    one = Participation(
        counts={"a": 4, "b": 2}, waited={"a": 1.0, "b": 99.0}, share=0.25
    )
    waiting, fairness = one.words()
    assert "25.0 %" in waiting
    assert waiting.endswith("for b (99.0 %)")
    assert "2 to 4 rounds; Jain's index 0.90" in fairness
    even = Participation(
        counts={}, waited={f"site-{n}": 1.0 for n in range(30)}, share=0.25
    )
    assert [*even.words()] == [
        waiting.partition("1 min 40 s")[0] + "30 s of all sites together"
    ]
    unknown = Participation(counts={"a": 0}, waited={}, share=None)
    assert [*unknown.words()] == []
