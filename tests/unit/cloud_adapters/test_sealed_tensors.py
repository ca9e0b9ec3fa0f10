"""A model's file shows by itself that it was damaged."""

from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy

from aggregator import tensor_file
from cloud_adapters.storage import sealed_tensors
from federation.errors import CorruptObject

TENSORS: dict[str, tensor_file.Array] = {
    "a": np.ones((3, 2), np.float32),
    "b": np.arange(2),
}
TEXTS = {"format": "pt"}


def whole() -> bytes:
    """A file with a digest."""
    return b"".join(tensor_file.pieces(TENSORS, TEXTS, is_sealed=True))


@pytest.mark.parametrize("texts", [{}, TEXTS])
def test_a_whole_file_passes_and_only_its_header_has_changed(
    texts: dict[str, str], tmp_path: Path
) -> None:
    """Any reader of the format takes it."""
    path = tmp_path / "model.safetensors"
    pieces = tensor_file.pieces(TENSORS, texts, is_sealed=True)
    path.write_bytes(b"".join(pieces))
    sealed_tensors.check(path)
    found = safetensors.numpy.load_file(path)
    assert {name: each.tolist() for name, each in found.items()} == {
        name: each.tolist() for name, each in TENSORS.items()
    }
    with safetensors.safe_open(path, "numpy") as file:
        assert file.metadata().items() > texts.items()
    assert pieces[1:] == tensor_file.pieces(TENSORS, texts)[1:]


def test_each_changed_bit_of_the_values_is_noticed(tmp_path: Path) -> None:
    """The library reads all of these files."""
    path, data = tmp_path / "model.safetensors", whole()
    size = sum(each.nbytes for each in TENSORS.values())
    for bit in range(8 * (len(data) - size), 8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        safetensors.numpy.load_file(path)
        with pytest.raises(CorruptObject, match="other is damaged"):
            sealed_tensors.check(path, "other")


def test_a_renamed_tensor_is_noticed(tmp_path: Path) -> None:
    """The digest covers names, types and shapes as well."""
    path = tmp_path / "model.safetensors"
    for old, new in ((b'"a"', b'"c"'), (b"[3,2]", b"[2,3]"), (b'"pt"', b'"np"')):
        assert old in whole()
        path.write_bytes(whole().replace(old, new))
        safetensors.numpy.load_file(path)
        with pytest.raises(CorruptObject, match="damaged"):
            sealed_tensors.check(path)


def test_the_same_content_in_another_order_passes(tmp_path: Path) -> None:
    """As the library writes it, which sorts tensors by the length of their values."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(whole())
    with safetensors.safe_open(path, "numpy") as file:
        texts = file.metadata()
    safetensors.numpy.save_file(TENSORS, path, texts)
    assert path.read_bytes() != whole()
    sealed_tensors.check(path)
    safetensors.numpy.save_file({**TENSORS, "b": np.arange(1, 3)}, path, texts)
    with pytest.raises(CorruptObject, match="damaged"):
        sealed_tensors.check(path)


def test_a_file_of_another_writer_passes(tmp_path: Path) -> None:
    """It has no such entry, with or without other texts."""
    path = tmp_path / "model.safetensors"
    for texts in (None, TEXTS):
        safetensors.numpy.save_file(TENSORS, path, texts)
        sealed_tensors.check(path)
