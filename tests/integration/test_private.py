"""A whole private run: jobs/private.toml, its accuracy and its ledgers."""

from pathlib import Path

import pytest
import torch

from clients.data import digits
from clients.frozen_features import oriented_gradients
from deploy.run_result import RunResult
from deploy.simulation import simulate
from federation import job_file
from federation.errors import BudgetExceeded, JobError
from federation.events import PrivacyPlanned, SiteAnswered
from federation.messages import FailureKind

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
    with pytest.raises(BudgetExceeded, match="round 1 is beyond the privacy budget"):
        simulate(job)


@pytest.mark.parametrize(
    ("change", "key", "text"),
    [
        (f"{DP}.delta=0.01", f"{DP}.delta", "is too large for \\d+ "),
        ("training.batch_size=1500", "training.batch_size", "fewer than one batch"),
        (f"{DP}.target_epsilon=0.0001", f"{DP}.target_epsilon", "epsilon"),
    ],
)
def test_promise_that_cannot_be_kept_is_refused(change: str, key: str, text: str):
    """With the site, the key, and what would do."""
    with pytest.raises(JobError, match=text) as caught:
        simulate(job_file.load(JOB, [change]))
    assert caught.value.key == key
    assert "site '" in str(caught.value)
