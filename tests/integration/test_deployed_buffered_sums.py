"""Real processes in two groups, whose secure sums make models at their own pace."""

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

# `make test` has groups of threads: test_buffered_sums.py, test_cohorts.py.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.deploy,
    pytest.mark.timeout(600),
    needs("nginx"),
]

FAST, SLOW = ("site-a", "site-b", "site-c"), ("site-d", "site-e", "site-f", "site-g")
# Of a step, beside which messages and the work of a small model take little.
STEP_SECONDS, TIMES_SLOWER, STEPS = 0.05, 4, 12
POLICY = """
privacy = "none"
min_sites = 3
min_group = 3
accept_dropouts = true
functions = ["support.slow_models:*", "clients.data:*"]
"""
JOB = f"""
name = "groups"
evaluation = {{ every = 0 }}
training = {{ local_steps = {STEPS}, batch_size = 8, optimizer = {{ lr = 0.1 }} }}
data = {{ source = "clients.data:digits" }}
aggregation = {{ weights = "uniform" }}
privacy = {{ secure_aggregation = {{ enabled = true }} }}
[model]
factory = "support.slow_models:slow_network"
options = {{ inputs = 64, classes = 10 }}
[schedule]
mode = "buffered"
max_staleness = 50
"""


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Three fast sites and four slow ones."""
    environment = {"PYTHONPATH": str(Path(__file__).parents[1])}
    folder = tmp_path_factory.mktemp("federation")
    with deployed(
        folder, POLICY, sites=FAST + SLOW, environment=environment, started=False
    ) as made:
        for site in FAST + SLOW:
            seconds = STEP_SECONDS * (TIMES_SLOWER if site in SLOW else 1)
            made.start_site(site, **{slow_models.SECONDS: str(seconds)})
        yield made


def begun(
    federation: Deployment,
    folder: Path,
    rounds: int,
    *groups: tuple[str, ...],
    secure: str = "",
) -> Popen[str] | Forked:
    """A run of these groups."""
    job, earlier = folder / "job.toml", federation.num_runs()
    named = json.dumps([*map(list, groups)])
    sites = sorted(site for group in groups for site in group)
    tables = "".join(f'[[sites]]\nname = "{site}"\n' for site in sites)
    job.write_text(f"{JOB}groups = {named}\n{tables}")
    more = (f"privacy.secure_aggregation.{secure}",) if secure else ()
    follower = federation.run(job, f"rounds={rounds}", *more)
    if groups == (FAST, SLOW):
        wait_for(lambda: federation.num_runs() > earlier, "the run begins")
    return follower


def result_of(follower: Popen[str] | Forked) -> dict[str, Any]:
    out, err = follower.communicate(timeout=400)
    assert follower.returncode == 0, err
    return dict(json.loads(out))


def answers(federation: Deployment) -> Counter[str]:
    return Counter(a["site"] for a in federation.events("SiteAnswered"))


def failures(federation: Deployment) -> set[str]:
    return {failed["kind"] for failed in federation.events("SiteFailed")}


def test_frozen_site_holds_up_its_own_group_alone(
    federation: Deployment, tmp_path: Path
):
    """Also once it counts as lost: its task and its keys are nobody else's."""
    follower = begun(federation, tmp_path, 30, FAST, SLOW)
    wait_for(lambda: federation.rounds() >= 4, "models are made")
    agent = federation.processes[SLOW[0]].pid
    processes = [agent, *descendants(agent)]
    for pid in processes:
        os.kill(pid, signal.SIGSTOP)
    try:
        known = answers(federation)[SLOW[0]]
        wait_for(lambda: "disconnected" in failures(federation), "it counts as lost")
        before, others = federation.rounds(), answers(federation)[SLOW[1]]
        wait_for(lambda: federation.rounds() >= before + 8, "others go on", 60)
        found = answers(federation)
        assert found[SLOW[0]] <= known + 1
        assert found[SLOW[1]] <= others + 1  # It does not train in vain.
    finally:
        for pid in processes:
            os.kill(pid, signal.SIGCONT)
    result = result_of(follower)
    assert (result["status"], result["rounds_completed"]) == ("completed", 30)
    assert failures(federation) <= {"surplus", "disconnected", "late"}
    took = [r["seconds"] for r in federation.events("RoundFinished")][4:]
    assert max(took) < 5 * median(took)


def test_killed_aggregator_loses_a_round_of_each_group_at_most(
    federation: Deployment, tmp_path: Path
):
    follower = begun(federation, tmp_path, 16, FAST, SLOW)
    wait_for(lambda: federation.rounds() >= 5, "models are made")
    federation.kill_child("coordinator_process")
    result = result_of(follower)
    assert result["status"] == "completed"
    assert result["rounds_completed"] >= 15  # If both had answered the open number.
    found = federation.events("SiteAnswered")
    began = [(a["site"], a["round_index"] - a["staleness"]) for a in found]
    assert len({*began}) == len(began)


def test_group_goes_on_without_a_site_that_was_killed_and_takes_it_back(
    federation: Deployment, tmp_path: Path
):
    """Also while its coordinator is killed and made anew."""
    follower = begun(federation, tmp_path, 60, FAST, SLOW, secure="threshold=3")
    wait_for(lambda: answers(federation)[SLOW[1]] >= 2, "the slow group has sums")
    federation.kill(SLOW[0])
    known = answers(federation)[SLOW[1]]
    wait_for(lambda: answers(federation)[SLOW[1]] >= known + 3, "its group goes on")

    def reveals() -> list[list[str]]:
        return [
            step["sites"]
            for step in federation.events("StepTaken")
            if step["step"] == "reveal" and SLOW[1] in step["sites"]
        ]

    wait_for(lambda: {*SLOW[1:]} == {*reveals()[-1]}, "a sum without the site")
    federation.kill_child("coordinator_process")
    seconds = str(STEP_SECONDS * TIMES_SLOWER)
    federation.start_site(SLOW[0], **{slow_models.SECONDS: seconds})
    wait_for(lambda: {*SLOW} == {*reveals()[-1]}, "it is back in the sums")
    result = result_of(follower)
    assert result["status"] == "completed"
    found = federation.events("SiteAnswered")
    began = [(a["site"], a["round_index"] - a["staleness"]) for a in found]
    assert len({*began}) == len(began)


def test_finer_group_is_refused_by_what_sites_remember(
    federation: Deployment, tmp_path: Path
):
    """Its sums and those of before would differ by two sites."""
    others = (FAST[0], *SLOW[:2])
    begun(federation, tmp_path, 2, others, (*FAST[1:], *SLOW[2:]))
    log = federation.folder / f"{FAST[0]}.log"
    wait_for(lambda: "(policy.min_group)" in log.read_text(), "the run is refused")
