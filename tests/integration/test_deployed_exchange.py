"""A federation of real processes whose models travel through a store."""

import json
import tomllib
from pathlib import Path

import pytest
from support import proxy_server
from support.deployment import deployed

from cloud_adapters.storage.local import LocalStore

JOBS = Path(__file__).parents[2] / "jobs"
FLOOR = """
privacy = "none"
accept_two_sites = true
max_clip_norm = 100.0
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.deploy,
    pytest.mark.timeout(600),
    pytest.mark.xdist_group("deployed"),
    pytest.mark.skipif(
        not proxy_server.installed(), reason="nginx is not installed (make nginx)"
    ),
]


def large_job(path: Path) -> Path:
    """Two rounds in secret, of a network with 1.5 MB of weights."""
    text = (JOBS / "quickstart.toml").read_text()
    model = 'factory = "clients.models:mlp"\n'
    model += "options = { inputs = 64, classes = 10, hidden = [5000] }"
    path.write_text(text.replace('factory = "clients.models:digits_cnn"', model))
    assert tomllib.loads(path.read_text())["model"]["options"]["hidden"] == [5000]
    return path


def test_secure_run_through_a_store(tmp_path: Path):
    """Models and masked updates go through it, and nothing is left in it."""
    place = tmp_path / "store"
    table = f'\n[exchange]\nurl = "file://{place}"\nthreshold_mb = 1\n'
    with deployed(tmp_path, FLOOR + table) as federation:
        with Path(federation.config).open("a") as config:
            config.write(table)
        job = large_job(tmp_path / "job.toml")
        process = federation.run(job, "rounds=2")
        out, err = process.communicate(timeout=400)
        assert process.returncode == 0, err
        result = json.loads(out)
        assert (result["status"], result["rounds_completed"]) == ("completed", 2)
    assert {each.name for each in place.iterdir()} >= {"model", "sites"}
    assert list(LocalStore(place).list()) == []
    assert list(tmp_path.rglob("scratch")) == []
