"""What a run on Flower's simulation engine leaves, and how it ends badly."""

import importlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import toy_sites
from support.flower_story import Story, ask, own_temporary_folder, surroundings
from support.grid_script import FAULTY

from cloud_adapters.flower import simulation as flower_simulation
from cloud_adapters.flower.simulation import import_flower, run_on_flower_simulation
from federation.clock import SystemClock
from federation.errors import FederationError, MissingExtra
from federation.ids import SiteId
from federation.messages import FailureKind, SiteUpdate


@pytest.fixture(scope="module", autouse=True)
def _own_temporary_folder() -> Iterator[None]:
    with own_temporary_folder():
        yield


@pytest.mark.flower
@pytest.mark.slow
def test_error_of_the_server_is_raised_as_it_is(flower_story: Story):
    """The caller sees what the round loop raised and not Flower's view of it."""
    assert str(flower_story.error) == "from the server"


@pytest.mark.flower
@pytest.mark.slow
@pytest.mark.parametrize(
    ("site", "kind", "text"),
    [
        ("dies", FailureKind.UNREACHABLE, "unavailable"),
        ("raises", FailureKind.CRASHED, "KeyError"),
        ("lies", FailureKind.INVALID, "answered for 'honest'"),
        ("unbuilt", FailureKind.CRASHED, "RuntimeError"),
    ],
)
def test_faulty_site_is_reported(
    flower_story: Story, site: str, kind: FailureKind, text: str
):
    """Whatever happens in Ray's processes becomes a failure of that site."""
    message = flower_story.rounds[0][SiteId(site)].message
    assert (message.site, message.kind) == (site, kind)
    assert text in message.message
    # The site's own words stay in its log.
    assert "'lost'" not in message.message
    assert "no data here" not in message.message


@pytest.mark.flower
@pytest.mark.slow
def test_site_whose_process_died_answers_again(flower_story: Story):
    """A new process takes the place of one that died."""
    for site in ("honest", "dies"):
        assert isinstance(flower_story.rounds[1][SiteId(site)].message, SiteUpdate)


@pytest.mark.flower
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["environment", "children", "threads", "signals", "folders", "flower"]
)
def test_nothing_is_left_behind(flower_story: Story, name: str):
    """No process, file, thread, signal handler or variable."""
    assert flower_story.before[name] == flower_story.after[name]


@pytest.mark.flower
@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpus_per_site", "workers", "text"),
    [
        pytest.param(1e6, 1, "simulation engine failed", marks=pytest.mark.long),
        # Ray itself fails, when it has started some of its processes.
        (0.0, -1, r"did not start: .* simulate with engine inproc"),
    ],
)
def test_engine_that_cannot_start_is_an_error_of_ours(
    gpus_per_site: float, workers: int, text: str
):
    """And the server, which waits for answers, is let go."""
    before = surroundings()
    with pytest.raises(FederationError, match=text):
        _run(gpus_per_site=gpus_per_site, workers=workers)
    assert before == surroundings()


@pytest.mark.flower
@pytest.mark.slow
@pytest.mark.long
def test_ray_of_the_caller_is_left_alone():
    """A notebook may have one; it is neither used nor ended."""
    import_flower()
    ray = importlib.import_module("ray")
    with (
        flower_simulation._short_folder() as folder,
        flower_simulation._environment(flower_simulation._QUIET),
        flower_simulation._ray(1, folder),
    ):
        with pytest.raises(FederationError, match=r"call ray\.shutdown\(\) first"):
            _run()
        assert ray.is_initialized()


def _run(*, gpus_per_site: float = 0.0, workers: int = 1) -> None:
    run_on_flower_simulation(
        lambda grid: ask(grid, 1),
        toy_sites.faulty_site,
        sites=FAULTY,
        job_text="",
        clock=SystemClock(),
        gpus_per_site=gpus_per_site,
        workers=workers,
    )


def test_missing_extra_names_the_remedy(monkeypatch: pytest.MonkeyPatch):
    """Somebody without Flower is told how to get it."""
    monkeypatch.setitem(sys.modules, "flwr.serverapp", None)
    with pytest.raises(MissingExtra, match=r"flwr.*pip install 'crossfed\[flower\]'"):
        _run()
    with pytest.raises(MissingExtra):
        import_flower()


def test_long_temporary_folder_is_avoided(monkeypatch: pytest.MonkeyPatch):
    """Names of sockets must not be longer than the system takes."""
    monkeypatch.setattr(tempfile, "tempdir", "/var/" + "x" * 80)
    with flower_simulation._short_folder() as folder:
        assert len(folder) < 40
        assert Path(folder).is_dir()
    assert not Path(folder).exists()


@pytest.mark.slow
def test_flower_is_not_imported_before_it_is_used():
    """Neither by this module nor by what it imports."""
    code = (
        "import sys, cloud_adapters.flower.simulation as f;"
        "print([m for m in ('flwr', 'ray') if m in sys.modules])"
    )
    command = [sys.executable, "-I", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
