"""Real processes: sites of different speed, one that fails, and one that is frozen."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.deployment import Deployment, deployed, wait_for
from support.programs import needs

pytestmark = [
    pytest.mark.long,
    pytest.mark.deploy,
    pytest.mark.timeout(900),
    needs("nginx"),
]

SPEED = dict(zip("abcd", (1, 1, 2, 4), strict=True))
STEP, STEPS = 0.8, 24  # Seconds of a step at the slowest; their mean number.
POLICY = """
privacy = "none"
secure_aggregation = false
accept_two_sites = true
functions = ["./work.py:net", "clients.data:*"]
"""
WORK = """
import os
import random
import time

import torch

PACE, FAILS = (float(os.environ.get(name, "0")) for name in ("PACE", "FAILS"))
DRAW = random.Random(5)


class Slow(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one = torch.nn.Linear(64, 10)

    def forward(self, x):
        if self.training and PACE:
            time.sleep(PACE)
            if DRAW.random() < FAILS:
                raise RuntimeError("rehearsed failure")
        return self.one(x.flatten(1))


def net():
    return Slow()
"""
JOB = """
name = "{name}"
rounds = {rounds}

[model]
factory = "./work.py:net"

[data]
source = "clients.data:digits"

[training]
local_steps = {steps}
batch_size = 8
optimizer = {{ lr = 0.05 }}

[aggregation]
weights = "uniform"

[evaluation]
every = 0

[schedule]
{schedule}
"""


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("samples")
    with deployed(folder, POLICY, sites=[*SPEED], started=False) as made:
        for place in (folder / "aggregator", *(folder / site for site in SPEED)):
            (place / "work.py").write_text(WORK)
        for site, speed in SPEED.items():
            # A failure in a fifth of the rounds, of 24 steps each.
            fails = "0.009" if site == "c" else "0"
            made.start_site(site, PACE=str(STEP / speed), FAILS=fails)
        yield made


def write(folder: Path, name: str, rounds: int, schedule: str, steps: int) -> Path:
    (folder / "work.py").write_text(WORK)
    job = folder / "job.toml"
    text = JOB.format(name=name, rounds=rounds, schedule=schedule, steps=steps)
    job.write_text(text + "".join(f'\n[[sites]]\nname = "{s}"\n' for s in SPEED))
    return job


def test_most_of_the_possible_steps_count(federation: Deployment, tmp_path: Path):
    """Of those that the sites could take that did not fail; from the first round on."""
    schedule = 'allocation = "capacity"\nminimum_sites = 3\ngrace = 0.25'
    job = write(tmp_path, "goodput", 10, schedule, STEPS)
    out, err = federation.run(job).communicate(timeout=600)
    assert json.loads(out)["status"] == "completed", err
    possible = counted = 0.0
    for event in federation.events("RoundFinished"):
        working = sum(SPEED.values()) - SPEED["c"] * ("c" not in event["answered"])
        possible += event["seconds"] * working / STEP
    for event in federation.events("SiteAnswered"):
        counted += event["num_steps"]
    assert counted >= 0.88 * possible


def test_learnt_deadlines_count_slow_sites_and_wait_for_no_frozen_one(
    federation: Deployment, tmp_path: Path
):
    """One of the two slowest, which are late wherever two answers set the pace."""
    job = write(tmp_path, "learnt", 16, 'minimum_sites = 2\ngrace = "learnt"', 4)
    earlier = federation.num_runs()
    follower = federation.run(job)
    wait_for(lambda: federation.num_runs() > earlier, "the run begins")
    wait_for(lambda: federation.rounds() > 4, "four rounds are finished")
    frozen = federation.processes["a"].pid
    os.kill(frozen, signal.SIGSTOP)
    try:
        done = federation.rounds()
        wait_for(lambda: federation.rounds() > done + 3, "rounds go on")
    finally:
        os.kill(frozen, signal.SIGCONT)
    out, err = follower.communicate(timeout=300)
    assert json.loads(out)["status"] == "completed", err
    rounds = {e["round_index"]: e for e in federation.events("RoundFinished")}
    assert {"a", "b"} <= {*rounds[2]["answered"]} & {*rounds[3]["answered"]}
    assert all("b" in each["answered"] for each in rounds.values())
    usual = rounds[3]["seconds"]
    for index in (done + 1, done + 2, done + 3):
        assert rounds[index]["seconds"] < 2.5 * usual
    assert "a" not in rounds[done + 2]["answered"]
    assert "a" in rounds[16]["answered"], "it is counted again"


def test_over_selection_goes_on_without_a_frozen_site_and_after_a_kill(
    federation: Deployment, tmp_path: Path
):
    schedule = "sites_per_round = 2\nover_selection = 2.0\nround_deadline_seconds = 300"
    job = write(tmp_path, "surplus", 12, schedule, 2)
    earlier = federation.num_runs()
    frozen = federation.processes["d"].pid  # The fastest, which would always count.
    follower = federation.run(job)
    wait_for(lambda: federation.num_runs() > earlier, "the run begins")
    wait_for(lambda: federation.rounds() > 1, "two rounds are finished")
    os.kill(frozen, signal.SIGSTOP)
    try:
        done = federation.rounds()
        wait_for(lambda: federation.rounds() > done + 1, "rounds go on")
        federation.kill_child("coordinator_process")
        done = federation.rounds()
        wait_for(lambda: federation.rounds() > done + 1, "the quorum goes on", 90)
    finally:
        os.kill(frozen, signal.SIGCONT)
    out, err = follower.communicate(timeout=300)
    assert json.loads(out)["status"] == "completed", err
    rounds = {e["round_index"]: e for e in federation.events("RoundFinished")}
    assert len(rounds) == 12
    assert any("d" in rounds[late]["answered"] for late in (10, 11, 12))
    # Those that arrive with the second one count, too.
    assert {len(e["answered"]) for e in rounds.values()} <= {2, 3, 4}
    kinds = {e["kind"] for e in federation.events("SiteFailed")}
    assert "deadline" not in kinds, "nobody is late whom nobody waits for"
    assert "surplus" in kinds
