"""What the command line says of itself, and how a new project begins."""

import json
import re
import runpy
from pathlib import Path

import pytest

import crossfed
from deploy.cli import main
from deploy.cli.arguments import load_job
from deploy.cli.commands import _parser
from deploy.cli.verb_table import _TABLE, tomllib  # type: ignore[attr-defined]

TABLE = tomllib.loads(_TABLE.read_text(encoding="utf-8"))


def ended(*arguments: str) -> int:
    """Exit code of a command that argparse ends."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    return int(end.value.code or 0)


def test_overview_names_every_verb_once():
    grouped = [name for names in TABLE["groups"].values() for name in names]
    assert sorted(grouped) == sorted(name for name in TABLE["verbs"] if " " not in name)


def test_every_verb_has_examples_that_are_commands():
    """They can be parsed, so nobody copies one that has gone out of date."""
    parser = _parser()
    for verb, about in TABLE["verbs"].items():
        assert about.get("examples") or "metavar" in about, f"{verb} has no example"
        for example in about.get("examples", ()):
            assert example.startswith(verb)
            parser.parse_args(re.split(" [<>]", example)[0].split())


def test_a_command_leaves_nothing_to_the_next():
    """One parser serves all commands of a process: its defaults stay as they are."""
    job = str(Path(__file__).parents[3] / "jobs" / "quickstart.toml")
    seeds = [
        load_job(_parser().parse_args(["check-job", job, *more])).seed
        for more in (["--seed", "8"], [])
    ]
    assert seeds[0] == 8 != seeds[1]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (["simulte"], "did you mean 'simulate'?"),
        (["agregator", "up"], "did you mean 'aggregator'?"),
        (["aggregator", "invit"], "did you mean 'invite'? (choices: init, up,"),
        (["simulate", "job.toml", "--engine", "flwer"], "did you mean 'flower'?"),
        (["train", "job.toml"], "did you mean 'simulate'?"),
        (["compare", "a", "b"], "did you mean 'report'?"),
        (["help"], "did you mean '--help'?"),
        (["aggregator", "status"], "there is no 'status' (choices: init, up,"),
        (["simulate", "job.toml", "--rounds", "5"], "--rounds 5; a key"),
        (["simulate", "job.toml", "rounds=5"], "is set with --set, for example"),
        (["simulate", "job.toml", "--resum"], "--resum; did you mean --resume?"),
        (["simulate", "job.toml", "--rounds=5"], "usage: crossfed simulate"),
        (["-v", "runs"], "options of a verb"),
        (["runs", "--zzz"], "unrecognized arguments: --zzz\n"),
        (["ps", "--aggregator", "http://fed.org:8443"], "https://fed.org:8443"),
        (["ps", "--aggregator", "10.0.0.7:8443"], "https://10.0.0.7:8443"),
    ],
)
def test_suggests_what_was_meant(
    typed: list[str], meant: str, capsys: pytest.CaptureFixture[str]
):
    assert ended(*typed) == 2
    assert meant in capsys.readouterr().err


@pytest.mark.slow
def test_new_project_trains_and_passes_its_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    folder = tmp_path / "my-federation"
    assert main(["new", str(folder), "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert sorted(made["files"]) == sorted(file.name for file in folder.iterdir())
    assert crossfed.load_job(folder / "job.toml").name == "my-federation"
    monkeypatch.chdir(tmp_path)  # The job names its code by file: any folder will do.
    runpy.run_path(str(folder / "test_work.py"))["test_the_federation_learns"]()


@pytest.mark.parametrize("name", ["No Name", "a" * 65, "full", "full/thesis.txt/x"])
def test_new_project_that_cannot_be(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """A name that no job may have, or a folder with somebody's work."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    assert main(["new", str(tmp_path / name)]) == 2
    assert sorted(tmp_path.rglob("*")) == before
    err = capsys.readouterr().err
    assert name in err
    assert "traceback" not in err
