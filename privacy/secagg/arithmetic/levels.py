"""Sums of updates in few levels: plan of a round, a site's half, and the decoding.

Each site rotates its update (``federation.compression.rotation``), adds what earlier
rounds have left out, and rounds every value to the nearest of L equidistant levels. The
step between levels is public, one for each block of 4,096 values, and the same at every
site; so the sum of the levels' numbers is all that the aggregator needs, and they are
packed as ``digits``. What rounding and the outermost levels leave out stays at the site
as its *residual*, which is kept rotated (error feedback: Seide et al. 2014; Karimireddy
et al. 2019, arXiv:1901.09847).

For u, a block's values with a standard deviation of sigma, and its step s::

    n = clip(rint(u / s + (L - 1) / 2), 0, L - 1)        the digit
    q = (n - (L - 1) / 2) s                              what it stands for
    e = u - q                                            the residual

The best step for a Gaussian is ``2 c sigma / (L - 1)`` with c as in ``CLIP``; the mean
square of e is then ``ERROR sigma^2`` (Max 1960, "Quantizing for minimum distortion",
table II). Steps follow from sums that were opened before, so they reveal nothing new.
The first round has no such sum: it uses as many levels as 16 bits a value have room
for, and a step that follows from the contract's clip norm.

A site keeps at most ``KEPT`` clip norms C of residual: what it rounds then has a norm
of at most ``(1 + KEPT) C``, so steps, squares and sums have bounds that honest sites
never exceed, however long others lie. What is beyond is given up.

Shape suffixes: d values of the update, b blocks of 4,096, w words, v values of a group.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from federation.compression.rotation import (
    BLOCK_VALUES,
    SIDE,
    Rotation,
    num_blocks,
    padded,
)
from federation.mapped import give_back
from federation.vectors import Allocate, Vector, chunks, in_memory
from privacy.keystream import Mask, apply_masks_
from privacy.secagg.arithmetic.digits import Digits, Lanes, finest_levels
from privacy.secagg.arithmetic.measurement import NORM_ERROR, Measurement, measure
from privacy.secagg.arithmetic.ring import A_LIE, SumOutOfRange

# Outermost level in standard deviations, where the error is least; and the error.
CLIP = {3: 1.20, 4: 1.50, 8: 2.05, 16: 2.50, 256: 3.90}
ERROR = {3: 0.1904, 4: 0.1189, 8: 0.03744, 16: 0.01155, 256: 8.77e-5}
FIRST_BITS = 16
KEPT = 3.0  # Largest norm of a residual, in clip norms.
REACH = 1 + KEPT  # The same of what is rounded.
# Of the first round: how far its levels reach, in standard deviations of an update
# whose norm is the clip norm and that is spread evenly. What is beyond stays behind.
_FIRST_REACH = 16.0
_SLACK = 1e-2  # Of norms that are added up in float32.
_LEAST_SHARE = 2.0**-6  # of the mean variance, that of a block whose sum is smaller
_LEAST_STEP = float(np.finfo(np.float32).tiny)
_EXACT = 1 << 24


@dataclass(frozen=True, kw_only=True)
class LevelPlan:
    """The public facts of a round's levels.

    Attributes:
        levels: L of this round.
        steps_b: Step of each block, in weight units, float32.
    """

    levels: int
    steps_b: Vector

    def __post_init__(self) -> None:
        """Refuse steps that no value could be divided by."""
        steps_b = self.steps_b
        if steps_b.dtype != np.float32 or steps_b.ndim != 1:
            raise ValueError("steps are a flat float32 array")
        if not (np.isfinite(steps_b).all() and (steps_b >= _LEAST_STEP).all()):
            raise ValueError("a step of the levels is not a positive, finite number")

    def digits(self, num_sites: int) -> Digits:
        """How the numbers of so many sites' levels are packed."""
        return Digits(levels=self.levels, num_sites=num_sites)

    def digest(self) -> bytes:
        """SHA-256 of the plan."""
        found = hashlib.sha256(b"xsa-v2/levels" + self.levels.to_bytes(8, "big"))
        found.update(self.steps_b.astype("<f4", copy=False).tobytes())
        return found.digest()


