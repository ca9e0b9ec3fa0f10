"""crossfed without any of its extras trains, and names the extra that it lacks."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
JOBS = TESTS.parent / "jobs"
QUICKSTART = str(JOBS / "quickstart.toml")
CLUSTER = str(TESTS.parent / "deploy" / "examples" / "cluster.toml")

pytestmark = pytest.mark.slow

SMALL = ["--set", "rounds=2", "--set", "training.local_steps=2"]
WORKS = {
    "help": ["--help"],
    "check-job": ["check-job", QUICKSTART],
    # Without the report, which the next one draws.
    "simulate": ["simulate", QUICKSTART, *SMALL, "--out", "run", "--no-report"],
    "report": ["report", "run"],
    "export": ["export", "run", "--to", "file://exported"],
    "shards": ["data", "shard", "clients.data:digits", "file://tar"],
    "doctor": ["doctor"],
}
SIMULATE = ["simulate", QUICKSTART, "--set", "rounds=1"]
SHARD = ["data", "shard", "clients.data:breast_cancer"]
GOOGLE_KEY = "projects/p/locations/l/keyRings/r/cryptoKeys/k"
KEY = "--encryption-key"
NEEDS = {
    "s3": ("aws", [*SIMULATE, "--set", "storage.url=s3://bucket/runs"]),
    "gcs": ("gcp", [*SIMULATE, "--set", "storage.url=gs://bucket/runs"]),
    "s3-shards": ("aws", [*SHARD, "s3://bucket/shards"]),
    "s3-data": ("aws", ["check-job", str(JOBS / "two-clouds-storage.toml")]),
    "aws-key": ("aws", [*SHARD, "file://a", KEY, "aws-kms:alias/key"]),
    "gcp-key": ("gcp", [*SHARD, "file://b", KEY, f"gcp-kms:{GOOGLE_KEY}"]),
    "s3-doctor": ("aws", ["doctor", "--store", "s3://bucket"]),
    "gcs-doctor": ("gcp", ["doctor", "--store", "gs://bucket"]),
    "cluster": ("kubernetes", ["down", CLUSTER]),
    "parquet": ("parquet", [*SHARD, "file://parquet", "--format", "parquet"]),
    "mlflow": ("mlflow", ["export-metrics", "run", "--to", "mlflow"]),
    "tensorboard": (
        "tensorboard",
        ["export-metrics", "run", "--to", "tensorboard"],
    ),
    "engine": ("flower", [*SIMULATE, "--engine", "flower"]),
    "aggregator": ("flower", ["aggregator", "init", "aggregator"]),
    "agent": ("flower", ["site", "up"]),
    "relay": ("flower", ["site", "relay"]),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process found that ran every command."""
    lines = WORKS | {name: line for name, (_, line) in NEEDS.items()}
    done = subprocess.run(
        [sys.executable, "-m", "support.core_alone"],
        cwd=tmp_path_factory.mktemp("work"),
        env={"PYTHONPATH": str(TESTS)},
        input=json.dumps([*lines.values()]),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    written = json.loads(done.stdout)
    return {**written, "results": dict(zip(lines, written["results"], strict=True))}


@pytest.fixture
def results(found: dict[str, Any]) -> dict[str, tuple[int, str]]:
    """Exit code, and what was written, of every command."""
    return {n: (code, out + err) for n, (code, out, err) in found["results"].items()}


def test_training_imports_no_compiler(found: dict[str, Any]):
    """It would take as long as importing torch."""
    assert found["compiler"] is False


@pytest.mark.parametrize("name", WORKS)
def test_what_needs_no_extra(results: dict[str, tuple[int, str]], name: str):
    code, said = results[name]
    assert code == 0, said


@pytest.mark.parametrize("name", NEEDS)
def test_what_needs_an_extra_names_it(results: dict[str, tuple[int, str]], name: str):
    """One line, with the command that mends it, and no traceback."""
    code, said = results[name]
    assert code == 1, said
    (line,) = (line for line in said.splitlines() if "not installed" in line)
    assert f"pip install 'crossfed[{NEEDS[name][0]}]'" in line
    assert "Traceback" not in said
