"""A federation of real processes whose models travel through a store."""

import contextlib
import json
import threading
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any, Self

import pytest
from support.deployment import SITES, Deployment, deployed
from support.programs import needs

from clients.models.model_pool import ModelPool
from cloud_adapters.keys.key_file import add_key
from cloud_adapters.storage.disk.store import LocalStore
from cloud_adapters.storage.encrypted_format import MAGIC
from federation.job import job_file
from federation.vectors import Vector

JOBS = Path(__file__).parents[2] / "jobs"
POLICY = """
privacy = "none"
accept_two_sites = true
max_clip_norm = 100.0
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.deploy,
    pytest.mark.timeout(600),
    needs("nginx"),
]


def large_job(path: Path) -> Path:
    """Two rounds in secret, of a network with 1.5 MB of weights."""
    text = (JOBS / "quickstart.toml").read_text()
    model = 'factory = "clients.models:mlp"\n'
    model += "options = { inputs = 64, classes = 10, hidden = [5000] }"
    path.write_text(text.replace('factory = "clients.models:digits_cnn"', model))
    assert tomllib.loads(path.read_text())["model"]["options"]["hidden"] == [5000]
    return path


class Thief:
    """Reads along in a store: keeps every object that it ever held."""

    def __init__(self, place: Path, loot: Path) -> None:
        loot.mkdir()
        self.place, self.loot = place, loot
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._steal)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _steal(self) -> None:
        while not self._stopped.wait(0.02):
            for top in ("model", "sites"):
                for path in (self.place / top).rglob("*"):
                    name = str(path.relative_to(self.place)).replace("/", " ")
                    with contextlib.suppress(OSError):  # It has gone, or is known.
                        (self.loot / name).hardlink_to(path)

    def objects(self, top: str) -> list[bytes]:
        """What the objects of one writer held."""
        return [path.read_bytes() for path in self.loot.glob(f"{top} *")]


def traces(content: bytes, weights_d: Vector) -> int:
    """How many of a model's values, eight in a row, are found in an object."""
    rows = weights_d[: weights_d.size // 8 * 8].reshape(-1, 8)[::500]
    return sum(row.tobytes() in content for row in rows)


def exchange_table(place: Path, key: Path) -> str:
    return (
        f'\n[exchange]\nurl = "file://{place}"\nthreshold_mb = 1\n'
        f'encryption = {{ key = "file:{key}" }}\n'
    )


def test_encrypted_run_through_a_store(tmp_path: Path):
    """Models and masked updates go through it as ciphertext, and nothing is left."""
    place, key = tmp_path / "store", tmp_path / "a.key"
    add_key(key)
    table = exchange_table(place, key)
    # As people start them, and not as forks, they train in test_local_user.py.
    with deployed(tmp_path, POLICY + table) as federation:
        with Path(federation.config).open("a") as config:
            config.write(table)
        job = large_job(tmp_path / "job.toml")
        with Thief(place, tmp_path / "loot") as thief:
            process = federation.run(job, "rounds=2")
            out, err = process.communicate(timeout=400)
        assert process.returncode == 0, err
        result = json.loads(out)
        assert (result["status"], result["rounds_completed"]) == ("completed", 2)
        models, updates = thief.objects("model"), thief.objects("sites")
        assert len(models) >= 2
        assert len(updates) == 2 * len(SITES)
        weights_d, _ = ModelPool(job_file.load(job)).initial_weights()
        assert traces(weights_d.tobytes(), weights_d) > 50
        for content in (*models, *updates):
            assert content.startswith(MAGIC)
            assert traces(content, weights_d) == 0
        url = LocalStore(place).url
        check_meters(federation, url)
        assert url in {used["url"] for used in result["storage"]}
    assert {each.name for each in place.iterdir()} >= {"model", "sites"}
    assert list(LocalStore(place).list()) == []
    assert list(tmp_path.rglob("scratch")) == []


def check_meters(federation: Deployment, url: str) -> None:
    """What the store was used for: the coordinator's in the run, a site's with it."""
    used = [e for e in federation.events() if e["event"] == "StoreUsed"]
    (run_id,) = {e["run_id"] for e in federation.events() if e["event"] == "RunStarted"}
    mine = uses([e for e in used if e["url"] == url])
    assert {e["who"] for e in used} == {"coordinator"}
    assert mine["put"] > 2 << 20
    assert mine["read"] > 4 << 20
    for site in SITES:
        path = federation.folder / site / "runs" / run_id / "storage.jsonl"
        told = [json.loads(line) for line in path.read_text().splitlines()]
        assert {(e["who"], e["url"]) for e in told} == {(site, url)}
        assert uses(told)["read"] > 2 << 20


def uses(told: list[dict[str, Any]]) -> dict[str, int]:
    """Bytes by operation."""
    found: dict[str, int] = Counter()
    for each in (use for event in told for use in event["uses"]):
        found[each["operation"]] += each["sent_bytes"] + each["received_bytes"]
    return found
