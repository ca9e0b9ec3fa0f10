"""Rounds from end to end, with the real keystream: do the masks cancel?"""

import hashlib
import itertools
from collections import Counter

import numpy as np
import pytest
from support.secagg_parties import DIGEST, HEADER, MODEL, Run, site_name, start

from privacy import keystream as prg
from privacy.keystream import Mask
from privacy.secagg.errors import TooFewSites
from privacy.secagg.protocol.key_schedule import RoundMasks, Stream

WORDS = 16


def apply(values: np.ndarray, masks: RoundMasks, part: str) -> np.ndarray:
    """Add a site's or the aggregator's streams, as whoever wires them would."""
    values = values.copy()
    streams: tuple[Stream, ...] = getattr(masks, part)
    prg.apply_masks_(values, [Mask(key=bytes(s.key), sign=s.sign) for s in streams])
    return values


def play(
    run: Run,
    round_index: int = 1,
    *,
    silent: set[int] = frozenset(),
    no_consent: set[int] = frozenset(),
    no_shares: set[int] = frozenset(),
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Play a round; the unmasked sums and the survivors' true sums, by part."""
    parts = ("vector", "header")
    server = run.aggregator_round(round_index)
    masked = {part: np.zeros(WORDS, np.uint32) for part in parts}
    plain = {part: np.zeros(WORDS, np.uint32) for part in parts}
    rng = np.random.default_rng(round_index)
    for number, session in run.sessions.items():
        masks = session.begin_round(run.facts(round_index))
        values = {p: rng.integers(0, 2**32, WORDS, dtype=np.uint32) for p in parts}
        hidden = {p: apply(values[p], masks, p) for p in parts}
        data = session.finish_masked(vector_digest=DIGEST, header_digest=HEADER)
        if number in silent:
            continue
        server.on_masked(data, vector_digest=DIGEST, header_digest=HEADER)
        for part in parts:
            masked[part] += hidden[part]
            plain[part] += values[part]
    server.close_masked()
    if run.contract.setting == "P2":
        alive = [i for i in run.sessions if i not in silent]
        alive = [i for i in alive if i not in no_consent]
        request = server.survivors()
        for number in alive:
            server.on_consent(run.sessions[number].on_survivors(request))
        server.close_consents()
        for number in [i for i in alive if i not in no_shares]:
            reveal = server.reveal(site_name(number))
            server.on_shares(run.sessions[number].on_reveal(reveal))
    corrections = server.corrections()
    return {part: apply(masked[part], corrections, part) for part in parts}, plain


@pytest.mark.parametrize("hybrid", ["hybrid", ""])
@pytest.mark.parametrize("num_sites", [2, 3])
def test_one_exchange_gives_the_sum(num_sites: int, hybrid: str):
    """P1: masks of all sites cancel, round after round, skipped rounds included."""
    run = start(num_sites, hybrid=bool(hybrid))
    for round_index in (1, 2, 5):
        actual, expected = play(run, round_index)
        for part, values in expected.items():
            np.testing.assert_array_equal(values, actual[part])


@pytest.mark.parametrize(
    "num_sites", [4, *(pytest.param(n, marks=pytest.mark.slow) for n in (5, 8))]
)
def test_dropouts_give_the_sum_or_an_end(num_sites: int):
    """P2: any pattern of dropouts ends in the survivors' exact sum or in an error.

    Rounds of one run: none that was lost spoils those after it.
    """
    run = start(num_sites)
    order = list(range(num_sites, 0, -1))
    for round_index, drops in enumerate(itertools.product(range(3), repeat=3), 1):
        first, second, third = drops
        silent = set(order[:first])
        no_consent = set(order[first : first + second])
        no_shares = set(order[first + second : first + second + third])
        patterns = {"silent": silent, "no_consent": no_consent, "no_shares": no_shares}
        if num_sites - sum(drops) < run.contract.threshold:
            with pytest.raises(TooFewSites):
                play(run, round_index, **patterns)
            continue
        actual, expected = play(run, round_index, **patterns)
        for part, values in expected.items():
            np.testing.assert_array_equal(values, actual[part], err_msg=f"{drops}")


def test_different_models_do_not_cancel():
    """A site that was shown another model makes the sum useless."""
    run = start(3)
    total = np.zeros(WORDS, np.uint32)
    for number, session in run.sessions.items():
        model = MODEL if number < 3 else hashlib.sha256(b"crafted").digest()
        masks = session.begin_round(run.facts(model_digest=model))
        total = apply(total, masks, "vector")
    assert np.count_nonzero(total) == WORDS


@pytest.mark.parametrize("num_sites", [3, 5])
def test_no_key_is_made_twice(num_sites: int):
    """Over a run, a site makes each key once and shares it with one site at most."""
    run = start(num_sites)
    for round_index in (1, 2, 4):
        play(run, round_index)
    together: Counter[bytes] = Counter()
    for entries in run.log.values():
        marks = [mark for _, mark in entries]
        assert len(set(marks)) == len(marks)
        together.update(marks)
    # A self mask and its two streams are the site's own; the rest is a pair's.
    own = 3 * 3 * num_sites if run.contract.setting == "P2" else 0
    assert {1: own} | {2: len(together) - own} == Counter(together.values()) | {1: own}
