"""Canaries: records made for detection, in a job's own training.

Each canary has two coordinates of its own, more trained values of the model: one in an
embedding, one in a linear layer, so that a layer that is not clipped is seen. Its
gradient points along both, always the same way and far beyond the clip norm, so that
what clipping leaves of it is the largest trace that one record may leave (a Dirac
canary: Steinke, Nasr and Jagielski 2023, arXiv:2305.08846, section 6). All else is the
job's own: sampling, clipping, noise, optimiser, rounds. Only training data and the
model are wrapped, as a data source and a factory of a user's could do it.

A canary that is out stays in its place as a record without a gradient, so that the
number of records, and with it the sampling rate, does not tell who is in.

Where the unit of privacy is a person, a canary is a person with several records: all of
them carry its code, or none does. Their mean gradient is that of one of them, so what
clipping leaves is the largest trace of one person. Clipped record by record, the trace
would be several times as large.

How a record carries its code: in the first token of a window as a negative number, or
behind the flattened values of an example.

Shape suffixes: B records, T tokens, V vocabulary, m canaries, d values of the model.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from clients.data.datasets import Batch, Dataset, Indices
from clients.factories import import_factory
from clients.models.model_pool import build
from federation.errors import SiteError
from federation.vectors import Layout, Vector

_BOTH = math.sqrt(2)  # Norm of a one along both coordinates.
MAX_CANARIES = 1_000_000  # Codes are exact in float32 up to 2^24.
FACTORY = "clients.audit.canaries:with_canaries"

_ORDINARY, _EMPTY, _FIRST = 0, 1, 2  # Codes; from _FIRST on they are canaries.
_TABLE, _MATRIX = "canaries.weight", "linear.weight"  # Each holds a value of each.


def with_canaries(
    factory: str,
    options: Mapping[str, Any],
    *,
    num_canaries: int,
    gradient_norm: float,
    shape: Sequence[int],
    task: str,
) -> nn.Module:
    """Make a job's model with two coordinates for each canary.

    Args:
        factory: The job's own.
        options: Its keyword arguments.
        num_canaries: m.
        gradient_norm: Norm of a canary's gradient before clipping.
        shape: Shape of one record's inputs.
        task: ``classification`` or ``causal_lm``.

    Raises:
        JobError: There is no such factory, or it makes no model.
    """
    made = import_factory(factory, key="model.factory")
    return _CanariedModel(
        build(made, options),
        num_canaries=num_canaries,
        gradient_norm=gradient_norm,
        shape=None if task == "causal_lm" else tuple(shape),
    )


class _CanariedModel(nn.Module):
    """A model, with two extra values for each canary.

    For an ordinary record it is the model. For a canary all logits are 0, whatever
    its values have become, and so its gradient is the same in every step.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        num_canaries: int,
        gradient_norm: float,
        shape: tuple[int, ...] | None,
    ) -> None:
        super().__init__()
        self.model = model
        # The first row is of all records that are no canary; it has no gradient.
        self.canaries = nn.Embedding(1 + num_canaries, 1, padding_idx=0)
        nn.init.zeros_(self.canaries.weight)
        # One weight for each canary, of one input and one output: two short vectors
        # of a record select it. It is the last layer, which Muon takes for the head.
        self._width = math.isqrt(max(num_canaries - 1, 0)) + 1
        height = -(-num_canaries // self._width)
        self.linear = nn.Linear(self._width, height, bias=False)
        nn.init.zeros_(self.linear.weight)
        self._gradient_norm = gradient_norm
        self._shape = shape

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Logits of records that carry a code."""
        if self._shape is None:
            codes_b = (-inputs[:, 0]).clamp(min=0)
            inputs = inputs.clamp(min=0)
        else:
            codes_b = inputs[:, -1].long()
            inputs = inputs[:, :-1].reshape(-1, *self._shape)
        logits: torch.Tensor = self.model(inputs)
        number_b = (codes_b - _EMPTY).clamp(min=0)  # From 1; 0 is no canary.
        value_b = self.canaries(number_b[:, None])[:, 0, 0]
        place_b = (number_b - 1).clamp(min=0)
        column = nn.functional.one_hot(place_b % self._width, self._width)
        column = (column * (number_b > 0)[:, None]).to(self.linear.weight.dtype)
        row_b = (place_b // self._width)[:, None]
        value_b = value_b + self.linear(column).gather(1, row_b)[:, 0]
        # The gradient of a cross-entropy by the right one of K equal logits.
        classes = logits.shape[-1]
        steepness = self._gradient_norm / _BOTH * classes / max(classes - 1, 1)
        signal_b = steepness * (value_b - value_b.detach())
        along = (-1,) + (1,) * (logits.ndim - 1)
        flat = torch.zeros_like(logits)
        flat[..., 0] = signal_b.to(logits.dtype).view(along[:-1])
        return torch.where((codes_b == _ORDINARY).view(along), logits, flat)


class CanariedData:
    """A site's records with codes, and its canaries behind them: a ``Dataset``."""

    def __init__(
        self,
        data: Dataset,
        is_in_m: NDArray[np.bool_],
        *,
        task: str,
        first: int = 0,
        records_each: int = 1,
        num_empty: int = 0,
        of_persons: bool = False,
    ) -> None:
        """Put canaries behind the records.

        Args:
            data: The site's own.
            is_in_m: Which canaries are in, shape ``(m,)``; empty for none, as at
                sites that are not audited, and for held-out data.
            task: ``classification`` or ``causal_lm``.
            first: Number of the first canary's coordinate among the model's.
            records_each: Records of a canary: several where it is a person.
            num_empty: Records without a gradient behind the canaries, each of a
                person of its own.
            of_persons: Whether steps draw persons, and not records.

        Raises:
            SiteError: The data has tokens below 0, or no targets to classify.
        """
        self._data = data
        self._is_language = task == "causal_lm"
        places = np.arange(len(is_in_m)) + _FIRST + first
        extra = np.repeat(np.where(is_in_m, places, _EMPTY), records_each)
        empty = np.full(num_empty, _EMPTY)
        self._codes = np.concatenate((np.zeros(len(data), np.int64), extra, empty))
        behind = np.repeat(np.arange(len(is_in_m)), records_each)
        self._behind = np.append(behind, len(is_in_m) + np.arange(num_empty))
        units = self.persons if of_persons else None
        self._units = np.arange(len(self._codes)) if units is None else units
        self.draws_u = np.zeros(1 + self._units.max(), np.int64)
        one, targets = data.batch(np.array([0]))
        if self._is_language and (one.ndim != 2 or one.is_floating_point()):  # noqa: PLR2004 - windows of tokens.
            raise SiteError("canaries for causal_lm need windows of integer tokens")
        if not self._is_language and targets is None:
            raise SiteError("classification needs targets, and the data has none")

    def __len__(self) -> int:
        """Number of records and of canaries, including those that are out."""
        return len(self._codes)

    def batch(self, indices: Indices) -> Batch:
        """Inputs with codes, and targets; a canary looks like the first record.

        ``draws_u`` counts, for each record or person, the batches that read it.
        """
        self.draws_u[np.unique(self._units[indices])] += 1
        codes_b = torch.from_numpy(self._codes[indices])
        inputs, targets = self._data.batch(
            np.where(indices < len(self._data), indices, 0)
        )
        is_extra = codes_b != _ORDINARY
        if self._is_language:
            if (inputs[~is_extra] < 0).any():
                raise SiteError("tokens are below 0")
            inputs[is_extra] = 0
            inputs[is_extra, 0] = -codes_b[is_extra]
            return inputs, targets
        if targets is not None:
            targets[is_extra] = 0
        carried = codes_b.to(inputs.dtype)[:, None]
        return torch.cat((inputs.flatten(1), carried), dim=1), targets

    def apart(self) -> "CanariedData":
        """A view in which no record depends on others, as those of the data."""
        view = copy.copy(self)
        view._data = self._data.apart()  # noqa: SLF001 -- its own class
        return view

    def labels(self) -> Indices | None:
        """None: the data was split before canaries were added."""
        return None

    @property
    def groups(self) -> Indices | None:
        """None, as with labels."""
        return None

    @property
    def group_names(self) -> tuple[str, ...]:
        """None, as with labels."""
        return ()

    @property
    def persons(self) -> Indices | None:
        """Number of the person of each record, of canaries too; None without names."""
        ids = self._data.persons
        if ids is None:
            return None
        names, numbers = np.unique(ids, return_inverse=True)
        return np.append(numbers, len(names) + self._behind).astype(np.int64)

    def subset(self, indices: Indices) -> Dataset:
        """Refuse: canaries belong to all of a site's records."""
        raise NotImplementedError(
            f"data with canaries must be used whole, not {len(indices)} of it"
        )


def record_shape(data: Dataset) -> tuple[int, ...]:
    """Shape of one record's inputs.

    Raises:
        SiteError: A record has several.
    """
    inputs, _ = data.batch(np.array([0]))
    if not isinstance(inputs, torch.Tensor):
        raise SiteError(
            "canaries need inputs that are one tensor, but these are nested"
        )
    return tuple(inputs.shape[1:])


def draw_canaries(num_canaries: int, random_bytes: bytes) -> NDArray[np.bool_]:
    """Draw which canaries are in, each with probability 1/2.

    Args:
        num_canaries: m.
        random_bytes: At least m bits from the operating system: anyone who can repeat
            the draw needs no attack.
    """
    bits = np.unpackbits(np.frombuffer(random_bytes, np.uint8), count=num_canaries)
    return bits.astype(np.bool_)


class CanaryScores:
    """Adds up updates along the coordinates of a site's canaries.

    The sum over the rounds is what an attacker who sees every update of one site, or
    every opened sum, tells canaries by: the more it grew, the more often the canary
    was trained on.

    Attributes:
        scores_m: The sum over the rounds, shape ``(m,)``.
        products_m: Sum of the products of each two rounds, shape ``(m,)``: what noise
            that is independent in every round leaves around 0, without a gradient.
    """

    def __init__(self, layout: Layout, num_canaries: int, *, first: int = 0) -> None:
        """Find the coordinates, from number ``first`` on, in a canaried layout."""
        offsets = {t.name: t.offset for t in layout.tensors}
        starts = offsets[_TABLE] + 1 + first, offsets[_MATRIX] + first
        self._places = [slice(start, start + num_canaries) for start in starts]
        self.scores_m = np.zeros(num_canaries, np.float64)
        self.products_m = np.zeros(num_canaries, np.float64)

    def see(self, weights_d: Vector, local_d: Vector, *, weight: float = 1.0) -> None:
        """Add an update: weights before and after local training."""
        self._add(weight * (self._along(local_d) - self._along(weights_d)))

    def see_sum(self, mean_d: Vector) -> None:
        """Add the mean of the sites' updates that a round opened."""
        self._add(self._along(mean_d))

    def _along(self, values_d: Vector) -> NDArray[np.float64]:
        one_m, other_m = (values_d[place].astype(np.float64) for place in self._places)
        return (one_m + other_m) / _BOTH

    def _add(self, update_m: NDArray[np.float64]) -> None:
        self.products_m += self.scores_m * update_m
        self.scores_m += update_m
