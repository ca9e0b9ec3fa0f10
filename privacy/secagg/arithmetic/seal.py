"""A site's half of a secure sum: clip, weight, scale, round and mask an update.

Source: section 3 of the protocol. The update's own memory becomes the words', and
each chunk is encoded and masked while it is in the cache. What is sent beside the
words, and under which keys, is for the protocol's state machine.

Shape suffixes: d values of the update, c values of one chunk, w words of the ring
(one element per value, but three bytes per value at 24 bits).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from federation.vectors import Vector
from privacy.keystream import (
    CHUNK_WORDS,
    SPARE_BYTES,
    Mask,
    MaskStreams,
    Words,
    aligned,
    in_ranges,
    open_keystream,
    pack_24,
)
from privacy.secagg.arithmetic.measurement import NORM_ERROR, Measurement, measure
from privacy.secagg.arithmetic.ring import RingSpec, UpdateOutOfRange

_TINY = 1e-17  # more than the square root of what underflows in a row of squares
_DITHER_BITS = 8
_ODD = np.uint64(0x0101010101010101)


class Noise(Protocol):
    """Noise for words. Implementation: ``privacy.dp.noise.RingNoise``."""

    @property
    def noise_std(self) -> float:
        """Standard deviation, in steps of the ring's grid."""
        ...

    def open(self, num_words: int) -> Callable[[NDArray[np.int32], int], None]:
        """Begin a stream for one range of the update.

        Args:
            num_words: Length of the range.

        Returns:
            ``add_(words_c, begin)``: adds fresh noise to the words ``[begin, begin +
            c)``, in place; called for chunk after chunk.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedUpdate:
    """An update as words of the ring.

    Attributes:
        words_w: The words, in the memory that held the update; of the spec's
            ``wire_dtype``, one element per value, or three bytes at 24 bits.
        norm: Euclidean norm of the update before clipping; private to the site.
        clip_factor: What clipping multiplied by; 1 if the norm was small enough.
    """

    words_w: Words
    norm: float
    clip_factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What to do with each chunk of a measured update."""

    factor: np.float32
    limit: np.float32
    over: NDArray[np.bool_]  # per chunk: elements may exceed the limit


def seal_(
    update_d: Vector,
    spec: RingSpec,
    *,
    weight: float,
    masks: Sequence[Mask],
    rounding_key: bytes,
    measured: Measurement | None = None,
    noise: Noise | None = None,
    threads: int = 1,
) -> EncodedUpdate:
    """Clip, weight, scale, round and mask an update, in place; add noise if there is.

    1. One pass finds the norm and whether all is finite, unless ``subtract_`` did.
    2. ``factor = weight * min(1, C / norm) * scale``, as float32.
    3. Chunk by chunk: ``q = rint(u * factor + v)`` with ``v`` uniform on the odd
       multiples of 1/256 in (-1/2, 1/2), drawn from the stream of ``rounding_key``.
    4. While the chunk is in the cache, noise is added, and then every mask is added
       or subtracted.

    In place because a model may fill the machine: beyond the update, under 2 MiB
    per thread are used for any size.

    Args:
        update_d: Site update, shape ``(d,)``, float32, contiguous, in weight
            units. Its memory becomes the words'.
        spec: The ring.
        weight: In (0, 1].
        masks: Streams to apply; empty to encode only.
        rounding_key: 32 fresh bytes of the system's entropy, used once.
        measured: Measurements of this update, if they are known already.
        noise: This site's share of the noise, of the standard deviation that the
            spec has room for; None where the spec has none.
        threads: Ranges to work on at the same time; the result is the same, but for
            the noise.

    Returns:
        The words, the norm and the clip factor.

    Guarantee:
        The clipped update's norm is at most C: the factor allows for the norm's own
        error of 2^-16. Every ``|q|`` is at most ``spec.amplitude``, and noise comes
        on top. Rounding is
        unbiased up to the dither's grid: the expectation of ``q`` differs from
        ``u * factor`` by at most ``max(2^-8, |u * factor| * 2^-23)``, with either
        sign alike. The variance of rounding is at most 1/4.

    Raises:
        UpdateNotFinite: A value is NaN or infinite; nothing was written.
        UpdateOutOfRange: An element exceeds ``element_bound`` and the spec does
            not clip; nothing was written.
        ValueError: ``weight``, a key or the array's form is wrong, or the noise is
            not the spec's.
    """
    _check_update(update_d, weight)
    _check_noise(noise, spec)
    # 1.
    measured = measured or measure(update_d, threads=threads)
    clip_factor = _clip_factor(measured.norm, spec.clip_norm)
    # 2.
    plan = _plan(measured, spec, factor=weight * clip_factor * spec.scale)
    if plan.over.any() and not spec.clip_elements:
        _refuse_larger(update_d, plan, spec)

    def seal_range(start: int, stop: int) -> None:
        worker = _Sealer(spec, plan, masks, rounding_key, (start, stop))
        if noise is not None:
            worker.add_noise_ = noise.open(stop - start)
        with np.errstate(under="ignore"):
            for begin in range(start, stop, CHUNK_WORDS):
                worker.seal_chunk_(update_d, begin, min(begin + CHUNK_WORDS, stop))

    ranges = in_ranges(seal_range, update_d.size, threads=threads)
    return EncodedUpdate(
        words_w=_compact_(update_d, ranges, spec),
        norm=measured.norm,
        clip_factor=clip_factor,
    )


