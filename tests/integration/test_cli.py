"""The command line as its users meet it: verbs, options, streams, codes, messages."""

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import programs
from support.commands import CROSSFED, Done, ForkServer, workplace

from deploy.cli.commands import _parser

pytestmark = [pytest.mark.slow]

FAST = ("--set", "rounds=2", "--set", "training.local_steps=1")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return workplace(tmp_path / "place")


@pytest.fixture(scope="module")
def finished(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A place with one completed run; do not write there."""
    place = workplace(tmp_path_factory.mktemp("finished"))
    done = server.run("simulate", "job.toml", *FAST, folder=place)
    assert done.code == 0, done.stderr
    return place


def test_report_can_wait(server: ForkServer, place: Path) -> None:
    """It is not drawn with --no-report, and afterwards by a command of its own."""
    arguments = ("simulate", "job.toml", *FAST, "--no-report", "--out", "run")
    done = server.run(*arguments, folder=place)
    assert done.code == 0, done.stderr
    assert "report" not in done.stdout
    assert not (place / "run/report.html").exists()
    assert server.run("report", "run", folder=place).code == 0
    assert "</html>" in (place / "run/report.html").read_text()


def test_verbs_and_options_are_frozen() -> None:
    """Adding one is a decision, not an accident."""
    common = {"-h", "--help", "-v", "--verbose", "--json"}
    job = {"job", "--set", "--seed"}
    here = {"deployment", "--provider"}
    passphrase = {"--passphrase-file"}
    web = {"--web", "--port"}
    run = {"--out", "--resume", "--extend", "--engine", "--transcript", "--no-report"}
    key = {"--encryption-key", "--encryption-endpoint"}
    service = key | {"--endpoint", "--region", "--bucket-owner"}
    place = service | {"place", "--root"}
    assert verbs_of(_parser()) == {
        "simulate": common | job | run | web,
        "check-job": common | job | {"--speeds"},
        "find-rate": common | job | {"--site", "--low", "--high", "--steps"},
        "stats": common | job | run | web | {"--root"},
        "evaluate": common
        | job
        | web
        | {"model", "--out", "--resume", "--engine"}
        | {"--no-report", "--root"},
        "baselines": common | job | {"--seeds", "--out"},
        "audit-log": common | {"file", "--known"},
        "audit": common | job | {"--site", "--canaries", "--confidence", "--out"},
        "tune": common | {"space", "--out", "--workers"},
        "new": common | {"folder", "--from", "--list"},
        "completion": common | {"shell"},
        "report": common | {"run", "--out", "--root", "--sweep"},
        "runs": common | web | {"--root"},
        "keys": {"-h", "--help"},
        "keys new": common | passphrase | {"name", "--out"},
        "keys show": common | passphrase | {"file"},
        "keys storage": common | {"file"},
        "keys trust": common
        | {"roster", "--site", "--relay", "--aggregator", "--organisation", "--key"}
        | {"--replace"},
        "doctor": common
        | {"--key", "--roster", "--store", "--job", "--site", "--aggregator"}
        | {"--endpoint", "--region", "--bucket-owner", "--identity-only"},
        "transcript": common | {"folder", "--message"},
        "ledger": common | {"action", "run", "--root", "--config"},
        "data": {"-h", "--help"},
        "data shard": common
        | {"source", "url", "--option", "--name", "--format", "--shard-size"}
        | {"--workers", "--replace", "--kms-key"}
        | service,
        "data info": common | {"url", "--verify"} | service,
        "data balance": common | {"run", "--root"},
        "export": common
        | {"run", "--to", "--overwrite", "--root", "--kms-key", "--site"}
        | {"--format", "--data", "--option", "--sign"}
        | passphrase
        | service,
        "verify": common | {"url", "--key"} | service,
        "prune": common | {"run", "--fraction", "--by", "--out", "--root"},
        "predict": common | {"run", "data", "--option", "--split", "--out", "--root"},
        "export-metrics": common | {"run", "--to", "--follow", "--root"},
        "storage": {"-h", "--help"},
        "storage rewrap": common | place | {"--to", "--to-endpoint"},
        "storage decrypt": common | place | {"--out"},
        "checkpoints": common | {"run", "--verify", "--prune", "--root"} | service,
        "aggregator": {"-h", "--help"},
        "aggregator init": common
        | {"folder", "--host", "--listen", "--no-proxy", "--organisation"},
        "aggregator up": common | {"--config"},
        "aggregator invite": common
        | {"site", "--address", "--minutes", "--config", "--instance", "--region"}
        | {"--aws-role", "--gcp-service-account", "--project", "--relay"},
        "aggregator revoke": common | {"site", "--config"},
        "aggregator sites": common | {"--config"},
        "aggregator page": common | {"--config"},
        "aggregator owners": {"-h", "--help"},
        "aggregator owners add": common
        | {"--config", "name", "--weight", "--max-priority", "--quota"},
        "aggregator owners list": common | {"--config"},
        "aggregator owners revoke": common | {"--config", "name"},
        "enroll": common
        | {"token", "--renew", "--roster", "--folder", "--organisation", "--accept"}
        | {"--platform", "--region"},
        "site": {"-h", "--help"},
        "site up": common | {"--config", "--take-over"},
        "site relay": common | {"--config", "--port"},
        "site status": common | {"--config"},
        "site model": common | {"run", "model", "--out", "--config"},
        "run": common
        | job
        | {"--aggregator", "--detach", "--resume", "--extend", "--owner", "--priority"}
        | {"--evaluate"},
        "ps": common | {"--aggregator"},
        "watch": common | web | {"run", "--aggregator"},
        "stop": common | {"run", "--aggregator"},
        "logs": common | {"run", "--aggregator", "--follow"},
        "plan": common
        | {"deployment", "--speeds", "--like", "--prices", "--month-gb", "--plot"},
        "up": common | here | {"--accept", "--detach", "--keep", "--older", "--speeds"},
        "nodes": common | here | {"--all"},
        "down": common | here | {"--any-owner", "--purge", "--yes-purge"},
    }


def verbs_of(parser: argparse.ArgumentParser) -> dict[str, set[str]]:
    """Options and arguments by verb; a verb inside a verb has both names."""
    found = {}
    for action in parser._actions:
        if not isinstance(action, argparse._SubParsersAction):
            continue
        for name, verb in action.choices.items():
            found[name] = {
                text
                for a in verb._actions
                if not isinstance(a, argparse._SubParsersAction)
                for text in a.option_strings or [a.dest]
            }
            found |= {f"{name} {k}": v for k, v in verbs_of(verb).items()}
    return found


def test_help_imports_nothing_heavy(tmp_path: Path) -> None:
    """Nor NumPy."""
    script = (
        "import sys, contextlib\nfrom deploy.cli.commands import main\n"
        "with contextlib.suppress(SystemExit): main(['--help'])\n"
        "assert not {'torch', 'numpy', 'rich', 'sklearn'} & set(sys.modules)"
    )
    subprocess.run(
        [sys.executable, "-I", "-c", script], check=True, stdout=subprocess.DEVNULL
    )


def test_a_job_is_handed_over_without_torch(place: Path) -> None:
    """What ``run`` needs before it follows a run: nobody waits seconds for it."""
    script = (
        "import sys\nfrom deploy.cli.commands import main\n"
        "assert main(['run', 'job.toml', '--aggregator', 'none.toml']) == 2\n"
        "import deploy.aggregator_host.parties, monitoring.terminal.outcome\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", script],
        cwd=place,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_simulate_prints_result_and_leaves_files(
    server: ForkServer, place: Path
) -> None:
    """Data on stdout, progress on stderr."""
    done = server.run("simulate", "job.toml", *FAST, "--json", folder=place)
    assert done.code == 0, done.stderr
    result = json.loads(done.stdout)
    run = place / result["folder"]
    assert run == place / "runs/small" / result["run_id"]
    kept = json.loads((run / "result.json").read_text())
    assert kept == {k: v for k, v in result.items() if k != "folder"}
    assert result["status"] == "completed"
    assert "\x1b" not in done.stderr
    assert re.search(r"^round  2/2  loss", done.stderr, re.MULTILINE)
    for name in ("job.toml", "events.jsonl", "model.safetensors", "report.html"):
        assert (run / name).is_file()


def test_files_of_every_command_are_for_their_user_alone(
    server: ForkServer, place: Path
) -> None:
    """Runs, reports and models, whatever the umask was."""
    (place / "job.toml").chmod(0o644)
    given = {place, *place.rglob("*")}
    for words in (
        ("simulate", "job.toml", *FAST, "--out", "made/run"),
        ("report", "made/run", "--out", "made/page.html"),
        ("export", "made/run", "--to", "file://made/model"),
    ):
        done = server.run(*words, folder=place)
        assert done.code == 0, done.stderr
    made = {*place.rglob("*")} - given
    names = {path.name for path in made}
    assert {"events.jsonl", "report.html", "page.html", "result.json"} <= names
    assert not [path for path in made if path.stat().st_mode & 0o077]


def test_set_and_seed_replace_keys(server: ForkServer, place: Path) -> None:
    """Later ones win, and the run's job file tells."""
    done = server.run(
        "simulate",
        "job.toml",
        *FAST,
        "--set",
        "rounds=1",
        "--set",
        "aggregation.combine=median",
        "--set",
        "aggregation.weights=uniform",
        "--no-report",
        "--seed",
        "11",
        "--out",
        "run",
        folder=place,
    )
    assert done.code == 0, done.stderr
    job = (place / "run/job.toml").read_text()
    assert "rounds = 1\n" in job
    assert "seed = 11\n" in job
    assert 'combine = "median"' in job


def test_memory_storage_leaves_nothing(server: ForkServer, place: Path) -> None:
    """A run that is kept nowhere writes no file."""
    before = sorted(place.rglob("*"))
    done = server.run(
        "simulate", "job.toml", *FAST, "--set", "storage.url=memory://", folder=place
    )
    assert done.code == 0, done.stderr
    after = [p for p in sorted(place.rglob("*")) if "__pycache__" not in p.parts]
    assert after == before


def test_resume_continues_the_newest_run_of_the_job(
    server: ForkServer, place: Path
) -> None:
    """Without --out; a run that was killed continues under its own name."""
    words = ("simulate", "job.toml", "--no-report", "--set", "rounds=3")
    server.run(*words, folder=place, misfortune="round has ended")
    time.sleep(1.1)  # Run ids sort by their second.
    server.run(*words, folder=place, misfortune="run has begun")
    newest = max((place / "runs/small").iterdir())
    done = server.run(*words, "--resume", "--json", folder=place)
    assert done.code == 0, done.stderr
    assert json.loads(done.stdout)["folder"] == f"runs/small/{newest.name}"


def test_completed_run_is_left_intact(
    server: ForkServer, finished: Path, tmp_path: Path
) -> None:
    """Resuming it says so, changes no byte and is no error."""
    place = tmp_path / "copy"
    shutil.copytree(finished, place)
    (run,) = (place / "runs/small").iterdir()
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in _files(run)}
    done = server.run("simulate", "job.toml", *FAST, "--resume", "--json", folder=place)
    assert done.code == 0, done.stderr
    assert "is already complete" in done.stderr
    assert json.loads(done.stdout)["status"] == "completed"
    after = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in _files(run)}
    assert after == before


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_check_job_shows_who_gets_what(server: ForkServer, finished: Path) -> None:
    """As a table, or as JSON."""
    text = server.run("check-job", "job.toml", folder=finished)
    assert text.code == 0, text.stderr
    assert "left" in text.stdout
    assert "650 values\nround 1: 5,968 bytes down, " in text.stdout
    assert "\nwhole run: " in text.stdout
    assert text.stdout.endswith("the job is sound\n")
    done = server.run("check-job", "job.toml", "--json", folder=finished)
    found = json.loads(done.stdout)
    assert found["job"]["rounds"] == 6
    assert found["parameters"] == 650
    assert [site["site"] for site in found["sites"]] == ["left", "right"]
    for site in found["sites"]:
        assert sum(site["counts"].values()) == site["train_examples"]


