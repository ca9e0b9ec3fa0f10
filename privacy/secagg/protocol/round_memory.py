"""The last round that a site has answered, kept where a restart cannot lose it.

A site that answered one round twice, with two updates under one mask, would give
away their difference. Keys that live in memory alone and this number, which is
durable before anything is derived, make that impossible after a crash; a virtual
machine that is restored from a snapshot with its memory is caught by the number as
long as the folder is not part of the snapshot.
"""

import threading
from pathlib import Path
from typing import Protocol

from federation import folder_lock
from federation.errors import CorruptObject, StoreUnavailable, os_errors
from federation.ids import RunId, check_name
from privacy.secagg.errors import ReplayedRound
from privacy.secret_files import replace_private

_MAX_BYTES = 32


class RoundMemory(Protocol):
    """Remembers one number a run. Implementations: in memory, in files."""

    def last(self, run_id: RunId) -> int:
        """Return the last round that was recorded; 0 for none.

        Raises:
            StoreError: It cannot be read.
        """
        ...

    def advance(self, run_id: RunId, round_index: int) -> None:
        """Record a round, durably, before this returns.

        Two callers never succeed with the same number.

        Raises:
            ReplayedRound: ``round_index`` is not above the recorded one.
            StoreError: The number cannot be read or made durable.
        """
        ...


class InMemoryRounds:
    """For simulations and tests: forgets when the process ends."""

    def __init__(self) -> None:
        """Remember nothing."""
        self._last: dict[RunId, int] = {}
        self._lock = threading.Lock()

    def last(self, run_id: RunId) -> int:
        """See ``RoundMemory.last``."""
        return self._last.get(run_id, 0)

    def advance(self, run_id: RunId, round_index: int) -> None:
        """See ``RoundMemory.advance``."""
        with self._lock:
            check_above(run_id, round_index, self.last(run_id))
            self._last[run_id] = round_index


class FileRounds:
    """One small file a run, replaced whole and flushed to the disk.

    Args:
        folder: Where; made if it is missing. It must not be on a store that takes
            writes back, such as a snapshot that is rolled back.
    """

    def __init__(self, folder: Path) -> None:
        """Name the folder; nothing is read yet."""
        self._folder = folder

    def last(self, run_id: RunId) -> int:
        """Return the last round that was recorded; 0 for none.

        Raises:
            CorruptObject: The file does not hold a round number.
            StoreUnavailable: It cannot be read.
        """
        path = self._folder / f"{check_name(run_id)}.round"
        with os_errors(StoreUnavailable, f"read {path}"):
            return _read(path)

    def advance(self, run_id: RunId, round_index: int) -> None:
        """See ``RoundMemory.advance``."""
        path = self._folder / f"{check_name(run_id)}.round"
        with os_errors(
            StoreUnavailable,
            f"record round {round_index} in {path}",
            "the round is not answered: free some space, or make it writable for this "
            "user",
        ):
            self._folder.mkdir(parents=True, exist_ok=True)
            with folder_lock.waited_for(self._folder / f"{run_id}.lock"):
                check_above(run_id, round_index, _read(path))
                replace_private(path, f"{round_index}\n".encode())


def check_above(run_id: RunId, round_index: int, last: int) -> None:
    """Check that a round comes after the last one that was answered.

    Raises:
        ReplayedRound: It does not.
    """
    if round_index <= last:
        raise ReplayedRound(
            f"round {round_index} of run {run_id} was requested, but this site has "
            f"already answered round {last}, and it answers each round only once"
        )


def _read(path: Path) -> int:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        return 0
    text = data.decode("ascii", errors="replace").removesuffix("\n")
    if not (text.isascii() and text.isdecimal()) or len(data) > _MAX_BYTES:
        raise CorruptObject(
            f"{path} does not hold a round number: this site cannot continue the run"
        )
    return int(text)
