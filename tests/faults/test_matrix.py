"""The fault matrix: a dozen cells for every change, all in ``make test-faults``.

That also makes the table of ``docs/explanation/faults.md``.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from faults.cells import CELLS, LANES, Cell, Deed, Mode
from faults.rig import Rig, rig
from faults.trial import Result, run_cells
from support import network, proxy_server

# Longer than it takes to call a site silent (12 s), and than Flower keeps its place
# (20 s).
SILENT_SECONDS = 22.0
# A round fails on a full disk immediately.
FULL_SECONDS = 6.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.deploy,
    pytest.mark.timeout(1200),
    pytest.mark.xdist_group("faults"),
    pytest.mark.skipif(
        not network.possible() or not proxy_server.installed(),
        reason="needs root, iproute2 and nginx",
    ),
]


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with rig(tmp_path_factory.mktemp("faults")) as made:
        yield made


@pytest.fixture(scope="module")
def results(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Mapping[Mode, Future[Result]]]:
    """Of all lanes at once: a run that something befalls mostly waits."""
    found: dict[Mode, Future[Result]] = {}
    with ExitStack() as stack:
        for lane in LANES:
            begin = stack.enter_context(ThreadPoolExecutor(1)).submit
            ends = stack.enter_context(ExitStack())
            made = begin(_enter, ends, tmp_path_factory.mktemp("faults"))
            for chain in lane:
                found[chain[0].mode] = begin(_run, chain, made.result)
        yield found


def _enter(stack: ExitStack, folder: Path) -> Rig:
    return stack.enter_context(rig(folder))


def _run(chain: Sequence[Cell], federation: Callable[[], Rig]) -> Result:
    return run_cells(chain, federation(), _short)


@pytest.mark.parametrize("mode", Mode)
def test_representative_cells(results: Mapping[Mode, Future[Result]], mode: Mode):
    """The run completes, and its model and ledgers are what they should be."""
    assert results[mode].result().faults == ()


def _short(cell: Cell) -> float:
    return FULL_SECONDS if cell.deed is Deed.FULL else min(cell.seconds, SILENT_SECONDS)


@pytest.mark.long
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_cell(federation: Rig, cell: Cell):
    """The same for every cell, with deeds of their full length."""
    assert run_cells([cell], federation).faults == ()
