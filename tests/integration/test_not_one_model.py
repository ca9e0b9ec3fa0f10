"""The jobs of the page on more than one model do what it says, in fewer rounds."""

import importlib
import re
import sys
from pathlib import Path

import pytest
from support.without_report import simulate

from federation.job import job_file
from monitoring.runs.run_result import RunResult

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs/howto/not-one-model.md"
FILE = re.compile(r"<!-- file: (\S+) -->\n```\w+\n(.*?)^```", re.DOTALL | re.MULTILINE)
CLEAR = [
    "privacy.secure_aggregation.enabled=false",
    "privacy.secure_aggregation.clip_norm=",
    "privacy.secure_aggregation.max_examples=",
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files of the page."""
    monkeypatch.syspath_prepend(tmp_path)
    for name, content in FILE.findall(PAGE.read_text(encoding="utf-8")):
        (tmp_path / name).write_text(content)
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    importlib.invalidate_caches()
    return tmp_path


def run(folder: Path, name: str, *overrides: str) -> RunResult:
    return simulate(job_file.load(folder / f"{name}.toml", overrides))


def test_a_head_of_its_own_suits_each_site(folder: Path):
    """Half of the sites contradict the other half in one model."""
    few = ["rounds=5", *CLEAR]
    own, one = (
        run(folder, "personal", *few, f"model.personal={parts}")
        for parts in ('["6.*"]', "[]")
    )
    assert own.accuracy is not None
    assert one.accuracy is not None
    assert own.accuracy > 0.7
    assert one.accuracy < 0.5


def test_sites_find_the_cluster_that_fits_them(folder: Path):
    """With secure aggregation: nobody learns who chose what."""
    found = run(folder, "clusters", "rounds=6")
    assert found.metrics["accuracy"] > 0.6