def encode_(
    update_d: Vector,
    spec: RingSpec,
    *,
    weight: float,
    rounding_key: bytes,
    threads: int = 1,
) -> EncodedUpdate:
    """Encode an update without masks, in place: see ``seal_``."""
    return seal_(
        update_d,
        spec,
        weight=weight,
        masks=(),
        rounding_key=rounding_key,
        threads=threads,
    )


class _Sealer:
    """One thread's buffers and streams, for the chunks of a range."""

    def __init__(
        self,
        spec: RingSpec,
        plan: _Plan,
        masks: Sequence[Mask],
        rounding_key: bytes,
        range_: tuple[int, int],
    ) -> None:
        start, stop = range_
        self.add_noise_: Callable[[NDArray[np.int32], int], None] | None = None
        self._spec, self._plan, self._start = spec, plan, start
        self._streams = MaskStreams(
            masks, bits=spec.bits, first_word=start, num_words=stop - start
        )
        self._rounding = open_keystream(
            rounding_key, first_byte=start, num_bytes=stop - start
        )
        self._bytes_c = aligned(CHUNK_WORDS + SPARE_BYTES, np.uint8)
        self._scratch_c = aligned(CHUNK_WORDS, np.float32)
        self._narrow_c = aligned(CHUNK_WORDS if spec.bits < 32 else 0, np.int32)  # noqa: PLR2004

    def seal_chunk_(self, update_d: Vector, begin: int, end: int) -> None:
        """Turn values ``[begin, end)`` into masked words at the range's front."""
        chunk_c = update_d[begin:end]
        rounded_c = self._round(chunk_c, over=self._plan.over[begin // CHUNK_WORDS])
        if self._spec.bits == 32:  # noqa: PLR2004
            np.copyto(chunk_c.view(np.int32), rounded_c, casting="unsafe")
            if self.add_noise_ is not None:
                self.add_noise_(chunk_c.view(np.int32), begin)
            self._streams.apply_(chunk_c.view(np.uint32))
            return
        q_c = self._narrow_c[: end - begin]
        np.copyto(q_c, rounded_c, casting="unsafe")
        if self.add_noise_ is not None:
            self.add_noise_(q_c, begin)
        out = _words_of_range(update_d, self._start, begin, end, spec=self._spec)
        if self._spec.bits == 16:  # noqa: PLR2004
            np.copyto(out, q_c, casting="unsafe")
            self._streams.apply_(out)
        else:
            self._streams.apply_(q_c.view(np.uint32))
            pack_24(q_c.view(np.uint32), out)

    def _round(self, chunk_c: Vector, *, over: np.bool_) -> Vector:
        """Scale a chunk, in place, and return it rounded, in the scratch buffer."""
        size, limit = chunk_c.size, self._plan.limit
        np.multiply(chunk_c, self._plan.factor, out=chunk_c)
        if over:
            np.clip(chunk_c, -limit, limit, out=chunk_c)
        # An odd byte, read as signed, is symmetric about zero: no bias is left.
        bytes_c, v_c = self._bytes_c[:size], self._scratch_c[:size]
        self._rounding.read_into(self._bytes_c, size)
        odd = self._bytes_c[: -(-size // 8) * 8].view(np.uint64)
        np.bitwise_or(odd, _ODD, out=odd)
        np.copyto(v_c, bytes_c.view(np.int8))
        np.multiply(v_c, np.float32(2.0**-_DITHER_BITS), out=v_c)
        np.add(chunk_c, v_c, out=chunk_c)
        return np.rint(chunk_c, out=v_c)


def _check_update(update_d: Vector, weight: float) -> None:
    if not 0 < weight <= 1:
        raise ValueError(f"a weight must be in (0, 1], not {weight}")
    if update_d.dtype != np.float32 or update_d.ndim != 1:
        raise ValueError(
            "an update must be a flat float32 array, not "
            f"{update_d.dtype}{update_d.shape}"
        )
    if not update_d.flags.c_contiguous or not update_d.flags.writeable:
        raise ValueError("an update that is sealed in place must own its memory")


def _check_noise(noise: Noise | None, spec: RingSpec) -> None:
    given = 0.0 if noise is None else noise.noise_std
    if given != spec.noise_std:
        raise ValueError(
            f"the ring is planned for noise of {spec.noise_std} steps, not {given}"
        )


def _clip_factor(norm: float, clip_norm: float) -> float:
    largest = norm * (1 + NORM_ERROR)
    return 1.0 if largest <= clip_norm else clip_norm / largest


def _plan(measured: Measurement, spec: RingSpec, *, factor: float) -> _Plan:
    bounds = measured.bounds.astype(np.float64) + _TINY
    return _Plan(
        factor=np.float32(factor),
        limit=np.float32(spec.largest_scaled),
        # Bounded by the norm, elements are small enough for any rows.
        over=(bounds * factor > spec.largest_scaled) & (spec.element_bound is not None),
    )


def _refuse_larger(update_d: Vector, plan: _Plan, spec: RingSpec) -> None:
    largest = spec.largest_scaled / float(plan.factor)
    for index in np.flatnonzero(plan.over):
        chunk_c = update_d[index * CHUNK_WORDS : (index + 1) * CHUNK_WORDS]
        if max(float(chunk_c.max()), -float(chunk_c.min())) > largest:
            raise UpdateOutOfRange(
                f"an element of the update is beyond the contract's element_bound of "
                f"{spec.element_bound}: raise the bound, or let the contract clip"
            )


def _words_of_range(
    update_d: Vector, start: int, begin: int, end: int, *, spec: RingSpec
) -> Words:
    """Words ``[begin, end)``, of a range whose words begin where its floats did."""
    offset = 4 * start + spec.word_bytes * (begin - start)
    stop = offset + spec.word_bytes * (end - begin)
    return update_d.view(np.uint8)[offset:stop].view(spec.wire_dtype)


def _compact_(update_d: Vector, ranges: list[tuple[int, int]], spec: RingSpec) -> Words:
    """Move the words of every range to the front of the memory, one after another."""
    memory = update_d.view(np.uint8)
    for start, stop in ranges[1:] if spec.bits < 32 else []:  # noqa: PLR2004
        for begin in range(start, stop, CHUNK_WORDS):
            end = min(begin + CHUNK_WORDS, stop)
            words = _words_of_range(update_d, start, begin, end, spec=spec)
            front = memory[spec.word_bytes * begin : spec.word_bytes * end]
            front[:] = words.view(np.uint8)
    return memory[: spec.word_bytes * update_d.size].view(spec.wire_dtype)
