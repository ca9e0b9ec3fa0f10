"""What decides about a site's data is under the hash that all sites agree on."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
import deploy, privacy
assert privacy.__file__.startswith(sys.argv[1]), privacy.__file__
from privacy.secagg.agreement.code_hash import code_hash
print(code_hash().hex())
"""


def hash_of(folder: Path) -> str:
    command = [sys.executable, "-I", "-c", SCRIPT, str(folder)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A release of few files, which stand for the rest of their rooms."""
    folder = tmp_path_factory.mktemp("release")
    for file in (
        "privacy/__init__.py",
        "privacy/secagg/__init__.py",
        "privacy/secagg/agreement/__init__.py",
        "privacy/secagg/agreement/code_hash.py",
        "clients/__init__.py",
        "clients/privacy/site_plans.py",
        "clients/privacy/sum_plan.py",
        "federation/__init__.py",
        "deploy/__init__.py",
        "deploy/site_host/__init__.py",
        "deploy/site_host/run.py",
        "deploy/aggregator_host/service.py",
    ):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes((ROOT / file).read_bytes())
    return folder


@pytest.mark.parametrize(
    ("file", "counts"),
    [
        ("clients/privacy/site_plans.py", True),
        ("clients/privacy/sum_plan.py", True),
        ("privacy/secagg/agreement/code_hash.py", True),
        ("deploy/site_host/run.py", True),
        ("deploy/aggregator_host/service.py", False),
    ],
)
def test_hash_follows_what_decides(release: Path, file: str, *, counts: bool):
    """Noise plans, the contract, and how a site's host puts its parts together."""
    before = hash_of(release)
    whole = (release / file).read_bytes()
    (release / file).write_bytes(whole + b"# changed\n")
    try:
        assert (hash_of(release) != before) is counts
    finally:
        (release / file).write_bytes(whole)
