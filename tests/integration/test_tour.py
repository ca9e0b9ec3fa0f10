"""Whoever reads the files of the tour has read what the quickstart runs."""

import inspect
import re
import sys
import threading
from pathlib import Path
from types import FrameType

import pytest

from deploy.cli import main

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\]\(\.\./\.\./([\w/]+\.py)\)")


def toured() -> set[str]:
    """Python files that the numbered tour links to."""
    page = (ROOT / "docs/explanation/architecture.md").read_text("utf-8")
    tour = page.partition("in this order")[2].partition("\n## ")[0]
    return set(LINK.findall(tour))


def executed(arguments: list[str]) -> set[str]:
    """Files of which a command calls a function; to be imported is not enough."""
    found: set[str] = set()

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            found.add(frame.f_code.co_filename)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        assert main(arguments) == 0
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    inside = [Path(file) for file in found if file.startswith(str(ROOT))]
    return {str(path.relative_to(ROOT)) for path in inside}


@pytest.mark.slow
def test_quickstart_runs_every_file_of_the_tour(tmp_path: Path):
    job = str(ROOT / "jobs" / "quickstart.toml")
    short = ["--set", "rounds=1", "--set", f"storage.url={tmp_path.as_uri()}"]
    missing = toured() - executed(["simulate", job, *short])
    assert toured()
    assert not missing
