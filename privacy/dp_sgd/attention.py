"""Attention made of linear layers, which have per-record gradients.

Opacus's ``DPMultiheadAttention`` is not used: in version 1.6 with ``batch_first`` it
puts the heads' outputs together in another order than ``nn.MultiheadAttention``, which
makes another function of it and lets tokens see what a causal mask hides.

Shape suffixes: B records, T tokens that ask, S tokens that are looked at, D width, H
heads, K head size.
"""

import torch
from torch import nn
from torch.nn import functional


class _Bias(nn.Module):
    def __init__(self, bias: nn.Parameter) -> None:
        super().__init__()
        self.bias = bias

    def forward(self, x_btd: torch.Tensor) -> torch.Tensor:
        return x_btd + self.bias


class RecordAttention(nn.Module):
    """The function of an ``nn.MultiheadAttention`` with ``batch_first``.

    Its parameters have the names that they had there, so that a model which is trained
    with it loads into the user's own. They belong to layers inside, which compute with
    them (see ``privacy.dp_sgd.layers.Opacus.shells``).

    Attributes:
        inner: Makes queries, keys and values.
        out_proj: Puts the heads' outputs together.
    """

    batch_first = True
    # torch's transformer layers ask for this before they take a fast path of their
    # own, which passes by the layers inside.
    _qkv_same_embed_dim = False

    def __init__(self, original: nn.MultiheadAttention) -> None:
        """Take over the parameters of an attention without ``add_bias_kv``."""
        super().__init__()
        self.embed_dim, self.num_heads = original.embed_dim, original.num_heads
        self.kdim, self.vdim = original.kdim, original.vdim
        self.dropout = original.dropout
        # Before the layers inside: a state holds tied weights under their first name.
        own = dict(original.named_parameters(recurse=False))
        for name, parameter in own.items():
            self.register_parameter(name, parameter)
        bias = own.get("in_proj_bias")
        if "in_proj_weight" in own:
            self.inner = nn.ModuleDict({"qkv": _linear(own["in_proj_weight"], bias)})
        else:
            weights = {part: own[f"{part}_proj_weight"] for part in "qkv"}
            self.inner = nn.ModuleDict(
                {p: _linear(w, None) for p, w in weights.items()}
            )
            if bias is not None:
                self.inner["bias"] = _Bias(bias)
        out = dict(original.out_proj.named_parameters())
        self.out_proj = _linear(out["weight"], out.get("bias"))
        self.train(original.training)

    def _projected(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> list[torch.Tensor]:
        """Queries, keys and values, of the width D each."""
        width, found = self.embed_dim, []
        whole: dict[int, torch.Tensor] = {}  # Self-attention needs a single product.
        for place, (part, x_btd) in enumerate(
            zip("qkv", (query, key, value), strict=True)
        ):
            if "qkv" in self.inner:
                if id(x_btd) not in whole:
                    whole[id(x_btd)] = self.inner["qkv"](x_btd)
                all_bt3 = whole[id(x_btd)]
            else:
                beside = (place * width, (2 - place) * width)
                all_bt3 = functional.pad(self.inner[part](x_btd), beside)
                if "bias" in self.inner:
                    all_bt3 = self.inner["bias"](all_bt3)
            found.append(all_bt3[..., place * width : (place + 1) * width])
        return found

    def forward(  # noqa: PLR0917 - torch's signature.
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,  # noqa: FBT001, FBT002
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,  # noqa: FBT001, FBT002
        is_causal: bool = False,  # noqa: ARG002, FBT001, FBT002 - a hint about attn_mask.
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend; see ``nn.MultiheadAttention``. Records are on the first axis."""
        q_bhtk, k_bhsk, v_bhsk = (
            torch.unflatten(x_btd, -1, (self.num_heads, -1)).transpose(1, 2)
            for x_btd in self._projected(query, key, value)
        )
        shape = (*q_bhtk.shape[:3], k_bhsk.shape[2])
        bias_bhts = _bias(attn_mask, shape, q_bhtk) + _bias(
            None if key_padding_mask is None else key_padding_mask[:, None, None, :],
            shape,
            q_bhtk,
        )
        scale = q_bhtk.shape[-1] ** -0.5
        scores_bhts = torch.matmul(q_bhtk * scale, k_bhsk.transpose(2, 3)) + bias_bhts
        attention_bhts = functional.dropout(
            scores_bhts.softmax(-1), self.dropout, self.training
        )
        mixed_bhtk = torch.matmul(attention_bhts, v_bhsk)
        out_btd: torch.Tensor = self.out_proj(mixed_bhtk.transpose(1, 2).flatten(-2))
        if not need_weights:
            return out_btd, None
        if average_attn_weights:
            return out_btd, attention_bhts.mean(1)
        return out_btd, attention_bhts


def _linear(weight: nn.Parameter, bias: nn.Parameter | None) -> nn.Linear:
    # On the meta device nothing is drawn for weights that are replaced.
    outputs, inputs = weight.shape
    layer = nn.Linear(inputs, outputs, bias=bias is not None, device="meta")
    layer.weight = weight
    if bias is not None:
        layer.bias = bias
    return layer


def _bias(
    mask: torch.Tensor | None, shape: tuple[int, ...], like: torch.Tensor
) -> torch.Tensor:
    """What a mask adds to the scores: True is minus infinity."""
    if mask is None:
        return like.new_zeros(())
    if mask.ndim == len(shape) - 1:  # (B * H, T, S)
        mask = mask.reshape(shape)
    if mask.dtype == torch.bool:
        return like.new_zeros(mask.shape).masked_fill(mask, float("-inf"))
    return mask.to(like.dtype)
