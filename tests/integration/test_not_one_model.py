"""The jobs of the page on more than one model do what it says, in fewer rounds."""

import importlib
import re
import sys
import tomllib
from pathlib import Path

import pytest
from support.without_report import simulate

from federation.job import job_file
from monitoring.runs.run_result import RunResult

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs/howto/not-one-model.md"
FILE = re.compile(r"<!-- file: (\S+) -->\n```\w+\n(.*?)^```", re.DOTALL | re.MULTILINE)
# Jobs that read what an earlier one has made.
LATER = re.compile(r"[^>]\n```toml\n(name = .*?)^```", re.DOTALL | re.MULTILINE)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files of the page."""
    monkeypatch.syspath_prepend(tmp_path)
    text = PAGE.read_text(encoding="utf-8")
    for name, content in FILE.findall(text):
        (tmp_path / name).write_text(content)
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    for job in LATER.findall(text):
        (tmp_path / f"{tomllib.loads(job)['name']}.toml").write_text(job)
    importlib.invalidate_caches()
    return tmp_path


def run(folder: Path, name: str, *overrides: str) -> RunResult:
    return simulate(job_file.load(folder / f"{name}.toml", overrides))


def test_sites_find_the_cluster_that_fits_them(folder: Path):
    """With secure aggregation: nobody learns who chose what."""
    found = run(folder, "clusters", "rounds=8")
    assert found.metrics["accuracy"] > 0.6


def test_models_of_any_architecture_teach_a_student(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """The secure mean of their logits is a better teacher than most of them."""
    monkeypatch.chdir(folder)
    simulate(job_file.load(folder / "logits.toml"), folder=Path("runs/consensus"))
    student = run(folder, "student", "training.local_steps=100")
    assert student.metrics["accuracy"] > 0.8
