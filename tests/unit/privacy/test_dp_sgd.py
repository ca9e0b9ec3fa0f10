"""Clipped sums of record gradients, against autograd record by record."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from clients import models
from clients.models.weights import layout_of, read
from federation.errors import JobError
from privacy.dp_sgd.clipping import (
    MARGIN,
    ClippedSum,
    choose,
    most_records,
    sum_margin,
)
from privacy.dp_sgd.fit import fit_for_privacy
from privacy.dp_sgd.ghost import (
    MatrixUse,
    add_weighted_,
    check_places,
    gram_norms_square,
)

# The first of them imports Opacus, which takes seconds.
pytestmark = pytest.mark.slow

CLASSES = 5
Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def classify(model: nn.Module, inputs: torch.Tensor):
    """Labels follow from the inputs, so that a batch is one tensor."""
    labels = inputs.flatten(1).float().sum(1).abs().long() % CLASSES
    return functional.cross_entropy(model(inputs).float(), labels, reduction="sum")


def next_token(model: nn.Module, tokens: torch.Tensor):
    logits = model(tokens[:, :-1]).flatten(0, 1)
    total = functional.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum")
    return total / (tokens.shape[1] - 1)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, 16, padding_idx=3)
        self.layer = nn.TransformerEncoderLayer(
            16, 2, 32, batch_first=True, dropout=0.0
        )
        self.out = nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor):
        return self.out(self.layer(self.tokens(x)).mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, 16)
        self.lstm = nn.LSTM(16, 12, batch_first=True)
        self.out = nn.Linear(12, CLASSES)

    def forward(self, x: torch.Tensor):
        return self.out(self.lstm(self.tokens(x))[0][:, -1])


class CrossAttention(nn.Module):
    """Attends from the last tokens to all of them, in one width or in several."""

    def __init__(self, **options: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True, **options)
        self.out = nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor):
        seen = self.tokens(x)
        key, value = seen[..., : self.attention.kdim], seen[..., : self.attention.vdim]
        found, _ = self.attention(seen[:, -3:], key, value, need_weights=False)
        return self.out(found.mean(1))


class Bare(nn.Module):
    """A parameter of its own beside a layer: nobody wrote a sampler for it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.inner = nn.Linear(4, CLASSES)

    def forward(self, x: torch.Tensor):
        return self.inner(torch.tanh(x @ self.weight))


class Twice(nn.Module):
    """One layer called twice, on records of several rows."""

    def __init__(self) -> None:
        super().__init__()
        self.square = nn.Linear(4, 4)
        self.out = nn.Linear(4, CLASSES)

    def forward(self, x: torch.Tensor):
        return self.out(self.square(torch.tanh(self.square(x))).mean((1, 2)))


