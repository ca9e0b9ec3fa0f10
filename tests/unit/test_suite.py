"""What these tests rely on when two workers share them."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings
from support.examples import few

ROOT = Path(__file__).parents[2]
CONFTEST = ROOT / "tests" / "conftest.py"
TESTS = """
import pytest

@pytest.mark.xdist_group("one")
@pytest.mark.parametrize("number", range(8))
def test_of_a_group(number):
    pass

@pytest.mark.parametrize("number", range(8))
def test_alone(number):
    pass
"""


@pytest.mark.slow
def test_a_group_has_one_worker(tmp_path: Path):
    """Flower's tests would see each other's files; nobody else has to wait for them."""
    shutil.copy(CONFTEST, tmp_path)
    (tmp_path / "test_groups.py").write_text(TESTS)
    options = ("-v", "-n", "2", "--dist", "loadgroup", "-p", "no:cacheprovider")
    done = subprocess.run(
        [sys.executable, "-I", "-m", "pytest", *options, "--rootdir", tmp_path],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "16 passed" in done.stdout, done.stdout + done.stderr
    workers = {
        name: set(re.findall(rf"\[(gw\d)\].*{name}\[", done.stdout))
        for name in ("test_of_a_group", "test_alone")
    }
    assert len(workers["test_of_a_group"]) == 1
    assert len(set().union(*workers.values())) == 2


HIDDEN = """
import pytest

late = getattr(pytest.mark, "sl" + "ow")

@late
def test_late():
    pass
"""


@pytest.mark.slow
def test_a_slow_test_whose_file_does_not_show_it_is_not_collected(tmp_path: Path):
    """`make test-rest` reads no file of unit tests in which all look fast."""
    shutil.copy(CONFTEST, tmp_path)
    (tmp_path / "unit").mkdir()
    (tmp_path / "unit" / "test_hidden.py").write_text(HIDDEN)
    options = ("--collect-only", "-p", "no:cacheprovider", "--rootdir", tmp_path)
    done = subprocess.run(
        [sys.executable, "-I", "-m", "pytest", *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "test_late" in done.stdout + done.stderr


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``make`` in the repository, as its user would, not as a part of another."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
    return subprocess.run(
        ["make", *arguments],  # noqa: S607
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


SKIPPED = """
import pytest

@pytest.mark.parametrize("number", range(3))
def test_a(number):
    pytest.skip("no moon (wait): tides")
