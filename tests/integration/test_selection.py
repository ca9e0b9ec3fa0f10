"""Runs that leave another model than that of their last round."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file
from support.secure_runs import secure_job
from support.small_jobs import small_job
from support.without_report import simulate

from cloud_adapters.storage.disk import transfer
from cloud_adapters.storage.memory import MemoryStore
from deploy.tools.export import CARD, export
from deploy.wiring import extension
from federation.epsilon_text import format_epsilon
from federation.errors import CheckpointMismatch
from federation.job.spec import JobSpec
from monitoring import privacy_words
from monitoring.pages import comparison, report_privacy
from monitoring.runs.run_folder import RunFolder
from monitoring.runs.run_result import RunResult
from monitoring.terminal import live, outcome

pytestmark = [pytest.mark.slow]

# So large a rate that the loss rises again.
TRAINING = {"local_steps": 3, "optimizer": {"lr": 8.0}}


def job_of(rounds: int = 8, **keys: Any) -> JobSpec:
    """A job that overshoots, and selects a model."""
    return small_job(num_sites=2, rounds=rounds, training=TRAINING, selection=keys)


def lowest(done: RunResult) -> int:
    """The round whose model has the lowest held-out loss."""
    losses = {event.round_index: event.pooled.loss for event in done.view.evaluations()}
    return min(losses, key=lambda index: (losses[index], index))


def test_the_best_model_is_in_the_file_and_the_result(tmp_path: Path) -> None:
    """With its own loss, as a run of fewer rounds would have left it."""
    run = RunFolder(tmp_path / "run")
    done = simulate(job_of(), folder=run.path)
    best = lowest(done)
    assert 0 < best < 8
    shorter = simulate(small_job(num_sites=2, rounds=best, training=TRAINING))
    for name, array in load_file(run.model).items():
        np.testing.assert_array_equal(array, shorter.weights[name])
        np.testing.assert_array_equal(array, done.weights[name])
    assert done.loss == shorter.loss
    found = json.loads(run.result.read_text())
    assert (found["selected"]["round"], found["final"]["round"]) == (best, best)
    assert f"best by loss: that of round {best}" in "\n".join(outcome.lines(done.view))


def test_the_card_and_the_record_say_why_the_run_ended(tmp_path: Path) -> None:
    """And it cannot be extended: it would stop again."""
    run = RunFolder(tmp_path / "run")
    spec = job_of(rounds=40, patience=2)
    done = simulate(spec, folder=run.path)
    assert done.rounds_completed < 40
    store = MemoryStore()
    export(run, store)
    card = b"".join(transfer.stream(store, CARD))
    assert b"the run stopped early: loss was best after round" in card
    with pytest.raises(CheckpointMismatch, match="stopped early"):
        extension.check(job_of(rounds=60, patience=2), run)


@pytest.mark.parametrize("kind", ["ema", "swa"])
def test_the_average_is_evaluated_and_left(kind: str, tmp_path: Path) -> None:
    """It is not the model of any round."""
    done = simulate(job_of(rounds=3, model=kind), folder=tmp_path / "run")
    last = simulate(small_job(num_sites=2, rounds=3, training=TRAINING))
    assert done.loss != last.loss
    assert f"{kind} of 3 rounds" in outcome.chosen(done.view.selected)  # type: ignore[arg-type]
    assert any(
        not np.array_equal(array, last.weights[name])
        for name, array in done.weights.items()
    )


def test_sums_are_compared_under_secure_aggregation() -> None:
    """The best model and the early end need no result of a single site."""
    tables = {"training": TRAINING, "selection": {"patience": 1}, "rounds": 12}
    done = simulate(secure_job(**tables))
    assert done.view.selected is not None
    assert done.view.selected.round_index == lowest(done)
    assert all(not event.by_site for event in done.view.evaluations())
    assert done.view.selected.stopped_early


def test_a_private_run_that_stops_by_its_results_guarantees_its_cap(
    tmp_path: Path,
) -> None:
    """When it stopped depends on what it released; what was charged is beside it."""
    run = RunFolder(tmp_path / "run")
    private = {"unit": "record", "target_epsilon": 50.0, "delta": 1e-3}
    spec = small_job(
        num_sites=2,
        rounds=40,
        training=TRAINING,
        selection={"patience": 1},
        aggregation={"weights": "uniform"},
        privacy={"differential_privacy": private},
    )
    done = simulate(spec, folder=run.path, report=True)
    assert done.rounds_completed < 40
    assert done.view.total_spent is not None
    charged = done.view.total_spent.epsilon
    assert charged < done.epsilon == 50.0
    found = json.loads(run.result.read_text())
    for of in (found, *found["sites"]):
        assert of["epsilon"] == 50.0
        assert of["epsilon_charged"] <= charged
    assert found["privacy"]["held_out_epsilon"] == 50.0
    said = f"50 ({format_epsilon(charged)} charged)"
    store = MemoryStore()
    export(run, store)
    card = b"".join(transfer.stream(store, CARD)).decode()
    console = Console(width=300)
    with console.capture() as watched:
        console.print(live.picture(done.view, console, now=0.0))
    texts = {
        "terminal": "\n".join(outcome.lines(done.view)),
        "report": run.report.read_text(),
        "card": card,
        "meaning": report_privacy.context(done.view)["meaning"],
        "watch": watched.get(),
    }
    for where, text in texts.items():
        assert said in str(text), where
    assert privacy_words.BY_RESULTS in texts["terminal"]
    assert comparison.epsilon_of(done.view) == 50.0
