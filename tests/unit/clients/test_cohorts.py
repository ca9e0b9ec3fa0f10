"""A site's rule on sums over different sites: what it records and what it refuses."""

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from support.secagg_parties import Parties

from clients.privacy.cohorts import DOCUMENT, Cohort, CohortRule
from clients.privacy.site_memory import FileMemory, InMemory, SiteMemory
from federation.errors import CorruptObject, ProtocolError
from federation.ids import SiteId
from privacy.secagg.agreement.contract import Contract, members_of
from privacy.secagg.errors import CohortRefused, ContractRefused

PARTIES = Parties(10)


def rule(memory: SiteMemory, **changes: Any) -> CohortRule:
    """A rule with groups of three, no dropouts and no differential privacy."""
    values = {
        "lineage": "digits",
        "smallest": 3,
        "accept_dropouts": False,
        "is_private": False,
    }
    return CohortRule(memory=memory, **(values | changes))


def cohort(*numbers: int) -> Cohort:
    """A cohort by the numbers of its sites."""
    return frozenset(SiteId(f"site-{i:02d}") for i in numbers)


def contract(*numbers: int, absent: int = 0) -> Contract:
    """A contract of some sites, of which so many may be absent."""
    return PARTIES.contract(
        members=members_of(PARTIES.roster, cohort(*numbers)),
        threshold=len(numbers) - absent,
    )


def test_cohort_is_durable_before_join_returns(tmp_path: Path):
    """Another process of the site, started later, knows it."""
    rule(FileMemory(tmp_path)).join(contract(1, 2, 3, 4, 5))
    later = rule(FileMemory(tmp_path))
    later.check(cohort(1, 2, 3, 4, 5))
    with pytest.raises(CohortRefused, match="would single out site-05"):
        later.check(cohort(1, 2, 3, 4))


def test_cohort_that_is_refused_is_not_recorded():
    """Else an aggregator could ask until nothing is left to allow."""
    memory = InMemory()
    mine = rule(memory)
    mine.join(contract(1, 2, 3, 4, 5))
    before = memory.read(DOCUMENT)
    with pytest.raises(CohortRefused):
        mine.join(contract(1, 2, 3, 4))
    with pytest.raises(ContractRefused) as caught:
        mine.check_contract(contract(1, 2, 3, 4))
    assert caught.value.key == "members"
    assert memory.read(DOCUMENT) == before


def test_contract_that_was_only_offered_is_not_recorded():
    """Nothing is summed before all its sites have made keys together."""
    mine = rule(InMemory())
    mine.check_contract(contract(1, 2, 3, 4, 5))
    mine.check(cohort(1, 2, 3, 4))


def test_other_data_are_another_lineage():
    """Updates on them say nothing of these."""
    memory = InMemory()
    rule(memory).join(contract(1, 2, 3, 4, 5))
    rule(memory, lineage="letters").join(contract(1, 2, 3, 4))
    with pytest.raises(CohortRefused):
        rule(memory).join(contract(1, 2, 3, 4))


@pytest.mark.parametrize(("absent", "is_refused"), [(0, False), (2, True), (3, False)])
def test_threshold_that_no_dropout_can_use_is_refused(absent: int, *, is_refused: bool):
    """Of ten sites three may be silent together, for they form a group."""
    offered = contract(*range(1, 11), absent=absent)
    if not is_refused:
        rule(InMemory()).check_contract(offered)
        return
    with pytest.raises(ContractRefused, match="up to 2 of 10 sites") as caught:
        rule(InMemory()).check_contract(offered)
    assert caught.value.key == "threshold"
    rule(InMemory(), accept_dropouts=True).check_contract(offered)


def test_survivors_are_a_cohort():
    """Three are absent together; later another three that overlap them are too many."""
    mine, ten = rule(InMemory()), contract(*range(1, 11), absent=3)
    mine.join(ten)
    mine.leave_out(ten, range(1, 8))
    mine.leave_out(ten, range(1, 8))
    with pytest.raises(
        CohortRefused, match="would single out site-08, site-09 and site-10"
    ):
        mine.leave_out(ten, range(1, 10))
    with pytest.raises(CohortRefused):
        mine.leave_out(ten, [1, 2, 3, 4, 5, 9, 10])


def test_all_survivors_are_no_news():
    """A round without a dropout writes nothing."""
    memory = InMemory()
    rule(memory).leave_out(contract(1, 2, 3, absent=0), [1, 2, 3])
    assert memory.read(DOCUMENT) == {}


def test_dropouts_that_the_operator_accepts_bind_no_later_run():
    """They are noted for the operator, apart from what the rule counts."""
    memory = InMemory()
    mine, ten = rule(memory, accept_dropouts=True), contract(*range(1, 11), absent=2)
    mine.join(ten)
    mine.leave_out(ten, range(1, 10))
    mine.join(ten)
    noted = memory.read(DOCUMENT)["digits"]
    assert [len(sites) for sites in noted["accepted"]] == [9]
    assert [len(sites) for sites in noted["cohorts"]] == [10]
    with pytest.raises(CohortRefused):
        mine.join(contract(*range(1, 10)))


def private(memory: SiteMemory, **changes: Any) -> CohortRule:
    """The rule of a run with differential privacy."""
    return rule(memory, is_private=True, **changes)


