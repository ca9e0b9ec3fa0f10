"""Modules that mix the records of a batch are found, and no others."""

import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from clients import models
from clients.frozen_features import oriented_gradients
from clients.models.model_pool import RecordsApart
from clients.randomness import seeded_globally
from federation.errors import JobError
from privacy.dp_sgd.fit import fit_for_privacy
from privacy.dp_sgd.probe import check_records_apart

# The first of them imports Opacus, which takes seconds.
pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
BATCH = 5


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def draws(seed: int) -> AbstractContextManager[object]:
    return seeded_globally(seed, CPU)


def check(module: nn.Module, inputs: torch.Tensor, **options: Any) -> None:
    """Make a module fit and test it."""
    module, _ = fit_for_privacy(module)
    check_records_apart(module, inputs, lambda m, x: m(x), draws=draws, **options)


class Apply(nn.Module):
    """A module of a user's own, around a function."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class Between(nn.Module):
    """Two layers and something between them."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.function(self.first(x)))


class OfOneLength(torch.autograd.Function):
    """Leaves values alone and gives the gradients of a batch one length together."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] / gradients[0].norm()


MIXERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sign of the sum": lambda x: x * torch.sign(x.sum()),
    "mean taken off": lambda x: x - x.mean(0),
    "a thousandth of the mean": lambda x: x - 1e-3 * x.mean(0),
    "mean, without a gradient": lambda x: x - x.mean(0).detach(),
    "softmax over records": lambda x: x.softmax(0),
    "normalised over records": lambda x: functional.normalize(x, dim=0),
    "largest of all": lambda x: x / x.abs().max(),
    "sorted": lambda x: x.sort(0).values,
    "neighbour": lambda x: x + x.roll(1, 0),
    "neighbour on the other side": lambda x: x + x.roll(-1, 0),
    "first record": lambda x: x + x[:1],
    "last record": lambda x: x + x[-1:],
    "number of records": lambda x: x / len(x),
    "attention between records": lambda x: (x @ x.T).softmax(1) @ x,
    "distance": lambda x: x * torch.cdist(x, x).sum(1, keepdim=True),
    "batch norm as a function": lambda x: functional.batch_norm(
        x, None, None, training=True
    ),
    "cumulative sum": lambda x: x.cumsum(0),
    "only extreme values": lambda x: x * (1.0 if x.abs().max() < 20 else 2.0),
    "quantile": lambda x: x.clamp(max=x.quantile(0.5).item()),
    "gradients alone": OfOneLength.apply,
}
PLACES: dict[str, Callable[[Callable[..., torch.Tensor]], nn.Module]] = {
    "in front": lambda f: nn.Sequential(Apply(f), nn.Linear(4, 6), nn.Linear(6, 3)),
    "inside": lambda f: nn.Sequential(nn.Linear(4, 6), Apply(f), nn.Linear(6, 3)),
    "behind": lambda f: nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3), Apply(f)),
    "between": Between,
    "with dropout": lambda f: nn.Sequential(
        nn.Linear(4, 6), nn.Dropout(0.3), Apply(f), nn.Linear(6, 3)
    ),
    "at zero": lambda f: at_zero(nn.Sequential(nn.Linear(4, 3), Apply(f))),
}


def at_zero(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
    return module


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("mixer", MIXERS)
def test_modules_that_mix_records_are_refused(mixer: str, place: str):
    """Wherever they are in a model, and although its weights begin at zero."""
    if (mixer, place) == ("gradients alone", "in front"):
        return  # No gradient comes that far.
    module = PLACES[place](MIXERS[mixer])
    with pytest.raises(JobError, match=r"model.factory: .* for a record"):
        check(module, torch.randn(BATCH, 4))


@pytest.mark.parametrize("mixer", ["sign of the sum", "mean taken off"])
def test_the_module_is_named(mixer: str):
    """It, or the one whose own code mixes records."""
    inputs, function = torch.randn(BATCH, 4), MIXERS[mixer]
    with pytest.raises(JobError, match=r"'1' \(a Apply\) gives a different result"):
        check(PLACES["inside"](function), inputs)
    with pytest.raises(JobError, match=r"'2' \(a Apply\) gives a different result"):
        check(PLACES["with dropout"](function), inputs)
    with pytest.raises(JobError, match=r"the model \(a Between\), between its layers"):
        check(Between(function), inputs)
    inner = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Between(function)))
    with pytest.raises(
        JobError, match=r"'1\.0' \(a Between\) gives a different result"
    ):
        check(inner, inputs)


class TimeFirst(nn.Module):
    """Takes the first axis for that of time."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)  # (T, B, F), as it believes.
        scores = torch.einsum("tbf,sbf->bts", x, x).softmax(2)
        return self.last(torch.einsum("bts,sbf->tbf", scores, x)).mean(1)


