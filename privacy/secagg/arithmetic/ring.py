"""The ring of integers modulo 2^b in which updates are summed, and the decoding.

Source: section 3 of the protocol. What a site does is in ``seal``, what the
aggregator does in ``accumulator``, numbers beside the update in ``header``, noise
in the privacy mechanisms.

Shape suffixes: d values of the update, c values of one chunk, w words of the ring
(one element per value, but three bytes per value at 24 bits).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from federation.errors import InvalidUpdate, ProtocolError
from federation.mapped import give_back
from federation.vectors import Allocate, Vector, in_memory
from privacy.keystream import CHUNK_WORDS, Words, in_ranges, unpack_24

A_LIE = (
    "a site lied, or an answer was damaged; the sum does not show which, so the round "
    "is lost"
)


class UpdateNotFinite(InvalidUpdate):
    """The update holds NaN or infinity; the site declines the round."""


class UpdateOutOfRange(InvalidUpdate):
    """A value is larger than one site's share of the ring; nothing was encoded."""


class SumOutOfRange(ProtocolError):
    """The unmasked sum, of updates or of a header, is none that honest sites make."""


NOISE_TAIL = 12  # standard deviations of room; a Gaussian leaves it with p < 2^-107
_LARGEST_FLOAT = float(np.finfo(np.float32).max)
MIN_AMPLITUDE = 16  # below this, rounding would be most of what is sent
MAX_SCALE = 2.0**100  # a float32 times this many steps is still a number
MAX_CLIP_NORM = 1e12  # sums of squares of norms stay far inside float32
RING_BITS = (16, 24, 32)
MAX_SITES_OF_16_BITS = 16  # beyond, rounding is too coarse: section 3

