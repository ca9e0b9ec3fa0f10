"""Tables from files: what is missing, and how a file that cannot be read is named."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from clients.data.tables import Table, Words, table
from clients.statistics.columns import SiteColumns, read
from clients.user_code import last_frames
from deploy.wiring.parts import deal_data
from federation.errors import SiteError
from federation.ids import SiteId
from federation.job import job_file, statistics_checks

CSV = 'age,city\n1,Ulm\n,NA\n3,\n4,""\n'


def statistics_of(data: Table, columns: dict[str, Any]) -> SiteColumns:
    asked = {"columns": [columns]}
    job = job_file.parse({"name": "s", "statistics": asked, "sites": [{"name": "a"}]})
    return read(statistics_checks.table(job), data, SiteId("a"), print)


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
    file.write_bytes("größe\n1\n2\n".encode("latin-1"))
    with pytest.raises(SiteError, match=r"names of its columns .*UTF-8"):
        table(str(file))


def test_an_empty_column_is_missing_as_number_category_and_text(tmp_path: Path):
    (tmp_path / "site.csv").write_text("age,note\n1,\n2,\n")
    note = pa.array([None, None], pa.null())
    parquet.write_table(
        pa.table({"age": [1, 2], "note": note}), tmp_path / "site.parquet"
    )
    unit = {"low": 0.0, "high": 9.0}
    asked: list[dict[str, Any]] = [
        {"names": ["note"], **unit},
        {"names": ["note"], "categories": ["a", "b"]},
        {"names": ["note.length"], **unit},
    ]
    for suffix in ("csv", "parquet"):
        whole, _ = table(str(tmp_path / f"site.{suffix}"))
        for columns in asked:
            found = statistics_of(whole, columns)
            if "low" in columns:
                assert np.isnan(found.numbers[columns["names"][0]]).all()
            else:
                assert found.codes["note"].tolist() == [-1, -1]


def test_a_column_of_another_kind_is_named_with_its_kind(tmp_path: Path):
    file = tmp_path / "site.csv"
    file.write_text("age,seen\n1,2024-01-31\n")
    whole, _ = table(str(file))
    for columns in ({"low": 0.0, "high": 9.0}, {"categories": ["2024-01-31"]}):
        with pytest.raises(SiteError, match=r"'seen' of 'date32.*columns\[0\]"):
            statistics_of(whole, {"names": ["seen"], **columns})
    with pytest.raises(SiteError, match=r"'seen' of 'date32.*\(target\)"):
        table(str(file), target="seen")
    with pytest.raises(SiteError, match=r"'seen' of 'date32.*\(categories\)"):
        table(str(file), categories={"seen": ["a"]})
    dates, _ = table(str(file), text=["seen"])
    assert statistics_of(
        dates, {"names": ["seen"], "categories": ["2024-01-31"]}
    ).codes["seen"].tolist() == [0]


def test_columns_are_text_if_their_options_say_so(tmp_path: Path):
    file = tmp_path / "site.csv"
    file.write_text("icd,is_old,age\n001,true,1\n,false,2\n")
    whole, _ = table(str(file), text=["icd", "is_old"])
    icd, is_old = whole.columns["icd"], whole.columns["is_old"]
    assert isinstance(icd, Words)
    assert isinstance(is_old, Words)
    assert (icd.codes.tolist(), icd.values) == ([0, -1], ("001",))
    assert is_old.values == ("true", "false")
    with pytest.raises(SiteError, match=r"no column 'code' \(text\)"):
        table(str(file), text=["code"])
    np.save(tmp_path / "site.npy", np.ones((2, 2)))
    with pytest.raises(SiteError, match="text is for CSV"):
        table(str(tmp_path / "site.npy"), text=["0"])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"held_out_fraction": 1.0}, "from 0 to below 1"),
        ({"held_out_fraction": -0.1}, "from 0 to below 1"),
        ({"held_out_fraction": 0.9}, "leaves no record of site.csv to train on"),
        ({"text": "icd"}, "text is a list"),
    ],
)
def test_options_that_leave_nothing_are_refused(
    tmp_path: Path, options: dict[str, Any], reason: str
):
    file = tmp_path / "site.csv"
    file.write_text("icd,age\n001,3\n002,4\n")
    with pytest.raises(SiteError, match=reason):
        table(str(file), **options)


def test_whole_numbers_with_gaps_take_codes_of_a_list(tmp_path: Path):
    cells = {"code": [7.0, None, 3.0], "is_old": [True, None, False]}
    parquet.write_table(pa.table(cells), tmp_path / "site.parquet")
    listed = {"code": ["3", "7"], "is_old": ["0", "1"]}
    whole, _ = table(str(tmp_path / "site.parquet"), categories=listed)
    for name in listed:
        column = whole.columns[name]
        assert isinstance(column, Words)
        assert column.codes.tolist() == [1, -1, 0], name


def test_records_of_unknown_persons_are_nobody_elses(tmp_path: Path):
    """One of them may be a person that other records name."""
    file = tmp_path / "site.csv"
    for ann, bob in (("ann", "bob"), ("7", "8")):
        file.write_text(f"age,person_id\n1,{ann}\n2,\n3,{bob}\n4,\n")
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
        ("north.csv", "a;b\n1;2\n", "north.csv has one column: commas must"),
        ("north.csv", "a;b\n1,5;2\n", r"Expected 1 columns, got 2 .commas must"),
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
