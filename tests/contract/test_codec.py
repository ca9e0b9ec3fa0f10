"""What every codec promises: the round loop and the sites know nothing else of it."""

import itertools
import statistics
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as arrays
from support.examples import few

from aggregator import combine
from federation.compression import change
from federation.compression.apart import Apart
from federation.compression.choice import (
    NAMES,
    CodecOptions,
    codec_of,
    feedback_of,
    unused,
)
from federation.compression.codec import (
    BF16,
    FP16,
    IDENTITY,
    BeyondCodec,
    Codec,
    Links,
    decoded,
    encoded_over,
)
from federation.compression.records import LIMIT
from federation.compression.subset import Subset
from federation.protocols import WeightedUpdate
from federation.vectors import CHUNK_VALUES, Vector, Words

CODECS = [IDENTITY, FP16, BF16]
CHOSEN = [[1, 8, 10, 15], [2, 6, 9, 14]]
LIMITS = {"identity": 3.4e38, "fp16": 65519.0, "bf16": 3.3e38}
each_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)


def vectors(largest: float) -> st.SearchStrategy[Vector]:
    """Vectors of finite values, subnormal ones and both zeros among them."""
    values = st.floats(-largest, largest, width=32)
    return arrays.arrays(np.float32, st.integers(1, 40), elements=values)


def oracle(codec: Codec, vector_d: Vector) -> Vector:
    """The same rounding by code that is not ours."""
    if codec is FP16:
        with np.errstate(over="ignore"):
            return vector_d.astype(np.float16).astype(np.float32)
    if codec is BF16:
        return torch.from_numpy(vector_d).to(torch.bfloat16).to(torch.float32).numpy()
    return vector_d


def same(one: Words, other: Words) -> bool:
    """Bit for bit."""
    return one.dtype == other.dtype and one.tobytes() == other.tobytes()


@each_codec
@given(data=st.data())
def test_values_are_rounded_as_others_round_them(codec: Codec, data: st.DataObject):
    """NumPy's halves and torch's bfloat16, to the bit, the sign of zero too."""
    vector_d = data.draw(vectors(float(np.float32(LIMITS[codec.name]))))
    before_d = vector_d.copy()
    words = codec.encode(vector_d)
    assert words.dtype == codec.dtype
    assert words.size == codec.num_words(vector_d.size)
    assert 8 * words.nbytes == codec.bits_per_value() * vector_d.size
    assert same(decoded(codec, words), oracle(codec, vector_d))
    assert same(vector_d, before_d)


def test_every_upper_half_of_float32_is_a_bf16():
    """All 65,536 of them travel unchanged, but for the numbers that are none."""
    words = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    values_d = decoded(BF16, words)
    finite = np.isfinite(values_d)
    assert finite.sum() == (1 << 16) - 256
    assert same(BF16.encode(values_d[finite]), words[finite])


def test_ties_round_to_even_in_bf16():
    """And the bits beside a tie away from it."""
    bits = np.array([0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001], np.uint32)
    words = BF16.encode(bits.view(np.float32))
    assert words.tolist() == [0x3F80, 0x3F82, 0x3F80, 0x3F81]


@each_codec
@given(data=st.data())
def test_encoding_in_place_gives_the_same_words(codec: Codec, data: st.DataObject):
    """In the vector's own memory, across chunks."""
    part_d = data.draw(vectors(1e4))
    vector_d = np.resize(
        part_d, data.draw(st.sampled_from([1, 7, 2 * CHUNK_VALUES + 3]))
    )
    expected = codec.encode(vector_d.copy())
    words = encoded_over(codec, vector_d)
    assert np.shares_memory(words, vector_d)
    assert same(words, expected)


@each_codec
@given(data=st.data())
def test_a_residual_holds_what_was_left_out(codec: Codec, data: st.DataObject):
    """Vector and old residual are what arrives and the new residual, exactly."""
    vector_d = data.draw(vectors(1e3))
    residual_d = np.resize(data.draw(vectors(1.0)), vector_d.size)
    wanted_d = vector_d + residual_d
    words = codec.encode(vector_d, residual_d=residual_d)
    assert same(decoded(codec, words) + residual_d + 0.0, wanted_d + 0.0)


