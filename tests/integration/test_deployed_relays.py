"""Deployed runs with relays: every party has its keys and folder, in one process.

The line of a site to its relay is in ``test_relay_line.py``, and all of it in
processes at the end of this file.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.agents import RUN_ID
from support.relayed_agents import Clouds, clouds_of
from support.secure_runs import secure_job
from support.small_jobs import small_job

from deploy.aggregator_host.deployed_run import DeployedRun
from deploy.wiring.simulation import simulate
from federation import events
from federation.clock import SystemClock
from federation.ids import SiteId
from federation.job.spec import JobSpec
from monitoring.runs.run_folder import RunFolder
from monitoring.runs.run_result import RunResult

pytestmark = pytest.mark.slow

EAST, WEST = SiteId("east"), SiteId("west")
NUM_SITES = 5  # Of the run without secure aggregation.


def plain_job(**tables: Any) -> JobSpec:
    """Two clouds of two sites, and one site without a relay."""
    names = [f"site-{number}" for number in range(NUM_SITES)]
    relays = [{"name": WEST, "sites": names[3:5]}, {"name": EAST, "sites": names[0:2]}]
    given = {"relays": relays, "rounds": 3, "schedule": {"minimum_sites": 3}}
    return small_job(num_sites=NUM_SITES, **given | tables)


def secret_job(**tables: Any) -> JobSpec:
    """One cloud of two sites, and six without a relay: the fewest."""
    relays = [{"name": EAST, "sites": ["site-0", "site-1"]}]
    return secure_job(8, threshold=6, relays=relays, max_examples=64, **tables)


def deploy(
    clouds: Clouds,
    job: JobSpec,
    *,
    listen: Callable[[events.Event], None] = lambda _: None,
) -> tuple[RunResult, list[events.Event]]:
    """Run a job's coordinator from the start to the end."""
    run = RunFolder(clouds.folder / "runs" / RUN_ID)
    run.path.mkdir(parents=True)
    run.write_job(job)
    seen: list[events.Event] = []
    deployed = DeployedRun(
        run,
        clouds.members.parties,
        clock=SystemClock(),
        listeners=[seen.append, listen],
        report=False,
    )
    return deployed.run(clouds.connect), seen


def finished(seen: list[events.Event]) -> list[events.RoundFinished]:
    return [event for event in seen if isinstance(event, events.RoundFinished)]


def of_simulation(job: JobSpec) -> tuple[RunResult, list[events.RoundFinished]]:
    seen: list[events.Event] = []
    return simulate(job, listeners=[seen.append]), finished(seen)


def sent(each: events.RoundFinished) -> tuple[int, ...]:
    return each.bytes_down, each.bytes_up, each.inside_down, each.inside_up


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[Clouds]:
    with clouds_of(tmp_path, plain_job()) as made:
        yield made


def test_plain_run_is_the_simulated_one_bit_for_bit(plain: Clouds):
    """And so are its bytes, on both lines."""
    result, seen = deploy(plain, plain_job())
    expected, rounds = of_simulation(plain_job())
    assert result.weights.keys() == expected.weights.keys()
    for name, values in expected.weights.items():
        assert result.weights[name].tobytes() == values.tobytes(), name
    found = finished(seen)
    for mine, simulated in zip(found, rounds, strict=True):
        assert mine.bytes_down == simulated.bytes_down
        assert mine.inside_down == simulated.inside_down
        # Measured times have more digits or fewer, and headers are padded.
        assert abs(mine.bytes_up - simulated.bytes_up) <= 64 * NUM_SITES
        assert abs(mine.inside_up - simulated.inside_up) <= 64 * NUM_SITES
    assert {each.status for each in found} == {"completed"}


@pytest.fixture(scope="module")
def secret_run(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Clouds, list[events.Event]]]:
    with clouds_of(tmp_path_factory.mktemp("secret"), secret_job()) as made:
        made.lost = {(EAST, 2)}
        _, seen = deploy(made, secret_job())
        yield made, seen


def test_lost_relay_is_the_absence_of_its_sites(
    secret_run: tuple[Clouds, list[events.Event]],
):
    """Under secure aggregation, which needs no new keys when the relay is back."""
    _, seen = secret_run
    rounds = finished(seen)
    assert [each.status for each in rounds] == ["completed"] * 3
    assert {"site-0", "site-1"} <= {*rounds[0].answered}
    assert {*rounds[1].answered} == {f"site-{n}" for n in range(2, 8)}
    assert {"site-0", "site-1"} <= {*rounds[2].answered}
    told = [e.message for e in seen if isinstance(e, events.SiteFailed)]
    assert told == ["relay 'east' is not connected"] * 2


def test_masked_words_take_the_bytes_of_a_simulation(
    secret_run: tuple[Clouds, list[events.Event]],
):
    """In each round, on both lines: one update leaves the cloud, not two."""
    _, seen = secret_run
    lost = {"relays": [{"relay": EAST, "lost_rounds": [2]}]}
    _, rounds = of_simulation(secret_job(simulation=lost))
    found = finished(seen)
    assert [sent(each) for each in found] == [sent(each) for each in rounds]


def test_relay_that_is_restarted_loses_nothing(plain: Clouds):
    """Its folder says what it needs of the run."""

    def restart(event: events.Event) -> None:
        if isinstance(event, events.RoundFinished):
            plain.relays[EAST] = plain.relay(EAST, ["site-0", "site-1"])

    _, seen = deploy(plain, plain_job(), listen=restart)
    assert [len(each.answered) for each in finished(seen)] == [NUM_SITES] * 3
