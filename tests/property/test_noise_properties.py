"""Properties of noise and rounding, for any scale, size and neighbours."""

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st

from privacy.dp.mechanism import GaussianMechanism
from privacy.dp.noise import MIN_SIGMA, RoundedGaussian
from privacy.dp.poisson import poisson_indices
from privacy.keystream import Keystream

pytestmark = pytest.mark.slow

KEYS = st.binary(min_size=32, max_size=32)
SMALL_SIGMAS = st.floats(MIN_SIGMA, 50.0)


def _release(
    mechanism: GaussianMechanism, sum_d: np.ndarray, key: bytes
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    released = sum_d.astype(np.float64)  # Float32 would round after the noise, too.
    mechanism.release_(released, lambda _size: key)
    return released


@st.composite
def _neighbours(
    draw: st.DrawFn,
) -> tuple[GaussianMechanism, np.ndarray, np.ndarray]:
    """Two float32 sums that differ by at most the clip norm, and often by all of it."""
    size, clip_norm = draw(st.integers(1, 3000)), draw(st.floats(1e-6, 1e6))
    mechanism = GaussianMechanism(
        clip_norm=clip_norm, noise_multiplier=2.0**-15, size=size
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    record_d = draw(
        st.sampled_from([np.eye(1, size)[0], np.ones(size), rng.normal(size=size)])
    )
    record_d = record_d * clip_norm * (1 - 2.0**-16) / np.linalg.norm(record_d)
    if draw(st.booleans()):
        record_d = np.minimum(record_d, mechanism.step / 2)  # Rounded most at random.
    scale = draw(st.sampled_from([0.0, 1.0, 300.0])) * clip_norm / size
    sum_d = (rng.normal(size=size) * scale).astype(np.float32)
    return mechanism, sum_d, (sum_d + record_d).astype(np.float32)


@pytest.mark.slow
@settings(max_examples=300)
@given(neighbours=_neighbours(), key=KEYS)
def test_neighbours_stay_within_the_sensitivity(
    neighbours: tuple[GaussianMechanism, np.ndarray, np.ndarray], key: bytes
):
    """With the same dither and noise: only the record's own rounding is left."""
    mechanism, sum_d, other_d = neighbours
    distance = np.linalg.norm(sum_d.astype(np.float64) - other_d)
    assume(distance <= mechanism.clip_norm)
    released_d = _release(mechanism, sum_d, key) - _release(mechanism, other_d, key)
    assert np.linalg.norm(released_d) <= mechanism.sensitivity


@settings(max_examples=20)
@given(sigma=SMALL_SIGMAS, key=KEYS, size=st.integers(0, 40_000))
def test_words_and_integers_get_the_same_noise(sigma: float, key: bytes, size: int):
    """Signed or not, and within the range that is stated."""
    gaussian = RoundedGaussian(sigma=sigma)
    signed, words = np.zeros(size, np.int32), np.zeros(size, np.uint32)
    gaussian.add_(signed, Keystream(key))
    gaussian.add_(words, Keystream(key))
    assert words.view(np.int32).tolist() == signed.tolist()
    assert max(map(abs, signed.tolist()), default=0) <= gaussian.largest


@given(
    num_records=st.integers(0, 20_000),
    rates=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    key=KEYS,
)
def test_a_higher_rate_chooses_more_of_the_same(
    num_records: int, rates: tuple[float, float], key: bytes
):
    """One stream at two rates: the smaller sample is part of the larger."""
    fewer, more = (
        poisson_indices(num_records, rate, Keystream(key)) for rate in sorted(rates)
    )
    assert set(fewer.tolist()) <= set(more.tolist())
    assert fewer.tolist() == sorted(fewer.tolist())
    assert not more.size or 0 <= more[0] <= more[-1] < num_records
