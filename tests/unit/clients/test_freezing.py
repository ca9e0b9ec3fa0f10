"""Parameters frozen by pattern, and a pretrained start under another head."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.small_jobs import small_job
from support.without_report import simulate

from clients.audit.canaries import FACTORY
from clients.models import mlp, with_weights
from clients.models.freezing import freeze
from clients.models.model_pool import ModelPool
from deploy.audit.jobs import with_canaried_model
from deploy.wiring.parts import build_federation
from federation.errors import JobError
from federation.job import job_digest
from federation.job.spec import JobSpec

OPTIONS = {"inputs": 4, "classes": 3, "hidden": [5, 6]}
BODY, HEAD = ("1.*", "3.*"), ("5.*",)  # Layers of the mlp below.


def job_of(*frozen: str, **tables: Any) -> JobSpec:
    model = {"factory": "clients.models:mlp", "options": OPTIONS}
    return small_job(num_sites=2, model={**model, "frozen": list(frozen)}, **tables)


def net() -> torch.nn.Module:
    return mlp(4, 3, hidden=[5, 6])


def test_only_what_is_not_frozen_is_trained_and_sent():
    """The other parameters stay as the factory drew them."""
    job = job_of(*BODY, rounds=2)
    pool = ModelPool(job)
    assert pool.layout.size == pool.num_trained == 6 * 3 + 3
    before = build_federation(job_of()).pool
    with before.borrow() as model:
        first = {k: t.clone() for k, t in model.module.state_dict().items()}
    done = simulate(job)
    for name, values in done.weights.items():
        moved = not np.array_equal(values, first[name].numpy())
        assert moved == name.startswith("5."), name


def test_patterns_fit_something_and_leave_something():
    for frozen, key, text in (
        (("1.*", "encoder.*"), "model.frozen[1]", "is called 'encoder.*'; it has 1.w"),
        (("*",), "model.frozen", "nothing to train"),
    ):
        with pytest.raises(JobError) as found:
            ModelPool(job_of(*frozen))
        assert found.value.key == key
        assert text in found.value.reason
    many = torch.nn.Sequential(*(torch.nn.Linear(1, 1) for _ in range(6)))
    with pytest.raises(JobError, match=r"3\.bias and 4 more"):
        freeze(many, ["head.*"])


def test_patterns_are_a_part_of_the_job():
    """Jobs without keep their digest."""
    assert "frozen" not in job_digest.deciding(job_of())["model"]
    assert job_digest.deciding(job_of(*BODY))["model"]["frozen"] == list(BODY)


def test_layers_in_the_place_of_frozen_ones_are_frozen():
    """Differential privacy has put them there."""
    private = {"unit": "site", "clip_norm": 1.0, "noise_multiplier": 1.0}
    job = small_job(
        num_sites=2,
        model={"factory": "support.small_jobs:normalised", "frozen": ["1.*"]},
        aggregation={"weights": "uniform"},
        evaluation={"every": 0},
        privacy={
            "differential_privacy": private | {"target_epsilon": 50.0},
            "secure_aggregation": {"enabled": True, "two_sites_waiver": True},
        },
    )
    pool = ModelPool(job)
    assert pool.replaced
    assert set(pool.layout.frozen_names) == {"1.weight", "1.bias"}


def test_an_audit_freezes_what_the_job_freezes():
    federation = build_federation(job_of(*BODY))
    found = with_canaried_model(federation, 100).model
    assert found.factory == FACTORY
    assert found.frozen == ("model.1.*", "model.3.*")


def test_a_pretrained_start_keeps_the_new_head(tmp_path: Path):
    """Also where the file has a head of the same shape, or another one."""
    for old in (net(), mlp(4, 9, hidden=[5, 6])):
        file = tmp_path / "model.safetensors"
        save_file(old.state_dict(), file)
        model = net()
        head = model.get_parameter("5.weight").clone()
        assert with_weights(model, str(tmp_path), new=HEAD) is model
        for name in ("1.weight", "3.bias"):
            assert torch.equal(model.get_parameter(name), old.get_parameter(name))
        assert torch.equal(model.get_parameter("5.weight"), head)


def test_the_first_tensor_that_does_not_fit_is_named(tmp_path: Path):
    file = tmp_path / "old.safetensors"
    save_file(mlp(4, 9, hidden=[5, 6]).state_dict(), file)
    with pytest.raises(JobError, match=r"'5.weight' is \[3, 6\] in .* \[9, 6\] in"):
        with_weights(net(), str(file))
    save_file({"1.weight": torch.zeros(5, 4)}, file)
    with pytest.raises(JobError, match=r"'1.bias' is \[5\] .* nothing in the file"):
        with_weights(net(), str(file), new=HEAD)
    save_file({f"net.{n}": t for n, t in net().state_dict().items()}, file)
    with pytest.raises(JobError, match=r"the file has 'net\.1\.weight': rename"):
        with_weights(net(), str(file), new=HEAD)
    save_file(net().state_dict() | {"7.weight": torch.zeros(1)}, file)
    with pytest.raises(JobError, match=r"'7\.weight' .*in the model"):
        with_weights(net(), str(file), new=HEAD)
    with_weights(net(), str(file), new=(*HEAD, "7.*"))
