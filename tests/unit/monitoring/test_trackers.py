"""Metrics of a run as TensorBoard and MLflow read them."""

import gc
import itertools
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import event_samples
from support.event_samples import Script

from deploy.cli import main
from federation.clock import VirtualClock
from federation.event_log import EventWriter
from federation.events import Event, RoundFinished, RunStarted, SiteAnswered
from federation.job.disclosure import Exposure, conceal
from monitoring.runs import trackers
from monitoring.runs.run_folder import RunFolder
from monitoring.runs.trackers import MetricStep, Point, export_metrics, points_of
from monitoring.views.run_fold import fold

AWS, GCP = event_samples.TWO_SITES


def write(run: RunFolder, events: Sequence[Event]) -> None:
    with EventWriter(run.events) as log:
        for event in events:
            log(event)


def export(run: RunFolder, name: str = "tensorboard") -> int:
    pytest.importorskip(name)
    return export_metrics(
        run, name, follow=False, clock=VirtualClock(), tell=pytest.fail
    )


def in_tensorboard(run: RunFolder) -> list[tuple[MetricStep, Point]]:
    """Every point that TensorBoard's own reader finds."""
    accumulators = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    found = accumulators.EventAccumulator(str(run.path / "tensorboard"))
    found.Reload()
    return [
        (MetricStep(name, each.step), Point(each.value, round(1000 * each.wall_time)))
        for name in found.Tags()["scalars"]
        for each in found.Scalars(name)
    ]


def single(points: Any) -> list[tuple[MetricStep, Point]]:
    """Points as a TensorBoard file holds them: float32."""
    return [
        (place, Point(pytest.approx(value, rel=1e-6), at_ms))
        for place, (value, at_ms) in sorted(points.items())
    ]


@pytest.mark.slow  # The first import of TensorBoard.
def test_tensorboard_reads_each_point_once(tmp_path: Path):
    """Step is the round, wall time that of the event, and sites are tags."""
    run, events = RunFolder(tmp_path), event_samples.two_sites(3)
    write(run, events)
    wanted = points_of(fold(events))
    for _ in range(2):
        assert export(run) == len(wanted)
        assert sorted(in_tensorboard(run)) == single(wanted)
    second = next(
        e for e in events if isinstance(e, RoundFinished) and e.round_index == 2
    )
    assert second.training is not None
    assert wanted[MetricStep("training_loss", 2)] == Point(
        second.training.loss, round(1000 * second.at)
    )
    assert {place.step for place in wanted if place.name == "loss"} == {0, 1, 2, 3}
    assert MetricStep(f"sites/{AWS}/accuracy", 3) in wanted