def test_site_with_an_app_is_checked_but_not_rehearsed(
    server: ForkServer, place: Path
) -> None:
    """What it holds nobody knows, and here it does not run."""
    app = ("job.toml", "--set", "sites.1.flower_app={}")
    done = server.run("check-job", *app, "--json", folder=place)
    assert done.code == 0, done.stderr
    assert [site["site"] for site in json.loads(done.stdout)["sites"]] == ["left"]
    both = server.run("check-job", *app, "--set", "sites.0.flower_app={}", folder=place)
    assert both.stdout.endswith("the job is sound\n"), both.stderr
    for verb in ("simulate", "audit"):
        refused = server.run(verb, *app, folder=place)
        words = ["sites[1].flower_app", "site 'right' runs a Flower app"]
        check_refused(refused, words, code=2)


def test_report_is_written_again(
    server: ForkServer, finished: Path, tmp_path: Path
) -> None:
    """By folder, run id and job name; elsewhere with --out."""
    (run,) = (finished / "runs/small").iterdir()
    target = tmp_path / "page.html"
    done = server.run("report", run.name, "--out", str(target), folder=finished)
    assert done.code == 0, done.stderr
    assert done.stdout == f"{target}\n"
    assert "</html>" in target.read_text()
    target.unlink()
    # Other names of the run, given twice, make one report.
    names = (f"runs/small/{run.name}", "small")
    done = server.run("report", *names, "--out", str(target), "--json", folder=finished)
    assert json.loads(done.stdout)["report"] == str(target)
    assert "</html>" in target.read_text()
    assert "<h1>2 runs</h1>" not in target.read_text()


