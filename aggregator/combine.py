"""Combine updates: a streaming weighted mean, robust rules, and rules of the user's.

The mean holds one update at a time. The robust rules compare sites with each
other: they hold all of them, and count every site once, whatever its weight.
Every rule looks at each update's values as it lands, and refuses one that is not
finite. All else that may be wrong with it is checked before it gets here.

Shape suffixes: d float values of the model, n sites, c values of a chunk.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from federation.errors import JobError, UserCodeError
from federation.job.code_files import unpinned
from federation.job.metrics import is_function
from federation.job.spec import AggregationSpec
from federation.mapped import give_back
from federation.protocols import CombineRule, WeightedUpdate
from federation.vectors import Values, Vector, chunks, is_finite

# 16 MiB: work enough for all of torch's threads, and little to hold of a mapped file.
_MEAN_CHUNK_VALUES = 1 << 22
# 4 MiB: still in the last cache when it is folded right after it was checked.
_CHECKED_CHUNK_VALUES = 1 << 20
# Sixteen sites' chunks of this length, 1 MiB, lie in a core's second-level cache.
_ROBUST_CHUNK_VALUES = 1 << 14

_Matrix = NDArray[np.float64]


UsersRule = Callable[[Sequence[Vector], NDArray[np.float64]], Vector]


def combine_rule(
    spec: AggregationSpec, load: Callable[[str], UsersRule] | None = None
) -> CombineRule:
    """Return the rule that a job names.

    Args:
        spec: Names it.
        load: Imports a rule of the user's; None where a job cannot have one.
    """
    if load is not None and is_function(spec.combine):
        return users_rule(load(spec.combine), name=unpinned(spec.combine))
    rules: dict[str, Callable[[], CombineRule]] = {
        "mean": lambda: weighted_mean,
        "contributor_mean": lambda: contributor_mean,
        "trimmed_mean": partial(trimmed_mean, byzantine_sites=spec.byzantine_sites),
        "median": lambda: median,
        "krum": partial(krum, byzantine_sites=spec.byzantine_sites),
        "multi_krum": partial(multi_krum, byzantine_sites=spec.byzantine_sites),
    }
    return rules[spec.combine]()


def weighted_mean(updates: Iterable[WeightedUpdate], out_d: Vector) -> Vector:
    """Average updates by weight, each folded in as it lands.

    FedAvg's mean (McMahan et al., arXiv:1602.05629, Algorithm 1) as a running one:
    with ``W`` the weight so far, ``out += (delta - out) * weight / W``. So ``out_d``
    is the mean of what has come at any time, nothing overflows however large the
    weights are, and no pass is needed at the end.

    An update that is not finite is refused and leaves the mean as it was, bit for bit.
    So one that was handed over is folded into its own memory, chunk by chunk as it is
    checked; that memory then holds the mean, and the memory of the mean before is free.
    One that may only be read is checked before it is folded into ``out_d``.

    Memory: the mean and the update being folded, however many sites there are; if the
    first update is handed over, ``out_d`` is not touched.
    Breakdown point: 0, one bad site moves the mean anywhere.

    Args:
        updates: At least one of positive weight; each is dropped when folded. Those
            that are not handed over are only read.
        out_d: Shape ``(d,)``, float32, contiguous; written to if the first update is
            not handed over.

    Returns:
        ``out_d``, or an update's memory. Weights and their sum are float64, values
        float32. The threads are torch's (``torch.set_num_threads``); no bit depends on
        their number, nor on whose memory is used.

    Raises:
        ValueError: No update, no weight, a weight below 0 or not finite, or an
            update of another length.
    """
    total_weight, mean_d = 0.0, out_d
    for update in updates:
        _check(update, out_d)
        new_weight = total_weight + update.weight
        share = update.weight / new_weight if update.weight else 0.0
        folded_d = _folded(update, mean_d, share, stays=mean_d is out_d and share < 1)
        if folded_d is None:
            _refuse(update)
        else:
            mean_d, total_weight = folded_d, new_weight
        # The loop's variables would keep memory alive while the next is awaited.
        del update, folded_d
    _check_weight(total_weight)
    return mean_d


def _check_weight(total_weight: float) -> None:
    if not 0 < total_weight < math.inf:
        raise ValueError(
            f"the updates' weights sum to {total_weight}: there is nothing to average"
        )


def contributor_mean(updates: Iterable[WeightedUpdate], out_d: Vector) -> Vector:
    """Average each coordinate over the updates that have it, by weight.

    For updates in which each site sends other coordinates, and 0 for the rest: ``sum_i
    w_i delta_i / sum_i w_i`` over the sites whose value is not 0, as in the reference
    code of SparseLoCo (arXiv:2508.15706; its text divides by all sites). Where no site
    has a value, the result is 0. It is a running mean, as in ``weighted_mean``.

    Memory: the mean, the weights by coordinate, and a chunk of an update.
    Breakdown point: 0, one bad site moves the mean anywhere; where it is the only one
    that has a coordinate, it decides it.

    Args:
        updates: At least one of positive weight; dropped at once, only read.
        out_d: Shape ``(d,)``, float32, contiguous; overwritten.

    Returns:
        ``out_d``.

    Raises:
        ValueError: As in ``weighted_mean``.
    """
    out_d.fill(0.0)
    weights_d, total_weight = np.zeros_like(out_d), 0.0
    for update in updates:
        _check(update, out_d)
        if not is_finite(update.delta_d):
            _refuse(update)
        elif update.weight:
            total_weight += update.weight
            _fold_where_sent(update, out_d, weights_d)
        del update  # One update at a time: the next is about to land.
    _check_weight(total_weight)
    return out_d


def _fold_where_sent(update: WeightedUpdate, mean_d: Vector, weights_d: Vector) -> None:
    """Move a mean towards the values of an update that are not 0."""
    weight = np.float32(update.weight)
    for piece in chunks(mean_d.size, _CHECKED_CHUNK_VALUES):
        delta_c, mean_c, weights_c = (
            update.delta_d[piece],
            mean_d[piece],
            weights_d[piece],
        )
        sent = delta_c != 0
        weights_c[sent] += weight
        mean_c[sent] += (delta_c[sent] - mean_c[sent]) * (weight / weights_c[sent])


def _folded(
    update: WeightedUpdate, mean_d: Vector, share: float, *, stays: bool
) -> Vector | None:
    """Move a mean towards an update: ``mean += (delta - mean) * share``.

    Returns:
        The new mean, in the memory of either; in that of the old one if it ``stays``.
        None if the update is not finite: then the old mean is as it was.
    """
    delta_d = update.delta_d
    if update.handed_over and isinstance(delta_d, np.ndarray) and share and not stays:
        return delta_d if _fold_into_update(delta_d, mean_d, share) else None
    if not is_finite(delta_d):
        return None
    if share:
        _fold_into_mean(delta_d, mean_d, share)
    return mean_d


class _WritableView:
    """Memory of an array as if it could be written to; it is only read.

    What comes off the wire is read-only. ``from_numpy`` warns of that, and DLPack takes
    it from NumPy 2.1 on.
    """

    def __init__(self, part_c: Vector) -> None:
        """Point to the memory of an array, which is kept."""
        known = part_c.__array_interface__
        self.__array_interface__ = {**known, "data": (known["data"][0], False)}
        self._part_c = part_c


def _fold_into_mean(delta_d: Values, mean_d: Vector, share: float) -> None:
    # Torch takes one pass over memory on all its threads, NumPy two on one:
    # benchmarks/combine.py.
    for piece in chunks(mean_d.size, _MEAN_CHUNK_VALUES):
        part_c = delta_d[piece]
        delta_c = torch.from_numpy(np.asarray(_WritableView(part_c)))
        mean_c = torch.from_numpy(mean_d[piece])
        if share == 1.0:
            mean_c.copy_(delta_c)
        else:
            mean_c.lerp_(delta_c, share)
        give_back(part_c)
        give_back(mean_d[piece])


def _fold_into_update(delta_d: Vector, mean_d: Vector, share: float) -> bool:
    """Compute the same mean in an update's memory; False if it is not finite.

    The mean before is only read, so a bad value in the last chunk has done no harm.
    """
    if share == 1.0:
        return is_finite(delta_d)
    for piece in chunks(mean_d.size, _CHECKED_CHUNK_VALUES):
        part_c = delta_d[piece]
        if not is_finite(part_c):
            return False
        delta_c = torch.from_numpy(part_c)
        torch.lerp(torch.from_numpy(mean_d[piece]), delta_c, share, out=delta_c)
    return True


def trimmed_mean(*, byzantine_sites: int) -> CombineRule:
    """Mean of each coordinate without its smallest and largest values.

    Yin et al., arXiv:1803.01498, Definition 2, with f values cut at either end.
    Holds all N updates; beyond them O(N) chunks. Weights are ignored.

    Breakdown point: with at most f bad sites and ``f < N / 2``, every coordinate
    lies between the smallest and the largest value of the honest sites.

    Args:
        byzantine_sites: f, at least 0.
    """

    def rule(updates: Iterable[WeightedUpdate], out_d: Vector) -> Vector:
        held_n = _by_site(updates, out_d, at_least=2 * byzantine_sites + 1)
        return _mean_of_middle(held_n, out_d, cut=byzantine_sites)

    return rule


def median(updates: Iterable[WeightedUpdate], out_d: Vector) -> Vector:
    """Median of each coordinate; for even N the mean of the two middle values.

    Yin et al., arXiv:1803.01498, Definition 1.
    Holds all N updates; beyond them O(N) chunks. Weights are ignored.

    Breakdown point: with at most ``floor((N - 1) / 2)`` bad sites, every coordinate
    lies between the smallest and the largest value of the honest sites.

    Raises:
        ValueError: No update, or one of another length.
    """
    held_n = _by_site(updates, out_d, at_least=1)
    return _mean_of_middle(held_n, out_d, cut=(len(held_n) - 1) // 2)


def krum(*, byzantine_sites: int) -> CombineRule:
    """Choose the update whose neighbours are nearest.

    Blanchard et al., arXiv:1703.02757, Section 4: a site's score is the sum of the
    squared distances to its N - f - 2 nearest others; the smallest score wins, of
    equal ones the site whose name comes first.
    Holds all N updates; beyond them O(N) chunks. Weights are ignored.

    Breakdown point: f bad sites with ``N >= 2 f + 3``. A bad site that stays near
    the honest ones may be chosen, one far from them may not.

    Args:
        byzantine_sites: f, at least 0.
    """

    def rule(updates: Iterable[WeightedUpdate], out_d: Vector) -> Vector:
        held_n = _by_site(updates, out_d, at_least=2 * byzantine_sites + 3)
        best = _krum_order(held_n, byzantine_sites)[0]
        for piece in chunks(out_d.size):
            part_c = held_n[best][piece]
            np.copyto(out_d[piece], part_c)
            give_back(part_c)
        return out_d

    return rule


def multi_krum(*, byzantine_sites: int) -> CombineRule:
    """Average the N - f updates with the best Krum scores.

    Blanchard et al., arXiv:1703.02757, Section 5, with m = N - f: as many as there
    are honest sites at least. Scores and ties as in ``krum``.
    Holds all N updates; beyond them O(N) chunks. Weights are ignored.

    Breakdown point: f bad sites with ``N >= 2 f + 3``, if they are far from the
    honest ones; those that stay near are averaged in.

    Args:
        byzantine_sites: f, at least 0.
    """

    def rule(updates: Iterable[WeightedUpdate], out_d: Vector) -> Vector:
        held_n = _by_site(updates, out_d, at_least=2 * byzantine_sites + 3)
        order = _krum_order(held_n, byzantine_sites)
        # In the order of sites again, so that equal sets give equal bits.
        chosen = sorted(order[: len(held_n) - byzantine_sites])
        for piece in chunks(out_d.size, _ROBUST_CHUNK_VALUES):
            rows = [held_n[i][piece] for i in chosen]
            _mean_of_rows(rows, out_d[piece])
            for row_c in rows:
                give_back(row_c)
        return out_d

    return rule


def users_rule(function: UsersRule, *, name: str) -> CombineRule:
    """Combine updates with a function of the user's.

    It is called with all updates, in the order of the sites' names, and their weights,
    shape ``(n,)``. Updates are finite and can only be read. What it returns is checked
    before it moves the model.

    Memory: all N updates, their combination, and what the function takes.
    Breakdown point: the function's.

    Args:
        function: Returns the combination, shape ``(d,)``, of floats.
        name: The function, as the job file names it.
    """

    def rule(updates: Iterable[WeightedUpdate], out_d: Vector) -> Vector:
        held = sorted(_sound(updates, out_d), key=lambda update: update.site)
        weights_n = np.array([update.weight for update in held])
        _check_weight(float(weights_n.sum()))
        whole_nd = [_to_read(update.delta_d) for update in held]
        try:
            found_d = np.asarray(function(whole_nd, weights_n))
        except Exception as error:
            # Foreign code may raise anything. This translates and does not continue.
            raise UserCodeError(name, error) from error
        if found_d.shape != out_d.shape or found_d.dtype.kind != "f":
            raise JobError(
                f"{name} returned an array of shape {found_d.shape} and type "
                f"{found_d.dtype}: return one of floats, of shape {out_d.shape}",
                key="aggregation.combine",
            )
        for piece in chunks(out_d.size, _CHECKED_CHUNK_VALUES):
            np.copyto(out_d[piece], found_d[piece], casting="same_kind")
        if not is_finite(out_d):
            raise JobError(
                f"{name} returned NaN or infinite values for finite updates",
                key="aggregation.combine",
            )
        return out_d

    return rule


def _to_read(delta_d: Values) -> Vector:
    """Return an update as a whole vector that cannot be written to."""
    whole_d = delta_d[0 : delta_d.size].view()
    whole_d.flags.writeable = False
    return whole_d


def _check(update: WeightedUpdate, out_d: Vector) -> None:
    if update.delta_d.shape != out_d.shape:
        raise ValueError(
            f"site {update.site!r} sent an update of shape {update.delta_d.shape}, "
            f"and the model has {out_d.shape}"
        )
    if not 0 <= update.weight < math.inf:
        raise ValueError(f"site {update.site!r} has the weight {update.weight}")


def _refuse(update: WeightedUpdate) -> None:
    if update.refuse is None:
        raise ValueError(f"the update of site {update.site!r} is not finite")
    update.refuse()


def _sound(
    updates: Iterable[WeightedUpdate], out_d: Vector
) -> Iterator[WeightedUpdate]:
    """Pass on the updates that are finite, and refuse the others."""
    for update in updates:
        _check(update, out_d)
        if is_finite(update.delta_d):
            yield update
        else:
            _refuse(update)
        del update  # A refused one is not held while the next is awaited.


def _by_site(
    updates: Iterable[WeightedUpdate], out_d: Vector, *, at_least: int
) -> list[Values]:
    """Collect all updates in the order of sites, not of arrival."""
    held = sorted(_sound(updates, out_d), key=lambda update: update.site)
    if len(held) < at_least:
        raise ValueError(f"{len(held)} updates, but the rule needs {at_least}")
    return [update.delta_d for update in held]


def _mean_of_middle(held_n: Sequence[Values], out_d: Vector, *, cut: int) -> Vector:
    """Mean of each coordinate without its ``cut`` smallest and largest values."""
    num_sites = len(held_n)
    network = list(_sorting_network(num_sites))
    width = min(out_d.size, _ROBUST_CHUNK_VALUES)
    buffer = np.empty((num_sites + 1, width), dtype=np.float32)
    for piece in chunks(out_d.size, _ROBUST_CHUNK_VALUES):
        *rows, spare_c = buffer[:, : piece.stop - piece.start]
        for row_c, delta_d in zip(rows, held_n, strict=True):
            part_c = delta_d[piece]
            np.copyto(row_c, part_c)
            give_back(part_c)
        for low, high in network:
            np.minimum(rows[low], rows[high], out=spare_c)
            np.maximum(rows[low], rows[high], out=rows[high])
            rows[low], spare_c = spare_c, rows[low]
        _mean_of_rows(rows[cut : num_sites - cut], out_d[piece])
    return out_d


def _mean_of_rows(rows: Sequence[Vector], out_c: Vector) -> None:
    total_c = rows[0].astype(np.float64)
    for row_c in rows[1:]:
        total_c += row_c
    np.divide(total_c, len(rows), out=out_c, casting="same_kind")


def _sorting_network(num_rows: int) -> Iterator[tuple[int, int]]:
    """Comparators of Batcher's merge exchange, Knuth TAOCP 5.2.2 Algorithm M.

    Rows are compared whole, which is twenty times faster than sorting columns.
    """
    top = 1 << max(num_rows - 1, 0).bit_length() >> 1
    block = top
    while block:
        step, residue, gap = top, 0, block
        while True:
            for low in range(num_rows - gap):
                if low & block == residue:
                    yield low, low + gap
            if step == block:
                break
            step, residue, gap = step // 2, block, step - block
        block //= 2


def _krum_order(held_n: Sequence[Values], byzantine_sites: int) -> list[int]:
    """Indices of the updates from the best Krum score to the worst."""
    distances_nn = _squared_distances(held_n)
    np.fill_diagonal(distances_nn, np.inf)
    num_nearest = len(held_n) - byzantine_sites - 2
    scores_n = np.sort(distances_nn, axis=1)[:, :num_nearest].sum(axis=1)
    return [int(i) for i in np.argsort(scores_n, kind="stable")]


def _squared_distances(held_n: Sequence[Values]) -> _Matrix:
    """Squared Euclidean distances of all pairs, from their float64 Gram matrix."""
    num_sites = len(held_n)
    gram_nn = np.zeros((num_sites, num_sites))
    width = min(held_n[0].size, _ROBUST_CHUNK_VALUES)
    buffer = np.empty((num_sites, width))
    for piece in chunks(held_n[0].size, _ROBUST_CHUNK_VALUES):
        part_nc = buffer[:, : piece.stop - piece.start]
        for row_c, delta_d in zip(part_nc, held_n, strict=True):
            part_c = delta_d[piece]
            np.copyto(row_c, part_c)
            give_back(part_c)
        gram_nn += part_nc @ part_nc.T
    squares_n = np.diag(gram_nn)
    distances_nn = squares_n[:, None] + squares_n[None, :] - 2 * gram_nn
    # Rounding leaves equal updates a little below 0 apart.
    return np.maximum(distances_nn, 0.0)
