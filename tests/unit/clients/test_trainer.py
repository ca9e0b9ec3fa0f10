"""Local training at one site."""

import dataclasses
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.small_jobs import blobs, small_job
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from clients.data.batches import epoch_order
from clients.data.datasets import Dataset, as_dataset
from clients.learning_rate import learning_rate
from clients.models import weights
from clients.models.model_pool import ModelPool
from clients.training import local_steps
from clients.training.local_steps import LocalOptimizer
from clients.training.trainer import TorchTrainer
from federation.errors import JobError, SiteError
from federation.ids import SiteId
from federation.job.spec import JobSpec, LearningRateSpec
from federation.protocols import LocalWeights
from federation.vectors import Arrays

MLP_OPTIONS = {"inputs": 4, "classes": 3, "hidden": [8, 8]}


SITE = SiteId("site-0")
TRAIN, HELD_OUT = (as_dataset(part, name="blobs") for part in blobs())
SGD = {"lr": 0.5}
USERS = "support.users_module"


def job_of(training: dict[str, Any], **tables: Any):
    return small_job(training={"optimizer": SGD, **training}, **tables)


def trainer_of(job: JobSpec, train: Dataset = TRAIN):
    pool = ModelPool(job)
    trainer = TorchTrainer(job, SITE, pool=pool, train=train, held_out=HELD_OUT)
    return trainer, pool


def fit(job: JobSpec, train: Dataset = TRAIN, round_index: int = 1):
    trainer, pool = trainer_of(job, train)
    return trainer.fit(*pool.initial_weights(), round_index=round_index)


def rows(*indices: int):
    return TRAIN.subset(np.array(indices, np.int64))


def sgd(parameters: Iterable[nn.Parameter]):
    return torch.optim.SGD(parameters, lr=0.5)


def linear() -> nn.Linear:
    model = nn.Linear(4, 3)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


def plain(steps: list[np.ndarray], make_optimizer: Callable[..., Any] = sgd):
    """Plain PyTorch on the same examples, one list of indices per step."""
    model = linear()
    optimizer = make_optimizer(model.parameters())
    for step in steps:
        inputs, labels = TRAIN.batch(step)
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    return flat(model)


def flat(model: nn.Module):
    return torch.cat([p.detach().flatten() for p in model.parameters()]).numpy()


def test_accumulated_batches_are_one_batch():
    """Every example of a step counts the same, also in a smaller last batch."""
    small = fit(job_of({"local_epochs": 1, "batch_size": 25, "accumulate": 3}))
    large = fit(job_of({"local_epochs": 1, "batch_size": 75}))
    assert small.num_steps == large.num_steps == 1
    np.testing.assert_allclose(large.weights_d, small.weights_d, atol=1e-6)


