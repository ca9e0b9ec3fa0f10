"""A site that enrols while a run trains, and joins it between two rounds."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import slow_models
from support.deployment import (
    SITES,
    Deployment,
    crossfed_here as crossfed,
    deployed,
    wait_for,
)
from support.programs import needs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.deploy,
    pytest.mark.timeout(600),
    needs("nginx"),
]

NEW = "aws-eu-west-1"
POLICY = """
privacy = "none"
secure_aggregation = false
accept_two_sites = true
functions = ["support.slow_models:*", "clients.data:*"]
"""
# Of a step: a run that waits for a site does not keep the cores busy meanwhile.
STEP = {slow_models.SECONDS: "0.1"}
JOB = """
name = "{name}"
rounds = {rounds}

[model]
factory = "support.slow_models:slow_network"
options = {{ inputs = 64, classes = 10 }}

[data]
source = "clients.data:digits"

[training]
local_steps = 2
optimizer = {{ lr = 0.05 }}
{tables}
"""


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("joining")
    environment = {"PYTHONPATH": str(Path(__file__).parents[1]), **STEP}
    with deployed(folder, POLICY, sites=SITES, environment=environment) as made:
        yield made


def write(
    folder: Path, name: str, sites: list[str], *, rounds: int = 40, tables: str = ""
) -> Path:
    job = folder / f"{name}.toml"
    text = JOB.format(name=name, rounds=rounds, tables=tables)
    job.write_text(text + "".join(f'\n[[sites]]\nname = "{s}"\n' for s in sites))
    return job


def begin(federation: Deployment, job: Path) -> Any:
    """Run a job until its first round has ended."""
    earlier = federation.num_runs()
    follower = federation.run(job)
    begins = "the run begins, or is refused"
    is_over = follower.poll
    wait_for(lambda: federation.num_runs() > earlier or is_over() is not None, begins)
    assert federation.num_runs() > earlier, follower.communicate()
    wait_for(lambda: federation.rounds() > 0, "a round is finished")
    return follower


def add(federation: Deployment, policy: str = POLICY) -> None:
    federation.enrol(NEW)
    federation.equip(NEW, policy)
    federation.start_site(NEW)


def finish(process: Any) -> dict[str, Any]:
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    return dict(json.loads(out))


def status(federation: Deployment) -> str:
    return crossfed(
        "site", "status", "--config", str(federation.folder / NEW / "site.toml")
    ).stdout


def test_secure_run_says_why_a_site_cannot_join(federation: Deployment, tmp_path: Path):
    """To the site, and to who would extend it."""
    secure = """
[aggregation]
weights = "uniform"

[privacy.secure_aggregation]
enabled = true
two_sites_waiver = true
"""
    job = write(tmp_path, "secure", [*SITES], rounds=400, tables=secure)
    follower, at = begin(federation, job), ("--aggregator", federation.config)
    add(federation)
    told = r"cannot be joined: .*secure aggregation: .* reveal it"
    wait_for(lambda: bool(re.search(told, status(federation))), "the site is told")
    assert re.search(told, (federation.folder / f"{NEW}.log").read_text())
    crossfed("stop", "secure", *at)
    follower.communicate(timeout=400)
    assert not federation.events("RunExtended")
    longer = write(tmp_path, "secure", [*SITES, NEW], rounds=400, tables=secure)
    told = crossfed("run", str(longer), *at, "--extend", "400", code=2).stderr
    assert re.search(rf"'{NEW}' cannot join .* secure aggregation: ", told)


def test_site_joins_a_run_that_trains_once_its_policy_allows(
    federation: Deployment, tmp_path: Path
):
    """Nobody stops it; its coordinator is killed meanwhile, and sites stay."""
    at = ("--aggregator", federation.config)
    federation.end(NEW)
    federation.equip(NEW, POLICY.replace('"none"', '"record"'))
    federation.start_site(NEW)
    tables = '[schedule]\nopen_to = ["aws-*"]'
    follower = begin(
        federation, write(tmp_path, "open", [*SITES], rounds=4000, tables=tables)
    )
    refused = r"without this site.*differential_privacy"
    wait_for(lambda: bool(re.search(refused, status(federation))), "it refuses")
    assert not federation.events("RunExtended")
    federation.end(NEW)
    federation.equip(NEW, POLICY)
    federation.start_site(NEW)
    federation.kill_child("coordinator_process")  # The next one asks at once.
    wait_for(lambda: bool(federation.events("RunExtended")), "it joins")
    (event,) = federation.events("RunExtended")
    assert event["joined"] == [NEW]
    last = event["last_round"]

    def answered() -> list[list[str]]:
        ended = federation.events("RoundFinished")
        return [each["answered"] for each in ended if each["round_index"] > last + 1]

    wait_for(lambda: len(answered()) > 2, "rounds follow")
    assert {tuple(sorted(each)) for each in answered()} == {(NEW, *sorted(SITES))}
    federation.kill_child("coordinator_process")
    done = len(answered())
    wait_for(lambda: len(answered()) > done, "it resumes with the site")
    crossfed("stop", "open", *at)
    follower.communicate(timeout=400)
    assert {len(each) for each in answered()} == {3}
    # As a person extends it, it is the new job's.
    longer = write(tmp_path, "open", [*SITES, NEW], rounds=5000, tables=tables)
    crossfed("run", str(longer), *at, "--resume", code=2)


@pytest.mark.long
def test_site_joins_a_buffered_run_and_no_update_counts_twice(
    federation: Deployment, tmp_path: Path
):
    """Tasks that are open when it joins, or at a kill, are given up."""
    if NEW not in federation.processes:  # `make test-long` runs this one alone.
        add(federation)
    tables = '[schedule]\nopen_to = ["aws-*"]\nmode = "buffered"\nbuffer_size = 2'
    job = write(tmp_path, "stream", [*SITES], rounds=4000, tables=tables)
    earlier = federation.num_runs()
    follower = federation.run(job)
    wait_for(lambda: federation.num_runs() > earlier, "the run begins")
    wait_for(lambda: bool(federation.events("RunExtended")), "it joins")
    (event,) = federation.events("RunExtended")
    assert event["joined"] == [NEW]

    def answers() -> list[dict[str, Any]]:
        found = federation.events("SiteAnswered")
        return [answer for answer in found if answer["site"] == NEW]

    wait_for(lambda: len(answers()) > 4, "it takes part")
    federation.kill_child("coordinator_process")
    done = len(answers())
    wait_for(lambda: len(answers()) > done + 4, "it goes on")
    crossfed("stop", "stream", "--aggregator", federation.config)
    follower.communicate(timeout=400)
    found = federation.events("SiteAnswered")
    began = [(a["site"], a["round_index"] - a["staleness"]) for a in found]
    models = {e["round_index"] for e in federation.events("RoundFinished")}
    assert models == {*range(1, max(models) + 1)}
    # A model that was lost with its coordinator is made once more.
    assert len(began) - len({*began}) <= 2 * 2
