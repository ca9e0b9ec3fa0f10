"""Reference models: plain torch modules, each from one small function.

A job names one as ``clients.models:gpt``, with its arguments as options, or names
any function of the user's that returns a ``torch.nn.Module``. Losses are not here:
they belong to the task, in ``trainer``. Weights are drawn from torch's global
generator when a model is built, and nothing is drawn in a forward pass.

Shape suffixes: B batch, T tokens, D width, H heads, K head size, V vocabulary.
"""

import math
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its usual name.

from clients.models.adapters import with_lora, with_prompt
from clients.models.freezing import with_weights
from clients.models.pretrained import hugging_face, tokenizer

__all__ = [
    "digits_cnn",
    "gpt",
    "hugging_face",
    "logistic_regression",
    "mlp",
    "sums",
    "tokenizer",
    "with_lora",
    "with_prompt",
    "with_weights",
]


def sums(values: int) -> nn.Module:
    """Sums of a job of statistics, which begin at 0; nothing is trained.

    Args:
        values: Values that they take.
    """
    table = nn.Linear(values, 1, bias=False)
    nn.init.zeros_(table.weight)
    return table


def digits_cnn(classes: int = 10, width: int = 32) -> nn.Module:
    """Small convolutional network for one-channel images of 8 x 8 pixels.

    It has no batch normalisation, whose running statistics mix badly between
    sites, and no dropout.

    Args:
        classes: Number of classes.
        width: Channels of the first layer; the second has twice as many.
    """
    return nn.Sequential(
        nn.Conv2d(1, width, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * width * 4 * 4, classes),
    )


def mlp(inputs: int, classes: int, hidden: Sequence[int] = (64,)) -> nn.Module:
    """Fully connected network with ReLU between its layers.

    Args:
        inputs: Values of one example, all of its axes together.
        classes: Number of classes.
        hidden: Width of each hidden layer.
    """
    layers: list[nn.Module] = [nn.Flatten()]
    before = inputs
    for width in hidden:
        layers += [nn.Linear(before, width), nn.ReLU()]
        before = width
    return nn.Sequential(*layers, nn.Linear(before, classes))


def logistic_regression(inputs: int, classes: int) -> nn.Module:
    """Multinomial logistic regression, which starts at zero.

    Its loss is convex, so every start leads to the same place.

    Args:
        inputs: Values of one example, all of its axes together.
        classes: Number of classes.
    """
    linear = nn.Linear(inputs, classes)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return nn.Sequential(nn.Flatten(), linear)


def gpt(
    vocabulary: int = 256,
    context: int = 128,
    layers: int = 4,
    heads: int = 4,
    width: int = 128,
    *,
    norm: str = "rmsnorm",
) -> nn.Module:
    """Decoder-only transformer after GPT-2, without biases.

    Pre-norm blocks, learned positions, GELU, input and output embeddings
    tied. Options for some sizes (the count does not depend on heads or norm):

    ===== ========== ======= ====== ===== ===== =============
    size  vocabulary context layers heads width parameters
    ===== ========== ======= ====== ===== ===== =============
    1M           256     128      4     4   128       836,736
    10M          256     256      6     6   384    10,818,432
    125M       50257    1024     12    12   768   124,337,664
    350M       50257    1024     24    16  1024   354,551,808
    1B         50257    1024     18    16  2048 1,011,068,928
    ===== ========== ======= ====== ===== ===== =============

    Source: Radford et al. 2019, "Language Models are Unsupervised Multitask
    Learners", section 2.3; RMSNorm: arXiv:1910.07467, equation 4.

    Args:
        vocabulary: Number of tokens; 256 for bytes.
        context: Most tokens that the model sees at once.
        layers: Number of blocks.
        heads: Attention heads of a block; they divide ``width``.
        width: Values that stand for a token between blocks.
        norm: ``rmsnorm`` or ``layernorm``.

    Returns:
        A module from tokens ``(B, T)``, int64, to logits ``(B, T, V)``.

    Raises:
        ValueError: There is no layer, ``heads`` do not divide ``width``, or ``norm``
            is unknown.
    """
    if layers < 1:
        raise ValueError(f"{layers} layers are too few: use at least 1")
    if width % heads:
        raise ValueError(f"{heads} heads do not divide a width of {width}")
    if norm not in {"rmsnorm", "layernorm"}:
        raise ValueError(f"norm {norm!r} is unknown: use rmsnorm or layernorm")
    return _GPT(
        tokens=nn.Embedding(vocabulary, width),
        positions=nn.Embedding(context, width),
        blocks=nn.ModuleList(_Block(width, heads, norm) for _ in range(layers)),
        norm=_norm(norm, width),
    )