class Transposing(nn.Module):
    """Gives its layers time first, where the test of shapes sees records first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x.transpose(0, 1)).mean(0))


@pytest.mark.parametrize("length", [1, 3, 4, 5, 6])
def test_records_that_are_taken_for_time(length: int):
    """Also where a batch has as many records as a record has steps."""
    inputs = torch.randn(length, length, 4)
    if length > 1:
        with pytest.raises(JobError, match=r"the model \(a TimeFirst\), between"):
            check(TimeFirst(), inputs)
        with pytest.raises(JobError, match=r"'first' works on shape|for a record"):
            check(Transposing(), inputs)
    else:
        with pytest.raises(JobError, match="'first' works on shape"):
            check(Transposing(), torch.randn(5, 1, 4))


class Remembering(nn.Module):
    """Adds to each batch what it remembers of the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.before = nn.Linear(4, 3), torch.zeros(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, self.before = x + self.before, x.detach().mean(0)
        return self.layer(x)


class InOneMode(nn.Module):
    """Mixes records in training only, or in evaluation only."""

    def __init__(self, *, training: bool) -> None:
        super().__init__()
        self.layer, self.mixes_in_training = nn.Linear(4, 3), training

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x - x.mean(0) if self.training == self.mixes_in_training else x
        return self.layer(x)


class SizeAndDropout(nn.Module):
    """Draws random numbers without a layer that does, and depends on the number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(functional.dropout(x, 0.2, self.training)) / len(x)


class HookedGradient(nn.Module):
    """Changes gradients between its layers by a function of all records'."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(x))
        if hidden.requires_grad:
            hidden.register_hook(self.function)
        return self.last(hidden)


@pytest.mark.parametrize(
    "function",
    [
        lambda g: g - g.mean(0),
        lambda g: g / g.abs().max().clamp(min=1e-9),
        lambda g: g / g.norm(),
        lambda g: g * (1.0 if g.abs().max() < 20 else 2.0),
    ],
    ids=["mean taken off", "over the largest", "of one length", "clipped"],
)
def test_gradients_that_hooks_mix_are_refused(
    function: Callable[[torch.Tensor], torch.Tensor],
):
    with pytest.raises(JobError, match="different gradient"):
        check(HookedGradient(function), torch.randn(BATCH, 4))


class DrawsItself(nn.Module):
    """Noise from a generator whose seed is in the code."""

    def __init__(self, generator: Any, draw: Callable[[Any], float]) -> None:
        super().__init__()
        self.layer, self.generator, self.draw = nn.Linear(4, 3), generator, draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * (1 + self.draw(self.generator))


def test_a_generator_of_the_models_own_is_refused():
    """Its draws are as public as the code, and follow the places in a batch."""
    for generator, draw in (
        (torch.Generator(), lambda g: float(torch.rand((), generator=g))),
        (np.random.default_rng(0), lambda g: g.random()),
        (np.random.RandomState(0), lambda g: g.random()),
        (random.Random(0), lambda g: g.random()),  # noqa: S311
    ):
        with pytest.raises(JobError, match=r"'0\.generator' .* random generator"):
            check(nn.Sequential(DrawsItself(generator, draw)), torch.randn(BATCH, 4))


@pytest.mark.parametrize("kind", ["in place", "by data", "by a closure"])
def test_weights_that_are_written_in_a_pass_are_refused(kind: str):
    """They would learn of records without noise."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))

    def write(layer: Any, args: Any, out: torch.Tensor) -> None:
        with torch.no_grad():
            target = model[0] if kind == "by a closure" else layer
            weight = target.weight.data if kind == "by data" else target.weight
            weight.add_(out.mean() * 1e-3)

    model[0].register_forward_hook(write)
    with pytest.raises(JobError, match=r"weight' of the model is trained.* hook"):
        check(model, torch.randn(BATCH, 4))


@pytest.mark.parametrize(
    "make", [Remembering, SizeAndDropout, partial(InOneMode, training=True)]
)
def test_other_ways_to_mix_are_refused(make: Callable[[], nn.Module]):
    """Over batches, by their size, and by a mode."""
    with pytest.raises(JobError, match="when the batch has"):
        check(make(), torch.randn(BATCH, 4))


def test_every_mode_is_tested_once():
    """Once for each; records of another shape are tested again."""
    apart, seen = RecordsApart(CPU), []
    module, inputs = InOneMode(training=False), torch.randn(BATCH, 4)

    def forward(module: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        seen.append(len(inputs))
        return module(inputs)

    apart.check(module, inputs[:1], forward, gradients=True)
    assert seen == []
    apart.check(module, inputs, forward, gradients=True)
    first = len(seen)
    assert first > 0
    apart.check(module, inputs, forward, gradients=True)
    assert len(seen) == first
    with pytest.raises(JobError, match="for a record"):
        apart.check(module.eval(), inputs, forward, gradients=False)


def test_a_model_that_fails_on_one_record_is_refused():
    """A Poisson sample may be as small."""
    module = nn.Sequential(nn.Linear(4, 3), Apply(lambda x: x.squeeze().softmax(1)))
    with pytest.raises(JobError, match="on a batch of 1 records"):
        check(module, torch.randn(BATCH, 4))


class RoundsOneRecord(nn.Module):
    """Differs for one record in a large batch, as another order of a sum may."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_odd_one = (x[:, :1] == 7.0) & (len(x) > 1)
        return torch.where(is_odd_one, x * 1.01, x)


def test_a_difference_that_other_records_do_not_show_is_taken_for_rounding():
    """Where they are tested in turn."""
    inputs = torch.randn(9, 4)
    inputs[0, 0] = 7.0
    check(nn.Sequential(RoundsOneRecord(), nn.Linear(4, 3)), inputs)
    inputs[:, 0] = 7.0
    with pytest.raises(JobError, match="for a record"):
        check(nn.Sequential(RoundsOneRecord(), nn.Linear(4, 3)), inputs)


class Locked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 3)
        self.open_file = open(__file__)  # noqa: SIM115, PTH123


