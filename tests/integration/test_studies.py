"""The studies' scripts run, and compare what they say they compare."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.commands import ForkServer

from privacy.secagg.arithmetic.digits import Digits, finest_levels

REPOSITORY = Path(__file__).parents[2]
THIN_LINES = REPOSITORY / "studies" / "thin_lines"

# A small part of the file of rows, and two rows that are the same algorithm.
SAME = """
[[rows]]
name = "synchronous SGD"
synchronous = true
learning_rates = [0.5, 0.1]

[[rows]]
name = "FedSGD"
learning_rates = [0.5, 0.1]
"""

pytestmark = pytest.mark.slow


def thin_lines(server: ForkServer, *arguments: str | Path) -> list[dict[str, Any]]:
    """The JSON lines that the script prints."""
    script = THIN_LINES / "measure.py"
    done = server.run(*map(str, arguments), folder=REPOSITORY, script=script)
    assert done.code == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_row_runs_in_a_form_too_short_to_count(server: ForkServer):
    """The machine first; a baseline's bytes are a formula's, others are counted."""
    machine, *rows = thin_lines(server, "--smoke")
    assert machine["benchmark"] == "thin_lines"
    for row in rows:
        dense = 4 * row["parameters"] * 4 * row["steps"]
        assert row["x_up"] == pytest.approx(dense / row["bytes_up"])
        assert 0 < row["loss"] < 6
        assert all(0 < loss < 6 for loss in row["course_losses"])
        assert len(row["course_losses"]) * row["course_steps"] == row["steps"]
        if row["bytes_from"] == "run":
            assert sum(row["course_up"]) == row["bytes_up"]
            assert sum(row["course_down"]) == row["bytes_down"]
        if "secure" in row["row"]:
            least = _packed_bytes(row)
            # A set-up and headers count for more beside so few values.
            messages = 4 * 8_000 * row["rounds"]
            assert least <= row["bytes_up"] < least + messages
            assert least <= row["bytes_down"] < least + messages + dense
            continue
        # A round's messages hold little beside the model's values.
        least = dense / row["local_steps"]
        if "top-k" in row["row"]:  # The first model is whole, changes have 4 bits.
            assert row["bytes_up"] < least / 20
            assert row["bytes_down"] < least / 2
            continue
        if "lost" in row["row"]:
            assert 0 < row["bytes_up"] < least
            continue
        assert least <= row["bytes_up"] < 1.05 * least
        assert least <= row["bytes_down"] < 1.05 * least
    assert len({row["row"] for row in rows}) == len(rows) >= 7


def _packed_bytes(row: dict[str, Any]) -> int:
    """Bytes of the words of four sites: 16 bits in the first round, then few levels."""
    levels = int(row["row"].split()[-2])
    numbers = [finest_levels(4, 16), *[levels] * (row["rounds"] - 1)]
    words = (
        Digits(levels=n, num_sites=4).num_words(row["parameters"]) for n in numbers
    )
    return 4 * 8 * sum(words)


def test_one_plain_step_a_round_is_synchronous_training(
    server: ForkServer, tmp_path: Path
):
    """With SGD the mean of updates is the update of the mean gradient: the baseline is
    on the examples of the product's sites, in their order, at their learning rate."""
    whole = (THIN_LINES / "rows.toml").read_text()
    common, _, _ = whole.partition("\n[[rows]]\n")
    common = common.replace("training.clip_grad_norm = 1.0\n", "")
    (tmp_path / "rows.toml").write_text(common + SAME)
    arguments = ("--size", "smoke", "--rows", tmp_path / "rows.toml")
    places = ("--out", tmp_path / "out.jsonl", "--folder", tmp_path)
    _, *rows = thin_lines(server, *arguments, *places)
    losses = {(row["row"], row["learning_rate"]): row["loss"] for row in rows}
    assert len(losses) == 4
    for lr in (0.5, 0.1):
        one = losses["FedSGD", lr]
        assert losses["synchronous SGD", lr] == pytest.approx(one, abs=1e-5)
    assert losses["FedSGD", 0.5] != pytest.approx(losses["FedSGD", 0.1], abs=1e-3)


def test_a_finished_row_is_not_run_again(server: ForkServer, tmp_path: Path):
    """One that was cut off is, and other seeds take the best learning rate."""
    out = tmp_path / "out.jsonl"
    arguments = ("--size", "smoke", "--only", "FedAvg", "synchronous Muon")
    places = ("--out", out, "--folder", tmp_path)
    _, *first = thin_lines(server, *arguments, *places)
    text = out.read_text()
    out.write_text(text[:-20])
    _, *again = thin_lines(server, *arguments, *places)
    same = [
        {k: v for k, v in row.items() if k != "seconds"} for row in (*again, first[-1])
    ]
    assert same[0] == same[1]
    assert len(again) == 1
    _, *seeds = thin_lines(server, *arguments, *places, "--seeds", "2")
    best = {
        name: min((r for r in first if r["row"] == name), key=lambda row: row["loss"])
        for name in {row["row"] for row in first}
    }
    assert {row["row"]: row["learning_rate"] for row in seeds} == {
        name: row["learning_rate"] for name, row in best.items()
    }
    assert {row["seed"] for row in seeds} == {1}
    assert all(row["loss"] != best[row["row"]]["loss"] for row in seeds)
