"""Which nodes a coordinator knows without asking."""

import importlib.util
from pathlib import Path

import pytest
from support import toy
from support.small_jobs import small_job

from cloud_adapters.flower import simulation as flower_simulation
from deploy import exit_codes
from deploy.aggregator_host import run_queue
from deploy.aggregator_host.enrolment_book import BookFile, EnrolledSite, EnrolmentBook
from federation.errors import JobError, RunStopped, StoreUnavailable
from federation.job.spec import JobSpec

if importlib.util.find_spec("flwr") is None:
    pytest.skip("the flower extra is not installed", allow_module_level=True)
flower_simulation.import_flower()

from deploy.aggregator_host.server_app import (  # noqa: E402
    ReplacedMeanwhile,
    SiteWait,
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
    assert known_nodes(folder, job()) == {"lab": 2**63 + 5, "other": 3}


def test_relay_is_asked_like_a_site(tmp_path: Path):
    """It answers with what its sites have signed."""
    behind = small_job(
        num_sites=2,
        relays=[{"name": "east", "sites": ["site-0"]}],
        schedule={"minimum_sites": 1},
    )
    folder = enrolled(tmp_path, **{"site-0": 1, "site-1": 2, "east": 3, "other": 4})
    assert known_nodes(folder, behind) == {"other": 4}
    assert relays_of(behind) == {"east": ["site-0"]}


def test_app_that_is_not_enrolled(tmp_path: Path):
    """Nobody could tell its node."""
    with pytest.raises(JobError, match=r"'lab' runs a Flower.* not enr") as e:
        known_nodes(enrolled(tmp_path, a=1), job())
    assert e.value.key == "sites[1].flower_app"
    assert known_nodes(tmp_path, job(), absent={"lab"}) == {}


def test_without_a_book_agents_are_asked(tmp_path: Path):
    """As where rosters are made by hand."""
    assert known_nodes(tmp_path, toy.job()) == {}


def test_a_run_that_waits_for_sites_can_be_stopped(tmp_path: Path):
    """Immediately, with the code of a stopped run; later it ends after its round."""
    wait = SiteWait(stop=tmp_path / "stop")
    assert not wait.look()
    wait.stop.touch()
    with pytest.raises(RunStopped) as stopped:
        wait.look()
    assert exit_codes.of_error(stopped.value) == exit_codes.STOPPED
    wait.is_over = True
    assert not wait.look()


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
