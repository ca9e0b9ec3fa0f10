"""Instances of a model and who gets them."""

from typing import Any

import numpy as np
import pytest
import torch
from support.small_jobs import small_job
from torch import nn

from clients.models import weights
from clients.models.model_pool import Instance, ModelPool
from federation.errors import JobError, LayoutMismatch

X = torch.ones(2, 4)


def masked() -> nn.Module:
    """A model with a mask among its weights."""
    model = nn.Linear(4, 3)
    model.register_buffer("mask", torch.full((2, 2), -torch.inf))
    return model


def not_a_model() -> object:
    return {"weights": 1}


def forgetful() -> None:
    """Builds a model, and forgets to return it."""
    nn.Linear(4, 3)


INSTANCE = nn.Linear(4, 3)


def pool_of(name: str = "clients.models:digits_cnn", **options: Any):
    if ":" not in name:
        name = f"support.users_module:{name}"
    return ModelPool(small_job(model={"factory": name, "options": options}))


def loaded(pool: ModelPool, instance: Instance):
    instance.load(*pool.initial_weights())
    return instance.module


def test_initial_weights_follow_the_seed():
    """The same job begins the same; another seed begins elsewhere."""
    model = {"factory": "clients.models:digits_cnn"}
    first, again, other = (
        ModelPool(small_job(model=model, seed=seed)).initial_weights()[0]
        for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_an_instance_is_lent_again():
    """One user after another gets the same module; two at once do not."""
    pool = pool_of()
    with pool.borrow() as first:
        pass
    with pool.borrow() as again, pool.borrow() as second:
        assert first is again
        assert not weights.memory_of(first.module) & weights.memory_of(second.module)


def test_an_instance_comes_back_after_a_failure():
    """An error in its user does not cost an instance."""
    pool = pool_of()

    def fail() -> None:
        with pool.borrow() as instance:
            lent.append(instance)
            raise KeyError

    lent: list[Instance] = []
    with pytest.raises(KeyError):
        fail()
    with pool.borrow() as again:
        assert lent == [again]


def test_a_lent_instance_forgets_its_user():
    """Counters, lists, buffers, hooks, new attributes, mode, gradients: all gone."""
    pool = pool_of("forgetful")
    with pool.borrow() as instance:
        model = loaded(pool, instance)
        hidden = set(vars(model))
        expected = model(X)
        for _ in range(3):
            model.eval()(X).sum().backward()
        assert not torch.equal(expected, model(X))
    assert (model.calls, model.seen, model.cache) == (0, [], None)
    assert set(vars(model)) == hidden
    assert model.training
    assert not model._forward_hooks
    assert model.linear.weight.grad is None
    with pool.borrow() as instance:
        torch.testing.assert_close(expected, loaded(pool, instance)(X))


def test_tied_weights_stay_tied_in_the_pool():
    """Forgetting keeps the modules' own objects."""
    pool = pool_of("clients.models:gpt", layers=1, width=8, heads=2, context=4)
    for _ in range(2):
        with pool.borrow() as instance:
            loaded(pool, instance)
    names = [name for name, _ in instance.module.named_parameters()]
    assert names == [t.name for t in pool.layout.tensors]


@pytest.mark.parametrize("name", ["same_network", "shared_backbone"])
def test_models_that_share_memory_are_refused(name: str):
    """Two sites would train the same weights at once."""
    pool = pool_of(name)
    with pool.borrow(), pytest.raises(JobError, match="same weights twice") as caught:
        pool.borrow().__enter__()
    assert caught.value.key == "model.factory"
    with pytest.raises(JobError, match=r"simulation\.workers = 1"):
        pool.reserve(2)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (f"{__name__}:not_a_model", "not_a_model returned a dict"),
        (f"{__name__}:forgetful", "forgetful returned None.*return statement"),
        (f"{__name__}:INSTANCE", "a Linear and not"),
        (f"{__name__}:masked", "'mask' .* persistent=False"),
        ("torch.nn:Flatten", "nothing to train"),
        ("torch.nn:nothing", "has no 'nothing'"),
    ],
)
def test_what_is_not_a_model_is_refused(
    name: str, message: str, request: pytest.FixtureRequest
):
    """Before the first round, with the key of the job file."""
    with pytest.raises(JobError, match=message) as caught:
        pool_of(name)
    assert caught.value.key == "model.factory"


