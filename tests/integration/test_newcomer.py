"""Somebody who follows the README from an empty folder sees a report.

The notebook, planted mistakes, and folders with names of ours have tests of their own:
``test_notebook``, ``test_planted_mistakes`` and ``test_front_door``. CI makes the whole
demo, with what it installs.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHORT = "--set rounds=1 --set training.local_steps=2"

pytestmark = pytest.mark.slow


@pytest.mark.long
def test_make_demo_leads_to_a_report(tmp_path: Path):
    """With what is installed here, and few steps."""
    (tmp_path / "jobs").mkdir()
    (tmp_path / "tools").mkdir()
    for name in ("Makefile", "jobs/quickstart.toml", "tools/brief.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "crossfed"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -Im crossfed "$@" {SHORT}\n')
    command.chmod(0o700)
    done = subprocess.run(
        ["make", "demo", f"BIN={command.parent}", "READY=", "DEMO_READY="],  # noqa: S607
        cwd=tmp_path,
        env={k: v for k, v in os.environ.items() if not k.startswith("MAKE")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *before, report, following = done.stdout.splitlines()
    assert len(before) < 14
    assert not any(line.startswith("site ") for line in before)
    assert following.startswith("next ")
    what, _, place = report.partition(" ")
    assert what == "report"
    page = (tmp_path / place.strip()).read_text()
    assert "1 of 1" in page
    assert "quickstart" in page
