"""Reading what data sources return, and the sources out of the box."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from clients.data import (
    Examples,
    as_dataset,
    breast_cancer,
    digits,
    load,
    text_folder,
)
from federation.errors import JobError, SiteError


class Squares:
    """A map-style dataset that inherits nothing."""

    def __init__(self, size: int = 6, targets: object = None) -> None:
        self.size = size
        if targets is not None:
            self.targets = targets

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> object:
        return np.full(3, index, np.float64), index % 2


class OneItem:
    """A map-style dataset of one given item."""

    def __init__(self, item: object) -> None:
        self.item = item

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> object:
        return self.item


def read(obj: object):
    return as_dataset(obj, name="train of x:y")


INPUTS = np.arange(12.0).reshape(6, 2)
CLASSES = np.array([0, 1, 0, 1, 0, 1], dtype=np.int32)


@pytest.mark.parametrize(
    "obj",
    [
        Examples(inputs=INPUTS, targets=CLASSES),
        (INPUTS, CLASSES),
        (torch.from_numpy(INPUTS), torch.from_numpy(CLASSES)),
        (torch.from_numpy(INPUTS).bfloat16(), CLASSES),
        (INPUTS.astype(np.float16), CLASSES),
        TensorDataset(torch.from_numpy(INPUTS), torch.from_numpy(CLASSES)),
        list(zip(INPUTS, CLASSES.tolist(), strict=True)),
    ],
    ids=["examples", "numpy", "torch", "bfloat16", "float16", "tensors", "list"],
)
def test_forms_of_data_read_alike(obj: object):
    """Whatever holds the examples, batches are float32 inputs and int64 classes."""
    dataset = read(obj)
    inputs, targets = dataset.batch(np.array([4, 1]))
    assert len(dataset) == 6
    assert (inputs.dtype, targets.dtype) == (torch.float32, torch.int64)
    assert inputs.tolist() == [[8.0, 9.0], [2.0, 3.0]]
    assert targets.tolist() == [0, 1]


NESTED = {"point": INPUTS, "more": (CLASSES, [INPUTS[:, :1] > 3])}


@pytest.mark.parametrize(
    "obj",
    [
        (NESTED, (CLASSES, INPUTS)),
        Examples(inputs=NESTED, targets=(CLASSES, INPUTS)),
        [
            (
                {"point": INPUTS[i], "more": (CLASSES[i], [INPUTS[i, :1] > 3])},
                (CLASSES[i], INPUTS[i]),
            )
            for i in range(6)
        ],
    ],
    ids=["tuple", "examples", "list"],
)
def test_batches_keep_the_nesting_of_the_data(obj: object):
    """Tuples, lists and dicts; each leaf has the chosen records on its first axis."""
    dataset = read(obj)
    inputs, targets = dataset.subset(np.array([5, 4, 1])).batch(np.array([1, 2]))
    assert len(dataset) == 6
    assert dataset.labels() is None
    assert inputs["point"].tolist() == [[8.0, 9.0], [2.0, 3.0]]
    codes, (flags,) = inputs["more"]
    assert (codes.dtype, codes.tolist()) == (torch.int64, [0, 1])
    assert (flags.dtype, flags.tolist()) == (torch.float32, [[1.0], [0.0]])
    assert targets[0].tolist() == [0, 1]
    assert targets[1].tolist() == [[8.0, 9.0], [2.0, 3.0]]


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({"a": INPUTS, "b": INPUTS[:5]}, "there are 6 inputs and 5 inputs"),
        ({"a": INPUTS, "b": "text"}, "expected"),
        ({}, "no array"),
    ],
)
def test_nested_data_of_other_things(inputs: object, said: str):
    """Every leaf is an array with one row for each record."""
    with pytest.raises(SiteError, match=said):
        read((inputs, CLASSES))


@pytest.mark.parametrize("booleans", [CLASSES > 0, torch.from_numpy(CLASSES > 0)])
def test_boolean_targets_are_classes(booleans: object):
    """True and false are the classes 1 and 0."""
    dataset = read((INPUTS, booleans))
    assert dataset.batch(np.arange(6))[1].tolist() == CLASSES.tolist()
    assert dataset.labels().tolist() == CLASSES.tolist()


@pytest.mark.parametrize("obj", [(INPUTS, CLASSES), Squares(targets=CLASSES)])
def test_subsets_compose(obj: object):
    """A subset of a subset counts in the subset's own indices."""
    whole = read(obj)
    part = whole.subset(np.array([5, 3, 0])).subset(np.array([2, 0]))
    assert len(part) == 2
    assert part.labels().tolist() == [0, 1]
    expected, _ = whole.batch(np.array([0, 5]))
    assert torch.equal(expected, part.batch(np.array([0, 1]))[0])


