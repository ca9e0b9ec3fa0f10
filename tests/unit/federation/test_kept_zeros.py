"""Jobs that start from a pruned model."""

from typing import Any

import pytest
from support import toy

from federation.errors import JobError
from federation.job import job_digest


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "weights to start from"),
        ({"communication": {"down_content": "change"}}, "must receive whole models"),
        ({"training": {"optimizer": {"name": "muon", "momentum": 0.9}}}, "muon mixes"),
        ({"training": {"task": "trainer"}}, "zeros like all other"),
        ({"model": {"options": {"lora": {"rank": 2}}}}, "adapters begin with zeros"),
    ],
)
def test_zeros_are_kept_only_where_they_would_stay(keys: dict[str, Any], message: str):
    """Each refusal names the reason."""
    weights = {"weights": "a.safetensors@" + 64 * "0"} if keys else {}
    with pytest.raises(JobError, match=message):
        toy.job(toy.merged({"model": {"keep_zeros": True, **weights}}, keys))


def test_zeros_of_parameters_are_kept_by_the_aggregator():
    """Whatever the sites send; running statistics may leave zero."""
    job = toy.job({"model": {"weights": "w@" + 64 * "0", "keep_zeros": True}})
    state = toy.Toy(job=job).run()  # It begins with zeros alone.
    views = {spec.name: view for spec, view in toy.LAYOUT.float_views(state.weights_d)}
    assert not views["weight"].any()
    assert views["running_mean"].all()


def test_jobs_without_the_key_keep_their_digest():
    """Runs of earlier releases continue."""
    assert "keep_zeros" not in job_digest.deciding(toy.job())["model"]
