"""Statistics of real processes, whose operators say what they answer."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.deployment import Deployment, crossfed_here, deployed, wait_for
from support.programs import needs
from support.without_report import simulate

from clients.data import breast_cancer
from federation.job import job_file
from privacy.dp import accountant
from privacy.dp.ledger.ledger_files import LEDGER_NAME, read_file

pytestmark = [
    pytest.mark.slow,
    pytest.mark.deploy,
    pytest.mark.timeout(600),
    needs("nginx"),
]

SITES = ("site-a", "site-b", "site-c")
POLICY = """
privacy = "none"
secure_aggregation = false
min_sites = 3
total_epsilon = 20.0
statistics = { min_count = 1, columns = ["?"] }
"""
JOB = """
name = "survey"
data = { source = "clients.data:breast_cancer" }
privacy = { secure_aggregation = { enabled = true } }
[[statistics.columns]]
names = ["0", "1"]
low = -5
high = 9
bins = 7
quantiles = [0.5]
"""


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with deployed(tmp_path_factory.mktemp("federation"), POLICY, sites=SITES) as made:
        yield made


def test_sites_answer_one_exact_question_and_say_so(
    federation: Deployment, tmp_path: Path
):
    """A coordinator that is killed between the rounds changes nothing of it."""
    job = tmp_path / "job.toml"
    job.write_text(JOB + "".join(f'[[sites]]\nname = "{s}"\n' for s in SITES))
    follower = federation.run(job)
    wait_for(lambda: federation.rounds() >= 1, "the first round is over")
    federation.kill_child("coordinator_process")
    out, err = follower.communicate(timeout=400)
    assert follower.returncode == 0, err
    assert json.loads(out)["status"] == "completed"
    root = str(federation.folder / "aggregator" / "runs")
    shown = crossfed_here("stats", "survey", "--root", root, "--json").stdout
    found = json.loads(shown)
    train, _ = breast_cancer()
    values = np.asarray(train.inputs)[:, 0].astype(float)
    assert found["records"] == len(values)
    assert found["columns"][0]["mean"] == pytest.approx(values.mean(), abs=1e-7)
    edges = np.linspace(-5, 9, 8)
    assert found["columns"][0]["histogram"] == np.histogram(values, edges)[0].tolist()
    assert found["drift"] == []  # Nobody knows the sums of a single site.
    log = (federation.folder / "site-a.log").read_text()
    assert "answers statistics in round" in log
    assert "14 histograms" in log
    assert "columns 0, 1" in log
    # The end of a run that stopped before its spare rounds is known everywhere.
    assert "is over: job 'survey', " in log
    config = str(federation.folder / "site-a" / "site.toml")
    shown = crossfed_here("site", "status", "--json", "--config", config).stdout
    (run,) = json.loads(shown)["runs"]
    assert run["state"] in {"is over", "completed"}  # As its aggregator has signed.
    assert run["rounds"] == run["answered"]
    assert run["sent"][0] == "sums over its records, readable only in a sum"

    follower = federation.run(job, "statistics.columns.0.bins=8")
    _, err = follower.communicate(timeout=400)
    assert follower.returncode != 0
    assert "exact questions" in err
    follower = federation.run(job, 'statistics.columns.0.names=["10"]')
    _, err = follower.communicate(timeout=400)
    assert follower.returncode != 0
    assert "policy.statistics.columns" in err


def test_sites_are_compared_in_the_clear_as_in_a_simulation(
    federation: Deployment, tmp_path: Path
):
    """They answer a question again that they have answered with masks."""
    job = tmp_path / "job.toml"
    job.write_text(JOB + "".join(f'[[sites]]\nname = "{s}"\n' for s in SITES))
    settings = ('name="apart"', "privacy.secure_aggregation.enabled=false")
    out, err = federation.run(job, *settings).communicate(timeout=400)
    assert json.loads(out)["status"] == "completed", err
    root = str(federation.folder / "aggregator" / "runs")
    shown = crossfed_here("stats", "apart", "--root", root, "--json").stdout
    wanted = simulate(job_file.load(job, [*settings])).statistics
    assert wanted is not None
    drift = json.loads(shown)["drift"]
    assert {row["column"] for row in drift} == {"0", "1"}
    assert drift == [*wanted.document()["drift"]]


def test_killed_parties_give_no_noised_answer_without_its_charge(
    federation: Deployment, tmp_path: Path
):
    """Nor a second one of the same round, in which the noise would average out."""
    job = tmp_path / "job.toml"
    job.write_text(JOB + "".join(f'[[sites]]\nname = "{s}"\n' for s in SITES))
    private = "privacy.differential_privacy"
    asked = {"unit": '"record"', "target_epsilon": 4.0, "delta": 1e-4}
    asked["reserve_rounds"] = 2
    settings = [f"{private}.{key}={value}" for key, value in asked.items()]
    before = federation.num_runs()
    follower = federation.run(job, 'name="noised"', *settings)
    wait_for(
        lambda: federation.num_runs() > before and federation.rounds() >= 1,
        "the first round is over",
    )
    federation.kill("site-a")
    federation.kill_child("coordinator_process")
    federation.start_site("site-a")
    out, err = follower.communicate(timeout=400)
    assert follower.returncode == 0, err
    run = json.loads(out)["run_id"]
    for site in SITES:
        (path,) = (federation.folder / site / "runs" / run).rglob(LEDGER_NAME)
        charges = read_file(path).charges
        charged = [charge.round_index for charge in charges]
        log = (federation.folder / f"{site}.log").read_text()
        found = re.findall(rf"run {run}: answers statistics in round (\d+)", log)
        answered = [*map(int, found)]
        assert len({*charged}) == len(charged)
        assert len({*answered}) == len(answered) >= 2
        assert {*answered} <= {*charged}
        spent = accountant.epsilon([charge.event for charge in charges], 1e-4)
        assert charges[-1].epsilon_after == pytest.approx(spent, rel=1e-6)
        assert spent <= 4.0
