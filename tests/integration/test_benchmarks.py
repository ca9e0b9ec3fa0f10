"""Every benchmark script runs, in a form that is too short for its figures to count."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import ForkServer
from support.programs import needs

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

JOB = """
name = "tiny"
rounds = 2

[model]
factory = "clients.models:digits_cnn"

[data]
source = "clients.data:digits"

[training]
local_steps = 1
batch_size = 8

[[sites]]
name = "one"

[[sites]]
name = "two"
"""

# What makes each script short. JOB stands for a job file, of two sites and two rounds,
# and POISONED for one of five sites that take one step a round.
SHORT = {
    "adapter_privacy": "--smoke",
    "adapters": "--smoke",
    "audit": "--smoke",
    "agents_memory": "--sites 1 --ways shared",
    "checkpoints": "--megabytes 4",
    "codec_costs": "--smoke",
    "combine": "--values 100000 --sites 2 --threads 1 --repetitions 1",
    "deployed": "--only tiny --tiny-rounds 2 --flower-rounds 0",
    "dp_sgd": "--repetitions 1 --kinds cnn",
    "elasticity": "--rounds 10 --seeds 1",
    "evaluate": "--turns 1 --records 500 --hidden 64",
    "few_levels": "--smoke",
    "group_sums": "--job POISONED --smoke --attacks flip",
    "live_page": "--rounds 3 --sites 4",
    "muon": "--smoke",
    "noise": "--values 10000 --repetitions 1",
    "objective_overhead": "--smoke",
    "overhead": "--job JOB --rounds 1",
    "plan_accuracy": "--smoke",
    "precision": "--values 10000 --sites 2",
    "privacy_utility": "--job JOB --runs 1 --epsilons inf --repetitions 0",
    "rounds": "--sites 2 --rounds 20 --ours-only",
    "secure_aggregation": "--values 100000 --sites 2 --bits 32 --repetitions 1"
    " --memory-values 100000",
    "spot_policy": "--traces 5 --processes 1",
    "model_memory": "--smoke",
    "storage": "--megabytes 1 --turns 1",
    "storage_cloud": "--store s3 --large ours --gigabytes 0",
    "streaming": "--examples 300 --step-seconds 0 --setup-seconds 0 --repeats 1",
    "tune_samplers": "--smoke",
    "turns": "--pairs 1 --cases encrypted-read-small",
    "unequal_sites": "--smoke --only groups",
    "virtual_accuracy": "--smoke --only capacity --rounds 2",
}
# `make lint` checks the types of all of them; these two also run in `make test`.
NORMAL = {"overhead", "precision"}
NGINX = {"adapter_privacy", "agents_memory", "evaluate", "unequal_sites"}
FLOWER = {
    "agents_memory",
    "combine",
    "deployed",
    "evaluate",
    "secure_aggregation",
    "unequal_sites",
}
# Its cases are tried below.
ELSEWHERE = {"turn_cases"}
LONG_CASES = {
    "secure-16-threshold-12",
    "secure-64-threshold-43",
    "private",
    "deployed",
    "start",  # As `overhead.py` measures it.
}


def run(
    name: str, *arguments: str, server: ForkServer | None = None
) -> list[dict[str, object]]:
    """The JSON lines that a script prints, in a process of its own or in a fork."""
    script = BENCHMARKS / f"{name}.py"
    if server is not None:
        forked = server.run(*arguments, folder=BENCHMARKS.parent, script=script)
        assert forked.code == 0, forked.stderr
        return [json.loads(line) for line in forked.stdout.splitlines()]
    done = subprocess.run(
        [sys.executable, script, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=BENCHMARKS.parent,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def poisoned() -> str:
    """The job of that name, with as little training as there can be."""
    text = (BENCHMARKS.parent / "jobs" / "poisoned.toml").read_text()
    assert "local_steps = 15\n" in text
    return text.replace("local_steps = 15\n", "local_steps = 1\n")


def test_no_script_is_left_out():
    """A script added without a short form fails here."""
    scripts = {
        path.stem
        for path in BENCHMARKS.glob("*.py")
        if 'if __name__ == "__main__":' in path.read_text()
    }
    assert scripts == SHORT.keys() | ELSEWHERE


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[pytest.mark.flower] * (name in FLOWER)
            + [needs("git")] * (name == "turns")
            + [needs("nginx")] * (name in NGINX)
            + [pytest.mark.long] * (name not in NORMAL),
        )
        for name in SHORT
    ],
)
def test_script_prints_the_machine_and_figures(
    name: str, tmp_path: Path, server: ForkServer
):
    """JSON lines, of which the first says what the others are."""
    (tmp_path / "JOB").write_text(JOB)
    (tmp_path / "POISONED").write_text(poisoned())
    arguments = [
        str(tmp_path / word) if word in {"JOB", "POISONED"} else word
        for word in SHORT[name].split()
    ]
    machine, *figures = run(name, *arguments, server=server)
    assert machine["benchmark"] == name
    assert figures


@pytest.mark.long
def test_every_case_of_turns_does_a_unit(server: ForkServer):
    """But for those that take long, whose functions others share."""
    names = run("turn_cases", "--list", server=server)[0]["cases"]
    assert isinstance(names, list)
    wanted = [name for name in names if name not in LONG_CASES]
    found = run("turn_cases", *wanted, server=server)
    assert [row["case"] for row in found if "case" in row] == wanted
    assert len([row for row in found if "seconds" in row]) == len(wanted)


@pytest.mark.long
@pytest.mark.flower
@pytest.mark.parametrize("name", sorted(LONG_CASES))
def test_long_case_of_turns_does_a_unit(name: str):
    found = run("turn_cases", name)
    assert [row["case"] for row in found if "case" in row] == [name]
    assert len([row for row in found if "seconds" in row]) == 1
