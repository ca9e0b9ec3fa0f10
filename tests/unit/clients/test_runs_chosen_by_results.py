"""What the budget of all runs does not cover: a next run that results have chosen."""

from itertools import starmap

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from clients.privacy.ledger_memory import LifetimeBudget, RememberedLedger, check_plan
from clients.privacy.site_memory import InMemory
from federation.clock import VirtualClock
from privacy.dp.events import PrivacyEvent
from privacy.dp.ledger.ledger import InMemoryLedger
from privacy.dp.ledger.ledger_format import Terms

Values = NDArray[np.float64]

EPSILON, DELTA = 2.0, 1e-6
FIRST = 4.0  # Noise multiplier of the first run: one step of all records.
# Noise multiplier and sampling rate: runs of one step, of which either fits.
NEXT = ((2.69, 1.0), (0.658, 0.01))


def _event(noise: float, rate: float = 1.0) -> PrivacyEvent:
    return PrivacyEvent(noise_multiplier=noise, sampling_rate=rate, steps=1)


def _terms(run: str) -> Terms:
    return Terms(
        run_id=run, site="one", job_digest="ab" * 32, delta=DELTA, epsilon_cap=EPSILON
    )


def _delta(noise: float, rate: float, epsilons: Values) -> Values:
    """Hockey-stick divergence of a sampled Gaussian from the one without the record.

    The exact smallest delta of one step, if a record is there or not:
    ``(1 - q) N(0, s^2) + q N(1, s^2)`` against ``N(0, s^2)``.
    """
    share = np.expm1(epsilons) / rate + 1  # Of the densities where the loss is epsilon.
    x = noise**2 * np.log(np.maximum(share, 1e-300)) + 0.5
    without, present = ndtr(-x / noise), ndtr((1 - x) / noise)
    return (1 - rate) * without + rate * present - np.exp(epsilons) * without


def test_results_that_choose_the_next_run_exceed_delta():
    """Either run fits, so it is accepted; the better of the two after each result.

    By privacy losses: that of the first run is normal, and what it leaves of epsilon
    decides which run reveals more.
    """
    memory = InMemory()
    budget = LifetimeBudget(dataset="records", epsilon=EPSILON, delta=DELTA)
    first = InMemoryLedger(_terms("first"), clock=VirtualClock(1e9))
    RememberedLedger(first, memory, budget).charge(_event(FIRST), round_index=1)
    for chosen in starmap(_event, NEXT):
        check_plan(memory, budget, _terms("next"), [chosen])

    spread = 1 / FIRST
    losses = spread**2 / 2 + spread * np.linspace(-12, 12, 24_001)
    weights = np.diff(ndtr((losses - spread**2 / 2) / spread), append=1.0)
    left = np.array([_delta(*each, EPSILON - losses) for each in NEXT])
    for alone in left @ weights:
        assert alone < DELTA
    assert 1.6 * DELTA < left.max(axis=0) @ weights < 1.7 * DELTA
