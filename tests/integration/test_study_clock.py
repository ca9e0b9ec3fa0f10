"""The study of thin lines computes time from bytes, and tells of rows without it."""

import importlib
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

THIN_LINES = Path(__file__).parents[2] / "studies" / "thin_lines"
VALUES = 1_000_000

SYNCHRONOUS: dict[str, Any] = {
    "row": "synchronous",
    "size": "large",
    "seed": 0,
    "learning_rate": 0.01,
    "steps": 70,
    "local_steps": 1,
    "parameters": VALUES,
    "loss": 1.5,
    "x_up": 1.0,
    "x_both": 1.0,
    "bytes_from": "formula",
    "course_steps": 30,
    "course_losses": [3.0, 2.0, 1.0],
}
ROUNDS: dict[str, Any] = {
    **SYNCHRONOUS,
    "row": "rounds",
    "local_steps": 35,
    "loss": 1.53,
    "bytes_from": "run",
    "bytes_up": 6 * VALUES,
    "bytes_down": 18 * VALUES,
    "x_up": 186.7,
    "x_both": 93.3,
    "course_steps": 35,
    "course_losses": [2.5, 1.5],
    "course_up": [4 * VALUES, 2 * VALUES],
    "course_down": [16 * VALUES, 2 * VALUES],
}


