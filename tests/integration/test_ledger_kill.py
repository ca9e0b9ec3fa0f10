"""A site killed at any system call never released more than its ledger shows."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support import doomed_ledger

from privacy.dp.ledger import ledger_files

pytestmark = [pytest.mark.slow]

SCRIPT = Path(doomed_ledger.__file__)


def test_no_kill_hides_a_release(tmp_path: Path):
    """Before, in and after each call, and once more while the site recovers.

    The forks come from a process of its own, without the threads of this one.
    """
    done = subprocess.run(
        [sys.executable, "-I", SCRIPT, tmp_path],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    moments = json.loads(done.stdout)["moments"]
    # Six flushed things a charge, three moments each, at the least.
    assert moments > doomed_ledger.ROUNDS * 6 * doomed_ledger.PLACES
    lost, recoveries = 0, 0
    for moment in range(moments):
        folder = tmp_path / f"{moment:04d}"
        marks = (folder / doomed_ledger.MARKS).read_text().split("\n")[:-1]
        released = [int(mark.split()[0]) for mark in marks]
        contents = ledger_files.read_file(folder / ledger_files.LEDGER_NAME)
        charged = [charge.round_index for charge in contents.charges]
        assert released == list(range(doomed_ledger.ROUNDS))
        for round_index in released:
            assert charged.count(round_index) >= released.count(round_index)
        # Every release was covered by what the ledger showed when it was made.
        spent = {charge.epsilon_after for charge in contents.charges}
        assert {float(mark.split()[1]) for mark in marks} <= spent
        lost += len(charged) - len(released)
        recoveries += contents.num_recoveries
    # The test would be empty if no kill came between a charge and its release.
    assert lost > 0
    assert recoveries > 0
