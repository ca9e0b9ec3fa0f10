"""A whole private run: jobs/private.toml, its accuracy and its ledgers."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.small_jobs import small_job
from support.without_report import simulate

from clients.data import digits
from clients.frozen_features import oriented_gradients
from federation.clock import SystemClock
from federation.errors import BudgetExceeded, JobError, PrivacyError
from federation.events import PrivacyPlanned, SiteAnswered
from federation.job import job_file
from federation.job.privacy_job import PrivacySpec
from federation.job.spec import JobSpec
from federation.messages import FailureKind
from monitoring.runs.run_result import RunResult

pytestmark = pytest.mark.slow

JOB = Path(__file__).parents[2] / "jobs" / "private.toml"
DP = "privacy.differential_privacy"


def accuracy(result: RunResult) -> float:
    """On all held-out data, without the noise that the sites add to theirs."""
    _, held_out = digits()
    model = oriented_gradients()
    model.load_state_dict(result.state_dict(), strict=False)
    found = model(torch.from_numpy(held_out.inputs)).argmax(1).numpy()
    return float((found == held_out.targets).mean())


def test_private_run_learns_and_keeps_to_its_budget(tmp_path: Path):
    """At least 88 % at epsilon 8, and every number is in the ledgers."""
    seen: list[object] = []
    result = simulate(JOB, folder=tmp_path / "run", listeners=[seen.append])
    assert result.status == "completed"
    assert accuracy(result) >= 0.88
    (planned,) = [event for event in seen if isinstance(event, PrivacyPlanned)]
    assert [site.epsilon_cap for site in planned.sites] == [8.0, 8.0]
    answered = [event for event in seen if isinstance(event, SiteAnswered)]
    for site in planned.sites:
        spent = [e.spent for e in answered if e.site == site.site and e.spent]
        epsilons = [one.epsilon for one in spent]
        assert epsilons == sorted(set(epsilons))
        # One round of 31 is held in reserve.
        assert 7.5 < epsilons[-1] < 8.0
        assert spent[-1].held_out_epsilon is not None
        assert spent[-1].held_out_epsilon <= 8.0
        assert all(event.training is None for event in answered)
        assert (tmp_path / "run" / "sites" / site.site / "ledger.jsonl").exists()


def test_run_stops_before_the_budget_is_exceeded():
    """With the model of the last round that it allows."""
    job = job_file.load(
        JOB, ["rounds=6", f"{DP}.noise_multiplier=0.7", f"{DP}.target_epsilon=9.0"]
    )
    result = simulate(job)
    assert result.status == "exhausted"
    assert 0 < result.rounds_completed < 6
    failures = {failure.kind for failure in result.view.failures}
    assert failures == {FailureKind.BUDGET}
    evaluated = result.view.last_evaluated
    assert evaluated is not None
    assert evaluated.round_index == result.rounds_completed


def test_a_budget_for_no_round_is_refused():
    """Before anything leaves."""
    job = job_file.load(
        JOB, ["rounds=2", f"{DP}.noise_multiplier=0.5", f"{DP}.target_epsilon=0.5"]
    )
    with pytest.raises(BudgetExceeded, match=r"round 1 .*the privacy budget"):
        simulate(job)


@pytest.mark.parametrize(
    ("change", "key", "text"),
    [
        (f"{DP}.delta=0.01", f"{DP}.delta", "is too large for \\d+ "),
        ("training.batch_size=2000", "training.batch_size", "fewer than a batch"),
        (f"{DP}.target_epsilon=0.0001", f"{DP}.target_epsilon", "epsilon"),
    ],
)
def test_promise_that_cannot_be_kept_is_refused(change: str, key: str, text: str):
    """With the site, the key, and what would do."""
    with pytest.raises(JobError, match=text) as caught:
        simulate(job_file.load(JOB, [change]))
    assert caught.value.key == key
    assert "site '" in str(caught.value)


SPOILS: dict[str, Callable[[Path], None]] = {
    "shortened": lambda site: _cut(site / "ledger.jsonl"),
    "corrupt": lambda site: _flip(site / "ledger.jsonl"),
    "of another site": lambda site: shutil.copy(
        _other(site) / "ledger.jsonl", site / "ledger.jsonl"
    ),
    "lost": lambda site: (site / "ledger.jsonl").unlink(),
}


def _other(site: Path) -> Path:
    return next(path for path in site.parent.iterdir() if path != site)


def _cut(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]))


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("spoil", SPOILS)
def test_nothing_is_released_on_a_spoiled_ledger(tmp_path: Path, spoil: str):
    """A run that is to continue ends before any site is asked."""
    run, job = begun(tmp_path)
    site = run / "sites" / "gcp-us-central1"
    SPOILS[spoil](site)
    refuse(run, job, "ledger")


def test_nothing_is_released_when_the_clock_went_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Entries would no longer be in order."""
    run, job = begun(tmp_path)
    now = SystemClock.now
    monkeypatch.setattr(SystemClock, "now", lambda clock: now(clock) - 86400.0)
    refuse(run, job, "clock")


