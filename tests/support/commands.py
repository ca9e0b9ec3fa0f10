"""Run ``crossfed`` as a person does: as a process of its own."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from support import forked

CROSSFED = Path(sys.executable).with_name("crossfed")

JOB = """
name = "small"
seed = 3
rounds = 6

[model]
factory = "small_parts:linear"

[data]
source = "clients.data:digits"
partition = { kind = "dirichlet", alpha = 1.0 }

[training]
local_steps = 4
batch_size = 16
optimizer = { name = "sgd", lr = 0.05, momentum = 0.9 }

[aggregation]
server_optimizer = { name = "adam", lr = 0.03 }

[[sites]]
name = "left"

[[sites]]
name = "right"
"""

PARTS = """
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn


class Held(nn.Module):
    # Waits in the second round, and in those after it, for a file with this name.
    def __init__(self, until):
        super().__init__()
        self.until = until

    def forward(self, x):
        end = time.monotonic() + 120
        while self.until and not Path(self.until).exists():
            if Path("run/events.jsonl").read_text().count('"RoundStarted"') < 2:
                break
            if time.monotonic() > end:
                raise TimeoutError(self.until)
            time.sleep(0.01)
        return x


def linear(until="", hidden=0):
    layers = [nn.Flatten(), Held(until), nn.Dropout(0.1)]
    if hidden:
        layers += [nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10)]
    else:
        layers += [nn.Linear(64, 10)]
    return nn.Sequential(*layers)


not_callable = 3


def no_model():
    return "a text"


def broken_model():
    raise RuntimeError("the factory is out of order")


def no_data():
    return 17


def broken_data():
    raise OSError("the cable is cut")


def leaving_data():
    raise SystemExit(0)


def few():
    return (
        (np.zeros((3, 64), np.float32), np.array([0, 1, 2])),
        (np.zeros((3, 64), np.float32), np.array([0, 1, 2])),
    )
"""


@dataclass(frozen=True, kw_only=True)
class Done:
    """What a command came to."""

    code: int
    stdout: str
    stderr: str
    seconds: float = 0.0


def workplace(folder: Path, job: str = JOB) -> Path:
    """Make a folder with a job file and a user's own module in it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.toml").write_text(job)
    (folder / "small_parts.py").write_text(PARTS)
    return folder


def crossfed(*arguments: str, folder: Path, **environment: str) -> Done:
    """Run the installed command, with pipes for its streams."""
    done = subprocess.run(
        [CROSSFED, *arguments],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    return Done(code=done.returncode, stdout=done.stdout, stderr=done.stderr)


class ForkServer:
    """Runs commands in forks of one process that has imported torch already."""

    def __init__(self, scratch: Path) -> None:
        """Take a folder for the output of commands."""
        self._scratch = scratch

    def run(
        self,
        *arguments: str,
        folder: Path,
        misfortune: str = "",
        kill_after_seconds: float | None = None,
        environment: Mapping[str, str] | None = None,
        script: Path | None = None,
    ) -> Done:
        """Run ``crossfed``, or a script, with these arguments in ``folder``."""
        out, err = self._scratch / "stdout", self._scratch / "stderr"
        for path in (out, err):
            path.unlink(missing_ok=True)
        begin = time.monotonic()
        process = forked.shared().start(
            *arguments,
            out=out,
            err=err,
            environment={**os.environ, **(environment or {})},
            folder=folder,
            misfortune=misfortune,
            script=script,
        )
        if kill_after_seconds is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(kill_after_seconds)
            process.kill()
        code = process.wait()
        return Done(
            code=code,
            stdout=out.read_text(),
            stderr=err.read_text(),
            seconds=time.monotonic() - begin,
        )
