"""Enough handwritten digits for ten thousand sites: the same ones, many times."""

import numpy as np

from clients.data import Examples, digits


def many_digits(records: int) -> tuple[Examples, Examples]:
    """Repeat them until there are so many of either part, or a few more."""
    times = 1 + records // 800
    train, held_out = (
        Examples(
            inputs=np.concatenate([part.inputs] * times),
            targets=np.concatenate([part.targets] * times),
        )
        for part in digits(0.5)
    )
    return train, held_out
