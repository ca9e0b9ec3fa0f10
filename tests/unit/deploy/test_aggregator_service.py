"""The aggregator's service: what its log says of its SuperLink and of runs."""

import importlib.util
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import event_samples
from support.enrolments import Federation
from support.small_jobs import small_job

from cloud_adapters.flower import simulation as flower_simulation
from cloud_adapters.flower.facts import FlowerRun
from deploy import audit_log
from deploy.aggregator_host import run_queue
from deploy.aggregator_host.config import AggregatorConfig, AggregatorFile, QueueSpec
from deploy.aggregator_host.run_queue import Outcome
from federation import folder_lock
from federation.clock import VirtualClock
from federation.errors import FederationError
from federation.event_log import EventWriter
from federation.events import RunFinished
from monitoring.runs.run_folder import RunFolder

if importlib.util.find_spec("flwr") is None:
    pytest.skip("the flower extra is not installed", allow_module_level=True)
flower_simulation.import_flower()

from deploy.aggregator_host.service import (  # noqa: E402
    START_SECONDS,
    AggregatorService,
)

pytestmark = pytest.mark.flower


class Ends:
    """Lets time pass, and is set at its end."""

    def __init__(self, clock: VirtualClock, seconds: float) -> None:
        self.clock, self.seconds = clock, seconds

    def is_set(self) -> bool:
        return self.clock.monotonic() >= self.seconds

    def wait(self, seconds: float) -> None:
        self.clock.sleep(seconds)


class Answering:
    """A SuperLink that starts what it is asked to."""

    def nodes(self) -> None:
        """Answer."""

    def runs(self) -> dict[int, Any]:
        return {}

    def start(self, settings: dict[str, str]) -> int:  # noqa: ARG002
        return 7


class Silent:
    """A SuperLink whose certificate this machine does not accept."""

    def nodes(self) -> None:
        raise FederationError("its certificate is not yet valid")


def listened(
    folder: Path, seconds: float = math.inf
) -> tuple[list[str], AggregatorService]:
    """A service that ends after some time, and what it says."""
    told, clock = list[str](), VirtualClock()
    file = AggregatorFile(listen="h:1", hosts=("h",))
    ends: Any = Ends(clock, seconds)
    service = AggregatorService(
        config=AggregatorConfig(file=file, folder=folder),
        config_path=folder,
        clock=clock,
        listener=told.append,
        stopped=ends,
    )
    return told, service


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.9 * START_SECONDS, 0), (3 * START_SECONDS, 1)]
)
def test_a_superlink_that_never_answers_is_reported_once(
    tmp_path: Path, seconds: float, said: int
):
    """Its start takes seconds, and a clock that is wrong would last for ever."""
    told, service = listened(tmp_path, seconds)
    (tmp_path / "flower").mkdir()
    silent: Any = Silent()
    service._serve(silent)
    assert [line for line in told if "certificate" in line] == [
        "its certificate is not yet valid"
    ] * said


@pytest.mark.parametrize("answers", [True, False])
def test_the_log_says_once_that_it_is_ready(tmp_path: Path, answers: bool):  # noqa: FBT001
    """When its programs run and the SuperLink answers."""
    told, service = listened(tmp_path, 10.0)
    (tmp_path / "flower").mkdir()
    control: Any = Answering() if answers else Silent()
    service._renew = lambda _: None  # type: ignore[method-assign]
    service._serve(control)
    ready = [line for line in told if "ready" in line]
    assert ready == ["the aggregator is ready: sites connect to h:1"] * answers


def test_the_log_says_how_a_run_ended(tmp_path: Path):
    """Once, and of no run that another service has started."""
    told, service = listened(tmp_path)
    before, run = (RunFolder(tmp_path / "runs" / "a" / n) for n in ("before", "now"))
    for each in (before, run):
        run_queue.submit(small_job(), each, at=0.0)
    run_queue.leave_outcome(before, Outcome(code=0, message="completed"))
    control: Any = Answering()
    service._schedule(control)
    run_queue.leave_outcome(run, Outcome(code=2, message="east refuses"))
    for _ in range(2):
        service._schedule(control)
    assert told == ["run now is started", "run now failed: east refuses"]
    noted = audit_log.read(tmp_path / audit_log.FILE).entries
    assert [(e.action, e.subject) for e in noted if e.who == audit_log.SERVICE] == [
        ("run.start", "now"),
        ("run.end", "now"),
    ]
    assert noted[-1].details == {"status": "failed", "reason": "east refuses"}


def test_a_service_notes_settings_that_have_changed(tmp_path: Path):
    """Before anything rests on them, and once."""
    federation, clock = Federation(folder=tmp_path), VirtualClock()
    file = federation.config.file
    with folder_lock.hold(federation.config.lock, "taken"):  # It ends there.
        for each in (file, file, replace(file, queue=QueueSpec(max_runs=7))):
            config = replace(federation.config, file=each)
            service = AggregatorService(
                config=config, config_path=tmp_path, clock=clock, listener=print
            )
            with pytest.raises(FederationError, match="another aggregator"):
                service.run()
    found = audit_log.read(federation.aggregator / audit_log.FILE).entries
    first, second = (each for each in found if each.action == "settings")
    assert second.subject == "changed: queue.max_runs"
    assert second.details["queue.max_runs"] == "7"
    assert first.who == audit_log.SERVICE


