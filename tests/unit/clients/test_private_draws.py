"""What models and data draw in private steps depends on no record and no public seed.

The steps add next to no noise here, so that they show sums of clipped gradients.
"""

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.random_layers import DRAWS, LAYERS, WIDTH, Augmented
from support.small_jobs import small_job
from torch.utils.data import DataLoader, default_collate

from clients.data.datasets import Dataset, Examples, as_dataset
from clients.data.reading import BatchReader
from clients.models.model_pool import ModelPool
from clients.privacy import standardise
from clients.randomness import SECRET_BYTES, STATE_BYTES, fill
from clients.training.private_steps import PrivateTraining
from clients.training.trainer import TorchTrainer
from federation.errors import SiteError
from federation.ids import SiteId
from federation.job.spec import JobSpec

SITE = SiteId("site-0")
RECORDS, CLIP_NORM = 16, 0.5
RNG = np.random.default_rng(3)
INPUTS = RNG.normal(size=(RECORDS, WIDTH)).astype(np.float32) * 5
TARGETS = RNG.integers(0, 3, RECORDS).astype(np.int64)
TOKENS = RNG.integers(0, 20, (RECORDS, 7))
IMAGES = RNG.random((RECORDS, 1, 8, 8)).astype(np.float32)
Bytes = Callable[[int], bytes]


def secret(number: int) -> Bytes:
    """Bytes in place of the operating system's: others for each number and request."""
    calls = iter(range(10_000))

    def draw(size: int) -> bytes:
        return hashlib.shake_128(f"{number}/{next(calls)}".encode()).digest(size)

    return draw


def arrays(inputs: Any, targets: Any) -> Dataset:
    return as_dataset(Examples(inputs=inputs, targets=targets), name="train")


def job_of(factory: str, **training: Any) -> JobSpec:
    module, _, options = factory.partition(" ")
    return small_job(
        seed=7,
        model={"factory": module, "options": eval(options or "{}")},  # noqa: S307
        aggregation={"weights": "uniform"},
        evaluation={"every": 0},
        privacy={
            "differential_privacy": {
                "unit": "record",
                "target_epsilon": 1.0,
                "clip_norm": CLIP_NORM,
            }
        },
        training={
            "local_steps": 1,
            "batch_size": RECORDS,
            "optimizer": {"lr": 1.0},
            **training,
        },
    )


class Sums:
    """Sums of a model's clipped gradients over all records, in clip norms."""

    def __init__(self, factory: str, **training: Any) -> None:
        self.job = job_of(factory, **training)
        self.pool = ModelPool(self.job)
        self.start = self.pool.initial_weights()

    def __call__(self, train: Dataset, random_bytes: Bytes | None = None) -> Any:
        given = {} if random_bytes is None else {"random_bytes": random_bytes}
        private = PrivateTraining(clip_norm=CLIP_NORM, noise_multiplier=1e-4, **given)
        trainer = TorchTrainer(
            self.job,
            SITE,
            pool=self.pool,
            train=train,
            held_out=train.subset(np.arange(0)),
            private=private,
        )
        # As many as a full batch also of one record fewer: see ``expected_batch``.
        found = trainer.fit(*self.start, round_index=1).weights_d
        return (self.start[0] - found).astype(np.float64) * RECORDS / CLIP_NORM


MODELS: dict[str, tuple[str, Any, Any, dict[str, Any]]] = {
    **{
        f"layer {name}": (
            f"support.random_layers:model {{'layer': {name!r}}}",
            INPUTS,
            TARGETS,
            {},
        )
        for name in LAYERS
    },
    "lora": ("support.random_layers:adapted", INPUTS, TARGETS, {}),
    "digits_cnn": ("clients.models:digits_cnn {'width': 4}", IMAGES, TARGETS, {}),
    "mlp": (
        f"clients.models:mlp {{'inputs': {WIDTH}, 'classes': 3}}",
        INPUTS,
        TARGETS,
        {},
    ),
    "logistic_regression": (
        f"clients.models:logistic_regression {{'inputs': {WIDTH}, 'classes': 3}}",
        INPUTS,
        TARGETS,
        {},
    ),
    "oriented_gradients": (
        "clients.frozen_features:oriented_gradients",
        IMAGES,
        TARGETS,
        {},
    ),
    "gpt": (
        "clients.models:gpt {'vocabulary': 20, 'context': 8, 'layers': 1, 'width': 8}",
        TOKENS,
        None,
        {"task": "causal_lm"},
    ),
}