def test_runs_are_held_against_each_other(
    server: ForkServer, finished: Path, tmp_path: Path
) -> None:
    """Two runs make a comparison, where it is asked for; one run twice is a report."""
    place = tmp_path / "copy"
    shutil.copytree(finished, place)
    shutil.copytree(place / "runs/small", place / "runs/other")
    (first,) = (place / "runs/small").iterdir()
    (second,) = (place / "runs/other").iterdir()
    names = (str(first.relative_to(place)), str(second.relative_to(place)))
    done = server.run("report", *names, folder=place)
    assert (done.code, done.stdout) == (0, "comparison.html\n"), done.stderr
    assert "<h1>2 runs</h1>" in (place / "comparison.html").read_text()
    target = tmp_path / "page.html"
    done = server.run("report", *names, "--out", str(target), "--json", folder=place)
    assert json.loads(done.stdout)["report"] == str(target)
    assert "<h1>2 runs</h1>" in target.read_text()
    done = server.run("report", names[0], f"./{names[0]}", folder=place)
    assert done.stdout == f"{names[0]}/report.html\n"
    (second / "job.toml").unlink()
    done = server.run("report", *names, folder=place)
    check_refused(done, ["lost its job.toml"], code=2)


def test_runs_lists_every_run(server: ForkServer, finished: Path) -> None:
    """With the id that other verbs take."""
    (run,) = (finished / "runs/small").iterdir()
    text = server.run("runs", folder=finished)
    assert text.code == 0, text.stderr
    heads, row = text.stdout.splitlines()
    assert heads.split()[0] == "run"
    assert row.split()[:4] == [run.name, "small", "completed", "2/2"]
    (found,) = json.loads(server.run("runs", "--json", folder=finished).stdout)
    assert found["run_id"] == run.name
    assert found["status"] == "completed"