@each_codec
def test_error_feedback_brings_small_steps_through(codec: Codec):
    """What one round rounds away arrives in a later one."""
    step_d, residual_d = np.float32([1 + 2**-12, 1e-3]), np.zeros(2, np.float32)
    total_d = np.zeros(2)
    for _ in range(1000):
        total_d += decoded(codec, codec.encode(step_d, residual_d=residual_d))
    np.testing.assert_allclose(total_d, 1000 * step_d.astype(np.float64), atol=0.01)


@each_codec
def test_values_are_read_in_chunks_of_any_length(codec: Codec):
    """As a rule that folds them into a sum does."""
    vector_d = np.linspace(-3, 3, 1001, dtype=np.float32)
    words = codec.encode(vector_d)
    values, whole_d = codec.values(words), decoded(codec, words)
    assert (values.size, values.shape) == (1001, (1001,))
    for length in (1, 10, 1000, 1001, 5000):
        parts = [values[s : s + length] for s in range(0, 1001, length)]
        assert same(np.concatenate(parts), whole_d)


@pytest.mark.parametrize("codec", [FP16, BF16], ids=lambda codec: codec.name)
@pytest.mark.parametrize("sign", [1, -1])
def test_nothing_becomes_infinite_on_its_way(codec: Codec, sign: int):
    """The largest value that still rounds to a finite one passes, the next does not."""
    limit = np.float32(codec.limit)  # type: ignore[attr-defined]
    below = np.nextafter(limit, np.float32(0))
    passes_d = np.full(3, sign * below, np.float32)
    assert np.isfinite(decoded(codec, codec.encode(passes_d))).all()
    codec.check(passes_d)
    assert not np.isfinite(oracle(codec, np.float32([sign * limit]))).any()
    for beyond in (sign * limit, np.nan, sign * np.inf):
        vector_d = np.array([0.0, beyond, 1.0], np.float32)
        for refuse in (codec.encode, codec.check):
            with pytest.raises(BeyondCodec, match=rf"does not fit into {codec.name}"):
                refuse(vector_d)


def test_identity_copies_nothing():
    """Neither way."""
    vector_d = np.ones(5, np.float32)
    assert IDENTITY.encode(vector_d) is vector_d
    assert decoded(IDENTITY, vector_d) is vector_d
    assert IDENTITY.values(vector_d) is vector_d


@each_codec
def test_a_codec_is_found_by_its_name(codec: Codec):
    """What the job file says."""
    assert codec_of(codec.name) is codec
    assert codec.shares_support
    assert codec.is_linear == (codec is IDENTITY)


@each_codec
@few(10)  # Of 65,541 values each.
@given(data=st.data())
def test_both_sides_of_a_change_hold_the_same_bits(codec: Codec, data: st.DataObject):
    """As near to the model that was wanted as the codec allows."""
    old_d = np.resize(data.draw(vectors(100.0)), CHUNK_VALUES + 5)
    wanted_d = old_d + np.resize(data.draw(vectors(1.0)), old_d.size)
    new_d = wanted_d.copy()
    sent = change.settle(Links(down=codec), old_d, new_d)
    received_d = change.add(codec, old_d, sent.words, out_d=np.empty_like(old_d))
    assert same(received_d, new_d)
    assert change.digest(received_d) == sent.after
    relative = {"identity": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8}[codec.name]
    # Subtraction and addition round once each, the codec once.
    most = 2.0**-22 * 101 + relative * 1.01 + 6e-8
    assert np.abs(new_d.astype(np.float64) - wanted_d).max() <= most


def test_a_change_beyond_the_codec_is_refused():
    """Nothing of it is sent."""
    with pytest.raises(BeyondCodec, match="does not fit into fp16"):
        change.settle(Links(down=FP16), np.zeros(2, np.float32), np.float32([1.0, 1e6]))


