"""The threat model names tests: each of them is there, and every claim names one.

A claim that no test attacks says that it rests on argument alone. The tests run with
``make test``: none of a suite of attacks is among the long ones.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from support.source_code import statements

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "explanation" / "threat-model.md"

ROW = re.compile(r"^\| (?P<attempt>.+?) \| (?P<defence>.+?) \|(?P<shown>.*)\|$")
NAME = re.compile(r"`([^`]+)`")
DEFINED = re.compile(r"^ *def (test_\w+)", re.MULTILINE)
UNTESTED = "argument alone"
SUITES = {
    "test_malicious_server.py",
    "test_hostile_aggregator.py",
    "test_split_jobs.py",
    "test_hostile_site.py",
    "test_hostile_node.py",
    "test_scaled_model.py",
    "test_local_user.py",
}


def rows() -> list[tuple[str, str, str]]:
    """Attempt, defence and what shows it, of every table."""
    found = [ROW.match(line) for line in PAGE.read_text("utf-8").splitlines()]
    cells = [match.group("attempt", "defence", "shown") for match in found if match]
    return [row for row in cells if row[0] not in {"Attempt", "---"}]


@cache
def files_named(name: str) -> list[Path]:
    """Files of the tests with this name, in whatever folder."""
    return list(TESTS.rglob(name))


def named(shown: str) -> Iterator[tuple[list[Path], str]]:
    """Files of each test that is named, and its own name; empty for all in a file.

    A name that begins with ``::`` is in the file that was named before it. Unit and
    integration tests may share a file's name.
    """
    files: list[Path] = []
    for name in NAME.findall(shown):
        before, _, test = name.partition("::")
        if before:
            pattern = before.removeprefix("tests/")
            files = [
                path for path in files_named(Path(before).name) if path.match(pattern)
            ]
        yield files, test


@cache
def known_in(path: Path) -> dict[str, bool]:
    """Tests of a file, and whether each is among the long ones, whatever its cases."""
    text = path.read_text("utf-8")
    if "mark.long" not in text:  # To parse all of them takes a second.
        return dict.fromkeys(DEFINED.findall(text), False)
    module, *_ = parts = statements(path)
    assert isinstance(module, ast.Module)
    all_long = any(
        isinstance(node, ast.Assign)
        and ast.unparse(node.targets[0]) == "pytestmark"
        and _is_long(node.value)
        for node in module.body
    )
    return {
        node.name: all_long or any(map(_is_long, node.decorator_list))
        for node in parts
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def _is_long(node: ast.expr) -> bool:
    # One case of a parameter may be long, for all that.
    text = ast.unparse(node)
    return "pytest.mark.long" in text and "parametrize" not in text


def test_the_page_has_rows():
    """Or the tests below could not fail."""
    assert len(rows()) > 20


@pytest.mark.slow
def test_named_tests_exist():
    """And what is named is a test."""
    for attempt, _, shown in rows():
        for files, test in named(shown):
            assert files, f"{attempt}: there is no file of {test}"
            known = set().union(*(known_in(path) for path in files))
            assert known, attempt
            assert not test or test in known, f"{attempt}: there is no {test}"


def test_every_claim_is_attacked_or_an_argument():
    """A link to a page is neither; where nothing helps there is nothing to show."""
    for attempt, defence, shown in rows():
        if defence.startswith("nothing:"):
            assert not shown.strip(), attempt
            continue
        attacks = [
            is_long
            for files, test in named(shown)
            for path in files
            for name, is_long in known_in(path).items()
            if test in {"", name}
        ]
        assert bool(attacks) != (UNTESTED in defence + shown), attempt
        assert not attacks or not all(attacks), f"make test runs none of {attempt}"


@pytest.mark.parametrize("name", sorted(SUITES))
def test_suites_of_attacks_run_with_make_test(name: str):
    """None of them is long."""
    (path,) = TESTS.rglob(name)
    found = known_in(path)
    assert found
    assert not any(found.values())


def test_make_test_leaves_out_nothing_but_what_is_long():
    """As the suites above count on."""
    makefile = (TESTS.parent / "Makefile").read_text("utf-8")
    (command,) = re.findall(r"^test:.*\n\t(.*)$", makefile, re.MULTILINE)
    assert command.endswith("--keep-going test-fast test-rest")


def test_make_test_has_two_parts():
    """The fast tests, and then what is not fast: no test is in neither."""
    makefile = (TESTS.parent / "Makefile").read_text("utf-8")
    (rest,) = re.findall(r"^test-rest:.*\n\t(.*)$", makefile, re.MULTILINE)
    assert '-m "not long and not fast"' in rest


def test_ci_does_nothing_that_a_newcomer_does_not():
    """So it fails where a command of the README would."""
    first, *lines = (TESTS.parent / ".ci/run").read_text("utf-8").splitlines()
    assert first == "#!/usr/bin/env bash"
    commands = [line for line in lines if not line.startswith("#")]
    assert commands[2:] == ["make lint", "make demo", "make test"]


def test_what_is_fast_is_what_make_check_runs(request: pytest.FixtureRequest):
    """Of the tests of this run: but for properties, which it runs in part."""
    fast = [i for i in request.session.items if i.get_closest_marker("fast")]
    assert request.node in fast
    for item in fast:
        assert item.path.relative_to(TESTS).parts[0] in {"contract", "unit"}
        for mark in ("slow", "flower", "deploy", "long"):
            assert item.get_closest_marker(mark) is None, item.nodeid