def test_runs_are_found_where_people_put_them(
    server: ForkServer, finished: Path, tmp_path: Path
) -> None:
    """In the folder of runs itself too, in the order of time; not as a job's own."""
    place = tmp_path / "copy"
    shutil.copytree(finished, place)
    (first,) = (place / "runs/small").iterdir()
    words = ("simulate", "job.toml", *FAST, "--no-report", "--out", "runs/a")
    done = server.run(*words, folder=place)
    assert done.code == 0, done.stderr
    rows = json.loads(server.run("runs", "--json", folder=place).stdout)
    assert [row["folder"] for row in rows] == [f"runs/small/{first.name}", "runs/a"]
    report = server.run("report", "a", folder=place)
    assert report.stdout == "runs/a/report.html\n"
    shutil.rmtree(first)
    (place / "runs").rename(place / "small")
    done = server.run(
        "simulate",
        "job.toml",
        *FAST,
        "--set",
        "storage.url=file://small",
        "--resume",
        folder=place,
    )
    check_refused(done, ["no run of the job 'small' in small"], code=2)


def test_runs_tells_of_none_and_of_damaged_ones(
    server: ForkServer, place: Path
) -> None:
    """One bad folder does not hide the others, nor does an empty one fail."""
    none = server.run("runs", folder=place)
    assert (none.code, none.stdout) == (0, "")
    assert "no runs in runs" in none.stderr
    (place / "runs/small/x[red]").mkdir(parents=True)
    (place / "runs/small/x[red]/events.jsonl").write_text("{\n{}\n")
    server.run("simulate", "job.toml", folder=place, misfortune="round has ended")
    rows = server.run("runs", folder=place).stdout
    assert "unreadable" in rows
    assert "x[red]" in rows
    assert "interrupted" in rows


