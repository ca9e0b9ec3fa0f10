"""Norms and weighted sums of matrices' record gradients, without the gradients.

The gradient of a linear layer's matrix for one record is ``sum_t l_t r_t'``, with the
outputs' gradient ``l_t`` and the input ``r_t`` at place t (a token, say); of an
embedding's it is the same with ``l_t`` a unit vector. Its squared norm is ``sum_ts
(l_t . l_s)(r_t . r_s)``, also over several uses of one matrix, as of tied embeddings.

Source: Li et al. 2021, arXiv:2110.05679, section 4.1; Bu et al. 2022,
arXiv:2210.00038, for the weighted sum.

What the norms are proven with: an inner product of n float32 values, added in any
order and with or without fused operations, is off by at most g(n) |x| |y|, where g(n) =
n u / (1 - n u) and u = 2^-24 (Higham 2002, Accuracy and Stability of Numerical
Algorithms, equation 3.5), and by n times 2^-125 (1 + |x| + |y|) where values or
products underflow. The weighted sums are taken in float64: of all places, or, where a
record has many, of the records' gradients, each in float32. What one of these rounds
depends only on the record, and its norm has room for it.

Where persons are clipped, a person takes the place of a record, with the places of all
its records side by side and the outputs' gradients over the number of these.

Shape suffixes: B records, T places (all axes between the first and the last), o rows
and i columns of a matrix.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import torch
from torch import nn

from federation.errors import JobError
from privacy.dp_sgd.capture import Use
from privacy.dp_sgd.layers import Gradients, known_type, trainable
from privacy.dp_sgd.person_batch import PersonBatch

Call = tuple[Use, torch.Tensor]
"""A use of a layer, and the gradient by its outputs."""

_UNIT = 2.0**-24  # u
_TINY = 2.0**-125
_TINY_ROOT = 2.0**-62
_ROOM = 2.0**-20  # of a sum's margin, for one of two sums; for each record
_MANY_PLACES = 64  # From here on each record's product is worth a call.
_CHUNK_VALUES = 1 << 22  # of both factors of a weighted sum, in float64 at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixUse:
    """One use of a matrix.

    Attributes:
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


def split(
    calls: Sequence[Call], persons: PersonBatch | None = None
) -> tuple[Matrices, list[Call]]:
    """Separate the uses of matrices that this module handles from all other calls.

    Args:
        calls: All calls of a batch, by record.
        persons: Whose the records are, if the uses are wanted by person.
    """
    matrices: Matrices = {}
    others = [call for call in calls if _weight(call) is None]
    # A matrix that some other kind of layer uses too has one norm for all its uses.
    elsewhere = {p for use, _ in others for p in use.layer.parameters()}
    for call in calls:
        weight = _weight(call)
        if weight in elsewhere:
            others.append(call)
        elif weight is not None:
            matrices.setdefault(weight, []).append(_matrix_use(*call, persons))
    return matrices, others


def _weight(call: Call) -> nn.Parameter | None:
    layer = call[0].layer
    if known_type(layer) not in (nn.Linear, nn.Embedding):
        return None
    return trainable(layer).get("weight")


def _matrix_use(
    use: Use, backprops: torch.Tensor, persons: PersonBatch | None
) -> MatrixUse:
    backprops = backprops.float()
    if persons is None:
        return _use_by_record(use, backprops)
    found = _use_by_record(use, persons.divided(backprops))
    return replace(
        found,
        rows=persons.side_by_side(found.rows),
        columns_bti=persons.side_by_side(found.columns_bti),
    )


def _use_by_record(use: Use, backprops: torch.Tensor) -> MatrixUse:
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
    found = [_lengths(use) for use in uses]
    bound = torch.stack([length for length, _ in found]).sum(0).square()
    if len(uses) == 1 and uses[0].columns_bti.shape[1] == 1:
        return bound  # One term, and nothing that could cancel.
    parts = [part for use in uses for part in _halves(use)]
    products = [_inner(part, part) for part in parts]
    products += [2 * _inner(a, b) for a, b in combinations(parts, 2)]
    total = torch.stack(products).sum(0)
    sizes = torch.stack([size for _, size in found]).sum(0)
    widest = max(_width(use) for use in uses)
    underflow = _TINY * widest * (1 + sizes) ** 4
    return total.clamp(min=0.0) + _rounding(uses) * bound + underflow


