"""Processes of nginx: started once, reloaded, and ended if left over.

An nginx whose master was killed leaves its workers behind, and an aggregator that was
killed leaves its nginx; either holds the port. So what starts it,
``python -m cloud_adapters.nginx.processes FOLDER``, first ends what was left and then
becomes nginx. The workers of root's nginx have another user, whose other programs may
not read their memory (``cloud_adapters.local.memory_hardening``). Processes are known
by the pid file of our own folder, and by the process group that it names.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from cloud_adapters.local import memory_hardening
from cloud_adapters.nginx import config as proxy
from cloud_adapters.nginx.config import ProxyFailed
from federation.clock import SystemClock
from federation.errors import FederationError

PATIENCE_SECONDS = 30.0
_LOOK_SECONDS = 0.01


def reload(work: Path) -> bool:
    """Make a running nginx load new certificates and revocations.

    When this returns no worker takes connections under the old ones any more, and a
    connection that is open ends with the request that it is in.

    Args:
        work: See ``cloud_adapters.nginx.config.ProxySettings``.

    Returns:
        Whether one runs.

    Raises:
        ProxyFailed: nginx rejects the new files and keeps using the old ones, or
            it does not answer.
    """
    master = _master(work)
    if master is None or not is_nginx(master):
        return False
    proxy.check(work)
    before = [number for number in processes(work) if number != master]
    try:
        os.kill(master, signal.SIGHUP)
    except OSError:
        return False  # It has ended just now.
    if not _wait(lambda: not any(_is_at_work(number) for number in before)):
        raise ProxyFailed(
            f"nginx (process {master}) did not reload its configuration: see "
            f"{work / 'error.log'}, and start crossfed aggregator up again"
        )
    return True


def processes(work: Path) -> list[int]:
    """Processes of nginx that the pid file names, itself or as their group."""
    master = _master(work)
    if master is None:
        return []
    numbers = [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]
    return [
        number
        for number in numbers
        if master in {number, _group(number)} and is_nginx(number)
    ]


def end_processes(work: Path) -> None:
    """End them, and wait until they are gone.

    Raises:
        ProxyFailed: They do not go.
    """
    for number in processes(work):
        _end(number)
    if not _wait(lambda: not processes(work)):
        raise ProxyFailed(f"a leftover nginx does not stop: {work}")


def is_nginx(process: int) -> bool:
    """Whether a process runs and is nginx, not a later one with its number."""
    try:
        status = Path(f"/proc/{process}/stat").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False
    name, _, rest = status.partition("(")[2].rpartition(")")
    return name == "nginx" and rest.split()[0] not in {"Z", "X"}


def main(arguments: list[str]) -> int:
    """Become nginx; returns only if that fails."""
    work = Path(arguments[0])
    try:
        end_processes(work)
        command = proxy.command(work)
        if os.geteuid() == 0:
            memory_hardening.keep()
        os.execv(command[0], command)  # noqa: S606 -- our own arguments
    except (FederationError, OSError) as error:
        sys.stderr.write(f"crossfed: {error}\n")
    return 1


def _master(work: Path) -> int | None:
    try:
        number = int((work / proxy.PID_FILE).read_text())
    except (OSError, ValueError):
        return None
    return number if number > 1 else None


def _is_at_work(worker: int) -> bool:
    """Whether a worker accepts connections, according to its process title."""
    try:
        title = Path(f"/proc/{worker}/cmdline").read_bytes()
    except OSError:
        return False
    return is_nginx(worker) and b"is shutting down" not in title


def _wait(condition: Callable[[], bool]) -> bool:
    clock = SystemClock()
    end = clock.monotonic() + PATIENCE_SECONDS
    while not condition():
        if clock.monotonic() > end:
            return False
        clock.sleep(_LOOK_SECONDS)
    return True


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
