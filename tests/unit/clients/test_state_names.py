"""Modules whose ``state_dict`` has other names or tensors than their parameters."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.noisy_jobs import noisy_job
from support.small_jobs import blobs, small_job
from torch import nn
from torch.nn.utils import parametrizations

from clients.data.datasets import as_dataset
from clients.models import weights
from clients.models.model_pool import ModelPool
from clients.training.trainer import TorchTrainer
from federation.errors import JobError
from federation.ids import SiteId
from federation.job.spec import JobSpec
from federation.protocols import LocalWeights
from federation.vectors import Role

TRAIN, HELD_OUT = (as_dataset(part, name="blobs") for part in blobs())


def plain(first: Callable[[nn.Module], nn.Module] = nn.Sequential) -> nn.Sequential:
    """A network whose first layers are wrapped."""
    return nn.Sequential(
        first(nn.Sequential(nn.Linear(4, 8), nn.Tanh())), nn.Linear(8, 3)
    )


def unwrapped() -> nn.Sequential:
    return plain(lambda layers: layers)  # type: ignore[return-value]


def _rename(
    old: str, new: str, _: nn.Module, state: dict[str, Any], *rest: object
) -> None:
    for name in list(state):
        if old in name:
            state[name.replace(old, new)] = state.pop(name)


def renamed() -> nn.Sequential:
    """As ``checkpoint_wrapper`` of torch does."""
    model = unwrapped()
    model.register_state_dict_post_hook(partial(_rename, "0.0.", "body."))
    return model


def swapped() -> nn.Sequential:
    """Each of two layers has the name of the other."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def swap(_: nn.Module, state: dict[str, Any], *rest: object) -> None:
        for kind in ("weight", "bias"):
            first, second = state[f"0.{kind}"], state[f"1.{kind}"]
            state[f"0.{kind}"], state[f"1.{kind}"] = second, first

    model.register_state_dict_post_hook(swap)
    return model


def checkpointed() -> nn.Sequential:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (  # noqa: PLC0415
        checkpoint_wrapper,
    )

    return plain(checkpoint_wrapper)


class Inner(nn.Module):
    """Returns the state of what it wraps, as wrappers of users do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        options.pop("keep_vars", None)
        return self.inner.state_dict(*arguments, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def tied() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 3))
    model[2].weight = model[0].weight
    model.register_state_dict_post_hook(partial(_rename, "0.", "first."))
    return model


def columns() -> nn.Module:
    """Two parameters that are columns of one matrix, and have no value in common."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(2, 3))
    whole = torch.randn(3, 4)
    model[0].weight = nn.Parameter(whole[:, :2])
    model[1].weight = nn.Parameter(whole[:, 2:])
    return model


TRAINABLE: dict[str, Callable[[], nn.Module]] = {
    "plain": plain,
    "renamed": renamed,
    "swapped": swapped,
    "checkpoint_wrapper": checkpointed,
    "wrapper with the state of its inside": lambda: Inner(unwrapped()),
    "DataParallel": lambda: nn.DataParallel(unwrapped()),
    "parametrization": lambda: parametrizations.weight_norm(nn.Linear(4, 3)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(4, 3)),
    "weight_norm": lambda: nn.utils.weight_norm(nn.Linear(4, 3)),
    "spectral_norm": lambda: nn.utils.spectral_norm(nn.Linear(4, 3)),
    "tied": tied,
    "columns of one matrix": columns,
    "recurrent": lambda: nn.LSTM(4, 3),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
@pytest.mark.parametrize("name", TRAINABLE)
def test_every_trained_parameter_travels_as_one(name: str):
    """Also under another name: else no gradient, noise or codec would reach it."""
    module = TRAINABLE[name]()
    layout = weights.layout_of(module, {})
    trained = {id(p): p.numel() for p in module.parameters() if p.requires_grad}
    assert layout.size - sum(
        t.size for t in layout.tensors if t.role is Role.BUFFER
    ) == sum(trained.values())
    spans = weights.trained_spans(module, layout)
    assert sum(stop - start for start, stop in spans) == sum(trained.values())
    named = weights.parameters_by_name(module)
    assert {
        id(named[t.name]) for t in layout.tensors if t.role is Role.PARAMETER
    } == set(trained)
    state = module.state_dict()
    for spec in layout.tensors:
        if spec.role is Role.PARAMETER:
            assert state[spec.name].data_ptr() == named[spec.name].data_ptr()


def hooked(change: Callable[[nn.Module, dict[str, Any]], None]) -> nn.Module:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))

    def hook(module: nn.Module, state: dict[str, Any], *_: object) -> None:
        change(module, state)

    model.register_state_dict_post_hook(hook)
    return model


class Counted(nn.Linear):
    """Keeps a tensor that is in its state alone."""

    def get_extra_state(self) -> torch.Tensor:
        return torch.ones(2)

    def set_extra_state(self, state: object) -> None:
        pass


def transposed() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 4))
    model[1].weight = nn.Parameter(model[0].weight.t())
    return model


