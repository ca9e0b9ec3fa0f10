"""Runs whose coordinator is killed in a process of its own."""

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support import forked


def kill_in_round_2(job: dict[str, Any], folder: Path) -> None:
    """Run a small job with these tables until its second round is saved."""
    kill_at(job, folder, "CheckpointSaved", 2)


def kill_at(
    job: dict[str, Any],
    folder: Path,
    event: str,
    round_index: int,
    engine: str = "inproc",
) -> None:
    """Run a small job with these tables until an event of a round."""
    said = folder.parent / f"{folder.name}.log"
    killed = forked.shared().start(
        json.dumps(job),
        str(folder),
        event,
        str(round_index),
        engine,
        call="support.killed_runs:simulate_and_die",
        out=said,
        err=said,
        environment=os.environ,
    )
    assert killed.wait(120) == -signal.SIGKILL, said.read_text()


def simulate_and_die(arguments: Sequence[str]) -> int:
    """Do it, in that process."""
    from support.small_jobs import small_job  # noqa: PLC0415 -- imports torch

    from deploy.wiring.simulation import simulate  # noqa: PLC0415

    job, folder, name, round_index, engine = arguments

    def die(event: Any) -> None:
        if type(event).__name__ == name and event.round_index == int(round_index):
            os.kill(os.getpid(), signal.SIGKILL)

    simulate(
        small_job(**json.loads(job)),
        folder=Path(folder),
        listeners=[die],
        engine=engine,
    )
    return 0
