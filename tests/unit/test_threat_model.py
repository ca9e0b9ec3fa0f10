"""The threat model names tests: each of them is there, and every claim names one."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "explanation" / "threat-model.md"

ROW = re.compile(r"^\| (?P<attempt>.+?) \| (?P<defence>.+?) \|(?P<shown>.*)\|$")
NAME = re.compile(r"`([^`]+)`")


def rows() -> list[tuple[str, str, str]]:
    """Attempt, defence and what shows it, of every table."""
    found = [ROW.match(line) for line in PAGE.read_text("utf-8").splitlines()]
    cells = [match.group("attempt", "defence", "shown") for match in found if match]
    return [row for row in cells if row[0] not in {"Attempt", "---"}]


every_row = pytest.mark.parametrize(
    ("attempt", "defence", "shown"), rows(), ids=[row[0][:40] for row in rows()]
)


def found_in(name: str) -> set[str]:
    """Tests in the files of a name; unit and integration tests may share one."""
    files = [path for path in TESTS.rglob("*.py") if path.name == name]
    return {
        node.name
        for path in files
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_the_page_has_rows():
    """Or the tests below could not fail."""
    assert len(rows()) > 20


@every_row
def test_named_tests_exist(attempt: str, defence: str, shown: str):
    """A name that begins with ``::`` is in the file that was named before it."""
    file = ""
    for name in NAME.findall(shown):
        before, _, test = name.partition("::")
        file = before or file
        if "/" in file:
            assert (TESTS.parent / file).exists(), name
            known = found_in(Path(file).name)
        else:
            known = found_in(file)
            assert known, f"there is no {file}"
        assert not test or test in known, name


@every_row
def test_every_claim_is_shown(attempt: str, defence: str, shown: str):
    """By a test, or by a page that says more; where nothing helps nothing is shown."""
    names = NAME.findall(shown) + re.findall(r"\]\(([^)]+)\)", shown)
    assert bool(names) != defence.startswith("nothing:")
