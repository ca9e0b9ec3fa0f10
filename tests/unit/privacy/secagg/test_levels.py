"""Few levels: plans, a site's half, and the decoding of a sum."""

import math
from typing import Any

import numpy as np
import pytest
from support.secagg_parties import Parties

from clients.privacy.level_seal import check_divisor, check_plan
from federation.compression.rotation import BLOCK_VALUES, num_blocks, padded
from federation.errors import ProtocolError
from federation.job.privacy_job import LEVELS
from privacy.keystream import Mask
from privacy.secagg.arithmetic.digits import Digits
from privacy.secagg.arithmetic.level_sum import LevelSum, rotation_of
from privacy.secagg.arithmetic.levels import (
    CLIP,
    ERROR,
    KEPT,
    LevelPlan,
    LevelSite,
    SealedLevels,
    first_plan,
    largest_step,
    largest_sum_norm,
    most_energy,
    next_plan,
    open_levels,
    return_,
)
from privacy.secagg.arithmetic.ring import SumOutOfRange, UpdateNotFinite

CLIP_NORM = 1.0
ROTATION = rotation_of("run-1")
EVERY_LEVEL = pytest.mark.parametrize("levels", LEVELS)
SIZE = 5 * BLOCK_VALUES - 77


def update(seed: int, *, size: int = SIZE, norm: float = 0.5) -> np.ndarray:
    drawn = np.random.default_rng(seed).standard_normal(size)
    return (drawn * norm / np.linalg.norm(drawn)).astype(np.float32)


def plan_for(levels: int, *, size: int = SIZE, norm: float = 0.5) -> LevelPlan:
    """What follows from sums in which each site has rounded so much."""
    found = next_plan(
        levels,
        energies_b=np.ones(num_blocks(size)),
        variance=norm**2 / padded(size),
    )
    assert found is not None
    return found


def site(plan: LevelPlan, *, num_sites: int = 4, clip_norm: float = 1.0) -> LevelSite:
    digits = Digits(levels=plan.levels, num_sites=num_sites)
    return LevelSite(plan=plan, digits=digits, rotation=ROTATION, clip_norm=clip_norm)


def seal(
    plan: LevelPlan, update_d: np.ndarray, residual_d: np.ndarray, **named: Any
) -> SealedLevels:
    values: dict[str, Any] = {"weight": 1.0, "masks": ()}
    return site(plan).seal_(update_d, residual_d=residual_d, **(values | named))


def empty(size: int = SIZE) -> np.ndarray:
    return np.zeros(padded(size), np.float32)


def rotated(update_d: np.ndarray) -> np.ndarray:
    whole = empty(update_d.size)
    whole[: update_d.size] = update_d
    return ROTATION.forward(whole.copy(), out=whole)


def opened(
    plan: LevelPlan, words: list[np.ndarray], *, divisor: float = 1.0, size: int = SIZE
) -> np.ndarray:
    total_w = np.sum(words, axis=0, dtype=np.uint64)
    return open_levels(
        total_w,
        plan=plan,
        digits=Digits(levels=plan.levels, num_sites=4),
        rotation=ROTATION,
        size=size,
        num_updates=len(words),
        divisor=divisor,
    ).mean_d


@EVERY_LEVEL
def test_error_is_that_of_the_formula(levels: int):
    """Of Gaussian values, at the step that follows from their variance: Max 1960."""
    size = 64 * BLOCK_VALUES
    update_d, residual_d = update(1, size=size), empty(size)
    sealed = seal(plan_for(levels, size=size), update_d, residual_d)
    error = np.square(residual_d.astype(np.float64)).sum() / 0.5**2
    assert error == pytest.approx(ERROR[levels], rel=0.04)
    assert sealed.energy == pytest.approx(0.5**2, rel=1e-3)


@EVERY_LEVEL
def test_digit_and_residual_are_those_of_the_formula(levels: int):
    """n = clip(rint(u / s + (L - 1) / 2)), q = (n - (L - 1) / 2) s and e = u - q."""
    plan, update_d, residual_d = plan_for(levels), update(2), rotated(update(3))
    u_d = (rotated(update_d * np.float32(0.25)) + residual_d).astype(np.float64)
    steps_d = np.repeat(plan.steps_b.astype(np.float64), BLOCK_VALUES)
    n_d = np.clip(np.rint(u_d / steps_d + (levels - 1) / 2), 0, levels - 1)
    sealed = seal(plan, update_d, residual_d, weight=0.25)
    digits = Digits(levels=levels, num_sites=4)
    found_d = np.empty(padded(SIZE), np.float32)
    for group in digits.groups(SIZE):
        part = slice(group.begin, group.end)
        digits.unpack(sealed.words_w[group.first : group.last], found_d[part])
    # A value in the middle of two levels may be rounded to either, in float32.
    differs = found_d != n_d
    assert differs.mean() < 1e-3
    q_d = (found_d - (levels - 1) / 2) * steps_d
    np.testing.assert_allclose(u_d - q_d, residual_d, atol=1e-7)


