"""``python -m deploy.proxy_start FOLDER``: end an nginx of before, and become the next.

An nginx whose master was killed leaves its workers behind, and an aggregator that was
killed leaves its nginx; either holds the port. They are known by the pid file of our
own folder, and by the process group that it names.
"""

import os
import signal
import sys
from pathlib import Path

from deploy import proxy
from federation.clock import SystemClock
from federation.errors import FederationError

_LOOKS, _LOOK_SECONDS = 250, 0.02


def leftovers(work: Path) -> list[int]:
    """Processes of nginx that the pid file names, itself or as their group."""
    try:
        master = int((work / proxy.PID_FILE).read_text())
    except (OSError, ValueError):
        return []
    numbers = [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]
    return [
        number
        for number in numbers
        if master in {number, _group(number)} and proxy.is_nginx(number)
    ]


def end_leftovers(work: Path) -> None:
    """End them, and wait until they are gone."""
    clock = SystemClock()
    for _ in range(_LOOKS):
        found = leftovers(work)
        if not found:
            return
        for number in found:
            _end(number)
        clock.sleep(_LOOK_SECONDS)


def main(arguments: list[str]) -> int:
    """Become nginx; returns only if that fails."""
    work = Path(arguments[0])
    try:
        end_leftovers(work)
        command = proxy.command(work)
        os.execv(command[0], command)  # noqa: S606 -- our own arguments
    except (FederationError, OSError) as error:
        sys.stderr.write(f"crossfed: {error}\n")
    return 1


def _group(number: int) -> int:
    try:
        return os.getpgid(number)
    except OSError:
        return 0


def _end(number: int) -> None:
    try:
        os.kill(number, signal.SIGKILL)
    except OSError:
        return  # It is gone.


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
