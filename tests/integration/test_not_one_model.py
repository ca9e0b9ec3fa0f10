"""The jobs of the page on more than one model do what it says, in fewer rounds."""

import hashlib
import importlib
import re
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.without_report import simulate

from clients.models.model_pool import ModelPool
from clients.models.starting_weights import pinned
from deploy.cli import main
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


def test_a_check_tells_what_stays_at_a_site(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    """The last layer of the page's first job."""
    assert main(["check-job", str(folder / "personal.toml")]) == 0
    said = capsys.readouterr().out
    assert "1,248 values\neach site trains 2,570 values more for itself" in said


def test_sites_find_the_cluster_that_fits_them(folder: Path):
    """By their own losses, compared with the mean over all sites."""
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


def test_consolidated_training_remembers_the_first_day(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """Three runs, of which the second measures what the first day depended on."""
    monkeypatch.chdir(folder)
    few = ["rounds=4", "training.local_steps=15", "training.optimizer.lr=0.01"]
    for name, overrides in (("day1", few), ("fisher", ["training.local_steps=100"])):
        job = job_file.load(folder / f"{name}.toml", overrides)
        simulate(job, folder=Path("runs", name))
    memory = Path("runs/fisher/model.safetensors").read_bytes()
    digest = f"training.options.sha256={hashlib.sha256(memory).hexdigest()}"
    accuracy = {}
    for strength in (0.0, 50.0):
        told = [*few, digest, f"training.options.strength={strength}"]
        job = pinned(job_file.load(folder / "day2.toml", told), folder)
        accuracy[strength] = simulate(job).metrics["accuracy"]
    assert accuracy[50.0] > accuracy[0.0] + 0.03


def test_a_part_that_a_site_lacks_gets_no_update_from_it(folder: Path):
    """The mean is over all sites: what one site of two has moves half as far."""
    job = job_file.load(
        folder / "parts.toml",
        ["rounds=1", "training.local_steps=2", "aggregation.weights=uniform"],
    )
    start = ModelPool(job).initial_weights()[0]
    north, east, _ = job.sites
    both, one = (
        simulate(replace(job, sites=sites)).weights
        for sites in ((north, east), (north,))
    )
    layout = ModelPool(job).layout
    for spec, before in layout.float_views(start):
        alone, together = one[spec.name] - before, both[spec.name] - before
        if ".lower." in spec.name or ".parity." in spec.name:
            assert not alone.any()
            assert together.any()
        elif ".upper." in spec.name or ".digit." in spec.name:
            assert alone.any()
            np.testing.assert_allclose(together, alone / 2, atol=1e-6)
