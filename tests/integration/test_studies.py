"""The studies' scripts run, and compare what they say they compare."""

import copy
import json
import runpy
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from support.commands import ForkServer

from federation.job import job_file
from federation.job.spec import FaultSpec
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


@pytest.mark.long
def test_every_row_runs_in_a_form_too_short_to_count(server: ForkServer):
    """The machine first; a baseline's bytes are a formula's, others are counted."""
    machine, *rows = thin_lines(server, "--smoke")
    assert machine["benchmark"] == "thin_lines"
    for row in rows:
        sites = 8 if "eight sites" in row["row"] else 4
        dense = 4 * row["parameters"] * sites * row["steps"] / row["work"]
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


def test_every_row_is_a_sound_job():
    """In every size."""
    document = tomllib.loads((THIN_LINES / "rows.toml").read_text())
    for size in document["sizes"].values():
        for row in document["rows"]:
            job = copy.deepcopy(document["job"])
            steps = {"training.local_steps": row.get("local_steps", 1), "rounds": 1}
            for key, value in {**size["keys"], **row.get("keys", {}), **steps}.items():
                job_file.override(job, key, value)
            assert job_file.parse(job).name == "thin-lines", row["name"]


@dataclass(frozen=True)
class SameRows:
    """What came of the rows of ``SAME``.

    Attributes:
        arguments: Which have the script run them again, but for those that are there.
        out: The file of what is there.
        rows: Those.
    """

    arguments: Sequence[str | Path]
    out: Path
    rows: Sequence[dict[str, Any]]


