"""Noise in the words of a secure sum: where it is, how much, and whose.

Keys are fixed, so that no test fails by chance; the stated rates are those at which
correct noise would have failed when the keys were chosen.
"""

import math
import os

import numpy as np
import pytest
import torch
from support.secagg_parties import entropy

from privacy.dp.noise import MAX_SIGMA, RingNoise
from privacy.keystream import CHUNK_WORDS, Mask
from privacy.secagg.arithmetic.accumulator import MaskedSum
from privacy.secagg.arithmetic.noise_shares import NoiseShare
from privacy.secagg.arithmetic.ring import RingSpec
from privacy.secagg.arithmetic.seal import seal_

SIZE = 1 << 20
TOLERANCE = 7 * math.sqrt(2 / SIZE)  # Of a variance: false alarm 3e-12.


def _noise(std: float, seed: str, *, spans=((0, SIZE),)) -> RingNoise:  # noqa: ANN001
    return RingNoise(noise_std=std, spans=spans, random_bytes=entropy(seed))


def _drawn(std: float, seed: str, size: int = SIZE) -> np.ndarray:
    words = np.zeros(size, np.int32)
    _noise(std, seed).open(size)(words, 0)
    return words.astype(np.float64)


def _ring(num_sites: int = 4, bits: int = 32) -> RingSpec:
    share = NoiseShare(
        multiplier=2.0,
        sensitivity=1.0,
        size=SIZE,
        threshold=num_sites,
        colluding=1,
    )
    return share.ring_spec(bits=bits, num_sites=num_sites, clip_norm=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("std", [4.0, 700.0, 2.0e5, MAX_SIGMA, 1.2e8])
def test_variance_and_shape_of_one_share(std: float):
    """Also of what takes several draws: nothing beyond MAX_SIGMA is refused."""
    noise_d = _drawn(std, "variance")
    found = noise_d @ noise_d / SIZE / std**2
    assert 1 - TOLERANCE < found < 1 + TOLERANCE + 1 / (12 * std**2)
    assert abs(noise_d.mean()) < 6 * std / math.sqrt(SIZE)
    within = (np.abs(noise_d) < std).mean()
    # Rounding to whole steps moves the edges by up to half a step.
    assert abs(within - 0.6827) < 0.003 + 0.25 / std


@pytest.mark.slow
@pytest.mark.parametrize("bits", [24, 32])
@pytest.mark.parametrize("num_present", [4, 3])
def test_sum_of_masked_updates_holds_everybodys_noise(bits: int, num_present: int):
    """And nobody else's: one that dropped out of four takes its own with it."""
    ring = _ring(4, bits)
    total, sum_d = MaskedSum(SIZE, ring), np.zeros(SIZE)
    rng = np.random.default_rng(1)
    keys = [rng.bytes(32) for _ in range(num_present)]
    for site, key in enumerate(keys):
        update_d = rng.normal(scale=5e-4, size=SIZE).astype(np.float32)
        sum_d += update_d  # Its norm is 0.5: it is not clipped.
        sealed = seal_(
            update_d,
            ring,
            weight=1.0,
            masks=[Mask(key=key, sign=1)],
            rounding_key=key,
            noise=_noise(ring.noise_std, f"site {site}"),
        )
        total.fold_(sealed.words_w)
    total.apply_masks_([Mask(key=key, sign=-1) for key in keys])
    noise_d = (total.decode().astype(np.float64) - sum_d) * ring.scale
    expected = num_present * ring.noise_std**2
    assert abs(noise_d @ noise_d / SIZE / expected - 1) < TOLERANCE
    assert 3 * ring.noise_std**2 >= (2.0 * ring.scale) ** 2


@pytest.mark.slow
def test_values_outside_the_spans_stay_as_they_are():
    """Spans begin and end within chunks, at their edges, and go over several."""
    size = 3 * CHUNK_WORDS + 500
    spans = (
        (3, 7),
        (100, CHUNK_WORDS),
        (CHUNK_WORDS + 1, 2 * CHUNK_WORDS + 90),
        (size - 1, size),
    )
    ring = _ring()
    sealed = seal_(
        np.zeros(size, np.float32),
        ring,
        weight=1.0,
        masks=(),
        rounding_key=bytes(32),
        noise=_noise(ring.noise_std, "spans", spans=spans),
        threads=3,
    )
    words = sealed.words_w.view(np.int32)
    inside = np.zeros(size, bool)
    for start, stop in spans:
        inside[start:stop] = True
    assert not words[~inside].any()
    assert (words[inside] != 0).all()
    assert abs(words[inside].std() / ring.noise_std - 1) < 0.03


def test_every_thread_and_every_call_draws_its_own():
    """Ranges of threads have keys of their own, and so has the same site next time."""
    size, keys = 8 * CHUNK_WORDS, []
    ring, source = _ring(), entropy("keys")

    def random_bytes(count: int) -> bytes:
        keys.append(source(count))
        return keys[-1]

    noise = RingNoise(
        noise_std=ring.noise_std, spans=((0, size),), random_bytes=random_bytes
    )
    found = [
        seal_(
            np.zeros(size, np.float32),
            ring,
            weight=1.0,
            masks=(),
            rounding_key=bytes(32),
            noise=noise,
            threads=threads,
        ).words_w.view(np.int32)
        for threads in (2, 2, 1)
    ]
    assert len(set(keys)) == len(keys) == 5
    assert {len(key) for key in keys} == {32}
    parts = [half for words in found for half in np.split(words, 2)]
    correlation = np.corrcoef(np.array(parts, np.float64))
    others = correlation - np.eye(len(parts))
    assert np.abs(others).max() < 5 / math.sqrt(size / 2)  # False alarm 1e-5.


def test_no_seed_repeats_noise():
    """Sites that share every seed draw from the operating system."""
    drawn = []
    for _ in range(2):
        before = np.random.get_state(legacy=False), torch.get_rng_state()  # noqa: NPY002
        words = np.zeros(1000, np.int32)
        noise = RingNoise(noise_std=50.0, spans=((0, 1000),), random_bytes=os.urandom)
        noise.open(1000)(words, 0)
        drawn.append(words)
        after = np.random.get_state(legacy=False), torch.get_rng_state()  # noqa: NPY002
        assert str(before[0]) == str(after[0])
        assert torch.equal(before[1], after[1])
    assert (drawn[0] != drawn[1]).mean() > 0.9


def test_noise_that_is_not_the_rings_is_refused():
    """More, less, or none where some is asked for."""
    ring = _ring()
    for noise in (None, _noise(ring.noise_std * 1.01, "x"), _noise(4.0, "x")):
        with pytest.raises(ValueError, match="planned for noise of"):
            seal_(
                np.zeros(10, np.float32),
                ring,
                weight=1.0,
                masks=(),
                rounding_key=bytes(32),
                noise=noise,
            )
