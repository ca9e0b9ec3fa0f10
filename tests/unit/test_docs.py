"""What the pages say can be followed: links, job files, Python.

A code block after the comment ``<!-- file: NAME -->`` is a file of the reader's; all
files of a page lie in one folder. After ``<!-- run -->`` it is Python that runs.
"""

import importlib
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from deploy.wiring import parts as wiring
from federation.job import job_file

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("*.md", "docs/**/*.md", "deploy/**/*.md", "studies/**/*.md")
PAGES = sorted(page for folder in FOLDERS for page in ROOT.glob(folder))

LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
BLOCK = re.compile(
    r"(?:<!-- ([^\n]+?) -->\n)?```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE
)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def blocks(page: Path, language: str) -> Iterator[tuple[str, str]]:
    """Mark and content of a page's code blocks in one language."""
    for mark, found, content in BLOCK.findall(page.read_text(encoding="utf-8")):
        if found == language:
            yield mark, content


def pages_with(language: str, mark: str = "") -> pytest.MarkDecorator:
    """A parameter for each page with a code block in the language, marked so."""
    pages = [
        page
        for page in PAGES
        if any(found.startswith(mark) for found, _ in blocks(page, language))
    ]
    assert pages
    return pytest.mark.parametrize(
        "page", pages, ids=lambda path: str(path.relative_to(ROOT))
    )


@cache
def anchors(page: Path) -> set[str]:
    """Places of a page that a link may name."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = HEADING.findall(text)
    return {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in found}


def test_links_lead_somewhere():
    """A relative link names a file, and an anchor a heading in it."""
    broken = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        for link in LINK.findall(text):
            if link.startswith(("https://", "mailto:")):
                continue
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                broken.append((page.relative_to(ROOT).as_posix(), link))
    assert broken == []


@pages_with("toml")
def test_whole_jobs_are_sound(page: Path):
    """A block of TOML can be read; one with a name and rounds is a job that loads."""
    for _, content in blocks(page, "toml"):
        document = tomllib.loads(content)
        if {"name", "rounds"} <= document.keys():
            job_file.loads(content)


@pages_with("python")
def test_python_compiles(page: Path):
    """A block of Python is Python."""
    for _, content in blocks(page, "python"):
        compile(content, page.name, "exec")


@pytest.mark.slow
@pages_with("python", "run")
def test_python_that_is_marked_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Marked blocks run, and so do the tests in them."""
    monkeypatch.chdir(ROOT)
    for mark, content in blocks(page, "python"):
        if mark == "run":
            names: dict[str, object] = {}
            exec(compile(content, page.name, "exec"), names)  # noqa: S102
            for name, test in names.items():
                if name.startswith("test_"):
                    assert callable(test)
                    test()


@pytest.mark.slow
@pages_with("toml", "file: ")
def test_files_of_a_page_make_federations(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The reader's own models and data can be built as the page says."""
    monkeypatch.syspath_prepend(tmp_path)
    for language in ("python", "toml"):
        for mark, content in blocks(page, language):
            if mark.startswith("file: "):
                path = tmp_path / mark.removeprefix("file: ")
                path.write_text(content)
                # Another page may have brought a module of the same name.
                monkeypatch.delitem(sys.modules, path.stem, raising=False)
    importlib.invalidate_caches()  # The folder was looked at before.
    for path in sorted(tmp_path.glob("*.toml")):
        federation = wiring.build_federation(job_file.load(path))
        assert len(federation.site_data) == len(federation.job.sites)


def test_readme_is_short():
    """It answers "why this?" within a minute: what is new goes to another page."""
    assert len((ROOT / "README.md").read_text("utf-8").split()) < 900


@pytest.mark.slow
def test_tests_of_the_threat_model_exist():
    """What it says is shown is shown by a test of that name."""
    text = (ROOT / "docs/explanation/threat-model.md").read_text()
    named = re.findall(r"`(?:(test_\w+\.py))?::(test_\w+)`", text)
    assert len(named) > 20
    file, homes = "", list[str]()
    for start, function in named:
        if start:
            file = start
            homes = [home.read_text() for home in (ROOT / "tests").rglob(file)]
        assert any(f"def {function}(" in home for home in homes), (file, function)


def test_every_page_is_in_the_list_of_pages():
    """From which the site takes its navigation; decisions have a list of their own."""
    folder = ROOT / "docs"
    listed = (folder / "README.md").read_text()
    pages = [*folder.glob("*.md"), *folder.glob("*/*.md"), *folder.glob("*/*.ipynb")]
    names = {page.relative_to(folder).as_posix() for page in pages}
    names -= {"README.md", *(name for name in names if name.startswith("adr/"))}
    assert {name for name in names if f"({name})" not in listed} == set()


def test_every_decision_is_listed():
    """On the first page of the folder; the pages stay few enough to be read."""
    folder = ROOT / "docs/adr"
    listed = (folder / "README.md").read_text()
    pages = {page.name for page in folder.glob("*.md")}
    assert {n for n in pages if f"({n})" not in listed} == {"README.md"}
    assert len(pages) <= 14


def test_keys_that_the_seventeen_methods_name_exist():
    """Each key of the job file in a column of the page is in the reference."""
    text = (ROOT / "docs/explanation/seventeen-methods.md").read_text()
    tables = "training|model|communication|aggregation|schedule|privacy"
    named = set(re.findall(rf"`((?:{tables})\.[\w.]+)[` =]", text))
    assert len(named) > 12
    pages = re.split(
        "^## ", (ROOT / "docs/reference/job-file.md").read_text(), flags=re.MULTILINE
    )
    known = {
        f"{page.split('`')[1].strip('[]')}.{key}"
        for page in pages
        if page.startswith("`[")
        for key in re.findall(r"^- `(\w+)` \(", page, re.MULTILINE)
    }
    known |= {page.split("`")[1].strip("[]") for page in pages if page.startswith("`[")}
    assert named - known == set()