def removed(values: Any, place: int) -> Any:
    return None if values is None else np.delete(values, place, 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_one_record_moves_a_sum_by_one_clip_norm_on_average(name: str):
    """Over what is drawn; without draws, each time. With masks by a public seed and by
    place it was up to 23 clip norms."""
    factory, inputs, targets, training = MODELS[name]
    sums, times = Sums(factory, **training), 32
    draws = name.startswith("layer") or name == "lora"
    for place in (0,) if draws else range(0, RECORDS, 3):
        given = arrays(inputs, targets)
        fewer = arrays(removed(inputs, place), removed(targets, place))
        apart = [
            sums(given, secret(number)) - sums(fewer, secret(number))
            for number in range(times if draws else 1)
        ]
        error = np.std(apart, axis=0) / np.sqrt(times)
        moved = np.linalg.norm(np.mean(apart, axis=0))
        assert moved <= 1.01 + 1.5 * np.linalg.norm(error), (place, moved)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in MODELS if n.startswith(("layer", "lora"))])
def test_draws_are_new_in_every_round_and_follow_the_secret(name: str):
    """By nothing but the job's seed nobody can repeat them; by their source one can."""
    factory, inputs, targets, training = MODELS[name]
    sums, data = Sums(factory, **training), arrays(inputs, targets)
    one, other = sums(data), sums(data)
    assert np.linalg.norm(one - other) > 0.05
    np.testing.assert_array_equal(sums(data, secret(1)), sums(data, secret(1)))


LINEAR = f"clients.models:logistic_regression {{'inputs': {WIDTH}, 'classes': 3}}"


def augmented(kind: str, place: str, inputs: Any = INPUTS, targets: Any = TARGETS):
    """Records that are drawn to be zero, when they are read or when they are
    collated."""
    if place == "record":
        return as_dataset(Augmented(inputs, targets, kind), name="train")

    def collate(items: list[Any]) -> Any:
        x, y = default_collate(items)
        return torch.stack([DRAWS[kind](row) for row in x]), y

    pairs = [(torch.tensor(x), int(y)) for x, y in zip(inputs, targets, strict=True)]
    return as_dataset(DataLoader(pairs, collate_fn=collate), name="train")  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("place", ["record", "collate"])
@pytest.mark.parametrize("kind", DRAWS)
def test_augmentation_draws_from_the_secret(kind: str, place: str):
    """Whatever the user's module has seeded: such seeds are in its code."""
    sums, data = Sums(LINEAR), augmented(kind, place)

    def seeded(random_bytes: Bytes | None = None) -> Any:
        np.random.seed(0)  # noqa: NPY002
        torch.manual_seed(0)
        return sums(data, random_bytes)

    assert np.linalg.norm(seeded() - seeded()) > 0.05
    np.testing.assert_array_equal(seeded(secret(1)), seeded(secret(1)))
    fewer = augmented(kind, place, INPUTS[1:], TARGETS[1:])
    apart = [sums(data, secret(i)) - sums(fewer, secret(i)) for i in range(32)]
    error = np.std(apart, axis=0) / np.sqrt(32)
    assert np.linalg.norm(np.mean(apart, axis=0)) <= 1.01 + 1.5 * np.linalg.norm(error)


def states_of(words: Any) -> Bytes:
    """Secret bytes that are such states of all generators, and keys."""
    return lambda size: (words.tobytes() * 4)[:size]


def twisted(words: Any) -> Any:
    """The state of a Mersenne twister after it has given as many words as it has."""
    twister = np.random.MT19937()
    twister.state = {
        "bit_generator": "MT19937",
        "state": {"key": words, "pos": len(words)},
    }
    drawn = twister.random_raw(len(words))
    return twister.state["state"]["key"], drawn


