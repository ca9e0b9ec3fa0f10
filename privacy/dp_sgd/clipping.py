"""Sums of clipped record gradients, in two ways.

``hooks`` computes each record's gradient, takes its norm, scales it and adds it up.
``ghost`` computes the norms without the gradients and then one weighted sum, as
autograd would (Li et al. 2021, arXiv:2110.05679, section 4.1; the sum without a
second backward pass is Bu et al. 2022, arXiv:2210.00038, "book-keeping"). It covers
linear layers and embeddings; other layers have few weights and go the way of
``hooks``. ``hooks`` needs memory for all weights times the records of a batch.

Guarantee:
    The sums of neighbouring samples differ by at most ``clip_norm``, but with a
    probability below 2^-100, if every record's gradient (for ``ghost``: the factors
    that it is the product of, and their inner products) is the same float32 values in
    both. A record whose gradient holds NaN or infinity, or whose norm is over 1.8e19,
    adds zero.

    The proof for ``hooks``: squares are added in float32 over at most 256 values, in
    any order, and in float64 beyond that; the norm is then off by a factor of at
    most 1 + 128 * 2^-24 and the scaling by 2^-23. Both fit into the margin of 2^-12 by
    which records are clipped below the bound, thirty times. What the sum rounds has a
    margin of its own: ``sum_margin``.

    The proof for ``ghost``: the square of a matrix's norm comes from inner products
    that may cancel. What they may be wrong by, for the widths at hand and in any
    order of addition, is added to it: r A^2, where A is the sum of the terms' norms
    and r at least 3 * 2^-24 (``privacy.dp_sgd.ghost``). So A is at most 2^11.3 times
    the norm that the record is clipped by. Factors are scaled in float32, each value
    by itself: off by 2^-24 A, which the margin of 2^-12 has room for. A record of 64
    places or more is summed over them in float32, which is part of what is added to
    its norm. All else is summed in float64: off by at most 2^-53 P A for each record,
    where a step adds P terms. A model and a batch for which this is more than
    ``sum_margin`` has room for are refused, and so are matrix products of less than
    float32.

    Not covered: that matrix products may round the values of a record otherwise in a
    batch of another size.

    Where persons are clipped, read "person" for "record": a person's gradient is the
    mean over the person's records (``privacy.dp_sgd.person_batch``), and all K T places
    of these, padded to K records, are one gradient's for ``ghost``.

Shape suffixes: B records or persons, d trainable values, o rows and i columns of a
matrix, p values of one parameter.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import nn

from federation.errors import JobError
from privacy.dp_sgd.capture import backprops_of, check_every_use_seen, watched
from privacy.dp_sgd.convolution import Workspace
from privacy.dp_sgd.ghost import (
    Call,
    Matrices,
    add_weighted_,
    bias_gradients,
    check_places,
    gram_norms_square,
    split,
)
from privacy.dp_sgd.layers import Gradients, record_gradients, trained_layers
from privacy.dp_sgd.person_batch import PersonBatch

MARGIN = 2.0**-12  # for the error of a record's norm, and of its scaling
CLIPPINGS = ("auto", "hooks", "ghost")

_SEGMENT = 256
_CHUNK = 16
_SMALL = 1 << 16
_MOST_MARGIN = 0.5
_MOST_GRADIENT_BYTES = 128 << 20


class ClippedSum:
    """Adds up clipped record gradients of a model, batch by batch.

    Attributes:
        parameters: What is trained, by name; frozen parameters are no part of it.
        sum_d: The sum, shape ``(d,)``, float64, on the model's device.
        clipping: ``hooks`` or ``ghost``.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        clip_norm: float,
        clipping: str,
        batch_size: int,
        expected_records: int | None = None,
    ) -> None:
        """Set the sum to zero.

        Args:
            module: From ``fit_for_privacy``; its parameters stay where they are.
            clip_norm: Largest Euclidean norm of a record's gradient, above 0.
            clipping: ``hooks``, ``ghost``, or ``auto`` for the rule of ``choose``.
            batch_size: Most records that will be added at once.
            expected_records: How many a sum is over on average, where they are drawn
                at random; as many as a batch by default.
        """
        self.parameters = {
            name: parameter
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        }
        sizes = [parameter.numel() for parameter in self.parameters.values()]
        first = next(iter(self.parameters.values()))
        self.sum_d = torch.zeros(sum(sizes), dtype=torch.float64, device=first.device)
        parts = torch.split(self.sum_d, sizes)
        self._parts = dict(zip(self.parameters.values(), parts, strict=True))
        self._layers = trained_layers(module)
        margin = MARGIN + sum_margin(expected_records or batch_size)
        self._limit = clip_norm * (1 - margin)
        self._most_records = most_records(expected_records or batch_size)
        self.clipping = clipping
        if clipping == "auto":
            self.clipping = choose(self.sum_d.numel(), batch_size=batch_size)
        if self.clipping == "ghost":
            _check_precision()
        self._workspace = Workspace()
        self._is_checked = False

    def add_(
        self,
        loss: Callable[[], torch.Tensor],
        num_records: int,
        persons: PersonBatch | None = None,
    ) -> None:
        """Add the clipped gradients of some records, or of the persons they are of.

        Args:
            loss: Runs the model on these records and returns the sum of their
                losses, which are independent of each other.
            num_records: At least 1.
            persons: Whose the records are, if persons are clipped.

        Raises:
            JobError: The model is built so that per-record gradients are unavailable;
                the message names the layer.
        """
        with watched(self._layers, num_records) as uses:
            total = loss()
        if not self._is_checked:
            check_every_use_seen(total, uses, self.parameters)
            self._is_checked = True
        found = backprops_of(total, uses)
        calls = [
            (use, backprops)
            for use, backprops in zip(uses, found, strict=True)
            if backprops is not None
        ]
        if not calls:  # The loss depends on no parameter.
            return
        with torch.no_grad():
            self._add_calls_(calls, persons)

    def part_of(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """The sum's values that belong to one parameter, flat; not a copy."""
        return self._parts[parameter]

    def write_gradients(self, divisor: float) -> None:
        """Make ``sum_d / divisor`` the parameters' gradients; the sum is used up."""
        self.sum_d.div_(divisor)
        for parameter, part_p in self._parts.items():
            parameter.grad = part_p.view(parameter.shape).to(parameter.dtype)

    def _add_calls_(self, calls: Sequence[Call], persons: PersonBatch | None) -> None:
        matrices: Matrices = {}
        if self.clipping == "ghost":
            matrices, calls = split(calls, persons)
            for uses in matrices.values():
                check_places(uses, self._most_records)
        self._workspace.begin()
        gradients = _sum_by_parameter(calls, self._workspace, persons)
        for uses in matrices.values():
            _accumulate(gradients, bias_gradients(uses))
        rows = {p: _BatchRows.of(gradients.pop(p)) for p in list(gradients)}
        norms_square = [_norms_square(part.rows_bp) for part in rows.values()]
        norms_square += [gram_norms_square(uses) for uses in matrices.values()]
        factors, bad = _factors(torch.stack(norms_square).sum(0), self._limit)
        for parameter, part in rows.items():
            if bad is not None:
                part.rows_bp[bad] = 0.0
            sum_p = _weighted_sum(part.rows_bp, factors)
            self._parts[parameter].view(parameter.shape).add_(part.in_place(sum_p))
        for parameter, uses in matrices.items():
            matrix_oi = self._parts[parameter].view(parameter.shape)
            for use in uses:
                add_weighted_(matrix_oi, use, factors, bad)


def most_records(expected_records: int) -> float:
    """Records of a Poisson sample, but with a probability below 2^-100.

    S = E + 12 sqrt(E) + 60, where E are expected, by Bernstein's inequality.
    """
    return expected_records + 12 * math.sqrt(expected_records) + 60


def sum_margin(expected_records: int) -> float:
    """What the clip norm is lowered by, as a part of it, for the rounding of a sum.

    A Poisson sample has at most S records: see ``most_records``. Up to 16 at a time
    are added in float32, in any order: off by at most 2^-20 times the sum of
    their norms, to first order (Higham 2002, Accuracy and Stability of Numerical
    Algorithms, section 3.1). These sums are added in float64. Two sums are off by at
    most 2^-19 S clip norms together; a further 2^-6 of that is for higher orders, and
    for float64.

    Args:
        expected_records: E, at least 1.

    Raises:
        JobError: So many that half of the clip norm would be left, or less.
    """
    margin = most_records(expected_records) * 2.0**-19 * (1 + 2.0**-6)
    if margin >= _MOST_MARGIN:
        raise JobError(
            f"private steps of {expected_records} records cannot be summed accurately "
            "enough: use fewer than 250,000",
            key="training.batch_size",
        )
    return margin


def choose(num_values: int, *, batch_size: int) -> str:
    """Rule of ``auto``: ``hooks`` while a batch's gradients are at most 128 MiB.

    Below that ``hooks`` was the faster of the two or as fast, on models of
    convolutions and of attention; beyond, it waits for memory: see
    ``benchmarks/dp_sgd.py``.

    Args:
        num_values: Trainable values.
        batch_size: Most records that are added at once.
    """
    num_bytes = 4 * num_values * batch_size
    return "hooks" if num_bytes <= _MOST_GRADIENT_BYTES else "ghost"


def _check_precision() -> None:
    """Refuse matrix products whose rounding the proof does not cover.

    Raises:
        JobError: This process has lowered torch's precision.
    """
    precision = torch.get_float32_matmul_precision()
    if precision != "highest":
        raise JobError(
            "norms of 'ghost' need matrix products of float32, but this process has "
            f"set torch.set_float32_matmul_precision({precision!r}): remove that, or "
            "choose 'hooks'",
            key="privacy.differential_privacy.clipping",
        )


def _sum_by_parameter(
    calls: Sequence[Call], workspace: Workspace, persons: PersonBatch | None
) -> Gradients:
    """Gradients of each parameter by record or person, added up over its uses."""
    total: Gradients = {}
    for use, backprops in calls:
        found = record_gradients(use.layer, use.inputs, backprops, workspace)
        _accumulate(total, found)
    if persons is None:
        return total
    return {p: persons.mean(gradient) for p, gradient in total.items()}


def _accumulate(total: Gradients, more: Gradients) -> None:
    for parameter, gradient in more.items():
        held = total.get(parameter)
        total[parameter] = gradient if held is None else held + gradient


@dataclass(frozen=True, slots=True)
class _BatchRows:
    """Gradients of one parameter in their memory layout.

    Norms do not ask for the order of values, and a sum is put in order at its end:
    copies of all records' gradients cost as much as their norms.

    Attributes:
        rows_bp: One row a record.
        shape: Shape of a row before it was made flat.
        axes: Where each axis of the parameter is in that shape.
    """

    rows_bp: torch.Tensor
    shape: torch.Size
    axes: tuple[int, ...]

    @classmethod
    def of(cls, gradient: torch.Tensor) -> Self:
        """Take ``(B, *parameter)``; a copy only if its values have gaps."""
        strides = gradient.stride()
        order = sorted(range(1, gradient.ndim), key=lambda axis: -strides[axis])
        lying = gradient.permute(0, *order)
        axes = tuple(order.index(axis) for axis in range(1, gradient.ndim))
        return cls(lying.reshape(len(lying), -1), lying.shape[1:], axes)

    def in_place(self, sum_p: torch.Tensor) -> torch.Tensor:
        """A sum over the rows, in the parameter's shape."""
        return sum_p.view(self.shape).permute(self.axes)


def _weighted_sum(rows_bp: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Sum of the records' rows times their factors, float64, as ``sum_margin`` says."""
    if rows_bp.numel() <= _SMALL:
        return torch.mv(rows_bp.double().t(), factors.double())
    sum_p = torch.zeros(rows_bp.shape[1], dtype=torch.float64, device=rows_bp.device)
    for start in range(0, len(rows_bp), _CHUNK):
        chunk = slice(start, start + _CHUNK)
        sum_p.add_(torch.mv(rows_bp[chunk].t(), factors[chunk]))
    return sum_p


def _norms_square(rows_bp: torch.Tensor) -> torch.Tensor:
    """Squared norm of each record's part, shape ``(B,)``, float64."""
    whole = rows_bp.shape[1] // _SEGMENT * _SEGMENT
    segments = rows_bp[:, :whole].view(len(rows_bp), -1, _SEGMENT) if whole else None
    norms: torch.Tensor = torch.linalg.vector_norm(rows_bp[:, whole:], dim=1)
    total = norms.double().square_()
    if segments is None:
        return total
    norms = torch.linalg.vector_norm(segments, dim=2)
    return total + norms.double().square_().sum(1)


def _factors(
    norms_square: torch.Tensor, limit: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scale of each record, float32, and which records have no finite norm."""
    norms = norms_square.sqrt()
    factors = (limit / norms.clamp_(min=limit)).float()
    bad = ~torch.isfinite(norms)
    if not bad.any():
        return factors, None
    factors[bad] = 0.0
    return factors, bad