def first_plan(size: int, *, num_sites: int, clip_norm: float) -> LevelPlan:
    """Plan a round before which no sum was opened: 16 bits a value."""
    levels = finest_levels(num_sites, FIRST_BITS)
    reach = _FIRST_REACH * clip_norm / math.sqrt(padded(size))
    step = max(2 * reach / (levels - 1), _LEAST_STEP)
    return LevelPlan(levels=levels, steps_b=np.full(num_blocks(size), step, np.float32))


def next_plan(
    levels: int, *, energies_b: NDArray[np.float64], variance: float
) -> LevelPlan | None:
    """Plan the round after one whose sum was opened.

    Args:
        levels: The job's L.
        energies_b: Energy of each block of the sum, in any unit: how the variance is
            spread over the blocks.
        variance: Mean square of a value that a site has rounded, residual included, by
            the sums of the header.

    Returns:
        The plan; None where nothing was summed that is not 0.
    """
    mean = float(energies_b.mean())
    if not (mean > 0 and variance > 0):
        return None
    shares_b = np.maximum(energies_b / mean, _LEAST_SHARE)
    sigmas_b = np.sqrt(shares_b / shares_b.mean() * variance)
    steps_b = (2 * CLIP[levels] / (levels - 1) * sigmas_b).astype(np.float32)
    return LevelPlan(levels=levels, steps_b=np.maximum(steps_b, _LEAST_STEP))


def rounding_norm(plan: LevelPlan) -> float:
    """Norm of what rounding changes, where values are spread evenly over a step."""
    squares = np.square(plan.steps_b, dtype=np.float64).sum() / 12
    return math.sqrt(BLOCK_VALUES * squares)


def largest_step(levels: int, *, clip_norm: float) -> float:
    """Largest step that follows from sums of honest sites.

    All of what was rounded is then in one block. Larger steps would send nothing and
    fill the residuals with what no site has computed.
    """
    reach = REACH * CLIP[levels] if levels in CLIP else _FIRST_REACH
    return 2 * reach * clip_norm / SIDE / (levels - 1) * (1 + _SLACK)


def most_energy(num_updates: int) -> float:
    """Most that the squares of so many sites come to, in squares of the clip norm."""
    return num_updates * (REACH * (1 + _SLACK)) ** 2


def largest_sum_norm(
    plan: LevelPlan, *, num_updates: int, weight: float, clip_norm: float
) -> float:
    """Largest norm of a sum of honest sites.

    A value q differs from u by half a step at most, or is smaller, so that the norm of
    a site's q is at most that of its u and half of all steps.

    Args:
        plan: Plan of the round.
        num_updates: n.
        weight: Sum of the weights.
        clip_norm: C.
    """
    half_steps = SIDE / 2 * float(np.linalg.norm(plan.steps_b.astype(np.float64)))
    sent = weight * clip_norm + num_updates * (KEPT * clip_norm + half_steps)
    return (1 + _SLACK) * sent


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedLevels:
    """An update as masked words.

    Attributes:
        masked_w: What leaves.
        words_w: The same without masks, which stays: should the round not count, they
            say what to add to the residual.
        num_clipped: Values beyond the outermost levels.
        energy: Sum of the squares of what was rounded, in weight units.
        is_within: Whether the update's norm was within the clip norm.
    """

    masked_w: Lanes
    words_w: Lanes
    num_clipped: int
    energy: float
    is_within: bool


