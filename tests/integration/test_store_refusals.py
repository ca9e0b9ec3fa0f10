"""Runs whose store refuses a checkpoint: a clear message, and no state lost."""

import json
import re
from pathlib import Path

import pytest
from support.bad_lines import Line, google_error
from support.commands import Done, ForkServer, workplace
from support.tcp_proxy import s3_error

from cloud_adapters.storage.probe import check_conditions_kept
from federation.event_log import read_events
from federation.events import CheckpointSaved, RoundStarted

pytestmark = pytest.mark.slow

ROUNDS = 6  # Of the workplace's job.
SIMULATE = ("simulate", "job.toml", "--out", "run", "--no-report")
LOCAL = {
    "quota is used up": "the disk quota is used up; free some space and resume",
    "disk turns read-only": "the file system is read-only; mount it writable",
}
CLOCK, QUOTA = "clock .*synchronise it", "a quota is used up: free space"
REMOTE = {
    "s3 clock": (s3_error(403, "RequestTimeTooSkewed"), CLOCK),
    "s3 quota": (s3_error(403, "QuotaExceeded"), QUOTA),
    "gcs quota": (google_error(403, "quotaExceeded"), QUOTA),
}
SCHEMES = {"s3": "s3", "gcs": "gs"}
KEYS = {"AWS_ACCESS_KEY_ID": "test-key", "AWS_SECRET_ACCESS_KEY": "test-secret"}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return workplace(tmp_path / "place")


@pytest.fixture(scope="module")
def expected(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The model of the same job where nothing refuses anything."""
    place = workplace(tmp_path_factory.mktemp("whole"))
    done = server.run(*SIMULATE, folder=place)
    assert done.code == 0, done.stderr
    return (place / "run/model.safetensors").read_bytes()


def check_told(done: Done, words: str) -> None:
    """One line says what to do, another how to continue."""
    assert done.code == 1, done.stderr
    assert re.search(words, done.stderr), done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.rstrip().endswith("--resume"), done.stderr


def saved_rounds(place: Path) -> set[int]:
    events = read_events(place / "run/events.jsonl")
    return {e.round_index for e in events if isinstance(e, CheckpointSaved)}


def check_resumed(done: Done, place: Path, *, saved: set[int]) -> None:
    """Every round whose checkpoint was there has run once, and all have run."""
    assert done.code == 0, done.stderr
    result = json.loads((place / "run/result.json").read_text())
    assert (result["status"], result["rounds_completed"]) == ("completed", ROUNDS)
    events = read_events(place / "run/events.jsonl")
    begun = [e.round_index for e in events if isinstance(e, RoundStarted)]
    assert {1, 2} <= saved < set(range(ROUNDS))
    assert all(begun.count(number) == 1 for number in saved - {0})


@pytest.mark.parametrize(("misfortune", "words"), LOCAL.items(), ids=LOCAL)
def test_disk_refuses_a_checkpoint(
    server: ForkServer, place: Path, expected: bytes, misfortune: str, words: str
):
    """The run ends where it is, and continues from there when the disk takes more."""
    check_told(server.run(*SIMULATE, folder=place, misfortune=misfortune), words)
    saved = saved_rounds(place)
    done = server.run(*SIMULATE, "--resume", folder=place)
    check_resumed(done, place, saved=saved)
    assert (place / "run/model.safetensors").read_bytes() == expected


@pytest.mark.parametrize(
    "case",
    [
        # What it means is tested with the store: test_s3_errors.py.
        pytest.param("s3 clock", marks=pytest.mark.long),
        "s3 quota",
        "gcs quota",
    ],
)
def test_service_refuses_a_checkpoint(
    server: ForkServer,
    place: Path,
    expected: bytes,
    case: str,
    request: pytest.FixtureRequest,
):
    """The run ends, and continues from there when the service takes more."""
    name = case.partition(" ")[0]
    line: Line = request.getfixturevalue(f"{name}_line")
    fault, words = REMOTE[case]
    arguments = [*SIMULATE]
    for option in (
        f"url={SCHEMES[name]}://{line.bucket}/run",
        f"endpoint={line.proxy.url}",
        "region=us-east-1",
    ):
        arguments += ["--set", f"storage.{option}"]
    writes = "PUT|POST .*upload"
    check_conditions_kept(line.far)  # As a run does first: so many writes.
    num_tried = line.proxy.count(writes)
    line.proxy.clear()
    # The job and the first checkpoint are four objects, as each round's are.
    line.proxy.fail(writes, fault, times=10_000, after=num_tried + 14)
    check_told(server.run(*arguments, folder=place, environment=KEYS), words)
    saved = saved_rounds(place)
    line.proxy.clear()
    done = server.run(*arguments, "--resume", folder=place, environment=KEYS)
    check_resumed(done, place, saved=saved)
    assert (place / "run/model.safetensors").read_bytes() == expected
