"""The confusion matrix of a run, with and without secure aggregation."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from support.small_jobs import blobs, small_job
from support.without_report import simulate

from federation.events import Event, ModelEvaluated, SiteAnswered
from federation.job.job_digest import deciding, digest
from federation.job.spec import JobSpec

pytestmark = pytest.mark.slow

NAMES = ["ash", "birch", "cedar"]
SECURE = {"enabled": True, "clip_norm": 5.0, "max_examples": 100}
PUBLIC = {
    "unit": "record",
    "target_epsilon": 8.0,
    "clip_norm": 1.0,
    "held_out": "public",
}


def job(**privacy: Any) -> JobSpec:
    training = {"local_steps": 5, "optimizer": {"lr": 0.5}, "classes": NAMES}
    tables: dict[str, Any] = {"privacy": privacy} if privacy else {}
    if "differential_privacy" in privacy:
        training["batch_size"] = 4
        tables["aggregation"] = {"weights": "uniform"}
    return small_job(num_sites=3, rounds=2, training=training, **tables)


@pytest.mark.parametrize(
    "privacy",
    [{}, {"secure_aggregation": SECURE}, {"differential_privacy": PUBLIC}],
    ids=["open", "secure", "public held-out data"],
)
def test_counts_are_those_of_the_final_model(privacy: dict[str, Any]):
    """Computed again from the weights and all held-out data."""
    events: list[Event] = []
    run = simulate(job(**privacy), listeners=[events.append])
    _, held_out = blobs()
    weight, bias = (a for _, a in sorted(run.weights.items(), key=lambda n: -n[1].ndim))
    predicted = (held_out.inputs @ weight.T + bias).argmax(1)
    wanted = np.zeros((3, 3), dtype=int)
    np.add.at(wanted, (held_out.targets, predicted), 1)
    assert run.summary()["final"]["confusion"] == wanted.tolist()
    assert run.summary()["final"]["classes"] == NAMES
    told = [
        sums
        for e in events
        if isinstance(e, SiteAnswered)
        for sums in (e.evaluation, e.training)
        if sums
    ]
    assert bool(told) == ("secure_aggregation" not in privacy)
    last = [e for e in events if isinstance(e, ModelEvaluated)][-1]
    assert bool(last.by_site) == bool(told)
    predicted_bytes = run.summary()["predicted"]["bytes_up"]
    assert predicted_bytes[0] <= run.bytes_up <= predicted_bytes[1]


def test_names_are_in_the_contract_of_the_sites():
    """The sums that a site is asked for, and their digest, depend on them."""
    named = job()
    other = dataclasses.replace(
        named,
        training=dataclasses.replace(named.training, classes=("ash", "birch", "elm")),
    )
    assert digest(named) != digest(other)
    assert "classes" not in deciding(small_job())["training"]
