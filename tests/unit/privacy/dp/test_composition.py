"""Composition by Fourier transform against what has a closed form."""

import math

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr

from privacy.dp import composition
from privacy.dp.composition import Mechanism


def closed_form(mu: float, delta: float) -> float:
    """Epsilon of a Gaussian whose sensitivity is ``mu`` standard deviations."""

    def excess(epsilon: float) -> float:
        tail = math.exp(epsilon + log_ndtr(-epsilon / mu - mu / 2))
        return float(ndtr(mu / 2 - epsilon / mu)) - tail - delta

    return float(brentq(excess, 0.0, 100.0, xtol=1e-12))


@pytest.mark.parametrize("steps", [100, 4096, 1 << 16, 1 << 20])
@pytest.mark.parametrize("delta", [1e-4, 1e-6, 1e-8])
def test_many_steps_are_one_gaussian_from_above(steps: int, delta: float):
    """Gaussians composed on the grid, as if it were not known what they come to."""
    mechanism = Mechanism(math.sqrt(steps), 1.0)
    capacity = max(steps, 4096)
    grid = composition._grid(((mechanism, capacity),), delta)
    found = max(
        composition._epsilon(direction, grid.width, {mechanism: steps}, delta)
        for direction in grid.directions
    )
    exact = closed_form(1.0, delta)
    assert exact <= found <= exact * 1.001


def test_rounding_of_steps_is_taken_from_delta():
    """So that no number of steps is counted as if probabilities were exact."""
    mechanism = Mechanism(5.0, 1e-4)
    assert composition.epsilon({mechanism: 10**6}, 4e-10) == math.inf
    assert composition.epsilon({mechanism: 10**4}, 4e-10) < 1


def test_what_only_rounding_can_do_is_not_taken_for_no_loss():
    """Two cells of loss, of which delta leaves the upper one or none."""
    losses = np.array([1.0, 2.0])
    probs = np.array([0.5, 1e-3])
    delta = 1e-3 * (1 + 1e-15)
    found = composition._invert(losses, probs, 0.0, delta)
    assert 0.9 < found <= 1.0
    assert composition._invert(losses, probs, 0.0, 0.9) == 0.0
    assert composition._invert(losses, probs, 0.1, 0.1) == math.inf