def test_groups_follow_subsets():
    """Groups are those of the subset's examples; names stay."""
    examples = Examples(
        inputs=INPUTS, groups=np.array([0, 0, 1, 1, 2, 2]), group_names=("a", "b", "c")
    )
    part = read(examples).subset(np.array([5, 2]))
    assert part.groups.tolist() == [2, 1]
    assert part.group_names == ("a", "b", "c")


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ([0, 1, 0, 1, 0, 1], [0, 1, 0, 1, 0, 1]),
        (torch.tensor([2] * 6), [2] * 6),
        ([[0], [1, 2]], None),
        (["cat"] * 6, None),
        ([0, 1], None),
        (None, None),
    ],
)
def test_labels_of_map_style_datasets(targets: object, expected: object):
    """Classes come from an attribute ``targets``, if it holds one per example."""
    labels = read(Squares(targets=targets)).labels()
    assert expected == (None if labels is None else labels.tolist())


@pytest.mark.parametrize(
    ("obj", "message"),
    [
        (INPUTS, r"is ndarray\[6, 2\]: expected"),
        (None, "is None: expected"),
        ({"labels": CLASSES}, "no column besides labels"),
        (
            {"x": INPUTS, "label": CLASSES, "labels": CLASSES},
            "columns labels and label: keep one",
        ),
        ({"x": [[1], [1, 2]], "label": [0, 1]}, "column 'x' holds rows of different"),
        (iter([]), "is a list_iterator: expected"),
        ((INPUTS,), "tuple of length 1"),
        ((INPUTS.tolist(), CLASSES), r"is \(list of length 6, nd.*make lists arrays"),
        ((INPUTS, CLASSES.tolist()), r"is \(ndarray\[6, 2\], list of length 6\)"),
        ((INPUTS, CLASSES[:5]), "there are 6 inputs and 5 targets"),
        ((INPUTS, np.array(["a"] * 6)), "numbers, .* not text of .* replace each"),
        (
            ({"a": INPUTS, "b": (INPUTS, CLASSES.astype("U1"))}, CLASSES),
            r"'b'\]\[1\] must",
        ),
        ({"a": CLASSES, "b": CLASSES.astype("U1")}, r"inputs\['b'\] must .* not text"),
        ((INPUTS.astype(object), CLASSES), "object of .*; replace each text"),
        ((np.array(1.0), None), "array of numbers"),
        ((INPUTS[:0], None), "has no example"),
        ([], "has no example"),
        (list(CLASSES), r"x:y is an int\d+: expected"),
        ([INPUTS], r"x:y is ndarray\[6, 2\]"),
        (OneItem({"label": 1}), "x:y has no column besides"),
        ([{}], "each item .* has no columns"),
        (OneItem((object(), 1)), "inputs of each item .* is an object: expected"),
        (OneItem((np.array("text"), 1)), "cannot be stacked"),
        (OneItem(("text", 1)), "inputs of each .* is a str: expected"),
        (OneItem((None, None)), r"is \(None, None\)"),
    ],
)
def test_wrong_data_is_explained(obj: object, message: str):
    """The message says what came and what was expected."""
    with pytest.raises(SiteError, match=message) as caught:
        read(obj)
    assert "train of x:y" in str(caught.value)