def test_all_of_a_generators_state_is_secret():
    """As NumPy's twister, which shares no code, draws from the same state; a seed of
    64 bits would set 32 of them."""
    words = np.frombuffer(secret(1)(STATE_BYTES), np.uint32)
    generator, before = torch.Generator(), np.random.get_state()  # noqa: NPY002
    fill([generator], states_of(words)(SECRET_BYTES))
    drawn = torch.randint(0, 1 << 20, (len(words),), generator=generator)
    assert drawn.tolist() == (twisted(words)[1] % (1 << 20)).tolist()
    np.random.set_state(before)  # noqa: NPY002


@pytest.mark.slow
def test_other_records_draw_alike_with_and_without_one():
    """The proof: to any draws with a record belong draws without it, as likely, with
    which the two sums differ by its clipped gradient alone."""
    width = STATE_BYTES // 4  # So a record draws as many words as a state has.
    sums = Sums(f"support.random_layers:halved {{'inputs': {width}}}")
    inputs = np.random.default_rng(4).normal(size=(RECORDS, width)).astype(np.float32)
    words = np.frombuffer(secret(1)(STATE_BYTES), np.uint32)
    given = sums(arrays(inputs, TARGETS), states_of(words))

    def apart(others: Any) -> float:
        fewer = arrays(inputs[1:], TARGETS[1:])
        found = sums(fewer, states_of(others))
        return float(np.linalg.norm(given - found))

    assert apart(twisted(words)[0]) <= 1.01
    assert apart(words) > 2.0


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_noised_evaluation_draws_from_the_secret(workers: int):
    """The model and the data, also in worker processes."""
    train = arrays(INPUTS[:, :4], TARGETS)

    def loss_sum(factory: str, held_out: Dataset) -> float:
        job = job_of(factory)
        trainer = TorchTrainer(
            job,
            SITE,
            pool=ModelPool(job),
            train=train,
            held_out=held_out,
            private=PrivateTraining(clip_norm=CLIP_NORM, noise_multiplier=1.0),
        )
        start = trainer.pool.initial_weights()
        np.random.seed(0)  # noqa: NPY002
        return trainer.evaluate(*start, round_index=1, max_loss=9.0).loss_sum

    noisy = "support.users_module:noisy_network"
    assert loss_sum(noisy, train) != loss_sum(noisy, train)
    for kind in DRAWS:
        loader = DataLoader(
            Augmented(INPUTS[:, :4], TARGETS, kind),  # type: ignore[arg-type]
            num_workers=workers,
        )
        data = as_dataset(loader, name="held-out")
        plain = "clients.models:mlp {'inputs': 4, 'classes': 3}"
        assert loss_sum(plain, data) != loss_sum(plain, data), kind


def test_workers_draw_from_the_secret():
    """The same bytes, the same draws; no number of a batch in them."""
    data = as_dataset(
        DataLoader(Augmented(INPUTS, TARGETS, "torch"), num_workers=2),  # type: ignore[arg-type]
        name="train",
    )
    walk = [np.arange(8), np.arange(8, 16)]

    def read(source: Any) -> torch.Tensor:
        with BatchReader(data, walk, seed=source) as reader:
            return torch.cat([reader.batch(indices)[0] for indices in reader])

    one, other = (secret(number)(SECRET_BYTES) for number in range(2))
    assert torch.equal(read(one), read(one))
    assert not torch.equal(read(one), read(other))


def mixup(items: list[Any]) -> Any:
    x, y = default_collate(items)
    return {"inputs": {"x": 0.6 * x + 0.4 * x.roll(1, 0)}, "labels": y}


def drawn_mixup(items: list[Any]) -> Any:
    x, y = default_collate(items)
    share = np.random.beta(1.0, 1.0)  # noqa: NPY002
    return {"inputs": {"x": share * x + (1 - share) * x.roll(1, 0)}, "labels": y}


def centred(items: list[Any]) -> Any:
    x, y = default_collate(items)
    return {"inputs": {"x": x - x.mean(0)}, "labels": y}


def to_the_longest(items: list[Any]) -> Any:
    x = torch.nn.utils.rnn.pad_sequence([each[0] for each in items], batch_first=True)
    return {"inputs": {"x": x}, "labels": torch.tensor([each[1] for each in items])}


