"""A script that imports torch once and forks a process for every command.

Run by path. One JSON object a line comes in and one goes out; see
``commands.ForkServer``. A child is the command and nothing else: it runs
``deploy.cli.commands.commands.main``, or ``misfortunes.run`` if it is to be killed at
some point.
"""

import json
import os
import signal
import sys
import time
from typing import Any

# Nothing here uses most of these: they are imported before the forks, which are three
# seconds shorter for what a run imports where it first needs it.
import rich.live  # noqa: F401
import sklearn.datasets  # noqa: F401
import torch
from support import misfortunes

import deploy.cli.commands
import deploy.wiring.simulation
import monitoring.pages.report  # noqa: F401

# The first optimizer of a process imports a compiler.
torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])


def _child(order: dict[str, Any]) -> None:
    os.setsid()
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(order[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(file, number)
        os.close(file)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(order["folder"])
    os.environ.update(order["environment"])
    if order["misfortune"]:
        misfortunes.prepare(order["misfortune"])
    sys.exit(deploy.cli.commands.main(order["arguments"]))


def _serve() -> None:
    for line in sys.stdin:
        order = json.loads(line)
        start = time.monotonic()
        pid = os.fork()
        if pid == 0:
            _child(order)
        if order["kill_after_seconds"] is not None:
            time.sleep(order["kill_after_seconds"])
            os.kill(pid, signal.SIGKILL)  # Not reaped yet, so it is still ours.
        _, status = os.waitpid(pid, 0)
        reply = {
            "code": os.waitstatus_to_exitcode(status),
            "seconds": time.monotonic() - start,
        }
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _serve()
