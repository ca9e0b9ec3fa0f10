"""The whole matrix, with a table of what came of it: ``make test-faults``."""

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from faults import table
from faults.cells import CELLS, MATRIX, REPRESENTATIVE, Cell
from faults.rig import rig
from faults.trial import Result, run_cells


def main() -> int:
    """Run the cells that were asked for; 1 if something is wrong with one."""
    parser = argparse.ArgumentParser(prog="python -m faults", description=__doc__)
    parser.add_argument(
        "cells", nargs="*", help="parts of names, for example site/p2 proxy/freeze"
    )
    parser.add_argument("--few", action="store_true", help="those of `make test`")
    parser.add_argument("--list", action="store_true", help="show the matrix alone")
    parser.add_argument("--out", type=Path, help="append results to this file")
    parser.add_argument("--keep", type=Path, help="leave the federation's folder here")
    parser.add_argument(
        "--table", type=Path, help="put the results of --out into this page; run none"
    )
    options = parser.parse_args()
    if options.list:
        for cell in MATRIX:
            print(cell.name, cell.senseless and f"({cell.senseless})")  # noqa: T201
        return 0
    if options.table:
        page, results = options.table.read_text(), options.out.read_text()
        options.table.write_text(table.fill_in(page, results.splitlines()))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # Take everything down.
    chosen = _chosen(REPRESENTATIVE if options.few else CELLS, options.cells)
    with tempfile.TemporaryDirectory(prefix="faults-") as scratch:
        return _run(chosen, options.keep or Path(scratch), options.out)


def _run(cells: list[Cell], folder: Path, out: Path | None) -> int:
    num_bad = 0
    with rig(folder) as made:
        for cell in cells:
            try:
                result = run_cells([cell], made)
            except Exception as error:  # noqa: BLE001 -- the others are to run too
                text = f"{type(error).__name__}: {error}"
                result = Result(name=cell.name, faults=(text,), outcome="no verdict")
            num_bad += bool(result.faults)
            print(table.line(result), flush=True)  # noqa: T201
            if out is not None:
                row = table.row_of(result, f"{datetime.now(UTC):%Y-%m-%d}")
                with out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    return int(num_bad > 0)


def _chosen(cells: Sequence[Cell], parts: Sequence[str]) -> list[Cell]:
    """Cells whose name has all the words of one of the parts, in the parts' order."""
    found = (
        cell
        for part in parts or [""]
        for cell in cells
        if set(filter(None, part.split("/"))) <= set(cell.name.split("/"))
    )
    return list(dict.fromkeys(found))


if __name__ == "__main__":
    sys.exit(main())
