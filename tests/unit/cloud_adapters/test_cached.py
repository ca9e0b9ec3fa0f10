"""The disk cache: what stays, what goes, what a kill leaves."""

import fcntl
import hashlib
import os
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cloud_adapters.storage.cached import ObjectCache
from federation.errors import StoreUnavailable


def content_of(number: int, size: int = 1000) -> bytes:
    return random.Random(number).randbytes(size)  # noqa: S311 -- only test data


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class Source:
    """Where contents come from, and how often they were asked for."""

    def __init__(self) -> None:
        self.fetched: list[int] = []

    def get(self, cache: ObjectCache, number: int, size: int = 1000) -> bytes:
        content = content_of(number, size)

        def fetch() -> bytes:
            self.fetched.append(number)
            return content

        found = bytes(cache.get(digest(content), size, fetch))
        assert found == content
        return found


def contents(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir() if len(p.name) == 64}


def touch(folder: Path, number: int, at: int) -> None:
    """Say when a content was last used: clocks of disks are coarse."""
    os.utime(folder / digest(content_of(number)), (at, at))


def test_nobody_else_may_look(tmp_path: Path):
    """It holds training data."""
    Source().get(ObjectCache(tmp_path / "cache", 10_000), 1)
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
    for path in (tmp_path / "cache").iterdir():
        assert path.stat().st_mode & 0o077 == 0


def test_the_least_recently_used_goes(tmp_path: Path):
    """Until the new one fits."""
    cache, source = ObjectCache(tmp_path, 3000), Source()
    for number in (1, 2, 3):
        source.get(cache, number)
        touch(tmp_path, number, at=number)
    source.get(cache, 1)  # Used just now.
    source.get(cache, 4)
    assert contents(tmp_path) == {digest(content_of(n)) for n in (1, 3, 4)}
    assert cache.counts.evicted == 1
    assert source.fetched == [1, 2, 3, 4]


@pytest.mark.parametrize("damage", [b"", b"x" * 999, b"x" * 1000, b"x" * 1001])
def test_damage_is_found_and_mended(tmp_path: Path, damage: bytes):
    """Cut, grown or changed: it is fetched again."""
    source = Source()
    source.get(ObjectCache(tmp_path, 10_000), 1)
    (tmp_path / digest(content_of(1))).write_bytes(damage)
    cache = ObjectCache(tmp_path, 10_000)
    source.get(cache, 1)
    assert source.fetched == [1, 1]
    assert cache.counts.damaged == 1
    source.get(ObjectCache(tmp_path, 10_000), 1)
    assert source.fetched == [1, 1]


def test_a_failed_fetch_leaves_nothing(tmp_path: Path):
    """And holds no lock."""
    cache = ObjectCache(tmp_path, 10_000)

    def fail() -> bytes:
        raise StoreUnavailable("out of reach")

    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="out of reach"):
            cache.get(digest(content_of(1)), 1000, fail)
    assert contents(tmp_path) == set()
    Source().get(cache, 1)


def test_threads_that_want_the_same_fetch_it_once(tmp_path: Path):
    """The others wait for the first."""
    cache, source = ObjectCache(tmp_path, 10_000), Source()
    together = threading.Barrier(8)

    def get() -> None:
        together.wait()
        source.get(cache, 1)

    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(get) for _ in range(8)]:
            future.result()
    assert source.fetched == [1]


def test_what_another_process_writes_is_left_alone(tmp_path: Path):
    """Its lock says that it lives."""
    path = tmp_path / ".new-0123"
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        Source().get(ObjectCache(tmp_path, 10_000), 1)
        assert path.exists()
    Source().get(ObjectCache(tmp_path, 10_000), 2)
    assert not path.exists()


SHARING = """
import hashlib, random, sys
from pathlib import Path
from cloud_adapters.storage.cached import ObjectCache

folder, seed = Path(sys.argv[1]), int(sys.argv[2])
cache, rng = ObjectCache(folder, 5000), random.Random(seed)
for _ in range(150):
    content = random.Random(rng.randrange(12)).randbytes(1000)
    name = hashlib.sha256(content).hexdigest()
    assert bytes(cache.get(name, 1000, lambda: content)) == content
"""


@pytest.mark.slow
def test_processes_share_it(tmp_path: Path):
    """Each gets what it asks for, and the folder does not grow beyond its size."""
    command = [sys.executable, "-c", SHARING, str(tmp_path)]
    running = [subprocess.Popen([*command, str(seed)]) for seed in range(3)]
    assert [process.wait() for process in running] == [0, 0, 0]
    assert len(contents(tmp_path)) <= 5
    assert list(tmp_path.glob(".new-*")) == []


def test_a_folder_that_cannot_be_used(tmp_path: Path):
    """The message names it and what to do."""
    (tmp_path / "cache").write_bytes(b"")
    cache = ObjectCache(tmp_path / "cache", 10_000)
    with pytest.raises(StoreUnavailable, match=r"cache' cannot be used: .*CROSSFED_"):
        cache.get("0" * 64, 10, bytes)
