"""The command line as its users meet it: verbs, options, streams, codes, messages."""

import argparse
import contextlib
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
