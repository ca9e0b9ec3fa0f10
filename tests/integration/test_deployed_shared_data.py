"""Real processes that share a dataset: it moves, or two have the same part."""

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest
from support import slow_models
from support.deployment import SITES, Deployment, crossfed_here, deployed, wait_for
from support.programs import needs

# `make test` has the same in one process: test_unequal_sites.py.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.deploy,
    pytest.mark.timeout(600),
    needs("nginx"),
]

ALL = ("aws-eu-west-1", *SITES)
SLOW, TWIN, THIRD = ALL
# Of a step, beside which messages and the work of a small model take little.
STEP_SECONDS, TIMES_SLOWER = 0.05, 4
POLICY = """
privacy = "none"
secure_aggregation = false
functions = ["support.slow_models:*"]
"""
JOB = """
name = "shared"
evaluation = {{ every = 0 }}
training = {{ local_epochs = 1, batch_size = 32, optimizer = {{ lr = 0.1 }} }}
data = {{ source = "{url}" }}
[model]
factory = "support.slow_models:slow_network"
options = {{ inputs = 64, classes = 10 }}
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Handwritten digits in a store that all sites read."""
    found = f"file://{tmp_path_factory.mktemp('store')}/digits"
    words = ("data", "shard", "clients.data:digits", found)
    crossfed_here(*words, "--shard-size", "0.02")
    return found


@pytest.fixture(scope="module")
def federation(
    url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    """Three sites, one of which is slower, whose operators name one dataset."""
    environment = {"PYTHONPATH": str(Path(__file__).parents[1])}
    folder = tmp_path_factory.mktemp("federation")
    with deployed(
        folder, POLICY, sites=ALL, environment=environment, started=False
    ) as made:
        for site in ALL:
            file = folder / site / "site.toml"
            text = file.read_text()
            file.write_text(text.replace('source = ""', f'source = "{url}"'))
            seconds = STEP_SECONDS * (TIMES_SLOWER if site == SLOW else 1)
            made.start_site(site, **{slow_models.SECONDS: str(seconds)})
        yield made


def job_of(folder: Path, url: str, data: str = "") -> Path:
    job = folder / "job.toml"
    sites = "".join(f'[[sites]]\nname = "{site}"\n{data}\n' for site in ALL)
    job.write_text(JOB.format(url=url) + sites)
    return job


def test_data_move_to_fast_sites_and_each_record_is_at_one(
    federation: Deployment, url: str, tmp_path: Path
):
    follower = federation.run(
        job_of(tmp_path, url), "rounds=8", 'data.placement="dynamic"'
    )
    out, err = follower.communicate(timeout=300)
    assert follower.returncode == 0, err
    assert json.loads(out)["status"] == "completed"
    held: dict[int, dict[str, int]] = defaultdict(dict)
    for answer in federation.events("SiteAnswered"):
        held[answer["round_index"]][answer["site"]] = answer["num_examples"]
    assert [*held] == [*range(1, 9)]
    (total,) = {sum(each.values()) for each in held.values()}
    assert total == 1438
    assert max(held[1].values()) - min(held[1].values()) <= 1
    # Speeds of 1 : 4 : 4 part them by a ninth and twice four.
    later = [each for index, each in held.items() if index > 3]
    assert median(each[SLOW] for each in later) < 0.2 * total
    rounds = federation.events("RoundFinished")
    assert rounds[-1]["seconds"] < 0.6 * rounds[0]["seconds"]


def test_a_replica_answers_for_its_twin_that_was_killed(
    federation: Deployment, url: str, tmp_path: Path
):
    """While both are there, the fast one counts and the other's task is withdrawn."""
    rounds = 6
    earlier = federation.num_runs()
    follower = federation.run(
        job_of(tmp_path, url, f'data = {{ source = "{url}" }}'),
        f"rounds={rounds}",
        f'schedule.replicas=[["{SLOW}", "{TWIN}"]]',
        "schedule.minimum_sites=2",
    )
    wait_for(lambda: federation.num_runs() > earlier, "the run begins")
    wait_for(lambda: federation.rounds() >= 3, "rounds end")
    federation.kill(TWIN)
    try:
        out, err = follower.communicate(timeout=300)
    finally:
        federation.start_site(TWIN, **{slow_models.SECONDS: str(STEP_SECONDS)})
    assert follower.returncode == 0, err
    result = json.loads(out)
    assert (result["status"], result["rounds_completed"]) == ("completed", rounds)
    found = federation.events("RoundFinished")
    assert {frozenset(each["answered"]) for each in found[:3]} == {
        frozenset((TWIN, THIRD))
    }
    assert {*found[-1]["answered"]} == {SLOW, THIRD}
    assert all(
        len(each["answered"]) == 2 for each in found if each["status"] == "completed"
    )
    surplus = [f for f in federation.events("SiteFailed") if f["kind"] == "surplus"]
    assert {f["site"] for f in surplus if f["round_index"] <= 3} == {SLOW}
