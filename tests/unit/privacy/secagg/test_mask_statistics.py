"""Masked words look like noise, and no key makes them twice.

Sessions, keystreams and arithmetic of the product. All entropy is fixed, so that a
test gives one outcome for ever; for fresh entropy |z| < 5 fails about once in a
million.
"""

import functools
import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np
import pytest
from support.secagg_parties import DIGEST, HEADER, Run, site_name, start

from federation.ids import RunId
from privacy.secagg.arithmetic.seal import seal_
from privacy.secagg.errors import TooFewSites
from privacy.secagg.protocol import train
from privacy.secagg.protocol.key_schedule import RoundMasks
from privacy.secagg.protocol.server import AggregatorRound

NUM_WORDS = 1 << 20
EVERY_RING = pytest.mark.parametrize("bits", [16, 24, 32])
EVERY_SETTING = pytest.mark.parametrize("threshold", [4, 5], ids=["P2", "P1"])


@functools.cache
def zero_updates(bits: int, threshold: int) -> dict[int, np.ndarray]:
    """What five sites send of an update of zeros: nothing but their masks."""
    run = start(5, ring_bits=bits, threshold=threshold, hybrid=False)
    sent = {}
    for number, session in run.sessions.items():
        masks = train.masks(session.begin_round(run.facts()).vector)
        update = np.zeros(NUM_WORDS, np.float32)
        encoded = seal_(
            update, run.contract.ring(), weight=1.0, masks=masks, rounding_key=bytes(32)
        )
        sent[number] = encoded.words_w.copy()
    return sent


def z_of_bytes(data: np.ndarray) -> float:
    """Chi-squared of the 256 byte values, in standard deviations from its mean."""
    counts = np.bincount(data.view(np.uint8), minlength=256)
    expected = counts.sum() / 256
    chi_squared = float(((counts - expected) ** 2).sum() / expected)
    return (chi_squared - 255) / (2 * 255) ** 0.5