def check_places(uses: Sequence[MatrixUse], most_records: float) -> None:
    """Refuse sums over so many places that the proof does not cover their rounding.

    Args:
        uses: All uses of a matrix.
        most_records: Records of a step.

    Raises:
        JobError: Too many; see ``privacy.dp_sgd.clipping``.
    """
    numbers = [use.columns_bti.shape[1] for use in uses]
    places = sum(1 if number >= _MANY_PLACES else number for number in numbers)
    largest = 1.0 if numbers == [1] else _rounding(uses) ** -0.5
    if most_records * places * largest * 2.0**-53 > _ROOM:
        raise JobError(
            f"private steps of up to {most_records:.0f} records with {places} places "
            "each are not proven to be summed accurately enough by 'ghost': use "
            "smaller steps, or choose 'hooks'",
            key="privacy.differential_privacy.clipping",
        )


def _rounding(uses: Sequence[MatrixUse]) -> float:
    """What inner products may be wrong by, as a part of the largest they could be.

    The two inner products of a term have at most ``o`` and ``i`` values, and their
    product is rounded once. All terms are added in float64. Where a record is summed
    over T places in float32, it may get longer by g(T) times the largest it could be.
    """
    rows = max(0 if use.is_embedding else use.rows.shape[2] for use in uses)
    columns = max(use.columns_bti.shape[2] for use in uses)
    places = sum(use.columns_bti.shape[1] for use in uses)
    logs = math.log1p(-rows * _UNIT) + math.log1p(-columns * _UNIT) - 2 * _UNIT
    most = max(use.columns_bti.shape[1] for use in uses)
    longer = most * _UNIT / (1 - most * _UNIT) if most >= _MANY_PLACES else 0.0
    return math.expm1(-logs) + 4 * places**2 * 2.0**-53 + longer * (2 + longer)


def _width(use: MatrixUse) -> int:
    return use.columns_bti.shape[2] + (0 if use.is_embedding else use.rows.shape[2])


def _lengths(use: MatrixUse) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums over the places of ``|l_t| |r_t|`` and of ``|l_t| + |r_t|``, float64.

    Neither is less than it is: norms are added in float32, in any order.
    """
    columns_bt = _norms(use.columns_bti)
    rows_bt = torch.ones_like(columns_bt) if use.is_embedding else _norms(use.rows)
    lengths_b = (columns_bt * rows_bt).sum(1) * (1 + _UNIT)
    return lengths_b, (columns_bt + rows_bt).sum(1)


def _norms(values: torch.Tensor) -> torch.Tensor:
    """Norms over the last axis, float64, not less than they are."""
    width = values.shape[-1]
    norms: torch.Tensor = torch.linalg.vector_norm(values, dim=-1).double()
    return norms * (1 + (width + 8) * _UNIT) + _TINY_ROOT * math.sqrt(width)


def _halves(use: MatrixUse) -> Sequence[MatrixUse]:
    """Split a use with many places in two: products between them are taken once."""
    num_places = use.columns_bti.shape[1]
    if use.is_embedding or num_places < 2 * _MANY_PLACES:
        return (use,)
    pieces = zip(use.rows.chunk(2, 1), use.columns_bti.chunk(2, 1), strict=True)
    return [replace(use, rows=rows, columns_bti=columns) for rows, columns in pieces]


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
        use: Gradients of the outputs, and the inputs, of one call.
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
    if columns_bti.shape[1] >= _MANY_PLACES:
        # By record, in float32: far quicker, and what it rounds is in the norm.
        for rows_to, columns_ti in zip(rows, columns_bti, strict=True):
            sum_oi.add_(torch.mm(rows_to.t(), columns_ti))
        return
    width = columns_bti[0].numel() + rows[0].numel()
    at_once = max(1, _CHUNK_VALUES // width)
    for start in range(0, len(rows), at_once):
        part = slice(start, start + at_once)
        sum_oi.addmm_(
            rows[part].flatten(0, 1).double().t(),
            columns_bti[part].flatten(0, 1).double(),
        )
