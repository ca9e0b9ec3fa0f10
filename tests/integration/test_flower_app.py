"""An existing app of Flower in a deployed federation, through a stock SuperNode."""

import json
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from sklearn.datasets import load_digits
from support.deployment import (
    SITES,
    Deployment,
    crossfed_here as crossfed,
    deployed,
    wait_for,
)
from support.forked import program, shared
from support.programs import needs

from cloud_adapters.net.ports import free_port

APP = Path(__file__).parents[1] / "support" / "flower_lab"
POLICY = """
privacy = "none"
secure_aggregation = false
"""
JOB = f"""
name = "with-a-lab"
rounds = 1
[model]
factory = "clients.models:logistic_regression"
options = {{ inputs = 64, classes = 10 }}
[data]
source = "clients.data:digits"
[training]
local_steps = 4
optimizer = {{ lr = 1e-9 }}
[schedule]
round_deadline_seconds = 120
[[sites]]
name = "lab"
flower_app = {{ settings = {{ lr = 0.25 }} }}
[[sites]]
name = "{SITES[0]}"
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.deploy,
    pytest.mark.timeout(600),
    needs("nginx"),
]


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A site of our own, and a laboratory that follows the how-to."""
    where = tmp_path_factory.mktemp("federation")
    with deployed(where, POLICY, sites=SITES[:1]) as made:
        folder = made.folder / "lab"
        invited = crossfed("aggregator", "invite", "lab", "--config", made.config)
        crossfed("enroll", "--folder", str(folder), given=invited.stdout)
        config = str(folder / "site.toml")
        made.start("relay", "site", "relay", "--config", config, "--port", "0")
        log = made.folder / "relay.log"
        wait_for(lambda: "start it with: " in log.read_text(), f"the relay ({log})")
        start_supernode(made, log.read_text())
        yield made


def start_supernode(made: Deployment, told: str) -> None:
    """Start what the relay says, with the app's folder in place."""
    _, _, line = told.partition("start it with: ")
    (*words, config) = shlex.split(line.splitlines()[0])
    node = "partition-id=0 num-partitions=1"
    assert config == f'app="/folder/of/the/app" {node}'
    programs = Path(sys.executable).parent
    environment = {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "FLWR_HOME": str(made.folder / "flwr"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
    }
    log = made.folder / "supernode.log"
    # Flower's own programs, in forks: each would import for two seconds.
    shared().imports("flwr.supercore.cli")
    shared().imports("flwr.supernode.cli")
    entry, (_, *arguments) = program(words)
    made.processes["supernode"] = shared().start(
        *arguments,
        f'app="{APP}" {node}',
        *("--port", str(free_port())),
        out=log,
        err=log,
        environment=environment,
        call=entry,
    )


def run(federation: Deployment, job: Path) -> tuple[dict[str, dict[str, Any]], Path]:
    """Run the job; return what each site answered, and the run's folder."""
    job.write_text(JOB)
    out, err = federation.run(job).communicate(timeout=400)
    assert out, err
    assert json.loads(out)["status"] == "completed", err
    answered = [e for e in federation.events() if e["event"] == "SiteAnswered"]
    runs = federation.folder / "aggregator" / "runs" / "with-a-lab"
    return {each["site"]: each for each in answered}, max(runs.iterdir())


@pytest.mark.long
def test_an_app_of_flower_takes_part(federation: Deployment, tmp_path: Path):
    """Beside a site of ours; its update, examples and metrics count, value for value.

    One run, because the stock SuperNode has a process for each message. Our site's
    steps are too small to be seen in the model, so all that moves it is the app's.
    """
    answered, folder = run(federation, tmp_path / "job.toml")
    assert answered.keys() == {"lab", SITES[0]}
    lab, ours = answered["lab"], answered[SITES[0]]
    assert lab["num_examples"] == lab["training"]["count"] == 497
    assert lab["evaluation"]["count"] == 100
    first, last = (
        event["pooled"]
        for event in federation.events()
        if event["event"] == "ModelEvaluated"
    )
    assert first["count"] == last["count"] == 359 + 100
    assert last["loss_sum"] < first["loss_sum"]
    assert last["correct"] > 2 * first["correct"]
    pixels, classes = load_digits(return_X_y=True)
    inputs, targets = pixels[1300:] / 16, np.eye(10)[classes[1300:]]
    # From zero, where every class has the probability 1/10, a step of the app.
    gradient = (0.1 - targets).T @ inputs / len(inputs)
    share = 497 / (497 + ours["num_examples"])
    model = load_file(folder / "model.safetensors")
    np.testing.assert_allclose(model["1.weight"], -0.25 * share * gradient, atol=1e-6)