@pytest.fixture(autouse=True)
def beside_the_study(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Its modules import each other by their own names."""
    monkeypatch.syspath_prepend(str(THIN_LINES))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(THIN_LINES)):
            del sys.modules[name]


def test_a_synchronous_step_takes_part_in_a_ring():
    """Three quarters of the gradients twice: 6 MB a step, 0.48 s at 100 Mbit/s."""
    clock = importlib.import_module("wall_clock")
    found = clock.seconds(SYNCHRONOUS, mbit=100, step_seconds=0.5)
    assert found == pytest.approx(70 * (0.5 + 0.48))


def test_a_round_sends_down_and_then_up():
    """Six megabytes at each of four sites: 0.48 s."""
    clock = importlib.import_module("wall_clock")
    found = clock.seconds(ROUNDS, mbit=100, step_seconds=0.5)
    assert found == pytest.approx(35 + 0.48)


@pytest.mark.parametrize("row", [SYNCHRONOUS, ROUNDS])
def test_a_course_ends_with_the_run(row: dict[str, Any]):
    """A last window of fewer steps takes as much less time."""
    clock = importlib.import_module("wall_clock")
    setting = {"mbit": 100, "step_seconds": 0.5}
    seconds, losses = zip(*clock.course(row, **setting), strict=True)
    assert list(losses) == row["course_losses"]
    assert seconds[-1] == pytest.approx(clock.seconds(row, **setting))
    first = 30 * 0.98 if row is SYNCHRONOUS else 17.5 + 0.4
    assert seconds[0] == pytest.approx(first)


def test_a_row_without_a_course_has_no_curve():
    """Those of earlier measurements are in the table alone."""
    clock = importlib.import_module("wall_clock")
    for whole in (SYNCHRONOUS, ROUNDS):
        row = {k: v for k, v in whole.items() if not k.startswith("course")}
        assert clock.course(row, mbit=100, step_seconds=0.5) == []
        assert clock.seconds(row, mbit=100, step_seconds=0.5) > 35
    warm = importlib.import_module("warm_model")
    assert warm.panels([row]) == {}


def test_page_tells_how_far_rows_are_above_the_best_synchronous_one():
    """And how many times fewer bytes go up after the first round."""
    warm = importlib.import_module("warm_model")
    slow = {**SYNCHRONOUS, "row": "synchronous too", "loss": 1.6}
    text = "\n".join(warm.text([slow, ROUNDS, SYNCHRONOUS], "picture.svg"))
    # 4 bytes a value, 4 sites, 35 steps, over 2 bytes a value.
    assert "| rounds | x 1 | 1.530 | +2.0% | 187 | 280 | 93 | 0.01 | 1 |" in text
    assert "| synchronous | x 1 | 1.500 | +0.0% | 1 | - | 1 | 0.01 | 1 |" in text
    assert "![Training loss against minutes](picture.svg)" in text
    assert list(warm.panels([ROUNDS])) == ["10 Mbit/s", "100 Mbit/s", "1000 Mbit/s"]


def test_more_local_work_is_compared_with_the_same_synchronous_run():
    """Four times the steps in as many rounds send as many times fewer bytes as one."""
    warm = importlib.import_module("warm_model")
    longer = {**ROUNDS, "row": "longer", "steps": 280, "local_steps": 140, "work": 4}
    text = "\n".join(warm.text([longer, SYNCHRONOUS], "picture.svg"))
    assert "| longer | x 4 | 1.530 | +2.0% | 187 | 280 | 93 | 0.01 | 1 |" in text
    assert text.count(", 70 steps at each site after") == 2


def test_rows_of_several_seeds_are_compared_in_pairs():
    """With Student's interval: t = 12.706 for two pairs."""
    warm = importlib.import_module("warm_model")
    second = [
        {**SYNCHRONOUS, "seed": 1, "loss": 2.0},
        {**ROUNDS, "seed": 1, "loss": 2.08},
        {**ROUNDS, "seed": 1, "loss": 9.0, "learning_rate": 1.0},
    ]
    text = "\n".join(warm.text([SYNCHRONOUS, ROUNDS, *second], "picture.svg"))
    # 2 % and 4 % above: a standard error of 1 %.
    assert "| rounds | 2 | 1.805 | 1.750 | +3.0% | -9.7% to +15.7% |" in text
    assert "in pairs" not in "\n".join(warm.text([SYNCHRONOUS, ROUNDS], "a.svg"))


def test_a_row_takes_a_multiple_of_the_steps_of_its_size():
    """In rounds of its own length, which must come out even."""
    rows = importlib.import_module("rows")
    study = rows.Study(
        job={}, size=rows.Size(name="tiny", steps=70, warm_up_steps=1), rows=()
    )
    row = rows.Row(name="longer", learning_rates=(0.1,), local_steps=28, work=2)
    document = study.document(row, lr=0.1, seed=0)
    assert (study.steps(row), document["rounds"]) == (140, 5)
    with pytest.raises(ValueError, match=r"28 steps.* 210 steps"):
        study.document(rows.Row(**{**asdict(row), "work": 3}), lr=0.1, seed=0)


def test_curves_are_of_the_largest_model():
    """A smaller one has tables of its own."""
    warm = importlib.import_module("warm_model")
    small = {**ROUNDS, "row": "small", "size": "tiny", "parameters": 10}
    panels = warm.panels([small, ROUNDS])
    assert {name for lines in panels.values() for name in lines} == {"rounds"}
    assert list(warm.by_size([small, ROUNDS])) == ["large", "tiny"]
    # Two rows are no picture if another model has three.
    many = [{**small, "row": f"small {number}"} for number in range(3)]
    panels = warm.panels([*many, ROUNDS, SYNCHRONOUS])
    assert set(panels["10 Mbit/s"]) == {"small 0", "small 1", "small 2"}


def test_seeds_of_either_precision_are_one_size():
    """A processor without bfloat16 runs its seeds in float32."""
    warm = importlib.import_module("warm_model")
    seeds = [
        {**row, "seed": 1, "size": f"{row['size']}-float32"}
        for row in (SYNCHRONOUS, ROUNDS)
    ]
    (table,) = warm.by_size([SYNCHRONOUS, ROUNDS, *seeds]).values()
    assert [row["seed"] for row in table] == [0, 0, 1, 1]


def test_losses_of_steps_become_those_of_windows():
    """As a round of so many steps would report them."""
    synchronous = importlib.import_module("synchronous")
    run = synchronous.SynchronousRun(
        federation=None, weights_d=None, integers_m=None, losses=[4.0, 2.0, 1.0]
    )
    assert run.window_losses(2) == [3.0, 1.0]
