"""Run with pytest: the federation in its smallest form, in this process."""

from pathlib import Path

import crossfed

FOLDER = Path(__file__).parent


def test_risk_is_ranked() -> None:
    result = crossfed.simulate(FOLDER / "job.toml", rounds=3)
    assert result.status == "completed"
    assert result.metrics["auc"] > 0.9


def test_privacy_budget_is_kept() -> None:
    smaller = {"rounds": 1, "evaluation.every": 0}
    result = crossfed.simulate(FOLDER / "private.toml", smaller)
    assert result.epsilon is not None
    assert result.epsilon <= 8
