"""The keystream: known answers, entry at any word, independence of threads."""

import numpy as np
import pytest
from support import ring_oracles

from privacy import keystream as prg
from privacy.keystream import (
    CHUNK_WORDS,
    SPARE_BYTES,
    FrontKeystream,
    Keystream,
    Mask,
    open_keystream,
)

KEY = bytes(range(32))
ADDED = Mask(key=KEY, sign=1)
DTYPES = {16: np.uint16, 24: np.uint8, 32: np.uint32, 64: np.uint64}
ALL_BITS = pytest.mark.parametrize("bits", DTYPES)
BOTH_WAYS = pytest.mark.parametrize("way", [Keystream, FrontKeystream])
GIBIBYTE = 1 << 30


def _zeros(bits: int, num_words: int) -> prg.Words:
    return np.zeros(3 * num_words if bits == 24 else num_words, DTYPES[bits])


def _read(key: bytes, num_bytes: int, first_byte: int = 0) -> bytes:
    return _next(Keystream(key, first_byte=first_byte), num_bytes)


def _next(stream: Keystream, num_bytes: int) -> bytes:
    out = np.full(num_bytes + SPARE_BYTES, 0xA5, np.uint8)
    stream.read_into(out, num_bytes)
    assert (out[num_bytes:] == 0xA5).all()
    return out[:num_bytes].tobytes()


@BOTH_WAYS
def test_stream_of_the_zero_key(way: type[Keystream]):
    """Blocks 0, 1, 2: H, tag and ciphertext of GCM's test cases 13 and 14."""
    expected = (
        "dc95c078a2408989ad48a21492842087"
        "530f8afbc74536b9a963b4f1c4cb738b"
        "cea7403d4d606b6e074ec5d3baf39d18"
    )
    assert expected == _next(way(bytes(32)), 48).hex()


@BOTH_WAYS
@pytest.mark.parametrize("size", [0, 1, 16, 31, 32, 33, 47, 48, 1003])
def test_stream_is_counters_one_block_at_a_time(way: type[Keystream], size: int):
    """As the slow implementation has it."""
    assert ring_oracles.stream_bytes(KEY, size) == _next(way(KEY), size)


@pytest.mark.parametrize(
    "pieces",
    [
        [4 * CHUNK_WORDS] * 4 + [77],
        [3, 0, 13, 15, 1, 17, 100_000, 16],
        [CHUNK_WORDS, 31, 1, 4 * CHUNK_WORDS + 5],
    ],
)
def test_stream_by_gcm_is_the_stream(pieces: list[int]):
    """Wherever it is cut."""
    stream = FrontKeystream(KEY)
    actual = b"".join(_next(stream, size) for size in pieces)
    assert _read(KEY, sum(pieces)) == actual


@pytest.mark.parametrize(
    ("first_byte", "num_bytes"),
    [(0, 100), (16, GIBIBYTE), (GIBIBYTE, GIBIBYTE), (0, 64 * GIBIBYTE + 1)],
)
def test_gcm_is_left_where_it_cannot_serve(first_byte: int, num_bytes: int):
    """Streams that are short, entered on the way, or longer than its counter."""
    stream = open_keystream(KEY, first_byte=first_byte, num_bytes=num_bytes)
    assert type(stream) is Keystream
    assert _next(stream, 50) == _read(KEY, 50, first_byte=first_byte)


@pytest.mark.parametrize("num_bytes", [1 << 20, 64 * GIBIBYTE])
def test_long_stream_is_the_stream(num_bytes: int):
    """Whichever way is taken here."""
    stream = open_keystream(KEY, num_bytes=num_bytes)
    assert _read(KEY, 1 << 20) == _next(stream, 1 << 20)


@BOTH_WAYS
def test_buffer_without_spare_bytes_is_refused(way: type[Keystream]):
    with pytest.raises(ValueError, match="buffer of 115"):
        way(KEY).read_into(np.zeros(114, np.uint8), 100)


