"""A site that enrols while a run trains, and joins it between two rounds."""

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
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
    pytest.mark.xdist_group("deployed"),
    needs("nginx"),
]

NEW = "aws-eu-west-1"
POLICY = """
privacy = "none"
secure_aggregation = false
accept_two_sites = true
functions = ["clients.models:*", "clients.data:*"]
"""
JOB = """
name = "{name}"
rounds = {rounds}

[model]
factory = "clients.models:logistic_regression"
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
    with deployed(folder, POLICY, sites=SITES) as made:
        yield made


def write(
    folder: Path, name: str, sites: list[str], *, rounds: int = 40, tables: str = ""
) -> Path:
    job = folder / f"{name}.toml"
    text = JOB.format(name=name, rounds=rounds, tables=tables)
    job.write_text(text + "".join(f'\n[[sites]]\nname = "{s}"\n' for s in sites))
    return job


def begun_and_stopped(federation: Deployment, job: Path, name: str) -> int:
    """Run a job for some rounds; a site enrols, and starts, while they are trained."""
    earlier, at = federation.num_runs(), ("--aggregator", federation.config)
    follower = federation.run(job)
    begins = "the run begins, or is refused"
    is_over = follower.poll
    wait_for(lambda: federation.num_runs() > earlier or is_over() is not None, begins)
    assert federation.num_runs() > earlier, follower.communicate()
    wait_for(lambda: federation.rounds() > 0, "a round is finished")
    with federation.frozen("coordinator_process"):  # Or it might be done by then.
        if not (federation.folder / NEW).exists():
            federation.enrol(NEW)
            federation.equip(NEW, POLICY)
            federation.start_site(NEW)
        follower.send_signal(signal.SIGHUP)
        follower.wait(30)
        crossfed("stop", name, *at)
    crossfed("watch", name, *at, code=130)
    return federation.rounds()


def finish(process: Any) -> dict[str, Any]:
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    return dict(json.loads(out))


def test_site_that_enrolled_meanwhile_joins_a_stopped_run(
    federation: Deployment, tmp_path: Path
):
    """Without a word to the other sites, to the old number of rounds."""
    job = write(tmp_path, "joins", [*SITES])
    done = begun_and_stopped(federation, job, "joins")
    assert 0 < done < 40
    longer = write(tmp_path, "joins", [*SITES, NEW])
    result = finish(federation.run(longer, extend=40))
    assert (result["status"], result["rounds_completed"]) == ("completed", 40)
    (event,) = federation.events("RunExtended")
    assert (event["joined"], event["last_round"]) == ([NEW], done)
    rounds = federation.events("RoundFinished")
    assert {tuple(sorted(r["answered"])) for r in rounds[:done]} == {(*sorted(SITES),)}
    assert {len(r["answered"]) for r in rounds[done:]} == {3}
    # The run's job by now: as another coordinator resumes it.
    crossfed("run", str(longer), "--aggregator", federation.config, "--resume", code=1)


def test_secure_run_says_why_a_site_cannot_join(federation: Deployment, tmp_path: Path):
    secure = """
[aggregation]
weights = "uniform"

[privacy.secure_aggregation]
enabled = true
two_sites_waiver = true
"""
    for site in SITES:
        federation.end(site)
        federation.equip(site, POLICY.replace("secure_aggregation = false\n", ""))
        federation.start_site(site)
    job = write(tmp_path, "secure", [*SITES], tables=secure)
    done = begun_and_stopped(federation, job, "secure")
    longer = write(tmp_path, "secure", [*SITES, NEW], tables=secure)
    at = ("--aggregator", federation.config)
    told = crossfed("run", str(longer), *at, "--extend", "40", code=2).stderr
    assert re.search(rf"'{NEW}' cannot join .* secure aggregation: ", told)
    assert not federation.events("RunExtended")
    assert federation.rounds() == done
