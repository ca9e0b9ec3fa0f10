"""Local steps that a run chooses: under secure aggregation, with overlap, resumed."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.small_jobs import small_job
from support.without_report import simulate

from deploy.cli import job_check
from deploy.wiring import parts as wiring
from federation.clock import VirtualClock
from federation.events import Event, LocalWorkChosen
from federation.job.spec import JobSpec
from federation.rounds import cost
from monitoring.runs.run_result import RunResult
from privacy.dp.ledger.ledger_files import LEDGER_NAME, read_file
from privacy.dp.ledger.ledger_format import Contents

pytestmark = pytest.mark.slow

LOW, ROUNDS, SHARE = 2, 110, 0.9
WIDE = {
    "factory": "clients.models:mlp",
    "options": {"inputs": 4, "classes": 3, "hidden": [96, 96]},
}
SECURE_SUM = {"enabled": True, "threshold": 3}
SECURE = {"privacy": {"secure_aggregation": SECURE_SUM}}
OVERLAP = {"training": {"overlap_steps": 1}}
RARELY = {"evaluation": {"every": 4}}
CAP = 50.0
PRIVATE: dict[str, Any] = {
    "aggregation": {"weights": "uniform"},
    "privacy": {
        "secure_aggregation": SECURE_SUM,
        "differential_privacy": {"unit": "record", "target_epsilon": CAP},
    },
    "simulation": {"vouch_for_sources": True},
}


def job(*changes: dict[str, dict[str, Any]]) -> JobSpec:
    """Three sites on lines of 0.1 Mbit/s that take 0.1 s for a step."""
    names = [f"site-{i}" for i in range(3)]
    line = {"down_mbit": 0.1, "up_mbit": 0.1, "latency_seconds": 0.04}
    tables: dict[str, dict[str, Any]] = {
        "training": {"local_steps": LOW, "batch_size": 8, "optimizer": {"lr": 0.1}},
        "evaluation": {"every": 0},
        "schedule": {
            "local_work": "auto",
            "max_local_steps": 64,
            "training_share": SHARE,
        },
        "simulation": {
            "machines": [
                {"site": name, "examples_per_second": 80, **line} for name in names
            ]
        },
    }
    for change in changes:
        for name, table in change.items():
            tables[name] = {**tables.get(name, {}), **table}
    return small_job(num_sites=3, rounds=ROUNDS, **tables)


def ledger(folder: Path, site: str) -> Contents:
    return read_file(folder / "run" / "sites" / site / LEDGER_NAME)


def watched(of: JobSpec, **how: Any) -> tuple[RunResult, Sequence[LocalWorkChosen]]:
    seen: list[Event] = []
    result = simulate(of, engine="virtual", listeners=[seen.append], **how)
    return result, [event for event in seen if isinstance(event, LocalWorkChosen)]


@pytest.mark.parametrize("changes", [(OVERLAP,), (SECURE,), (RARELY,)])
def test_rounds_settle_at_what_the_model_of_time_says(
    changes: tuple[dict[str, dict[str, Any]], ...],
):
    """That of ``check-job --speeds``; arrival times alone lead to it as well."""
    asked = job(*changes)
    _, found = watched(asked)
    assert sum(event.num_steps for event in found) == LOW * ROUNDS
    assert len(found) < ROUNDS / 3
    traffic = job_check.forecast(wiring.build_federation(asked), VirtualClock()).traffic
    assert traffic is not None
    steps = cost.steps_for_share(traffic, cost.virtual_speeds(asked), SHARE)
    assert steps is not None
    # Headers and evaluations, which the model counts, differ a little.
    assert max(event.num_steps for event in found) == pytest.approx(steps, abs=2)
    lengths = [event.num_steps for event in found if event.reason == "probe"]
    assert bool(lengths) == (SECURE in changes)


def test_a_resumed_run_makes_the_same_choices(tmp_path: Path):
    """What they follow from is in the checkpoint: the models are equal, bit for bit."""
    whole, expected = watched(job())
    answers = iter([False] * 4 + [True] * 9)
    how: dict[str, Any] = {"folder": tmp_path / "run", "report": False}
    _, before = watched(job(), stop_requested=lambda: next(answers), **how)
    resumed, then = watched(job(), resume=True, **how)
    assert 0 < len(before) < len(expected)
    numbers = [event.num_steps for event in (*before, *then)]
    assert numbers == [event.num_steps for event in expected]
    for name, array in whole.weights.items():
        np.testing.assert_array_equal(array, resumed.weights[name])


@pytest.mark.parametrize("fragments", [1, 2])
def test_the_round_after_a_restart_is_not_measured(fragments: int, tmp_path: Path):
    """It sets up keys, and sends a whole model down and 16 bits of each value up."""
    few = {"levels": 4, "clip_norm": 10.0}
    secure = {"privacy": {"secure_aggregation": SECURE_SUM | few}}
    sums = {"communication": {"down_content": "sum", "fragments": fragments}}
    whole = replace(job(secure, sums, {"model": WIDE}), rounds=30)
    answers = iter([False] * 3 + [True] * 9)
    how: dict[str, Any] = {"folder": tmp_path / "run", "report": False}
    watched(whole, stop_requested=lambda: next(answers), **how)
    _, then = watched(whole, resume=True, **how)
    found = [event.step_seconds for event in then if event.step_seconds is not None]
    assert found
    assert found == pytest.approx([0.1] * len(found), rel=0.1)


def test_a_run_that_ended_before_its_last_round_is_extended(tmp_path: Path):
    """With masks, the number after the round it ended with went to evaluate."""
    whole = job(SECURE, {"evaluation": {"every": 1}})
    how: dict[str, Any] = {"folder": tmp_path / "run", "report": False}
    _, before = watched(replace(whole, rounds=12), **how)
    result, then = watched(replace(whole, rounds=18), extend=True, **how)
    assert before[-1].round_index < 12
    assert then[0].round_index == before[-1].round_index + 2
    assert result.rounds_completed == len(before) + len(then)
    assert sum(event.num_steps for event in (*before, *then)) == LOW * 18


def test_private_sites_are_charged_for_the_steps_that_were_chosen(tmp_path: Path):
    """Each round's before it takes them, under secure aggregation, and when resumed."""
    answers = iter([False] * 4 + [True] * 9)
    asked = replace(job(PRIVATE), rounds=40)
    how: dict[str, Any] = {"folder": tmp_path / "run", "report": False}
    _, before = watched(asked, stop_requested=lambda: next(answers), **how)
    _, then = watched(asked, resume=True, **how)
    chosen = {event.round_index: event.num_steps for event in (*before, *then)}
    assert sum(chosen.values()) == LOW * 40
    assert max(chosen.values()) > 2 * LOW
    for site in ("site-0", "site-2"):
        charges = ledger(tmp_path, site).charges
        assert {c.round_index: c.event.steps for c in charges} == chosen
        assert len(charges) == len(chosen)
        assert 0.5 * CAP < charges[-1].epsilon_after <= CAP
