"""Real processes whose updates are summed with whoever is ready."""

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from subprocess import Popen
from typing import Any

import pytest
from support import slow_models
from support.deployment import Deployment, deployed, descendants, wait_for
from support.forked import Forked
from support.programs import needs

# `make test` has cohorts of threads and in virtual time: test_free_cohorts.py.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.deploy,
    pytest.mark.timeout(600),
    needs("nginx"),
]

SITES = ("site-a", "site-b", "site-c", "site-d")
SECONDS = dict(zip(SITES, (0.4, 0.5, 0.6, 1.2), strict=True))  # Of a step.
SIZE, ROUNDS = 2, 30
POLICY = """
total_epsilon = 100.0
functions = ["support.slow_models:*", "clients.data:*"]
"""
JOB = f"""
name = "cohorts"
rounds = {ROUNDS}
evaluation = {{ every = 0 }}
training = {{ local_steps = 2, batch_size = 8, optimizer = {{ lr = 0.1 }} }}
data = {{ source = "clients.data:digits" }}
aggregation = {{ weights = "uniform" }}
[model]
factory = "support.slow_models:slow_network"
options = {{ inputs = 64, classes = 10 }}
[schedule]
mode = "buffered"
buffer_size = {SIZE}
max_staleness = 50
[privacy]
secure_aggregation = {{ enabled = true }}
differential_privacy = {{ unit = "record", target_epsilon = 8.0, clip_norm = 1.0 }}
""" + "".join(f'[[sites]]\nname = "{site}"\n' for site in SITES)


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Four sites, each with a speed of its own, and the usual policy."""
    environment = {"PYTHONPATH": str(Path(__file__).parents[1])}
    folder = tmp_path_factory.mktemp("federation")
    with deployed(
        folder, POLICY, sites=SITES, environment=environment, started=False
    ) as made:
        for site in SITES:
            start(made, site)
        yield made


def start(federation: Deployment, site: str) -> None:
    federation.start_site(site, **{slow_models.SECONDS: str(SECONDS[site])})


def begun(federation: Deployment, folder: Path) -> Popen[str] | Forked:
    job, earlier = folder / "job.toml", federation.num_runs()
    job.write_text(JOB)
    follower = federation.run(job)
    wait_for(lambda: federation.num_runs() > earlier, "the run begins", 60)
    return follower


def result_of(follower: Popen[str] | Forked) -> dict[str, Any]:
    out, err = follower.communicate(timeout=400)
    assert follower.returncode == 0, err
    return dict(json.loads(out))


def cohorts(federation: Deployment) -> set[tuple[str, ...]]:
    """Whoever made keys together."""
    steps = federation.events("StepTaken")
    made = [step["sites"] for step in steps if step["step"] == "confirm"]
    return {tuple(sorted(sites)) for sites in made if len(sites) == SIZE}


def check_counted_once(federation: Deployment, lost: int) -> None:
    """Each task of a site counts once; its ledger has few charges for any others."""
    answers = federation.events("SiteAnswered")
    began = [(a["site"], a["round_index"] - a["staleness"]) for a in answers]
    assert len({*began}) == len(began)
    counts = Counter(answer["site"] for answer in answers)
    for site in SITES:
        charged = max(
            a["spent"]["anchor"]["train"] for a in answers if a["site"] == site
        )
        assert counts[site] <= charged <= counts[site] + lost


def test_frozen_site_costs_the_others_nothing(federation: Deployment, tmp_path: Path):
    """Wherever it is frozen: in training, or in a cohort of which it is one."""
    follower = begun(federation, tmp_path)
    wait_for(lambda: federation.rounds() >= 4, "models are made")
    agent = federation.processes["site-d"].pid
    processes = [agent, *descendants(agent)]
    for pid in processes:
        os.kill(pid, signal.SIGSTOP)
    try:
        before = federation.rounds()
        wait_for(lambda: federation.rounds() >= before + 8, "others go on", 60)
    finally:
        for pid in processes:
            os.kill(pid, signal.SIGCONT)
    result = result_of(follower)
    assert (result["status"], result["rounds_completed"]) == ("completed", ROUNDS)
    assert len(cohorts(federation)) >= 4
    took = [r["seconds"] for r in federation.events("RoundFinished")][4:]
    assert max(took) < 5 * median(took)
    check_counted_once(federation, lost=2)


def test_killed_aggregator_and_sites_lose_no_update_that_counted(
    federation: Deployment, tmp_path: Path
):
    """A kill costs a site what it trains, and what its cohort was at."""
    follower = begun(federation, tmp_path)
    wait_for(lambda: federation.rounds() >= 5, "models are made")
    federation.kill_child("coordinator_process")
    known = federation.rounds()
    wait_for(lambda: federation.rounds() >= known + 4, "a new one goes on")
    federation.kill("site-b")
    known = federation.rounds()
    wait_for(lambda: federation.rounds() >= known + 4, "the others go on")
    start(federation, "site-b")
    after = len(federation.events("SiteAnswered"))
    wait_for(
        lambda: any(
            answer["site"] == "site-b"
            for answer in federation.events("SiteAnswered")[after:]
        ),
        "the site is back in the sums",
    )
    result = result_of(follower)
    assert result["status"] == "completed"
    assert result["rounds_completed"] >= ROUNDS - 2
    check_counted_once(federation, lost=4)  # Two for each kill.
