"""The last round is remembered, whatever happens to the process."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from federation.errors import CorruptObject, StoreUnavailable
from federation.ids import RunId
from privacy.secagg.errors import ReplayedRound
from privacy.secagg.protocol.round_memory import (
    FileRounds,
    InMemoryRounds,
    RoundMemory,
)

RUN = RunId("run-1")


@pytest.fixture(params=["memory", "files"])
def memory(request: pytest.FixtureRequest, tmp_path: Path) -> RoundMemory:
    return InMemoryRounds() if request.param == "memory" else FileRounds(tmp_path)


def test_rounds_only_rise(memory: RoundMemory):
    """Neither the same round twice nor an earlier one; gaps are fine."""
    memory.advance(RUN, 1)
    memory.advance(RUN, 5)
    for again in (5, 4, 1, 0, -1):
        with pytest.raises(ReplayedRound, match="already answered round 5"):
            memory.advance(RUN, again)
    memory.advance(RUN, 6)


def test_last_round_is_known(memory: RoundMemory):
    assert memory.last(RUN) == 0
    memory.advance(RUN, 3)
    assert memory.last(RUN) == 3
    assert memory.last(RunId("another")) == 0


def test_runs_are_apart(memory: RoundMemory):
    """Each run counts for itself."""
    memory.advance(RUN, 7)
    memory.advance(RunId("run-2"), 1)


def test_one_of_many_callers_wins(memory: RoundMemory):
    """Two agents of one site cannot both answer."""

    def attempt(_: int) -> bool:
        try:
            memory.advance(RUN, 3)
        except ReplayedRound:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(attempt, range(32))) == 1


def test_files_outlive_the_process(tmp_path: Path):
    """A new object reads what an old one wrote."""
    folder = tmp_path / "new" / "folder"
    FileRounds(folder).advance(RUN, 3)
    with pytest.raises(ReplayedRound):
        FileRounds(folder).advance(RUN, 3)


def test_nobody_else_may_hold_the_lock(tmp_path: Path):
    """Another user of the machine could make the site wait for ever."""
    before = os.umask(0)
    try:
        FileRounds(tmp_path / "rounds").advance(RUN, 1)
    finally:
        os.umask(before)
    (lock,) = (tmp_path / "rounds").glob("*.lock")
    assert stat.S_IMODE(lock.stat().st_mode) == 0o600


@pytest.mark.parametrize("data", [b"", b"x", b"-1", b"1.5", b"\xff", b"1" * 40])
def test_damaged_memory_stops_the_site(tmp_path: Path, data: bytes):
    """What cannot be read is never taken for round 0."""
    (tmp_path / f"{RUN}.round").write_bytes(data)
    with pytest.raises(CorruptObject, match="cannot continue"):
        FileRounds(tmp_path).advance(RUN, 10**9)


def test_what_cannot_be_recorded_is_not_answered(tmp_path: Path):
    """A folder that cannot be written is an error before anything else."""
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreUnavailable, match="not answered"):
        FileRounds(tmp_path / "file").advance(RUN, 1)


def test_run_ids_stay_in_the_folder(tmp_path: Path):
    """A hostile name is no path."""
    with pytest.raises(ValueError, match="is not a name"):
        FileRounds(tmp_path).advance(RunId("../x"), 1)
