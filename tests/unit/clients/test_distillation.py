"""Logit tables, distillation and ensembles."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from clients.models import logistic_regression, mlp, weights
from clients.models.distillation import distill, ensemble, logit_table, match_logits
from federation.errors import JobError, SiteError
from federation.vectors import Role

INPUTS = torch.linspace(-1, 1, 12).reshape(4, 3)
LOGITS = torch.tensor([[2.0, 0, -1], [0, 1, 0], [-3, 0, 1], [0.5, 0, 0]])


def member(path: Path, factory: str, **options: Any) -> tuple[dict[str, Any], Any]:
    """A model with other weights than a new one, and how a job names it."""
    make = {"mlp": mlp, "logistic_regression": logistic_regression}[factory]
    model = make(3, 3, **options)
    for value in model.parameters():
        nn.init.normal_(value)
    save_file(model.state_dict(), path)
    given = {"inputs": 3, "classes": 3, **options}
    named = {
        "factory": f"clients.models:{factory}",
        "options": given,
        "weights": str(path),
    }
    return named, model


def test_one_step_writes_logits_into_the_table():
    """So the run's mean is that of the sites' logits."""
    table = logit_table(4, 3)
    loss_b = match_logits(table, torch.arange(4), LOGITS)["loss"]
    loss_b.mean().backward()
    torch.optim.SGD(table.parameters(), lr=4.0).step()
    torch.testing.assert_close(table(torch.arange(4)), LOGITS)


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_distillation_is_a_divergence_from_the_teacher(temperature: float):
    """By its definition, and zero for the teacher itself."""
    teacher = nn.Linear(3, 3)
    student_bk = teacher(INPUTS).detach()
    found = distill(teacher, INPUTS, LOGITS, temperature=temperature)
    p = (LOGITS / temperature).softmax(1)
    q = (student_bk / temperature).softmax(1)
    expected = temperature**2 * (p * (p / q).log()).sum(1)
    torch.testing.assert_close(found["loss"].detach(), expected)
    own = distill(teacher, INPUTS, student_bk, temperature=temperature)
    np.testing.assert_allclose(own["loss"].detach(), 0, atol=1e-6)
    assert own["accuracy"].tolist() == [1.0] * 4


def test_labels_only_measure():
    """Held-out records may have them in place of a teacher's logits."""
    model = nn.Linear(3, 3)
    labels = model(INPUTS).argmin(1)
    found = distill(model, INPUTS, labels)
    assert found["accuracy"].tolist() == [0.0] * 4
    expected = nn.functional.cross_entropy(model(INPUTS), labels)
    torch.testing.assert_close(found["loss"].mean(), expected)


@pytest.mark.parametrize("targets", [LOGITS[:, :2], (LOGITS,)])
def test_logits_of_another_shape_are_refused(targets: Any):
    """With what is needed."""
    with pytest.raises(SiteError, match="distill needs"):
        distill(nn.Linear(3, 3), INPUTS, targets)
    with pytest.raises(SiteError, match="match_logits needs"):
        match_logits(logit_table(4, 3), torch.arange(4), targets)


@pytest.mark.parametrize("temperature", [0, -1.0, math.inf])
def test_a_temperature_is_above_zero(temperature: float):
    """With the key of the job."""
    with pytest.raises(JobError, match="above 0") as caught:
        distill(nn.Linear(3, 3), INPUTS, LOGITS, temperature=temperature)
    assert caught.value.key == "training.options.temperature"


def test_an_ensemble_is_the_mean_of_probabilities(tmp_path: Path):
    """Of models that differ in architecture; only their weights are trained."""
    one, first = member(tmp_path / "one", "mlp", hidden=[4])
    (tmp_path / "run").mkdir()
    file = tmp_path / "run/model.safetensors"
    two, second = member(file, "logistic_regression")
    model = ensemble([one, {**two, "weights": str(file.parent)}]).train()
    mean_bk = (first(INPUTS).softmax(1) + second(INPUTS).softmax(1)) / 2
    torch.testing.assert_close(model(INPUTS).exp(), mean_bk)
    layout = weights.layout_of(model, {})
    assert {t.name for t in layout.tensors if t.role is not Role.FROZEN} == {"mixture"}
    assert not any(each.training for each in model.members.modules())


@pytest.mark.parametrize(
    ("changes", "key", "message"),
    [
        ({"weights": "nowhere"}, "members[1].weights", "no file .*nowhere at this"),
        ({"weights": __file__}, "members[1].weights", "not a safetensors file"),
        ({"options": {"inputs": 2, "classes": 3}}, "members[1].weights", "not fit"),
        ({"sha256": ""}, "members[1]", "give factory and weights"),
    ],
)
def test_members_that_cannot_be_used_are_refused(
    changes: dict[str, Any], key: str, message: str, tmp_path: Path
):
    """With the key of the one that is wrong."""
    good, _ = member(tmp_path / "one", "logistic_regression")
    with pytest.raises(JobError, match=message) as caught:
        ensemble([good, good | changes])
    assert caught.value.key == f"model.options.{key}"
    with pytest.raises(JobError, match="at least 2 members"):
        ensemble([good])
