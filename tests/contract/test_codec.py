"""What every codec promises: the round loop and the sites know nothing else of it."""

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as arrays

from aggregator import combine
from federation.compression import change
from federation.compression.choice import codec_of
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
from federation.protocols import WeightedUpdate
from federation.vectors import CHUNK_VALUES, Vector, Words

CODECS = [IDENTITY, FP16, BF16]
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
