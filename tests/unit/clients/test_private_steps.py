"""Local training with differentially private gradients."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from support.noise_oracles import known_bytes
from support.noisy_jobs import noisy_job
from support.small_jobs import blobs, small_job
from torch import nn
from torch.nn import functional

from clients.data.batches import Rank
from clients.data.datasets import Dataset, Indices, as_dataset
from clients.models.model_pool import ModelPool
from clients.randomness import SECRET_BYTES
from clients.ranks.peers import Peers
from clients.training.private_steps import (
    PrivateGradient,
    PrivateTraining,
    event_of,
    num_private_steps,
    sampling_rate,
)
from clients.training.trainer import TorchTrainer
from federation.errors import JobError, SiteError
from federation.ids import SiteId
from federation.job.spec import JobSpec
from federation.protocols import LocalWeights
from privacy.counts import coarse
from privacy.dp.mechanism import GaussianMechanism
from privacy.dp.poisson import poisson_indices
from privacy.dp_sgd.clipping import MARGIN, sum_margin
from privacy.keystream import Keystream

SITE = SiteId("site-0")
TRAIN, HELD_OUT = (as_dataset(part, name="blobs") for part in blobs())
USERS = "support.users_module"
CLIP_NORM, LR = 0.5, 0.1


def private_job(training: dict[str, Any], **tables: Any):
    privacy = {"unit": "record", "target_epsilon": 8.0, "clip_norm": CLIP_NORM}
    return small_job(
        training={"optimizer": {"lr": LR}, "batch_size": 6, **training},
        privacy={"differential_privacy": privacy},
        aggregation={"weights": "uniform"},
        **tables,
    )


def private(multiplier: float = 1.0, **options: Any):
    return PrivateTraining(clip_norm=CLIP_NORM, noise_multiplier=multiplier, **options)


def fit(
    job: JobSpec, how: PrivateTraining, train: Dataset = TRAIN, round_index: int = 1
):
    pool = ModelPool(job)
    trainer = TorchTrainer(
        job, SITE, pool=pool, train=train, held_out=HELD_OUT, private=how
    )
    return trainer.fit(*pool.initial_weights(), round_index=round_index), pool


def test_sampling_is_as_large_as_a_batch_on_average():
    """All batches of a step are one sample; a round is steps or epochs of them."""
    assert sampling_rate(private_job({"local_steps": 3}), 80) == 0.075
    accumulated = private_job({"local_steps": 3, "accumulate": 4})
    assert sampling_rate(accumulated, 80) == 0.3
    assert sampling_rate(accumulated, 24) == 1.0
    assert num_private_steps(accumulated, 80) == 3
    assert num_private_steps(private_job({"local_epochs": 2}), 48) == 16
    # Two and a half batches are two steps: an even number rounds down.
    halved = private_job({"local_epochs": 3, "batch_size": 8})
    assert num_private_steps(halved, 20) == 6
    # And three and a half are four: fewer steps would miss records.
    assert num_private_steps(halved, 28) == 12


@given(records=st.integers(24, 1 << 40))
def test_rate_and_steps_follow_from_a_coarse_number_of_records(records: int):
    """They leave the site; the rate is never above batch over records."""
    job = private_job({"local_epochs": 1, "accumulate": 4})
    told = coarse(records)
    rate = sampling_rate(job, records)
    assert rate == sampling_rate(job, told) == 24 / told
    assert 0.8 * 24 / records <= rate <= 24 / records
    assert num_private_steps(job, records) == num_private_steps(job, told)


def test_a_site_without_a_batch_of_records_is_refused():
    """With what it holds, what it needs and what to change."""
    job = private_job({"local_steps": 3, "accumulate": 4})
    with pytest.raises(
        SiteError, match=r"holds at most 20 .* samples 24 on average: lower"
    ):
        sampling_rate(job, 19)


def test_event_is_of_the_mechanism_in_force():
    """The multiplier after rounding, and the slack of rounding."""
    mechanism = private().mechanism(15)
    event = event_of(private_job({"local_steps": 3}), 80, mechanism)
    assert (event.sampling_rate, event.steps) == (0.075, 3)
    assert event.noise_multiplier == mechanism.effective_multiplier >= 1.0
    assert event.slack == mechanism.slack > 0


def test_unknown_clipping_is_refused():
    """Before anything is trained."""
    with pytest.raises(ValueError, match="'fast'"):
        private(clipping="fast")


@pytest.mark.slow
def test_job_and_trainer_agree_on_privacy():
    """A trainer without noise for a job with it is a mistake of the wiring."""
    job = private_job({"local_steps": 1})
    with pytest.raises(ValueError, match="private training"):
        TorchTrainer(job, SITE, pool=ModelPool(job), train=TRAIN, held_out=HELD_OUT)
    with pytest.raises(ValueError, match="private training"):
        fit(small_job(), private())
    with pytest.raises(SiteError, match="holds at most 5"):
        fit(job, private(), TRAIN.subset(np.arange(5)))


def clipped(model: nn.Module, rows: Indices, expected_size: int):
    """Sum of the clipped gradients of rows, one after another."""
    total = np.zeros(15, np.float64)
    limit = CLIP_NORM * (1 - MARGIN - sum_margin(expected_size))
    inputs, labels = TRAIN.batch(rows)
    assert labels is not None
    for x, y in zip(inputs.split(1), labels.split(1), strict=True):
        loss = functional.cross_entropy(model(x), y)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        g = torch.cat([g.flatten() for g in gradients]).double().numpy()
        total += g * min(1.0, limit / np.linalg.norm(g))
    return total


@pytest.mark.slow
@pytest.mark.parametrize("clipping", ["hooks", "ghost"])
@pytest.mark.parametrize(
    ("name", "mu", "accumulate"), [("sgd", 0.0, 1), ("sgd", 0.7, 3), ("adamw", 0.0, 2)]
)
def test_steps_are_those_of_the_algorithm(
    name: str, mu: float, accumulate: int, clipping: str
):
    """The same keys give the same samples and noise, step by step by hand."""
    optimizer = {"name": name, "lr": LR}
    training = {"local_steps": 5, "optimizer": optimizer, "accumulate": accumulate}
    job = private_job({**training, "proximal_mu": mu})
    result, _ = fit(job, private(random_bytes=known_bytes(), clipping=clipping))
    # By hand.
    random_bytes, expected_size = known_bytes(), 6 * accumulate
    sampling = Keystream(random_bytes(32))
    mechanism = GaussianMechanism(clip_norm=CLIP_NORM, noise_multiplier=1.0, size=15)
    model = nn.Linear(4, 3)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    by_hand = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[name](
        model.parameters(), lr=LR, weight_decay=0.0
    )
    for _ in range(5):
        rows = poisson_indices(60, expected_size / coarse(60), sampling)
        sum_d = clipped(model, rows, expected_size)
        mechanism.release_(sum_d, random_bytes)
        gradient = torch.from_numpy(sum_d / expected_size).float()
        for parameter, part in zip(
            model.parameters(), gradient.split([12, 3]), strict=True
        ):
            # The pull towards the global weights, which are zero.
            parameter.grad = part.view(parameter.shape) + mu * parameter.detach()
        by_hand.step()
    expected = torch.cat([p.detach().flatten() for p in model.parameters()]).numpy()
    # Sums that differ in their last bit may be rounded to neighbours on the grid.
    np.testing.assert_allclose(result.weights_d, expected, atol=3e-5)
    assert (result.num_steps, result.training) == (5, None)


class Watched:
    """A dataset that notes which examples are asked for."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def __len__(self) -> int:
        return len(TRAIN)

    def __getattr__(self, name: str) -> Any:
        return getattr(TRAIN, name)

    def apart(self) -> Any:
        return self

    def batch(self, indices: Indices):
        self.batches.append(indices.tolist())
        return TRAIN.batch(indices)


