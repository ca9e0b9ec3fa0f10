"""Runs whose updates and changes travel in a few bits, with error feedback."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.killed_runs import kill_at
from support.small_jobs import small_job
from support.without_report import simulate

from deploy.cli import job_check
from deploy.wiring import parts as wiring
from federation.clock import VirtualClock
from federation.errors import CheckpointMismatch, JobError
from federation.event_log import read_events
from federation.events import ModelEvaluated, RoundFinished, SiteFailed
from federation.job.spec import JobSpec
from monitoring.runs.run_result import RunResult

pytestmark = pytest.mark.slow

ROUNDS = 6
WIDE = {
    "factory": "clients.models:mlp",
    "options": {"inputs": 4, "classes": 3, "hidden": [256, 64]},
}
CODECS: dict[str, dict[str, Any]] = {
    "int8": {"name": "int8"},
    "int4": {"name": "int4", "block": 64},
    "fp4": {"name": "fp4"},
    "top_k": {"name": "top_k", "fraction": 0.05},
    "subset": {"name": "subset", "fraction": 0.25, "order": "cyclic"},
}
# Bytes of a value up, by those of float32; a message has a header beside it.
SHARES = {"int8": 0.26, "int4": 0.14, "fp4": 0.14, "top_k": 0.04, "subset": 0.27}
each_codec = pytest.mark.parametrize("codec", CODECS)
Ended = tuple[float, list[RoundFinished]]


def tables(up: str, *, down: str = "", **more: Any) -> dict[str, Any]:
    """Tables of a job of four sites that train some 18,000 values."""
    communication: dict[str, Any] = {"codec": CODECS.get(up, {"name": up})}
    if down:
        communication |= {"down_codec": CODECS[down], "down_content": "change"}
    return {
        "num_sites": 4,
        "rounds": ROUNDS,
        "model": WIDE,
        "training": {"local_steps": 4, "batch_size": 8, "optimizer": {"lr": 0.1}},
        "communication": communication,
    } | more


def values(done: RunResult) -> np.ndarray:
    return np.concatenate([array.ravel() for array in done.weights.values()])


def seen(job: JobSpec, folder: Path) -> Ended:
    """The final loss, and the rounds."""
    simulate(job, folder=folder)
    events = read_events(folder / "events.jsonl")
    rounds = [e for e in events if isinstance(e, RoundFinished)]
    assert [e.status for e in rounds] == ["completed"] * ROUNDS
    losses = [e.pooled.loss for e in events if isinstance(e, ModelEvaluated)]
    assert losses[-1] < losses[0]
    return losses[-1], rounds


@pytest.fixture(scope="module")
def all_values(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A run whose updates are all of float32."""
    return seen(small_job(**tables("identity")), tmp_path_factory.mktemp("whole"))


@each_codec
def test_few_bytes_are_those_predicted_and_bring_nearly_the_same_loss(
    codec: str, all_values: Ended, tmp_path: Path
):
    """Up, and as changes down; in every round, to the byte or to a text's padding."""
    job = small_job(**tables(codec, down=codec))
    whole, all_bytes = all_values
    loss, rounds = seen(job, tmp_path / "few")
    dense = codec in {"int8", "int4", "fp4"}
    assert loss == pytest.approx(whole, abs=0.02 if dense else 0.35)
    traffic = job_check.forecast(wiring.build_federation(job), VirtualClock()).traffic
    assert traffic is not None
    for index, found in enumerate(rounds, start=1):
        down, up = traffic.of_round(index)
        assert down.low <= found.bytes_down <= down.high
        assert up.low <= found.bytes_up <= up.high
        assert max(up.high - up.low, down.high - down.low) <= 64 * 4
        assert found.bytes_up < SHARES[codec] * all_bytes[0].bytes_up + 4 * 1024
        if index > 1:
            most = SHARES[codec] * all_bytes[0].bytes_down + 4 * 1024
            assert found.bytes_down < most


def test_engines_agree_bit_for_bit():
    """About residuals, too."""
    machines = [{"site": f"site-{i}", "examples_per_second": 9.0} for i in range(4)]
    job = small_job(**tables("int4", down="top_k", simulation={"machines": machines}))
    ours, theirs = (simulate(job, engine=engine) for engine in ("inproc", "virtual"))
    assert values(ours).tobytes() == values(theirs).tobytes()


@pytest.mark.flower
def test_flowers_simulation_refuses_residuals_without_a_folder():
    """With one it keeps them, as ``test_flower_engine`` sees."""
    job = small_job(**tables("int4"))
    with pytest.raises(JobError, match="folder for their state"):
        simulate(job, engine="flower")


@pytest.mark.parametrize(
    "changed",
    [
        {"name": "int8"},
        {"name": "int4", "block": 32},
        {"name": "int4", "feedback": 0.5},
    ],
    ids=["another", "block", "feedback"],
)
def test_a_run_goes_on_with_its_codec_only(changed: dict[str, Any], tmp_path: Path):
    """Its residuals are of that codec."""
    job = tables("int4")
    kill_at(job, tmp_path / "run", "CheckpointSaved", 2)
    job["communication"] = {"codec": changed}
    with pytest.raises(CheckpointMismatch, match=r"communication\.codec"):
        simulate(small_job(**job), folder=tmp_path / "run", resume=True)


def test_feedback_costs_nothing_with_what_it_does_not_need(tmp_path: Path):
    """A job of 16 bits keeps no state, and its sites hear nothing of what counted."""
    simulate(small_job(**tables("bf16")), folder=tmp_path / "run")
    assert not list((tmp_path / "run").rglob("state-*"))
    (newest,) = sorted((tmp_path / "run").rglob("round-*.json"))[-1:]
    assert b"counted" not in newest.read_bytes()


def test_hostile_words_are_refused_and_the_others_go_on(tmp_path: Path):
    """Scales that are no numbers, random bytes, and too few of them."""
    kinds = ["inf", "garbage", "wrong_length"]
    faults = [
        {"site": "site-3", "kind": kind, "rounds": [index]}
        for index, kind in enumerate(kinds, start=1)
    ]
    job = tables("top_k", simulation={"faults": faults}, schedule={"minimum_sites": 3})
    simulate(small_job(**job), folder=tmp_path / "run")
    failed = [
        (e.round_index, e.kind, e.message)
        for e in read_events(tmp_path / "run" / "events.jsonl")
        if isinstance(e, SiteFailed)
    ]
    assert [(index, kind) for index, kind, _ in failed] == [
        (1, "invalid"),
        (2, "invalid"),
        (3, "invalid"),
    ]
    assert "negative or not finite" in failed[0][2]
    assert "sent words of top_k with" in failed[1][2]
    assert "words; the model has" in failed[2][2]
