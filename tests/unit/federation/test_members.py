"""Who takes part in a run: no site is lost, and none that is gone is asked."""

import pytest
from hypothesis import given, strategies as st
from support.examples import few

from federation.ids import SiteId
from federation.members import EVERYBODY, JOINED, Members, RunMember, Standing

SITES = tuple(map(SiteId, ("aws", "azure", "gcp")))
AWS, AZURE, GCP = SITES


def standings(members: Members) -> list[str]:
    """What each site is."""
    return [members.of(site).standing.value for site in SITES]


def test_site_that_finishes_its_round_is_gone_after_it():
    """It is asked what is left of this round, and is in no other."""
    members = EVERYBODY.leave(AWS, "spot", finishes=True)
    assert members.of(AWS) == RunMember(Standing.LEAVING, "spot")
    assert not members.away()
    assert members.present(SITES) == (AZURE, GCP)
    assert members.end_round().away() == {AWS: "spot"}


def test_notice_in_place_of_an_answer_ends_the_round_for_its_site():
    """Also of a site that wanted to finish it. To repeat it changes nothing."""
    gone = RunMember(Standing.GONE, "sigterm")
    assert EVERYBODY.leave(AWS, "sigterm").of(AWS) == gone
    wanted = EVERYBODY.leave(AWS, "spot", finishes=True).leave(AWS, "sigterm")
    assert wanted.of(AWS) == gone
    assert wanted.leave(AWS, "spot", finishes=True) == wanted
    assert wanted.leave(AWS, "spot") == wanted


def test_site_that_comes_back_is_asked_again_and_counted():
    """As often as it does."""
    members = EVERYBODY
    for times in (1, 2):
        members = members.leave(AWS, "sigterm").replaced([AWS])
        assert members.of(AWS) == RunMember(replaced=times)
    assert members.present(SITES) == SITES


@pytest.mark.parametrize("how", ["replaced", "recalled"])
def test_only_a_site_that_is_gone_comes_back(how: str):
    """Not one that is there, that is leaving, or that is left out."""
    leaving = EVERYBODY.leave(AZURE, "spot", finishes=True)
    members = leaving.leave_out({GCP: "lied"})
    for site in SITES:
        with pytest.raises(ValueError, match=f"not gone cannot come back.*{site}"):
            getattr(members, how)([site])


def test_site_that_is_left_out_does_not_come_back_by_leaving():
    """Else a liar would only have to say that it leaves, and restart."""
    members = EVERYBODY.leave_out({AWS: "lied"})
    assert members.leave(AWS, "sigterm") == members
    assert members.end_round() == members
    assert members.leave_out({}).of(AWS) == JOINED
    assert members.leave_out({AZURE: "lied"}).away() == {AZURE: "lied"}


def test_site_may_be_left_out_while_it_is_gone():
    """And is asked again when the blame is another's: nobody waits for its return."""
    members = EVERYBODY.leave(AWS, "sigterm").leave_out({AWS: "lied"})
    assert standings(members) == ["left out", "joined", "joined"]
    assert members.leave_out({}).of(AWS) == JOINED


def test_those_who_are_gone_are_asked_where_the_quorum_needs_them():
    """Of the round's sites; a site that is left out helps no quorum."""
    gone = EVERYBODY.leave(AWS, "spot").leave(GCP, "spot")
    assert gone.for_round(SITES, back=[], quorum=1) == gone
    assert standings(gone.for_round(SITES, back=[], quorum=2)) == ["joined"] * 3
    drawn = gone.for_round((AWS, AZURE), back=[], quorum=2)
    assert standings(drawn) == ["joined", "joined", "gone"]
    back = gone.for_round(SITES, back=[GCP], quorum=2)
    assert standings(back) == ["gone", "joined", "joined"]
    assert back.of(GCP).replaced == 1
    blamed = EVERYBODY.leave(AWS, "spot").leave_out({GCP: "lied"})
    asked = blamed.for_round(SITES, back=[], quorum=2)
    assert standings(asked) == ["joined", "joined", "left out"]


sites = st.sampled_from(SITES)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("leave"), sites, st.booleans()),
        st.tuples(st.just("end_round"), sites, st.booleans()),
        st.tuples(st.just("leave_out"), st.sets(sites, max_size=2), st.booleans()),
        st.tuples(st.just("for_round"), st.sets(sites), st.integers(0, 3)),
    ),
    max_size=30,
)


@few(15)
@given(steps)
def test_no_site_is_lost_and_none_that_is_gone_is_asked(taken: list[tuple]):
    """Whatever happens, in whatever order."""
    members = EVERYBODY
    for what, who, how in taken:
        before = members
        gone = before.standing(Standing.GONE)
        if what == "leave":
            members = before.leave(who, "why", finishes=how)
            assert who in members.standing(*set(Standing) - {Standing.JOINED})
        elif what == "end_round":
            members = before.end_round()
            assert not members.standing(Standing.LEAVING)
        elif what == "leave_out":
            members = before.leave_out(dict.fromkeys(who, "lied"))
            assert members.standing(Standing.LEFT_OUT).keys() == who
        else:
            back = who & gone.keys()
            members = before.for_round(SITES, back=back, quorum=how)
            joined = set(members.standing(Standing.JOINED)) | (
                {*SITES} - members.noted.keys()
            )
            # Nobody who is gone is asked, unless the quorum needs all that there are.
            enough = (
                len(
                    {*SITES}
                    - before.away().keys()
                    - set(before.standing(Standing.LEAVING))
                    | back
                )
                >= how
            )
            assert bool(joined & (gone.keys() - back)) <= (not enough)
            assert back <= joined
        # A site comes back by its return, by need, or when others are blamed.
        assert members.noted.keys() <= {*SITES}
        assert members.noted.keys() >= before.noted.keys()
        for site in SITES:
            assert members.of(site).replaced >= before.of(site).replaced
            asked = site in members.present(SITES)
            left = (Standing.LEAVING, Standing.GONE)
            assert asked == (members.of(site).standing not in left)
            if site in gone and what in {"leave", "end_round"}:
                assert not asked
    # Whoever is away can be asked again.
    calm = members.end_round().leave_out({})
    there = calm.replaced(calm.standing(Standing.GONE))
    assert there.present(SITES) == SITES
    assert not there.away()
