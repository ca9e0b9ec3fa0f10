"""That the verdicts of the fault matrix can be bad."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults import verdict
from faults.verdict import Run

from federation.clock import VirtualClock
from privacy.dp.events import PrivacyEvent
from privacy.dp.ledger.ledger import FileLedger
from privacy.dp.ledger.ledger_format import Terms

SITES = ["a", "b"]


def finished(index: int, status: str = "completed", answered: Sequence[str] = SITES):
    return {
        "event": "RoundFinished",
        "round_index": index,
        "status": status,
        "asked": SITES,
        "answered": [*answered],
        "update_norm": 1.0,
    }


def answered(index: int, site: str) -> dict[str, Any]:
    return {"event": "SiteAnswered", "round_index": index, "site": site}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Three rounds, of which the second was lost."""
    (tmp_path / "checkpoints").mkdir()
    for index, key in enumerate(["w0", "w1", "w1", "w3"]):
        save(tmp_path, index, key)
    (tmp_path / "result.json").write_text(json.dumps({"rounds_completed": 2}))
    started = {"event": "RunStarted", "run_id": "r", "secure_aggregation": True}
    rounds = [finished(1), finished(2, "lost", ["a"]), finished(3)]
    answers = [answered(1, "a"), answered(1, "b"), answered(2, "a")]
    events = [started, *answers, *rounds]
    return Run(folder=tmp_path, code=0, words="", events=events)


def save(folder: Path, index: int, key: str) -> None:
    path = folder / "checkpoints" / f"round-{index:06}.json"
    path.write_text(json.dumps({"blobs": {"weights": {"key": key}}}))


def test_a_sound_run_has_no_faults(run: Run):
    """What was lost was lost, and nothing else."""
    assert [*verdict.check_end(run, "")] == []
    assert [*verdict.check_rounds(run)] == []
    assert [*verdict.check_secrets(run)] == []
    assert (run.lost(), run.missing(), run.last_round) == ([2], {}, 3)


def test_an_early_end_needs_its_advice(run: Run):
    """And a traceback is never right."""
    ended = replace(run, code=1, words="crossfed: disk full; free space")
    assert [*verdict.check_end(ended, "free space")] == []
    assert "without 'more sites'" in next(verdict.check_end(ended, "more sites"))
    assert "ended with 1" in next(verdict.check_end(ended, ""))
    traced = replace(run, words="Traceback (most recent call last):")
    assert "traceback" in next(verdict.check_end(traced, ""))


@pytest.mark.parametrize(
    ("index", "key", "fault"),
    [
        (2, "w2", "round 2, lost, changed the model"),
        (3, "w1", "round 3, completed, did not change the model"),
        (5, "w5", "there are checkpoints of the rounds [0, 1, 2, 3, 5]"),
    ],
)
def test_a_round_that_counts_wrongly_is_seen(
    run: Run, index: int, key: str, fault: str
):
    """By the models of the checkpoints."""
    save(run.folder, index, key)
    assert [*verdict.check_rounds(run)] == [fault]


def test_a_wrong_sum_of_rounds_is_seen(run: Run):
    """In what the run says of itself."""
    (run.folder / "result.json").write_text(json.dumps({"rounds_completed": 3}))
    assert [*verdict.check_rounds(run)] == ["it says 3 rounds, and 2 were"]


def test_a_site_that_counts_twice_is_seen(run: Run):
    """In a sum, and in secret in two."""
    twice = replace(run, events=[*run.events, finished(3, answered=["a", "a"])])
    assert [*verdict.check_rounds(twice)] == ["round 3 counts ['a'] twice"]
    again = replace(run, events=[*run.events, answered(2, "a")])
    assert [*verdict.check_secrets(again)] == ["a answered round 2 2 times"]


@pytest.mark.parametrize("charged", [(1, 2), (1,), ()])
def test_a_release_that_is_not_charged_is_seen(run: Run, charged: tuple[int, ...]):
    """Of the rounds that a site has answered, 1 and 2."""
    terms = Terms(
        run_id="r", site="a", job_digest="00" * 32, delta=1e-5, epsilon_cap=50.0
    )
    ledger = FileLedger(run.folder, terms, clock=VirtualClock(1e9))
    event = PrivacyEvent(noise_multiplier=1.0, sampling_rate=0.1, steps=1)
    for index in charged:
        ledger.charge(event, round_index=index)
    ledger.close()
    faults = [*verdict.check_ledgers(run, {"a": run.folder / "ledger.jsonl"})]
    missing = {1, 2} - set(charged)
    assert faults == [f"a released {missing}, which are not charged"] * bool(missing)


def test_a_ledger_that_is_gone_is_seen(run: Run):
    """What it held is not known."""
    (fault,) = verdict.check_ledgers(run, {"a": run.folder / "ledger.jsonl"})
    assert fault.startswith("the ledger of a:")


def test_another_model_is_seen(run: Run):
    """By its last bit in the clear; in secret by what a round is worth."""
    one = np.ones(100, dtype=np.float32)
    bit, grid, step = one.copy(), one + np.float32(1e-6), one.copy()
    bit[7] = np.nextafter(bit[7], np.float32(2))
    step[0] += 1.0
    assert [*verdict.check_bits(one, one.copy())] == []
    assert len([*verdict.check_bits(one, bit)]) == 1
    assert [*verdict.check_closeness(bit, one, grid)] == []
    assert len([*verdict.check_closeness(step, one, grid)]) == 1
    assert [*verdict.check_power(run, one, grid)] == []
    assert len([*verdict.check_power(run, one, step)]) == 1
