"""What these tests rely on when two workers share them."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"
TESTS = """
import pytest

@pytest.mark.xdist_group("one")
@pytest.mark.parametrize("number", range(8))
def test_of_a_group(number):
    pass

@pytest.mark.parametrize("number", range(8))
def test_alone(number):
    pass
"""


@pytest.mark.slow
def test_a_group_has_one_worker(tmp_path: Path):
    """Flower's tests would see each other's files; nobody else has to wait for them."""
    shutil.copy(CONFTEST, tmp_path)
    (tmp_path / "test_groups.py").write_text(TESTS)
    options = ("-v", "-n", "2", "--dist", "loadgroup", "-p", "no:cacheprovider")
    done = subprocess.run(
        [sys.executable, "-I", "-m", "pytest", *options, "--rootdir", tmp_path],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "16 passed" in done.stdout, done.stdout + done.stderr
    workers = {
        name: set(re.findall(rf"\[(gw\d)\].*{name}\[", done.stdout))
        for name in ("test_of_a_group", "test_alone")
    }
    assert len(workers["test_of_a_group"]) == 1
    assert len(set().union(*workers.values())) == 2
