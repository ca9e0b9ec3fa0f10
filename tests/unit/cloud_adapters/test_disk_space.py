"""Room for files, with and without a system that reserves it."""

import os
from pathlib import Path

import numpy as np
import pytest

from cloud_adapters.storage.disk.files import allocate
from cloud_adapters.storage.disk.scratch import ScratchVectors
from deploy.aggregator_host import disk_reserve
from federation.errors import StoreUnavailable

TOO_LARGE = 1 << 50  # float32 values: 4 PiB.


@pytest.fixture(params=["reserved", "compared"], autouse=True)
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Linux; and macOS, whose Python has no ``posix_fallocate``."""
    if request.param == "compared":
        monkeypatch.delattr(os, "posix_fallocate", raising=False)
    return str(request.param)


def test_a_vector_on_disk_has_its_size_and_zeros(tmp_path: Path):
    vector = ScratchVectors(folder=tmp_path)(1000)
    vector[-1] = 2.0
    assert (vector.size, vector.sum(dtype=np.float64)) == (1000, 2.0)


def test_a_vector_that_does_not_fit_is_refused(tmp_path: Path, system: str):
    """Before it is a map: a map without room kills the process that writes to it."""
    if system == "reserved":
        with pytest.raises(StoreUnavailable, match="cannot write below"):
            ScratchVectors(folder=tmp_path)(TOO_LARGE)
        return
    disk = os.statvfs(tmp_path)
    free = disk.f_bavail * disk.f_frsize
    with pytest.raises(StoreUnavailable, match="disk is full"):
        ScratchVectors(folder=tmp_path)(free // 4 + (1 << 28))


def test_a_file_does_not_become_smaller(tmp_path: Path):
    """What it holds has its room."""
    with (tmp_path / "file").open("wb+", buffering=0) as file:
        file.write(b"abc")
        allocate(file.fileno(), 2)
        assert os.fstat(file.fileno()).st_size == 3
        allocate(file.fileno(), 5)
        assert os.pread(file.fileno(), 9, 0) == b"abc\0\0"


def test_a_reserve_has_all_of_its_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A file of that size without blocks would keep nothing free."""
    size = (1 << 20) + 4096
    monkeypatch.setattr(disk_reserve, "RESERVE_BYTES", size)
    assert disk_reserve.fill(tmp_path)
    found = (tmp_path / disk_reserve.NAME).stat()
    assert found.st_size == size
    assert found.st_blocks * 512 >= size
