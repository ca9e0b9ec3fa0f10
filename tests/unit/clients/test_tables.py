"""Tables from files: what is missing, and how a file that cannot be read is named."""

from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from clients.data.tables import Words, table
from clients.user_code import last_frames
from deploy.wiring.parts import deal_data
from federation.errors import SiteError
from federation.job import job_file

CSV = 'age,city\n1,Ulm\n,NA\n3,\n4,""\n'


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_an_empty_field_is_missing_in_each_format(tmp_path: Path, suffix: str):
    file = tmp_path / f"site.{suffix}"
    if suffix == "csv":
        file.write_text(CSV)
    else:
        cells = {"age": [1, None, 3, 4], "city": ["Ulm", None, None, None]}
        parquet.write_table(pa.table(cells), file)
    whole, _ = table(str(file), target="city")
    city = whole.columns["city"]
    assert isinstance(city, Words)
    assert (city.codes.tolist(), city.values) == ([0, -1, -1, -1], ("Ulm",))
    assert str(whole.columns["age"]) == "[ 1. nan  3.  4.]"
    with pytest.raises(SiteError, match=r"'city'.* missing"):
        whole.batch(whole.index)


def test_text_of_another_encoding_is_refused_and_not_left_out(tmp_path: Path):
    file = tmp_path / "site.csv"
    file.write_bytes("age,city\n1,Köln\n2,Ulm\n".encode("latin-1"))
    with pytest.raises(SiteError, match=r"'city' of site.csv is not UTF-8 text"):
        table(str(file))


def test_records_of_unknown_persons_are_nobody_elses(tmp_path: Path):
    """One of them may be a person that other records name."""
    file = tmp_path / "site.csv"
    file.write_text("age,person_id\n1,ann\n2,\n3,bob\n4,\n")
    whole, _ = table(str(file))
    with pytest.raises(SiteError, match=r"'person_id'.* drop records"):
        _ = whole.persons
    known = whole.subset(whole.index[::2]).persons
    assert known is not None
    assert len(known) == 2


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("north.csv", None, "cannot read north.csv: No such file"),
        ("north.parquet", None, "cannot read north.parquet: No such file"),
        ("north.csv", "a,b\n1,2\n707\n", "Expected 2 columns, got 1; mend"),
        ("north.csv", "", "Empty CSV file; mend"),
        ("north.csv", "a,b\n", "north.csv has no records"),
        ("north.csv", "a,b,a\n1,2,3\n", "north.csv has several columns 'a'"),
        ("north.parquet", "707", "it is damaged, or no .parquet file; mend"),
        ("north.npz", "707", "it is damaged, or no .npz file; mend"),
    ],
)
def test_a_fault_names_site_and_file_and_no_value(
    tmp_path: Path, name: str, content: str | None, why: str
):
    file = tmp_path / name
    if content is not None:
        file.write_text(content)
    data = {"source": "clients.data:table", "options": {"path": str(file)}}
    sites = [{"name": "clinic", "data": data}, {"name": "other", "data": data}]
    asked = {"columns": [{"names": ["a"], "low": 0.0, "high": 1.0}]}
    job = job_file.parse({"name": "s", "statistics": asked, "sites": sites})
    with pytest.raises(SiteError, match=f"^site 'clinic': .*{why}") as caught:
        deal_data(job)
    for said in (last_frames(caught.value), caught.value.outside):
        assert "707" not in said
        assert "pyarrow" not in said