def test_private_sum_without_a_site_of_an_open_one_is_refused():
    """Their difference is that site's update, but for the noise of the others."""
    memory = InMemory()
    rule(memory).join(contract(1, 2, 3, 4, 5))
    before = memory.read(DOCUMENT)
    with pytest.raises(CohortRefused, match="would single out site-05, but") as caught:
        private(memory).join(contract(1, 2, 3, 4))
    assert "make training private" not in str(caught.value)
    with pytest.raises(ContractRefused) as refused:
        private(memory).check_contract(contract(1, 2, 3, 4))
    assert refused.value.key == "members"
    assert memory.read(DOCUMENT) == before


def test_open_sum_with_a_site_more_than_a_private_one_is_refused(tmp_path: Path):
    """The same in the other order; private sums are durable as open ones are."""
    private(FileMemory(tmp_path)).join(contract(1, 2, 3, 4))
    with pytest.raises(CohortRefused, match="would single out site-05, but"):
        rule(FileMemory(tmp_path)).join(contract(1, 2, 3, 4, 5))
    rule(FileMemory(tmp_path)).join(contract(1, 2, 3, 4))


def test_private_sums_may_differ_by_any_site():
    """Each update that stands alone has the noise of its own sum."""
    memory = InMemory()
    private(memory).join(contract(1, 2, 3, 4, 5))
    private(memory).join(contract(1, 2, 3, 4))
    private(memory).join(contract(1, 2, 3))


def test_sites_that_were_in_private_sums_alone_need_no_group():
    """Site 6 is singled out, by sums that all hold its noise."""
    memory = InMemory()
    rule(memory).join(contract(1, 2, 3, 4, 5))
    private(memory).join(contract(1, 2, 3, 4, 5, 6))
    private(memory).join(contract(1, 2, 3, 4, 5, 7, 8))
    with pytest.raises(CohortRefused, match="single out site-06"):
        rule(memory).join(contract(1, 2, 3, 4, 5, 6))


def test_private_sums_split_groups_together():
    """Two that leave three sites out each, and overlap: no pair of sums shows it."""
    memory = InMemory()
    rule(memory).join(contract(*range(1, 10)))
    private(memory).join(contract(*range(1, 7)))
    with pytest.raises(CohortRefused, match="single out"):
        private(memory).join(contract(1, 2, 3, 4, 8, 9))
    private(memory).join(contract(1, 2, 3, 7, 8, 9))


def test_private_sum_that_splits_nothing_is_allowed_whatever_was_before():
    """As where an operator once accepted less: it tells no more of open sums."""
    memory = InMemory()
    for sites in ((1, 2, 3, 4, 5), (1, 2, 3, 4)):
        rule(memory, smallest=1).join(contract(*sites))
    private(memory).join(contract(1, 2, 3, 4, 5))
    private(memory).join(contract(1, 2, 3, 4))
    with pytest.raises(CohortRefused, match="single out site-04, but"):
        private(memory).join(contract(1, 2, 3))


def test_dropouts_of_private_rounds_are_held_against_open_sums():
    """Before any open sum all are allowed, and noted; after one, those in groups."""
    ten = contract(*range(1, 11), absent=3)
    memory = InMemory()
    assert private(memory).threshold_fault(10, 9) == ""
    private(memory).join(ten)
    private(memory).leave_out(ten, range(1, 10))
    with pytest.raises(CohortRefused, match="single out site-10"):
        rule(memory).join(ten)
    memory = InMemory()
    rule(memory).join(ten)
    private(memory).leave_out(ten, range(1, 8))
    with pytest.raises(CohortRefused, match="single out"):
        private(memory).leave_out(ten, range(1, 10))
    private(memory, accept_dropouts=True).leave_out(ten, range(1, 10))
    assert [len(c) for c in memory.read(DOCUMENT)["digits"]["accepted"]] == [9]


def test_private_sums_that_split_nothing_take_no_room():
    """However many rounds lose sites, no more are noted than there are sites."""
    memory, ten = InMemory(), contract(*range(1, 11), absent=3)
    for left in combinations(range(1, 11), 2):
        private(memory).leave_out(ten, {*range(1, 11)} - {*left})
    noted = memory.read(DOCUMENT)["digits"]["private"]
    assert len(noted) <= 10
    with pytest.raises(CohortRefused, match="single out site-01 and site-02 and"):
        rule(memory).join(ten)


def test_memory_of_releases_that_noted_no_private_sums_is_read():
    """And what it holds counts as before."""
    memory = InMemory()
    old = {"digits": {"cohorts": [sorted(cohort(1, 2, 3, 4, 5))]}}
    memory.update(DOCUMENT, lambda _: old)
    with pytest.raises(CohortRefused):
        private(memory).join(contract(1, 2, 3, 4))
    private(memory).join(contract(1, 2, 3, 4, 5, 6))
    kept = memory.read(DOCUMENT)["digits"]
    assert kept["cohorts"] == old["digits"]["cohorts"]
    assert len(kept["private"]) == 1


def test_damaged_memory_is_refused(tmp_path: Path):
    """What was promised is not forgotten because a file was damaged."""
    mine = rule(FileMemory(tmp_path))
    mine.join(contract(1, 2, 3))
    path = tmp_path / f"{DOCUMENT}.json"
    path.write_text(path.read_text().replace("site-03", "site-04"))
    with pytest.raises(CorruptObject):
        mine.check(cohort(1, 2, 3))


def test_refusal_is_a_protocol_error():
    """A site answers it with a line, and no secret has left."""
    assert issubclass(CohortRefused, ProtocolError)
