"""Vectors of mapped files pass through memory in pieces."""

import mmap
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from aggregator.combine import combine_rule
from federation.job.spec import AggregationSpec
from federation.mapped import give_back, sha256
from federation.protocols import WeightedUpdate
from federation.vectors import Vector, is_finite
from privacy.secagg.arithmetic.accumulator import MaskedSum
from privacy.secagg.arithmetic.ring import RingSpec

NUM_VALUES = 4 << 20  # 16 MiB
SLACK_MB = 8

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/smaps").exists(), reason="memory is read from Linux's /proc"
)


def held_mb(vector_d: Vector) -> float:
    """What is in memory of the file that a vector is mapped from, MiB.

    Not of all that the process has mapped: the system may take pages of libraries away
    and bring them back at any time.
    """
    address, is_its = vector_d.ctypes.data, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, value, *_ = line.split()
        if not name.endswith(":"):
            start, end = (int(each, 16) for each in name.split("-"))
            is_its = start <= address < end
        elif is_its and name == "Rss:":
            return int(value) / 1024
    raise AssertionError(f"nothing is mapped at {address}")


@pytest.fixture(scope="module")
def content() -> Vector:
    return np.random.default_rng(7).normal(size=NUM_VALUES).astype(np.float32)


@pytest.fixture
def vector_d(content: Vector) -> Vector:
    """One that is in a file, none of it in memory."""
    with tempfile.TemporaryFile() as file:
        file.write(content.data)
        file.flush()
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return np.frombuffer(mapped, np.float32)


def mean(vector_d: Vector, combine: str = "mean") -> Vector:
    rule = combine_rule(AggregationSpec(combine=combine))
    updates = [
        WeightedUpdate(site=site, delta_d=vector_d, weight=1.0) for site in ("a", "b")
    ]
    return rule(updates, np.zeros(vector_d.size, np.float32))


def folded(vector_d: Vector, bits: int) -> bytes:
    spec = RingSpec(bits=bits, num_sites=2, clip_norm=1e3)
    words = vector_d.view(spec.wire_dtype)
    size = words.size // 3 if words.dtype == np.uint8 else words.size
    total = MaskedSum(size, spec)
    total.fold_(words[: 3 * size] if words.dtype == np.uint8 else words)
    return total.digest()


@pytest.mark.parametrize(
    "read",
    [
        is_finite,
        sha256,
        mean,
        lambda vector_d: mean(vector_d, "median"),
        lambda vector_d: folded(vector_d, 32),
        lambda vector_d: folded(vector_d, 24),
    ],
    ids=["finite", "digest", "mean", "median", "ring-32", "ring-24"],
)
def test_reader_holds_a_piece(
    read: Callable[[Vector], Any], vector_d: Vector, content: Vector
) -> None:
    """What is read is what is in the file, and is not in memory afterwards."""
    assert np.array_equal(read(vector_d), read(content))
    assert held_mb(vector_d) < SLACK_MB


def test_what_is_not_given_back_is_held(vector_d: Vector) -> None:
    """The measure of the test above sees a whole vector."""
    assert held_mb(vector_d) < SLACK_MB
    vector_d.max()
    assert held_mb(vector_d) > SLACK_MB


def in_memory() -> NDArray[Any]:
    return np.arange(4096.0)


def of_a_private_map() -> NDArray[Any]:
    """Of a map whose changed pages are nowhere but in memory."""
    with tempfile.TemporaryFile() as file:
        file.write(bytes(32768))
        file.flush()
        vector = np.frombuffer(
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), np.float64
        )
    vector[:] = in_memory()
    return vector


@pytest.mark.parametrize("make", [in_memory, of_a_private_map])
@pytest.mark.parametrize("access", ["written", "read"])
def test_memory_that_no_file_holds_is_kept(
    make: Callable[[], NDArray[Any]], access: str
) -> None:
    """A view that nobody may write through is not yet a file that nobody wrote."""
    vector = make()
    vector.flags.writeable = access == "written"
    give_back(vector)
    assert vector.tolist() == in_memory().tolist()
