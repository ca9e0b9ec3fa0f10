"""The list of runs: what it says, and what it reads again."""

from dataclasses import replace
from pathlib import Path

import pytest
from support import event_samples
from support.event_samples import Script

from deploy.aggregator_host import run_list
from federation.event_log import EventWriter
from federation.events import Event, RunStarted
from monitoring.runs.run_folder import RunFolder
from monitoring.views.run_fold import fold


def _write(run: RunFolder, events: list[Event]) -> None:
    with EventWriter(run.events) as log:
        for event in events:
            log(event)


@pytest.mark.parametrize("stop", [40, 60, 1000])
def test_summary_is_that_of_all_events(tmp_path: Path, stop: int) -> None:
    """Wherever the log ends, and whatever is left out of it."""
    run, events = RunFolder(tmp_path), event_samples.run(Script(epsilon_cap=8.0))
    _write(run, events[:stop])
    row, view = run_list.summary(run), fold(events[:stop])
    assert (row["seconds"], row["rounds_completed"]) == (
        view.seconds,
        view.rounds_completed,
    )
    assert view.last_evaluated is not None
    assert row["loss"] == view.last_evaluated.pooled.loss
    assert row["is_noisy"]
    assert row["status"] == ("completed" if stop == 1000 else "interrupted")


def test_runs_are_listed_by_time(tmp_path: Path) -> None:
    """Whatever their folders are called; those that cannot be read come first."""
    root = tmp_path / "runs"
    for at, (name, engine) in enumerate((("z", ""), ("a", ""), ("m", "virtual"))):
        first, *rest = event_samples.run(Script(rounds=1, start=1e9 + 1e6 * at))
        assert isinstance(first, RunStarted)
        _write(
            RunFolder(root / "job" / name),
            [replace(first, engine=engine or first.engine), *rest],
        )
    broken = RunFolder(root / "job" / "n")
    broken.path.mkdir()
    broken.events.write_bytes(b"{}\n")
    rows = run_list.shown(root, {}).rows()
    assert [row["name"] for row in rows] == ["n", "z", "a", "m"]
