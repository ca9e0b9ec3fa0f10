"""Agents of several sites of one operator on one host, as forks of one process.

What they have imported, most of it torch, is in memory once. The parent imports and
waits: it holds no key, reads no site's files and opens no connection. Each agent is a
process with its site's folder, as if it had been started by itself.
"""

import ctypes
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from cloud_adapters.local.child_process import (
    FIRST_WAIT_SECONDS,
    MOST_WAIT_SECONDS,
    STEADY_SECONDS,
)
from federation.errors import JobError
from federation.protocols import Clock

CONFIG, LOG = "site.toml", "agent.log"
_LOOK_SECONDS = 0.2
_PATIENCE_SECONDS = 30.0
_PR_SET_PDEATHSIG = 1


def configs_below(folder: Path) -> Sequence[Path]:
    """Configurations of all sites with folders in one.

    Raises:
        JobError: There are none.
    """
    found = sorted(folder.glob(f"*/{CONFIG}"))
    if not found:
        raise JobError(f"{folder} holds no folder with a {CONFIG}", key="--config")
    return found


class Agents:
    """Runs an agent for each site, and again when one has failed."""

    def __init__(
        self,
        run: Callable[[Path], int],
        *,
        clock: Clock,
        listener: Callable[[str], None],
    ) -> None:
        """Start nothing yet.

        Args:
            run: Is an agent until it is to end; returns the process's exit code.
            clock: Tells time.
            listener: Called with a word about every start and end.
        """
        self._run, self._clock, self._listener = run, clock, listener
        self._begun: dict[int, tuple[Path, float]] = {}
        self._due: dict[Path, float] = {}
        self._waits: dict[Path, float] = {}

    def serve(self, configs: Sequence[Path], stopped: threading.Event) -> None:
        """Run them until ``stopped`` is set, or each has ended in peace."""
        # What is there now is shared, unless it is written to: also by looking for
        # garbage, which writes into the head of every object.
        gc.collect()
        gc.freeze()
        self._due = dict.fromkeys(configs, self._clock.monotonic())
        while not stopped.is_set() and (self._due or self._begun):
            for config, at in [*self._due.items()]:
                if self._clock.monotonic() >= at:
                    del self._due[config]
                    self._start(config)
            self._collect()
            stopped.wait(_LOOK_SECONDS)
        self._stop()

    def _start(self, config: Path) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become(config, parent)
        self._begun[pid] = (config, self._clock.monotonic())
        self._listener(f"{config.parent.name}: agent started as process {pid}")

    def _become(self, config: Path, parent: int) -> None:
        """Be an agent that ends with its parent, whatever ends that."""
        code = 1
        try:
            # Until it has its own handlers, a signal ends it.
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            log = config.parent / LOG
            handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(handle, sys.stdout.fileno())
            os.dup2(handle, sys.stderr.fileno())
            if os.getppid() == parent:
                code = self._run(config)
        finally:
            os._exit(code)

    def _collect(self) -> None:
        """Note which agents have ended, and when to start them again."""
        while self._begun:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid not in self._begun:
                return
            config, begun = self._begun.pop(pid)
            code = os.waitstatus_to_exitcode(status)
            if code == 0:
                self._listener(f"{config.parent.name}: agent ended")
                continue
            now = self._clock.monotonic()
            if now - begun >= STEADY_SECONDS:
                self._waits.pop(config, None)
            wait = self._waits.get(config, FIRST_WAIT_SECONDS)
            self._waits[config] = min(2 * wait, MOST_WAIT_SECONDS)
            self._due[config] = now + wait
            where = config.parent / LOG
            self._listener(
                f"{config.parent.name}: agent ended with {code}; again in {wait:g} s "
                f"(see {where})"
            )

    def _stop(self) -> None:
        for pid in self._begun:
            os.kill(pid, signal.SIGTERM)
        end = self._clock.monotonic() + _PATIENCE_SECONDS
        while self._begun and self._clock.monotonic() < end:
            self._collect()
            self._clock.sleep(_LOOK_SECONDS)
        for pid in self._begun:
            os.kill(pid, signal.SIGKILL)
