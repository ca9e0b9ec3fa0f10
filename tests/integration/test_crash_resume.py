"""Runs that are killed, stopped, damaged or crowded end as if nothing had happened."""

import contextlib
import json
import os
import random
import shlex
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support import forked, misfortunes
from support.commands import Done, ForkServer, workplace
from support.forked import Forked

from federation.event_log import read_events
from monitoring.views.result_json import result
from monitoring.views.run_fold import fold

pytestmark = [pytest.mark.slow]

KILLED = -signal.SIGKILL
NUM_RANDOM_KILLS = 5
# A report costs as much as the run: it is drawn where the run was killed late.
REPORTED = {"run has ended", *misfortunes.REPLACED}
# Moments beside one that `make test` has.
BESIDE = {"update is folded, no blob yet", "first blob is written", "round has ended"}
ROUNDS = 6
# Sites wait in the second round until the test makes this file.
GO = "go"
NO_REPORT = "--no-report"
HELD = ("--set", f"model.options.until={GO}", NO_REPORT)


@dataclass(frozen=True)
class Baseline:
    """An uninterrupted run."""

    model: bytes
    result: dict
    seconds: float


@pytest.fixture(scope="module")
def baseline(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Baseline:
    place = workplace(tmp_path_factory.mktemp("baseline"))
    server.run("runs", folder=place)  # The first command waits for imports.
    words = ("simulate", "job.toml", "--out", "run", NO_REPORT)
    done = server.run(*words, folder=place)
    assert done.code == 0, done.stderr
    return Baseline(
        (place / "run/model.safetensors").read_bytes(),
        json.loads((place / "run/result.json").read_text()),
        done.seconds,
    )


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return workplace(tmp_path / "place")


def finish(server: ForkServer, place: Path, *more: str) -> Done:
    """Resume what was begun in ``run``; what was not is started."""
    begun = (place / "run/events.jsonl").exists()
    resume = ["--resume"] if begun else []
    return server.run(
        "simulate", "job.toml", *more, "--out", "run", *resume, folder=place
    )


def untimed(found: dict) -> dict:
    """The parts of a result that must not depend on interruptions."""
    timeless = ("round", "status", "training_loss", "loss", "accuracy", "update_norm")
    return {
        "status": found["status"],
        "rounds_completed": found["rounds_completed"],
        "final": found["final"],
        "rounds": [{name: row[name] for name in timeless} for row in found["rounds"]],
    }


def check_whole(place: Path, baseline: Baseline, *, has_report: bool = False) -> None:
    """Check that a run ended as the uninterrupted one and left whole files."""
    run = place / "run"
    assert (run / "model.safetensors").read_bytes() == baseline.model
    found = json.loads((run / "result.json").read_text())
    assert found == result(fold(read_events(run / "events.jsonl")))
    assert untimed(found) == untimed(baseline.result)
    left = {path.name for path in run.iterdir()}
    if has_report:
        assert "</html>" in (run / "report.html").read_text()
        left.remove("report.html")
    assert left == {
        ".lock",
        ".about",
        ".partial",
        "checkpoints",
        "events.jsonl",
        "job.toml",
        "model.safetensors",
        "result.json",
    }
    assert not any((run / ".partial").iterdir())


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.long] * (kind in BESIDE))
        for kind in misfortunes.KINDS
    ],
)
def test_killed_run_resumes_to_the_same_model(
    kind: str, server: ForkServer, place: Path, baseline: Baseline
) -> None:
    """Each moment of a round, and of what follows the last one."""
    killed = server.run(
        "simulate", "job.toml", "--out", "run", folder=place, misfortune=kind
    )
    assert killed.code == KILLED, killed.stderr
    has_report = kind in REPORTED
    done = finish(server, place, *([] if has_report else [NO_REPORT]))
    assert done.code == 0, done.stderr
    check_whole(place, baseline, has_report=has_report)


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=[pytest.mark.long] * (seed > 0))
        for seed in range(NUM_RANDOM_KILLS)
    ],
)
def test_run_killed_at_any_time_resumes_to_the_same_model(
    seed: int, server: ForkServer, place: Path, baseline: Baseline
) -> None:
    """Killed twice, at moments drawn from the length of a whole run."""
    draw = random.Random(seed)  # noqa: S311 -- moments, not keys
    for _ in range(2):
        seconds = draw.uniform(0, baseline.seconds)
        begun = (place / "run/events.jsonl").exists()
        server.run(
            "simulate",
            "job.toml",
            "--out",
            "run",
            *(["--resume"] if begun else []),
            NO_REPORT,
            folder=place,
            kill_after_seconds=seconds,
        )
    done = finish(server, place, NO_REPORT)
    assert done.code == 0, done.stderr
    run = place / "run"
    assert (run / "model.safetensors").read_bytes() == baseline.model
    view = fold(read_events(run / "events.jsonl"))
    assert (view.status, view.rounds_completed) == ("completed", ROUNDS)
    assert json.loads((run / "result.json").read_text()) == result(view)