def test_a_model_that_cannot_be_copied_is_refused():
    """With the kind of error and what to do."""
    module = Locked()
    try:
        with pytest.raises(
            JobError, match=r"cannot be copied.* \(TypeError\): do not store"
        ):
            check(module, torch.randn(BATCH, 4))
    finally:
        module.open_file.close()


class Classified(nn.Module):
    """A layer in front of a linear one that gives logits."""

    def __init__(self, *layers: nn.Module, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.last = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers(x)
        x = x[0] if isinstance(x, tuple) else x  # type: ignore[redundant-expr]
        return self.last(x.flatten(1))


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, dropout=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x)[0]


class Residual(nn.Module):
    """Drops the branch of some records: stochastic depth."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keep = torch.rand(len(x), *(1,) * (x.ndim - 1)) < 0.5
        return x + keep * self.branch(x)


class Counting(nn.Module):
    """Notes what it sees, counts its calls and draws in evaluation too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.calls = 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x.sum()
        self.calls += 1
        noise = torch.randn(x.shape)
        scale = 1 + self.calls + self.seen * 0
        return self.layer(x + noise) * float(scale)


class Codes(nn.Module):
    """Classes among the floating-point columns of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Embedding(4, 8)
        self.rest = nn.Linear(7, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.codes(x[:, :1].long())[:, 0] + self.rest(x[:, 1:])


class OwnParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def flat(size: int) -> torch.Tensor:
    return torch.randn(size, 8)


def sequences(size: int) -> torch.Tensor:
    return torch.randn(size, 6, 8)


def channels(size: int) -> torch.Tensor:
    return torch.rand(size, 4, 8)


def images(size: int) -> torch.Tensor:
    return torch.rand(size, 4, 8, 8)


def volumes(size: int) -> torch.Tensor:
    return torch.rand(size, 2, 4, 4, 4)


def tokens(size: int) -> torch.Tensor:
    return torch.randint(0, 20, (size, 6))


def coded(size: int) -> torch.Tensor:
    return torch.cat((torch.randint(0, 4, (size, 1)).float(), torch.rand(size, 7)), 1)


def _encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)


Kind = tuple[Callable[[], nn.Module], Callable[[int], torch.Tensor], int]
LAYERS: dict[str, Kind] = {
    "linear": (lambda: nn.Linear(8, 8), flat, 8),
    "bilinear of places": (lambda: nn.Linear(8, 4), sequences, 24),
    "relu in place": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True)),
        flat,
        8,
    ),
    "leaky relu": (nn.LeakyReLU, flat, 8),
    "gelu": (nn.GELU, flat, 8),
    "silu": (nn.SiLU, flat, 8),
    "softmax": (lambda: nn.Softmax(1), flat, 8),
    "prelu as its own": (OwnParameter, flat, 8),
    "dropout": (lambda: nn.Dropout(0.5), flat, 8),
    "alpha dropout": (lambda: nn.AlphaDropout(0.5), flat, 8),
    "dropout of channels": (lambda: nn.Dropout2d(0.5), images, 256),
    "layer norm": (lambda: nn.LayerNorm(8), sequences, 48),
    "layer norm of several axes": (lambda: nn.LayerNorm((6, 8)), sequences, 48),
    "group norm": (lambda: nn.GroupNorm(2, 4), images, 256),
    "batch norm, replaced": (lambda: nn.BatchNorm2d(4), images, 256),
    "batch norm of two values a group": (lambda: nn.BatchNorm1d(8), flat, 8),
    "instance norm": (lambda: nn.InstanceNorm2d(4, affine=True), images, 256),
    "local response norm": (lambda: nn.LocalResponseNorm(2), images, 256),
    "convolution 1d": (lambda: nn.Conv1d(4, 4, 3, padding=1), channels, 32),
    "convolution 2d": (lambda: nn.Conv2d(4, 4, 3, padding=1), images, 256),
    "convolution 3d": (lambda: nn.Conv3d(2, 2, 3, padding=1), volumes, 128),
    "strided": (lambda: nn.Conv2d(4, 4, 2, stride=2), images, 64),
    "dilated": (lambda: nn.Conv2d(4, 4, 3, dilation=2), images, 64),
    "in groups": (lambda: nn.Conv2d(4, 4, 3, padding=1, groups=2), images, 256),
    "circular": (
        lambda: nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"),
        images,
        256,
    ),
    "largest of places": (lambda: nn.MaxPool2d(2), images, 64),
    "mean of places": (lambda: nn.AdaptiveAvgPool2d(2), images, 16),
    "upsampled": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), images, 1024),
    "shuffled pixels": (lambda: nn.PixelShuffle(2), images, 256),
    "embedding": (lambda: nn.Embedding(20, 8), tokens, 48),
    "embedding with padding": (
        lambda: nn.Embedding(20, 8, padding_idx=3),
        tokens,
        48,
    ),
    "lstm": (lambda: nn.LSTM(8, 8, batch_first=True), sequences, 48),
    "lstm of two layers and dropout": (
        lambda: nn.LSTM(8, 8, num_layers=2, dropout=0.2, batch_first=True),
        sequences,
        48,
    ),
    "lstm in both directions": (
        lambda: nn.LSTM(8, 8, bidirectional=True, batch_first=True),
        sequences,
        96,
    ),
    "gru": (lambda: nn.GRU(8, 8, batch_first=True), sequences, 48),
    "attention": (SelfAttention, sequences, 48),
    "encoder": (_encoder, sequences, 48),
    "stack of encoders": (
        lambda: nn.TransformerEncoder(_encoder(), 2, enable_nested_tensor=False),
        sequences,
        48,
    ),
    "stochastic depth": (Residual, flat, 8),
    "counts and notes": (Counting, flat, 8),
    "classes in columns": (Codes, coded, 8),
    "frozen": (lambda: nn.Linear(8, 8).requires_grad_(requires_grad=False), flat, 8),
    "nothing": (nn.Identity, flat, 8),
}
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], torch.Tensor]]] = {
    "digits_cnn": (lambda: models.digits_cnn(3, 8), lambda n: torch.rand(n, 1, 8, 8)),
    "frozen features": (oriented_gradients, lambda n: torch.rand(n, 1, 8, 8)),
    "mlp": (lambda: models.mlp(8, 3), flat),
    "logistic regression": (lambda: models.logistic_regression(8, 3), flat),
    "gpt": (
        lambda: models.gpt(20, 8, 2, 2, 16),
        lambda n: tokens(n)[:, :-1],
    ),
}


@pytest.mark.parametrize(
    ("size", "training"), [(2, True), (3, False), (9, True)], ids=str
)
@pytest.mark.parametrize("kind", LAYERS)
def test_layers_that_keep_records_apart_pass(kind: str, size: int, *, training: bool):
    """In either mode, with few records and many."""
    make, draw, width = LAYERS[kind]
    check(Classified(make(), width=width).train(training), draw(size))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", MODELS)
def test_shipped_models_pass(kind: str, dtype: torch.dtype):
    """With the digits of any type."""
    make, draw = MODELS[kind]
    inputs = draw(6)
    check(make().to(dtype), inputs.to(dtype) if inputs.is_floating_point() else inputs)


def test_the_probe_leaves_no_trace():
    """Weights, buffers, attributes, gradients, modes and generators are as before."""
    module = Classified(Counting(), nn.Dropout(0.5), width=8)
    inputs = flat(BATCH)
    before = {name: t.clone() for name, t in module.state_dict().items()}
    counting = module.layers[0]
    states = (
        torch.get_rng_state(),
        random.getstate(),
    )
    kept = inputs.clone()
    check_records_apart(module, inputs, lambda m, x: m(x), draws=draws)
    assert all(torch.equal(t, before[n]) for n, t in module.state_dict().items())
    assert torch.equal(inputs, kept)
    assert counting.calls == 0
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert module.training
    assert all(p.grad is None for p in module.parameters())
    assert not any(m._forward_hooks for m in module.modules())
