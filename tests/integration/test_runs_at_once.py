"""Several runs at once at the same sites, by priority and owner, in real processes."""

import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file
from support.deployment import (
    SITES,
    Deployment,
    crossfed_here as crossfed,
    deployed,
    wait_for,
)
from support.programs import needs
from support.slow_models import SECONDS

from deploy.cli import remote_runs
from deploy.wiring.simulation import simulate
from federation.job import job_file
from privacy.dp.ledger.ledger_files import LEDGER_NAME, read_file
from privacy.membership.token import Token

JOBS = Path(__file__).parents[2] / "jobs"
POLICY = """
privacy = "none"
secure_aggregation = false
accept_two_sites = true
max_clip_norm = 100.0
total_epsilon = 1000.0
max_delta = 1e-3
functions = ["support.slow_models:slow_network", "clients.data:digits"]
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.deploy,
    pytest.mark.timeout(600),
    needs("nginx"),
]
_ANEW = {"PYTHONPATH": str(Path(__file__).parents[1])}


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("federation")
    with deployed(folder, POLICY, started=False, environment=_ANEW) as made:
        config = Path(made.config)
        queue = "\n[queue]\nmax_runs = 2\nslice_seconds = 2.0\n"
        queue += 'functions = ["support.slow_models:slow_network"]\n'
        config.write_text(config.read_text() + queue)
        made.end("aggregator")
        made.start_aggregator()
        log = folder / "aggregator.log"
        ready = "the aggregator is ready"
        wait_for(lambda: log.read_text().count(ready) == 2, f"it is ready: {log}")
        for site in SITES:
            path = folder / site / "site.toml"
            path.write_text("max_runs = 2\n" + path.read_text())
            made.start_site(site, **{SECONDS: "0.05"})
        yield made


def job(folder: Path, name: str, **changes: Any) -> Path:
    """A job of one layer, each of whose steps takes a twentieth of a second."""
    head, _, tail = (
        (JOBS / "quickstart.toml").read_text().partition("[privacy.secure_aggregation]")
    )
    model = 'support.slow_models:slow_network"\noptions = { inputs = 64, classes = 10 }'
    head = head.replace('clients.models:digits_cnn"', model)
    text = head + tail[tail.index("[[sites]]") :]
    for key, value in {"name": f'"{name}"', "local_steps": 4, **changes}.items():
        before = next(line for line in text.splitlines() if line.startswith(f"{key} ="))
        text = text.replace(before, f"{key} = {value}")
    path = folder / f"{name}.toml"
    path.write_text(text)
    return path


def submit(federation: Deployment, path: Path, *words: str) -> Path:
    """Submit a job, and return the folder of its run."""
    at = ["--aggregator", federation.config, "--detach", "--json"]
    found = json.loads(crossfed("run", str(path), *at, *words).stdout)
    return Path(found["folder"])


def events(run: Path, *kinds: str) -> list[dict[str, Any]]:
    if not (run / "events.jsonl").exists():
        return []
    lines = (run / "events.jsonl").read_text().split("\n")[:-1]
    found = [json.loads(line) for line in lines]
    return [event for event in found if not kinds or event["event"] in kinds]


def rounds(run: Path) -> list[float]:
    """When rounds have ended."""
    return [event["at"] for event in events(run, "RoundFinished")]


def finished(*runs: Path) -> None:
    for run in runs:
        wait_for((run / "outcome.json").exists, f"the end of {run}")
        assert json.loads((run / "outcome.json").read_text())["code"] == 0


def ps(federation: Deployment) -> dict[str, dict[str, Any]]:
    rows = json.loads(
        crossfed("ps", "--aggregator", federation.config, "--json").stdout
    )
    return {row["run"]: row for row in rows}


def same_as_simulated(run: Path, path: Path, *settings: str) -> None:
    found = load_file(run / "model.safetensors")
    expected = simulate(job_file.load(path, list(settings)), folder=None).weights
    for name, values in expected.items():
        assert found[name].tobytes() == values.tobytes(), name


def test_two_runs_are_at_work_at_once_and_a_third_waits(
    federation: Deployment, tmp_path: Path
):
    """Each has the model that it has alone, bit for bit."""
    paths = [job(tmp_path, f"job{n}", seed=n, rounds=8) for n in (1, 2, 3)]
    one, two, three = (submit(federation, path) for path in paths)
    wait_for(lambda: len(rounds(one)) > 1 and len(rounds(two)) > 1, "both work")
    row = ps(federation)[three.name]
    assert (row["status"], row["owner"]) == ("waiting", "operator")
    assert row["waits"].startswith("a slot at aws-us-east-1, gcp-us-central1 (runs ")
    assert row["starts_in_seconds"] > 0
    finished(one, two, three)
    assert rounds(one)[0] < rounds(two)[-1]
    assert rounds(two)[0] < rounds(one)[-1]
    for run, path in zip((one, two, three), paths, strict=True):
        same_as_simulated(run, path)


@pytest.mark.long
def test_a_higher_priority_takes_its_turn_after_a_round(
    federation: Deployment, tmp_path: Path
):
    """The run that makes way continues from its checkpoint, to the same model."""
    low = [job(tmp_path, f"low{n}", rounds=10) for n in (1, 2)]
    first, second = (submit(federation, path) for path in low)
    wait_for(lambda: len(rounds(first)) > 1 and len(rounds(second)) > 1, "they work")
    urgent = submit(federation, job(tmp_path, "urgent", rounds=2), "--priority", "2")
    finished(urgent)
    assert len(rounds(first)) < 10 or len(rounds(second)) < 10
    finished(first, second)
    starts = [len(events(run, "RunStarted")) for run in (first, second)]
    assert sorted(starts) == [1, 2]
    for run, path in zip((first, second), low, strict=True):
        assert len(rounds(run)) == 10
        same_as_simulated(run, path)


def test_whatever_is_killed_with_two_runs_both_go_on(
    federation: Deployment, tmp_path: Path
):
    """The aggregator, and then a site."""
    paths = [job(tmp_path, f"killed{n}", seed=n, rounds=8) for n in (1, 2)]
    runs = [submit(federation, path) for path in paths]
    wait_for(lambda: all(len(rounds(run)) > 2 for run in runs), "they work")
    federation.kill("aggregator")
    federation.start_aggregator()
    before = [len(rounds(run)) for run in runs]
    wait_for(
        lambda: all(len(rounds(r)) > n for r, n in zip(runs, before, strict=True)),
        "they go on",
    )
    federation.kill(SITES[0])
    federation.start_site(SITES[0], **{SECONDS: "0.05"})
    finished(*runs)


PRIVATE = (
    "privacy.differential_privacy.unit='record'",
    "privacy.differential_privacy.target_epsilon=4.0",
    "privacy.differential_privacy.clip_norm=1.0",
    "aggregation.weights='uniform'",
    "training.optimizer={name='sgd', lr=0.1}",
)


def test_private_runs_at_once_keep_their_ledgers(
    federation: Deployment, tmp_path: Path
):
    """Each has its own, and the memory of the site counts both."""
    settings = [word for setting in PRIVATE for word in ("--set", setting)]
    paths = [job(tmp_path, f"private{n}", seed=n, rounds=4) for n in (1, 2)]
    runs = [submit(federation, path, *settings) for path in paths]
    finished(*runs)
    assert rounds(runs[0])[0] < rounds(runs[1])[-1]
    assert rounds(runs[1])[0] < rounds(runs[0])[-1]
    for site in SITES:
        folder = federation.folder / site
        memory = json.loads((folder / "memory" / "ledgers.json").read_text())["body"]
        known = memory["datasets"]["records"]["runs"]
        for run in runs:
            ledger = read_file(
                folder / "runs" / run.name / "sites" / site / LEDGER_NAME
            )
            assert {c.round_index for c in ledger.charges} >= {1, 2, 3, 4}
            steps = sum(charge.event.steps for charge in ledger.charges)
            assert steps == sum(event[3] for event in known[run.name]["events"])


def test_an_owner_elsewhere_has_its_own_runs(
    federation: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Through the proxy, with a token; without a valid one nothing is learned."""
    owners = ["aggregator", "owners"]
    config = ["--config", federation.config]
    tokens = {}
    for name in ("ann", "bob"):
        tokens[name] = crossfed(*owners, "add", name, *config).stdout.strip()
    at = ["--aggregator", f"https://127.0.0.1:{federation.port}"]
    monkeypatch.setenv(remote_runs.TOKEN, tokens["ann"])
    path = job(tmp_path, "remote", rounds=3)
    name = crossfed("run", str(path), *at, "--detach").stdout.strip()
    assert crossfed("watch", name, *at).stdout == f"run {name} completed\n"
    log = crossfed("logs", name, *at, "--json").stdout.splitlines()
    (run,) = (federation.folder / "aggregator" / "runs").glob(f"remote/{name}")
    assert log == (run / "events.jsonl").read_text().splitlines()
    same_as_simulated(run, path)
    assert ps(federation)[name]["owner"] == "ann"
    monkeypatch.setenv(remote_runs.TOKEN, tokens["bob"])
    assert json.loads(crossfed("ps", *at, "--json").stdout) == []
    nothing = crossfed("watch", name, *at, code=1).stderr
    assert f"you have no run {name!r}" in nothing
    crossfed(*owners, "revoke", "bob", *config)
    forged = Token.parse(tokens["bob"])
    forged = replace(forged, secret=bytes(32))
    told = set()
    for token in (tokens["bob"], forged.text):
        monkeypatch.setenv(remote_runs.TOKEN, token)
        told |= {crossfed(verb, *at, code=1).stderr for verb in ("ps",)}
        told |= {crossfed("stop", name, *at, code=1).stderr}
    assert len(told) == 1
    assert "unknown or revoked" in told.pop()