def viewed(*, column: bool = False) -> nn.Module:
    model = nn.Linear(4, 3)
    weight = model.weight.detach()
    model.register_buffer("flat", weight[:, 1] if column else weight.view(-1)[:5])
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "dropped": (lambda: hooked(lambda _, s: s.pop("1.weight")), "parameter '1.weight'"),
    "copied": (
        lambda: hooked(lambda _, s: s.update({"1.weight": s["1.weight"].clone()})),
        "parameter '1.weight'",
    ),
    "in another type": (
        lambda: hooked(lambda _, s: s.update({"1.bias": s["1.bias"].double()})),
        "parameter '1.bias'",
    ),
    "copied buffer": (
        lambda: hooked(
            lambda _, s: s.update({"0.running_var": s["0.running_var"].clone()})
        ),
        "copy as '0.running_var'",
    ),
    "added": (
        lambda: hooked(lambda _, s: s.update({"version": torch.ones(1)})),
        "copy as 'version'",
    ),
    "extra state": (lambda: Counted(4, 3), "copy as '_extra_state'"),
    "column of a parameter": (lambda: viewed(column=True), "'(flat|weight)'"),
    "tied in another shape": (transposed, "'1.weight'.* with '0.weight'"),
    "buffer in a parameter": (viewed, "'(flat|weight)'.* with '(weight|flat)'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_state_that_is_not_what_trains_is_refused(name: str):
    make, fault = REFUSED[name]
    with pytest.raises(JobError, match=fault) as caught:
        weights.layout_of(make(), {})
    assert caught.value.key == "model.factory"


def fitted(job: JobSpec) -> tuple[LocalWeights, ModelPool]:
    pool = ModelPool(job)
    site = SiteId(job.sites[0].name)
    trainer = TorchTrainer(job, site, pool=pool, train=TRAIN, held_out=HELD_OUT)
    start = pool.initial_weights()
    kept = trainer.fit(*start, round_index=1).kept
    result = trainer.fit(*start, round_index=2, kept=kept)
    assert isinstance(result, LocalWeights)
    return result, pool


JOBS: dict[str, Callable[[str], JobSpec]] = {
    "control variates": lambda factory: small_job(
        num_sites=3,
        model={"factory": factory},
        training={"local_steps": 3, "control_variates": True, "optimizer": {"lr": 0.5}},
    ),
    "frozen": lambda factory: small_job(
        model={"factory": factory, "frozen": ["*0.weight"]}
    ),
    "whole sites": lambda factory: noisy_job(
        "site",
        model={"factory": factory},
        data={"source": "support.small_jobs:blobs"},
        private={"clip_norm": 1.0, "delta": 0.01, "accept_low_signal": True},
    ),
}


@pytest.mark.parametrize("name", JOBS)
def test_a_wrapped_model_trains_as_the_plain_one(name: str):
    """Under the same names, with the same parts trained and frozen."""
    one, first = fitted(JOBS[name](f"{__name__}:unwrapped"))
    other, second = fitted(JOBS[name](f"{__name__}:checkpointed"))
    np.testing.assert_allclose(one.weights_d, other.weights_d, atol=1e-6)
    assert first.layout.tensors == second.layout.tensors
    assert first.trained_spans == second.trained_spans
    initial_d, _ = first.initial_weights()
    for start, stop in first.trained_spans:
        assert (one.weights_d[start:stop] != initial_d[start:stop]).any()


class Late(nn.Module):
    """Changes its state when it runs, in one of several ways."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.change = change
        self.linear = nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.change == "layer" and not hasattr(self, "extra"):
            self.extra = nn.Linear(4, 3)
        if self.change == "layer in evaluation" and not self.training:
            self.extra = nn.Linear(4, 3)
        if self.change == "buffer":
            self.register_buffer("extra", x.detach().mean(0))
        if self.change == "shape":
            self.seen = x.detach()[:, 0]
        if self.change == "gone":
            del self.seen
            self.change = ""
        if self.change == "cache":
            self.register_buffer("extra", x.detach().mean(0), persistent=False)
        return self.linear(x)


def late(change: str) -> nn.Module:
    return Late(change)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ("layer", "'extra.weight'"),
        ("layer in evaluation", "'extra.weight'"),
        ("buffer", "'extra'"),
        ("shape", "'seen'"),
        ("gone", "'seen'"),
    ],
)
def test_state_that_appears_in_forward_is_refused_by_name(change: str, name: str):
    """At a site too: it would be put back before the next round."""
    job = small_job(
        model={"factory": f"{__name__}:late", "options": {"change": change}}
    )
    pool = ModelPool(job)
    trainer = TorchTrainer(
        job, SiteId("site-0"), pool=pool, train=TRAIN, held_out=HELD_OUT
    )
    act = trainer.evaluate if change == "layer in evaluation" else trainer.fit
    start = pool.initial_weights()
    with pytest.raises(JobError, match=rf"{name}.*__init__") as caught:
        act(*start, round_index=1)
    assert caught.value.key == "model.factory"


def test_a_cache_may_appear_in_forward():
    """What no state holds is put back for the next site."""
    job = small_job(
        model={"factory": f"{__name__}:late", "options": {"change": "cache"}}
    )
    pool = ModelPool(job)
    with pool.borrow() as model:
        model.load(*pool.initial_weights())
        model.module(torch.ones(2, 4))