@EVERY_LEVEL
def test_errors_are_fed_back(levels: int):
    """What was sent in all rounds, and what is left, is what was computed."""
    residual_d, sent_d, given_d = empty(), np.zeros(SIZE), np.zeros(SIZE)
    for index in range(6):
        update_d = update(index, norm=0.1 * (1 + index))
        sealed = seal(plan_for(levels), update_d, residual_d)
        sent_d += opened(plan_for(levels), [sealed.words_w])
        given_d += update_d
    left_d = ROTATION.backward(residual_d.copy(), np.ones(5), exact=False)[:SIZE]
    np.testing.assert_allclose(given_d, sent_d + left_d, atol=2e-6)
    assert np.abs(left_d).max() > 1e-4


@EVERY_LEVEL
def test_words_that_did_not_count_come_back(levels: int):
    """The residual then is what was to be sent, the old residual included."""
    before_d = rotated(update(4, norm=0.3))
    residual_d = before_d.copy()
    plan = plan_for(levels)
    sealed = seal(plan, update(5), residual_d)
    digits = Digits(levels=levels, num_sites=4)
    return_(residual_d, sealed.words_w, plan=plan, digits=digits)
    np.testing.assert_allclose(before_d + rotated(update(5)), residual_d, atol=1e-6)


@pytest.mark.parametrize("num_updates", [3, 4])
@EVERY_LEVEL
def test_mean_is_that_of_the_updates(levels: int, num_updates: int):
    """But for the residuals of those in the sum, whoever is missing."""
    plan, divisor = plan_for(levels), 0.5 * num_updates
    words, left_d, given_d = [], np.zeros(padded(SIZE)), np.zeros(SIZE)
    for index in range(num_updates):
        residual_d = empty()
        sealed = seal(plan, update(index), residual_d, weight=0.5)
        words.append(sealed.words_w)
        left_d += residual_d
        given_d += 0.5 * update(index)
    found_d = opened(plan, words, divisor=divisor)
    back_d = ROTATION.backward(left_d.astype(np.float32), np.ones(5), exact=False)
    np.testing.assert_allclose((given_d - back_d[:SIZE]) / divisor, found_d, atol=1e-6)


