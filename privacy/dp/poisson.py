"""Poisson sampling of records from the keystream.

Amplification by sampling is a statement about a secret choice: anyone who can repeat
it, from a seed in the job, say, has no noise added to records that were left out.
So it comes from the same kind of stream as the noise.

Shape suffixes: c records of one chunk.
"""

from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from privacy.keystream import SPARE_BYTES, Keystream, aligned

_CHUNK = 1 << 14
_WORD_BYTES = 8
_WORD_BITS = 64


def poisson_indices(
    num_records: int, rate: float, keystream: Keystream
) -> NDArray[np.int64]:
    """Choose every record independently with one probability.

    Poisson sampling as in Abadi et al. (arXiv:1607.00133, section 3.1): the number of
    chosen records varies and may be 0.

    Args:
        num_records: Records to choose from, at least 0.
        rate: Probability of each, in [0, 1].
        keystream: Where the randomness comes from, 8 bytes per record; used for
            nothing that is released.

    Returns:
        Indices of the chosen records in ascending order, shape ``(chosen,)``.

    Guarantee:
        Choices are independent, and the probability is at most ``rate`` and less than
        2^-64 below it; at 1, and at 0, there is nothing left to chance.

    Raises:
        ValueError: ``num_records`` or ``rate`` is out of range.
    """
    if num_records < 0:
        raise ValueError(f"num_records must be at least 0, not {num_records}")
    if not 0 <= rate <= 1:
        raise ValueError(f"a sampling rate must be in [0, 1], not {rate}")
    # Below the threshold is chosen. One word's range ends a step short of rate 1.
    threshold = int(Fraction(rate) * (1 << _WORD_BITS))
    if threshold >> _WORD_BITS:
        return np.arange(num_records, dtype=np.int64)
    raw = aligned(_WORD_BYTES * _CHUNK + SPARE_BYTES, np.uint8)
    chosen = [np.empty(0, np.int64)]
    for start in range(0, num_records, _CHUNK):
        num_bytes = _WORD_BYTES * min(_CHUNK, num_records - start)
        keystream.read_into(raw, num_bytes)
        words_c = raw[:num_bytes].view(np.uint64)
        chosen.append(np.flatnonzero(words_c < np.uint64(threshold)) + start)
    return np.concatenate(chosen)
