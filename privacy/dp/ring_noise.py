"""A site's share of the noise inside a secure sum, drawn onto words chunk by chunk.

How large it must be is in ``privacy.secagg.arithmetic.noise_shares``; masking comes
after it.

Shape suffix: c words of one chunk.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from privacy.dp.noise import MAX_SIGMA, RoundedGaussian
from privacy.keystream import KEY_BYTES, open_keystream

_ROUND_UP = 1 + 2.0**-50

_Words = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class RingNoise:
    """Rounded Gaussians for some spans of an update's words.

    A ``privacy.secagg.arithmetic.seal.Noise``. Values outside the spans carry nothing
    of any records and stay as they are. Noise too large for one draw is the sum
    of up to four: of independent draws, as the sum over sites is.

    Attributes:
        noise_std: Standard deviation, in steps of the ring's grid.
        spans: Places ``[start, stop)`` that noise is added to, in order.
        random_bytes: Source of fresh keys, one for each range that is worked on.
    """

    noise_std: float
    spans: Sequence[tuple[int, int]]
    random_bytes: Callable[[int], bytes] = field(repr=False)

    def open(self, num_words: int) -> Callable[[_Words, int], None]:
        """Open a stream with its own key; see ``Noise.open``."""
        num_draws = max(1, math.ceil((self.noise_std / MAX_SIGMA) ** 2))
        part = self.noise_std / math.sqrt(num_draws) * _ROUND_UP
        gaussian = RoundedGaussian(sigma=min(MAX_SIGMA, part))
        keystream = open_keystream(
            self.random_bytes(KEY_BYTES),
            num_bytes=gaussian.bytes_per_draw * num_words * num_draws,
        )

        def add_(words_c: _Words, begin: int) -> None:
            for start, stop in self.spans:
                first, last = max(start - begin, 0), min(stop - begin, words_c.size)
                for _ in range(num_draws if first < last else 0):
                    gaussian.add_(words_c[first:last], keystream)

        return add_