def begun(folder: Path) -> tuple[Path, JobSpec]:
    """A private run that was stopped after its first round."""
    job = job_file.load(JOB, ["rounds=3"])
    run = folder / "run"
    asked = iter([True])
    found = simulate(job, folder=run, stop_requested=lambda: next(asked, True))
    assert found.status == "stopped"
    return run, job


def refuse(run: Path, job: JobSpec, word: str) -> None:
    """Resuming is refused with a word, and no site answers or is charged."""
    ledgers = {p: p.read_bytes() for p in run.glob("sites/*/ledger.jsonl")}
    seen: list[object] = []
    with pytest.raises(PrivacyError, match=word):
        simulate(job, folder=run, resume=True, listeners=[seen.append])
    assert not any(isinstance(event, SiteAnswered) for event in seen)
    assert {p: p.read_bytes() for p in ledgers} == ledgers


def test_no_file_of_a_private_simulation_holds_a_number_of_records(tmp_path: Path):
    """As in a deployed run: no share of the data, total or class count."""
    job = job_file.load(JOB, ["rounds=1"])
    done = simulate(job, folder=tmp_path / "run", report=True)
    assert done.view.data is not None
    assert done.view.data.shares == ()
    assert all(site.examples is None and site.share is None for site in done.view.sites)
    sites = json.loads((tmp_path / "run" / "result.json").read_text())["sites"]
    assert [site["examples"] for site in sites] == [None, None]
    page = (tmp_path / "run" / "report.html").read_text()
    assert "examples of each" not in page
    job = replace(job, privacy=PrivacySpec())
    free = simulate(job, folder=tmp_path / "free", report=True)
    assert free.view.data is not None
    assert len(free.view.data.shares) == 2
    assert "examples of each" in (tmp_path / "free" / "report.html").read_text()


def test_a_simulation_compares_records_with_persons_on_the_same_data(tmp_path: Path):
    """Their epsilons are counted apart; each kind adds up."""
    table = {"target_epsilon": 8.0, "clip_norm": 0.5}

    def job(unit: str, limit: float) -> JobSpec:
        return small_job(
            data={
                "source": "support.small_jobs:visits",
                "partition": {"kind": "by_person"},
            },
            training={"local_steps": 1, "batch_size": 16},
            aggregation={"weights": "uniform"},
            evaluation={"every": 0},
            privacy={"differential_privacy": {"unit": unit, **table}},
            simulation={"total_epsilon": limit},
        )

    for unit in ("person", "record"):
        simulate(job(unit, 8.0), folder=tmp_path / "runs" / unit)
    for unit in ("person", "record"):
        with pytest.raises(JobError, match=r"all runs .* 8 is allowed"):
            simulate(job(unit, 8.0), folder=tmp_path / "runs" / f"{unit} again")
