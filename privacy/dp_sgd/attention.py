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


class RecordAttention(nn.Module):
    """The function of an ``nn.MultiheadAttention`` with ``batch_first``.

    Attributes:
        qlinear: Makes queries.
        klinear: Makes keys.
        vlinear: Makes values.
        out_proj: Puts the heads' outputs together.
    """

    batch_first = True
    # torch's transformer layers ask for these before they take a fast path of their
    # own, which passes by the linear layers.
    in_proj_weight = None
    in_proj_bias = None
    _qkv_same_embed_dim = False

    def __init__(self, original: nn.MultiheadAttention) -> None:
        """Copy the weights of an attention without ``add_bias_kv``."""
        super().__init__()
        self.embed_dim, self.num_heads = original.embed_dim, original.num_heads
        self.dropout = original.dropout
        state = original.state_dict()
        if "in_proj_weight" in state:
            weights = state["in_proj_weight"].chunk(3)
        else:
            weights = tuple(state[f"{part}_proj_weight"] for part in "qkv")
        bias = state.get("in_proj_bias")
        biases = (None, None, None) if bias is None else bias.chunk(3)
        self.qlinear, self.klinear, self.vlinear = (
            _linear(weight, bias) for weight, bias in zip(weights, biases, strict=True)
        )
        self.out_proj = _linear(state["out_proj.weight"], state.get("out_proj.bias"))
        self.train(original.training)

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
            layer(x_btd).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for layer, x_btd in (
                (self.qlinear, query),
                (self.klinear, key),
                (self.vlinear, value),
            )
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


def _linear(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    # On the meta device nothing is drawn for weights that are replaced.
    outputs, inputs = weight.shape
    layer = nn.Linear(inputs, outputs, bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.clone())
    if bias is not None:
        layer.bias = nn.Parameter(bias.clone())
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
