"""Losses of one step agree with dp-accounting, cell by cell and for both directions."""

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution

from privacy.dp.one_step import distributions


@pytest.mark.parametrize(
    ("noise", "rate", "width"),
    [
        (1.1, 256 / 60000, 1e-3),
        (0.56, 1e-4, 1e-3),
        (2.0, 0.05, 1e-3),
        (0.3, 0.5, 1e-2),
        (50.0, 0.9, 1e-4),
        (10.0, 1.0, 1e-3),
        (0.05, 0.01, 0.05),
        (0.02, 0.3, 0.05),
    ],
)
def test_losses_are_those_of_the_library(noise: float, rate: float, width: float):
    """Up to what a unit in the last place of a divergence makes of a cell."""
    found = distributions(noise, rate, width)
    want = privacy_loss_distribution.from_gaussian_mechanism(
        standard_deviation=noise,
        sampling_prob=rate,
        value_discretization_interval=width,
    )
    for own, theirs in zip(found, (want._pmf_remove, want._pmf_add), strict=True):
        dense = theirs.to_dense_pmf()
        assert own.lowest == dense._lower_loss
        rounding = 16 * np.finfo(np.float64).eps / width
        np.testing.assert_allclose(own.probs, dense._probs, rtol=0, atol=rounding)
        assert own.infinite == pytest.approx(dense._infinity_mass, rel=1e-6)


def test_a_step_without_noise_to_speak_of_still_has_cells():
    """Or with so much that all of its losses are in one cell."""
    for noise in (0.02, 1e5):
        removed, added = distributions(noise, 1e-6, 0.05)
        for losses in (removed, added):
            total = float(losses.probs.sum()) + losses.infinite
            assert total == pytest.approx(1.0, abs=1e-9)
