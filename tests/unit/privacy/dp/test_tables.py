"""Noise of tables: as large as stated, and split as stated."""

import math

import numpy as np
import pytest

from privacy.dp.tables import PartNoise, TableMechanism

REPETITIONS = 1000


def mechanism(noise_multiplier: float = 2.0, **most: int) -> TableMechanism:
    share = 1 / len(most)
    parts = {name: PartNoise(most=m, share=share) for name, m in most.items()}
    return TableMechanism(noise_multiplier=noise_multiplier, parts=parts)


def released(noise: TableMechanism, size: int) -> dict[str, np.ndarray]:
    return dict(noise.release({n: np.zeros(size, np.int64) for n in noise.parts}))


def test_noise_is_as_large_as_stated():
    """From a few steps to far more than a draw holds."""
    noise = mechanism(counts=3, sums=7 << 32, products=5050 << 64)
    for name, drawn in released(noise, REPETITIONS).items():
        stated = noise.standard_deviation(name)
        assert drawn.std() == pytest.approx(stated, rel=0.1), name
        assert abs(drawn.mean()) < 5 * stated / math.sqrt(REPETITIONS)
    with pytest.raises(ValueError, match="products"):
        mechanism(products=5050 << 84)


def test_a_table_costs_what_its_multiplier_says_however_it_is_split():
    """A record that changes every part the most is 1 / z away, in its noise."""
    for shares in ((0.5, 0.3, 0.2), (0.98, 0.01, 0.01)):
        most = (9, 100 << 32, 4 << 64)
        parts = {
            str(at): PartNoise(most=m, share=s)
            for at, (m, s) in enumerate(zip(most, shares, strict=True))
        }
        noise = TableMechanism(noise_multiplier=3.0, parts=parts)
        moved = sum(
            part.most / noise.standard_deviation(name) ** 2
            for name, part in parts.items()
        )
        assert moved <= 1 / 3.0**2
        assert moved >= 0.95 / 3.0**2
    with pytest.raises(ValueError, match="more than 1"):
        TableMechanism(
            noise_multiplier=1.0,
            parts={n: PartNoise(most=1, share=0.6) for n in "ab"},
        )