@pytest.mark.slow
def test_command_counts_the_points(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("tensorboard")
    events = event_samples.two_sites(2)
    write(RunFolder(tmp_path), events)
    arguments = ["export-metrics", str(tmp_path), "--to", "tensorboard", "--json"]
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["points"] == len(points_of(fold(events)))


@pytest.mark.slow
def test_rounds_that_ran_again_are_not_there_twice(tmp_path: Path):
    run, events = RunFolder(tmp_path), event_samples.resumed()
    starts = [i for i, event in enumerate(events) if isinstance(event, RunStarted)]
    write(run, events[: starts[1]])
    export(run)
    before = in_tensorboard(run)
    write(run, events[starts[1] :])
    export(run)
    found = in_tensorboard(run)
    assert len(found) == len({place for place, _ in found})
    assert sorted(found) == single(points_of(fold(events)))
    # Round 4 ended twice: only what the second coordinator measured counts.
    assert len(before) < len(found)


class Recorder:
    """A tracker that keeps what it is given."""

    def __init__(self) -> None:
        self.points: dict[MetricStep, Point] = {}
        self.restarts = 0

    def written(self) -> dict[MetricStep, Point]:
        return dict(self.points)

    def restart(self) -> None:
        self.points = {}
        self.restarts += 1

    def write(self, points: Any, _: str) -> None:
        assert not self.points.keys() & points.keys()
        self.points.update(points)

    def close(self) -> None:
        pass


class Ahead(VirtualClock):
    """Writes the next events whenever somebody waits."""

    def __init__(self, run: RunFolder, events: Sequence[Event], step: int) -> None:
        super().__init__()
        self._run, self._step = run, step
        self._events = list(events)
        self.sleep(0.0)

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        write(self._run, self._events[: self._step])
        del self._events[: self._step]


@pytest.mark.parametrize("step", [1, 2, 5])
def test_follower_writes_what_is_final(
    tmp_path: Path, step: int, monkeypatch: pytest.MonkeyPatch
):
    """Also where it looks between a round and its checkpoint: nothing is taken back."""
    run, recorder = RunFolder(tmp_path), Recorder()
    events = event_samples.private(4)
    monkeypatch.setattr(trackers, "tracker_of", lambda *_: recorder)
    clock = Ahead(run, events, step)
    said: list[str] = []
    count = export_metrics(run, "mlflow", follow=True, clock=clock, tell=said.append)
    assert recorder.points == points_of(fold(events))
    assert count == len(recorder.points)
    assert recorder.restarts == 0
    assert len(said) == 1  # Nobody holds the run's lock in this test.


def test_checkpoint_that_was_lost_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A round that was final is measured again: the old points go."""
    run, recorder = RunFolder(tmp_path), Recorder()
    events = event_samples.resumed()
    monkeypatch.setattr(trackers, "tracker_of", lambda *_: recorder)
    clock = Ahead(run, events, 4)
    export_metrics(run, "mlflow", follow=True, clock=clock, tell=[].append)
    assert recorder.points == points_of(fold(events))
    assert recorder.restarts == 1


def test_many_checkpoints_were_lost(tmp_path: Path):
    """The export has forgotten these rounds, and writes everything anew."""
    run, recorder = RunFolder(tmp_path), Recorder()
    first = event_samples.run(Script(rounds=12, stop_after=11))
    start = event_samples.START + 90
    second = event_samples.run(Script(rounds=12, first_round=2, seed=3, start=start))
    export = trackers.Export(run, recorder)
    for events in (first, second):
        write(run, events)
        export.look()
    assert recorder.points == points_of(fold([*first, *second]))
    assert (recorder.restarts, export.count) == (1, len(recorder.points))
    again = Recorder()
    trackers.Export(run, again).look()
    assert (again.points, again.restarts) == (recorder.points, 1)


def num_answers() -> int:
    """Answers that somebody holds."""
    return sum(isinstance(each, SiteAnswered) for each in gc.get_objects())


def test_memory_does_not_grow_with_rounds(tmp_path: Path):
    """Of an export that follows: a run may have 10,000 rounds and 1,000 sites."""
    held = []
    for rounds in (10, 40):
        run, before = RunFolder(tmp_path / str(rounds)), num_answers()
        write(run, event_samples.two_sites(rounds))
        export = trackers.Export(run, Recorder())
        export.look()
        held.append((num_answers() - before, len(export._points._taken)))
        del export
    assert held[0] == held[1]
    assert held[0][0] > 0


@pytest.mark.parametrize(
    "setting",
    [
        Exposure(private=private, secure=secure, deployed=deployed)
        for private, secure, deployed in itertools.product((False, True), repeat=3)
    ],
    ids=str,
)
def test_exports_nothing_that_the_disclosure_table_hides(setting: Exposure):
    """Emptied fields have no points; an open run has all of them."""
    events = [conceal(event, setting) for event in event_samples.two_sites(3)]
    names = {place.name for place in points_of(fold(events))}
    of_sites = {n.rpartition("/")[2] for n in names if n.startswith("sites/")}
    hidden: set[str] = set()
    if setting.private or setting.secure:
        hidden.add("training_loss")
    if setting.secure:
        hidden |= {"loss", "accuracy"}
    assert of_sites == {"training_loss", "loss", "accuracy"} - hidden
    assert ("training_loss" in names) != setting.private
    assert {"loss", "accuracy", "bytes_up"} <= names


def test_values_that_are_not_finite_are_left_out():
    """They differ from themselves, so that each export would begin anew."""
    events = [
        replace(event, update_norm=math.nan)
        if isinstance(event, RoundFinished) and event.round_index == 1
        else event
        for event in event_samples.two_sites(2)
    ]
    steps = [p.step for p in points_of(fold(events)) if p.name == "update_norm"]
    assert steps == [2]


@pytest.mark.parametrize("name", ["tensorboard", "mlflow"])
def test_missing_package_says_what_to_install(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    write(RunFolder(tmp_path), event_samples.two_sites(2))
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    assert main(["export-metrics", str(tmp_path), "--to", name]) == 1
    assert f"pip install 'crossfed[{name}]'" in capsys.readouterr().err


@pytest.fixture
def mlflow_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    mlflow = pytest.importorskip("mlflow")
    place = f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", place)
    return mlflow.MlflowClient(place)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # MLflow's own plans with SQLAlchemy.
def test_mlflow_holds_each_point_once(mlflow_client: Any, tmp_path: Path):
    """Also after a resume that measured a round again; then in a new MLflow run."""
    run, events = RunFolder(tmp_path / "run"), event_samples.resumed()
    starts = [i for i, event in enumerate(events) if isinstance(event, RunStarted)]
    write(run, events[: starts[1]])
    for _ in range(2):
        export(run, "mlflow")
    write(run, events[starts[1] :])
    for _ in range(2):
        export(run, "mlflow")
    experiment = mlflow_client.get_experiment_by_name("two-clouds-quickstart")
    (found,) = mlflow_client.search_runs([experiment.experiment_id])
    points = [
        (MetricStep(name, each.step), Point(each.value, each.timestamp))
        for name in found.data.metrics
        for each in mlflow_client.get_metric_history(found.info.run_id, name)
    ]
    assert sorted(points) == sorted(points_of(fold(events)).items())
    assert found.info.status == "FINISHED"
    assert found.data.tags["crossfed.run"] == "20260921-141320-c0ffee"