class TwiceConvolved(nn.Module):
    """One convolution called twice: both calls' gradients are held at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, stride=2, bias=False)
        self.square = nn.Conv2d(4, 4, 3, padding="same")
        self.out = nn.Linear(36, CLASSES)

    def forward(self, x: torch.Tensor):
        x = self.square(torch.tanh(self.square(self.first(x))))
        return self.out(x.flatten(1))


def convolutions():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, padding_mode="circular"),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 4, 3, padding="same", groups=2),
        nn.BatchNorm2d(4, affine=False),
        nn.Flatten(),
        nn.Linear(256, CLASSES),
    )


def frozen_front():
    model = models.mlp(64, CLASSES, hidden=(8,))
    model[1].requires_grad_(requires_grad=False)
    return model


def images(size: int):
    return torch.randn(size, 1, 8, 8)


def tokens(size: int):
    return torch.randint(0, 20, (size, 7))


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], torch.Tensor], Loss]]
KINDS = {
    "cnn": (lambda: models.digits_cnn(CLASSES, 8), images, classify),
    "gpt": (lambda: models.gpt(20, 8, 2, 2, 16), tokens, next_token),
    "gpt with layernorm": (
        lambda: models.gpt(20, 8, 1, 2, 16, norm="layernorm"),
        tokens,
        next_token,
    ),
    "encoder": (Encoder, tokens, classify),
    "cross-attention": (CrossAttention, tokens, classify),
    "attention of several widths": (
        lambda: CrossAttention(kdim=5, vdim=6),
        tokens,
        classify,
    ),
    "lstm": (Recurrent, tokens, classify),
    "bare parameter": (Bare, lambda n: torch.randn(n, 4), classify),
    "layer called twice": (Twice, lambda n: torch.randn(n, 2, 3, 4), classify),
    "convolutions": (convolutions, images, classify),
    "convolution called twice": (TwiceConvolved, images, classify),
    "frozen front": (frozen_front, images, classify),
}


def trained(model: nn.Module):
    return [p for p in model.parameters() if p.requires_grad]


def gradient_of(model: nn.Module, loss: Loss, record: torch.Tensor):
    gradients = torch.autograd.grad(
        loss(model, record), trained(model), allow_unused=True, materialize_grads=True
    )
    return torch.cat([g.flatten() for g in gradients]).double()


def one_by_one(model: nn.Module, loss: Loss, records: torch.Tensor, clip_norm: float):
    total = torch.zeros(sum(p.numel() for p in trained(model)), dtype=torch.float64)
    for record in records.split(1):
        gradient = gradient_of(model, loss, record)
        total += gradient * min(1.0, clip_norm / gradient.norm().item())
    return total


def clipped_sum(
    model: nn.Module,
    loss: Loss,
    batches: tuple[torch.Tensor, ...],
    clip_norm: float,
    clipping: str,
):
    total = ClippedSum(model, clip_norm=clip_norm, clipping=clipping, batch_size=8)
    for batch in batches:
        total.add_(lambda batch=batch: loss(model, batch), len(batch))
    return total.sum_d.double()


@pytest.mark.parametrize("clipping", ["hooks", "ghost"])
@pytest.mark.parametrize("kind", KINDS)
def test_sum_is_that_of_records_one_by_one(kind: str, clipping: str):
    """Some, all or none are clipped, in two batches of unequal size."""
    make, draw, loss = KINDS[kind]
    model, _ = fit_for_privacy(make())
    records = draw(9)
    norms = [gradient_of(model, loss, r).norm().item() for r in records.split(1)]
    # Inner products over seven tokens are clipped a little further than they must.
    tolerance = 1e-5 if clipping == "hooks" else 5e-5
    for clip_norm in (0.5 * min(norms), float(np.median(norms)), 2 * max(norms)):
        expected = one_by_one(
            model, loss, records, clip_norm * (1 - MARGIN - sum_margin(8))
        )
        actual = clipped_sum(model, loss, records.split(5), clip_norm, clipping)
        assert ((actual - expected).norm() / expected.norm()).item() < tolerance


@pytest.mark.parametrize("clipping", ["hooks", "ghost"])
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1.0, 1e15, 1e30, math.inf, math.nan])
def test_no_record_adds_more_than_the_bound(scale: float, clipping: str):
    """Whatever its values; what is not finite adds nothing and spoils nothing."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Linear(32, CLASSES))
    others, record = images(3), images(1) * scale
    without = clipped_sum(model, classify_first, (others,), 0.5, clipping)
    both = torch.cat([others, record])
    added = clipped_sum(model, classify_first, (both,), 0.5, clipping) - without
    assert added.norm().item() <= 0.5
    if not math.isfinite(scale):
        assert added.norm().item() < 1e-6


def classify_first(model: nn.Module, inputs: torch.Tensor):
    """A loss that grows with the inputs without end."""
    return model(inputs)[:, 0].sum()


@pytest.mark.parametrize("clipping", ["hooks", "ghost"])
@pytest.mark.parametrize("clip_norm", [1e-6, 1.0, 1e6])
def test_one_clipped_record_stays_below_the_bound(clip_norm: float, clipping: str):
    """Rounding included: the margin is there for it."""
    model = models.gpt(20, 8, 2, 2, 32)

    def loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        return 1e8 * next_token(model, tokens)

    for record in tokens(6).split(1):
        norm = clipped_sum(model, loss, (record,), clip_norm, clipping).norm().item()
        assert clip_norm * (1 - 2 * MARGIN) < norm <= clip_norm


