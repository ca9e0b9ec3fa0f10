"""The reference pages say what the code says."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from federation.job import job_file

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    """tools/reference.py, which is a script and not a package."""
    path = ROOT / "tools" / "reference.py"
    spec = importlib.util.spec_from_file_location("reference", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_are_what_the_code_says(reference: ModuleType):
    """Whoever changes the code runs `make docs`."""
    assert reference.stale(ROOT) == []


def test_written_pages_are_not_stale(reference: ModuleType, tmp_path: Path):
    """Writing and checking agree."""
    reference.write(tmp_path)
    assert reference.stale(tmp_path) == []


def test_a_changed_and_a_missing_page_are_stale(reference: ModuleType, tmp_path: Path):
    """The check sees one wrong letter."""
    reference.write(tmp_path)
    changed, missing, *_ = reference.pages()
    (tmp_path / changed).write_text((tmp_path / changed).read_text() + "x")
    (tmp_path / missing).unlink()
    assert [changed, missing] == reference.stale(tmp_path)


def test_every_key_of_the_job_is_listed(reference: ModuleType):
    """A key stands below its table with its documentation."""
    page = next(t for p, t in reference.pages().items() if p.name == "job-file.md")
    assert "- `round_deadline_seconds` (number above 0; default `600.0`): " in page


def test_the_first_job_of_the_reference_is_one(reference: ModuleType):
    """The keys that a newcomer needs, in a file that can be copied."""
    page = next(t for p, t in reference.pages().items() if p.name == "job-file.md")
    example = page.split("```toml\n")[1].split("```")[0]
    job = job_file.loads(example)
    assert [site.name for site in job.sites] == ["north", "south"]
    assert len(re.findall(r"^\w+ = ", example, re.MULTILINE)) == 10