def test_a_device_that_is_not_there_is_refused():
    """No machine has a hundred of them."""
    with pytest.raises(JobError, match="CUDA devices") as caught:
        ModelPool(small_job(training={"local_steps": 1, "device": "cuda:99"}))
    assert caught.value.key == "training.device"


def adapted(*, width: int = 8) -> nn.Module:
    """A frozen network under a small one that trains."""
    model = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3))
    model[0].requires_grad_(requires_grad=False)
    return model


class Restless(nn.Linear):
    """Writes to its frozen weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight += 1
        return super().forward(x)


def restless() -> nn.Module:
    """A layer that changes its frozen weights beside one that trains."""
    model = nn.Sequential(Restless(4, 4), nn.Linear(4, 3))
    model[0].requires_grad_(requires_grad=False)
    return model


_CALLS: list[int] = []


def drawn_elsewhere() -> nn.Module:
    """A model whose frozen values no seed of torch decides."""
    _CALLS.append(0)
    model = adapted()
    nn.init.constant_(model[0].bias, len(_CALLS))
    return model


def of_here(factory: str, **tables: Any) -> ModelPool:
    return ModelPool(small_job(model={"factory": f"{__name__}:{factory}"}, **tables))


def test_a_pool_that_no_run_starts_from_keeps_no_initial_weights():
    job = small_job(model={"factory": f"{__name__}:adapted"})
    with pytest.raises(ValueError, match="keeps no initial weights"):
        ModelPool(job, starts=False).initial_weights()
    assert ModelPool(job).initial_weights()[0].size


def test_frozen_values_neither_travel_nor_are_lost():
    """The vector holds what trains; the rest is named by its digest and exported."""
    pool = of_here("adapted")
    assert pool.layout.size == pool.num_trained == 8 * 3 + 3
    assert pool.layout.num_frozen == 4 * 8 + 8
    assert pool.layout.frozen_names == ("0.weight", "0.bias")
    frozen = pool.frozen_arrays()
    with pool.borrow() as model:
        for name in pool.layout.frozen_names:
            held = model.module.state_dict()[name].numpy()
            np.testing.assert_array_equal(frozen[name], held)


def test_another_seed_is_another_layout():
    """Frozen values that differ are a model that differs."""
    one, other = of_here("adapted"), of_here("adapted", seed=5)
    assert one.layout.frozen != other.layout.frozen
    assert one.layout.digest != other.layout.digest
    with pytest.raises(LayoutMismatch, match="frozen tensors of site 'b' differ"):
        one.layout.check_same(other.layout, whose="site 'b'")


def test_training_that_writes_to_frozen_values_is_refused():
    """Nothing would put them back, and the next site would begin with them."""
    pool = of_here("restless")
    said = pytest.raises(JobError, match=r"frozen tensors.*that training changed")
    with said, pool.borrow() as model:
        loaded(pool, model)(X)


def test_frozen_values_that_are_written_back_pass():
    """What counts is the values that are there at the end."""
    pool = of_here("adapted")
    for _ in range(2):
        with pool.borrow() as model, torch.no_grad():
            before = model.module[0].weight.clone()
            model.module[0].weight += 1
            model.module[0].weight.copy_(before)


def test_a_second_model_with_other_frozen_values_is_refused():
    """Two sites of a process would train on different models."""
    pool = of_here("drawn_elsewhere")
    with pytest.raises(JobError, match=r"second model .*frozen tensors"):
        pool.reserve(2)


def test_apps_of_flower_are_given_the_whole_model():
    """They load a state by names and miss none."""
    app = {"name": "a", "flower_app": {}}
    pool = of_here("adapted", sites=[app, {"name": "b"}])
    assert pool.layout.num_frozen == 0
    assert pool.layout.size == 4 * 8 + 8 + pool.num_trained
