"""A script that charges a ledger in forks which are killed at every system call.

Run by path, with a folder for all. For each moment it begins a ledger, is killed there,
continues, is killed again a few calls later, and then reaches the end. A release is a
mark in a file beside the ledger, written after ``charge`` returned. One JSON object is
printed: how many moments there were.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from federation.clock import VirtualClock
from privacy.dp import accountant
from privacy.dp.events import PrivacyEvent
from privacy.dp.ledger.ledger import FileLedger, Terms  # type: ignore[attr-defined]

EVENT = PrivacyEvent(noise_multiplier=10.0, sampling_rate=1.0, steps=1)
TERMS = Terms(
    run_id="run-1", site="one", job_digest="00" * 32, delta=1e-5, epsilon_cap=50.0
)
CALLS = ("open", "write", "fsync", "ftruncate", "replace", "close")
MARKS = "released"
ROUNDS = 2
# Before a call, after it, and in the middle of a write.
PLACES = 3


def work(folder: Path) -> None:
    """Release what has not been released, in two sessions."""
    for upto in (ROUNDS // 2, ROUNDS):
        ledger = FileLedger(folder, TERMS, clock=VirtualClock(1e9))
        marks = folder / MARKS
        done = marks.read_bytes().count(b"\n") if marks.exists() else 0
        for round_index in range(done, upto):
            spent = ledger.charge(EVENT, round_index=round_index)
            with marks.open("ab", buffering=0) as file:
                file.write(f"{round_index} {spent!r}\n".encode())
        ledger.close()


class Doom:
    """Kills this process at the n-th moment."""

    def __init__(self, moment: int) -> None:
        self._left = moment

    def due(self) -> bool:
        self._left -= 1
        return self._left < 0

    def wrap(self, name: str) -> None:
        real: Callable[..., Any] = getattr(os, name)

        def call(*arguments: Any, **options: Any) -> Any:
            if self.due():
                die()
            if self.due():
                if name == "write":
                    real(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
                die()
            found = real(*arguments, **options)
            if self.due():
                die()
            return found

        setattr(os, name, call)


def die() -> None:
    """End this process as the kernel would."""
    os.kill(os.getpid(), signal.SIGKILL)


def run(folder: Path, moment: int | None) -> bool:
    """Work in a fork; whether it came to its end."""
    pid = os.fork()
    if pid == 0:
        if moment is not None:
            doom = Doom(moment)
            for name in CALLS:
                doom.wrap(name)
        work(folder)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if code not in (0, -signal.SIGKILL):
        raise RuntimeError(f"moment {moment} in {folder} ended with {code}")
    return code == 0


def main(place: Path) -> None:
    """Every moment, until the work is done before it comes."""
    # What forks share.
    accountant.epsilon([EVENT], TERMS.delta)
    moment, ended = 0, False
    while not ended:
        folder = place / f"{moment:04d}"
        ended = run(folder, moment)
        run(folder, moment * 7 % 50)
        if not run(folder, None):
            raise RuntimeError("nobody killed it")
        moment += 1
    sys.stdout.write(json.dumps({"moments": moment}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
