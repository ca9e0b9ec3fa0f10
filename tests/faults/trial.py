"""A run, what befalls it, and the verdict."""

import subprocess
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from faults import jobs, verdict
from faults.cells import Cell, Mode, Victim
from faults.deeds import strike
from faults.replay import replay
from faults.rig import Rig, pause
from faults.verdict import COMPLETED, Run
from support.deployment import CLOCK, wait_for

PATIENCE_SECONDS = 900
# Simulations of one process share torch's generator.
_REPLAY = threading.Lock()
_PRIVATE = {Mode.P1_PRIVATE, Mode.P2_PRIVATE}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of a run.

    Attributes:
        name: Of the cells.
        faults: What is wrong; empty if nothing is.
        outcome: ``completed``, or how the run ended.
        lost: Rounds without a result.
        reduced: Rounds with a result in which a site is missing.
        seconds: From handing the job over to its end.
    """

    name: str
    faults: tuple[str, ...]
    outcome: str
    lost: tuple[int, ...] = ()
    reduced: tuple[int, ...] = ()
    seconds: float = 0.0


def run_cells(cells: Sequence[Cell], rig: Rig) -> Result:
    """Run a job, and do the deeds of some cells one after another.

    Args:
        cells: Of one mode; a run may end early only of the last.
        rig: Where.
    """
    rig.revive()
    rig.forget_runs()
    rig.use_sites(jobs.sites_of(cells[0].mode))
    rig.use_ranks(wanted=_is_ranked(cells))
    begin = CLOCK.monotonic()
    follower = _begin(cells, rig)
    ended: set[str] = set()
    for cell in cells:
        _wait_for_rounds(cell, rig, follower)
        strike(cell, rig)
        ended |= {f"after {cell.name} {name} has ended" for name in rig.ended()}
    _, words = follower.communicate(timeout=PATIENCE_SECONDS)
    took = CLOCK.monotonic() - begin
    run = Run(
        folder=_newest(rig),
        code=follower.returncode,
        words=words,
        events=rig.deployment.events(),
    )
    ended |= {f"{name} has ended by itself" for name in rig.ended()}
    return Result(
        name=" ".join(cell.name for cell in cells),
        faults=(*sorted(ended), *_faults(cells, run, rig.folder)),
        outcome="completed" if run.code == 0 else f"stopped with {run.code}",
        lost=tuple(run.lost()),
        reduced=tuple(sorted({i for found in run.missing().values() for i in found})),
        seconds=took,
    )


def _begin(cells: Sequence[Cell], rig: Rig) -> subprocess.Popen[str]:
    """Hand the job over, and wait until its run has begun."""
    deployment = rig.deployment
    job = rig.folder / "job.toml"
    job.write_text(jobs.text_of(*cells))
    earlier = deployment.num_runs()
    follower = deployment.run(job)
    wait_for(
        lambda: follower.poll() is not None or deployment.num_runs() > earlier,
        "the run's beginning",
        240,
    )
    return follower


def _wait_for_rounds(cell: Cell, rig: Rig, follower: subprocess.Popen[str]) -> None:
    """Wait for two more rounds with a result, and for a moment within the next."""
    before = rig.deployment.rounds(status=COMPLETED)
    wait_for(
        lambda: (
            follower.poll() is not None
            or rig.deployment.rounds(status=COMPLETED) >= before + 2
        ),
        f"rounds before {cell.name}",
        240,
    )
    pause(cell.moment)
    if follower.poll() is not None:
        raise AssertionError(f"it ended before {cell.name}: {follower.communicate()}")


def _is_ranked(cells: Sequence[Cell]) -> bool:
    return any(cell.victim is Victim.RANK for cell in cells)


def _newest(rig: Rig) -> Path:
    runs = (rig.folder / "aggregator" / "runs").glob("*/*/events.jsonl")
    return max((path.parent for path in runs), key=lambda path: path.name)


def _faults(cells: Sequence[Cell], run: Run, folder: Path) -> Iterator[str]:
    yield from verdict.check_end(run, cells[-1].advice)
    yield from verdict.check_rounds(run)
    yield from verdict.check_secrets(run)
    if cells[0].mode in _PRIVATE:
        ledgers = {
            site: _ledger(folder / site, run.run_id, site)
            for site in jobs.sites_of(cells[0].mode)
        }
        yield from verdict.check_ledgers(run, ledgers)
        return
    with _REPLAY:
        yield from _check_model(cells, run)


def _check_model(cells: Sequence[Cell], run: Run) -> Iterator[str]:
    found, first = run.weights(), replay(run)
    if cells[0].mode is Mode.PLAIN and not _is_ranked(cells):
        yield from verdict.check_bits(found, first)
        return
    second = replay(run)
    yield from verdict.check_closeness(found, first, second)
    yield from verdict.check_power(run, first, second)


def _ledger(folder: Path, run_id: str, site: str) -> Path:
    return folder / "runs" / run_id / "sites" / site / "ledger.jsonl"
