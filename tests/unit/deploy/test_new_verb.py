"""``crossfed new``: which files a project gets."""

import tomllib
from pathlib import Path

import pytest

from deploy.cli import commands
from deploy.cli.new_verb import example_names, project_files


def run(*arguments: str | Path) -> int:
    return commands.main(["new", *map(str, arguments)])


@pytest.mark.parametrize("example", example_names())
def test_an_example_has_job_code_page_and_test(example: str):
    files = project_files(example, "mine")
    assert files.keys() >= {"README.md", "job.toml", "test_work.py", "work.py"}
    assert files["README.md"].startswith("# ")
    names = [tomllib.loads(t)["name"] for f, t in files.items() if f.endswith(".toml")]
    assert "mine" in names
    assert all(name.startswith("mine") for name in names)
    assert len(names) == len(set(names))


def test_a_copy_is_what_the_wheel_has(tmp_path: Path):
    assert run("--from", "tabular", tmp_path / "risk") == 0
    files = {
        path.name: path.read_text("utf-8") for path in (tmp_path / "risk").iterdir()
    }
    assert files == project_files("tabular", "risk")


def test_examples_are_listed(capsys: pytest.CaptureFixture[str]):
    assert run("--list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == example_names()
    assert all(len(line.split()) > 2 for line in lines)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--from", "tabluar", "mine"), "did you mean tabular"),
        (("--from", "../project", "mine"), "no example"),
        ((), "name the new folder"),
    ],
)
def test_what_cannot_be_made_is_refused(
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    assert run(*arguments) == 2
    assert message in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]