RULES = {
    "mean": combine.weighted_mean,
    "trimmed_mean": combine.trimmed_mean(byzantine_sites=1),
    "median": combine.median,
    "krum": combine.krum(byzantine_sites=1),
    "multi_krum": combine.multi_krum(byzantine_sites=1),
}


@each_codec
@pytest.mark.parametrize("rule", RULES)
def test_rules_combine_words_as_the_values_that_they_stand_for(codec: Codec, rule: str):
    """Bit for bit, whether they are decoded before or chunk by chunk."""
    draws = np.random.default_rng(3)
    sent = [codec.encode(draws.standard_normal(70_001, np.float32)) for _ in range(6)]

    def combined(*, lazily: bool) -> Vector:
        updates = [
            WeightedUpdate(
                site=f"site-{i}",
                delta_d=codec.values(words) if lazily else decoded(codec, words),
                weight=1.0 + i,
            )
            for i, words in enumerate(sent)
        ]
        return RULES[rule](iter(updates), np.empty(70_001, np.float32))

    assert same(combined(lazily=True), combined(lazily=False))


@pytest.mark.slow
@each_codec
def test_folding_takes_a_chunks_memory(codec: Codec):
    """Not a third model's."""
    size = 1 << 24
    words, out_d = codec.encode(np.ones(size, np.float32)), np.empty(size, np.float32)
    tracemalloc.start()
    update = WeightedUpdate(site="a", delta_d=codec.values(words), weight=1.0)
    combine.weighted_mean([update, update], out_d)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak <= 0.55 * out_d.nbytes
    assert (out_d == 1).all()


# Codecs of few bits: their errors against formulas, and other people's words.

FEW_BITS: list[Codec] = [
    codec_of(name, CodecOptions(block=block))
    for name in ("int8", "int4", "fp4")
    for block in (2, 7, 128)
]
TOP_K: list[Codec] = [
    codec_of("top_k"),
    codec_of("top_k", CodecOptions(block=7, fraction=0.4)),
    codec_of("top_k", CodecOptions(block=1 << 16, fraction=0.001)),
]
SUBSETS: list[Codec] = [
    codec_of("subset"),
    codec_of("subset", CodecOptions(block=7, fraction=0.3)),
    codec_of("subset", CodecOptions(block=5, fraction=0.21, order="cyclic")),
]
SMALL = [*FEW_BITS, *TOP_K, *SUBSETS]
SPANS = ((0, 1), (3, 5), (90, 101))  # Of values that are sent apart.
SIZES = [1, 2, 5, 127, 128, 4097, CHUNK_VALUES - 1, 2 * CHUNK_VALUES + 3]


def label(codec: Codec) -> str:
    """Its name and numbers."""
    numbers = [getattr(codec, n, "") for n in ("block", "fraction", "order")]
    return "-".join([codec.name, *(str(n) for n in numbers if n != "")])


each_small = pytest.mark.parametrize("codec", SMALL, ids=label)


