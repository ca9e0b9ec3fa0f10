"""A program that must always run: started, watched, restarted, stopped."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from federation.errors import MissingExtra

if TYPE_CHECKING:  # It brings numpy, and a process that waits is to be small.
    from federation.protocols import Clock

FIRST_WAIT_SECONDS, MOST_WAIT_SECONDS = 0.5, 30.0
# A program that ran for so long starts with a short wait again.
STEADY_SECONDS = 60.0

# Becomes the program, which then ends with us, whatever ends us: a service that was
# killed must not leave a SuperLink that holds its port.
_STARTER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""


@dataclass(kw_only=True)
class Child:
    """One program, in its own process group, that ends with this process.

    Attributes:
        name: What it is called in messages; its log is ``NAME.log``.
        command: Program and arguments; no secrets, since everybody can read them.
        environment: All of its variables.
        logs: Folder of its log, to which every start appends.
        clock: Tells time.
        listener: Called with a word about every start and end.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    logs: Path
    clock: "Clock"
    listener: Callable[[str], None]
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _started: float = field(default=0.0, init=False)
    _not_before: float = field(default=0.0, init=False)
    _wait_seconds: float = field(default=FIRST_WAIT_SECONDS, init=False)

    @property
    def pid(self) -> int | None:
        """Number of the process; None while none runs."""
        return None if self._process is None else self._process.pid

    @property
    def is_up(self) -> bool:
        """Whether the program runs."""
        process = self._process
        return process is not None and process.poll() is None

    def watch(self) -> None:
        """Start the program if it is not running and its wait is over."""
        now = self.clock.monotonic()
        if self._process is not None:
            code = self._process.poll()
            if code is None:
                return
            self._process = None
            if now - self._started >= STEADY_SECONDS:
                self._wait_seconds = FIRST_WAIT_SECONDS
            self._not_before = now + self._wait_seconds
            self.listener(
                f"{self.name} ended with {code}; again in {self._wait_seconds:g} s "
                f"(see {self.logs / self.name}.log)"
            )
            self._wait_seconds = min(2 * self._wait_seconds, MOST_WAIT_SECONDS)
        if now >= self._not_before:
            self._start(now)

    def _start(self, now: float) -> None:
        self.logs.mkdir(parents=True, exist_ok=True)
        us = str(os.getpid())
        with (self.logs / f"{self.name}.log").open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 -- the command is ours
                [sys.executable, "-I", "-S", "-c", _STARTER, us, *self.command],
                env=dict(self.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._started = now
        self.listener(f"{self.name} started as process {self._process.pid}")

    def signal(self, number: int) -> None:
        """Send the program itself a signal, if it runs."""
        if self._process is not None:
            self._process.send_signal(number)

    def stop(self, patience_seconds: float = 10.0) -> None:
        """Stop the program and everything that it started."""
        process, self._process = self._process, None
        if process is None:
            return
        self._signal_group(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_seconds)
        self._signal_group(process, signal.SIGKILL)
        process.wait()

    def _signal_group(self, process: subprocess.Popen[bytes], number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)


def installed_program(name: str) -> str:
    """A program that is installed beside this Python.

    Raises:
        MissingExtra: It was not.
    """
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise MissingExtra(name, "flower")
    return str(path)