@pytest.mark.parametrize("first_byte", [1, 15, 16, 17, 1000, 4 * CHUNK_WORDS + 3])
def test_stream_may_be_entered_anywhere(first_byte: int):
    """The bytes from there on are the same."""
    whole = _read(KEY, first_byte + 100)
    assert whole[first_byte:] == _read(KEY, 100, first_byte=first_byte)


@ALL_BITS
def test_words_are_little_endian_pieces_of_the_stream(bits: int):
    """As the slow implementation has them."""
    words = _zeros(bits, 21)
    prg.apply_masks_(words, [ADDED])
    expected = ring_oracles.stream_words(KEY, 21, bits)
    assert expected == ring_oracles.as_integers(words, bits)


@ALL_BITS
@pytest.mark.parametrize("first_word", [1, 7, CHUNK_WORDS - 1, CHUNK_WORDS + 5])
def test_words_may_be_entered_anywhere(bits: int, first_word: int):
    """A vector masked in two parts is the vector masked at once."""
    width = 3 if bits == 24 else 1
    whole = _zeros(bits, first_word + CHUNK_WORDS + 3)
    prg.apply_masks_(whole, [ADDED])
    tail = _zeros(bits, CHUNK_WORDS + 3)
    prg.apply_masks_(tail, [ADDED], first_word=first_word)
    np.testing.assert_array_equal(whole[width * first_word :], tail)


@ALL_BITS
@pytest.mark.parametrize("threads", [2, 3, 7])
def test_result_does_not_depend_on_threads(bits: int, threads: int):
    """Ranges enter the stream where they begin."""
    masks = [Mask(key=KEY, sign=1), Mask(key=bytes(32), sign=-1)]
    alone, together = (_zeros(bits, 4 * CHUNK_WORDS + 11) for _ in range(2))
    prg.apply_masks_(alone, masks)
    prg.apply_masks_(together, masks, threads=threads)
    np.testing.assert_array_equal(alone, together)


def test_no_masks_change_nothing():
    words = np.arange(5, dtype=np.uint32)
    prg.apply_masks_(words, [])
    assert words.tolist() == [0, 1, 2, 3, 4]


def test_empty_vector_is_masked():
    prg.apply_masks_(np.zeros(0, np.uint32), [ADDED])


def test_packing_keeps_the_lower_24_bits():
    words = np.array([0xFF000001, 0x00ABCDEF], np.uint32)
    packed = np.zeros(6, np.uint8)
    prg.pack_24(words, packed)
    assert packed.tobytes().hex() == "010000efcdab"
    wide = prg.unpack_24(packed, np.full(2, 0xFFFFFFFF, np.uint32))
    assert wide.tolist() == [1, 0xABCDEF]


def test_mask_does_not_show_its_key():
    assert "key" not in repr(Mask(key=KEY, sign=1))


@BOTH_WAYS
@pytest.mark.parametrize("key", [b"", bytes(16), bytes(33)])
def test_key_of_another_length_is_refused(way: type[Keystream], key: bytes):
    with pytest.raises(ValueError, match="32 bytes"):
        way(key)


def test_sign_is_one_or_minus_one():
    with pytest.raises(ValueError, match="sign"):
        Mask(key=KEY, sign=0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "words",
    [
        np.zeros(4, np.int32),
        np.zeros(4, np.float32),
        np.zeros((2, 2), np.uint32),
        np.zeros(8, np.uint32)[::2],
        np.zeros(4, np.uint8),
        np.frombuffer(bytes(8), np.uint32),
    ],
)
def test_arrays_that_are_not_words_are_refused(words: prg.Words):
    with pytest.raises(ValueError, match="words"):
        prg.apply_masks_(words, [ADDED])


def test_threads_are_at_least_one():
    with pytest.raises(ValueError, match="threads"):
        prg.apply_masks_(np.zeros(4, np.uint32), [ADDED], threads=0)


def test_error_in_a_range_is_raised():
    def fail(start: int, stop: int) -> None:
        if start:
            raise RuntimeError(f"{start}")

    with pytest.raises(RuntimeError, match=str(CHUNK_WORDS)):
        prg.in_ranges(fail, 2 * CHUNK_WORDS, threads=2)