@pytest.mark.parametrize("clipping", ["hooks", "ghost"])
def test_gradients_that_cancel_stay_below_the_bound(clipping: str):
    """Two large parts of a record's gradient, whose sum is small."""
    model = nn.Linear(1, 1, bias=False)

    def loss(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        signs = torch.tensor([[1.0], [-1.0]])
        return (1e4 * signs * model(inputs)).sum()

    record = torch.tensor([[[1.0], [1.0 + 1e-4]]])
    norm = clipped_sum(model, loss, (record,), 0.1, clipping).norm().item()
    assert norm <= 0.1


def test_many_small_batches_add_up_within_their_margin():
    """Records that are all alike, so that no rounding makes up for another."""
    model = nn.Linear(1, 1, bias=False)
    records = torch.full((10_000, 1), 1 / 3)
    total = ClippedSum(
        model, clip_norm=1.0, clipping="hooks", batch_size=8, expected_records=10_000
    )
    for batch in records.split(8):
        total.add_(lambda batch=batch: model(batch).sum(), len(batch))
    exact = 10_000 * records[0].double().item()
    assert abs(total.sum_d.item() - exact) <= sum_margin(10_000) / 2


def test_large_batches_add_up_within_their_margin():
    """More values than are taken to float64 one by one; sums of many clip norms."""
    model = nn.Linear(200, 1, bias=False)
    records = (torch.rand(1003, 200) + 0.5) * 1e3
    total = ClippedSum(model, clip_norm=1.0, clipping="hooks", batch_size=1003)
    total.add_(lambda: model(records).sum(), len(records))
    exact = records.double()
    limit = 1 - MARGIN - sum_margin(1003)
    exact = (exact * (limit / exact.norm(dim=1, keepdim=True))).sum(0)
    # The norms' own error, which is a part of a record and not of its sum.
    norms = 1003 * 2.0**-20
    assert (total.sum_d - exact).norm().item() <= sum_margin(1003) / 2 + norms


def uses_of(columns: torch.Tensor, rows: torch.Tensor):
    """One use of a linear layer's matrix."""
    # No values: those of the widest would take longer to draw than all else.
    layer = nn.Linear(columns.shape[2], rows.shape[2], device="meta")
    return [MatrixUse(layer=layer, rows=rows, columns_bti=columns)]


@pytest.mark.parametrize("width", [1, 7, 600, 5000])
@pytest.mark.parametrize("places", [1, 2, 9, 131])
@pytest.mark.parametrize("scale", [1e-30, 3e-21, 1e-15, 1.0, 1e15])
def test_ghost_norms_are_not_less_than_they_are(scale: float, places: int, width: int):
    """Also where terms cancel, squares underflow, and inner products are long."""
    for cancels in (False, True):
        columns = torch.randn(3, places, width)
        rows = torch.randn(3, places, width + 1)
        if cancels:
            columns = columns[:, :1] * (1 + 1e-4 * columns)
            rows = rows[:, :1] * (-1.0) ** torch.arange(places).view(1, -1, 1)
        columns, rows = columns * scale, rows * min(1e18, 1 / scale)
        exact = torch.zeros(3, dtype=torch.float64)
        for number, (a, b) in enumerate(zip(columns, rows, strict=True)):
            gram = (a.double() @ a.double().T) * (b.double() @ b.double().T)
            exact[number] = gram.sum().clamp(min=0.0)
        found = gram_norms_square(uses_of(columns, rows))
        # One that is not finite makes a record add nothing.
        assert not (found < exact * (1 - 1e-12)).any()
        if not cancels and scale == 1.0:  # And not much more either.
            assert (found <= exact * (1.02 if places < 100 else 1.1)).all()


def test_places_of_ghost_add_up_within_their_margin():
    """Records that are all alike, in one product of matrices."""
    model, number = nn.Linear(1, 1, bias=False), 100_000
    records = torch.full((number, 1), 1 / 3)
    total = ClippedSum(model, clip_norm=1.0, clipping="ghost", batch_size=number)
    total.add_(lambda: model(records).sum(), number)
    exact = number * records[0].double().item()
    assert abs(total.sum_d.item() - exact) <= number * 2.0**-40


@pytest.mark.parametrize("places", [1, 63, 64, 300])
def test_a_record_adds_the_same_whoever_is_beside_it(places: int):
    """To 12 digits, so that neighbouring sums differ by that record and no more."""
    columns, rows = torch.randn(40, places, 30), torch.randn(40, places, 50)
    factors = torch.rand(40)

    def total(chosen: slice) -> torch.Tensor:
        sum_oi = torch.zeros(50, 30, dtype=torch.float64)
        (use,) = uses_of(columns[chosen], rows[chosen])
        add_weighted_(sum_oi, use, factors[chosen], None)
        return sum_oi

    alone, others = total(slice(0, 1)), total(slice(1, 40))
    error = (total(slice(0, 40)) - others - alone).norm() / alone.norm()
    assert error.item() < 1e-12


def test_ghost_refuses_what_it_is_not_proven_for():
    """So many places that float64 is not enough, and coarse products of matrices."""
    narrow = uses_of(torch.ones(1, 63, 1), torch.ones(1, 63, 1))
    check_places(narrow, most_records(50_000))
    with pytest.raises(JobError, match="100000 records with 63 places"):
        check_places(narrow, 100_000)
    check_places(uses_of(torch.ones(1, 64, 1), torch.ones(1, 64, 1)), 260_000)
    check_places(uses_of(torch.ones(1, 1, 9), torch.ones(1, 1, 9)), 260_000)
    torch.set_float32_matmul_precision("medium")
    try:
        with pytest.raises(JobError, match=r"precision\('medium'\): remove that"):
            ClippedSum(nn.Linear(2, 2), clip_norm=1, clipping="ghost", batch_size=2)
        ClippedSum(nn.Linear(2, 2), clip_norm=1, clipping="hooks", batch_size=2)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_sums_that_no_margin_is_enough_for_are_refused():
    """Instead of a promise that rounding may break."""
    assert sum_margin(4096) < 0.01
    with pytest.raises(JobError, match="fewer than 250,000"):
        sum_margin(260_000)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("clipping", ["hooks", "ghost"])
def test_models_of_few_digits(dtype: torch.dtype, clipping: str):
    """Norms are taken in float32, where half precision would overflow."""
    model = models.mlp(64, CLASSES, hidden=(8,)).to(dtype)
    records = images(4).to(dtype)

    def loss(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        return 1000 * classify(model, inputs)

    total = clipped_sum(model, loss, (records,), 2.0, clipping)
    expected = one_by_one(model, loss, records, 2.0)
    assert ((total - expected).norm() / expected.norm()).item() < 0.02


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("clipping", ["hooks", "ghost"])
@pytest.mark.parametrize("scale", [0.0, 1.0, 100.0, 6e4, math.inf, math.nan])
def test_records_of_few_digits_keep_the_bound(
    dtype: torch.dtype, clipping: str, scale: float
):
    """Also where the gradients themselves overflow."""
    model = models.mlp(64, CLASSES, hidden=(8,)).to(dtype)
    record = (images(1) * scale).to(dtype)

    def loss(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        return 1000 * classify_first(model, inputs)

    total = clipped_sum(model, loss, (record,), 2.0, clipping)
    assert total.isfinite().all()
    assert total.norm().item() <= 2.0


@pytest.mark.parametrize("clipping", ["hooks", "ghost"])
def test_autocast_of_the_forward_pass(clipping: str):
    """bf16 activations, float32 record gradients: near those of float32."""
    model, records = models.digits_cnn(CLASSES, 8), images(6)

    def loss(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return classify(model, inputs)

    total = clipped_sum(model, loss, (records,), 1.0, clipping)
    expected = one_by_one(model, classify, records, 1.0)
    assert 0 < ((total - expected).norm() / expected.norm()).item() < 0.05


def test_gradients_are_the_sum_over_the_divisor():
    """In the shapes of the parameters, and none for what is frozen."""
    model = frozen_front()
    total = ClippedSum(model, clip_norm=1.0, clipping="hooks", batch_size=8)
    total.sum_d.copy_(torch.arange(len(total.sum_d)))
    total.write_gradients(4.0)
    found = torch.cat([p.grad.flatten() for p in trained(model)])
    assert torch.equal(found, torch.arange(len(found)) / 4)
    assert model[1].weight.grad is None


def test_auto_looks_at_memory():
    """Gradients of a batch of up to 128 MiB are kept."""
    assert choose(1 << 20, batch_size=32) == "hooks"
    assert choose(1 << 20, batch_size=33) == "ghost"


def test_layers_are_replaced_by_name():
    """Batch normalisation also where it has nothing to train, or is frozen."""
    model = convolutions()
    model[1].requires_grad_(requires_grad=False)
    model, replaced = fit_for_privacy(model)
    assert replaced == ["1: BatchNorm2d by GroupNorm", "4: BatchNorm2d by GroupNorm"]
    assert not model[1].weight.requires_grad
    alone, replaced = fit_for_privacy(nn.BatchNorm1d(4))
    assert isinstance(alone, nn.GroupNorm)
    assert replaced == ["the model: BatchNorm1d by GroupNorm"]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_attention_is_the_same_function(*, training: bool, causal: bool):
    """Masks and padding too, in a transformer that would take torch's fast path."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model.train(training)
    records = torch.randn(3, 7, 16)
    mask = nn.Transformer.generate_square_subsequent_mask(7) if causal else None
    padding = torch.arange(7) >= torch.tensor([[7], [5], [6]])
    padding = padding.float().masked_fill(padding, -math.inf)
    before = model(records, mask, padding)
    fitted, replaced = fit_for_privacy(model)
    kinds = "MultiheadAttention by RecordAttention"
    assert replaced == [f"layers.{i}.self_attn: {kinds}" for i in range(2)]
    torch.testing.assert_close(fitted(records, mask, padding), before)


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 5, "vdim": 6}])
def test_attention_weights_are_the_same(options: dict[str, int]):
    """Of an attention by itself, each head's; boolean masks of each head's own."""
    original = nn.MultiheadAttention(16, 4, batch_first=True, **options)
    key, value = torch.randn(3, 6, original.kdim), torch.randn(3, 6, original.vdim)
    arguments = {
        "attn_mask": torch.rand(12, 5, 6) < 0.3,
        "key_padding_mask": torch.arange(6) >= torch.tensor([[6], [5], [6]]),
        "average_attn_weights": False,
    }
    expected = original(torch.ones(3, 5, 16), key, value, **arguments)
    fitted, _ = fit_for_privacy(original)
    actual = fitted(torch.ones(3, 5, 16), key, value, **arguments)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    "options",
    [{}, {"bias": False}, {"kdim": 5, "vdim": 6}, {"kdim": 5, "bias": False}],
)
def test_trained_attention_loads_into_the_users_own(options: dict[str, int]):
    """Each value once, under the name that it has in the user's model."""
    original = nn.MultiheadAttention(16, 4, batch_first=True, **options)
    original.out_proj.requires_grad_(requires_grad=False)
    names = list(original.state_dict())
    fitted, _ = fit_for_privacy(original)
    layout = layout_of(fitted, {})
    assert [tensor.name for tensor in layout.tensors] == names
    assert layout.frozen_names == tuple(n for n in names if n.startswith("out_proj"))
    with torch.no_grad():
        for parameter in fitted.parameters():
            parameter.add_(1)
    weights_d, _ = read(fitted, layout)
    views = layout.float_views(weights_d)
    state = {spec.name: torch.from_numpy(view.copy()) for spec, view in views}
    mine = nn.MultiheadAttention(16, 4, batch_first=True, **options)
    mine.load_state_dict(state | dict(fitted.out_proj.named_parameters("out_proj")))
    key, value = torch.randn(3, 6, mine.kdim), torch.randn(3, 6, mine.vdim)
    expected = mine(torch.ones(3, 5, 16), key, value)
    torch.testing.assert_close(fitted(torch.ones(3, 5, 16), key, value), expected)


def test_padded_records_are_evaluated_without_nested_tensors():
    """Only torch's own attention reads those of an encoder."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2).eval()
    records, padding = torch.randn(3, 7, 16), torch.arange(7) >= torch.tensor([[5]] * 3)
    expected = model(records, src_key_padding_mask=padding)[:, :5]
    fitted, _ = fit_for_privacy(model)
    with torch.no_grad():
        found = fitted(records, src_key_padding_mask=padding)[:, :5]
    torch.testing.assert_close(found, expected)


def test_what_counts_tokens_of_the_batch_may_be_frozen():
    """A frozen embedding has no gradient to divide."""
    layer = nn.Embedding(4, 4, scale_grad_by_freq=True).requires_grad_(
        requires_grad=False
    )
    fit_for_privacy(nn.Sequential(layer, nn.Linear(4, 2)))


class Mixed(nn.BatchNorm1d):
    """A subclass, which nobody has a replacement for."""


class BareWithDropout(Bare):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (lambda: Mixed(4), "a Mixed, which makes a record's result depend"),
        (lambda: nn.RNN(4, 4, batch_first=True), "a RNN, which has no gradients by"),
        (lambda: nn.LSTM(4, 4), "LSTM, .* use batch_first=True"),
        (lambda: nn.MultiheadAttention(4, 2), "use batch_first=True"),
        (
            lambda: nn.MultiheadAttention(4, 2, add_bias_kv=True, batch_first=True),
            "remove add_bias_kv",
        ),
        (lambda: nn.Embedding(4, 4, max_norm=1.0), "max_norm"),
        (lambda: nn.EmbeddingBag(4, 4), "use nn.Embedding"),
        (
            lambda: nn.Embedding(4, 4, scale_grad_by_freq=True),
            "whole batch .* remove scale_grad_by_freq",
        ),
        (BareWithDropout, "draws random numbers"),
        (lambda: nn.utils.spectral_norm(nn.Linear(4, 4)), "spectral_norm"),
    ],
)
def test_layers_that_cannot_be_are_refused(
    layer: Callable[[], nn.Module], message: str
):
    """By name, with what to do."""
    with pytest.raises(JobError, match=rf"model.factory: 'inner.0' is .*{message}"):
        fit_for_privacy(nn.ModuleDict({"inner": nn.Sequential(layer())}))


class Elsewhere(nn.Module):
    """Uses a layer's weight without the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, CLASSES)

    def forward(self, x: torch.Tensor):
        return self.linear(x.flatten(1)) + self.linear.weight.sum()


class Flattening(nn.Module):
    """Makes records of the tokens of a record."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor):
        return self.linear(x.reshape(-1, 8)).reshape(len(x), 8, -1).sum(1)


class Overwriting(nn.Module):
    """Changes what its layer was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, CLASSES)

    def forward(self, x: torch.Tensor):
        flat = x.flatten(1).clone()
        logits = self.linear(flat)
        flat.zero_()
        return logits


class Named(nn.Module):
    """Calls its layer by the name of the argument."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, CLASSES)

    def forward(self, x: torch.Tensor):
        return self.linear(input=x.flatten(1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Elsewhere, r"'linear\.weight' .*outside of the layer"),
        (Flattening, r"'linear' works on shape \(24, 8\) in a batch of 3 records"),
        (Overwriting, r"'linear' .*tensor that was overwritten"),
        (Named, r"'linear' .*more than one tensor"),
    ],
)
def test_models_that_cannot_be_followed_are_refused(
    make: Callable[[], nn.Module], message: str
):
    """A wrong gradient would not be noticed, a wrong record axis void the promise."""
    model = make()
    total = ClippedSum(model, clip_norm=1.0, clipping="hooks", batch_size=8)
    with pytest.raises(JobError, match=message):
        total.add_(lambda: classify(model, images(3)), 3)
    assert not model.linear._forward_hooks


@pytest.mark.parametrize("channels", [2, 7, 8, 48])
def test_norm_of_one_record_without_places_says_something(channels: int):
    """A group of one value would be 0, and torch would refuse the record."""
    module, _ = fit_for_privacy(nn.Sequential(nn.BatchNorm1d(channels)))
    found = module.train()(torch.arange(float(channels)).reshape(1, -1))
    assert torch.isfinite(found).all()
    assert found.abs().max() > 0.5