@pytest.mark.slow
def test_batches_are_cut_and_as_many_as_accounted():
    """200 steps at rate 12/64: 2,250 examples, and 219 are five deviations."""
    data = Watched()
    job = private_job({"local_steps": 200, "accumulate": 2})
    fit(job, private(random_bytes=known_bytes()), data)
    assert max(map(len, data.batches)) == 6
    assert sum(map(len, data.batches)) == pytest.approx(2250, abs=219)


@pytest.mark.slow
def test_sites_of_one_seed_share_nothing():
    """Neither samples nor noise follow from the job's seed, the site or torch's."""
    job, drawn, weights = private_job({"local_steps": 20}), [], []
    for _ in range(2):
        torch.manual_seed(42)
        np.random.seed(42)  # noqa: NPY002 - what must have no effect.
        data = Watched()
        result, _ = fit(job, private(), data)
        drawn.append(data.batches)
        weights.append(result.weights_d)
    assert drawn[0] != drawn[1]
    assert np.abs(weights[0] - weights[1]).min() > 0


@pytest.mark.slow
def test_an_empty_sample_is_a_step_of_noise():
    """Whether anybody was sampled cannot be told from the number of steps."""
    job = private_job({"local_steps": 1, "batch_size": 1})
    model = nn.Linear(4, 3)
    gradient = PrivateGradient(
        model, job, private(random_bytes=known_bytes()), num_records=60
    )
    gradient._rate = 0.0
    assert list(gradient.draw()) == []
    gradient.release_()
    assert model.weight.grad is not None
    assert 0.1 < model.weight.grad.std().item() / CLIP_NORM < 3