@pytest.fixture(scope="module")
def same(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> SameRows:
    folder = tmp_path_factory.mktemp("same")
    whole = (THIN_LINES / "rows.toml").read_text()
    common, _, _ = whole.partition("\n[[rows]]\n")
    common = common.replace("training.clip_grad_norm = 1.0\n", "")
    (folder / "rows.toml").write_text(common + SAME)
    out = folder / "out.jsonl"
    arguments = ("--size", "smoke", "--rows", folder / "rows.toml")
    places = ("--out", out, "--folder", folder)
    _, *rows = thin_lines(server, *arguments, *places)
    return SameRows((*arguments, *places), out, rows)


def test_one_plain_step_a_round_is_synchronous_training(same: SameRows):
    """With SGD the mean of updates is the update of the mean gradient: the baseline is
    on the examples of the product's sites, in their order, at their learning rate."""
    rows = same.rows
    losses = {(row["row"], row["learning_rate"]): row["loss"] for row in rows}
    assert len(losses) == 4
    for lr in (0.5, 0.1):
        one = losses["FedSGD", lr]
        assert losses["synchronous SGD", lr] == pytest.approx(one, abs=1e-5)
    assert losses["FedSGD", 0.5] != pytest.approx(losses["FedSGD", 0.1], abs=1e-3)


@pytest.mark.long
def test_a_finished_row_is_not_run_again(
    same: SameRows, server: ForkServer, tmp_path: Path
):
    """One that was cut off is, and other seeds take the best learning rate."""
    out, first = tmp_path / "out.jsonl", same.rows
    out.write_text(same.out.read_text()[:-20])
    arguments = (*same.arguments, "--out", out)
    _, *again = thin_lines(server, *arguments)
    assert len(again) == 1
    # A header holds times as text, which fills another 64 bytes or not.
    varies = {"seconds", "x_up", "x_both", "x_down", "bytes_up", "bytes_down"}
    varies |= {"course_up", "course_down"}
    timeless = [
        {k: v for k, v in row.items() if k not in varies} for row in (*again, first[-1])
    ]
    assert timeless[0] == timeless[1]
    assert again[0]["bytes_up"] == pytest.approx(first[-1]["bytes_up"], rel=1e-3)
    _, *seeds = thin_lines(server, *arguments, "--seeds", "2")
    best = {
        name: min((r for r in first if r["row"] == name), key=lambda row: row["loss"])
        for name in {row["row"] for row in first}
    }
    assert {row["row"]: row["learning_rate"] for row in seeds} == {
        name: row["learning_rate"] for name, row in best.items()
    }
    assert {row["seed"] for row in seeds} == {1}
    assert all(row["loss"] != best[row["row"]]["loss"] for row in seeds)


def test_study_of_unequal_sites_compares_equal_work(server: ForkServer, tmp_path: Path):
    script = REPOSITORY / "studies" / "unequal_sites" / "study.py"
    words = ["--seeds", "1", "--rounds", "4", "--most", "4"]
    words += ["--parts", "ways", "sites"]
    words += ["--cases", "1:1:2:4", "1:1:2:4, one comes and goes"]
    words += ["--out", str(tmp_path / "rows.jsonl"), "--to", str(tmp_path)]
    done = server.run(*words, folder=REPOSITORY, script=script)
    assert done.code == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    ways = {row["way"]: row for row in rows if row.get("case") == "1:1:2:4"}
    static, capacity = ways["static"], ways["capacity"]
    assert capacity["seconds"] < 0.6 * static["seconds"]
    work = 4 * 4 * 24
    assert work <= ways.pop("buffered, capacity")["steps"] < work + 2 * 96
    assert {row["steps"] for row in ways.values()} == {work}
    # The last of four rounds is the first beyond 90 %.
    assert static["target"] == static["loss"]
    assert static["reached"] == static["seconds"]
    assert {row["target"] for row in ways.values()} == {static["target"]}
    values = 64 * 10 + 10
    least = 4 * values * 2 * 4 * 4
    assert least < static["bytes"] < 1.5 * least
    # Dollars an hour are the speeds.
    assert static["dollars"] == pytest.approx(static["seconds"] * 8 / 3600, rel=1e-4)
    troubled = {row["way"]: row for row in rows if "goes" in row.get("case", "")}
    assert set(troubled) - set(ways) == {
        *("static, 30 s", "static, quorum", "static, learnt", "capacity, quorum"),
        "buffered, capacity",
    }
    assert all(row["steps"] >= work for row in troubled.values())
    assert troubled["static"]["seconds"] >= troubled["static, quorum"]["seconds"]
    assert {row["sites"] for row in rows if row["part"] == "sites"} == {2, 4}
    assert len([*(tmp_path / "docs/images").iterdir()]) == 2
    assert "1:1:2:4, one comes and goes" in done.stderr


def test_study_of_unequal_sites_counts_what_made_a_model(
    monkeypatch: pytest.MonkeyPatch,
):
    """Losses are those of the product, and steps of lost rounds are not work."""
    monkeypatch.syspath_prepend(REPOSITORY / "studies")
    study = runpy.run_path(str(REPOSITORY / "studies" / "unequal_sites" / "study.py"))
    case = study["Case"]((1, 1, 2, 4))
    job = study["job_of"]("static", case, rounds=4, seed=0)
    fault = FaultSpec(site="site-3", kind="crash", rounds=(2,))
    job = replace(job, simulation=replace(job.simulation, faults=(fault,)))
    run, losses = study["run_and_losses"](job)
    assert [end.status for end in run.rounds] == [
        "completed",
        "lost",
        *["completed"] * 2,
    ]
    assert run.steps == 3 * 4 * 24
    assert losses[4] == pytest.approx(run.loss, abs=1e-5)
    # Halfway between the losses of two models is half of the time.
    target, ends = (losses[1] + losses[3]) / 2, [end.at for end in run.rounds]
    reached = study["reached_at"](run, losses, target)
    assert ends[1] < reached == pytest.approx((ends[1] + ends[2]) / 2)
    assert study["reached_at"](run, losses, 0.0) is None


def test_study_of_buffers_shows_that_groups_by_speed_take_less_time(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.syspath_prepend(REPOSITORY / "studies")
    study = runpy.run_path(str(REPOSITORY / "studies" / "buffers.py"))
    lines = list(study["grouped_rows"](rounds=2, seeds=1))
    cells = [line.strip("| ").split(" | ") for line in lines[2:]]
    times = {row[0]: float(row[1]) for row in cells}
    assert times["buffered, groups by speed"] < times["static"] == 1.0