OPTIMIZERS: dict[str, tuple[dict[str, Any], Callable[..., Any]]] = {
    "momentum": (
        {"lr": 0.5, "momentum": 0.9, "nesterov": True},
        partial(torch.optim.SGD, lr=0.5, momentum=0.9, nesterov=True),
    ),
    "adam": ({"name": "adam", "lr": 0.1}, partial(torch.optim.Adam, lr=0.1)),
    "adamw": (
        {"name": "adamw", "lr": 0.1, "weight_decay": 0.2},
        partial(torch.optim.AdamW, lr=0.1, weight_decay=0.2),
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("state", ["keep", "fresh"])
def test_a_kept_optimiser_goes_on_in_the_next_round(name: str, state: str):
    """Two rounds of three steps, each with a trainer of its own, are six steps of plain
    PyTorch with one optimiser; or twice three, each with a new one."""
    table, make = OPTIMIZERS[name]
    job = job_of(
        {
            "local_steps": 3,
            "batch_size": 20,
            "optimizer": table | {"state": state},
        },
        rounds=2,
    )
    walk = [
        epoch_order(len(TRAIN), seed=0, site=SITE, epoch=epoch) for epoch in range(2)
    ]
    steps = [order[i : i + 20] for order in walk for i in (0, 20, 40)]
    weights_d, integers_m = ModelPool(job).initial_weights()
    kept: Arrays = {}
    for round_index in (1, 2):
        result = trainer_of(job)[0].fit(
            weights_d, integers_m, round_index=round_index, kept=kept
        )
        weights_d, kept = result.weights_d, result.kept
    model, optimizer = linear(), None
    for number, step in enumerate(steps):
        if optimizer is None or (state == "fresh" and number == 3):
            optimizer = make(model.parameters())
        inputs, labels = TRAIN.batch(step)
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    np.testing.assert_allclose(flat(model), weights_d, atol=1e-6)
    assert bool(kept) == (state == "keep")
    if state == "keep":
        one_round = dataclasses.replace(job.training, local_steps=6)
        whole = fit(dataclasses.replace(job, training=one_round))
        np.testing.assert_array_equal(whole.weights_d, weights_d)


MUON = {"name": "muon", "lr": 0.02, "momentum": 0.95, "weight_decay": 0.1}
MLP = {
    "factory": "clients.models:mlp",
    "options": {"inputs": 4, "classes": 3, "hidden": [16, 8]},
}


def stepped_by_muon(
    job: JobSpec, steps: list[np.ndarray], rates: list[float], restart: int = 0
):
    """Plain PyTorch: Muon for the first two matrices of an MLP, AdamW for the rest."""
    with ModelPool(job).borrow() as instance:
        model, lr = instance.module, rates[0]
        matrices = [model[1].weight, model[3].weight]
        rest = [p for p in model.parameters() if all(p is not m for m in matrices)]
        for number, (step, rate) in enumerate(zip(steps, rates, strict=True)):
            if number in {0, restart}:
                muon = torch.optim.Muon(
                    matrices, lr=lr, adjust_lr_fn="match_rms_adamw", weight_decay=0.1
                )
                adamw = torch.optim.AdamW(rest, lr=lr, weight_decay=0.1)
            inputs, labels = TRAIN.batch(step)
            model.zero_grad()
            functional.cross_entropy(model(inputs), labels).backward()
            for optimizer in (muon, adamw):
                optimizer.param_groups[0]["lr"] = rate
                optimizer.step()
        return flat(model)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="Muon came with torch 2.9")
@pytest.mark.parametrize("state", ["keep", "fresh"])
def test_muon_steps_hidden_matrices_and_adamw_the_rest(
    state: str, monkeypatch: pytest.MonkeyPatch
):
    """Over two rounds, with one schedule for both, and the state of both kept."""
    # With torch's own Muon on every processor.
    monkeypatch.setattr(local_steps, "multiplies_bfloat16", lambda _: True)
    job = job_of(
        {
            "local_steps": 3,
            "batch_size": 20,
            "optimizer": MUON | {"state": state},
            "learning_rate": {"name": "linear", "warmup_steps": 2},
        },
        model=MLP,
        rounds=2,
    )
    kept: Arrays = {}
    weights_d, integers_m = ModelPool(job).initial_weights()
    for round_index in (1, 2):
        result = trainer_of(job)[0].fit(
            weights_d, integers_m, round_index=round_index, kept=kept
        )
        weights_d, kept = result.weights_d, result.kept
    walk = [epoch_order(60, seed=0, site=SITE, epoch=epoch) for epoch in range(2)]
    expected_d = stepped_by_muon(
        job,
        [order[i : i + 20] for order in walk for i in (0, 20, 40)],
        [learning_rate(job.training.learning_rate, 0.02, n, 6) for n in range(6)],
        restart=3 if state == "fresh" else 0,
    )
    np.testing.assert_array_equal(expected_d, weights_d)
    kinds = sorted(name.removeprefix("optimizer/") for name in kept)
    rest = ["1.bias", "3.bias", "5.bias", "5.weight"]
    moments = ("exp_avg", "exp_avg_sq", "step")
    expected = [f"{name}/{kind}" for name in rest for kind in moments]
    expected += ["1.weight/momentum_buffer", "3.weight/momentum_buffer"]
    assert kinds == (sorted(expected) if state == "keep" else [])


def test_a_bfloat16_optimiser_is_kept_bit_by_bit():
    """NumPy has no such type; what comes back is what was kept."""
    model = nn.Linear(4, 3, dtype=torch.bfloat16)
    job = job_of({"local_steps": 1, "optimizer": {"name": "adam", "state": "keep"}})
    first = LocalOptimizer(model, job)
    model(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
    first.step(0)
    kept = first.kept()
    assert kept["optimizer/weight/exp_avg"].any()
    again = LocalOptimizer(model, job, kept).kept()
    assert again.keys() == kept.keys()
    for name, array in kept.items():
        assert again[name].tobytes() == array.tobytes()


def test_proximal_gradient_is_that_of_the_penalty():
    """Autograd of mu/2 |x - theta|^2, over steps that leave theta."""
    mu, lr = 0.7, 0.5
    result = fit(job_of({"local_steps": 4, "batch_size": 60, "proximal_mu": mu}))
    x = torch.zeros(15, requires_grad=True)
    inputs, labels = TRAIN.batch(np.arange(60))
    for _ in range(4):
        logits = inputs @ x[:12].reshape(3, 4).t() + x[12:]
        loss = functional.cross_entropy(logits, labels) + mu / 2 * x.square().sum()
        (gradient,) = torch.autograd.grad(loss, x)
        x = (x - lr * gradient).detach().requires_grad_()
    np.testing.assert_allclose(x.detach(), result.weights_d, atol=1e-6)


def test_gradients_are_clipped_to_their_norm():
    """A step of learning rate 0.5 is half as long as the largest gradient."""
    result = fit(job_of({"local_steps": 1, "batch_size": 60, "clip_grad_norm": 0.01}))
    assert np.linalg.norm(result.weights_d) == pytest.approx(0.005, rel=1e-4)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_optimizers_are_torchs(name: str):
    """The three names, with weight decay, against torch's classes."""
    optimizer = {"name": name, "lr": 0.1, "weight_decay": 0.2}
    training = {"local_steps": 3, "batch_size": 60, "optimizer": optimizer}
    algorithm = {
        "sgd": torch.optim.SGD,
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
    }[name]
    steps = [epoch_order(60, seed=0, site=SITE, epoch=epoch) for epoch in range(3)]
    expected = plain(steps, partial(algorithm, lr=0.1, weight_decay=0.2))
    actual = fit(small_job(training=training)).weights_d
    np.testing.assert_allclose(expected, actual, atol=1e-6)


LR, STEPS, WARMUP = 0.3, 20, 4


@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("final", [0.0, 0.1])
def test_learning_rates_follow_their_closed_forms(name: str, final: float):
    """Linear warm-up, then constant, a line or half a cosine down to the end."""
    spec = LearningRateSpec(name=name, warmup_steps=WARMUP, final_fraction=final)
    u = (np.arange(STEPS) - WARMUP) / (STEPS - WARMUP)
    down = {
        "constant": 1 + 0 * u,
        "linear": 1 - u,
        "cosine": np.cos(np.pi * u / 2) ** 2,
    }
    floor = 0.0 if name == "constant" else final
    expected = LR * (floor + (1 - floor) * down[name])
    expected[:WARMUP] = LR * np.array([0.25, 0.5, 0.75, 1])
    actual = [learning_rate(spec, LR, step, STEPS) for step in range(STEPS)]
    np.testing.assert_allclose(actual, expected, rtol=1e-12)


def test_learning_rate_never_turns_negative():
    """Past the end it stays where it ended."""
    spec = LearningRateSpec(name="linear", final_fraction=0.5)
    assert learning_rate(spec, LR, 2 * STEPS, STEPS) == LR / 2


@pytest.mark.parametrize(
    "length", [{"local_steps": 2}, {"local_epochs": 1, "batch_size": 30}]
)
def test_warmup_goes_on_in_the_next_round(length: dict[str, int]):
    """Steps count over the run: the second round of two is past the first two."""
    plan = {"name": "constant", "warmup_steps": 1000}
    job = job_of({"batch_size": 60, **length, "learning_rate": plan}, rounds=3)
    norms = [np.linalg.norm(fit(job, round_index=r).weights_d) for r in (1, 2)]
    # From zero weights, two short steps go as far as the sum of their rates.
    assert norms[1] / norms[0] == pytest.approx((3 + 4) / (1 + 2), rel=0.02)


def test_rounds_walk_on_through_the_examples():
    """The second round of one batch takes the second batch of the epoch."""
    order = epoch_order(len(TRAIN), seed=0, site=SITE, epoch=0)
    result = fit(job_of({"local_steps": 1, "batch_size": 20}), round_index=2)
    np.testing.assert_allclose(plain([order[20:40]]), result.weights_d, atol=1e-6)


@pytest.mark.parametrize("name", ["dropout_network", "norm_network", "forgetful"])
def test_fit_is_a_function_of_its_arguments(name: str):
    """Whatever ran before: the same weights and round give the same result."""
    model = {"factory": f"{USERS}:{name}"}
    trainer, pool = trainer_of(job_of({"local_steps": 2}, model=model))
    start = pool.initial_weights()
    first = trainer.fit(*start, round_index=1)
    other = trainer.fit(*start, round_index=2)
    trainer.evaluate(*start, round_index=1)
    again = trainer.fit(*start, round_index=1)
    assert first.weights_d.tobytes() == again.weights_d.tobytes()
    assert first.integers_m.tobytes() == again.integers_m.tobytes()
    assert first.weights_d.tobytes() != other.weights_d.tobytes()


def test_every_round_draws_its_own_dropout():
    """Of a single record, whose order is the same in all of them."""
    job = job_of(
        {"local_steps": 1, "batch_size": 1},
        model={"factory": f"{USERS}:dropout_network"},
    )
    rounds = [fit(job, rows(0), r).weights_d.tobytes() for r in range(1, 6)]
    assert len(set(rounds)) > 1
    assert fit(job, rows(0), 1).weights_d.tobytes() == rounds[0]


def test_evaluation_changes_nothing():
    """No statistics, no counter, no gradient, no mode."""
    model = {"factory": f"{USERS}:norm_network"}
    trainer, pool = trainer_of(job_of({"local_steps": 1}, model=model))
    weights_d, integers_m = pool.initial_weights()
    before = weights_d.tobytes(), integers_m.tobytes()
    first = trainer.evaluate(weights_d, integers_m, round_index=1)
    assert first == trainer.evaluate(weights_d, integers_m, round_index=1)
    assert before == (weights_d.tobytes(), integers_m.tobytes())
    with pool.borrow() as instance:
        assert instance.module.training
        assert instance.module[1].num_batches_tracked == 0
        assert all(p.grad is None for p in instance.module.parameters())


@pytest.mark.parametrize("batch_size", [1, 5, 12, 100])
def test_evaluation_does_not_depend_on_its_batches(batch_size: int):
    """Sums over all held-out examples, once each."""
    job = job_of({"local_steps": 1}, evaluation={"batch_size": batch_size})
    trainer, pool = trainer_of(job)
    sums = trainer.evaluate(*pool.initial_weights(), round_index=1)
    assert (sums.count, sums.metrics) == (12, {"correct": 4})
    assert sums.loss == pytest.approx(np.log(3))


def test_batch_norm_trains_its_statistics():
    """They and the counter come back with the weights."""
    model = {"factory": f"{USERS}:norm_network"}
    trainer, pool = trainer_of(job_of({"local_steps": 3}, model=model))
    start_d, start_m = pool.initial_weights()
    result = trainer.fit(start_d, start_m, round_index=1)
    for spec, values in pool.layout.float_views(result.weights_d - start_d):
        # A bias in front of a normalisation has no gradient beyond rounding.
        assert values.any() or spec.name == "0.bias"
    assert (result.integers_m - start_m).tolist() == [3]


def test_frozen_parameters_stay_exactly():
    """Neither weight decay nor the proximal term moves them."""
    training = {
        "local_steps": 3,
        "proximal_mu": 1.0,
        "optimizer": {"name": "adamw", "lr": 0.1, "weight_decay": 0.1},
    }
    model = {"factory": f"{USERS}:frozen_network"}
    trainer, pool = trainer_of(job_of(training, model=model))
    start_d, start_m = pool.initial_weights()
    change_d = trainer.fit(start_d, start_m, round_index=1).weights_d - start_d
    moved = {s.name: bool(v.any()) for s, v in pool.layout.float_views(change_d)}
    assert moved == {"2.weight": True, "2.bias": True}
    with pool.borrow() as model_now:
        frozen = weights.frozen_digest(model_now.module, pool.layout)
    assert frozen == pool.layout.frozen


def half_network() -> nn.Module:
    """Half of it frozen, all of it in bfloat16."""

    class Half(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.bfloat16())

    model = Half(nn.Linear(4, 4), nn.Linear(4, 3)).bfloat16()
    model[0].requires_grad_(requires_grad=False)
    return model


def test_half_precision_models_lose_no_digits_of_the_global_weights():
    """What bfloat16 cannot hold is not part of the update."""
    model = {"factory": f"{__name__}:half_network"}
    trainer, pool = trainer_of(job_of({"local_steps": 2}, model=model))
    start_d, start_m = pool.initial_weights()
    start_d += np.float32(1e-5)  # As an average of several sites would be.
    result = trainer.fit(start_d, start_m, round_index=1)
    assert start_d.size == 15
    assert (start_d != result.weights_d).all()
    # Rounding to bfloat16 took a thousand times less from the weights.
    np.testing.assert_array_less(1e-3, np.abs(result.weights_d - start_d).max())


def test_bf16_trains_with_float32_weights():
    """The forward pass is rounded, so the result differs, by little."""
    model = {"factory": f"{USERS}:frozen_network"}
    full, half = (
        fit(job_of({"local_steps": 3, "precision": p}, model=model)).weights_d
        for p in ("fp32", "bf16")
    )
    assert half.dtype == np.float32
    assert (full != half).any()
    np.testing.assert_allclose(full, half, atol=0.05)
    # Weights of float32 use digits that bfloat16 does not have.
    assert (half.view(np.uint32) & 0xFFFF).any()


@pytest.mark.parametrize(
    ("train", "held_out", "message"),
    [(rows(), HELD_OUT, "no training"), (TRAIN, rows(), "evaluation.every = 0")],
)
def test_a_site_without_examples_is_refused(
    train: Dataset, held_out: Dataset, message: str
):
    """At the start, with the name of the site."""
    job = small_job()
    with pytest.raises(SiteError, match=f"site-0.*{message}"):
        TorchTrainer(job, SITE, pool=ModelPool(job), train=train, held_out=held_out)


def test_seed_of_its_own_takes_the_place_of_the_jobs():
    """For the order of examples; the same as a job with that seed would have."""
    job = job_of({"local_steps": 3, "batch_size": 2}, seed=1)
    pool = ModelPool(job)

    def fitted(job: JobSpec, seed: int | None) -> np.ndarray:
        trainer = TorchTrainer(
            job, SITE, pool=pool, train=TRAIN, held_out=HELD_OUT, seed=seed
        )
        return trainer.fit(*pool.initial_weights(), round_index=1).weights_d

    secret = 1 << 200
    assert not np.array_equal(fitted(job, None), fitted(job, secret))
    expected = fitted(dataclasses.replace(job, seed=secret), None)
    assert np.array_equal(fitted(job, secret), expected)


@pytest.mark.parametrize("taken", [1, 2])
def test_training_that_ends_early_is_the_steps_that_were_taken(taken: int):
    """At least one; the examples are those that the round begins with."""
    job = job_of({"local_steps": 4, "batch_size": 20})
    asked: list[None] = []

    def ends_early() -> bool:
        asked.append(None)
        return len(asked) == taken

    pool = ModelPool(job)
    trainer = TorchTrainer(
        job, SITE, pool=pool, train=TRAIN, held_out=HELD_OUT, ends_early=ends_early
    )
    result = trainer.fit(*pool.initial_weights(), round_index=1)
    expected = fit(job_of({"local_steps": taken, "batch_size": 20}))
    assert isinstance(result, LocalWeights)
    assert isinstance(expected, LocalWeights)
    np.testing.assert_array_equal(result.weights_d, expected.weights_d)
    assert result.num_steps == taken
    assert result.training is not None
    assert result.training.count == 20 * taken


def test_site_that_leaves_early_divides_its_drift_by_the_rates_of_all_steps():
    """As every other site does, or variates would not cancel."""
    steps = {"local_steps": 4, "batch_size": 20, "optimizer": {"lr": 0.5}}
    job = job_of(steps | {"control_variates": True})
    pool = ModelPool(job)
    trainer = TorchTrainer(
        job, SITE, pool=pool, train=TRAIN, held_out=HELD_OUT, ends_early=lambda: True
    )
    result = trainer.fit(*pool.initial_weights(), round_index=1)
    assert result.num_steps == 1
    assert result.kept["variates/rates"] == [2.0]


def test_a_torch_without_muon_is_named(monkeypatch: pytest.MonkeyPatch):
    """At the key, before anything is trained."""
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    model = {"factory": "clients.models:mlp", "options": MLP_OPTIONS}
    muon = {"name": "muon", "lr": 0.1, "momentum": 0.9}
    job = job_of({"local_steps": 1, "optimizer": muon}, model=model)
    with pytest.raises(JobError, match=r"came with torch 2\.9") as caught:
        fit(job)
    assert caught.value.key == "training.optimizer.name"


def test_steps_grow_from_a_round_on():
    """They take the batches that follow those of smaller steps, each of them once."""
    growing = {"local_steps": 2, "batch_size": 8, "accumulate_from": [[2, 2]]}
    found = fit(job_of(growing, rounds=2), round_index=2)
    trainer, pool = trainer_of(job_of({"local_steps": 1, "batch_size": 16}, rounds=3))
    weights_d, integers_m = pool.initial_weights()
    for round_index in (2, 3):
        result = trainer.fit(weights_d, integers_m, round_index=round_index)
        weights_d = result.weights_d
    assert found.num_steps == 2
    np.testing.assert_allclose(found.weights_d, weights_d, atol=1e-6)


def test_workers_of_a_loader_change_no_result():
    """Neither which records make a step nor what is evaluated."""
    job = job_of({"local_steps": 3, "batch_size": 8, "accumulate": 2})
    weights_d = {}
    for num_workers in (0, 1):
        read = {"num_workers": num_workers, "batch_size": 1}
        parts = [
            as_dataset(DataLoader(TensorDataset(*part), **read), name="blobs")
            for data in (TRAIN, HELD_OUT)
            for part in [data.batch(np.arange(len(data)))]
        ]
        pool = ModelPool(job)
        trainer = TorchTrainer(job, SITE, pool=pool, train=parts[0], held_out=parts[1])
        result = trainer.fit(*pool.initial_weights(), round_index=1)
        sums = trainer.evaluate(result.weights_d, result.integers_m, round_index=1)
        weights_d[num_workers] = (result.weights_d.tobytes(), sums)
    assert weights_d[0] == weights_d[1]