@pytest.mark.slow
def test_the_model_is_made_fit_before_its_layout():
    """Layout, initial weights and every instance are of the model that is trained."""
    model = {"factory": f"{USERS}:norm_network"}
    job = private_job({"local_steps": 2}, model=model)
    result, pool = fit(job, private())
    assert pool.replaced == ("1: BatchNorm1d by GroupNorm",)
    assert pool.num_trained == pool.layout.size == len(result.weights_d)
    assert pool.layout.num_integers == 0
    assert ModelPool(small_job(model=model)).replaced == ()


@pytest.mark.slow
def test_only_what_has_noise_leaves():
    """Buffers come back as they went, whatever a layer does; frozen values never go."""
    model = {"factory": f"{USERS}:noting_network"}
    job = private_job({"local_steps": 3}, model=model)
    result, pool = fit(job, private())
    before_d, before_m = pool.initial_weights()
    assert result.integers_m.tolist() == before_m.tolist() == [0]
    views = zip(
        pool.layout.float_views(before_d),
        pool.layout.float_views(result.weights_d),
        strict=True,
    )
    changed = {spec.name: bool((a != b).all()) for (spec, a), (_, b) in views}
    assert changed == {
        "seen": False,
        "linear.weight": True,
        "linear.bias": True,
    }


def test_only_what_has_noise_leaves_where_a_whole_site_is_protected():
    """Its steps are ordinary ones, whose layers keep what they have noted."""
    model = {"factory": f"{USERS}:noting_network", "options": {"in_frozen": False}}
    job = noisy_job(
        "site",
        model=model,
        data={"source": "support.small_jobs:blobs"},
        private={"clip_norm": 1.0, "delta": 0.01, "accept_low_signal": True},
    )
    pool = ModelPool(job)
    trainer = TorchTrainer(job, SITE, pool=pool, train=TRAIN, held_out=HELD_OUT)
    before_d, before_m = pool.initial_weights()
    result = trainer.fit(before_d, before_m, round_index=1)
    assert isinstance(result, LocalWeights)
    assert result.integers_m.tolist() == before_m.tolist() == [0]
    seen, *trained = (
        (a == b).all()
        for (_, a), (_, b) in zip(
            pool.layout.float_views(before_d),
            pool.layout.float_views(result.weights_d),
            strict=True,
        )
    )
    assert seen
    assert not any(trained)


@pytest.mark.slow
@pytest.mark.parametrize("in_sum", [False, True])
@pytest.mark.parametrize("place", ["persistent", "not persistent", "frozen"])
def test_no_batch_depends_on_what_a_layer_noted_of_others(place: str, *, in_sum: bool):
    """Of a record that was sampled once all later batches would tell, without noise."""
    training = {"local_steps": 1 if in_sum else 4, "accumulate": 3}
    found = []
    for where in ("nowhere", place):
        options = {"place": where}
        model = {"factory": f"{USERS}:recalling_network", "options": options}
        how = private(random_bytes=known_bytes(), in_sum=in_sum)
        result, pool = fit(private_job(training, model=model), how)
        changed_d = result.update_d if in_sum else result.weights_d
        views = pool.layout.float_views(changed_d)
        found.append(
            {spec.name: view.copy() for spec, view in views if spec.name != "notes"}
        )
    for name, expected in found[0].items():
        np.testing.assert_array_equal(found[1][name], expected)