def test_items_without_targets():
    """Items of language models are windows with None as target."""
    inputs, targets = read([(np.arange(3), None)] * 2).batch(np.arange(2))
    assert inputs.dtype == torch.int64
    assert targets is None


@pytest.mark.parametrize(
    ("groups", "names", "message"),
    [
        (np.zeros(5, int), ("a",), "6 inputs and 5 groups"),
        (np.ones(6, int), ("a",), "indices into the 1 group_names"),
        (np.zeros(6), ("a",), "groups must be integers"),
    ],
)
def test_examples_check_their_groups(
    groups: NDArray[Any], names: tuple[str, ...], message: str
):
    """Groups are one index per example into the names."""
    with pytest.raises(ValueError, match=message):
        Examples(inputs=INPUTS, groups=groups, group_names=names)


def test_load_names_the_key():
    """A wrong option is reported under the key that holds it."""
    with pytest.raises(JobError, match=r"sites\[1\].data.options.*'fraction'"):
        load("clients.data:digits", {"fraction": 0.5}, key="sites[1].data")


@pytest.mark.parametrize(
    "source", [lambda: (INPUTS, CLASSES, 1), lambda: None, lambda: (INPUTS, CLASSES)]
)
def test_load_needs_two_datasets(
    source: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    """A source that returns something else than two datasets is refused."""
    monkeypatch.setattr("clients.data.digits", source)
    with pytest.raises(SiteError, match=r"clients.data:digits.*expected"):
        load("clients.data:digits", {})


@pytest.mark.parametrize(
    ("source", "shape"), [(digits, (1, 8, 8)), (breast_cancer, (30,))]
)
def test_bundled_data_is_split_by_class(
    source: Callable[..., Any], shape: tuple[int, ...]
):
    """Every class holds out its fifth; the split depends on the seed alone."""
    train, held_out = source()
    assert train.inputs.shape[1:] == shape
    assert train.inputs.dtype == np.float32
    both = np.bincount(train.targets) + np.bincount(held_out.targets)
    expected = np.round(0.2 * both).astype(int)
    assert expected.tolist() == np.bincount(held_out.targets).tolist()
    np.testing.assert_array_equal(held_out.inputs, source()[1].inputs)
    assert not np.array_equal(held_out.inputs, source(seed=1)[1].inputs)


@pytest.mark.parametrize("source", [digits, text_folder])
@pytest.mark.parametrize("fraction", [0, 1, -0.5])
def test_held_out_fraction_is_checked(source: Callable[..., Any], fraction: float):
    """Both sides need examples."""
    with pytest.raises(SiteError, match="between 0 and 1"):
        source(held_out_fraction=fraction)


@pytest.fixture
def folder(tmp_path: Path):
    """Three groups: twenty files of 50 bytes each, and files that do not count."""
    letters = {"a": b"a", "b/deep": b"b", ".": b"t"}
    for place, letter in letters.items():
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
        for i in range(20):
            (tmp_path / place / f"file{i}.txt").write_bytes(letter * 49 + b"%c" % i)
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "x.txt").write_bytes(b"!" * 99)
    (tmp_path / ".x.txt").write_bytes(b"!" * 99)
    (tmp_path / "a" / "x.md").write_bytes(b"!" * 99)
    return tmp_path


