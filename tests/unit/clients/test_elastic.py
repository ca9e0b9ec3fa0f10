"""Elastic weight consolidation."""

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from clients.models import mlp, weights
from clients.models.elastic import consolidated, fisher, squared_gradients
from federation.errors import JobError
from federation.vectors import Role

INPUTS = torch.linspace(-2, 1, 15).reshape(5, 3)
LABELS = torch.tensor([0, 1, 2, 0, 1])
OPTIONS = {"inputs": 3, "classes": 3, "hidden": [4]}


def trained() -> nn.Module:
    """A model with some weights."""
    model = mlp(3, 3, [4])
    for number, value in enumerate(model.parameters()):
        nn.init.constant_(value, 0.1 * (number + 1))
        value.data.reshape(-1)[0] -= 0.3
    return model


def squares(model: nn.Module) -> dict[str, torch.Tensor]:
    """Mean over the records of their squared gradients, one by one."""
    found = {name: torch.zeros_like(v) for name, v in model.named_parameters()}
    for inputs, label in zip(INPUTS, LABELS, strict=True):
        loss = functional.cross_entropy(model(inputs[None]), label[None])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        for name, gradient in zip(found, gradients, strict=True):
            found[name] += gradient.square() / len(INPUTS)
    return found


def measured(folder: Path) -> nn.Module:
    """The model after a round of steps on one record each."""
    save_file(trained().state_dict(), folder / "model.safetensors")
    model = fisher("clients.models:mlp", str(folder), OPTIONS)
    optimizer = squared_gradients(
        [p for p in model.parameters() if p.requires_grad], lr=1 / len(INPUTS)
    )
    for inputs, label in zip(INPUTS, LABELS, strict=True):
        functional.cross_entropy(model(inputs[None]), label[None]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def test_a_run_measures_the_fisher_information(tmp_path: Path):
    """At the old weights in every step, which are frozen and do not travel."""
    model = measured(tmp_path)
    expected = squares(trained())
    state = model.state_dict()
    for name, value in expected.items():
        torch.testing.assert_close(state[f"fisher.{name.replace('.', '/')}"], value)
    layout = weights.layout_of(model, {})
    shared = {t.name for t in layout.tensors if t.role is Role.PARAMETER}
    assert shared == {name for name in state if name.startswith("fisher.")}


def test_training_is_pulled_towards_what_mattered(tmp_path: Path):
    """By the penalty's definition; held-out losses are without it."""
    file = tmp_path / "memory.safetensors"
    save_file(measured(tmp_path).state_dict(), file)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    model, anchor = trained(), dict(trained().named_parameters())
    for value in model.parameters():
        value.data += 0.5
    importance = squares(trained())
    penalty = sum(
        (importance[name] * (value - anchor[name]).square()).sum()
        for name, value in model.named_parameters()
    )
    plain = functional.cross_entropy(model(INPUTS), LABELS, reduction="none")
    found = consolidated(
        model.train(), INPUTS, LABELS, memory=str(file), sha256=digest, strength=6.0
    )
    torch.testing.assert_close(found["loss"], plain + 3 * penalty)
    held_out = consolidated(
        model.eval(), INPUTS, LABELS, memory=str(file), sha256=digest, strength=6.0
    )
    torch.testing.assert_close(held_out["loss"], plain)
    with pytest.raises(JobError, match=r"another model: it has no '1.weight'"):
        consolidated(
            mlp(3, 3, [5]).train(), INPUTS, LABELS, memory=str(file), sha256=digest
        )


def test_the_file_of_another_run_is_refused(tmp_path: Path):
    """All sites must be pulled towards the same weights."""
    save_file(trained().state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(JobError, match="and the job names 00: copy") as caught:
        consolidated(
            trained().train(), INPUTS, LABELS, memory=str(tmp_path), sha256="00"
        )
    assert caught.value.key == "training.options.sha256"
    with pytest.raises(JobError, match="number of at least 0"):
        consolidated(trained(), INPUTS, LABELS, memory="", sha256="", strength=-1.0)


def normed() -> nn.Module:
    """A model with batch normalisation and dropout."""
    return nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 3)
    )


def test_a_model_is_measured_as_it_predicts(tmp_path: Path):
    """One record has no statistics, and no unit is left out."""
    path = tmp_path / "model.safetensors"
    save_file(normed().state_dict(), path)
    model = fisher(f"{__name__}:normed", str(path)).train()
    before = {name: value.clone() for name, value in model.named_buffers()}
    first, second = (model(INPUTS[:1]) for _ in range(2))
    torch.testing.assert_close(first, second)
    for name, value in model.named_buffers():
        torch.testing.assert_close(value, before[name])