class Charged:
    """Random bytes for keys, of which somebody counts the draws."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, size: int) -> bytes:
        self.sizes.append(size)
        return bytes(size)


@pytest.mark.slow
def test_a_model_that_mixes_records_takes_no_private_step():
    """Refused by name before any noise is drawn: one key is that of the sampling, and
    what models draw has states of its own."""
    job = private_job({"local_steps": 3}, model={"factory": f"{USERS}:mixing_network"})
    keys = Charged()
    with pytest.raises(JobError, match=r"model.factory: '1' \(a _SignOfSum\) gives"):
        fit(job, private(random_bytes=keys))
    assert keys.sizes == [SECRET_BYTES, 32]


@pytest.mark.slow
def test_a_model_that_mixes_records_is_not_evaluated():
    """Noise on held-out sums is for what one record adds to them."""
    options = {"training": False}
    model = {"factory": f"{USERS}:mixing_network", "options": options}
    job = private_job({"local_steps": 3}, model=model)
    _, pool = fit(job, private())
    trainer = TorchTrainer(
        job, SITE, pool=pool, train=TRAIN, held_out=HELD_OUT, private=private()
    )
    weights_d, integers_m = pool.initial_weights()
    with pytest.raises(
        JobError, match="'1' \\(a _SignOfSum\\) gives a different result"
    ):
        trainer.evaluate(weights_d, integers_m, round_index=1, max_loss=3.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dropout_network", "noting_network", "forgetful"])
def test_the_test_of_a_model_changes_no_bit_of_a_run(name: str):
    """Neither generators nor buffers nor attributes notice it."""
    job = private_job({"local_steps": 5}, model={"factory": f"{USERS}:{name}"})
    pool = ModelPool(job)
    found = []
    for _ in range(2):
        trainer = TorchTrainer(
            job,
            SITE,
            pool=pool,
            train=TRAIN,
            held_out=HELD_OUT,
            private=private(random_bytes=known_bytes()),
        )
        tested = len(pool.records_apart.passed)
        result = trainer.fit(*pool.initial_weights(), round_index=1)
        found.append((result.weights_d, len(pool.records_apart.passed) - tested))
    assert [more for _, more in found] == [1, 0]
    np.testing.assert_array_equal(found[0][0], found[1][0])


@pytest.mark.slow
def test_autocast_and_a_language_model():
    """bf16 on the CPU, tied embeddings, windows as records: the loss falls."""
    rng = np.random.default_rng(0)
    start = rng.integers(0, 16, (64, 1))
    windows = as_dataset(((start + np.arange(9)) % 16, None), name="counting")
    options = {"vocabulary": 16, "context": 8, "layers": 1, "heads": 2, "width": 16}
    job = private_job(
        {
            "task": "causal_lm",
            "local_steps": 60,
            "batch_size": 32,
            "precision": "bf16",
            "optimizer": {"name": "adam", "lr": 0.03},
        },
        model={"factory": "clients.models:gpt", "options": options},
    )
    pool = ModelPool(job)
    trainer = TorchTrainer(
        job,
        SITE,
        pool=pool,
        train=windows,
        held_out=windows,
        private=private(0.1, random_bytes=known_bytes()),
    )
    weights_d, integers_m = pool.initial_weights()
    result = trainer.fit(weights_d, integers_m, round_index=1)
    before = trainer.evaluate(weights_d, integers_m, round_index=1).loss
    after = trainer.evaluate(result.weights_d, integers_m, round_index=1).loss
    assert after < 0.5 * before


def test_a_private_loss_is_the_mean_over_a_records_predictions():
    """So a window of eight tokens weighs as much as a record of one class."""
    windows = as_dataset((np.arange(27).reshape(3, 9) % 16, None), name="counting")
    options = {"vocabulary": 16, "context": 8, "layers": 1, "heads": 2, "width": 16}
    job = private_job(
        {"task": "causal_lm", "local_steps": 1, "batch_size": 2},
        model={"factory": "clients.models:gpt", "options": options},
    )
    pool = ModelPool(job)
    trainer = TorchTrainer(
        job, SITE, pool=pool, train=windows, held_out=windows, private=private()
    )
    with pool.borrow() as model:
        model.load(*pool.initial_weights())
        found = trainer._private_loss(model.module, np.arange(3))().item()
        tokens = torch.as_tensor(windows.batch(np.arange(3))[0])
        logits = model.module(tokens[:, :-1]).flatten(0, 1)
        each = functional.cross_entropy(
            logits, tokens[:, 1:].flatten(), reduction="none"
        )
    assert found == pytest.approx(each.reshape(3, 8).mean(1).sum().item(), rel=1e-5)


def test_ranks_sample_records_of_their_own():
    """At rate 1 every record is at one rank."""
    job = private_job({"local_steps": 1, "batch_size": coarse(60)})
    model = nn.Linear(4, 3)
    drawn = []
    for rank in range(3):
        peers = Peers(rank=Rank(rank=rank, world_size=3))
        gradient = PrivateGradient(model, job, private(), num_records=60, peers=peers)
        drawn.append(np.concatenate([each.records for each in gradient.draw()]))
    assert [sorted(part % 3) for part in drawn] == [[0] * 20, [1] * 20, [2] * 20]
    assert sorted(np.concatenate(drawn)) == list(range(60))


@pytest.mark.slow
def test_a_kept_optimiser_holds_nothing_but_released_gradients():
    """What goes into momentum is the gradient with its noise, which has left the site:
    of one step from no momentum it is the step itself."""
    job = private_job(
        {"local_steps": 1, "optimizer": {"lr": LR, "momentum": 0.9, "state": "keep"}}
    )
    result, pool = fit(job, private())
    weights_d, _ = pool.initial_weights()
    assert all(name.endswith("/momentum_buffer") for name in result.kept)
    buffers = [array.ravel() for array in result.kept.values()]
    step_d = (weights_d - result.weights_d) / np.float32(LR)
    np.testing.assert_allclose(np.concatenate(buffers), step_d, rtol=1e-5, atol=1e-6)