def test_text_folder_groups_by_first_folder(folder: Path):
    """Groups are the first parts of the paths, and hold only their own text."""
    train, held_out = text_folder(str(folder), "*.txt", 24)
    assert train.group_names == held_out.group_names == ("(top level)", "a", "b")
    for side, num_bytes in ((train, 900), (held_out, 100)):
        assert np.bincount(side.groups).tolist() == [(num_bytes - 1) // 24] * 3
        letters = side.inputs[np.arange(len(side.inputs)), 0]
        assert set(letters[side.groups == 2].tolist()) == {ord("b")}


def test_text_is_held_out_by_whole_files(folder: Path):
    """No file has bytes on both sides: each file's last byte marks it."""
    train, held_out = text_folder(str(folder), "*.txt", 24)
    for group in range(3):
        marks = [
            {b for b in side.inputs[side.groups == group].flatten() if b < 20}
            for side in (train, held_out)
        ]
        assert marks[1]
        assert not marks[0] & marks[1]


def test_text_split_depends_on_paths_and_seed_alone(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
):
    """A copy of the folder elsewhere is split alike, another seed otherwise."""
    copy = tmp_path_factory.mktemp("copy")
    for file in sorted(folder.rglob("*.txt"), reverse=True):
        target = copy / file.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.read_bytes())
    first, second = (text_folder(str(f), "*.txt", 24) for f in (folder, copy))
    np.testing.assert_array_equal(first[1].inputs, second[1].inputs)
    other = text_folder(str(folder), "*.txt", 24, seed=1)
    assert not np.array_equal(first[1].inputs, other[1].inputs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "no/such/folder"}, "no folder 'no/such/folder'"),
        ({"pattern": "*.none"}, "too little text"),
        ({"context": 5000}, "too little text"),
        ({"context": 0}, "context is 0"),
        ({"max_bytes": 0}, "too little text"),
    ],
)
def test_text_that_cannot_be_read_is_explained(
    folder: Path, options: dict[str, Any], message: str
):
    """A wrong folder, pattern or size is answered with what was missing."""
    with pytest.raises(SiteError, match=message):
        text_folder(**{"path": str(folder), "pattern": "*.txt", **options})


def columns(rows: Sequence[Any], **_: object) -> dict[str, torch.Tensor]:
    """Pad tokens to the longest of a batch, as a user's collate does."""
    size = max(len(row["ids"]) for row in rows)
    padded = [row["ids"] + [0] * (size - len(row["ids"])) for row in rows]
    return {
        "ids": torch.tensor(padded),
        "labels": torch.tensor([row["label"] for row in rows]),
    }


RAGGED = [{"ids": [1, 2, 3], "label": 1}, {"ids": [4], "label": 0}]


def test_columns_and_rows_of_dicts_are_the_same():
    """The targets' column is apart; all others are arguments of the model by name."""
    rows = [{"x": x, "label": int(y)} for x, y in zip(INPUTS, CLASSES, strict=True)]
    by_column = {"x": INPUTS.tolist(), "label": CLASSES}
    for obj in (rows, by_column):
        dataset = as_dataset(obj, name="train")
        inputs, targets = dataset.batch(np.array([1, 4]))
        assert list(inputs) == ["x"]
        assert torch.equal(inputs["x"], torch.from_numpy(INPUTS[[1, 4]]).float())
        assert targets.tolist() == CLASSES[[1, 4]].tolist()
    assert as_dataset(by_column, name="train").labels() is not None


def test_frame_is_its_columns():
    """Of pandas, which need not be installed: only what is used of it is here."""

    class Frame:
        columns = ("age", "label")

        def __getitem__(self, name: str) -> Any:
            return Column({"age": INPUTS[:, 0], "label": CLASSES}[name])

        def to_numpy(self) -> None:
            raise AssertionError("columns are read one by one")

    class Column:
        def __init__(self, values: Any) -> None:
            self.values = values

        def to_numpy(self) -> Any:
            return self.values

    inputs, targets = as_dataset(Frame(), name="train").batch(np.array([2]))
    assert inputs["age"].tolist() == [np.float32(INPUTS[2, 0])]
    assert targets.tolist() == [CLASSES[2]]


