"""The mean of the sites' adapters, as a mean of products ``B A`` and not of factors.

The mean of A and the mean of B make another product than the mean of the products. With
``w_i`` the sites' weights, FedEx-LoRA puts the difference into the weight beside which
the adapter is (Singhal et al. 2024, arXiv:2410.09432, equations 7 to 9)::

    W += scale * (sum_i w_i B_i A_i - B A),   A = sum_i w_i A_i,   B = sum_i w_i B_i

so that every site's next model is the mean of the sites' models. FlexLoRA makes new
factors of the best approximation of their rank, by a singular value decomposition (Bai
et al. 2024, arXiv:2402.11505, section 3.2)::

    U S V' = sum_i w_i B_i A_i,   B = U_r sqrt(S_r),   A = sqrt(S_r) V_r'

Shape suffixes: d float values of the model.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from aggregator.combine import weighted_mean
from federation.job.adapters import Factors
from federation.protocols import CombineRule, WeightedUpdate
from federation.vectors import Layout, TensorSpec, Values, Vector

_Matrix = NDArray[np.float64]
_Pair = tuple[_Matrix, _Matrix]


@dataclass(frozen=True, slots=True)
class ExactAdapters:
    """Makes a round's combine rule from the model that it began with.

    Attributes:
        layout: Layout of the model.
        factors: All adapters.
    """

    layout: Layout
    factors: Sequence[Factors]

    def __call__(self, start_d: Vector) -> CombineRule:
        """Return the rule of a round.

        Args:
            start_d: The global weights of the round, shape ``(d,)``; not changed.
        """
        specs = {spec.name: spec for spec in self.layout.tensors}
        return _ExactMean(start_d, self.factors, specs).combine


@dataclass(slots=True)
class _ExactMean:
    """One round: a weighted mean that keeps the sites' factors on the way.

    Memory: besides that of the mean, the adapters of all sites in float64.
    """

    start_d: Vector
    factors: Sequence[Factors]
    specs: Mapping[str, TensorSpec]
    found: list[tuple[float, list[_Pair]]] = field(default_factory=list)

    def combine(self, updates: Iterable[WeightedUpdate], out_d: Vector) -> Vector:
        """See ``federation.protocols.CombineRule``."""
        mean_d = weighted_mean(self._watched(updates), out_d)
        total = sum(weight for weight, _ in self.found)
        for number, each in enumerate(self.factors):
            pairs = [(w / total, *pairs[number]) for w, pairs in self.found]
            # Of rank n r: one product of these is the mean of the products.
            tall = np.hstack([share * b for share, b, _ in pairs])
            wide = np.vstack([a for _, _, a in pairs])
            if each.refactored and not tall.any():
                continue  # All products are 0: new factors would be 0 and never train.
            if each.refactored:
                b, a = _truncated(tall, wide, rank=self.specs[each.a].shape[0])
                self._set(each.b, b, mean_d)
                self._set(each.a, a, mean_d)
                continue
            mean_b, mean_a = self._pair(each, mean_d)
            residual = each.scale * (tall @ wide - mean_b @ mean_a)
            spec = self.specs[each.weight]
            wanted = residual.T if each.transposed else residual
            mean_d[_place(spec)] = wanted.reshape(-1)
        return mean_d

    def _watched(self, updates: Iterable[WeightedUpdate]) -> Iterator[WeightedUpdate]:
        """Read the factors of each update before the mean takes its memory."""
        for update in updates:
            pairs = [self._pair(each, update.delta_d) for each in self.factors]
            weight = update.weight
            refused: list[bool] = []
            yield replace(update, refuse=partial(_note, refused, update.refuse))
            del update  # One update at a time: the next is about to land.
            if not refused:
                self.found.append((weight, pairs))

    def _pair(self, each: Factors, delta_d: Values) -> _Pair:
        """Read B and A of an update."""
        b, a = (self._tensor(name, delta_d) for name in (each.b, each.a))
        return b, a

    def _tensor(self, name: str, delta_d: Values) -> _Matrix:
        spec = self.specs[name]
        place = _place(spec)
        values = self.start_d[place].astype(np.float64) + delta_d[place]
        return values.reshape(spec.shape)

    def _set(self, name: str, values: _Matrix, delta_d: Vector) -> None:
        """Write what leads from the global weights to these values."""
        place = _place(self.specs[name])
        delta_d[place] = values.reshape(-1) - self.start_d[place]


def _place(spec: TensorSpec) -> slice:
    return slice(spec.offset, spec.offset + spec.size)


def _note(refused: list[bool], refuse: Callable[[], None] | None) -> None:
    """Note that an update was refused, and pass it on.

    Raises:
        ValueError: There is no one to pass it on to, as in the mean itself.
    """
    refused.append(True)
    if refuse is None:
        raise ValueError("an update holds values that are not finite")
    refuse()


def _truncated(tall: _Matrix, wide: _Matrix, *, rank: int) -> _Pair:
    """Factor the best approximation of ``tall @ wide`` of some rank.

    Through two thin QR decompositions, so that no matrix of the weight's size is made.

    Returns:
        B of shape ``(outputs, rank)`` and A of shape ``(rank, inputs)``.
    """
    q, r = np.linalg.qr(tall)
    p, t = np.linalg.qr(wide.T)
    u, s, vt = np.linalg.svd(r @ t.T)
    root = np.sqrt(s[:rank])
    b = np.zeros((len(tall), rank))
    a = np.zeros((rank, wide.shape[1]))
    b[:, : root.size] = q @ u[:, :rank] * root
    a[: root.size] = (p @ vt[:rank].T * root).T
    return b, a
