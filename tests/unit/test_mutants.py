"""The table of faults that tests must find is up to date."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import mutants  # noqa: E402
from mutants import Mutant  # noqa: E402

ALL = mutants.load()


def test_faults_can_be_put_in():
    """Each one's place is there once, and its tests exist."""
    for mutant in ALL:
        mutant.applied(ROOT)
        files = [test for test in mutant.tests if test.startswith("tests/")]
        assert files, mutant.name
        for test in files:
            assert (ROOT / test.partition("::")[0]).exists(), (mutant.name, test)


@pytest.mark.slow
def test_a_module_with_a_fault_is_python():
    """Or every test would fail for that."""
    for mutant in ALL:
        if mutant.file.endswith(".py"):
            name = f"{mutant.file}, {mutant.name}"
            compile(mutant.applied(ROOT), name, "exec")


def test_names_are_different():
    assert len({mutant.name for mutant in ALL}) == len(ALL)


def test_fault_without_a_place_is_refused():
    lost = Mutant(name="x", file="README.md", old="nowhere", new="", tests=("tests",))
    with pytest.raises(ValueError, match="0 times 'nowhere'"):
        lost.applied(ROOT)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("from sut import f\ndef test(): assert f() == 1", "killed"),
        ("def test(): pass", "SURVIVED"),
        ("import sut.nothing", "BROKEN"),
    ],
)
def test_verdicts(body: str, expected: str, tmp_path: Path):
    """A mutant is run in the copy, and the copy is sound again afterwards."""
    (tmp_path / "sut.py").write_text("def f(): return 1\n")
    (tmp_path / "test_sut.py").write_text(body)
    row = Mutant(
        name="two",
        file="sut.py",
        old="return 1",
        new="return 2",
        tests=("test_sut.py", "-p", "no:cacheprovider"),
    )
    assert mutants.run(row, tmp_path)[0] == expected
    assert (tmp_path / "sut.py").read_text() == "def f(): return 1\n"