@pytest.mark.parametrize(("levels", "num_sites"), [(256, 16), (256, 64), (4, 4)])
def test_means_are_exact_on_both_sides_of_float32(levels: int, num_sites: int):
    """As products in float64 have it, bit for bit; of these see the rotation."""
    size = 16 * BLOCK_VALUES
    digits = Digits(levels=levels, num_sites=num_sites)
    most = num_sites * (levels - 1)
    is_exact = BLOCK_VALUES * most < 1 << 24
    assert is_exact == (num_sites < 64)
    drawn = np.random.default_rng(0).integers(0, most, size, endpoint=True)
    drawn[: size // 2] = most
    # Sums that float32 would round, at the end of each of these blocks.
    drawn[: size // 2 : BLOCK_VALUES] -= np.arange(1, 9)
    words_w = np.empty(digits.num_words(size), np.uint64)
    for group in digits.groups(size):
        part = drawn[group.begin : group.end].astype(np.float32)
        # Sums may be packed as digits are: they are below the base.
        digits.pack(part, words_w[group.first : group.last])
    steps_b = np.linspace(1e-3, 0.1, 16).astype(np.float32)
    found = open_levels(
        words_w,
        plan=LevelPlan(levels=levels, steps_b=steps_b),
        digits=digits,
        rotation=ROTATION,
        size=size,
        num_updates=num_sites,
        divisor=3.0,
    )
    numbers = 2 * drawn - most
    for b, step in enumerate(steps_b.astype(np.float64)):
        block = slice(b * BLOCK_VALUES, (b + 1) * BLOCK_VALUES)
        given = numbers[block].astype(np.float32)
        worth = np.array([step / 2 / 3.0])
        expected = ROTATION.backward(given, worth, exact=False)
        assert expected.tobytes() == found.mean_d[block].tobytes()
        squares = float(np.square(numbers[block] * (step / 2)).sum())
        assert squares == pytest.approx(found.energies_b[b], rel=1e-12)


def test_masked_words_are_the_words_plus_the_stream():
    """And are nothing else: one word of the stream hides 17 values."""
    plan = plan_for(4)
    key = bytes(range(32))
    plain = seal(plan, update(0), empty())
    hidden = seal(plan, update(0), empty(), masks=[Mask(key=key, sign=1)])
    assert np.array_equal(plain.words_w, hidden.words_w)
    assert np.array_equal(plain.words_w, plain.masked_w)
    stream_w = hidden.masked_w - hidden.words_w
    assert np.unique(stream_w).size == stream_w.size
    undone = seal(plan, update(0), empty(), masks=[Mask(key=key, sign=-1)])
    assert np.array_equal(stream_w, undone.words_w - undone.masked_w)


def test_update_beyond_the_clip_norm_is_scaled_down():
    """Before the residual is added; its header says so of nobody."""
    sealed = seal(plan_for(256, norm=1.0), update(1, norm=7.0), empty())
    assert not sealed.is_within
    assert sealed.energy == pytest.approx(1.0, rel=1e-3)


def test_update_that_is_not_finite_leaves_the_residual_as_it_was():
    """The site declines, and the next round adds it."""
    residual_d, wrong_d = rotated(update(1)), update(2)
    wrong_d[5] = np.nan
    before_d = residual_d.copy()
    with pytest.raises(UpdateNotFinite):
        seal(plan_for(4), wrong_d, residual_d)
    assert np.array_equal(before_d, residual_d)


def test_residual_is_limited():
    """So that squares and sums of honest sites have bounds."""
    residual_d = rotated(update(1, norm=50.0))
    sealed = seal(plan_for(4), update(2, norm=0.1), residual_d)
    assert sealed.energy == pytest.approx(KEPT**2, rel=0.1)
    assert sealed.energy <= most_energy(1)
    kept_d = rotated(update(1, norm=0.99 * KEPT))
    sealed = seal(plan_for(256, norm=KEPT), np.zeros(SIZE, np.float32), kept_d)
    assert sealed.energy == pytest.approx((0.99 * KEPT) ** 2, rel=1e-3)


# --- Plans ---------------------------------------------------------------------


def test_first_plan_holds_what_is_spread_evenly():
    """No value of an update at the clip norm is beyond the levels."""
    plan = first_plan(SIZE, num_sites=4, clip_norm=CLIP_NORM)
    assert plan.levels == 16384
    residual_d = empty()
    sealed = seal(plan, update(1, norm=CLIP_NORM), residual_d)
    assert sealed.num_clipped == 0
    assert np.abs(residual_d).max() <= plan.steps_b[0] * 0.51
    assert np.linalg.norm(residual_d) < 2e-3


@EVERY_LEVEL
def test_next_plan_follows_the_spread_of_the_sum(levels: int):
    """Each block has the step of its own variance, and those add up to the whole."""
    energies_b = np.array([1.0, 4.0, 16.0, 0.0])
    plan = next_plan(levels, energies_b=energies_b, variance=0.25)
    assert plan is not None
    assert plan.levels == levels
    sigmas_b = plan.steps_b * (levels - 1) / (2 * CLIP[levels])
    assert sigmas_b[2] / sigmas_b[1] == pytest.approx(2)
    assert sigmas_b[1] / sigmas_b[0] == pytest.approx(2)
    # A block that summed to nothing has a step all the same: sites may differ there.
    assert sigmas_b[3] ** 2 / np.mean(energies_b) == pytest.approx(
        sigmas_b[0] ** 2 / 64, rel=1e-5
    )
    assert np.square(sigmas_b).mean() == pytest.approx(0.25, rel=1e-5)


@pytest.mark.parametrize(("energy", "variance"), [(0.0, 1.0), (1.0, 0.0)])
def test_sum_of_nothing_plans_nothing(energy: float, variance: float):
    """The plan before it stays in force."""
    energies_b = np.full(3, energy)
    assert next_plan(4, energies_b=energies_b, variance=variance) is None


def test_steps_have_a_floor():
    """Sums may become smaller than any number of float32."""
    plan = next_plan(4, energies_b=np.ones(2), variance=1e-90)
    assert plan is not None
    assert (plan.steps_b == np.finfo(np.float32).tiny).all()
    sealed = seal(plan, update(1, size=BLOCK_VALUES + 1), empty(2 * BLOCK_VALUES))
    assert sealed.num_clipped == 2 * BLOCK_VALUES


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, 1e-45])
def test_steps_that_nothing_can_be_divided_by_are_refused(value: float):
    """Whoever sent them."""
    with pytest.raises(ValueError, match="positive, finite number"):
        LevelPlan(levels=4, steps_b=np.array([1.0, value], np.float32))


