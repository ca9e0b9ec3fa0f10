"""Masked sums in files: the same bits as in memory, and next to nothing of it there."""

from pathlib import Path

import numpy as np
import pytest
from support.resident import resident_bytes

from cloud_adapters.storage.disk.scratch import ScratchVectors
from federation.compression.rotation import num_blocks, padded
from federation.vectors import Allocate, Vector, in_memory
from privacy.keystream import CHUNK_WORDS, Mask, apply_masks_
from privacy.secagg.arithmetic.accumulator import MaskedSum
from privacy.secagg.arithmetic.digits import Digits
from privacy.secagg.arithmetic.level_sum import LevelSum, rotation_of
from privacy.secagg.arithmetic.levels import LevelSite, next_plan, return_
from privacy.secagg.arithmetic.ring import RingSpec
from privacy.secagg.arithmetic.seal import seal_

SIZE, SITES, CLIP_NORM = 2 * CHUNK_WORDS + 100, 2, 1.0
MASK = Mask(key=bytes(range(32)), sign=1)
ROTATION = rotation_of("run")


def update(seed: int) -> Vector:
    drawn = np.random.default_rng(seed).standard_normal(SIZE)
    return (drawn / (2 * np.linalg.norm(drawn))).astype(np.float32)


def ring_sum(bits: int, allocate: Allocate) -> MaskedSum:
    ring = RingSpec(bits=bits, num_sites=SITES, clip_norm=CLIP_NORM)
    total = MaskedSum(SIZE, ring, allocate=allocate)
    for seed in range(SITES):
        sealed = seal_(
            update(seed), ring, weight=1.0, masks=[MASK], rounding_key=bytes(32)
        )
        total.fold_(sealed.words_w)
    return total


def level_sum(allocate: Allocate) -> LevelSum:
    energies_b = np.ones(num_blocks(SIZE))
    plan = next_plan(4, energies_b=energies_b, variance=0.25 / padded(SIZE))
    assert plan is not None
    digits = Digits(levels=4, num_sites=SITES)
    site = LevelSite(plan=plan, digits=digits, rotation=ROTATION, clip_norm=CLIP_NORM)
    total = LevelSum(
        SIZE,
        plan,
        num_sites=SITES,
        rotation=ROTATION,
        clip_norm=CLIP_NORM,
        allocate=allocate,
    )
    for seed in range(SITES):
        left_d = np.zeros(padded(SIZE), np.float32)
        sealed = site.seal_(update(seed), weight=1.0, residual_d=left_d, masks=[MASK])
        total.fold_(sealed.masked_w.view(np.uint8))
    return total


def opened(kind: str, allocate: Allocate) -> tuple[bytes, Vector]:
    """Open a sum; its digest, and the mean."""
    total = level_sum(allocate) if kind == "4 levels" else ring_sum(int(kind), allocate)
    total.apply_masks_([Mask(key=MASK.key, sign=-1)] * SITES)
    return total.digest(), total.decode(divisor=2.0, weight=2.0)


@pytest.mark.parametrize("kind", ["16", "24", "32", "4 levels"])
def test_sum_on_disk_has_the_same_bits(kind: str, tmp_path: Path):
    digest, mean_d = opened(kind, ScratchVectors(folder=tmp_path))
    # Parts of the last chunk may stay: the system maps around what is looked at.
    assert resident_bytes(mean_d) < mean_d.nbytes / 2
    wanted, wanted_d = opened(kind, in_memory)
    assert digest == wanted
    assert mean_d.tobytes() == wanted_d.tobytes()
    assert np.linalg.norm(mean_d) > CLIP_NORM / 4


@pytest.mark.parametrize("kind", ["16", "24", "32", "4 levels"])
def test_nothing_of_a_sum_stays_in_memory(kind: str, tmp_path: Path):
    """Neither when updates are added, nor when masks are, nor when it is digested."""
    made: list[Vector] = []
    on_disk = ScratchVectors(folder=tmp_path)

    def allocate(size: int) -> Vector:
        made.append(on_disk(size))
        return made[-1]

    total = level_sum(allocate) if kind == "4 levels" else ring_sum(int(kind), allocate)
    (words,) = made
    for step in (lambda: None, lambda: total.apply_masks_([MASK]), total.digest):
        step()
        assert resident_bytes(words) < words.nbytes / 2


def test_masks_leave_nothing_of_words_in_memory(tmp_path: Path):
    words_w = ScratchVectors(folder=tmp_path)(4 * CHUNK_WORDS).view(np.uint32)
    apply_masks_(words_w, [MASK])
    assert resident_bytes(words_w) < words_w.nbytes / 2
    assert words_w.any()


def test_a_residual_on_disk_takes_words_back_without_staying_in_memory(tmp_path: Path):
    """As after a round whose sum was opened without the site."""
    plan = next_plan(4, energies_b=np.ones(num_blocks(SIZE)), variance=0.25 / SIZE)
    assert plan is not None
    digits = Digits(levels=4, num_sites=SITES)
    site = LevelSite(plan=plan, digits=digits, rotation=ROTATION, clip_norm=CLIP_NORM)
    found = []
    for allocate in (ScratchVectors(folder=tmp_path), in_memory):
        left_d = allocate(padded(SIZE))
        sealed = site.seal_(update(0), weight=1.0, residual_d=left_d, masks=[])
        return_(left_d, sealed.words_w, plan=plan, digits=digits)
        found.append(left_d)
    assert resident_bytes(found[0]) < found[0].nbytes / 2
    assert found[0].tobytes() == found[1].tobytes()
    # All that was rounded is there again: the rotated update.
    assert np.linalg.norm(found[0]) == pytest.approx(np.linalg.norm(update(0)))
