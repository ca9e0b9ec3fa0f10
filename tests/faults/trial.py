"""One cell: a run, something that befalls it, and the verdict."""

import random
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from faults import jobs, verdict
from faults.cells import Cell, Mode, Victim
from faults.deeds import strike
from faults.replay import replay
from faults.rig import Rig, pause
from faults.verdict import Run
from support.deployment import CLOCK, wait_for

PATIENCE_SECONDS = 900
_PRIVATE = {Mode.P1_PRIVATE, Mode.P2_PRIVATE}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of a cell.

    Attributes:
        cell: Which.
        faults: What is wrong; empty if nothing is.
        outcome: ``completed``, or how the run ended.
        lost: Rounds without a result.
        reduced: Rounds with a result in which a site is missing.
        seconds: From handing the job over to its end.
    """

    cell: Cell
    faults: tuple[str, ...]
    outcome: str
    lost: tuple[int, ...] = ()
    reduced: tuple[int, ...] = ()
    seconds: float = 0.0


def run_cell(cell: Cell, rig: Rig, seconds: float | None = None) -> Result:
    """Run a cell.

    Args:
        cell: Which.
        rig: Where.
        seconds: How long the deed lasts, if not as the matrix has it.
    """
    rig.revive()
    rig.forget_runs()
    rig.use_ranks(wanted=cell.victim is Victim.RANK)
    begin = CLOCK.monotonic()
    follower = _begin(cell, rig)
    # Moments differ from cell to cell, and not from one try to the next.
    pause(random.Random(cell.name).uniform(0, 1.5))  # noqa: S311 -- no secret
    assert follower.poll() is None, "it was over before the deed"
    strike(cell, rig, cell.seconds if seconds is None else seconds)
    ended = rig.ended()
    _, words = follower.communicate(timeout=PATIENCE_SECONDS)
    took = CLOCK.monotonic() - begin
    run = Run(
        folder=_newest(rig),
        code=follower.returncode,
        words=words,
        events=rig.deployment.events(),
    )
    faults = [f"{name} has ended by itself" for name in {*ended, *rig.ended()}]
    faults += _faults(cell, run, rig.folder)
    return Result(
        cell=cell,
        faults=tuple(faults),
        outcome="completed" if run.code == 0 else f"stopped with {run.code}",
        lost=tuple(run.lost()),
        reduced=tuple(sorted({i for found in run.missing().values() for i in found})),
        seconds=took,
    )


def _begin(cell: Cell, rig: Rig) -> subprocess.Popen[str]:
    """Hand the job over, and wait until its rounds go."""
    deployment = rig.deployment
    job = rig.folder / "job.toml"
    job.write_text(jobs.text_of(cell))
    earlier = deployment.num_runs()
    follower = deployment.run(job)
    wait_for(
        lambda: (
            follower.poll() is not None
            or (deployment.num_runs() > earlier and deployment.rounds() >= 2)
        ),
        f"rounds of {cell.name}",
        240,
    )
    assert follower.poll() is None, f"it has ended at once: {follower.communicate()[1]}"
    return follower


def _newest(rig: Rig) -> Path:
    runs = (rig.folder / "aggregator" / "runs").glob("*/*/events.jsonl")
    return max((path.parent for path in runs), key=lambda path: path.name)


def _faults(cell: Cell, run: Run, folder: Path) -> Iterator[str]:
    yield from verdict.check_end(run, cell.advice)
    yield from verdict.check_rounds(run)
    yield from verdict.check_secrets(run)
    if cell.mode in _PRIVATE:
        ledgers = {
            site: _ledger(folder / site, run.run_id, site) for site in jobs.SITES
        }
        yield from verdict.check_ledgers(run, ledgers)
        return
    found, first = run.weights(), replay(run)
    if cell.mode is Mode.PLAIN and cell.victim is not Victim.RANK:
        yield from verdict.check_bits(found, first)
        return
    second = replay(run)
    yield from verdict.check_closeness(found, first, second)
    yield from verdict.check_power(run, first, second)


def _ledger(folder: Path, run_id: str, site: str) -> Path:
    return folder / "runs" / run_id / "sites" / site / "ledger.jsonl"