def test_a_run_that_is_stopped_while_it_waits_has_one_name(tmp_path: Path):
    """In the log, the list of runs and its result: it has not failed."""
    told, service = listened(tmp_path)
    run = RunFolder(tmp_path / "runs" / "a" / "now")
    run_queue.submit(small_job(), run, at=0.0)
    *events, end = event_samples.two_sites(3)
    assert isinstance(end, RunFinished)
    with EventWriter(run.events) as write:
        for event in (*events, replace(end, status="interrupted")):
            write(event)
    seconds = run.view().seconds
    run_queue.ask_to_stop(run, at=0.0)
    handed = run_queue.read(run)
    assert handed is not None
    (action,) = run_queue.decide([handed], {}, set())
    assert isinstance(action, run_queue.GiveUp)
    control: Any = Answering()
    service._give_up(control, action)
    assert told == [f"run now stopped: {action.reason}"]
    noted = audit_log.read(tmp_path / audit_log.FILE).entries[-1]
    assert (noted.action, noted.details) == ("run.end", {"reason": action.reason})
    found = run_queue.read(run)
    assert found is not None
    assert found.status == "stopped"
    view = run.view()
    assert (view.status, view.seconds) == ("stopped", seconds)
    assert json.loads(run.result.read_bytes())["status"] == "stopped"


def test_the_log_says_which_site_of_a_run_was_revoked(tmp_path: Path):
    """Once, while the run has not ended."""
    told, federation = list[str](), Federation(folder=tmp_path)
    for name in ("site-0", "site-1"):
        federation.site(name)
    service = AggregatorService(
        config=federation.config,
        config_path=tmp_path,
        clock=VirtualClock(),
        listener=told.append,
    )
    run = RunFolder(federation.config.runs / "a" / "now")
    run_queue.submit(small_job(num_sites=2), run, at=0.0)
    control: Any = Answering()
    service._schedule(control)
    federation.revoke("site-1")
    for _ in range(2):
        service._schedule(control)
    (line,) = [line for line in told if "revoked" in line]
    assert "site-1 of run now" in line


def test_a_coordinator_that_hangs_is_ended_and_its_sites_are_free(tmp_path: Path):
    """The next run begins once Flower has ended it, although it holds its lock."""
    told, ended = list[str](), list[int]()
    clock = VirtualClock(1000.0)
    service = AggregatorService(
        config=AggregatorConfig(
            file=AggregatorFile(listen="h:1", hosts=("h",), connect_seconds=20.0),
            folder=tmp_path,
        ),
        config_path=tmp_path,
        clock=clock,
        listener=told.append,
    )
    hung, waits = (RunFolder(tmp_path / "runs" / "a" / n) for n in ("hung", "waits"))
    for at, each in enumerate((hung, waits)):
        run_queue.submit(small_job(), each, at=float(at))

    class Working(Answering):
        """Runs what it has started, until it is told otherwise."""

        def runs(self) -> dict[int, Any]:
            return {7: FlowerRun(is_over=7 in ended, status="")}

        def stop(self, number: int) -> None:
            ended.append(number)

    control: Any = Working()
    service._schedule(control)
    with hung.locked("7"):
        clock.sleep(49.0)
        service._schedule(control)
        assert not ended
        clock.sleep(2.0)
        service._schedule(control)
        assert ended == [7]
        service._schedule(control)
    assert (waits.path / run_queue.COORDINATOR).exists()
    (line,) = [line for line in told if "its sites are free" in line]
    assert "run hung" in line


def test_a_run_makes_way_for_one_of_higher_priority(tmp_path: Path):
    """It is asked once, and waits for its turn when its coordinator has ended."""
    told, over = list[str](), set[int]()
    service = AggregatorService(
        config=AggregatorConfig(
            file=AggregatorFile(listen="h:1", hosts=("h",)), folder=tmp_path
        ),
        config_path=tmp_path,
        clock=VirtualClock(1000.0),
        listener=told.append,
    )
    low, high = (RunFolder(tmp_path / "runs" / "a" / name) for name in ("low", "high"))
    run_queue.submit(small_job(), low, at=0.0)

    class Working(Answering):
        """Gives each coordinator the next number."""

        count = 0

        def runs(self) -> dict[int, Any]:
            numbers = range(1, self.count + 1)
            return {n: FlowerRun(is_over=n in over, status="") for n in numbers}

        def start(self, settings: dict[str, str]) -> int:  # noqa: ARG002
            self.count += 1
            return self.count

    control: Any = Working()
    service._schedule(control)
    run_queue.submit(small_job(), high, at=5.0, priority=1)
    for _ in range(2):
        service._schedule(control)
    assert (low.path / run_queue.YIELD).exists()
    over.add(1)
    for _ in range(2):
        service._schedule(control)
    assert told == [
        "run low is started",
        "run low makes way after its round",
        "run low waits for its next turn",
        "run high is started",
    ]
    run_queue.leave_outcome(high, Outcome(code=0, message="completed"))
    over.add(2)
    service._schedule(control)
    assert told[-1] == "run low is started"
