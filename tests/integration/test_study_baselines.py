"""The baselines of the study of thin lines are what they are called."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.commands import ForkServer

REPOSITORY = Path(__file__).parents[2]
THIN_LINES = REPOSITORY / "studies" / "thin_lines"
DENSE = {
    "DDP",
    "parameter server",
    "all-reduce, recursive doubling",
    "all-reduce, ring",
    "ZeRO-3 (FSDP2)",
}

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def beside_the_study(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Its modules import each other by their own names."""
    monkeypatch.syspath_prepend(str(THIN_LINES))
    yield
    for name in ("lines",):
        sys.modules.pop(name, None)


def rows_of(
    server: ForkServer, script: str, *arguments: str | Path
) -> list[dict[str, Any]]:
    """The JSON lines that a script prints."""
    done = server.run(
        *map(str, arguments), folder=REPOSITORY, script=THIN_LINES / script
    )
    assert done.code == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.long
def test_every_method_runs_in_a_form_too_short_to_count(server: ForkServer):
    """On loopback, where no interface is read."""
    machine, *rows = rows_of(server, "baselines.py", "--smoke")
    assert machine["benchmark"] == "thin_lines_baselines"
    assert {row["method"] for row in rows} >= DENSE
    for row in rows:
        dense = row["method"] in DENSE
        assert row["loss"] is row["interface_up"] is row["interface_down"] is None
        assert 0 < row["trains"] <= 1
        assert (row["formula_each_way"] >= 4 * row["parameters"]) is dense


@pytest.mark.long
def test_methods_without_loss_train_alike(server: ForkServer, tmp_path: Path):
    """The five send all of every gradient: their loss is that of the study's
    synchronous row. Those that send a part of it differ."""
    places = ("--folder", tmp_path, "--size", "smoke")
    arguments = ("--out", tmp_path / "b.jsonl", "--mbit", "0", "--pace", "0")
    _, *rows = rows_of(server, "baselines.py", *places, *arguments)
    losses = {row["method"]: row["loss"] for row in rows}
    only = ("--only", "synchronous AdamW", "--out", tmp_path / "m.jsonl")
    _, *found = rows_of(server, "measure.py", *places, *only)
    (same,) = (row["loss"] for row in found if row["learning_rate"] == 4e-3)
    for method in DENSE:
        assert losses[method] == pytest.approx(same, abs=1e-5), method
    for method in ("top-k 1 %, error feedback", "1 bit, error feedback"):
        assert abs(losses[method] - same) > 1e-3, method


@pytest.mark.long
def test_interfaces_count_what_formulas_say(server: ForkServer, tmp_path: Path):
    """Between namespaces; headers and connections come on top."""
    import lines  # noqa: PLC0415 -- beside the study

    refusal = lines.refusal()
    if refusal:
        pytest.skip(refusal)
    places = ("--folder", tmp_path, "--size", "smoke", "--out", tmp_path / "b.jsonl")
    only = ("--only", "DDP", "ring", "server", "--mbit", "50", "--pace", "0")
    arguments = ("--steps", "8", *only)
    _, *rows = rows_of(server, "baselines.py", *places, *arguments)
    assert len(rows) == 3
    for row in rows:
        for way in ("interface_up", "interface_down"):
            assert 1 < row[way] / row["formula_each_way"] < 1.3, row
    again = rows_of(server, "baselines.py", *places, *arguments)
    assert again == []