@dataclass(frozen=True, kw_only=True)
class LevelSite:
    """A site's half of a sum in few levels.

    Attributes:
        plan: The round's.
        digits: How digits are packed.
        rotation: The run's.
        clip_norm: C, the largest norm of an update, in weight units.
    """

    plan: LevelPlan
    digits: Digits
    rotation: Rotation
    clip_norm: float

    def seal_(
        self,
        update_d: Vector,
        *,
        weight: float,
        residual_d: Vector,
        masks: Sequence[Mask],
        measured: Measurement | None = None,
    ) -> SealedLevels:
        """Clip, weight, rotate, round, pack and mask an update.

        Args:
            update_d: The update, shape ``(d,)``, float32, in weight units; unchanged.
            weight: In (0, 1].
            residual_d: Rotated, of padded length; holds the new residual afterwards. Of
                a norm beyond ``KEPT`` clip norms, the excess is given up.
            masks: Streams of 64-bit words; empty to pack only.
            measured: Measurements of this update, if they are known already.

        Raises:
            UpdateNotFinite: A value is NaN or infinite; nothing was written.
        """
        measured = measured or measure(update_d)
        largest = measured.norm * (1 + NORM_ERROR)
        clip = 1.0 if largest <= self.clip_norm else self.clip_norm / largest
        words_w = np.empty(self.digits.num_words(update_d.size), np.uint64)
        _limit_(residual_d, KEPT * self.clip_norm)
        worker = _Rounder(self, factor=weight * clip)
        with np.errstate(over="ignore", under="ignore"):
            for group in self.digits.groups(update_d.size):
                digits_v = worker.round_(
                    update_d[group.begin : group.end],
                    residual_d[group.begin : group.end],
                    group.begin // BLOCK_VALUES,
                )
                self.digits.pack(digits_v, words_w[group.first : group.last])
                give_back(residual_d[group.begin : group.end])
        masked_w = words_w.copy()
        apply_masks_(masked_w, masks)
        return SealedLevels(
            masked_w=masked_w,
            words_w=words_w,
            num_clipped=worker.num_clipped,
            energy=worker.energy,
            is_within=clip == 1,
        )