def _tear_manifest(checkpoints: Path) -> str:
    newest = max(checkpoints.glob("round-*.json"))
    newest.write_bytes(newest.read_bytes()[:-100])
    return newest.name


def _corrupt_blob(checkpoints: Path) -> str:
    newest = max(checkpoints.glob("round-*.json"))
    key = json.loads(newest.read_text())["blobs"]["weights"]["key"]
    blob = checkpoints / key
    content = bytearray(blob.read_bytes())
    content[-5] ^= 1
    blob.write_bytes(content)
    return newest.name


@pytest.mark.parametrize("damage", [_tear_manifest, _corrupt_blob])
def test_damaged_checkpoint_is_skipped_with_a_warning(
    damage: Callable[[Path], str], server: ForkServer, place: Path, baseline: Baseline
) -> None:
    """The one before it serves, the model is the same, and a person is told."""
    server.run(
        "simulate",
        "job.toml",
        "--out",
        "run",
        folder=place,
        misfortune="between blobs and manifest",
    )
    name = damage(place / "run/checkpoints")
    done = finish(server, place, NO_REPORT)
    assert done.code == 0, done.stderr
    assert f"checkpoint skipped  checkpoints/{name}" in done.stderr
    check_whole(place, baseline)
    assert any((place / "run/checkpoints/quarantine").iterdir())


@contextlib.contextmanager
def coordinator(place: Path, *more: str) -> Iterator[Forked]:
    """A run in a process of its own, held in its second round."""
    process = forked.shared().start(
        *("simulate", "job.toml", *HELD, "--out", "run", *more),
        out=Path(os.devnull),
        err=place / "stderr",
        environment=os.environ,
        folder=place,
    )
    try:
        wait_for(place / "run/events.jsonl", '"RoundStarted"', 2)
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def wait_for(path: Path, text: str, times: int = 1) -> None:
    """Wait until a file holds a text so many times."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if path.exists() and path.read_text().count(text) >= times:
            return
        time.sleep(0.01)
    raise AssertionError(f"{path} does not hold {text} {times} times")


def test_second_coordinator_is_refused(
    server: ForkServer, place: Path, baseline: Baseline
) -> None:
    """The lock of the folder: one says so and leaves the other alone."""
    with coordinator(place) as first:
        second = finish(server, place, *HELD)
        assert second.code == 1
        assert "process is using run" in second.stderr
        assert "Traceback" not in second.stderr
        (place / GO).touch()
        assert first.wait(timeout=60) == 0
    check_whole(place, baseline)


def test_one_of_two_coordinators_without_a_lock_wins(
    server: ForkServer, place: Path, baseline: Baseline
) -> None:
    """As on a file system without locks: the manifest alone decides."""
    with coordinator(place) as first:
        (place / "run/.lock").unlink()
        first.send_signal(signal.SIGSTOP)  # Until the other has run away with it.
        (place / GO).touch()
        second = finish(server, place, *HELD)
        first.send_signal(signal.SIGCONT)
        codes = [first.wait(timeout=60), second.code]
    said = (place / "stderr").read_text() + second.stderr
    assert codes == [1, 0], said
    assert "another coordinator" in said
    assert "Traceback" not in said
    assert (place / "run/model.safetensors").read_bytes() == baseline.model


def _resume_command(said: str) -> list[str]:
    (line,) = [line for line in said.splitlines() if line.startswith("  crossfed ")]
    return shlex.split(line)[1:]


def test_first_interrupt_stops_after_the_round(
    server: ForkServer, place: Path, baseline: Baseline
) -> None:
    """Exit code 130, a clean checkpoint, and the command that continues works."""
    with coordinator(place) as process:
        process.send_signal(signal.SIGINT)
        wait_for(place / "stderr", "stopping after this round")
        (place / GO).touch()
        assert process.wait(timeout=60) == 130
    said = (place / "stderr").read_text()
    assert "Traceback" not in said
    found = json.loads((place / "run/result.json").read_text())
    assert found["status"] == "stopped"
    assert not (place / "run/model.safetensors").exists()
    done = server.run(*_resume_command(said), folder=place)
    assert done.code == 0, done.stderr
    check_whole(place, baseline)


def test_second_interrupt_stops_at_once(server: ForkServer, place: Path) -> None:
    """Without waiting for the round, whose work is lost; the rest is safe."""
    with coordinator(place, "--set", "rounds=3") as process:
        process.send_signal(signal.SIGINT)
        wait_for(place / "stderr", "stopping after this round")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
    assert (place / "run/events.jsonl").read_text().count('"RoundFinished"') == 1
    assert json.loads((place / "run/result.json").read_text())["status"] == "stopped"
    said = (place / "stderr").read_text()
    assert "Traceback" not in said
    assert "Fatal" not in said
    (place / GO).touch()
    done = server.run(*_resume_command(said), folder=place)
    assert done.code == 0, done.stderr
    assert json.loads((place / "run/result.json").read_text())["rounds_completed"] == 3
