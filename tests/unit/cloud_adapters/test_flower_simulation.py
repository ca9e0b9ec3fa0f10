"""What a run on Flower's simulation engine leaves, and how it ends badly."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support import toy_sites

from cloud_adapters.flower import simulation as flower_simulation
from cloud_adapters.flower.simulation import import_flower, run_on_flower_simulation
from federation.clock import SystemClock
from federation.errors import FederationError, MissingExtra
from federation.exchange import exchange
from federation.ids import SiteId
from federation.messages import FailureKind, Reply, RoundTask, SiteUpdate, TaskKind
from federation.protocols import Grid

SITES = [SiteId(n) for n in ("honest", "dies", "raises", "lies", "unbuilt")]


def run(server: Any, **changes: Any) -> Any:
    """Run a server against faulty sites."""
    arguments = {
        "sites": SITES,
        "job_text": "",
        "clock": SystemClock(),
        "workers": 1,
        **changes,
    }
    return run_on_flower_simulation(server, toy_sites.faulty_site, **arguments)


PATIENCE = 30  # Seconds.


def ask(
    grid: Grid, round_index: int, *, wanted: Callable[[SiteId], bool] = bool
) -> dict[SiteId, Reply]:
    """Send a task to every site that is wanted."""
    tasks = [
        RoundTask(
            run_id="run-1",
            round_index=round_index,
            site=site,
            kind=TaskKind.TRAIN,
            layout_digest="ab" * 32,
            weights_d=np.ones(3, dtype=np.float32),
            integers_m=np.empty(0, dtype=np.int64),
            evaluate=False,
            evaluate_after=False,
        )
        for site in grid.sites()
        if wanted(site)
    ]
    return {
        task.site: reply
        for task, reply in zip(
            tasks, exchange(grid, tasks, deadline_seconds=30), strict=True
        )
    }


def children() -> set[str]:
    """Processes that this one has started and that still live."""
    found = subprocess.run(
        ["ps", "--ppid", str(os.getpid()), "-o", "args="],  # noqa: S607
        capture_output=True,
        text=True,
        check=False,
    )
    return {line for line in found.stdout.splitlines() if not line.startswith("ps ")}


def surroundings() -> dict[str, Any]:
    """What a run must leave as it was."""
    import_flower()  # Which sets variables of its own, once a process.
    return {
        "environment": dict(os.environ),
        "children": children(),
        "threads": {t for t in threading.enumerate() if not t.daemon},
        "signals": [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)],
        "folders": {p.name for p in Path(tempfile.gettempdir()).glob("crossfed-*")},
        "flower": (Path.home() / ".flwr").exists(),
    }


@pytest.fixture(scope="module", autouse=True)
def _own_temporary_folder() -> Iterator[None]:
    """See this module's files and no other process's; the path must be short."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        tempfile.tempdir = folder
        yield
        tempfile.tempdir = None


@pytest.fixture(scope="module")
def story() -> SimpleNamespace:
    """Two rounds with faulty sites, then an error in the server."""
    rounds: list[dict[SiteId, Reply]] = []

    def server(grid: Grid) -> None:
        # A task that waits behind one that kills its process may go with it.
        first = ask(grid, 1, wanted=lambda site: site != "dies")
        rounds.append(first | ask(grid, 1, wanted=lambda site: site == "dies"))
        for _ in range(PATIENCE):  # Its new process takes a while to start.
            again = ask(grid, 2, wanted=lambda site: site == "dies")
            if isinstance(again[SiteId("dies")].message, SiteUpdate):
                break
            time.sleep(1)
        rounds.append(ask(grid, 3))
        raise RuntimeError("from the server")

    before = surroundings()
    with pytest.raises(RuntimeError) as caught:
        run(server)
    return SimpleNamespace(
        rounds=rounds, error=caught.value, before=before, after=surroundings()
    )


@pytest.mark.flower
@pytest.mark.slow
def test_error_of_the_server_is_raised_as_it_is(story: SimpleNamespace):
    """The caller sees what the round loop raised and not Flower's view of it."""
    assert str(story.error) == "from the server"


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
    story: SimpleNamespace, site: str, kind: FailureKind, text: str
):
    """Whatever happens in Ray's processes becomes a failure of that site."""
    message = story.rounds[0][SiteId(site)].message
    assert (message.site, message.kind) == (site, kind)
    assert text in message.message
    # The site's own words stay in its log.
    assert "'lost'" not in message.message
    assert "no data here" not in message.message


@pytest.mark.flower
@pytest.mark.slow
def test_site_whose_process_died_answers_again(story: SimpleNamespace):
    """A new process takes the place of one that died."""
    for site in ("honest", "dies"):
        assert isinstance(story.rounds[1][SiteId(site)].message, SiteUpdate)


@pytest.mark.flower
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["environment", "children", "threads", "signals", "folders", "flower"]
)
def test_nothing_is_left_behind(story: SimpleNamespace, name: str):
    """No process, file, thread, signal handler or variable."""
    assert story.before[name] == story.after[name]


@pytest.mark.flower
@pytest.mark.slow
def test_engine_that_cannot_start_is_an_error_of_ours():
    """And the server, which waits for answers, is let go."""
    before = surroundings()
    with pytest.raises(FederationError, match="simulation engine failed"):
        run(lambda grid: ask(grid, 1), gpus_per_site=1e6)
    assert before == surroundings()


def test_missing_extra_names_the_remedy(monkeypatch: pytest.MonkeyPatch):
    """Somebody without Flower is told how to get it."""
    monkeypatch.setitem(sys.modules, "flwr.serverapp", None)
    with pytest.raises(MissingExtra, match=r"flwr.*pip install 'crossfed\[flower\]'"):
        run(ask)
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
