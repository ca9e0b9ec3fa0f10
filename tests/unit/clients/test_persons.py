"""Whose record each example is: what data may say, and what follows at a site."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.small_jobs import small_job

from clients.data.datasets import Examples, as_dataset
from clients.data.partition import partition
from clients.data.persons import as_persons, numbered_alike
from clients.data.privacy_units import (
    held_out_units,
    note_on_persons,
    num_units,
    persons_of,
)
from federation.errors import JobError, SiteError
from federation.job.spec import PartitionSpec

INPUTS = np.arange(12, dtype=np.float32).reshape(6, 2)
IDS = np.array([3, 3, 1, 2, 1, 3])


class Frame:
    """Columns as pandas has them: texts are objects."""

    columns = ("a", "person_id", "label")

    def __getitem__(self, name: str) -> Any:
        return {
            "a": Column(np.arange(3.0)),
            "person_id": Column(np.array(["x", "y", "x"], dtype=object)),
            "label": Column(np.array([0, 1, 0])),
        }[name]

    def to_numpy(self):
        raise NotImplementedError


class Column:
    def __init__(self, values: np.ndarray) -> None:
        self._values = values

    def to_numpy(self):
        return self._values


class Rows:
    """Items with columns, as Hugging Face has them."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows
        self.column_names = list(rows[0])

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return [row[key] for row in self._rows]
        return self._rows[key]


class Items:
    """A map-style dataset with an attribute."""

    def __init__(self, persons: Any) -> None:
        self.persons = persons

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return torch.ones(2) * index, index


def person_job(**options: Any):
    private = {"unit": "person", "target_epsilon": 8.0}
    return small_job(
        privacy={"differential_privacy": private | options},
        aggregation={"weights": "uniform"},
    )


def test_arrays_items_and_columns_name_persons():
    """And a column of persons is no input."""
    examples = as_dataset(Examples(inputs=INPUTS, persons=IDS), name="x")
    assert examples.persons is not None
    assert examples.subset(np.array([0, 3])).persons.tolist() == [3, 2]
    frame = as_dataset(Frame(), name="x")
    assert frame.persons is not None
    assert frame.persons.tolist() == ["x", "y", "x"]
    assert list(frame.batch(np.array([0]))[0]) == ["a"]
    for attribute in ([5, 6, 5], ["a", "b", "a"], torch.tensor([5, 6, 5])):
        items = as_dataset(Items(attribute), name="x")
        assert items.persons is not None
        assert len(items.persons) == 3
    rows = [{"a": float(i), "person_id": who} for i, who in enumerate("xyx")]
    for source in (rows, Rows(rows)):
        listed = as_dataset(source, name="x")
        assert listed.persons is not None
        assert listed.persons.tolist() == ["x", "y", "x"]
        assert list(listed.batch(np.array([0, 1]))[0]) == ["a"]


@pytest.mark.parametrize("other", [None, [1, 2], ["a", None, "b"], [0.5, 1.0, 2.0], 7])
def test_an_attribute_of_another_meaning_names_no_persons(other: Any):
    """As with `targets`: the data of others still loads."""
    assert as_dataset(Items(other), name="x").persons is None


@pytest.mark.parametrize(
    ("persons", "said"),
    [
        (np.array([1.0, np.nan, 1.0]), "not float64"),
        (np.array(["a", None, "b"], dtype=object), "not NoneType"),
        ([["a"], ["b"], ["c"]], "text for each record"),
    ],
)
def test_a_column_that_names_no_persons_is_refused(persons: Any, said: str):
    """NaN would be a new person for each record whose person is unknown."""
    columns = {"inputs": np.ones((3, 2)), "person_id": persons}
    with pytest.raises(SiteError, match=said):
        as_dataset(columns, name="train")
    with pytest.raises(ValueError, match=r"shape \(6,\)"):
        Examples(inputs=INPUTS, persons=np.array([1, 2]))


def test_units_of_a_site_are_persons():
    """As many as there are different names; records where these are the unit."""
    named = as_dataset(Examples(inputs=INPUTS, persons=IDS), name="x")
    assert num_units(person_job(), named) == 3
    assert num_units(small_job(), named) == 6
    assert persons_of(small_job(), named) is None
    with pytest.raises(JobError, match="the person of each"):
        persons_of(person_job(), as_dataset((INPUTS, None), name="x"))


@pytest.mark.parametrize("unit", ["none", "record", "person"])
def test_records_of_named_persons_are_noted(unit: str):
    """If a person has several, and single records are protected."""
    private = {} if unit == "none" else {"unit": unit, "target_epsilon": 8.0}
    job = small_job(
        privacy={"differential_privacy": private}, aggregation={"weights": "uniform"}
    )
    several = as_dataset(Examples(inputs=INPUTS, persons=IDS), name="x")
    assert bool(note_on_persons(job, several)) == (unit == "record")
    for persons in (None, np.arange(6)):
        one_each = as_dataset(Examples(inputs=INPUTS, persons=persons), name="x")
        assert note_on_persons(job, one_each) == ""


