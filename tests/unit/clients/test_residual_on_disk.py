"""What updates have left out, in a file between rounds: the same bits."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from support import toy

from clients.training import state_object
from clients.training.error_feedback import ErrorFeedback
from clients.training.site_state import SiteState
from cloud_adapters.storage.disk.scratch import ScratchVectors, allocator
from cloud_adapters.storage.memory import MemoryStore
from federation.compression.choice import codec_of
from federation.compression.codec import Links
from federation.ids import RunId
from federation.mapped import ScratchMap
from federation.protocols import LocalUpdate
from federation.vectors import Allocate, Arrays, in_memory

RUN = RunId("run-1")
ARRAYS: Arrays = {
    "residual/left": np.linspace(-1, 1, 3000, dtype=np.float32),
    "residual/words": np.arange(700, dtype=np.uint64),
    "own": np.ones((2, 3), np.float32),
    "empty": np.zeros((0, 4), np.int64),
    "flags": np.array([True, False]),
    "one": np.array(7, np.int64),
}


def written(arrays: Arrays) -> bytes:
    return b"".join(state_object.pieces(arrays))


def read(content: bytes) -> Arrays:
    def read_range(start: int, length: int) -> bytes:
        return content[start : start + length]

    return state_object.read(
        read_range, start=0, size=len(content), allocate=lambda _, size: in_memory(size)
    )


def same(found: Arrays, wanted: Arrays) -> bool:
    return found.keys() == wanted.keys() and all(
        found[name].dtype == array.dtype
        and found[name].shape == array.shape
        and found[name].tobytes() == array.tobytes()
        for name, array in wanted.items()
    )


def test_a_state_is_a_safetensors_file():
    """The library reads it, and writes what we read."""
    assert same(safetensors.numpy.load(written(ARRAYS)), ARRAYS)
    assert same(read(safetensors.numpy.save(dict(ARRAYS))), ARRAYS)
    assert same(read(written(ARRAYS)), ARRAYS)
    assert read(written({})) == {}


def changed(change: Mapping[str, Any]) -> bytes:
    """A file with one tensor whose header says something else."""
    values = np.ones(3, np.float32)
    about = {"dtype": "F32", "shape": [3], "data_offsets": [0, 12], **change}
    text = json.dumps({"residual": about}).encode()
    return len(text).to_bytes(8, "little") + text + values.tobytes()


@pytest.mark.parametrize(
    "content",
    [
        changed({"data_offsets": [4, 16]}),
        changed({"data_offsets": [0, 8]}),
        changed({"shape": [1 << 60], "data_offsets": [0, 1 << 62]}),
        changed({"shape": [2], "data_offsets": [0, 8]}),
        changed({"dtype": "BF16"}),
        changed({"shape": "x"}),
        (1 << 40).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        b"",
    ],
)
def test_what_is_no_such_file_is_refused(content: bytes):
    """Before memory is allocated for what it claims to have."""
    with pytest.raises((ValueError, KeyError, TypeError, AttributeError)):
        read(content)


def test_a_residual_is_in_a_file_and_other_state_in_memory(tmp_path: Path):
    store, scratch = MemoryStore(), ScratchVectors(folder=tmp_path)
    state = SiteState(toy.SITES[0], toy.LAYOUT, store, continues=True, allocate=scratch)
    state.keep(RUN, 1, ARRAYS, {"residual_round": 1})
    found = state.before(RUN, 2).arrays
    assert same(found, ARRAYS)
    base: Any = found["residual/left"]
    while isinstance(base, np.ndarray | memoryview):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    assert isinstance(base, ScratchMap)
    assert found["own"].base is None or isinstance(found["own"].base, np.ndarray)
    assert [*tmp_path.iterdir()] == []


def test_operators_choose_the_size(tmp_path: Path):
    assert allocator(0, tmp_path) is in_memory
    assert allocator(3, tmp_path) == ScratchVectors(
        folder=tmp_path, least_bytes=3 << 20
    )


def words_of_rounds(allocate: Allocate) -> list[bytes]:
    """What a site sends in three rounds; the second does not count."""
    links, size = Links(up=codec_of("int4"), feedback=0.9), 5000
    state = SiteState(
        toy.SITES[0], toy.LAYOUT, MemoryStore(), codec="int4", allocate=allocate
    )
    sent = []
    for index, counted in ((1, 0), (2, 1), (3, 1)):
        feedback = ErrorFeedback(links, toy.task(round_index=index, counted=counted))
        feedback.begin(state.before(RUN, index), np.zeros(size, np.float32))
        rng = np.random.default_rng(index)
        update = LocalUpdate(
            update_d=rng.standard_normal(size, np.float32),
            integers_m=np.zeros(0, np.int64),
            num_examples=1,
            num_steps=1,
            training=None,
        )
        words = feedback.update(np.zeros(size, np.float32), update)
        sent.append(words.tobytes())
        state.keep(RUN, index, *feedback.left())
    return sent


def test_a_site_sends_the_same_bits(tmp_path: Path):
    """Each round reads what the one before left, as after a restart."""
    scratch = ScratchVectors(folder=tmp_path)
    assert words_of_rounds(scratch) == words_of_rounds(in_memory)