def normal(size: int, seed: int = 1) -> Vector:
    """Values with a bell curve, some much larger and some zero."""
    draws = np.random.default_rng([seed, size])
    vector_d = draws.standard_normal(size, dtype=np.float32)
    vector_d[:: max(1, size // 7)] *= 30
    vector_d[1 :: max(1, size // 5)] = 0
    return vector_d


@each_small
@pytest.mark.parametrize("spans", [(), SPANS], ids=["whole", "apart"])
def test_few_bits_keep_the_promises(codec: Codec, spans: tuple[tuple[int, int], ...]):
    """Exact length, reading by chunks, in place, and with a residual."""
    if spans:
        codec = Apart(codec, spans)
    for size in (127, 4097, 2 * CHUNK_VALUES + 3) if spans else SIZES:
        _keeps_the_promises(codec, spans, size)


def _keeps_the_promises(
    codec: Codec, spans: tuple[tuple[int, int], ...], size: int
) -> None:
    vector_d = normal(size)
    words = codec.encode(vector_d, seed=3)
    assert same(vector_d, normal(size))
    assert (words.dtype, words.size) == (codec.dtype, codec.num_words(size))
    assert codec.fault(words, size) == ""
    whole_d, values = (
        decoded(codec, words, size, seed=3),
        codec.values(words, size=size, seed=3),
    )
    assert (values.size, values.shape, whole_d.size) == (size, (size,), size)
    for length in (1, 3, 1000, size):
        starts = [*range(0, size, length)][-50:]
        parts = [values[start : start + length] for start in starts]
        assert same(np.concatenate(parts), whole_d[starts[0] :])
    residual_d = normal(size, seed=2)
    left_d, wanted_d = residual_d.copy(), vector_d + residual_d
    again = codec.encode(vector_d, residual_d=residual_d, seed=3)
    assert same(again, codec.encode(wanted_d, seed=3))
    arrived_d = decoded(codec, again, size, seed=3)
    np.testing.assert_allclose(arrived_d + residual_d, wanted_d, atol=2e-5)
    over = encoded_over(codec, vector_d, residual_d=left_d, seed=3)
    assert same(over, again)
    assert same(left_d, residual_d)
    for start, stop in spans:
        assert same(arrived_d[start:stop], wanted_d[start:stop])
        assert not residual_d[start:stop].any()


@pytest.mark.parametrize("codec", FEW_BITS, ids=label)
def test_levels_are_the_nearest_ones(codec: Codec):
    """As a plain float64 loop finds them, with the scale of each block."""
    top = {"int8": 127, "int4": 7, "fp4": 64}[codec.name]
    levels = np.arange(-top, top + 1.0)
    if codec.name == "fp4":
        magnitudes = [0.0, *2.0 ** np.arange(7)]
        levels = np.array([-m for m in magnitudes[:0:-1]] + magnitudes)
    vector_d = normal(1001)
    found_d = decoded(codec, codec.encode(vector_d), 1001).astype(np.float64)
    block = codec.block  # type: ignore[attr-defined]
    for start in range(0, 1001, block):
        part, found = vector_d[start : start + block], found_d[start : start + block]
        exact = np.abs(part.astype(np.float64)).max() / top
        # The scale: bfloat16, rounded up.
        _, exponent = np.frexp(exact)
        unit = np.ldexp(1.0, int(exponent) - 8)
        scale = np.ceil(exact / unit * (1 - 1e-7)) * unit
        choices = levels * scale
        best = np.abs(part[:, None].astype(np.float64) - choices).min(axis=1)
        error = np.abs(part - found)
        assert (error <= best + 1e-6 * scale * top).all()


@pytest.mark.parametrize(("name", "top"), [("int8", 127), ("int4", 7)])
def test_error_of_equal_steps_is_a_twelfth_of_their_square(name: str, top: int):
    """For values spread evenly: variance step^2 / 12, mean 0."""
    draws = np.random.default_rng(0)
    vector_d = draws.uniform(-1, 1, 1 << 18).astype(np.float32)
    vector_d[::128] = 1.0  # So that every block has the step 1 / top, or a bit more.
    codec = codec_of(name)
    error_d = decoded(codec, codec.encode(vector_d), vector_d.size) - vector_d
    step = float(-(-np.float32(1 / top).view(np.uint32).astype(int) // 65536) << 16)
    step = float(np.array(int(step), np.uint32).view(np.float32))
    assert float(np.square(error_d).mean()) == pytest.approx(step**2 / 12, rel=0.02)
    assert abs(float(error_d.mean())) < step / 100


def test_error_of_powers_of_two_is_what_the_density_says():
    """E3M0 against the integral over evenly spread values of 0 to the largest level."""
    draws = np.random.default_rng(0)
    vector_d = (draws.uniform(-64, 64, 1 << 18)).astype(np.float32)
    vector_d[::128] = 64.0
    codec = codec_of("fp4")
    error_d = decoded(codec, codec.encode(vector_d), vector_d.size) - vector_d
    edges = [0.0, 0.5, 1.5, 3.0, 6.0, 12.0, 24.0, 48.0, 64.0]
    levels = [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0]
    integral = sum(
        ((high - level) ** 3 - (low - level) ** 3) / 3
        for level, low, high in zip(levels, edges[:-1], edges[1:], strict=True)
    )
    assert float(np.square(error_d).mean()) == pytest.approx(integral / 64, rel=0.02)


@pytest.mark.parametrize("codec", TOP_K, ids=label)
def test_the_largest_values_are_sent(codec: Codec):
    """As a plain loop finds them; their two magnitudes are means, as in float64."""
    size, block = 5003, codec.block  # type: ignore[attr-defined]
    vector_d = normal(size)
    found_d = decoded(codec, codec.encode(vector_d), size)
    for start in range(0, size, block):
        part = vector_d[start : start + block].astype(np.float64)
        count = min(len(part), max(1, round(len(part) * codec.kind.fraction)))  # type: ignore[attr-defined]
        order = sorted(range(len(part)), key=lambda i: (-abs(part[i]), i))[:count]
        sizes = np.abs(part[order])
        is_large = sizes >= sizes.mean()
        expected = np.zeros(len(part))
        for chosen in (is_large, ~is_large):
            if chosen.any():
                places = np.array(order)[chosen]
                expected[places] = np.copysign(sizes[chosen].mean(), part[places])
        found = found_d[start : start + block]
        np.testing.assert_allclose(found, expected, rtol=2.0**-8, atol=1e-30)


def test_energy_that_top_k_leaves_out_is_that_of_the_normal_distribution():
    """Beyond t = 2.42 lie 1 / 64 of the values and 11.8 % of the energy."""
    vector_d = np.random.default_rng(0).standard_normal(1 << 20, dtype=np.float32)
    codec = codec_of("top_k")
    sent_d = decoded(codec, codec.encode(vector_d), vector_d.size)
    normal_law = statistics.NormalDist()
    edge = normal_law.inv_cdf(1 - 1 / 128)
    energy = 2 * (edge * normal_law.pdf(edge) + 1 / 128)
    unsent = vector_d[sent_d == 0].astype(np.float64)
    assert np.square(unsent).sum() / vector_d.size == pytest.approx(
        1 - energy, rel=0.01
    )
    chosen = vector_d[sent_d != 0]
    assert chosen.size == vector_d.size // 64
    # Two levels for magnitudes of a deviation of 0.33 beyond the edge.
    within = np.square(chosen - sent_d[sent_d != 0]).mean()
    assert within < 0.4 * np.abs(chosen).var()


@pytest.mark.parametrize("order", ["random", "cyclic"])
def test_a_subset_is_linear_and_the_same_everywhere(order: str):
    """The sum of words is the words of the sum; each round sends other blocks."""
    codec = codec_of("subset", CodecOptions(block=16, fraction=1 / 8, order=order))
    size = 16 * 40 - 5
    one_d, other_d = normal(size, 1), normal(size, 2)
    both = codec.encode(one_d + other_d, seed=9)
    assert same(codec.encode(one_d, seed=9) + codec.encode(other_d, seed=9), both)
    seen = np.zeros(size, int)
    for seed in range(1, 9):
        sent_d = decoded(
            codec, codec.encode(np.ones(size, "f4"), seed=seed), size, seed=seed
        )
        assert set(sent_d) == {0.0, 1.0}
        assert 0.1 < sent_d.mean() < 0.15
        seen += sent_d > 0
    if order == "cyclic":
        assert (seen == 1).all()
    else:
        assert 0.5 < (seen > 0).mean() < 0.8  # 1 - (7 / 8) ** 8 is 0.66.


def test_random_blocks_are_those_of_every_release():
    """They are agreed on by arithmetic that must never change."""
    codec = codec_of("subset", CodecOptions(block=2, fraction=0.25))
    assert isinstance(codec, Subset)
    assert [codec.chosen(32, seed).tolist() for seed in (1, 2)] == CHOSEN


@each_small
@given(data=st.data())
def test_words_of_strangers_are_read_or_refused(codec: Codec, data: st.DataObject):
    """Any bytes: a fault is named, or they are read without one."""
    size = data.draw(st.integers(1, 300))
    num_bytes = codec.num_words(size) * codec.dtype.itemsize
    raw = data.draw(st.binary(min_size=num_bytes, max_size=num_bytes))
    words = np.frombuffer(raw, codec.dtype)
    if codec.fault(words, size) == "":
        with np.errstate(over="ignore"):
            assert decoded(codec, words, size, seed=1).shape == (size,)
    for wrong in (words[:-1], np.append(words, words[:1])):
        assert "are not the" in codec.fault(wrong, size)


@pytest.mark.parametrize("codec", [*FEW_BITS, *TOP_K], ids=label)
def test_a_scale_that_no_codec_makes_is_refused(codec: Codec):
    """Infinite, not a number or negative; in the first block and in the last."""
    size = 300
    middle = size // 2 // codec.block * codec.block  # type: ignore[attr-defined]
    scales = (0x7F80, 0x7FC0, 0xFF80, 0x8000, 0xBF80)
    for place, scale in itertools.product((0, codec.num_words(middle)), scales):
        words = codec.encode(np.ones(size, np.float32))
        words[place : place + 2] = scale % 256, scale // 256
        fault = codec.fault(words, size)
        assert "negative or not finite" in fault, (place, hex(scale))


def test_places_outside_of_a_block_or_twice_are_refused():
    """Both would make an update that no site can have made."""
    codec, size = codec_of("top_k", CodecOptions(block=100, fraction=0.02)), 150
    words = codec.encode(normal(size))
    assert codec.fault(words, size) == ""
    for raw, text in (
        (100 | 101 << 7, "block of 100 values"),
        (127 << 7, "block of 100 values"),
        (5 | 5 << 7, "places that do not"),
        (6 | 5 << 7, "places that do not"),
    ):
        bad = words.copy()
        bad[4:6] = raw % 256, raw // 256
        assert text in codec.fault(bad, size)
    bad = words.copy()
    last = codec.num_words(100)
    bad[last + 4] = 50  # Of a last block of 50, from 0 on.
    assert "block of 50 values" in codec.fault(bad, size)


@each_small
def test_values_that_are_not_finite_are_refused(codec: Codec):
    """Also if only the residual makes them so."""
    for bad in (np.nan, np.inf, -np.inf):
        vector_d = normal(300)
        vector_d[17] = bad
        if codec.dtype == np.uint8:
            with pytest.raises(BeyondCodec):
                codec.check(vector_d)
            with pytest.raises(BeyondCodec):
                codec.encode(vector_d)
        with pytest.raises(BeyondCodec), np.errstate(invalid="ignore"):
            codec.encode(vector_d, residual_d=np.zeros(300, np.float32))
    large_d = np.full(300, 3e38, np.float32)
    with pytest.raises(BeyondCodec), np.errstate(over="ignore"):
        codec.encode(large_d, residual_d=large_d.copy())


@pytest.mark.parametrize("codec", [*FEW_BITS, *TOP_K], ids=label)
def test_the_largest_and_the_smallest_values_pass(codec: Codec):
    """What arrives is finite, and small values become zero or small ones."""
    for size in (LIMIT * (1 - 1e-6), 1e-45, 1e-40, 0.0, -0.0):
        vector_d = np.full(300, size, np.float32)
        words = codec.encode(vector_d)
        assert codec.fault(words, 300) == ""
        found_d = decoded(codec, words, 300)
        assert np.isfinite(found_d).all()
        assert float(np.abs(found_d).max()) <= abs(size) * 1.02 + 1e-38


@pytest.mark.parametrize(
    "codec", [codec_of(n) for n in ("int4", "top_k", "subset")], ids=label
)
def test_error_feedback_brings_everything_through(codec: Codec):
    """After many rounds of one step, what has arrived is near what was trained."""
    step_d, residual_d = normal(10_000), np.zeros(10_000, np.float32)
    total_d, rounds = np.zeros(10_000), 400
    for seed in range(rounds):
        words = codec.encode(step_d, residual_d=residual_d, seed=seed)
        total_d += decoded(codec, words, 10_000, seed=seed)
    arrived = np.linalg.norm(total_d) / np.linalg.norm(rounds * step_d)
    assert arrived == pytest.approx(1, abs=0.25 if codec.name == "top_k" else 0.06)
    np.testing.assert_allclose(
        total_d + residual_d, rounds * step_d, rtol=1e-3, atol=0.1
    )


@each_small
def test_both_sides_of_a_coarse_change_hold_the_same_bits(codec: Codec):
    """What the codec leaves out stays with the aggregator, for the next change."""
    links = Links(down=codec, changes=True, down_feedback=1.0)
    old_d, size = normal(5000, 1), 5000
    (residual_d,) = change.first_residual(links, size).values()
    wanted_d = old_d + normal(size, 2) / 100
    new_d = wanted_d.copy()
    sent = change.settle(links, old_d, new_d, residual_d=residual_d, seed=4)
    received_d = change.add(
        codec, old_d, sent.words, out_d=np.empty_like(old_d), seed=4
    )
    assert same(received_d, new_d)
    assert change.digest(received_d) == sent.after
    np.testing.assert_allclose(new_d + residual_d, wanted_d, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "codec",
    [
        *map(codec_of, ("int4", "top_k")),
        *(
            pytest.param(codec_of(name), marks=pytest.mark.long)
            for name in ("int8", "fp4", "subset")
        ),
    ],
    ids=label,
)
def test_folding_few_bits_takes_a_chunks_memory(codec: Codec):
    """Not a third model's; nor does encoding with a residual."""
    size = 1 << 24
    vector_d, residual_d = np.ones(size, np.float32), np.zeros(size, np.float32)
    tracemalloc.start()
    words = encoded_over(codec, vector_d, residual_d=residual_d)
    _, peak = tracemalloc.get_traced_memory()
    assert peak <= 0.1 * 4 * size
    out_d = residual_d
    tracemalloc.reset_peak()
    values = codec.values(words, size=size)
    update = WeightedUpdate(site="a", delta_d=values, weight=1.0)
    combine.weighted_mean([update, update], out_d)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak <= 0.6 * 4 * size


def test_only_codecs_of_one_support_share_it():
    """And only those whose words add up are linear."""
    assert [c.name for c in SMALL if not c.shares_support] == ["top_k"] * 3
    assert {c.name for c in SMALL if c.is_linear} == {"subset"}
    for codec in (codec_of(name) for name in NAMES):
        assert codec.name in NAMES
        assert 8 * codec.num_words(1 << 20) * codec.dtype.itemsize == pytest.approx(
            codec.bits_per_value() * (1 << 20), rel=1e-3
        )
    for name in ("bf16", "subset", "int4"):
        assert unused(name, CodecOptions()) == ""
    assert unused("int4", CodecOptions(fraction=0.5)) == "fraction"
    assert feedback_of("top_k") == 0.95
    assert feedback_of("int4", CodecOptions(feedback=0.5)) == 0.5


GOLDEN = {
    "int8": "823cc17e20f08239007e",
    "int4": "933e7df2933b70",
    "fp4": "003d7ec5003a70",
    "top_k": "803f004004060000003d0101",
}


@pytest.mark.parametrize("name", GOLDEN)
def test_bytes_are_those_of_every_release(name: str):
    """A record's layout: other programs, and states on disk, read it."""
    options = CodecOptions(block=4, fraction=0.5 if name == "top_k" else None)
    vector_d = np.float32([-1.0, 2.0, 0.5, -0.25, 0.0, 0.03125])
    assert codec_of(name, options).encode(vector_d).tobytes().hex() == GOLDEN[name]