def test_a_frame_in_a_tuple_is_a_matrix():
    """As for scikit-learn: (X, y), or columns by name in a dict."""

    class Frame:
        columns = ("age", "weight")

        def __init__(self, values: Any) -> None:
            self.values = values

        def to_numpy(self) -> Any:
            return self.values

    pair = Frame(INPUTS), Frame(CLASSES)
    inputs, targets = as_dataset(pair, name="train").batch(np.array([2]))
    np.testing.assert_array_equal(inputs, INPUTS[[2]])
    assert targets.tolist() == [CLASSES[2]]
    by_name = {"age": Frame(INPUTS[:, 0]), "label": Frame(CLASSES)}
    inputs, _ = as_dataset(by_name, name="train").batch(np.array([2]))
    assert inputs["age"].tolist() == [np.float32(INPUTS[2, 0])]


def test_ragged_records_are_padded_by_the_loaders_collate():
    loader = DataLoader(RAGGED, batch_size=1, collate_fn=columns)  # type: ignore[type-var]
    inputs, targets = as_dataset(loader, name="train").batch(np.array([1, 0]))
    assert inputs["ids"].tolist() == [[4, 0, 0], [1, 2, 3]]
    assert targets.tolist() == [0, 1]
    with pytest.raises(SiteError, match="return a DataLoader whose collate_fn pads"):
        as_dataset(
            [(torch.tensor(row["ids"]), 0) for row in RAGGED], name="train"
        ).batch(np.array([0, 1]))


@pytest.mark.parametrize(
    ("collate", "message"),
    [
        (lambda _: {"ids": torch.zeros(3)}, "for 1 records it returned"),
        (lambda _: torch.zeros(1), "returned Tensor"),
        (lambda _: {}["missing"], "collate_fn of train failed with KeyError"),
    ],
)
def test_wrong_collate_is_explained(collate: Callable[..., Any], message: str):
    loader = DataLoader(RAGGED, collate_fn=collate)  # type: ignore[type-var]
    with pytest.raises(SiteError, match=message):
        as_dataset(loader, name="train")


def test_loader_with_a_sampler_of_its_own_is_refused():
    """Weights of records would be lost without a word."""
    sampler = WeightedRandomSampler([0.5, 0.5], 2)
    loader = DataLoader(RAGGED, sampler=sampler)  # type: ignore[arg-type]
    with pytest.raises(SiteError, match="WeightedRandomSampler"):
        as_dataset(loader, name="train")


def test_stream_is_read_to_its_end():
    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
            return ((torch.full((2,), i), i % 2) for i in range(5))

    dataset = as_dataset(Stream(), name="train")
    assert len(dataset) == 5
    assert dataset.batch(np.array([3]))[1].tolist() == [1]


def test_images_of_items_are_scaled_as_those_of_arrays():
    images = np.full((2, 3, 4, 4), 51, np.uint8)
    items = [(image, 1) for image in images]
    collated = DataLoader(items, collate_fn=lambda rows: default_collate(list(rows)))
    for source in (items, collated):
        inputs, _ = as_dataset(source, name="train").batch(np.array([0, 1]))
        assert inputs.dtype is torch.float32
        assert inputs.unique().tolist() == [np.float32(0.2)]
    rows = as_dataset([(image[0], 1) for image in images], name="train")
    assert rows.batch(np.array([0]))[0].dtype is torch.int64


def refusing(folder: str) -> Any:
    """A source whose helper refuses an option, as ``tokenizer`` does."""
    raise JobError(f"is missing in {folder}", key="data.options.sha256")


@pytest.mark.parametrize("table", ["data", "sites[1].data"])
def test_an_option_that_a_source_refuses_is_named_by_its_own_table(table: str):
    """A site's own data has options of its own."""
    with pytest.raises(JobError, match="is missing in x") as caught:
        load(f"{__name__}:refusing", {"folder": "x"}, key=table)
    assert caught.value.key == f"{table}.options.sha256"
