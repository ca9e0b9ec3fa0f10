"""A site's rule on sums over different sites: what it records and what it refuses."""

from pathlib import Path
from typing import Any

import pytest
from support.secagg_parties import Parties

from clients.cohorts import DOCUMENT, Cohort, CohortRule, lineage
from clients.site_memory import FileMemory, InMemory, SiteMemory
from federation.errors import CorruptObject, ProtocolError
from federation.ids import SiteId
from privacy.secagg.contract import Contract, members_of
from privacy.secagg.errors import CohortRefused, ContractRefused

PARTIES = Parties(10)


def rule(memory: SiteMemory, **changes: Any) -> CohortRule:
    """A rule with groups of three, and no dropouts."""
    values = {"lineage": "digits", "smallest": 3, "accept_dropouts": False}
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


def test_lineage_is_of_source_and_options():
    """And of nothing that an aggregator chooses from run to run."""
    made = lineage(dataset="a:b", options={"x": 1, "y": 2})
    same = lineage(dataset="a:b", options={"y": 2, "x": 1})
    others = {
        lineage(dataset="a:c", options={"x": 1, "y": 2}),
        lineage(dataset="a:b", options={"x": 1}),
    }
    assert made == same
    assert made not in others
    assert len(others) == 2


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