@pytest.mark.parametrize("steps_b", [np.ones(2), np.ones((1, 2), np.float32)])
def test_steps_of_another_form_are_refused(steps_b: np.ndarray):
    """They are flat, and float32."""
    with pytest.raises(ValueError, match="flat float32"):
        LevelPlan(levels=4, steps_b=steps_b)


def test_digest_is_of_levels_and_steps():
    """Each of them changes it."""
    steps_b = np.array([1.0, 2.0], np.float32)
    found = {
        LevelPlan(levels=levels, steps_b=steps).digest()
        for levels in (3, 4)
        for steps in (
            steps_b,
            steps_b[::-1].copy(),
            np.nextafter(steps_b, np.float32(9)),
        )
    }
    assert len(found) == 6


@EVERY_LEVEL
def test_plans_of_honest_sums_are_within_the_largest_step(levels: int):
    """Even if all that sites may round is in one block of many."""
    energies_b = np.zeros(1000)
    energies_b[3] = 1.0
    variance = most_energy(1) / (1000 * BLOCK_VALUES)
    plan = next_plan(levels, energies_b=energies_b, variance=variance)
    assert plan is not None
    assert plan.steps_b.max() <= largest_step(levels, clip_norm=CLIP_NORM) * 1.001
    for num_sites in (2, 4, 64):
        first = first_plan(1, num_sites=num_sites, clip_norm=CLIP_NORM)
        most = largest_step(first.levels, clip_norm=CLIP_NORM)
        assert first.steps_b.max() <= most


# --- What a site and the aggregator refuse -------------------------------------

CONTRACT = Parties(4).contract(levels=4, num_values=SIZE, threshold=4)


def with_step(value: float) -> LevelPlan:
    steps_b = plan_for(4).steps_b.copy()
    steps_b[2] = value
    return LevelPlan(levels=4, steps_b=steps_b)


@pytest.mark.parametrize(
    ("plan", "trains", "said"),
    [
        (None, True, "no levels to round"),
        (plan_for(4), False, r"round to 4 levels, .*contract says 4"),
        (plan_for(8), True, r"round to 8 levels, .*contract says 4"),
        (plan_for(4, size=1), True, "1 steps for 5 blocks"),
        (with_step(1e6), True, r"a step of 1e\+06, .*at most 0\.06"),
    ],
)
def test_plan_against_the_contract_is_refused(
    plan: LevelPlan | None, *, trains: bool, said: str
):
    """Before anything is trained."""
    with pytest.raises(ProtocolError, match=said):
        check_plan(CONTRACT, plan, round_index=1, trains=trains)


def test_plan_of_the_contract_is_taken():
    """Its levels, or those of 16 bits; and none where nothing is trained."""
    check_plan(CONTRACT, plan_for(4), round_index=1, trains=True)
    first = first_plan(SIZE, num_sites=4, clip_norm=CONTRACT.clip_norm)
    check_plan(CONTRACT, first, round_index=1, trains=True)
    check_plan(CONTRACT, None, round_index=1, trains=False)
    ring = Parties(4).contract()
    with pytest.raises(ProtocolError, match="the contract says none"):
        check_plan(ring, plan_for(4), round_index=1, trains=True)


@pytest.mark.parametrize("divisor", [0.0, -1.0, math.nan, math.inf, 0.0003, 4.001])
def test_divisor_of_no_honest_weights_is_refused(divisor: float):
    """Four updates weigh from 4 / 10,000 to 4."""
    check_divisor(CONTRACT, 4, 4.0)
    check_divisor(CONTRACT, 4, 0.0004)
    with pytest.raises(ProtocolError, match="weights of 4 updates sum to"):
        check_divisor(CONTRACT, 4, divisor)


@pytest.mark.parametrize("divisor", [3.5, 4.5])
def test_equal_weights_are_known(divisor: float):
    """Each of them is 1."""
    uniform = Parties(4).contract(levels=4, weight_rule="uniform", max_examples=1)
    check_divisor(uniform, 4, 4.0)
    with pytest.raises(ProtocolError, match="weights of 4 updates sum to"):
        check_divisor(uniform, 4, divisor)


def level_sum(plan: LevelPlan, words: list[np.ndarray]) -> LevelSum:
    total = LevelSum(SIZE, plan, num_sites=4, rotation=ROTATION, clip_norm=CLIP_NORM)
    for words_w in words:
        total.fold_(words_w.view(np.uint8))
    return total


