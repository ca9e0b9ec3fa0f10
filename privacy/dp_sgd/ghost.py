"""Norms and weighted sums of matrices' record gradients, without the gradients.

The gradient of a linear layer's matrix for one record is ``sum_t l_t r_t'``, with the
outputs' gradient ``l_t`` and the input ``r_t`` at place t (a token, say); of an
embedding's it is the same with ``l_t`` a unit vector. Its squared norm is ``sum_ts
(l_t . l_s)(r_t . r_s)``, also over several uses of one matrix, as of tied embeddings.

Source: Li et al. 2021, arXiv:2110.05679, section 4.1; Bu et al. 2022,
arXiv:2210.00038, for the weighted sum.

Shape suffixes: B records, T places (all axes between the first and the last), o rows
and i columns of a matrix.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import nn

from privacy.dp_sgd.capture import Use
from privacy.dp_sgd.layers import Gradients, known_type, trainable

Call = tuple[Use, torch.Tensor]
"""A use of a layer, and the gradient by its outputs."""

# Of the square of the sum of the terms' norms: what inner products may be wrong by.
_ROUNDING = 2.0**-18


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixUse:
    """One use of a matrix.

    Attributes:
        layer: The layer.
        rows: The outputs' gradients, shape ``(B, T, o)``, float32; for an embedding
            the tokens, shape ``(B, T)``, int64.
        columns_bti: Inputs of a linear layer, or the gradients of an embedding's
            outputs; float32.
    """

    layer: nn.Module
    rows: torch.Tensor
    columns_bti: torch.Tensor

    @property
    def is_embedding(self) -> bool:
        """Whether ``rows`` are tokens."""
        return not self.rows.is_floating_point()


Matrices = dict[nn.Parameter, list[MatrixUse]]


def split(calls: Sequence[Call]) -> tuple[Matrices, list[Call]]:
    """Take apart the uses of matrices that can be treated here, and all other calls."""
    matrices: Matrices = {}
    others = [call for call in calls if _weight(call) is None]
    # A matrix that some other kind of layer uses too has one norm for all its uses.
    elsewhere = {p for use, _ in others for p in use.layer.parameters()}
    for call in calls:
        weight = _weight(call)
        if weight in elsewhere:
            others.append(call)
        elif weight is not None:
            matrices.setdefault(weight, []).append(_matrix_use(*call))
    return matrices, others


def _weight(call: Call) -> nn.Parameter | None:
    layer = call[0].layer
    if known_type(layer) not in (nn.Linear, nn.Embedding):
        return None
    return trainable(layer).get("weight")


def _matrix_use(use: Use, backprops: torch.Tensor) -> MatrixUse:
    backprops = backprops.float()
    if not isinstance(use.layer, nn.Embedding):
        return MatrixUse(
            layer=use.layer,
            rows=_places(backprops),
            columns_bti=_places(use.inputs.float()),
        )
    tokens_bt = use.inputs.reshape(len(use.inputs), -1)
    columns_bti = backprops.reshape(*tokens_bt.shape, -1)
    if use.layer.padding_idx is not None:
        is_padding = tokens_bt == use.layer.padding_idx
        columns_bti = columns_bti.masked_fill(is_padding.unsqueeze(2), 0.0)
    return MatrixUse(layer=use.layer, rows=tokens_bt, columns_bti=columns_bti)


def _places(values: torch.Tensor) -> torch.Tensor:
    """Shape ``(B, T, n)`` of ``(B, ..., n)``."""
    return values.reshape(len(values), -1, values.shape[-1])


def bias_gradients(uses: Sequence[MatrixUse]) -> Gradients:
    """Gradients of the linear layers' biases by record, shape ``(B, o)`` each."""
    found: Gradients = {}
    for use in uses:
        bias = trainable(use.layer).get("bias")
        if bias is not None:
            gradient = use.rows.sum(1)
            found[bias] = found[bias] + gradient if bias in found else gradient
    return found


def gram_norms_square(uses: Sequence[MatrixUse]) -> torch.Tensor:
    """Squared norm of each record's gradient of one matrix, not less than it is.

    Args:
        uses: All uses of the matrix.

    Returns:
        Shape ``(B,)``, float64.
    """
    bound = torch.stack([_lengths(use) for use in uses]).sum(0).square()
    if len(uses) == 1 and uses[0].columns_bti.shape[1] == 1:
        return bound  # One term, and nothing that could cancel.
    products = [_inner(use, use) for use in uses]
    products += [2 * _inner(a, b) for a, b in combinations(uses, 2)]
    total = torch.stack(products).sum(0)
    return total.clamp(min=0.0) + _ROUNDING * bound


def _lengths(use: MatrixUse) -> torch.Tensor:
    """Sum over the places of ``|l_t| |r_t|``, float64."""
    lengths_bt: torch.Tensor = torch.linalg.vector_norm(use.columns_bti, dim=2).double()
    if not use.is_embedding:
        lengths_bt = lengths_bt * torch.linalg.vector_norm(use.rows, dim=2)
    return lengths_bt.sum(1)


def _inner(a: MatrixUse, b: MatrixUse) -> torch.Tensor:
    """Inner product of two uses' gradients for each record, float64."""
    products = torch.bmm(a.columns_bti, b.columns_bti.transpose(1, 2))
    products = products * _row_products(a, b)
    return products.sum(2, dtype=torch.float64).sum(1)


def _row_products(a: MatrixUse, b: MatrixUse) -> torch.Tensor:
    """Inner products of the rows at every two places, shape ``(B, T, T)``."""
    if a.is_embedding and b.is_embedding:
        return (a.rows.unsqueeze(2) == b.rows.unsqueeze(1)).float()
    if a.is_embedding:
        tokens = a.rows.unsqueeze(1).expand(-1, b.rows.shape[1], -1)
        return b.rows.gather(2, tokens).transpose(1, 2)
    if b.is_embedding:
        return _row_products(b, a).transpose(1, 2)
    return torch.bmm(a.rows, b.rows.transpose(1, 2))


def add_weighted_(
    sum_oi: torch.Tensor,
    use: MatrixUse,
    factors: torch.Tensor,
    bad: torch.Tensor | None,
) -> None:
    """Add the records' gradients of one use, each scaled.

    Args:
        sum_oi: Shape of the matrix, float64; added to in place.
        use: The use.
        factors: Scale of each record, shape ``(B,)``.
        bad: Which records add nothing whatever their values; None for none.
    """
    rows, columns_bti = use.rows, use.columns_bti
    if bad is not None:  # Zero times infinity would not be zero.
        columns_bti = columns_bti.masked_fill(bad.view(-1, 1, 1), 0.0)
        if not use.is_embedding:
            rows = rows.masked_fill(bad.view(-1, 1, 1), 0.0)
    scale = factors.view(-1, 1, 1)
    if use.is_embedding:
        weighted = (columns_bti * scale).flatten(0, 1)
        sum_oi.index_add_(0, rows.flatten(), weighted.double())
        return
    if rows.shape[2] < columns_bti.shape[2]:
        rows = rows * scale
    else:
        columns_bti = columns_bti * scale
    sum_oi.add_(torch.mm(rows.flatten(0, 1).t(), columns_bti.flatten(0, 1)))
