"""Numbers that are summed in secret beside the update."""

import math

import numpy as np
import pytest

from privacy import keystream as prg
from privacy.keystream import Mask
from privacy.secagg.arithmetic import header
from privacy.secagg.arithmetic.header import HeaderSpec, Slot, SlotKind
from privacy.secagg.arithmetic.ring import SumOutOfRange, UpdateOutOfRange

SPEC = HeaderSpec(
    slots=(
        Slot(name="weight", kind=SlotKind.FRACTION, bound=1),
        Slot(name="loss", kind=SlotKind.FRACTION, bound=1 << 20),
        Slot(name="examples", kind=SlotKind.COUNT, bound=1 << 40),
    ),
    num_sites=3,
)


def _values(site: int) -> dict[str, float]:
    return {"weight": 1 / (site + 3), "loss": -1.7 * site, "examples": 10**9 + site}


def test_sums_are_those_of_the_values():
    """Masked, added and unmasked; fractions to 2^-33 per site, counts exactly."""
    total = np.zeros(3, np.uint64)
    for site in range(3):
        words_s = header.encode_header(SPEC, _values(site))
        mask = Mask(key=bytes([site]) * 32, sign=1)
        prg.apply_masks_(words_s, [mask])
        total += words_s
    for site in range(3):
        prg.apply_masks_(total, [Mask(key=bytes([site]) * 32, sign=-1)])
    sums = header.decode_header(SPEC, total)
    for name in ("weight", "loss"):
        plain = math.fsum(_values(site)[name] for site in range(3))
        assert abs(sums[name] - plain) <= 3 * 2.0**-33 + 1e-15
    assert sums["examples"] == 3 * 10**9 + 3


def test_integers_have_either_sign():
    """As cells of histograms with noise; a count that is negative is a lie."""
    for kind in (SlotKind.INTEGER, SlotKind.COUNT):
        slot = Slot(name="x", kind=kind, bound=9)
        spec = HeaderSpec(slots=(slot,), num_sites=3)
        words_s = header.encode_header(spec, {"x": 5})
        words_s -= np.uint64(12)
        if kind is SlotKind.COUNT:
            with pytest.raises(SumOutOfRange, match="'x' is impossible"):
                header.decode_header(spec, words_s)
        else:
            assert header.decode_header(spec, words_s) == {"x": -7}
            assert header.encode_header(spec, {"x": -7}) == words_s
            with pytest.raises(UpdateOutOfRange, match="bound of 9"):
                header.encode_header(spec, {"x": -10})


def test_layout_of_words():
    """Order of the slots; steps of 2^-32; two's complement."""
    words_s = header.encode_header(SPEC, {"weight": 0.5, "loss": -1.0, "examples": 7})
    assert words_s.tolist() == [1 << 31, (1 << 64) - (1 << 32), 7]


@pytest.mark.parametrize(
    "change",
    [
        {"weight": 1.0001},
        {"weight": -1.0001},
        {"loss": math.nan},
        {"loss": math.inf},
        {"examples": -1},
        {"examples": (1 << 40) + 1},
    ],
)
def test_value_beyond_its_bound_is_refused(change: dict[str, float]):
    """Without telling the value, which is the site's own."""
    with pytest.raises(UpdateOutOfRange):
        header.encode_header(SPEC, _values(0) | change)


@pytest.mark.parametrize(
    "values",
    [
        {"weight": 1.0, "loss": 0.0},
        {"weight": 1.0, "loss": 0.0, "examples": 1, "other": 1},
        {"weight": 1.0, "loss": 0.0, "examples": 1.5},
    ],
)
def test_values_that_do_not_fit_the_slots_are_refused(values: dict[str, float]):
    with pytest.raises(ValueError, match="slot"):
        header.encode_header(SPEC, values)


@pytest.mark.parametrize(
    "words", [[(3 << 32) + 1, 0, 0], [0, 0, 3 * (1 << 40) + 1], [0, 0, (1 << 64) - 1]]
)
def test_sum_beyond_the_sites_is_an_alarm(words: list[int]):
    with pytest.raises(SumOutOfRange):
        header.decode_header(SPEC, np.array(words, np.uint64))


@pytest.mark.parametrize(
    "words_s", [np.zeros(3, np.int64), np.zeros(2, np.uint64), np.zeros((3, 1))]
)
def test_vector_of_another_form_is_refused(words_s: np.ndarray):
    with pytest.raises(ValueError, match="header of 3 slots"):
        header.decode_header(SPEC, words_s)


@pytest.mark.parametrize(
    ("kind", "bound"),
    [(SlotKind.FRACTION, 1 << 31), (SlotKind.COUNT, 1 << 62), (SlotKind.COUNT, 0)],
)
def test_slot_that_could_wrap_is_refused(kind: SlotKind, bound: int):
    with pytest.raises(ValueError, match="bound"):
        HeaderSpec(slots=(Slot(name="x", kind=kind, bound=bound),), num_sites=3)


def test_two_slots_of_one_name_are_refused():
    slot = Slot(name="x", kind=SlotKind.COUNT, bound=1)
    with pytest.raises(ValueError, match="same name"):
        HeaderSpec(slots=(slot, slot), num_sites=3)