@pytest.mark.long
def test_reader_that_leaves_gets_no_traceback(finished: Path) -> None:
    """As in ``crossfed runs | head -1``."""
    done = subprocess.run(  # noqa: S602 -- a pipe of the shell is what is tested
        f"{CROSSFED} runs | true; {CROSSFED} runs --json | head -1",
        shell=True,
        cwd=finished,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    assert done.stdout == "[\n"


@pytest.mark.long
def test_run_goes_on_when_nobody_reads_its_progress(place: Path) -> None:
    """A closed pipe for standard error costs the progress and nothing else."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [CROSSFED, "simulate", "job.toml", *FAST],
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=write,
        check=False,
    )
    os.close(write)
    assert done.stdout.startswith(b"status      completed\n")
    assert done.returncode == 0


BAD = {
    "unknown key": (
        ["--set", "training.lokal_steps=3"],
        ["job.toml", "training.lokal_steps", "did you mean 'local_steps'?"],
    ),
    "wrong type": (["--set", "rounds=many"], ["job.toml", "rounds", "a whole number"]),
    "no module": (
        ["--set", "model.factory=no_such_module:f"],
        ["job.toml", "model.factory", "no_such_module"],
    ),
    "wrong options": (
        ["--set", "model.options.hiden=1"],
        ["model.options", "did you mean hidden", "its options are until, hidden"],
    ),
    "broken model": (
        ["--set", "model.factory=small_parts:broken_model"],
        ["small_parts:broken_model", "out of order"],
    ),
    "data: broken": (
        ["--set", "data.source=small_parts:broken_data"],
        ["small_parts:broken_data", "the cable is cut"],
    ),
    "data: ends the program": (
        ["--set", "data.source=small_parts:leaving_data"],
        ["job.toml", "exited the program", "SystemExit(0)"],
    ),
    "more sites than data": (
        [
            "--set",
            "data.source=small_parts:few",
            "--set",
            "data.partition.kind=iid",
            "--set",
            'sites=[{name="a"},{name="b"},{name="c"},{name="empty"}]',
        ],
        ["'empty'", "0 training examples", "fewer sites"],
    ),
    "epsilon out of reach": (
        [
            "--set",
            "aggregation.weights=uniform",
            "--set",
            "privacy.differential_privacy={unit='record',target_epsilon=0.001}",
        ],
        ["target_epsilon", "cannot be reached", "what would reach it"],
    ),
    "s3": (["--set", "storage.url=s3://A_B/x"], ["storage.url", "cannot be a bucket"]),
    "nothing to set": (["--set", "rounds"], ["'rounds'", "write key=value"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_job_is_one_clear_error(name: str, server: ForkServer, place: Path) -> None:
    """Exit code 2, what and where, no traceback, and nothing is written."""
    arguments, words = BAD[name]
    done = server.run("simulate", "job.toml", *arguments, folder=place)
    check_refused(done, words, code=2)
    assert not (place / "runs").exists()


@pytest.mark.parametrize(
    "name",
    [
        "unknown key",
        "no module",
        "data: broken",
        "more sites than data",
        "epsilon out of reach",
        "s3",
    ],
)
def test_check_job_refuses_what_simulate_refuses(
    name: str, server: ForkServer, place: Path
) -> None:
    """In the same words."""
    arguments, words = BAD[name]
    done = server.run("check-job", "job.toml", *arguments, folder=place)
    check_refused(done, words, code=2)


def check_refused(done: Done, words: list[str], *, code: int) -> None:
    assert done.code == code, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("crossfed: ")
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


def test_bad_job_file_is_one_clear_error(server: ForkServer, place: Path) -> None:
    """No file, a folder, and no TOML."""
    missing = server.run("simulate", "absent.toml", folder=place)
    check_refused(missing, ["absent.toml", "No such file"], code=2)
    folder = server.run("simulate", ".", folder=place)
    check_refused(folder, ["cannot read", "Is a directory"], code=2)
    (place / "job.toml").write_text("rounds = = 3\n")
    check_refused(
        server.run("check-job", "job.toml", folder=place),
        ["job.toml is not TOML", "line 1"],
        code=2,
    )


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["train"],
        ["simulate"],
        ["simulate", "job.toml", "--res"],
        ["simulate", "job.toml", "--out", ""],
        ["runs", "-x"],
    ],
)
def test_bad_command_line_is_code_2(
    arguments: list[str], server: ForkServer, place: Path
) -> None:
    """Usage on standard error."""
    done = server.run(*arguments, folder=place)
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: crossfed")


def test_folder_that_holds_a_run_is_not_used_again(
    server: ForkServer, finished: Path, tmp_path: Path
) -> None:
    """Without --resume; the run in it stays as it is."""
    place = tmp_path / "copy"
    shutil.copytree(finished, place)
    (run,) = (place / "runs/small").iterdir()
    before = {p: p.read_bytes() for p in _files(run)}
    done = server.run("simulate", "job.toml", *FAST, "--out", str(run), folder=place)
    check_refused(done, ["already holds run", run.name, "--resume", "--out"], code=1)
    assert {p: p.read_bytes() for p in _files(run)} == before


def test_resume_without_a_run_is_refused(server: ForkServer, place: Path) -> None:
    """By folder, by job, and for a run that was kept nowhere."""
    by_folder = server.run(
        "simulate", "job.toml", "--out", "run", "--resume", folder=place
    )
    check_refused(by_folder, ["there is no run in run"], code=2)
    by_job = server.run("simulate", "job.toml", "--resume", folder=place)
    check_refused(by_job, ["no run of the job 'small' in runs"], code=2)
    nowhere = ["--set", "storage.url=memory://", "--resume"]
    done = server.run("simulate", "job.toml", *nowhere, folder=place)
    check_refused(done, ["nothing to resume"], code=2)
    assert not (place / "run").exists()


def test_report_of_no_run_is_refused(server: ForkServer, place: Path) -> None:
    """It says what to give."""
    done = server.run("report", "nothing", folder=place)
    check_refused(done, ["no run 'nothing'", "crossfed runs"], code=2)


def test_resume_with_a_changed_job_names_the_keys(
    server: ForkServer, place: Path
) -> None:
    """And leaves the run as it is, to be resumed with its own job."""
    server.run(
        "simulate",
        "job.toml",
        "--out",
        "run",
        folder=place,
        misfortune="round has ended",
    )
    before = {p: p.read_bytes() for p in _files(place / "run")}
    changed = ["--set", "training.optimizer.lr=0.5", "--seed", "9"]
    done = server.run(
        "simulate", "job.toml", *changed, "--out", "run", "--resume", folder=place
    )
    check_refused(done, ["seed: 9 here, 3 there", "training.optimizer.lr"], code=2)
    assert {p: p.read_bytes() for p in _files(place / "run")} == before


def test_file_in_place_of_a_folder_is_refused(server: ForkServer, place: Path) -> None:
    """As the folder itself, and on the way to it."""
    (place / "taken").write_text("mine")
    for out in ("taken", "taken/run"):
        done = server.run("simulate", "job.toml", "--out", out, folder=place)
        check_refused(done, ["taken", "a file is in the way of a folder"], code=1)
    assert (place / "taken").read_text() == "mine"


def test_unexpected_error_has_a_traceback_only_when_asked(
    server: ForkServer, place: Path
) -> None:
    """A fault of ours is told in two lines."""
    arguments = ("simulate", "job.toml", *FAST, "--no-report", "--out")
    short = server.run(*arguments, "a", folder=place, misfortune="bug")
    check_refused_late(short)
    assert "Traceback" not in short.stderr
    assert "add -v for the traceback" in short.stderr
    long = server.run(*arguments, "b", "-v", folder=place, misfortune="bug")
    check_refused_late(long)
    assert "Traceback" in long.stderr
    for name in ("a", "b"):
        result = json.loads((place / name / "result.json").read_text())
        assert result["status"] == "failed"


def check_refused_late(done: Done) -> None:
    assert (done.code, done.stdout) == (1, "")
    assert "crossfed: ZeroDivisionError: rehearsed" in done.stderr


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of 1 MB of its own."""
    folder.mkdir()
    if why := programs.missing("root", "mount"):
        pytest.skip(why)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder],  # noqa: S607
        check=False,
        capture_output=True,
    )
    if done.returncode:
        pytest.skip("cannot mount a tmpfs here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)  # noqa: S607


def reference(server: ForkServer, place: Path, *more: str) -> bytes:
    """The model of the same job with all the space that it needs."""
    done = server.run(
        "simulate", "job.toml", *more, "--no-report", "--out", "whole", folder=place
    )
    assert done.code == 0, done.stderr
    return (place / "whole/model.safetensors").read_bytes()


def test_disk_full_at_a_checkpoint_loses_no_state(
    server: ForkServer, place: Path
) -> None:
    """With more space the run continues and ends as if there always had been."""
    larger = ("--set", "model.options.hidden=400", "--set", "training.local_steps=1")
    expected = reference(server, place, *larger)
    with small_disk(place / "disk") as disk:
        arguments = (
            "simulate",
            "job.toml",
            *larger,
            "--no-report",
            "--out",
            "disk/run",
        )
        done = server.run(*arguments, folder=place)
        assert done.code == 1, done.stderr
        assert "disk is full; free" in done.stderr
        assert "Traceback" not in done.stderr
        assert done.stderr.rstrip().endswith("--out disk/run --resume")
        subprocess.run(
            ["mount", "-o", "remount,size=8m", disk],  # noqa: S607
            check=True,
        )
        resumed = server.run(*arguments, "--resume", folder=place)
        assert resumed.code == 0, resumed.stderr
        assert (disk / "run/model.safetensors").read_bytes() == expected


def test_disk_full_while_events_are_written_loses_no_state(
    server: ForkServer, place: Path
) -> None:
    """The torn line is cut off and its round runs again."""
    # Of so many sites a round's lines do not fit into what is left of a page.
    sites = ", ".join(f'{{name="s{index}"}}' for index in range(16))
    rows = ("--set", "rounds=3", "--set", "training.local_steps=1")
    many = (*rows, "--set", f"sites=[{sites}]", "--set", "data.partition.kind=iid")
    expected = reference(server, place, *many)
    with small_disk(place / "disk") as disk:
        arguments = ("simulate", "job.toml", *many, "--no-report", "--out", "disk/run")
        done = server.run(
            *arguments,
            folder=place,
            misfortune="disk fills up while events are written",
            environment={"DISK": str(disk)},
        )
        assert done.code == 1, done.stderr
        assert "No space left on" in done.stderr
        assert "events.jsonl" in done.stderr
        assert "Traceback" not in done.stderr
        (disk / "filler").unlink()
        resumed = server.run(*arguments, "--resume", folder=place)
        assert resumed.code == 0, resumed.stderr
        assert (disk / "run/model.safetensors").read_bytes() == expected


def test_storage_keys_are_made_and_rotated(server: ForkServer, tmp_path: Path) -> None:
    """A second call adds a key; neither prints one."""
    for count in (1, 2):
        done = server.run("keys", "storage", "keys.toml", "--json", folder=tmp_path)
        facts = json.loads(done.stdout)
        assert (done.code, facts["file"], facts["keys"]) == (0, "keys.toml", count)
        assert "keep a copy" in done.stderr
        for line in (tmp_path / "keys.toml").read_text().splitlines():
            if line.startswith("secret"):
                assert line.split('"')[1] not in done.stdout + done.stderr
    (tmp_path / "keys.toml").chmod(0o644)
    refused = server.run("keys", "storage", "keys.toml", folder=tmp_path)
    assert refused.code == 1
    assert "chmod 600 keys.toml" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_keys_are_made_shown_and_trusted(server: ForkServer, tmp_path: Path) -> None:
    """From nothing to a roster, by the printed public keys alone."""
    roster = {}
    for name in ("office", "left"):
        made = server.run("keys", "new", name, "--json", folder=tmp_path)
        assert made.code == 0, made.stderr
        assert "not encrypted" in made.stderr
        shown = server.run("keys", "show", f"{name}.pem", folder=tmp_path)
        facts = json.loads(made.stdout)
        assert f"public key   {facts['public_key']}\n" in shown.stdout
        assert facts["fingerprint"] in shown.stdout
        assert "PRIVATE" not in made.stdout + made.stderr + shown.stdout
        whose = ("--aggregator",) if name == "office" else ("--site", name)
        key = ("--organisation", "Hospital", "--key", facts["public_key"], "--json")
        done = server.run(*("keys", "trust", "r.toml"), *whose, *key, folder=tmp_path)
        assert done.code == 0, done.stderr
        roster = json.loads(done.stdout)
    assert (roster["serial"], roster["missing"]) == (2, [])
    assert (tmp_path / "left.pem").stat().st_mode & 0o777 == 0o600


def test_doctor_tells_problems_by_its_code(server: ForkServer, tmp_path: Path) -> None:
    """A warning is no problem; nothing is left behind."""
    server.run("keys", "new", "left", folder=tmp_path)
    well = server.run("doctor", "--key", "left.pem", folder=tmp_path)
    assert well.code == 0, well.stdout
    assert "warning  key: left.pem is not encrypted" in well.stdout
    ill = server.run("doctor", "--roster", "none.toml", "--json", folder=tmp_path)
    assert ill.code == 1
    found = json.loads(ill.stdout)
    assert found["problems"] == 1
    assert {c["name"] for c in found["checks"] if c["status"] == "problem"} == {
        "roster"
    }
    assert [path.name for path in tmp_path.iterdir()] == ["left.pem"]


def test_transcript_shows_what_was_in_clear(server: ForkServer, place: Path) -> None:
    """Of a run in the clear: the updates. A used folder is refused."""
    arguments = (
        "simulate",
        "job.toml",
        *FAST,
        "--no-report",
        "--transcript",
        "seen",
        "--out",
    )
    done = server.run(*arguments, "run", folder=place)
    assert done.code == 0, done.stderr
    text = server.run("transcript", "seen", folder=place)
    assert text.code == 0, text.stderr
    assert "000001  to    left  round 1  task train" in text.stdout
    assert "clear   delta_d: 650 float32" in text.stdout
    lead = "readable from sites: "
    [line] = [line for line in text.stdout.splitlines() if line.startswith(lead)]
    assert "delta_d" in line.removeprefix(lead).split(", ")
    rows = json.loads(server.run("transcript", "seen", "--json", folder=place).stdout)
    assert [row["sequence"] for row in rows] == list(range(1, len(rows) + 1))
    one = server.run("transcript", "seen", "--message", "1", folder=place)
    assert one.stdout.startswith("000001  to    left")
    assert "000002" not in one.stdout
    one = server.run("transcript", "seen", "--message", "1", "--json", folder=place)
    assert json.loads(one.stdout) == rows[0]
    none = server.run("transcript", "seen", "--message", "999", folder=place)
    check_refused(none, ["no message 999", f"1 to {len(rows)}"], code=1)
    again = server.run(*arguments, "other", folder=place)
    check_refused(again, ["seen is not empty", "new folder"], code=1)
    assert not (place / "other").exists()
    none = server.run("transcript", "run", folder=place)
    check_refused(none, ["no transcript in run", "--transcript"], code=1)


def test_export_gives_the_model_away(
    server: ForkServer, finished: Path, tmp_path: Path
) -> None:
    """Model, card and job; the digests on standard output are those of the files."""
    target = tmp_path / "given"
    words = ["export", "small", "--to", f"file://{target}"]
    done = server.run(*words, folder=finished)
    assert done.code == 0, done.stderr
    url, *lines = done.stdout.splitlines()
    assert url == f"file://{target}"
    files = [line.split("  ")[1] for line in lines]
    assert files == ["model.safetensors", "job.toml", "README.md"]
    for line in lines:
        digest, name = line.split("  ")
        assert hashlib.sha256((target / name).read_bytes()).hexdigest() == digest
    again = json.loads(server.run(*words, "--json", folder=finished).stdout)
    assert again["bytes_written"] == 0


def test_export_refuses_what_is_no_store(server: ForkServer, finished: Path) -> None:
    """The message names the argument."""
    for url in ("given", "memory://"):
        done = server.run("export", "small", "--to", url, folder=finished)
        check_refused(done, ["--to: "], code=2)


def test_checkpoints_are_listed_and_verified(
    server: ForkServer, finished: Path, tmp_path: Path
) -> None:
    """By the run's name or by a URL; one changed byte is found, and named."""
    place = tmp_path / "copy"
    shutil.copytree(finished, place)
    (run,) = (place / "runs/small").iterdir()
    done = server.run("checkpoints", "small", folder=place)
    assert done.code == 0, done.stderr
    heads, *rows = done.stdout.splitlines()
    assert heads.split() == ["round", "written", "size", "shared", "state"]
    assert [row.split()[0] for row in rows] == ["0", "1", "2"]
    blob = max((run / "checkpoints/blobs").iterdir(), key=lambda p: p.stat().st_mtime)
    content = bytearray(blob.read_bytes())
    content[-1] ^= 1
    blob.write_bytes(content)
    words = ["checkpoints", f"file://{run}"]
    assert server.run(*words, folder=place).code == 0
    done = server.run(*words, "--verify", folder=place)
    assert done.code == 1
    assert "verified" in done.stdout
    assert f"{blob.name} does not have the SHA-256 of its name" in done.stdout


def test_old_checkpoints_are_pruned(
    server: ForkServer, finished: Path, tmp_path: Path
) -> None:
    """The newest stays and can be used; there is always one."""
    place = tmp_path / "copy"
    shutil.copytree(finished, place)
    words = ["checkpoints", "small", "--prune"]
    found = json.loads(server.run(*words, "1", "--json", folder=place).stdout)
    assert [c["round_index"] for c in found["survey"]["checkpoints"]] == [2]
    removed = [f"checkpoints/round-{index:06d}.json" for index in (0, 1)]
    assert found["pruned"]["checkpoints"] == removed
    assert found["survey"]["num_unnamed"] == 0
    assert server.run(*words, "0", folder=place).code == 2
