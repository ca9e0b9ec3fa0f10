"""Jobs of how-to pages, from the pages' own files to a trained model."""

import re
from pathlib import Path
from typing import Any

import pytest
from support.without_report import simulate

from federation.job import job_file
from monitoring.runs.run_result import RunResult

pytestmark = pytest.mark.slow

HOWTO = Path(__file__).parents[2] / "docs/howto"
FILE = re.compile(
    r"<!-- (?:lightning )?file: (\S+) -->\n```\w+\n(.*?)^```", re.DOTALL | re.MULTILINE
)


def files_of(page: str, folder: Path, stem: str) -> None:
    found = FILE.findall((HOWTO / page).read_text("utf-8"))
    ours = {name: text for name, text in found if Path(name).stem == stem}
    assert len(ours) == 2
    for name, content in ours.items():
        (folder / name).write_text(content)


def train(path: Path, **changes: Any) -> RunResult:
    return simulate(job_file.load(path, **changes))


def test_weights_find_the_rare_class(tmp_path: Path):
    """More frauds are found than without weights, at the price of accuracy."""
    files_of("unbalanced-and-missing.md", tmp_path, "claims")
    path = tmp_path / "claims.toml"
    weighted = train(path).summary()["final"]
    text = path.read_text()
    path.write_text(text.replace("class_weights = [0.5, 4.0]", ""))
    plain = train(path).summary()["final"]
    recall = [f["confusion"][1][1] / sum(f["confusion"][1]) for f in (plain, weighted)]
    assert recall[1] > recall[0] + 0.2


def test_graphs_are_told_apart(tmp_path: Path):
    files_of("lightning-and-graphs.md", tmp_path, "graphs")
    assert train(tmp_path / "graphs.toml").summary()["final"]["accuracy"] > 0.95


def test_lightning_module_trains(tmp_path: Path):
    pytest.importorskip("lightning")
    files_of("lightning-and-graphs.md", tmp_path, "digits")
    final = train(tmp_path / "digits.toml").summary()["final"]
    assert final["metrics"]["recall_at_1"] > 0.8
