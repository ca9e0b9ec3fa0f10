"""A deployed run with a relay: real processes, sockets, keys and certificates."""

import json
from collections.abc import Iterator
from pathlib import Path
from shutil import copy

import pytest
from safetensors.numpy import load_file
from support.deployment import Deployment, deployed, wait_for
from support.programs import needs
from support.small_jobs import small_job

from cloud_adapters.net.ports import free_port
from cloud_adapters.storage.disk.store import LocalStore
from deploy.wiring.simulation import simulate
from federation.job.spec import JobSpec
from monitoring.runs.run_folder import RunFolder

pytestmark = [
    pytest.mark.long,
    pytest.mark.deploy,
    pytest.mark.timeout(600),
    needs("nginx"),
]

RELAY, BEHIND, ALONE = "east", ("east-1", "east-2"), ("west-1", "west-2")
POLICY = """
privacy = "none"
secure_aggregation = false
accept_dropouts = true
max_clip_norm = 100.0
functions = ["clients.models:*", "clients.data:*"]
"""


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """As the how-to says: the relay first, then a copy of its certificate."""
    folder = tmp_path_factory.mktemp("relays")
    sites = [RELAY, *BEHIND, *ALONE]
    table = f'\n[exchange]\nurl = "file://{folder}/exchange"\nthreshold_mb = 1\n'
    with deployed(folder, POLICY, sites=sites, relays=[RELAY], started=False) as made:
        # Sites behind the relay do not need the store.
        for name in ("aggregator/aggregator.toml", RELAY, *ALONE):
            own = folder / (name if "/" in name else f"{name}/site.toml")
            own.write_text("disk_mib = 1\n" + own.read_text() + table)
        address = f"127.0.0.1:{free_port()}"
        with (folder / RELAY / "site.toml").open("a") as file:
            serve = f'listen = "{address}"\nhosts = ["127.0.0.1"]'
            file.write(f"\n[serve]\n{serve}\nsites = {json.dumps(BEHIND)}\n")
        made.start_site(RELAY)
        authority = folder / RELAY / "relay" / "ca.crt"
        wait_for(authority.exists, "the relay has a certificate")
        for site in BEHIND:
            copy(authority, folder / site / "relay.crt")
            with (folder / site / "site.toml").open("a") as file:
                way = f'address = "{address}"\nauthority = "relay.crt"'
                file.write(f"\n[relay]\n{way}\n")
        for site in (*BEHIND, *ALONE):
            made.start_site(site)
        yield made


def job(folder: Path, **tables: object) -> tuple[Path, JobSpec]:
    document = {
        "model": {"factory": "clients.models:digits_cnn"},
        "data": {"source": "clients.data:digits"},
        "relays": [{"name": RELAY, "sites": [*BEHIND]}],
        "schedule": {"minimum_sites": 2, "round_deadline_seconds": 60.0},
        "sites": [{"name": name} for name in (*BEHIND, *ALONE)],
        "rounds": 3,
    }
    found = small_job(**document | tables)
    RunFolder(folder).write_job(found)
    return folder / "job.toml", found


def finish(process: "object") -> dict[str, object]:
    out, err = process.communicate(timeout=400)  # type: ignore[attr-defined]
    assert process.returncode == 0, err  # type: ignore[attr-defined]
    return dict(json.loads(out))


def test_large_model_goes_through_the_exchange(federation: Deployment, tmp_path: Path):
    """To the relay and from it; to its sites in pieces. The model is the same."""
    model = {
        "factory": "clients.models:mlp",
        "options": {"inputs": 64, "classes": 10, "hidden": [5000]},
    }
    momentum = {"server_optimizer": {"name": "nesterov", "lr": 0.7}}
    path, spec = job(
        tmp_path, name="large", model=model, rounds=2, aggregation=momentum
    )
    result = finish(federation.run(path))
    assert (result["status"], result["rounds_completed"]) == ("completed", 2)
    run = max((federation.folder / "aggregator" / "runs" / "large").iterdir())
    expected = simulate(spec, folder=None)
    found = load_file(run / "model.safetensors")
    for name, values in expected.weights.items():
        assert found[name].tobytes() == values.tobytes(), name
    place = federation.folder / "exchange"
    assert (place / "model").is_dir()
    assert [*LocalStore(place).list()] == []


def test_relay_that_is_killed_costs_a_round_at_most(
    federation: Deployment, tmp_path: Path
):
    path, _ = job(tmp_path, name="killed", rounds=12)
    earlier = federation.num_runs()
    process = federation.run(path)
    wait_for(lambda: federation.num_runs() > earlier, "the run begins")
    wait_for(lambda: federation.rounds() > 2, "rounds continue")
    federation.kill_any(RELAY)
    federation.start_site(RELAY)
    result = finish(process)
    assert (result["status"], result["rounds_completed"]) == ("completed", 12)
    rounds = federation.events("RoundFinished")
    assert len(rounds[-1]["answered"]) == 4
    assert sum(len(each["answered"]) < 4 for each in rounds) <= 1
