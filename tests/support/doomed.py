"""Kill what writes durable things at every system call, and look at what is left.

A process of its own, without threads or torch, has forks, each of which is killed a
moment later than the one before: before, in or after one of ``CALLS``. After each, the
work is done again, killed once more on the way, and then to its end.
"""

import gc
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

CALLS = ("open", "write", "fsync", "ftruncate", "replace", "link", "unlink", "close")
_AGAIN = 50


class Durable(NamedTuple):
    """Something that outlives its process.

    Attributes:
        begin: Makes what is there before, in an empty folder.
        work: Changes it; what a user does again after a crash.
        look: Reads it as its readers do, and says in a word what it is; an error if it
            is neither what it was nor what it shall be.
        words: All that are said after one kill or another, the last of them in the end.
        leaves: How many files of a killed writer may wait for the next one.
        stride: Moments from one kill to the next.
    """

    begin: Callable[[Path], object]
    work: Callable[[Path], object]
    look: Callable[[Path], str]
    words: tuple[str, ...]
    leaves: int = 0
    stride: int = 1


class _Doom:
    """Kills this process at the n-th moment."""

    def __init__(self, moment: int) -> None:
        self._left = moment

    def _passes(self) -> None:
        self._left -= 1
        if self._left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def wrap(self, name: str) -> None:
        real: Callable[..., Any] = getattr(os, name)

        def call(*arguments: Any, **options: Any) -> Any:
            self._passes()
            if name == "write":
                if self._left == 0:
                    real(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
                self._passes()
            found = real(*arguments, **options)
            self._passes()
            return found

        setattr(os, name, call)


def _is_done(work: Callable[[Path], object], folder: Path, moment: int | None) -> bool:
    """Work in a fork; whether it came to its end."""
    pid = os.fork()
    if pid == 0:
        if moment is not None:
            doom = _Doom(moment)
            for name in CALLS:
                doom.wrap(name)
        work(folder)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in {0, -signal.SIGKILL}, f"moment {moment} in {folder}: {code}"
    return code == 0


def _num_files(folder: Path) -> int:
    return sum(1 for _ in folder.rglob("*"))


def kill_everywhere(thing: Durable, place: Path) -> int:
    """Try every moment, until the work is done before it comes; return their number."""
    os.fsync = lambda _: None  # A kill loses nothing that the system has.
    warm = place / "warm"
    warm.mkdir(parents=True)
    thing.begin(warm)  # What it computes and keeps, all forks have.
    thing.work(warm)
    gc.freeze()

    def begun(name: str) -> Path:
        (place / name).mkdir()
        thing.begin(place / name)
        return place / name

    whole = begun("whole")
    seen, moment, ended = {thing.look(whole)}, 0, False
    assert _is_done(thing.work, whole, None)
    assert thing.look(whole) == thing.words[-1]
    num_files = _num_files(whole)
    while not ended:
        folder = begun("killed")
        ended = _is_done(thing.work, folder, moment)
        seen.add(thing.look(folder))
        _is_done(thing.work, folder, moment * 7 % _AGAIN)
        seen.add(thing.look(folder))
        assert _is_done(thing.work, folder, None)
        assert thing.look(folder) == thing.words[-1], f"moment {moment}"
        left = _num_files(folder) - num_files
        assert 0 <= left <= thing.leaves, f"moment {moment}: {[*folder.rglob('*')]}"
        shutil.rmtree(folder)
        moment += thing.stride
    assert seen == {*thing.words}, seen
    return moment
