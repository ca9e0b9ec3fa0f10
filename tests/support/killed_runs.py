"""Runs whose coordinator is killed in a process of its own."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

_KILLED = """
import json, os, signal, sys
from pathlib import Path
from support.small_jobs import small_job
from deploy.wiring.simulation import simulate

def die(event):
    if type(event).__name__ == sys.argv[3] and event.round_index == int(sys.argv[4]):
        os.kill(os.getpid(), signal.SIGKILL)

job = small_job(**json.loads(sys.argv[1]))
simulate(job, folder=Path(sys.argv[2]), listeners=[die])
"""


def kill_in_round_2(job: dict[str, Any], folder: Path) -> None:
    """Run a small job with these tables until its second round is saved."""
    kill_at(job, folder, "CheckpointSaved", 2)


def kill_at(job: dict[str, Any], folder: Path, event: str, round_index: int) -> None:
    """Run a small job with these tables until an event of a round."""
    command = [sys.executable, "-c", _KILLED, json.dumps(job), str(folder)]
    command += [event, str(round_index)]
    tests = str(Path(__file__).parents[1])
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": tests}, check=False, timeout=120
    )
    assert done.returncode == -signal.SIGKILL