def places(words: np.ndarray, bits: int) -> Iterable[np.ndarray]:
    """All bytes, and those of each place in a word."""
    yield words.view(np.uint8)
    for place in range(bits // 8):
        yield np.ascontiguousarray(words.view(np.uint8)[place :: bits // 8])


def added(left: np.ndarray, right: np.ndarray, bits: int) -> np.ndarray:
    """Sum of two masked vectors modulo 2^bits, as it would travel."""
    if bits != 24:
        return left + right
    wide = [
        sum(words[k::3].astype(np.uint32) << np.uint32(8 * k) for k in range(3))
        for words in (left, right)
    ]
    return np.ascontiguousarray(
        (wide[0] + wide[1]).view(np.uint8).reshape(-1, 4)[:, :3]
    )


@pytest.mark.slow
@EVERY_RING
@EVERY_SETTING
def test_zero_update_is_uniform(bits: int, threshold: int):
    """1 Mi words of every site, byte by byte: |z| < 5."""
    for words in zero_updates(bits, threshold).values():
        assert words.nbytes == NUM_WORDS * bits // 8
        assert max(abs(z_of_bytes(part)) for part in places(words, bits)) < 5


@pytest.mark.slow
@EVERY_RING
@EVERY_SETTING
def test_sum_of_two_sites_is_uniform(bits: int, threshold: int):
    """Their common mask is gone, and those with the other three hide them still."""
    sent = zero_updates(bits, threshold)
    for other in (2, 5):
        words = added(sent[1], sent[other], bits).reshape(-1)
        assert max(abs(z_of_bytes(part)) for part in places(words, bits)) < 5


@pytest.mark.slow
def test_statistic_sees_a_mask_that_is_gone():
    """The test of the tests: all five together are zeros in P1, and it says so."""
    total = sum(zero_updates(32, 5).values())
    assert not np.any(total)
    assert z_of_bytes(total) > 1e6


@pytest.mark.slow
def test_statistic_sees_a_small_bias():
    """Every two-thousandth byte made a zero: some twelve deviations."""
    words = zero_updates(32, 4)[1].view(np.uint8).copy()
    words[::2000] = 0
    assert z_of_bytes(words) > 5


# The log of keys: who derived which, told by the sessions themselves.

LOST = (
    {},
    {"absent": {5}},
    {"silent": {4}},
    {"declines": {1}},
    {"no_consent": {2}},
    {"no_shares": {3}},
    {"absent": {1}, "silent": {2}},
)


Lost = Mapping[str, set[int]]


def answer(run: Run, server: AggregatorRound, round_index: int, lost: Lost) -> None:
    """R1, in which some are lost before, at and after their answer."""
    for number in [i for i in run.sessions if i not in lost.get("absent", ())]:
        session = run.sessions[number]
        session.begin_round(run.facts(round_index))
        if number in lost.get("declines", ()):
            server.on_decline(session.decline())
            continue
        data = session.finish_masked(vector_digest=DIGEST, header_digest=HEADER)
        if number not in lost.get("silent", ()):
            server.on_masked(data, vector_digest=DIGEST, header_digest=HEADER)


def play(run: Run, round_index: int, lost: Lost) -> RoundMasks | None:
    """A round in which sites are lost; its corrections, or None if it is lost."""
    server = run.aggregator_round(round_index)
    answer(run, server, round_index, lost)
    try:
        survivors = server.close_masked()
    except TooFewSites:
        return None
    request = server.survivors()
    alive = [run.contract.member_named(site).number for site in survivors]
    alive = [i for i in alive if i not in lost.get("no_consent", ())]
    for number in alive:
        server.on_consent(run.sessions[number].on_survivors(request))
    server.close_consents()
    for number in [i for i in alive if i not in lost.get("no_shares", ())]:
        reveal = server.reveal(site_name(number))
        server.on_shares(run.sessions[number].on_reveal(reveal))
    return server.corrections()


def marks(run: Run, purposes: set[str] | None = None) -> list[bytes]:
    """Every derived key of a run, by its hash, as often as a site derived it."""
    return [
        mark
        for entries in run.log.values()
        for purpose, mark in entries
        if purposes is None or purpose in purposes
    ]


def test_log_of_keys_has_no_duplicates():
    """P2, seven rounds, sites lost at every step: no key serves two of anything."""
    run = start(5)
    for round_index, lost in enumerate(LOST, start=1):
        play(run, round_index, lost)
    for entries in run.log.values():
        own = [mark for _, mark in entries]
        assert len(set(own)) == len(own)
    holders = Counter(marks(run))
    assert set(holders.values()) == {1, 2}
    # A self mask and its streams are one site's, every other key is a pair's; a
    # site that was absent from a round has not derived its own end.
    purposes = {mark: purpose for log in run.log.values() for purpose, mark in log}
    alone = Counter(purposes[mark] for mark, count in holders.items() if count == 1)
    rounds = sum(5 - len(lost.get("absent", ())) for lost in LOST)
    assert alone["self mask"] == rounds
    secrets = [m for m in holders if purposes[m] == "pair secret"]
    assert len(secrets) == len(LOST) * 10  # (round, pair), each once


def test_aggregator_removes_keys_of_its_own_round_alone():
    """Each stream that it takes off was put on in that round, by a survivor."""
    run = start(5)
    seen: set[bytes] = set()
    for round_index, lost in enumerate(LOST[:-1], start=1):
        before = set(marks(run))
        corrections = play(run, round_index, lost)
        assert corrections is not None
        fresh = set(marks(run)) - before
        streams = (*corrections.vector, *corrections.header)
        removed = [hashlib.sha256(s.key).digest() for s in streams]
        assert len(set(removed)) == len(removed)
        assert set(removed) <= fresh
        assert not set(removed) & seen
        seen |= set(removed)


def test_equal_entropy_gives_another_run_other_keys():
    """A site whose random numbers repeat: the contract alone keeps runs apart."""
    runs = [start(5, run_id=RunId(name), hybrid=False) for name in ("run-1", "run-2")]
    for run in runs:
        play(run, 1, {})
    # What was drawn repeats, as it was made to; what was derived does not.
    drawn = {"self mask"}
    kinds = {purpose for log in runs[0].log.values() for purpose, _ in log}
    first, second = (set(marks(run, kinds - drawn)) for run in runs)
    assert len(first) == len(second) > 0
    assert not first & second
    assert set(marks(runs[0], drawn)) == set(marks(runs[1], drawn))
