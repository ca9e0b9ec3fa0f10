"""Safetensors files of our writer, read by the library's own readers."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp
from support.examples import few

from aggregator import tensor_file
from federation.errors import CorruptObject

DTYPES = [
    "float64",
    "float32",
    "float16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
]
ARRAYS = st.sampled_from(DTYPES).flatmap(
    lambda name: hnp.arrays(name, hnp.array_shapes(min_dims=0, min_side=0, max_side=4))
)


def file_of(tensors: dict[str, tensor_file.Array], **metadata: str) -> bytes:
    return b"".join(tensor_file.pieces(tensors, metadata))


# The format keeps one name for itself, and Hypothesis finds it in the source.
NAMES = st.text(st.characters(exclude_categories=["Cs"])).filter(
    lambda name: name != "__metadata__"
)


@few(15)
@given(st.dictionaries(NAMES, ARRAYS))
def test_library_reads_what_we_write(tensors: dict[str, tensor_file.Array]):
    """Every name, type, shape (also scalar or empty) and bit comes back."""
    data = file_of(tensors)
    for found in (safetensors.numpy.load(data), tensor_file.read(data)):
        assert found.keys() == tensors.keys()
        for name, array in tensors.items():
            assert found[name].dtype == array.dtype
            assert found[name].shape == array.shape
            assert found[name].tobytes() == array.tobytes()


def test_bfloat16(tmp_path: Path):
    """Values that NumPy has no type for travel as their 16 bits."""
    values = torch.tensor([[1.5, -2.0], [3e38, 1e-40]], dtype=torch.bfloat16)
    bits = values.view(torch.int16).numpy().view(np.uint16)
    data = b"".join(tensor_file.pieces({"x": bits}, {}, bfloat16={"x"}))
    (tmp_path / "x.safetensors").write_bytes(data)
    found = safetensors.torch.load_file(tmp_path / "x.safetensors")["x"]
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, values)
    assert tensor_file.read(data)["x"].tobytes() == bits.tobytes()


def test_metadata_and_alignment(tmp_path: Path):
    """The library finds our texts, and the values start at a multiple of 8."""
    data = file_of({"a": np.zeros(3, np.float32)}, format="pt")
    (tmp_path / "a.safetensors").write_bytes(data)
    with safetensors.safe_open(tmp_path / "a.safetensors", framework="np") as file:
        assert file.metadata() == {"format": "pt"}
    assert int.from_bytes(data[:8], "little") % 8 == 0


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (np.zeros((2, 3), np.float32).T, "not C-contiguous"),
        (np.zeros(2, ">f4"), "not little-endian"),
        (np.zeros(2, np.complex64), "complex64"),
        (np.zeros(2, np.uint16), "uint16"),
        (np.zeros(2, object), "object"),
    ],
)
def test_unwritable_arrays(array: tensor_file.Array, reason: str):
    """What could only be written through a copy, or not at all, is refused."""
    with pytest.raises(ValueError, match=reason):
        file_of({"name": array})


def test_bfloat16_must_be_bits():
    """Floats that are declared to be bfloat16 bits are refused."""
    with pytest.raises(ValueError, match="as uint16"):
        tensor_file.pieces({"x": np.zeros(2, np.float32)}, {}, bfloat16={"x"})


def test_reserved_name():
    """The header's own entry cannot name a tensor."""
    with pytest.raises(ValueError, match="__metadata__"):
        file_of({"__metadata__": np.zeros(1, np.float32)})


def test_header_limit(monkeypatch: pytest.MonkeyPatch):
    """A header that the library would not read is not written."""
    monkeypatch.setattr(tensor_file, "MAX_HEADER_BYTES", 64)
    with pytest.raises(ValueError, match="over 64"):
        file_of({"x" * 64: np.zeros(1, np.float32)})


def test_torn_files_are_corrupt():
    """A file that was cut anywhere is not read."""
    data = file_of({"a": np.ones(3, np.float32), "b": np.ones(2, np.int64)})
    for length in range(len(data)):
        with pytest.raises(CorruptObject):
            tensor_file.read(data[:length])


@settings(deadline=None)  # Other work may share the machine.
@given(st.binary(max_size=64))
def test_junk_is_corrupt(data: bytes):
    """Any other bytes are refused with our error and no other."""
    with pytest.raises(CorruptObject):
        tensor_file.read(data)


def test_unknown_type_is_corrupt():
    """A type of the format that NumPy lacks is named."""
    entry = {"dtype": "F8_E4M3", "shape": [1], "data_offsets": [0, 1]}
    header = json.dumps({"x": entry}).encode()
    header = header.ljust(8 * math.ceil(len(header) / 8))
    with pytest.raises(CorruptObject, match="F8_E4M3"):
        tensor_file.read(len(header).to_bytes(8, "little") + header + b"\0")