def to_the_job(items: list[Any]) -> Any:
    found = to_the_longest(items)
    x = found["inputs"]["x"]
    padded = torch.nn.functional.pad(x, (0, WIDTH - x.shape[1]))
    return {"inputs": {"x": padded}, "labels": found["labels"]}


def ragged(collate: Callable[[list[Any]], Any], long: int) -> Dataset:
    """Records of one length, but that at a place."""
    lengths = [WIDTH if i == long else 5 for i in range(RECORDS)]
    items = [
        (torch.tensor(x[:n]), int(y))
        for x, y, n in zip(INPUTS, TARGETS, lengths, strict=True)
    ]
    return as_dataset(DataLoader(items, collate_fn=collate), name="train")  # type: ignore[arg-type]


@pytest.mark.parametrize("collate", [mixup, drawn_mixup, centred])
def test_a_collate_that_mixes_records_is_refused(collate: Any):
    """With the tensor's name, before any step and before statistics are drawn."""
    data = ragged(collate, RECORDS - 1).subset(np.arange(5))
    with pytest.raises(SiteError, match=r"collate_fn of train makes inputs\['x'\]"):
        data.apart()


def test_padding_to_the_longest_is_refused_and_to_a_constant_is_not():
    """Where the long record is among the first, and where it comes later."""
    with pytest.raises(SiteError, match=r"\['x'\].* depend .*max_length"):
        ragged(to_the_longest, 1).apart()
    with pytest.raises(SiteError, match=r"one by one.*max_length"):
        ragged(to_the_longest, 9).apart().batch(np.arange(RECORDS))
    found = ragged(to_the_job, 9).apart().batch(np.arange(RECORDS))
    assert torch.equal(found[0]["x"][9], torch.tensor(INPUTS[9]))


def test_records_are_collated_one_by_one():
    """So that none depends on others, whatever passes the check."""

    def rarely(items: list[Any]) -> Any:
        x, y = default_collate(items)
        return (x + x.mean(0) if len(items) > 8 else x), y

    items = [(torch.tensor(x), int(y)) for x, y in zip(INPUTS, TARGETS, strict=True)]
    data = as_dataset(DataLoader(items, collate_fn=rarely), name="train").apart()  # type: ignore[arg-type]
    assert torch.equal(data.batch(np.arange(RECORDS))[0], torch.tensor(INPUTS))
    assert torch.equal(
        data.subset(np.arange(3)).apart().batch(np.array([2]))[0],
        torch.tensor(INPUTS[2:3]),
    )


@pytest.mark.slow
def test_a_private_trainer_reads_records_apart():
    """A collate that changes the others where one value is extreme, which the check
    does not try, moves a sum by one clip norm all the same."""

    def shifting(items: list[Any]) -> Any:
        x, y = default_collate(items)
        return x + 10 * (x.abs().max() > 1e6), y

    far = np.concatenate((INPUTS[1:], np.full((1, WIDTH), 1e7, np.float32)))
    sums, found = Sums(LINEAR), []
    for inputs in (far, far[:-1]):
        items = list(zip(torch.tensor(inputs), [*TARGETS[1:].tolist(), 0]))  # noqa: B905
        data = as_dataset(DataLoader(items, collate_fn=shifting), name="train")  # type: ignore[arg-type]
        found.append(sums(data))
    assert np.linalg.norm(np.subtract(*found)) <= 1.01


def test_statistics_are_of_records_apart():
    """And what their data draws is secret too."""
    private = {"unit": "record", "target_epsilon": 8.0, "delta": 1e-5}
    asked = {"low": [-10.0], "high": [10.0], "noise_multiplier": 0.05}
    job = small_job(
        aggregation={"weights": "uniform"},
        privacy={"differential_privacy": {**private, "standardise": asked}},
    )
    with pytest.raises(SiteError, match="collate_fn of train makes"):
        standardise.release(job, ragged(mixup, RECORDS - 1).subset(np.arange(5)))
    found = []
    for number in range(2):
        torch.manual_seed(number)
        data = augmented("torch", "record")
        found.append(standardise.release(job, data, secret(1)))
    assert found[0] == found[1]
