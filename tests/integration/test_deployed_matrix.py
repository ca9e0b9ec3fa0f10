"""Each site's own model at each other site, where its operator gives it away."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.deployment import Deployment, crossfed_here, deployed
from support.programs import needs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.deploy,
    pytest.mark.timeout(600),
    pytest.mark.xdist_group("deployed"),
    needs("nginx"),
]

SITES = ("site-a", "site-b", "site-c")
POLICY = """
privacy = "none"
secure_aggregation = false
"""
JOB = """
name = "heads"
rounds = 2
data = { source = "clients.data:breast_cancer" }
[model]
factory = "clients.models:mlp"
options = { inputs = 30, classes = 2, hidden = [4] }
personal = ["3.*"]
[training]
local_steps = 5
batch_size = 16
optimizer = { lr = 0.1 }
"""


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with deployed(tmp_path_factory.mktemp("federation"), POLICY, sites=SITES) as made:
        yield made


def results(federation: Deployment, *words: str) -> tuple[str, dict[str, float]]:
    """Run a job; return the run's ID, and the loss at each site."""
    words = (*words, "--aggregator", federation.config, "--json")
    out, err = federation.follow("run", *words).communicate(timeout=400)
    assert json.loads(out)["status"] == "completed", err
    last: dict[str, Any] = federation.events("ModelEvaluated")[-1]
    losses = [each["loss_sum"] / each["count"] for each in last["by_site"]]
    return json.loads(out)["run_id"], dict(zip(last["sites"], losses, strict=True))


@pytest.mark.long
def test_models_that_operators_give_away_make_the_matrix(
    federation: Deployment, tmp_path: Path
):
    """On its diagonal is what the sites reported of their own models in training."""
    job = tmp_path / "job.toml"
    job.write_text(JOB + "".join(f'[[sites]]\nname = "{s}"\n' for s in SITES))
    run, own = results(federation, str(job))
    shared = federation.folder / "aggregator" / "runs" / "heads" / run
    refused = crossfed_here(
        *("run", str(job), "--evaluate", str(shared)),
        *("--aggregator", federation.config),
        code=2,
    )
    assert "model.personal" in refused.stderr
    assert "crossfed site model" in refused.stderr
    matrix = {}
    for site in SITES:
        model = str(tmp_path / f"{site}.safetensors")
        config = str(federation.folder / site / "site.toml")
        given = str(shared / "model.safetensors")
        words = ("site", "model", run, given, "--out", model, "--config", config)
        crossfed_here(*words)
        whole = ("--set", "model.personal=[]", "--evaluate", model)
        _, matrix[site] = results(federation, str(job), *whole)
    for site in SITES:
        assert matrix[site][site] == pytest.approx(own[site], rel=1e-6)
        others = [matrix[other][site] for other in SITES if other != site]
        assert all(abs(loss - own[site]) > 1e-3 for loss in others)