"""


@pytest.mark.slow
def test_skipped_tests_are_counted_by_reason(tmp_path: Path):
    shutil.copy(CONFTEST, tmp_path)
    (tmp_path / "test_skipped.py").write_text(SKIPPED)
    options = ("-n", "2", "-p", "no:cacheprovider", "--rootdir", tmp_path)
    done = subprocess.run(
        [sys.executable, "-I", "-m", "pytest", *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    *_, counted, last = done.stdout.splitlines()
    assert counted == "   3  no moon (wait): tides"
    assert "3 skipped" in last


def test_tests_ask_for_programs_in_one_way():
    """By ``support.programs``, whose reasons say what to install."""
    asks = re.compile(r"shutil\.which|import which|skipif\([^)]*(geteuid|installed)")
    found = {
        str(path.relative_to(ROOT / "tests"))
        for path in (ROOT / "tests").rglob("*.py")
        if asks.search(path.read_text("utf-8"))
    }
    # A test of immutable folders tries, and skips where that is not allowed.
    own = {"unit/test_suite.py", "unit/cloud_adapters/test_local_store.py"}
    assert found == {"support/programs.py", *own}


@pytest.mark.parametrize(
    ("user", "code", "message"),
    [
        (0, 0, "installing moon"),
        (0, 1, "apt-get failed: .* moon"),
        (1000, 0, "only root .* moon"),
    ],
)
def test_programs_are_installed_or_named(
    user: int, code: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Without root, without a network, without pip: it never fails."""
    for name, text in (("id", f"echo {user}"), ("apt-get", f"exit {code}")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    done = make("programs", "PROGRAMS=no-such-program:moon sh:shell", "MAKE=false")
    assert done.returncode == 0, done.stderr
    assert re.search(message, done.stdout)
    assert "shell" not in done.stdout
    assert "pip failed" in done.stdout


@pytest.mark.parametrize(("lint", "tests"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_check_fails_with_lint_and_with_tests(lint: int, tests: int, tmp_path: Path):
    """They run at the same time; what each says is there, and whole."""
    for name in ("ruff", "mypy", "lint-imports"):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {name} ran\nexit {lint}\n")
        (tmp_path / name).chmod(0o700)
    done = make(
        "check", f"BIN={tmp_path}", "READY=", f"PYTEST=echo tested; exit {tests};"
    )
    assert (done.returncode == 0) == (lint == tests == 0)
    assert done.stdout.count("tested\n") == 2
    assert ("lint-imports ran\n" if lint == 0 else "ruff ran\n") in done.stdout


def test_the_fast_tests_have_each_folder_once():
    """A new folder of unit tests fails here until a part has it."""
    tests = ROOT / "tests"
    places = {
        str(path.relative_to(ROOT))
        for path in (*(tests / "unit").iterdir(), *(tests / "contract").iterdir())
        if (path.is_dir() and any(path.rglob("test_*.py"))) or path.match("test_*.py")
    }
    said = make("test-fast", "READY=", "PYTEST=echo tested").stdout
    parts = [w for w in said.split() if w.startswith("tests/")]
    assert sorted(set(parts)) == sorted(places)
    # Each line is there twice: as make shows it, and as it is echoed.
    assert len(parts) == 2 * len(places)


def test_a_profile_limits_or_raises_what_a_property_asks_for():
    """By day none has more than the profile; by night each has more."""
    loaded = settings.get_current_profile_name()
    try:
        settings.load_profile("crossfed")
        assert [few(n).max_examples for n in (10, 60)] == [10, 25]
        settings.load_profile("thorough")
        assert [few(n).max_examples for n in (10, 60)] == [30, 180]
    finally:
        settings.load_profile(loaded)


def test_benchmarks_keep_results_and_go_on_after_a_failure(tmp_path: Path):
    """What has a result is not run again; one that failed keeps no result."""
    (tmp_path / "python").write_text('#!/bin/sh\necho "$1"\ntest "$1" != b.py\n')
    (tmp_path / "python").chmod(0o700)
    bench = ("bench", f"BIN={tmp_path}", "READY=", f"RESULTS={tmp_path}")
    first = make(*bench, "SCRIPTS=a.py b.py c.py")
    assert first.returncode == 2
    for name in ("a.py", "b.py", "c.py"):
        assert re.search(rf"^make: {name} took \d+ s$", first.stdout, re.MULTILINE)
    assert first.stdout.endswith("make: these failed: b\n")
    assert (tmp_path / "c.jsonl").read_text() == "c.py\n"
    assert not (tmp_path / "b.jsonl").exists()
    again = make(*bench, "SCRIPTS=a.py c.py d.py")
    assert again.returncode == 0
    assert "a.py" not in again.stdout
    assert "d.py took" in again.stdout


def test_a_python_that_does_not_run_is_named_before_anything_starts():
    done = make("test-all", "NEWEST=/nowhere/python", "PARTS=help test-newest")
    assert done.returncode == 2
    assert "/nowhere/python does not run" in done.stdout
    assert "Show this list" not in done.stdout


def test_tests_that_are_begun_first_exist():
    """Or one that was renamed would be begun last again, unnoticed."""
    table = re.search(r"_BEGUN_FIRST = \((.*?)\n\)", CONFTEST.read_text(), re.DOTALL)
    assert table is not None
    names = re.findall(r'"(\w+)"', table[1])
    assert len(names) > 5
    files = {path.stem: path.read_text() for path in ROOT.glob("tests/**/test_*.py")}
    text = "".join(files.values())
    text += CONFTEST.read_text()  # Which names the group of what starts Ray.
    known = re.findall(r'def (test_\w+)\(|xdist_group\("(\w+)"\)', text)
    assert {*names} <= {name for pair in known for name in pair} | files.keys()
