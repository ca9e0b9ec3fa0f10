"""The fault matrix: a dozen cells for every change, all of them where hours matter not.

``make test-faults`` runs the whole of it, and makes the table of
``docs/explanation/faults.md``.
"""

from collections.abc import Iterator

import pytest
from faults.cells import CELLS, DOZEN, Cell
from faults.rig import Rig, rig
from faults.trial import run_cell
from support import network, proxy_server

# Longer than a silent site counts as there (12 s) and Flower holds its place (20 s).
SHORT_SECONDS = 22.0

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


@pytest.mark.parametrize("cell", DOZEN, ids=lambda cell: cell.name)
def test_representative_cell(federation: Rig, cell: Cell):
    """The run completes, and its model and ledgers are what they should be."""
    seconds = min(cell.seconds, SHORT_SECONDS)
    assert run_cell(cell, federation, seconds).faults == ()


@pytest.mark.long
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_cell(federation: Rig, cell: Cell):
    """The same for every cell, with deeds of their full length."""
    assert run_cell(cell, federation).faults == ()
