"""Real processes of different speed: none waits for the others longer than need be."""

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from subprocess import Popen

import pytest
from support import slow_models
from support.deployment import SITES, Deployment, deployed, descendants, wait_for
from support.forked import Forked
from support.programs import needs

# `make test` has the same in one process: test_unequal_sites.py.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.deploy,
    pytest.mark.timeout(600),
    needs("nginx"),
]

Follower = Popen[str] | Forked
ALL = ("aws-eu-west-1", *SITES)
SLOW = ALL[0]
# Of a step, beside which messages and the work of a small model take little.
STEP_SECONDS, TIMES_SLOWER = 0.05, 4
STEPS = 12
POLICY = """
privacy = "none"
secure_aggregation = false
functions = ["support.slow_models:*", "clients.data:*"]
"""
JOB = f"""
name = "unequal"
evaluation = {{ every = 0 }}
training = {{ local_steps = {STEPS}, batch_size = 8, optimizer = {{ lr = 0.1 }} }}
data = {{ source = "clients.data:digits" }}
[model]
factory = "support.slow_models:slow_network"
options = {{ inputs = 64, classes = 10 }}
"""


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Three sites, one of which is slower."""
    environment = {"PYTHONPATH": str(Path(__file__).parents[1])}
    folder = tmp_path_factory.mktemp("federation")
    with deployed(
        folder, POLICY, sites=ALL, environment=environment, started=False
    ) as made:
        for site in ALL:
            seconds = STEP_SECONDS * (TIMES_SLOWER if site == SLOW else 1)
            made.start_site(site, **{slow_models.SECONDS: str(seconds)})
        yield made


def begun(federation: Deployment, folder: Path, *settings: str) -> Follower:
    """A run of all sites that has begun."""
    job, earlier = folder / "job.toml", federation.num_runs()
    job.write_text(JOB + "".join(f'[[sites]]\nname = "{site}"\n' for site in ALL))
    follower = federation.run(job, *settings)
    wait_for(lambda: federation.num_runs() > earlier, "the run begins")
    return follower


def finish(follower: Follower) -> dict[str, object]:
    out, err = follower.communicate(timeout=400)
    assert follower.returncode == 0, err
    return dict(json.loads(out))


def test_slow_site_takes_fewer_steps_and_ends_with_the_others(
    federation: Deployment, tmp_path: Path
):
    rounds = 8
    settings = (f"rounds={rounds}", 'schedule.allocation="capacity"')
    result = finish(begun(federation, tmp_path, *settings))
    assert (result["status"], result["rounds_completed"]) == ("completed", rounds)
    answers = federation.events("SiteAnswered")
    first = {a["num_steps"] for a in answers if a["round_index"] == 1}
    assert first == {STEPS // 4}
    later = [a for a in answers if a["round_index"] > 4]

    def usual(site: str, key: str) -> float:
        return median(a[key] for a in later if a["site"] == site)

    # 36 steps a round at speeds 1, 4 and 4.
    assert usual(SLOW, "num_steps") <= STEPS / 2
    for site in SITES:
        assert usual(site, "num_steps") > STEPS
    steps = Counter[int]()
    for answer in later:
        steps[answer["round_index"]] += answer["num_steps"]
    assert {*steps.values()} == {STEPS * len(ALL)}


def test_frozen_site_of_a_buffered_run_holds_up_nobody_and_counts_when_it_is_back(
    federation: Deployment, tmp_path: Path
):
    """The slowest one, of which the first model is asked before the others."""
    settings = (
        "rounds=40",
        'schedule.mode="buffered"',
        "schedule.buffer_size=1",
        "schedule.max_staleness=40",
    )
    follower = begun(federation, tmp_path, *settings)

    def answers() -> int:
        return sum(a["site"] == SLOW for a in federation.events("SiteAnswered"))

    wait_for(lambda: bool(federation.events("RoundStarted")), "work begins")
    agent = federation.processes[SLOW].pid
    processes = [agent, *descendants(agent)]
    for pid in processes:
        os.kill(pid, signal.SIGSTOP)
    try:
        known, before = answers(), federation.rounds()
        wait_for(lambda: federation.rounds() >= before + 8, "the others go on")
        assert answers() <= known + 1  # One may have been on its way.
    finally:
        for pid in processes:
            os.kill(pid, signal.SIGCONT)
    wait_for(lambda: answers() > known + 1, f"{SLOW} is back")
    result = finish(follower)
    assert (result["status"], result["rounds_completed"]) == ("completed", 40)
    # Of the task that is open when the last model is made.
    assert {f["kind"] for f in federation.events("SiteFailed")} <= {"surplus"}
    stale = [a for a in federation.events("SiteAnswered") if a["site"] == SLOW]
    assert max(a["staleness"] for a in stale) >= 7