@pytest.mark.long
def test_a_coordinator_that_stands_still_frees_its_sites_within_a_deadline(
    federation: Deployment, tmp_path: Path
):
    """It goes on when it may, from its checkpoint."""
    lengths = ((1, 40), (2, 4000), (3, 40))
    paths = [job(tmp_path, f"still{n}", seed=n, rounds=r) for n, r in lengths]
    short = ["--set", "schedule.round_deadline_seconds=6.0"]
    still = submit(federation, paths[0], *short)
    wait_for(lambda: len(rounds(still)) > 1, "it works")
    (frozen,) = federation.children("coordinator_process")
    other, waits = (submit(federation, path, *short) for path in paths[1:])
    wait_for(lambda: len(rounds(other)) > 1, "the other works")
    assert not rounds(waits)
    os.kill(frozen, signal.SIGSTOP)
    try:
        stood = time.time()
        wait_for(lambda: bool(rounds(waits)), "the third works")
        assert not (other / "outcome.json").exists()
        assert time.time() - stood < 6.0 + 30.0 + 30.0  # Deadline, margin, its start.
    finally:
        os.kill(frozen, signal.SIGCONT)
    finished(still, waits)
    assert len(rounds(still)) >= 40
    crossfed("stop", other.name, "--aggregator", federation.config)
    wait_for((other / "outcome.json").exists, "the other is stopped")
