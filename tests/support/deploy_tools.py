"""Tools that check the files of deploy/, in an environment of their own."""

import functools
import shutil
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / ".venv-deploy" / "bin"


@functools.cache
def tool(name: str) -> str:
    """Where a tool is; skips the test that needs it if it is not installed."""
    found = shutil.which(name, path=FOLDER) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed (make deploy-tools)")
    return found
