"""``--json`` of every verb, and output without colours."""

import argparse
import json
import warnings
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from support import event_samples
from support.enrolments import Federation
from support.small_jobs import small_job

from deploy.aggregator_host import run_queue
from deploy.cli import commands, terminal
from federation.event_log import EventWriter
from monitoring.runs.run_folder import RunFolder

TESTS = Path(__file__).parents[2]
AT = "--aggregator aggregator/aggregator.toml"
CONFIG = "--config aggregator/aggregator.toml"

# Run here, all in one folder.
HERE = {
    "new": "fresh",
    "keys new": "mine",
    "keys show": "known.pem",
    "keys storage": "store.toml",
    "runs": "",
    "aggregator init": "other --host localhost --listen 127.0.0.1:8443 --no-proxy",
    "aggregator invite": f"site-9 --address fed.example.org:443 {CONFIG}",
    "aggregator sites": CONFIG,
    "aggregator revoke": f"site-0 {CONFIG}",
    "aggregator owners add": f"ann --weight 2 {CONFIG}",
    "run": f"job.toml --detach {AT}",
    "ps": AT,
    "stop": f"small {AT}",
}
# Those that train, or need services: the test that has verb and option.
ELSEWHERE = {
    "simulate": "integration/test_cli.py",
    "check-job": "integration/test_cli.py",
    "baselines": "integration/test_baselines.py",
    "evaluate": "integration/test_evaluation_runs.py",
    "find-rate": "unit/deploy/test_find_rate.py",
    "stats": "integration/test_statistics.py",
    "report": "integration/test_cli.py",
    "audit": "integration/test_audit.py",
    "tune": "integration/test_tune.py",
    "transcript": "integration/test_cli.py",
    "export": "integration/test_cli.py",
    "audit-log": "unit/deploy/test_audit_log.py",
    "verify": "unit/deploy/test_export_signature.py",
    "prune": "integration/test_pruning.py",
    "predict": "integration/test_predict.py",
    "site status": "unit/deploy/test_enrolment_verbs.py",
    "aggregator page": "integration/test_aggregator_host.py",
    "site model": "unit/deploy/test_site_model.py",
    "checkpoints": "integration/test_cli.py",
    "doctor": "integration/test_cli.py",
    "keys trust": "integration/test_cli.py",
    "ledger": "unit/deploy/test_ledger.py",
    "data balance": "integration/test_balance.py",
    "data info": "integration/test_data_in_store.py",
    "aggregator owners list": "unit/deploy/test_owner_service.py",
    "aggregator owners revoke": "unit/deploy/test_owner_service.py",
    "enroll": "unit/deploy/test_enrolment_verbs.py",
    "export-metrics": "unit/monitoring/test_trackers.py",
    "storage rewrap": "unit/deploy/test_rewrap.py",
    "storage decrypt": "unit/deploy/test_rewrap.py",
    "plan": "integration/test_fleet.py",
    "up": "integration/test_fleet.py",
    "nodes": "integration/test_fleet.py",
    "down": "integration/test_fleet.py",
}
# Results of one function with a verb above, as JSON or not.
AS_THE_OTHER = {
    "data shard": "data info",
    "watch": "run",
}
# What each of them prints in place of a result.
NO_RESULT = {
    "aggregator up": "a service, which logs to standard error until it is ended",
    "site up": "a service, which logs to standard error until it is ended",
    "site relay": "a service, which logs to standard error until it is ended",
    "logs": "the lines of events.jsonl, which are JSON",
    "completion": "a script for a shell",
}


def verbs(parser: argparse.ArgumentParser, outer: str = "") -> Iterator[str]:
    """Every verb that takes ``--json``; one inside another has both names."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, verb in action.choices.items():
                if any("--json" in each.option_strings for each in verb._actions):
                    yield f"{outer}{name}"
                yield from verbs(verb, f"{outer}{name} ")


def test_every_verb_is_in_one_table():
    tables = [{*HERE}, {*ELSEWHERE}, {*AS_THE_OTHER}, {*NO_RESULT}]
    assert sorted(verbs(commands._parser())) == sorted(
        name for table in tables for name in table
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An aggregator with a site and a waiting run, a key, a job and a past run."""
    federation = Federation(folder=tmp_path)
    federation.site("site-0")
    (federation.aggregator / "aggregator.toml").write_text('hosts = ["127.0.0.1"]\n')
    monkeypatch.chdir(tmp_path)
    run = RunFolder(federation.aggregator / "runs/small/20260102-030405-abcdef")
    run_queue.submit(small_job(), run, at=0.0)
    (tmp_path / "job.toml").write_text(run.read_job())
    past = RunFolder(tmp_path / "runs/two-clouds-quickstart/20260102-030405-abcdef")
    with EventWriter(past.events) as write:
        for event in event_samples.two_sites():
            write(event)
    assert commands.main(["keys", "new", "known"]) == 0
    return tmp_path


@pytest.mark.parametrize("verb", HERE)
def test_a_result_is_json_where_it_is_asked_for(
    verb: str, folder: Path, capsys: pytest.CaptureFixture[str]
):
    """All of standard output is one document, and without colours in a pipe."""
    if verb in {"aggregator init", "aggregator revoke"}:
        pytest.importorskip("flwr")
    capsys.readouterr()
    arguments = [*verb.split(), *HERE[verb].split(), "--json"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Those of libraries, as for a user.
        assert commands.main(arguments) == 0, folder
    out, err = capsys.readouterr()
    assert json.loads(out)
    assert "\x1b" not in out + err


def test_the_named_test_asks_for_json():
    for verb, name in ELSEWHERE.items():
        text = (TESTS / name).read_text()
        assert all(f'"{word}"' in text for word in ["--json", *verb.split()]), verb


def test_the_name_of_a_run_stays_in_one_line(monkeypatch: pytest.MonkeyPatch):
    """On a narrow terminal, too, so that it can be copied."""
    shown = StringIO()
    narrow = Console(file=shown, width=60)
    monkeypatch.setattr(terminal, "console", lambda: narrow)
    name = "20260102-030405-abcdef"
    row = (name, "my-federation", "completed", f"runs/{name}")
    terminal.say_table(("run", "job", "status", "folder"), [row])
    assert name in shown.getvalue().splitlines()[1]
