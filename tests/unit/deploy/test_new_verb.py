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
