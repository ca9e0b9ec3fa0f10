"""Dataclasses in files of their own."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from federation import durable_files
from federation.errors import (
    ComputeError,
    CorruptObject,
    FederationError,
    StoreUnavailable,
)


@dataclass(frozen=True)
class _Kept:
    name: str
    seconds: float


def read(path: Path, refusal: type[FederationError] = CorruptObject) -> _Kept | None:
    return durable_files.read_json(path, _Kept, advice="do this", refusal=refusal)


def test_what_was_written_is_read(tmp_path: Path):
    """And there is nothing before."""
    path = tmp_path / "kept.json"
    assert read(path) is None
    durable_files.write_json(path, _Kept("x", 0.5))
    assert read(path) == _Kept("x", 0.5)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"name": "x"}',
        '{"name": 1, "seconds": 0.5}',
        '{"name": "x", "seconds": NaN}',
        "[" * 100_000,
        "\udcff",
    ],
)
def test_damaged_file_is_named_with_what_to_do(tmp_path: Path, text: str):
    """Whatever stands in it."""
    path = tmp_path / "kept.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ComputeError) as caught:
        read(path, ComputeError)
    assert str(caught.value).startswith(f"{path} is damaged: ")
    assert str(caught.value).endswith("; do this")


def test_file_that_cannot_be_read_is_named(tmp_path: Path):
    """A folder stands in its place."""
    with pytest.raises(CorruptObject, match=f"cannot read {tmp_path}"):
        read(tmp_path)


def test_a_folder_that_does_not_exist_is_named_as_such(tmp_path: Path):
    """Nobody could make it writable."""
    with pytest.raises(StoreUnavailable, match=r"its folder does not exist: create it"):
        durable_files.write_json(tmp_path / "absent" / "file.json", 1)
