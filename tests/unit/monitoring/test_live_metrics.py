"""A run that writes its own metrics, and continues where they cannot be written."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support import event_samples
from support.small_jobs import small_job

import crossfed
from federation.errors import JobError, StoreUnavailable
from federation.event_log import EventWriter
from federation.events import CheckpointSaved, Event, RunStarted
from monitoring.runs import trackers as module
from monitoring.runs.run_folder import RunFolder
from monitoring.runs.trackers import MetricStep, Point, Points, live_metrics, points_of
from monitoring.views.run_fold import fold


class Memory:
    """A tracker that keeps points, and is unavailable from some call on."""

    def __init__(self, calls: int = 1000) -> None:
        self.points: dict[MetricStep, Point] = {}
        self.status, self.restarts, self.is_closed, self._left = "", 0, False, calls

    def written(self) -> Points:
        return dict(self.points)

    def restart(self) -> None:
        self.points, self.restarts = {}, self.restarts + 1

    def write(self, points: Points, status: str) -> None:
        self._left -= 1
        if self._left < 0:
            raise StoreUnavailable("MLflow: the server is gone")
        assert not self.points.keys() & points.keys()
        self.points |= points
        self.status = status

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Write events into a run and tell them to its listeners, as a run does."""

    def played(
        tracker: Memory, events: Sequence[Event], *, broken: bool = False
    ) -> None:
        monkeypatch.setattr(module, "_PACKAGES", {"mlflow": "json"})  # It is there.
        monkeypatch.setattr(module, "tracker_of", lambda *_: tracker)
        run = RunFolder(tmp_path)
        with live_metrics(run, ["mlflow"]) as listeners, EventWriter(run.events) as log:
            for event in events:
                log(event)
                for listener in listeners:
                    listener(event)
            if broken:
                assert tracker.points
                raise KeyboardInterrupt

    return played


def test_points_are_there_while_the_run_continues(play: Any):
    events, tracker = event_samples.private(4), Memory()
    last = max(i for i, e in enumerate(events) if isinstance(e, CheckpointSaved))
    with pytest.raises(KeyboardInterrupt):
        play(tracker, events[: last + 1], broken=True)
    assert {place.step for place in tracker.points} == {0, 1, 2, 3}
    assert tracker.is_closed


def test_all_points_are_there_at_the_end_also_of_a_resumed_run(play: Any):
    """A round that ran again is written again, in place of the first one."""
    events, tracker = event_samples.resumed(), Memory()
    second = [i for i, e in enumerate(events) if isinstance(e, RunStarted)][1]
    play(tracker, events[:second])
    play(tracker, events[second:])
    assert tracker.points == points_of(fold(events))
    assert (tracker.status, tracker.restarts) == ("completed", 1)


@pytest.mark.parametrize("calls", [0, 1])
def test_a_run_continues_without_a_tracker(
    calls: int, play: Any, caplog: pytest.LogCaptureFixture
):
    """It is tried once, and a command is named that writes the points later."""
    tracker = Memory(calls)
    play(tracker, event_samples.private(4))
    (record,) = caplog.records
    assert "the server is gone;" in record.getMessage()
    assert "export-metrics" in record.getMessage()
    assert tracker.is_closed


def test_a_run_in_memory_is_refused():
    job = small_job(simulation={"live_metrics": ["tensorboard"]})
    with pytest.raises(JobError, match="folder for the run") as caught:
        crossfed.simulate(job)
    assert caught.value.key == "simulation.live_metrics"


@pytest.mark.slow  # The first import of TensorBoard.
def test_a_simulation_writes_for_tensorboard(tmp_path: Path):
    pytest.importorskip("tensorboard")
    job = small_job(rounds=2, simulation={"live_metrics": ["tensorboard"]})
    crossfed.simulate(job, folder=tmp_path / "run")
    (file,) = (tmp_path / "run" / "tensorboard").glob("events*.crossfed")
    assert b"training_loss" in file.read_bytes()
