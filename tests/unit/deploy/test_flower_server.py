"""Which nodes a coordinator knows without asking."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
from support import event_samples, toy
from support.enrolments import Federation
from support.small_jobs import small_job

from cloud_adapters.flower import simulation as flower_simulation
from cloud_adapters.flower.facts import Connected
from cloud_adapters.storage.memory import MemoryStore
from cloud_adapters.transport.frames import Frames
from deploy import exit_codes
from deploy.aggregator_host import admission, run_queue
from deploy.aggregator_host.deployed_run import DeployedRun
from deploy.aggregator_host.enrolment_book import BookFile, EnrolledSite, EnrolmentBook
from deploy.aggregator_host.parties import Parties
from federation.clock import SystemClock
from federation.errors import (
    BudgetExceeded,
    FederationError,
    JobError,
    QuorumNotMet,
    RunConflict,
    RunStopped,
    SiteError,
    StoreUnavailable,
)
from federation.event_log import EventWriter
from federation.events import Event, Warned
from federation.job.spec import JobSpec
from federation.protocols import Grid
from monitoring.runs.run_folder import RunFolder
from privacy.membership import introduction

if importlib.util.find_spec("flwr") is None:
    pytest.skip("the flower extra is not installed", allow_module_level=True)
flower_simulation.import_flower()

from deploy.aggregator_host.server_app import (  # noqa: E402
    ReplacedMeanwhile,
    SiteWait,
    _run,
    coordinate,
    enrolled_nodes,
    known_nodes,
    read_own,
    relays_of,
)

pytestmark = pytest.mark.flower


def enrolled(folder: Path, **nodes: int) -> Path:
    """A folder whose book has these sites."""
    members = [
        EnrolledSite(
            site=site,
            organisation="",
            release="",
            identity="",
            node_key="",
            node_id=str(node),
            enrolled_at=0.0,
            certificates=(),
        )
        for site, node in nodes.items()
    ]
    BookFile(folder=folder).write(EnrolmentBook(members=tuple(members)))
    return folder


def job() -> JobSpec:
    """An agent's site and an app's."""
    return toy.job({"sites": [{"name": "a"}, {"name": "lab", "flower_app": {}}]})


def test_apps_and_strangers_are_known(tmp_path: Path):
    """Apps by enrolment, as they cannot sign; agents sign who they are."""
    folder = enrolled(tmp_path, a=1, lab=2**63 + 5, other=3)
    assert known_nodes(enrolled_nodes(folder), job()) == {"lab": 2**63 + 5, "other": 3}


def test_relay_is_asked_like_a_site(tmp_path: Path):
    """It answers with what its sites have signed."""
    behind = small_job(
        num_sites=2,
        relays=[{"name": "east", "sites": ["site-0"]}],
        schedule={"minimum_sites": 1},
    )
    folder = enrolled(tmp_path, **{"site-0": 1, "site-1": 2, "east": 3, "other": 4})
    assert known_nodes(enrolled_nodes(folder), behind) == {"other": 4}
    assert relays_of(behind) == {"east": ["site-0"]}


def test_app_that_is_not_enrolled(tmp_path: Path):
    """Nobody could tell its node."""
    with pytest.raises(JobError, match=r"'lab' runs a Flower.* not enr") as e:
        known_nodes(enrolled_nodes(enrolled(tmp_path, a=1)), job())
    assert e.value.key == "sites[1].flower_app"
    assert known_nodes(enrolled_nodes(tmp_path), job(), absent={"lab"}) == {}


def test_without_a_book_agents_are_asked(tmp_path: Path):
    """As where rosters are made by hand."""
    assert known_nodes(enrolled_nodes(tmp_path), toy.job()) == {}


def test_a_run_that_waits_for_sites_can_be_stopped(tmp_path: Path):
    """Immediately, with the code of a stopped run; later it ends after its round."""
    wait = SiteWait(run=RunFolder(tmp_path))
    assert not wait.look()
    run_queue.ask_to_yield(wait.run)
    with pytest.raises(run_queue.TurnOver):
        wait.look()
    run_queue.ask_to_stop(wait.run, at=0.0)
    with pytest.raises(RunStopped) as stopped:
        wait.look()
    assert exit_codes.of_error(stopped.value) == exit_codes.STOPPED
    wait.is_over = True
    assert not wait.look()


@pytest.fixture
def submitted(tmp_path: Path) -> tuple[Federation, RunFolder]:
    """A run of two enrolled sites that waits for its coordinator."""
    federation = Federation(folder=tmp_path)
    for name in ("site-0", "site-1"):
        federation.site(name)
    run = RunFolder(tmp_path / "runs" / "small" / "one")
    run_queue.submit(small_job(num_sites=2), run, at=0.0)
    return federation, run


def test_outcome_is_left_when_no_other_coordinator_goes_on(
    submitted: tuple[Federation, RunFolder],
):
    """Or the service would start one after another, or none where one is needed."""
    federation, run = submitted
    with run.locked(), pytest.raises(RunConflict):
        coordinate(None, run, federation.config, "7")  # type: ignore[arg-type]
    assert not (run.path / run_queue.OUTCOME).exists()
    federation.revoke("site-1")
    with pytest.raises(JobError):
        coordinate(None, run, federation.config, "7")  # type: ignore[arg-type]
    found = run_queue.read(run)
    assert found is not None
    assert found.outcome is not None
    assert (found.outcome.code, "revoked" in found.outcome.message) == (2, True)


def test_a_run_that_waits_for_a_killed_site_says_so(
    submitted: tuple[Federation, RunFolder],
):
    """To those who watch it, and in ``ps``, until the site is back."""
    federation, run = submitted
    heard = list[Event]()
    deployed = DeployedRun(
        run,
        Parties.of_run(federation.aggregator, run),
        clock=SystemClock(),
        listeners=[heard.append],
    )
    there, gone = ("site-0",), ("site-1",)
    before = Connected(there=there, missing=gone, absent=gone, seconds=60.0)
    deployed.note_connected(before)
    assert not heard  # What waits for the run's first event says it.
    assert away(run) == ["site-1 (not connected)"]
    deployed.note_connected(replace(before, what="round 7"))
    (warned,) = heard
    assert isinstance(warned, Warned)
    text = "round 7 waits up to 1 min 00 s for site-1, which is disconnected"
    assert (warned.message, warned.awaited) == (text, gone)
    assert away(run) == ["site-1 (not connected: round 7 waits)"]
    deployed.note_connected(Connected(there=(*there, *gone), missing=(), seconds=0.0))
    assert (len(heard), away(run)) == (1, [])
    last = deployed.job.rounds + 1
    deployed.note_connected(replace(before, what=f"round {last}"))
    assert heard[1].message.startswith("the final evaluation waits")  # type: ignore[attr-defined]


def test_site_that_is_revoked_while_a_run_goes_on(
    submitted: tuple[Federation, RunFolder],
):
    """It is named as that where the run waits, in ``ps``, and when the run fails."""
    federation, _ = submitted
    run = RunFolder(federation.config.runs / "small" / "one")
    run_queue.submit(small_job(num_sites=2), run, at=0.0)
    heard = list[Event]()
    parties = Parties.of_run(federation.aggregator, run)
    deployed = DeployedRun(run, parties, clock=SystemClock(), listeners=[heard.append])
    assert deployed.revoked() == frozenset()
    federation.revoke("site-1")
    # The kernel keeps a coordinator from reading a book that was replaced.
    book = federation.aggregator / "sites.json"
    content = book.read_bytes()
    book.unlink()
    book.mkdir()
    assert deployed.revoked() == {"site-1"}
    book.rmdir()
    book.write_bytes(content)
    found = Connected(there=("site-0",), missing=("site-1",), seconds=60.0, what="it")
    deployed.note_connected(found)
    (warned,) = heard
    assert isinstance(warned, Warned)
    assert warned.message.endswith("revoked: site-1")
    assert away(run) == ["site-1 (revoked: it waits)"]
    (row,) = admission.rows(
        federation.config, run_queue.handed_over(federation.config.runs).runs, now=0.0
    )
    assert row["without"] == ["site-1 (revoked)"]

    lost = QuorumNotMet("3 rounds had no result", "continue with --resume")
    told = str(deployed.failed(lost))
    assert told.startswith("3 rounds had no result; revoked: site-1")
    assert "--resume" not in told


def away(run: RunFolder) -> list[str]:
    """What ``crossfed ps`` shows of sites that a run is without."""
    found = run_queue.read(run)
    assert found is not None
    return [*found.away]


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (SiteError("refused"), "failed"),
        (RunStopped("on request"), "stopped"),
        (BudgetExceeded("nothing left"), "exhausted"),
        (RunConflict("another"), ""),
    ],
)
def test_exchange_is_tidied_unless_it_is_another_coordinators(
    submitted: tuple[Federation, RunFolder],
    error: FederationError,
    outcome: str,
):
    """What a run leaves there is paid for by the month; sites hear how it ended."""
    federation, run = submitted
    parties = Parties.of_run(federation.aggregator, run)  # Keeps the roster.
    with EventWriter(run.events) as note:
        note(replace(event_samples.two_sites(1)[0], engine="deployed"))
    store = MemoryStore()
    keys = [f"sites/site-1/{run.run_id()}/3/a", f"model/{run.run_id()}/3", "other/1"]
    for key in keys:
        store.put(key, [b"words"])

    def connect(*_: object, **__: object) -> Grid:
        raise error

    deployed = DeployedRun(run, parties, clock=SystemClock())
    frames, told = Frames(store=store, scratch=run.path), list[str]()

    def tell_end(sealed: bytes) -> None:
        assert run.is_locked()  # The service starts no coordinator meanwhile.
        told.append(introduction.open_end(sealed, parties.roster).outcome)

    with pytest.raises(type(error)):
        _run(deployed, run, connect, frames, tell_end)
    # Not of another coordinator's run.
    assert told == [outcome] * bool(outcome)
    left = ["other/1"] if outcome else sorted(keys)
    assert [info.key for info in store.list()] == left


def test_file_that_was_replaced_meanwhile_ends_no_run():
    """It is hidden from a coordinator that began before; the next one reads it."""

    def denied() -> None:
        try:
            raise PermissionError(13, "Permission denied")
        except OSError as error:
            raise StoreUnavailable("cannot read sites.json") from error

    with pytest.raises(ReplacedMeanwhile) as caught:
        read_own(denied)
    assert run_queue.goes_on(caught.value)

    def damaged() -> None:
        raise StoreUnavailable("sites.json is damaged")

    with pytest.raises(StoreUnavailable):
        read_own(damaged)
