"""The page of a search."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from monitoring.pages.tuning_page import TrialRow, Tuning, render


def trial(number: int, value: float | None, **facts: Any) -> TrialRow:
    given: dict[str, Any] = {
        "state": "failed" if value is None else "completed",
        "values": {
            "lr": 10.0 ** -(number % 4),
            "name": "adam",
            "deep": number % 2 == 0,
        },
        "last": value,
        "rounds": 3,
        "reason": "",
    }
    return TrialRow(
        number=number, value=value, folder=Path(f"{number:04d}"), **given | facts
    )


TUNING = Tuning(
    name="tiny",
    metric="loss",
    goal="min",
    sampler="tpe",
    wanted=9,
    trials=[
        trial(0, 0.5),
        trial(1, 0.25),
        trial(2, None, reason="<b>the model diverged"),
        trial(3, None, state="ended early", last=0.75, rounds=1),
        trial(4, None, state="not finished", values={}, last=None, rounds=0),
    ],
    ranges={"lr": (1e-4, 1.0), "name": ["adam", "sgd"], "deep": [True, False]},
    logarithmic=frozenset({"lr"}),
    importance={"lr": 0.75, "name": 0.25},
    epsilon=None,
    delta=None,
    page=Path("tuning.html"),
)


@pytest.mark.parametrize(("goal", "best"), [("min", 1), ("max", 0)])
def test_the_best_is_that_of_the_goal(goal: str, best: int) -> None:
    found = replace(TUNING, goal=goal)
    assert found.best is not None
    assert found.best.number == best
    assert len(found.ranked()) == 2


def test_the_page_shows_every_trial_and_escapes_what_is_not_ours() -> None:
    page = render(TUNING)
    assert "5 of 9" in page
    assert "Best: trial 2 with a loss of 0.250" in page
    assert "&lt;b&gt;the model diverged" in page
    assert all(f'id="figure-{n}"' in page for n in ("history", "importance"))
    assert 'class="card wide" id="figure-coordinates"' in page
    assert "epsilon" not in page


@pytest.mark.slow
def test_a_private_search_states_what_all_trials_spent() -> None:
    page = render(replace(TUNING, epsilon=6.5, delta=2e-5))
    assert "All trials together have spent epsilon 6.5" in page