# Room between the largest scaled value and the amplitude. It covers float32
# rounding (2^-22) and the norm's own error, besides the one of stochastic rounding.
_ROOM = 2.0**-12
_DITHER_BIAS = 2.0**-8  # of a rounded value, see ``seal_``
_ROUNDINGS = 4  # draws that a site's noise is made of, at most
_TAIL_EXPONENT = 72.0
WEIGHT_ERROR = 2.0**-33  # of a weight in the header
_WIRE_TYPES: Mapping[int, type[np.unsignedinteger[Any]]] = {
    16: np.uint16,
    24: np.uint8,
    32: np.uint32,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RingSpec:
    """How updates become integers; part of the contract that every site approves.

    Two bounds may set the scale. *By norm*: ``scale * clip_norm <= amplitude``, and
    clipping the norm is enough. *By element*: ``scale * element_bound <=
    amplitude`` with a bound far below the clip norm, hence finer rounding; a larger
    value is refused, or clipped where the spec says so.

    With ``M = 2^(bits-1) - 1``, N sites and noise of standard deviation ``sigma``
    at each site, every site keeps ``|q| <= amplitude``, where::

        amplitude = floor((M - NOISE_TAIL * sigma * sqrt(N)) / N)

    Guarantee:
        Sums do not wrap. The sum of N encoded values is at most ``N * amplitude``,
        that of the noise, of standard deviation ``sigma * sqrt(N)``, at most
        ``NOISE_TAIL * sigma * sqrt(N)`` but for its tail, and by the definition
        of the floor both together are at most ``M``. Fewer than N sites sum to
        less. Hence a sum modulo 2^bits, read in two's complement, is the sum.

    Attributes:
        bits: Width b of the ring: 16, 24 or 32. 16 is for at most 16 sites.
        num_sites: N, the largest number of updates in one sum, at least 2.
        clip_norm: C, the largest Euclidean norm of an update, in weight units.
        element_bound: Largest value of an element of the clipped and weighted
            update, in weight units; ``clip_norm`` by default, which always holds.
            A public constant: taken from the updates of a round, it would reveal
            something about them.
        clip_elements: Clip larger elements; they are refused otherwise.
        noise_std: Standard deviation of a site's noise on the integer grid.
    """

    bits: int
    num_sites: int
    clip_norm: float
    element_bound: float | None = None
    clip_elements: bool = False
    noise_std: float = 0.0

    def __post_init__(self) -> None:
        """Refuse a ring without room for a single update."""
        self._check_width()
        if self.clip_norm > MAX_CLIP_NORM:
            raise ValueError(
                f"clip_norm is at most {MAX_CLIP_NORM:g}, not {self.clip_norm:g}: "
                "set it to a few times the norm of an update"
            )
        for name in ("clip_norm", "bound"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive and finite")
        if not 0 <= self.noise_std < math.inf:
            raise ValueError("noise_std must be finite and at least 0")
        if self.bits == 16 and self.noise_std:  # noqa: PLR2004
            raise ValueError("16 bits have no room for noise: use 24 or 32")
        if self.amplitude < MIN_AMPLITUDE:
            raise ValueError(
                f"{self.bits} bits leave {self.num_sites} sites an amplitude of "
                f"{self.amplitude}, less than {MIN_AMPLITUDE}: use more bits"
            )
        if self.scale > MAX_SCALE:
            raise ValueError(f"a bound of {self.bound} is too small for float32")

    def _check_width(self) -> None:
        if self.bits not in RING_BITS:
            raise ValueError(f"a ring has 16, 24 or 32 bits, not {self.bits}")
        if self.num_sites < 2:  # noqa: PLR2004  # The sum of one is no secret.
            raise ValueError(f"a sum needs at least 2 sites, not {self.num_sites}")
        if self.bits == 16 and self.num_sites > MAX_SITES_OF_16_BITS:  # noqa: PLR2004
            raise ValueError(
                f"16 bits are too coarse for {self.num_sites} sites, beyond "
                f"{MAX_SITES_OF_16_BITS}: use 24 or 32"
            )

    @property
    def bound(self) -> float:
        """Largest value of an element, in weight units."""
        return self.clip_norm if self.element_bound is None else self.element_bound

    @property
    def amplitude(self) -> int:
        """Largest absolute value of an encoded element."""
        room = (1 << (self.bits - 1)) - 1 - math.ceil(self._noise_tail)
        return max(0, room) // self.num_sites

    @property
    def scale(self) -> float:
        """Integer steps per weight unit: ``(amplitude (1 - 2^-12) - 1) / bound``."""
        return self.largest_scaled / self.bound

    @property
    def largest_scaled(self) -> float:
        """Largest absolute value before rounding; what rounds to the amplitude."""
        return self.amplitude * (1 - _ROOM) - 1

    def largest_sum(self, held: "Inputs") -> float:
        """Largest absolute value of an element of a sum, in integer steps.

        Each of n updates adds a step of rounding and at most ``weight *
        largest_scaled``; where elements have a bound of their own, it is of the
        weighted update. The noise of all is beyond ``NOISE_TAIL`` standard deviations
        with a probability below 2 e^-72 < 2^-102 per element.
        """
        noise = NOISE_TAIL * math.sqrt(held.num_updates * self._noise_variance)
        by_norm = self.element_bound is None
        weight = held.most_weight if by_norm else held.num_updates
        return self.largest_scaled * weight * (1 + _ROOM) + held.num_updates + noise

    def largest_sum_norm(self, size: int, held: "Inputs") -> float:
        """Largest Euclidean norm of a sum of ``size`` values, in integer steps.

        The sum is ``x + z``. Of x, the weighted updates, ``|x| <= B``: each is clipped
        to C, so ``B = scale C W`` with W the sum of the weights, and 2^-12 of it for
        what float32 rounds and for elements beyond 2^16 steps, whose rounding is less
        than 2^-16 of them; besides, the dither of rounding has a bias of at most 2^-8
        steps per site and element. The rest, z, has mean zero and independent
        elements, and is sub-Gaussian with the variance proxy v per element: a rounded
        value has one of two neighbouring integers, hence 1/4 (Hoeffding's lemma), and
        a site's noise, a sum of up to four rounded Gaussians, each of which is a
        Gaussian and a uniform fraction of a step (``privacy.dp.noise``), has
        ``noise_std^2 + 4/12``. With ``t = 72``, each with a probability of at most
        e^-72::

            x z   > B sqrt(2 v t)
            |z|^2 > v (d + 2 sqrt(d t) + 2 t)

        (the second is Hsu, Kakade, Zhang 2012, arXiv:1110.2842, theorem 2.1). So
        honest sites exceed the square root of ``B^2 + 2 B sqrt(2 v t) + v (d + 2
        sqrt(d t) + 2 t)`` with a probability below ``2 e^-72 < 2^-102`` a round.
        """
        tail = _TAIL_EXPONENT
        bound = self.scale * self.clip_norm * held.most_weight * (1 + _ROOM)
        bound += held.num_updates * _DITHER_BIAS * math.sqrt(size)
        proxy = held.num_updates * (0.25 + self._noise_variance)
        chance = proxy * (size + 2 * math.sqrt(size * tail) + 2 * tail)
        return math.sqrt(bound * (bound + 2 * math.sqrt(2 * proxy * tail)) + chance)

    @property
    def word_bytes(self) -> int:
        """Bytes that a value takes on the wire."""
        return self.bits // 8

    @property
    def wire_dtype(self) -> np.dtype[np.unsignedinteger[Any]]:
        """Type of an array of words on the wire; ``uint8`` for packed 24 bits."""
        return np.dtype(_WIRE_TYPES[self.bits])

    @property
    def _noise_variance(self) -> float:
        """Variance proxy of a site's noise, up to four rounded Gaussians."""
        if not self.noise_std:
            return 0.0
        return (self.noise_std**2 + _ROUNDINGS / 12) * (1 + _ROOM)

    @property
    def _noise_tail(self) -> float:
        return NOISE_TAIL * self.noise_std * math.sqrt(self.num_sites)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What is known about the honest inputs of a sum.

    Attributes:
        num_updates: n, the updates in it.
        weight: W, the sum of their weights, each in (0, 1].
    """

    num_updates: int
    weight: float

    @property
    def most_weight(self) -> float:
        """W before it was rounded to steps of the header, at each site."""
        return self.weight + self.num_updates * WEIGHT_ERROR


def num_values(words_w: Words, spec: RingSpec) -> int:
    """Number of values in an array of words of this ring.

    Raises:
        ValueError: The array has another type or form.
    """
    dtypes = {spec.wire_dtype} | ({np.dtype(np.uint32)} if spec.bits > 16 else set())  # noqa: PLR2004
    if words_w.dtype not in dtypes or words_w.ndim != 1:
        raise ValueError(
            f"words of a ring of {spec.bits} bits are a flat array of "
            f"{spec.wire_dtype}, not {words_w.dtype}{words_w.shape}"
        )
    if not words_w.flags.c_contiguous:
        raise ValueError("words must be contiguous")
    if words_w.dtype != np.uint8:
        return words_w.size
    size, rest = divmod(words_w.size, spec.word_bytes)
    if rest:
        raise ValueError(f"{words_w.size} bytes are not words of {spec.bits} bits")
    return size


def decode_sum_(
    words_w: Words,
    spec: RingSpec,
    *,
    divisor: float = 1.0,
    held: Inputs | None = None,
    threads: int = 1,
    allocate: Allocate = in_memory,
) -> Vector:
    """Read an unmasked sum of words as float32, in place where the widths agree.

    Args:
        words_w: The sum: ``uint32`` or ``uint16`` as on the wire, or for 24 bits
            either packed or one word per ``uint32`` whose top byte is ignored.
        spec: The ring.
        divisor: What the sum is divided by: the sum of the weights for a mean.
        held: What the sum holds; as much as there is room for by default.
        threads: Ranges to work on at the same time.
        allocate: Makes the result's vector where it needs one of its own.

    Returns:
        The sum over ``scale * divisor``, shape ``(d,)``, rounded once. It is in
        the memory of ``words_w`` if that is ``uint32``.

    Raises:
        SumOutOfRange: A value, or the norm of all, is larger than honest sites may
            make it, or the result is no float32. The memory of ``words_w`` is then to
            be thrown away. Of honest sites it is raised with a probability below
            ``(1 + d) 2^-102``, by what ``RingSpec`` says; without noise the element's
            part of that is 0. A mask left on gives uniform values, whose norm betrays
            it from some ten values on in a ring bounded by norm. A false value within
            the bound is not found.
        ValueError: The array or the divisor is none of the above.
    """
    if not 0 < divisor < math.inf:
        raise ValueError(f"the divisor must be positive and finite, not {divisor}")
    size = num_values(words_w, spec)
    in_place = words_w.dtype == np.uint32
    out_d = words_w.view(np.float32) if in_place else allocate(size)
    step = 1.0 / (spec.scale * divisor)
    held = held or Inputs(num_updates=spec.num_sites, weight=float(spec.num_sites))
    largest = spec.largest_sum(held)
    squares: list[float] = []

    def decode_range(start: int, stop: int) -> None:
        exact_c = np.empty(CHUNK_WORDS, np.float64)
        for begin in range(start, stop, CHUNK_WORDS):
            end = min(begin + CHUNK_WORDS, stop)
            q_c = _signed(words_w, begin, end, spec)
            _check_sum(q_c, begin, largest, held)
            sum_c = np.multiply(q_c, step, out=exact_c[: end - begin])
            squares.append(float(sum_c @ sum_c))
            with np.errstate(over="ignore"):  # Looked at below, in the norm.
                out_d[begin:end] = sum_c
            give_back(words_w[begin:end])
            give_back(out_d[begin:end])

    in_ranges(decode_range, size, threads=threads)
    norm = math.sqrt(math.fsum(squares))
    _check_norm(norm / step, spec.largest_sum_norm(size, held), held)
    if norm > _LARGEST_FLOAT:
        raise SumOutOfRange(f"the mean's norm is {norm:.3g}, beyond float32")
    return out_d


def _signed(
    words_w: Words, begin: int, end: int, spec: RingSpec
) -> NDArray[np.signedinteger]:
    """Values ``[begin, end)`` of a sum, in two's complement."""
    if spec.bits == 32:  # noqa: PLR2004
        return words_w[begin:end].view(np.int32)
    if spec.bits == 16:  # noqa: PLR2004
        return words_w[begin:end].view(np.int16)
    if words_w.dtype == np.uint8:
        wide = np.empty(end - begin, np.uint32)
        unpack_24(words_w[3 * begin : 3 * end], wide)
    else:
        wide = words_w[begin:end].astype(np.uint32)
    wide <<= np.uint32(8)  # The sign goes to the top bit, the idle byte away.
    return wide.view(np.int32) >> 8


def _check_sum(
    q_c: NDArray[np.signedinteger], begin: int, largest: float, held: Inputs
) -> None:
    found = max(int(q_c.max()), -int(q_c.min()))
    if found > largest:
        raise SumOutOfRange(
            f"values [{begin}, {begin + q_c.size}) of the sum reach {found} steps, but "
            f"{_honest(held)} reach at most {largest:.0f}: {A_LIE}"
        )


def _check_norm(norm: float, largest: float, held: Inputs) -> None:
    if not norm <= largest:
        raise SumOutOfRange(
            f"the norm of the sum is {norm:.3g} steps, but {_honest(held)} reach at "
            f"most {largest:.3g}: {A_LIE}"
        )


def _honest(held: Inputs) -> str:
    return f"{held.num_updates} honest sites with a total weight of {held.weight:.6g}"
