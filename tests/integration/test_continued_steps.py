"""A machine that must leave in the middle of a round, and one that ends the round."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.deployment import SITES, Deployment, deployed, wait_for
from support.held_models import HOLD
from support.programs import needs

from cloud_adapters.keys.key_file import add_key
from privacy.dp.ledger.ledger_files import read_file

POLICY = """
privacy = "none"
secure_aggregation = false
accept_two_sites = true
max_clip_norm = 100.0
functions = ["support.held_models:held_network", "clients.data:*"]
"""
LEAVES, STAYS = SITES
JOB = f"""
name = "held"
rounds = 1
evaluation = {{ every = 0 }}
schedule = {{ minimum_sites = 1, round_deadline_seconds = 500 }}
training = {{ local_steps = 300, optimizer = {{ name = "adamw", lr = 0.001 }} }}
data = {{ source = "clients.data:digits" }}
sites = [{{ name = "{SITES[0]}" }}, {{ name = "{SITES[1]}" }}]
[model]
factory = "support.held_models:held_network"
options = {{ inputs = 64, classes = 10 }}
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.deploy,
    pytest.mark.flower,
    pytest.mark.timeout(600),
    needs("nginx"),
]


PRIVATE_POLICY = """
secure_aggregation = false
accept_two_sites = true
max_epsilon = 9.0
max_delta = 0.01
total_epsilon = 99.0
functions = ["support.held_models:held_network", "clients.data:*"]
"""
PRIVATE_STEPS = 20
PRIVATE = """
aggregation = { weights = "uniform" }
[privacy.secure_aggregation]
enabled = true
[privacy.differential_privacy]
unit = "record"
target_epsilon = 8.0
"""


@pytest.fixture(params=[POLICY])
def federation(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Deployment]:
    """One of its sites has a home, and both wait when a file says so."""
    environment = {"PYTHONPATH": str(Path(__file__).parents[1])}
    with deployed(
        tmp_path, request.param, environment=environment, started=False
    ) as made:
        add_key(tmp_path / "home.key")
        with (tmp_path / LEAVES / "site.toml").open("a") as file:
            file.write(
                f'\n[home]\nurl = "file://{tmp_path}/home"\n'
                f'encryption = {{ key = "file:{tmp_path}/home.key" }}\n'
            )
        for site in SITES:
            hold(made, site).touch()
            made.start_site(site, **{HOLD: str(hold(made, site))})
        (tmp_path / "held.toml").write_text(JOB)
        yield made


def hold(made: Deployment, site: str) -> Path:
    return made.folder / f"{site}.hold"


def log(made: Deployment, site: str) -> str:
    return (made.folder / f"{site}.log").read_text()


def finished(made: Deployment) -> list[dict[str, Any]]:
    return [each for each in made.events() if each["event"] == "RoundFinished"]


def trained(made: Deployment, runs: int) -> dict[str, Any]:
    """The round of the newest run, once it is over."""
    wait_for(lambda: made.num_runs() > runs and bool(finished(made)), "it ends")
    (found,) = finished(made)
    assert (found["status"], found["answered"]) == ("completed", [*SITES])
    assert found["failed"] == []
    return found


@pytest.mark.long
def test_another_machine_ends_the_round(federation: Deployment):
    """The result is that of a run that nothing has disturbed, to the last bit."""
    made = federation
    made.run(made.folder / "held.toml")
    for site in SITES:
        wait_for(hold(made, site).with_suffix(".reached").exists, f"{site} trains")
    process = made.processes.pop(LEAVES)
    process.terminate()
    hold(made, LEAVES).unlink()  # Now, or it might end its round before.
    assert process.wait(60) == 0
    assert "steps are kept" in log(made, LEAVES)

    # An operator gives the machine its configuration, and nothing else.
    folder = made.folder / "second"
    folder.mkdir(mode=0o700)
    shutil.copy(made.folder / LEAVES / "site.toml", folder)
    shutil.rmtree(made.folder / LEAVES)
    made.start_site("second")
    continues = "continues round 1 after step"
    wait_for(lambda: continues in log(made, "second"), "it continues")
    hold(made, STAYS).unlink()
    one = trained(made, 0)

    made.run(made.folder / "held.toml")
    other = trained(made, 1)
    assert log(made, "second").count(continues) == 1
    assert one["update_norm"] == other["update_norm"]
    assert not [*(folder / "runs").glob("*/sites/*/steps")]


@pytest.mark.parametrize("secure", [True, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.parametrize("federation", [PRIVATE_POLICY], indirect=True)
def test_another_machine_ends_private_steps_for_what_was_paid(
    federation: Deployment,
    secure: bool,  # noqa: FBT001
):
    """In the next round, where the sum needs both; in the clear in the same one."""
    made, job = federation, federation.folder / "private.toml"
    tables = {"local_steps": PRIVATE_STEPS, "batch_size": 64}
    job.write_text(
        JOB.replace("rounds = 1\n", "rounds = 4\n")
        .replace("minimum_sites = 1, ", "")
        .replace(
            "local_steps = 300", ", ".join(f"{k} = {v}" for k, v in tables.items())
        )
        .replace("[model]", f"{PRIVATE}[model]")
        .replace("enabled = true", f"enabled = {str(secure).lower()}")
    )
    follower = made.run(job)
    wait_for(hold(made, LEAVES).with_suffix(".reached").exists, "it trains")
    # It sees the second machine before it reads that the first one leaves.
    with made.frozen("coordinator_process"):
        process = made.processes.pop(LEAVES)
        process.terminate()
        hold(made, LEAVES).unlink()
        assert process.wait(60) == 0
        assert "steps are kept" in log(made, LEAVES)
        folder = made.folder / "second"
        folder.mkdir(mode=0o700)
        shutil.copy(made.folder / LEAVES / "site.toml", folder)
        shutil.rmtree(made.folder / LEAVES)
        made.start_site("second")
        wait_for(lambda: "connected to" in log(made, "second"), "the second is there")
    there = "connected to" if secure else "continues round 1 after step"
    wait_for(lambda: there in log(made, "second"), "the second is there")
    hold(made, STAYS).unlink()
    wait_for(lambda: len(finished(made)) == 4, "it ends", 120)
    follower.communicate(timeout=100)
    ends = {each["round_index"]: each["status"] for each in finished(made)}
    # A secure round that begins while the second machine comes is lost, too.
    first = next(index for index, status in ends.items() if status == "completed")
    assert (first > 1) == secure
    assert f"continues round {first} after step" in log(made, "second")
    ledgers = {
        site: read_file(next(path.glob("runs/*/sites/*/ledger.jsonl"))).charges
        for site, path in ((LEAVES, folder), (STAYS, made.folder / STAYS))
    }
    paid = [(c.round_index, c.event.steps) for c in ledgers[LEAVES]]
    later = [(index, PRIVATE_STEPS) for index in ends if index > first]
    assert paid == [(1, PRIVATE_STEPS), (first, 0), *later]
    spent = [ledgers[site][-1].epsilon_after for site in (LEAVES, STAYS)]
    assert spent[0] <= spent[1] <= 8.0