@EVERY_LEVEL
def test_honest_sums_are_within_their_bound(levels: int):
    """Also if all sites agree, at the clip norm, with all the residual there may be."""
    plan = plan_for(levels, norm=1 + KEPT)
    words = [
        seal(plan, update(1, norm=1.0), rotated(update(1, norm=KEPT))).words_w
        for _ in range(4)
    ]
    total = level_sum(plan, words)
    total.decode(divisor=4.0, weight=4.0)
    norm = math.sqrt(total.energies_b.sum())
    most = largest_sum_norm(plan, num_updates=4, weight=4.0, clip_norm=CLIP_NORM)
    assert 0.5 * most < norm < most


def test_sum_beyond_the_bound_is_refused():
    """In the first round all digits together reach 16 clip norms for each site."""
    plan = first_plan(SIZE, num_sites=4, clip_norm=CLIP_NORM)
    honest = [seal(plan, update(i), empty()).words_w for i in range(3)]
    digits = Digits(levels=plan.levels, num_sites=4)
    top_v = np.full(padded(SIZE), plan.levels - 1, np.float32)
    lie_w = np.empty(digits.num_words(SIZE), np.uint64)
    for group in digits.groups(SIZE):
        part = lie_w[group.first : group.last]
        digits.pack(top_v[group.begin : group.end], part)
    lie_w *= np.uint64(4)  # All of the sum's digits, less those of the others.
    lie_w -= np.sum(honest, axis=0, dtype=np.uint64)
    level_sum(plan, [*honest, seal(plan, update(3), empty()).words_w]).decode(
        divisor=4.0, weight=4.0
    )
    with pytest.raises(
        SumOutOfRange, match=r"has a norm of .* at most .*: a site lied"
    ):
        level_sum(plan, [*honest, lie_w]).decode(divisor=4.0, weight=4.0)


def test_digit_of_more_sites_than_answered_is_refused():
    """A digit that N sites could reach, but not the n in the sum."""
    plan = plan_for(4)
    digits = Digits(levels=4, num_sites=4)
    words = [seal(plan, update(i), empty()).words_w.copy() for i in range(3)]
    for words_w in words:
        words_w[:] = 0
    words[0][3] = 10 * digits.base
    with pytest.raises(SumOutOfRange, match=r"is 10, but honest sites .*at most 9"):
        opened(plan, words)


def test_sum_takes_no_more_updates_than_have_room():
    """Nor any of another length."""
    plan = plan_for(4)
    total = level_sum(plan, [seal(plan, update(i), empty()).words_w for i in range(4)])
    words = seal(plan, update(0), empty()).words_w.view(np.uint8)
    with pytest.raises(ValueError, match="already holds all 4 updates"):
        total.fold_(words)
    with pytest.raises(ValueError, match="are not"):
        level_sum(plan, []).fold_(words[:-8])
    with pytest.raises(ValueError, match="has not been opened"):
        _ = level_sum(plan, []).energies_b


@pytest.mark.parametrize("step", [2e-38, 1e-3, 0.5])
def test_sum_does_not_say_which_site_has_which_update(step: float):
    """Whatever the steps: two sites that swap what they round give the same words.

    So no steps single out a site. What a sum says of one, it says of all alike.
    """
    plan = LevelPlan(levels=4, steps_b=np.full(5, step, np.float32))
    sealed = [seal(plan, update(i), rotated(update(i + 9))).words_w for i in range(4)]
    swapped = [sealed[i] for i in (2, 0, 3, 1)]
    first, second = (opened(plan, words) for words in (sealed, swapped))
    assert first.tobytes() == second.tobytes()


def test_outermost_digits_of_a_sum_are_those_of_each_site():
    """What few levels tell and a linear sum does not; the threat model says so."""
    plan = LevelPlan(levels=4, steps_b=np.full(5, 2e-38, np.float32))
    updates = [update(i) for i in range(4)]
    words = [seal(plan, update_d, empty()).words_w for update_d in updates]
    digits, found = Digits(levels=4, num_sites=4), np.empty(padded(SIZE), np.float32)
    total_w = np.sum(words, axis=0, dtype=np.uint64)
    (group,) = digits.groups(SIZE)
    digits.unpack(total_w[group.first : group.last], found)
    signs = np.sign([rotated(update_d) for update_d in updates])
    known = found == 12
    assert (signs[:, known] == 1).all()
    assert known.mean() == pytest.approx(1 / 16, rel=0.1)