def test_noised_results_are_of_one_record_of_each_person_not_trained_on():
    """So a person changes one side, and that by one record."""
    train = as_dataset(Examples(inputs=INPUTS, persons=IDS), name="train")
    held = as_dataset(
        Examples(inputs=INPUTS, persons=np.array([9, 3, 9, 8, 1, 9])), name="held"
    )
    kept = held_out_units(person_job(), train, held)
    assert kept.persons is not None
    assert kept.persons.tolist() == [9, 8]
    assert held_out_units(person_job(held_out="public"), train, held) is held
    with pytest.raises(JobError, match="hold out whole persons"):
        held_out_units(person_job(), train, train)


def test_a_person_is_dealt_to_one_site_with_all_records():
    """Also those who are only held out, so that every site gets some."""
    train_ids = np.repeat(np.arange(8), np.arange(1, 9))
    held_ids = np.array([100, 100, 101, 102, 103, 7])

    def data(ids: np.ndarray) -> Any:
        inputs = np.ones((len(ids), 1), np.float32)
        return as_dataset(Examples(inputs=inputs, persons=ids), name="x")

    train, held = data(train_ids), data(held_ids)
    spec, rng = PartitionSpec(kind="by_person"), np.random.default_rng(0)
    parts = partition(train, held, spec, site_names=["a", "b"], rng=rng)
    whose = [set(train_ids[t].tolist()) | set(held_ids[h].tolist()) for t, h in parts]
    assert not whose[0] & whose[1]
    assert whose[0] | whose[1] == set(train_ids.tolist()) | set(held_ids.tolist())
    assert [len(t) for t, _ in parts] == [18, 18]
    unnamed = as_dataset((INPUTS, None), name="x")
    with pytest.raises(SiteError, match="does not name persons"):
        partition(unnamed, unnamed, spec, site_names=["a"], rng=rng)


def test_large_numbers_of_two_types_are_different_persons():
    """Signed ones in the training part, unsigned ones in the other."""
    trained = np.array([2**53, 2**53, 2**53 + 2, 5, 7, 9])
    held = np.array([2**53 + 1, 2**53 + 1, 5], dtype=np.uint64)
    train = as_dataset(Examples(inputs=INPUTS, persons=trained), name="train")
    held_out = as_dataset(Examples(inputs=INPUTS[:3], persons=held), name="held")
    assert len(held_out_units(person_job(), train, held_out)) == 1


LATIN, CUT = b"caf\xe9", b"caf\xc3"  # Neither is UTF-8.
SPELT = b"caf\xc3\xa9"


@pytest.mark.parametrize(
    ("train", "held_out", "numbers"),
    [
        ([SPELT, b"x"], ["x", "caf\u00e9", "cafe"], [[0, 2], [2, 0, 1]]),
        ([LATIN, CUT], [SPELT, LATIN], [[2, 1], [0, 2]]),
        ([LATIN, "x"], ["x", CUT], [[1, 2], [2, 0]]),
        ([b"a", b"a\0"], ["a\0", "a"], [[0, 1], [1, 0]]),
        ([1, 2], [b"2", "\u0662"], [[0, 1], [1, 2]]),
    ],
)
def test_names_that_are_no_ascii_are_compared_exactly(
    train: list[Any], held_out: list[Any], numbers: list[list[int]]
):
    """As lists and columns of objects: equal names have one number, and no others."""
    for kind in (list, lambda names: np.array(names, dtype=object)):
        parts = [as_persons(kind(names)) for names in (train, held_out)]
        found = [each.tolist() for each in numbered_alike(*parts)]
        assert _alike(found) == _alike(numbers)


def _alike(parts: list[list[int]]) -> list[bool]:
    """Which pairs of all numbers are equal."""
    numbers = [number for part in parts for number in part]
    return [one == other for one in numbers for other in numbers]


def test_bytes_of_one_part_are_the_texts_of_another():
    """A person who is trained on is not held out, however the parts are stored."""
    names = np.array([LATIN, SPELT, b"x"]), np.array(["caf\u00e9", "y", "x"])
    train, held_out = (
        as_dataset(Examples(inputs=INPUTS[:3], persons=each), name="x")
        for each in names
    )
    kept = held_out_units(person_job(), train, held_out)
    assert kept.persons is not None
    assert kept.persons.tolist() == ["y"]


class SeriesOfNames:
    """Gives an array of objects for itself, as a Series of pandas does."""

    def __init__(self, names: list[Any]) -> None:
        self._names = names

    def __array__(self, *_: object, **__: object) -> NDArray[Any]:
        return np.array(self._names, dtype=object)


def test_a_column_of_a_frame_names_persons():
    for names in (["b", "a"], [b"b", "a"]):
        assert as_persons(SeriesOfNames(names)).tolist() == ["b", "a"]


@pytest.mark.parametrize("value", [float("nan"), 1.5, None, True])
def test_a_missing_name_among_texts_is_no_person(value: Any):
    """All records without one would be those of one person, called nan."""
    for names in (
        ["a", value],
        ("a", value),
        np.array(["a", value], dtype=object),
        SeriesOfNames(["a", value]),
    ):
        with pytest.raises(ValueError, match="whose person is unknown"):
            as_persons(names)
