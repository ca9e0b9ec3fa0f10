"""What a site's data are called, and what is remembered by that name."""

from pathlib import Path
from typing import Any

import pytest

from clients.privacy import cohorts
from clients.privacy.cohorts import CohortRule
from clients.privacy.dataset_name import DOCUMENT, dataset_name, lineage
from clients.privacy.site_memory import FileMemory, InMemory, SiteMemory
from federation.errors import JobError
from federation.ids import SiteId
from privacy.secagg.errors import CohortRefused

FIVE = ["a", "b", "c", "d", "e"]


def named(memory: SiteMemory, name: str = "records", **data: Any) -> str:
    """Name the data at a place."""
    return dataset_name(memory, name, **{"source": "a:b", "options": {}} | data)


def check(memory: SiteMemory, name: str, sites: list[str]) -> None:
    """Ask for an open sum on data of a name."""
    rule = CohortRule(
        memory=memory,
        lineage=name,
        smallest=3,
        accept_dropouts=False,
        is_private=False,
    )
    rule.check(frozenset(map(SiteId, sites)))


def test_place_is_of_source_and_options():
    """And of nothing that an aggregator chooses from run to run."""
    made = lineage(dataset="a:b", options={"x": 1, "y": 2})
    assert made == lineage(dataset="a:b", options={"y": 2, "x": 1})
    others = {
        lineage(dataset="a:c", options={"x": 1, "y": 2}),
        lineage(dataset="a:b", options={"x": 1}),
    }
    assert made not in others
    assert len(others) == 2


def test_data_keep_their_name(tmp_path: Path):
    """Or with a new one they would begin anew; a new process knows it, too."""
    assert named(FileMemory(tmp_path)) == "records"
    assert named(FileMemory(tmp_path)) == "records"
    with pytest.raises(JobError, match=r"Set data\.name to 'records'; if"):
        named(FileMemory(tmp_path), "patients")
    assert named(FileMemory(tmp_path)) == "records"


def test_name_stays_when_data_move():
    """Another place or another option is the same people's."""
    memory = InMemory()
    assert named(memory) == named(memory, source="s3://b/c") == "records"
    assert named(memory, options={"year": 2}) == "records"
    assert named(memory, "others", source="s3://b/d") == "others"


def test_other_records_at_the_same_place_take_a_file_removed(tmp_path: Path):
    """Which forgets what has which name, and nothing of what a name has done."""
    memory = FileMemory(tmp_path)
    named(memory)
    memory.update(cohorts.DOCUMENT, lambda _: {"records": {"cohorts": [FIVE]}})
    (tmp_path / f"{DOCUMENT}.json").unlink()
    assert named(memory, "others") == "others"
    check(memory, "others", FIVE[:4])
    with pytest.raises(CohortRefused):
        check(memory, "records", FIVE[:4])
