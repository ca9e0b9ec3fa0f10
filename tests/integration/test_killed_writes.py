"""What outlives a process is old or new, wherever its writer is killed.

A new durable thing is a row of ``support.durable_things``.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from support.durable_things import THINGS

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[1]
KILL = """
import sys
from pathlib import Path
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/.."]
from support import doomed, durable_things
doomed.kill_everywhere(durable_things.THINGS[sys.argv[2]], Path(sys.argv[3]))
"""


# The first is an object like each of those of a checkpoint; the others save work only.
LONG = {"object of a folder", "cached object", "deployment's launches", "turn of a run"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] * (name in LONG), id=name)
        for name in THINGS
    ],
)
def test_killed_at_every_system_call(name: str, tmp_path: Path):
    """Before, in and after each; and once more while what was killed recovers."""
    done = subprocess.run(
        [sys.executable, "-I", "-c", KILL, TESTS, name, tmp_path / "place"],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
