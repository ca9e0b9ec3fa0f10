"""The fault matrix: a few cells for every change, all in ``make test-faults``.

That also makes the tables of ``RESULTS.md``.
"""

from collections.abc import Iterator

import pytest
from faults.cells import CELLS, REPRESENTATIVE, Cell
from faults.rig import Rig, rig
from faults.trial import run_cells
from support.programs import needs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.deploy,
    pytest.mark.timeout(1200),
    pytest.mark.xdist_group("faults"),
    needs("root", "ip", "nginx"),
]


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with rig(tmp_path_factory.mktemp("faults")) as made:
        yield made


def test_representative_cells(federation: Rig):
    """The run completes, and its ledgers are what they should be."""
    assert run_cells(REPRESENTATIVE, federation).faults == ()


@pytest.mark.long
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_cell(federation: Rig, cell: Cell):
    """The same for every cell, with deeds of their full length."""
    assert run_cells([cell], federation).faults == ()