class _GPT(nn.Module):
    """Embeddings, blocks, logits."""

    def __init__(
        self,
        *,
        tokens: nn.Embedding,
        positions: nn.Embedding,
        blocks: nn.ModuleList,
        norm: nn.Module,
    ) -> None:
        super().__init__()
        self.tokens = tokens
        self.positions = positions
        self.blocks = blocks
        self.norm = norm
        self.output = _Unembedding(tokens)
        self._init_weights()

    def _init_weights(self) -> None:
        """Draw all matrices with deviation 0.02.

        Outputs into the residual stream are scaled by ``1 / sqrt(2 * layers)``, so
        that its variance does not grow with depth (GPT-2, section 2.3).
        """
        residual = 0.02 / math.sqrt(2 * len(self.blocks))
        for name, weight in self.named_parameters():
            if weight.ndim > 1:
                std = residual if name.endswith("out.weight") else 0.02
                nn.init.normal_(weight, std=std)

    def forward(self, tokens_bt: torch.Tensor) -> torch.Tensor:
        """Logits of each next token, ``(B, T, V)``."""
        length = tokens_bt.shape[1]
        if length > self.positions.num_embeddings:
            raise ValueError(
                f"{length} tokens are more than the model's context of "
                f"{self.positions.num_embeddings}"
            )
        # A position for each token of each record: differential privacy asks every
        # layer what it did for which record.
        places = torch.arange(length, device=tokens_bt.device)
        x_btd = self.tokens(tokens_bt) + self.positions(places.expand_as(tokens_bt))
        for block in self.blocks:
            x_btd = block(x_btd)
        logits_btv: torch.Tensor = self.output(self.norm(x_btd))
        return logits_btv


class _Unembedding(nn.Linear):
    """Linear layer with the embedding's matrix, which stays out of the state."""

    def __init__(self, tokens: nn.Embedding) -> None:
        # On the meta device nothing is drawn for a matrix that is replaced.
        super().__init__(
            tokens.embedding_dim, tokens.num_embeddings, bias=False, device="meta"
        )
        self.weight = tokens.weight

    def _save_to_state_dict(self, *_: object) -> None:
        """Save nothing: the embedding does."""

    def _load_from_state_dict(self, *_: object) -> None:
        """Load nothing: the embedding does."""


class _Block(nn.Module):
    """Attention, then a two-layer perceptron, each added to the stream."""

    def __init__(self, width: int, heads: int, norm: str) -> None:
        super().__init__()
        self.attention_norm = _norm(norm, width)
        self.attention = _Attention(width, heads)
        self.mlp_norm = _norm(norm, width)
        self.mlp = _MLP(width)

    def forward(self, x_btd: torch.Tensor) -> torch.Tensor:
        mixed_btd: torch.Tensor = x_btd + self.attention(self.attention_norm(x_btd))
        out_btd: torch.Tensor = mixed_btd + self.mlp(self.mlp_norm(mixed_btd))
        return out_btd


class _Attention(nn.Module):
    """Each token looks at itself and at those before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x_btd: torch.Tensor) -> torch.Tensor:
        q_bhtk, k_bhtk, v_bhtk = (
            part_btd.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part_btd in self.qkv(x_btd).chunk(3, dim=-1)
        )
        mixed_bhtk = F.scaled_dot_product_attention(
            q_bhtk, k_bhtk, v_bhtk, is_causal=True
        )
        out_btd: torch.Tensor = self.out(mixed_bhtk.transpose(1, 2).flatten(-2))
        return out_btd


class _MLP(nn.Module):
    """Two layers, four times as wide between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide = nn.Linear(width, 4 * width, bias=False)
        self.out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x_btd: torch.Tensor) -> torch.Tensor:
        out_btd: torch.Tensor = self.out(F.gelu(self.wide(x_btd)))
        return out_btd


def _norm(kind: str, width: int) -> nn.Module:
    if kind == "rmsnorm":
        return nn.RMSNorm(width, eps=1e-5)
    return nn.LayerNorm(width, eps=1e-5, bias=False)
