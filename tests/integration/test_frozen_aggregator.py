"""Bad nights of a whole host: it stands still, has no disk left, or another time."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from faults import disks
from support.deployment import CLOCK, Deployment, deployed, descendants, wait_for
from support.programs import needs

from deploy.aggregator_host import run_queue
from monitoring.runs.run_folder import RunFolder
from privacy.dp.ledger.ledger_files import LEDGER_NAME, read_file

pytestmark = [
    pytest.mark.long,
    pytest.mark.slow,
    pytest.mark.deploy,
    pytest.mark.timeout(900),
    needs("nginx", "root", "mount", "g++"),
]

SITES = ("site-a", "site-b", "site-c")
# Flower takes for dead what it has not heard of for a minute.
FROZEN_SECONDS = 90.0
POLICY = """
privacy = "none"
accept_two_sites = true
secure_aggregation = false
max_clip_norm = 100.0
total_epsilon = 1000.0
functions = ["clients.models:*", "clients.data:*"]
"""
JOB = """
name = "long"
seed = 7
rounds = 60

[model]
factory = "clients.models:logistic_regression"
options = { inputs = 64, classes = 10 }

[data]
source = "clients.data:digits"

[training]
local_steps = 2
batch_size = 64
optimizer = { name = "sgd", lr = 1.0 }

[schedule]
minimum_sites = 2
round_deadline_seconds = 20.0

[privacy.differential_privacy]
unit = "record"
target_epsilon = 8.0
clip_norm = 0.5
reserve_rounds = 10

[aggregation]
weights = "uniform"

[[sites]]
name = "site-a"
[[sites]]
name = "site-b"
[[sites]]
name = "site-c"
"""


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Three sites, and an aggregator with a disk of its own."""
    folder = tmp_path_factory.mktemp("federation")
    (folder / "job.toml").write_text(JOB)
    with (
        disks.disks([folder / "aggregator"]),
        deployed(folder, POLICY, sites=SITES) as made,
    ):
        yield made


def run_through(
    federation: Deployment, strike: Callable[[], None], *, repeated: int = 0
) -> list[dict[str, Any]]:
    """Strike once a run is under way, and see it completed.

    Rounds that a coordinator did not finish may be repeated, and charged again.
    """
    earlier = federation.num_runs()
    process = federation.run(federation.folder / "job.toml")
    wait_for(lambda: federation.num_runs() > earlier, "the run begins")
    wait_for(lambda: federation.rounds() > 4, "rounds are completed")
    strike()
    out, err = process.communicate(timeout=500)
    assert process.returncode == 0, out + err
    found = federation.events()
    check_ledgers(federation, found, repeated)
    return found


def check_ledgers(
    federation: Deployment, found: list[dict[str, Any]], repeated: int
) -> None:
    """Few rounds are charged twice, and none that was answered is free."""
    run_id = next(e["run_id"] for e in found if e["event"] == "RunStarted")
    for site in SITES:
        path = federation.folder / site / "runs" / run_id / "sites" / site
        charges = read_file(path / LEDGER_NAME).charges
        charged = [c.round_index for c in charges if c.purpose == "train"]
        answered = {
            e["round_index"]
            for e in found
            if e["event"] == "SiteAnswered" and e["site"] == site and e["round_index"]
        }
        assert len(charged) - len({*charged}) <= repeated
        assert answered <= {*charged}, site


def fruitless(federation: Deployment) -> int:
    runs = (federation.folder / "aggregator" / "runs").glob("*/*")
    newest = run_queue.read(RunFolder(max(runs, key=lambda path: path.name)))
    assert newest is not None
    assert newest.coordinator is not None
    return newest.coordinator.fruitless


def statuses(found: list[dict[str, Any]]) -> list[str]:
    return [e["status"] for e in found if e["event"] == "RoundFinished"]


@contextmanager
def frozen(root: int) -> Iterator[None]:
    """Stop a process and everything below it, as a suspended machine does."""
    family = [root, *descendants(root)]
    for pid in family:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in family:
            os.kill(pid, signal.SIGCONT)


def test_an_aggregator_that_stands_still_loses_no_round(federation: Deployment):
    def strike() -> None:
        with frozen(federation.processes["aggregator"].pid):
            CLOCK.sleep(FROZEN_SECONDS)

    found = run_through(federation, strike, repeated=1)
    assert statuses(found) == ["completed"] * 60
    # One coordinator took over when the old one had noticed.
    assert len([e for e in found if e["event"] == "RunStarted"]) <= 2
    assert fruitless(federation) == 1
    assert "died" not in (federation.folder / "aggregator.log").read_text()


def test_a_site_that_stands_still_is_missed_and_comes_back(federation: Deployment):
    during: list[int] = []

    def strike() -> None:
        with frozen(federation.processes[SITES[0]].pid):
            during.append(federation.rounds())
            CLOCK.sleep(FROZEN_SECONDS)
            during.append(federation.rounds())

    found = run_through(federation, strike)
    assert statuses(found) == ["completed"] * 60
    assert during[1] > during[0]
    answered = [e for e in found if e["event"] == "SiteAnswered"]
    last = max(e["round_index"] for e in answered if e["site"] == SITES[0])
    assert last == 60


def test_a_coordinator_that_is_killed_on_a_full_disk_is_replaced(
    federation: Deployment,
):
    disk = federation.folder / "aggregator"

    def strike() -> None:
        disks.fill(disk)
        federation.kill_child("coordinator_process")
        CLOCK.sleep(30.0)
        disks.clear(disk)

    found = run_through(federation, strike, repeated=1)
    assert statuses(found).count("completed") == 60
    assert fruitless(federation) == 1


@pytest.fixture(scope="module")
def moved_clock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that moves the clock of every process that loads it."""
    library = tmp_path_factory.mktemp("library") / "moved_clock.so"
    source = Path(__file__).parents[1] / "support" / "moved_clock.cc"
    command = ["g++", "-shared", "-fPIC", "-o", str(library), str(source)]
    subprocess.run(command, check=True)
    return library


@pytest.mark.parametrize("seconds", [-600, 600])
def test_an_aggregator_with_a_wrong_clock_is_waited_for(
    federation: Deployment, moved_clock: Path, seconds: int
):
    """As a machine is that was restored, until its clock is set right."""
    logs = {site: federation.folder / f"{site}.log" for site in SITES}
    before = {site: len(log.read_text()) for site, log in logs.items()}

    def strike() -> None:
        federation.end("aggregator")
        federation.start(
            "aggregator",
            *("aggregator", "up", "--config", federation.config),
            anew=True,
            LD_PRELOAD=str(moved_clock),
            MOVED_CLOCK_SECONDS=str(seconds),
        )
        CLOCK.sleep(60.0)
        federation.end("aggregator")
        federation.start_aggregator()

    found = run_through(federation, strike, repeated=2)
    assert statuses(found).count("completed") == 60
    for site, log in logs.items():
        assert federation.processes[site].poll() is None
        said = log.read_text()[before[site] :]
        assert "enrol the site again" not in said
        assert seconds < 0 or "two clocks" in said