class _Rounder:
    """Rounds group after group, and counts."""

    def __init__(self, site: LevelSite, *, factor: float) -> None:
        self._rotation, self._factor = site.rotation, factor
        self._top = np.float32(site.plan.levels - 1)
        self._steps_b = site.plan.steps_b
        self._inverse_b = 1 / site.plan.steps_b.astype(np.float64)
        most = site.digits.per_word * BLOCK_VALUES
        most = min(most, self._steps_b.size * BLOCK_VALUES)
        self._buffers = [np.empty(most, np.float32) for _ in range(3)]
        self.num_clipped, self.energy = 0, 0.0

    def round_(self, update_v: Vector, residual_v: Vector, block: int) -> Vector:
        """Return the digits of a group; replace its residual."""
        size = residual_v.size
        copy_v, found_v, digits_v = (buffer[:size] for buffer in self._buffers)
        copy_v[: update_v.size] = update_v
        copy_v[update_v.size :] = 0
        self._rotation.forward(copy_v, out=found_v, factor=self._factor)
        residual_v += found_v  # u
        # Not by BLAS, which would use all cores for so many values.
        self.energy += float(np.einsum("v,v", residual_v, residual_v))
        blocks = slice(block, block + size // BLOCK_VALUES)
        inverse = self._inverse_b[blocks].astype(np.float32)[:, None]
        steps = self._steps_b[blocks][:, None]
        shape = (-1, BLOCK_VALUES)
        np.multiply(residual_v.reshape(shape), inverse, out=found_v.reshape(shape))
        found_v += self._top / 2
        np.rint(found_v, out=found_v)
        np.clip(found_v, 0, self._top, out=digits_v)
        self.num_clipped += int(np.count_nonzero(found_v != digits_v))
        np.subtract(digits_v, self._top / 2, out=found_v)
        values = found_v.reshape(shape)
        np.multiply(values, steps, out=values)
        residual_v -= found_v
        return digits_v


def _limit_(residual_d: Vector, most: float) -> None:
    """Scale a residual down to a norm."""
    with np.errstate(over="ignore", under="ignore"):
        squares = (_squares(residual_d[piece]) for piece in chunks(residual_d.size))
        norm = math.sqrt(sum(squares))
        if norm > most:
            for piece in chunks(residual_d.size):
                residual_c = residual_d[piece]
                residual_c *= np.float32(most / norm)
                give_back(residual_c)


def _squares(residual_c: Vector) -> float:
    squares = float(np.einsum("c,c", residual_c, residual_c))
    give_back(residual_c)
    return squares


def return_(
    residual_d: Vector, words_w: Lanes, *, plan: LevelPlan, digits: Digits
) -> None:
    """Add to a residual what words of this site stood for, which did not count.

    Args:
        residual_d: Rotated, of padded length; changed.
        words_w: Of this site alone, without masks.
        plan: Plan of the round that they were made for.
        digits: How they are packed.
    """
    numbers_v = np.empty(digits.per_word * BLOCK_VALUES, np.float32)
    for group in digits.groups(residual_d.size):
        part = numbers_v[: group.end - group.begin]
        digits.unpack(words_w[group.first : group.last], part)
        part -= np.float32((plan.levels - 1) / 2)
        blocks = slice(group.begin // BLOCK_VALUES, group.end // BLOCK_VALUES)
        values = part.reshape(-1, BLOCK_VALUES)
        values *= plan.steps_b[blocks][:, None]
        residual_d[group.begin : group.end] += part
        give_back(residual_d[group.begin : group.end])


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedLevels:
    """A sum that was opened.

    Attributes:
        mean_d: The sum over the divisor, shape ``(d,)``, rotated back.
        energies_b: Sum of the squares of each block of the sum, in weight units.
    """

    mean_d: Vector
    energies_b: NDArray[np.float64]


def open_levels(
    words_w: Lanes,
    *,
    plan: LevelPlan,
    digits: Digits,
    rotation: Rotation,
    size: int,
    num_updates: int,
    divisor: float,
    allocate: Allocate = in_memory,
) -> OpenedLevels:
    """Read the words of a sum without masks; the same bits on every machine.

    Digits of a sum of n updates, less the middle, are whole numbers; Hadamard sums of
    them are exact, and each value is then multiplied and rounded once.

    Args:
        words_w: The sum.
        plan: Plan of its round.
        digits: How digits are packed.
        rotation: The run's.
        size: d.
        num_updates: n.
        divisor: What the sum is divided by: the sum of the weights for a mean.
        allocate: Makes the vector of the mean.

    Raises:
        SumOutOfRange: Honest sites do not make such words.
    """
    mean_d = allocate(size)
    energies_b = np.empty(plan.steps_b.size, np.float64)
    most = num_updates * (plan.levels - 1)
    is_exact = BLOCK_VALUES * most < _EXACT
    half_b = plan.steps_b.astype(np.float64) / 2
    for group in digits.groups(size):
        numbers_v = np.empty(group.end - group.begin, np.float32)
        group_w = words_w[group.first : group.last]
        digits.unpack(group_w, numbers_v)
        give_back(group_w)
        _check_digits(numbers_v, most)
        numbers_v *= 2
        numbers_v -= most
        blocks = slice(group.begin // BLOCK_VALUES, group.end // BLOCK_VALUES)
        whole = numbers_v.reshape(-1, BLOCK_VALUES)
        if BLOCK_VALUES * most**2 >= _EXACT:
            whole = whole.astype(np.float64)
        energies_b[blocks] = np.einsum("bv,bv->b", whole, whole) * half_b[blocks] ** 2
        values_v = rotation.backward(
            numbers_v, half_b[blocks] / divisor, exact=is_exact
        )
        part = mean_d[group.begin : group.end]
        part[:] = values_v[: part.size]
        give_back(part)
    return OpenedLevels(mean_d=mean_d, energies_b=energies_b)


def _check_digits(numbers_v: Vector, most: int) -> None:
    found = float(numbers_v.max(initial=0))
    if found > most:
        raise SumOutOfRange(
            f"a digit of the sum is {found:.0f}, but honest sites reach at most "
            f"{most}: {A_LIE}"
        )
