"""The notebook of the documentation runs, and shows what a reader expects."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "docs" / "howto" / "first-run.ipynb"

# In a process of its own: a kernel's libraries warn of their own plans.
EXECUTE = """
import sys
import nbformat
from nbclient import NotebookClient

book = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(book, timeout=250, kernel_name="python3").execute()
nbformat.write(book, sys.argv[2])
"""


def code_cells(path: Path) -> list[dict[str, Any]]:
    cells = json.loads(path.read_text("utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def test_it_is_kept_without_outputs():
    cells = code_cells(NOTEBOOK)
    assert cells
    assert all(not cell["outputs"] for cell in cells)


@pytest.mark.slow
@pytest.mark.long
def test_it_runs(tmp_path: Path):
    written = tmp_path / "run.ipynb"
    done = subprocess.run(
        [sys.executable, "-c", EXECUTE, NOTEBOOK, written],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    run, table, plot, state = (cell["outputs"] for cell in code_cells(written))
    assert "run completed" in "".join(text for o in run for text in o.get("text", ()))
    assert "<svg" in "".join(run[-1]["data"]["text/html"])
    assert "training_loss" in "".join(table[0]["data"]["text/plain"])
    assert any("svg" in "".join(text) for text in plot[0]["data"].values())
    assert "'1.weight': (2, 30)" in "".join(state[0]["data"]["text/plain"])
