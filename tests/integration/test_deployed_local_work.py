"""Local steps that deployed runs choose, from real times."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.agents import RUN_ID
from support.relayed_agents import Clouds, clouds_of
from support.small_jobs import small_job

from deploy.aggregator_host.deployed_run import DeployedRun
from federation.clock import SystemClock
from federation.events import Event, LocalWorkChosen, RoundFinished
from federation.job.spec import JobSpec
from monitoring.runs.run_folder import RunFolder
from monitoring.runs.run_result import RunResult
from privacy.dp.ledger.ledger_files import LEDGER_NAME, read_file

pytestmark = pytest.mark.slow

LOW, HIGH, ROUNDS = 2, 16, 12
SECURE = {"secure_aggregation": {"enabled": True, "threshold": 3, "max_examples": 64}}


PRIVATE = {"unit": "record", "target_epsilon": 50.0, "delta": 1e-4}


def job(overlap_steps: int = 0, **tables: Any) -> JobSpec:
    """Three sites; most of a round's time is not spent in training."""
    return small_job(
        num_sites=3,
        rounds=ROUNDS,
        training={
            "local_steps": LOW,
            "batch_size": 8,
            "optimizer": {"lr": 0.1},
            "overlap_steps": overlap_steps,
        },
        evaluation={"every": 0},
        schedule={
            "local_work": "auto",
            "max_local_steps": HIGH,
            "training_share": 0.99,
        },
        **tables,
    )


def deploy(
    clouds: Clouds, seen: list[Event], *, most_rounds: int = ROUNDS
) -> RunResult:
    """Start or resume the run of a job, and stop it after some rounds."""

    def is_enough() -> bool:
        return sum(isinstance(e, RoundFinished) for e in seen) >= most_rounds

    run = RunFolder(clouds.folder / "runs" / RUN_ID)
    deployed = DeployedRun(
        run,
        clouds.members.parties,
        clock=SystemClock(),
        listeners=[seen.append],
        stop_requested=is_enough,
        report=False,
    )
    return deployed.run(clouds.connect)


def chosen(seen: Sequence[Event]) -> list[LocalWorkChosen]:
    return [event for event in seen if isinstance(event, LocalWorkChosen)]


@pytest.mark.parametrize(
    "tables",
    [{}, {"privacy": SECURE}],
    ids=["plain", "secure"],
)
def test_run_takes_its_steps_in_fewer_rounds(tmp_path: Path, tables: dict[str, Any]):
    """All sites answer every round, so all of them accept what was chosen."""
    asked, seen = job(**tables), list[Event]()
    with clouds_of(tmp_path, asked) as clouds:
        run = RunFolder(tmp_path / "runs" / RUN_ID)
        run.path.mkdir(parents=True)
        run.write_job(asked)
        assert deploy(clouds, seen).status == "completed"
    found = chosen(seen)
    assert sum(event.num_steps for event in found) == LOW * ROUNDS
    assert all(LOW <= event.num_steps <= HIGH for event in found)
    assert len(found) < ROUNDS
    rounds = [event for event in seen if isinstance(event, RoundFinished)]
    assert [len(each.answered) for each in rounds] == [3] * len(found)


@pytest.mark.parametrize("overlap_steps", [0, 1])
def test_private_agents_are_charged_for_what_was_chosen(
    tmp_path: Path, overlap_steps: int
):
    """Once, also for steps that they take ahead, and over a coordinator's restart."""
    privacy = SECURE | {"differential_privacy": PRIVATE}
    weights = {"weights": "uniform"}
    asked = job(overlap_steps, privacy=privacy, aggregation=weights)
    seen = list[Event]()
    with clouds_of(tmp_path, asked) as clouds:
        run = RunFolder(tmp_path / "runs" / RUN_ID)
        run.path.mkdir(parents=True)
        run.write_job(asked)
        assert deploy(clouds, seen, most_rounds=2).status == "stopped"
        assert deploy(clouds, seen).status == "completed"
    steps = [(event.round_index, event.num_steps) for event in chosen(seen)]
    assert sum(number for _, number in steps) == LOW * ROUNDS
    ledgers = [*tmp_path.glob(f"*/runs/{RUN_ID}/sites/*/{LEDGER_NAME}")]
    assert len(ledgers) == 3
    for path in ledgers:
        charges = read_file(path).charges
        assert [(c.round_index, c.event.steps) for c in charges] == steps
        assert charges[-1].epsilon_after <= 50.0


def test_resumed_run_takes_what_is_left(tmp_path: Path):
    """Steps and times are in the checkpoint of the coordinator before."""
    asked, seen = job(), list[Event]()
    with clouds_of(tmp_path, asked) as clouds:
        run = RunFolder(tmp_path / "runs" / RUN_ID)
        run.path.mkdir(parents=True)
        run.write_job(asked)
        assert deploy(clouds, seen, most_rounds=2).status == "stopped"
        assert len(chosen(seen)) == 2
        assert deploy(clouds, seen).status == "completed"
    found = chosen(seen)
    assert sum(event.num_steps for event in found) == LOW * ROUNDS
    assert found[2].reason != "start"
