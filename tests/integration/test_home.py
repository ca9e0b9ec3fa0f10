"""A site whose machine is lost, and one that takes over: real processes, one home."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.deployment import SITES, Deployment, crossfed, deployed, wait_for
from support.programs import needs

from cloud_adapters.keys.key_file import add_key
from privacy.dp.accountant import epsilon
from privacy.dp.events import PrivacyEvent
from privacy.dp.mechanism import SLACK

JOBS = Path(__file__).parents[2] / "jobs"
POLICY = """
privacy = "none"
secure_aggregation = false
accept_two_sites = true
max_clip_norm = 100.0
total_epsilon = 1000.0
"""
SITE = SITES[0]
ROUNDS = 8
# A store on this machine answers in milliseconds.
LEASE_SECONDS = 2

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,  # Flower forgets a dead node after 20 s; see test_home_agents.
    pytest.mark.deploy,
    pytest.mark.timeout(600),
    needs("nginx"),
]


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Deployment]:
    """One of its sites has a home."""
    folder = tmp_path
    with deployed(folder, POLICY) as made:
        made.end(SITE)
        add_key(folder / "home.key")
        with (folder / SITE / "site.toml").open("a") as file:
            file.write(
                f'\n[home]\nurl = "file://{folder}/home"\n'
                f"lease_seconds = {LEASE_SECONDS}\n"
                f'encryption = {{ key = "file:{folder}/home.key" }}\n'
            )
        made.start_site(SITE)
        holds(made, SITE)
        yield made


def log(federation: Deployment, name: str) -> str:
    return (federation.folder / f"{name}.log").read_text()


def holds(federation: Deployment, name: str) -> None:
    wait_for(lambda: "holds the home" in log(federation, name), f"{name} takes over")


def new_machine(federation: Deployment, name: str) -> None:
    """Start the site in a folder that holds what an operator gives a machine."""
    folder = federation.folder / name
    folder.mkdir(mode=0o700)
    shutil.copy(federation.folder / SITE / "site.toml", folder)
    federation.start_site(name)


def failures(federation: Deployment) -> set[int]:
    """The rounds that a site failed in."""
    failed = [e for e in federation.events() if e["event"] == "SiteFailed"]
    return {event["round_index"] for event in failed}


def spent(federation: Deployment, name: str) -> dict[str, object]:
    """What a ledger says, checked with the site's key."""
    run = federation.events()[0]["run_id"]
    config = str(federation.folder / name / "site.toml")
    out = crossfed("ledger", run, "--config", config, "--json").stdout
    (found,) = json.loads(out)["ledgers"]
    assert found["sound"]
    return dict(found["spent"]["train"])


def test_machine_that_was_paused_ends_and_disturbs_nobody(federation: Deployment):
    """It wakes up in a run that its successor takes part in."""
    earlier = federation.num_runs()
    process = federation.run(JOBS / "private.toml", f"rounds={ROUNDS}")
    wait_for(lambda: federation.num_runs() > earlier, "the run begins")
    wait_for(lambda: federation.rounds() > 1, "rounds end")
    paused = federation.processes.pop(SITE)
    os.kill(paused.pid, signal.SIGSTOP)
    try:
        new_machine(federation, "second")
        connected = "connected to"
        wait_for(lambda: connected in log(federation, "second"), "it is connected")
        before = federation.rounds("completed")
        wait_for(lambda: federation.rounds("completed") > before, "rounds end")
        failed = failures(federation)
    finally:
        os.kill(paused.pid, signal.SIGCONT)
    assert paused.wait(30) == 1
    assert "another process holds" in log(federation, SITE)
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    assert json.loads(out)["status"] == "completed"
    assert log(federation, "second").count(connected) == 1
    # It took no task of its successor's, and did not end its node.
    assert failures(federation) == failed


def test_killed_machine_is_replaced_within_a_round(federation: Deployment):
    """The run is the same one, and what is charged is what an undisturbed run costs."""
    earlier = federation.num_runs()
    process = federation.run(JOBS / "private.toml", f"rounds={ROUNDS}")
    wait_for(lambda: federation.num_runs() > earlier, "the run begins")
    wait_for(lambda: federation.rounds() > 1, "rounds end")
    federation.kill(SITE)
    new_machine(federation, "second")
    shutil.rmtree(federation.folder / SITE)
    holds(federation, "second")
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    result = json.loads(out)
    assert result["status"] == "completed"
    assert result["rounds_completed"] >= ROUNDS - 1
    events = federation.events()
    (planned,) = (event for event in events if event["event"] == "PrivacyPlanned")
    here, there = spent(federation, "second"), spent(federation, SITES[1])
    # The other site was charged for the lost round, in which this one may have died
    # before its charge.
    assert here["charges"] in {there["charges"], int(str(there["charges"])) - 1}
    for name, found in ((SITE, here), (SITES[1], there)):
        (own,) = (each for each in planned["sites"] if each["site"] == name)
        a_round = PrivacyEvent(
            noise_multiplier=own["noise_multiplier"],
            sampling_rate=own["sampling_rate"],
            steps=own["steps_per_round"],
            slack=SLACK,
        )
        rounds = [a_round] * int(str(found["charges"]))
        assert found["epsilon"] == epsilon(rounds, own["delta"]), name
