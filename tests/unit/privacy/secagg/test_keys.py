"""The key schedule, against a second implementation on ``hmac`` alone."""

import copy
import hashlib
import hmac
import pickle
import struct
from dataclasses import replace

import pytest
from support.secagg_parties import JOB, MODEL, TASK, entropy, start

from privacy.secagg.errors import BadShare, OutOfOrder, WeakKey
from privacy.secagg.protocol import key_schedule as keys
from privacy.secagg.protocol.key_schedule import (
    PairRoots,
    RoundFacts,
    RunKeys,
    Secret,
)

H_Q, H_U = hashlib.sha256(b"Q").digest(), hashlib.sha256(b"U").digest()
DH, KEM = hashlib.sha256(b"dh").digest(), hashlib.sha256(b"kem").digest()


def mac(key: bytes, data: bytes) -> bytes:
    return hmac.new(key, data, hashlib.sha256).digest()


def lp(data: bytes) -> bytes:
    return struct.pack(">Q", len(data)) + data


def u64(*values: int) -> bytes:
    return struct.pack(f">{len(values)}Q", *values)


def oracle_context(r: int, cohort: tuple[int, ...], h_q: bytes, h_u: bytes) -> bytes:
    """ctx_r of section 2.2, written down a second time."""
    parts = [b"xsa-v2", h_q, h_u, u64(r), MODEL, u64(len(cohort), *cohort)]
    parts += [TASK, JOB]
    return hashlib.sha256(b"".join(map(lp, parts))).digest()


def oracle_root(root: bytes, r: int) -> bytes:
    """R^(r) from R^(1)."""
    for following in range(2, r + 1):
        root = mac(root, lp(b"ratchet") + u64(following) + b"\x01")
    return root


def oracle_expand(key: bytes, info: bytes) -> bytes:
    """The first block of HKDF-Expand."""
    return mac(key, info + b"\x01")


def facts(round_index: int = 1, cohort: tuple[int, ...] = (1, 2, 3)) -> RoundFacts:
    return RoundFacts(
        round_index=round_index, cohort=cohort, model_digest=MODEL, task_digest=TASK
    )


def context_of(
    facts: RoundFacts, h_q: bytes = H_Q, h_u: bytes = H_U, job: bytes = JOB
) -> bytes:
    return keys.round_context(facts, contract_hash=h_q, setup_hash=h_u, job_digest=job)


def roots(own: int, peer: int) -> PairRoots:
    mask, channel = (
        keys.pair_root(exchange=each, kem_secret=KEM, setup_hash=H_U)
        for each in (DH, DH[::-1])
    )
    return PairRoots(own=own, peer=peer, mask_root=mask, channel_root=channel)


@pytest.mark.parametrize("r", [1, 2, 7])
def test_schedule_is_that_of_the_specification(r: int):
    """Roots, context, ratchet, pair secrets, channel and stream keys."""
    context = context_of(facts(r))
    assert oracle_context(r, (1, 2, 3), H_Q, H_U) == context
    pair = roots(3, 1).take_round(r, context)
    mask_root = oracle_root(mac(H_U, DH + KEM), r)
    channel_root = oracle_root(mac(H_U, DH[::-1] + KEM), r)
    k_13 = oracle_expand(mask_root, lp(b"mask") + context + u64(1, 3))
    assert k_13 == pair.mask.buffer
    for actual, ends in ((pair.send, (3, 1)), (pair.receive, (1, 3))):
        info = lp(b"share channel") + context + u64(*ends)
        assert oracle_expand(channel_root, info) == actual.buffer
    masks = keys.masks_of([(pair.mask.buffer, -1)], context)
    for part, stream in (("vector", masks.vector), ("header", masks.header)):
        info = lp(b"stream") + lp(part.encode()) + context
        assert oracle_expand(k_13, info) == stream[0].key
        assert stream[0].sign == -1


def test_schedule_is_frozen():
    """Bytes of one known round: a change breaks every run under way."""
    context = context_of(facts(2))
    pair = roots(1, 2).take_round(2, context)
    masks = keys.masks_of([(pair.mask.buffer, 1)], context)
    actual = [context, pair.mask.buffer, masks.vector[0].key, masks.header[0].key]
    assert [each.hex() for each in actual] == [  # type: ignore[attr-defined]
        "a245a9e5c7e1a7687754d827db949c1a3fd573d8994bb46e8619bcb4358acc34",
        "e3d714058b9d3a51005ba6690bff1fbd7698f576d3875f255d1f9cef09fa8c5b",
        "54838170ecb2efc0d4dc62668dddeb66a7368c52480af29d8da46cf1b1fb5654",
        "95e785173d61251059aa7676955aa1188a4131f7c16e976edf38ecc1137286af",
    ]


def test_both_ends_agree():
    """One end's sending key is the other's receiving key."""
    context = context_of(facts(4))
    low, high = roots(1, 3).take_round(4, context), roots(3, 1).take_round(4, context)
    assert low.mask.buffer == high.mask.buffer
    assert low.send.buffer == high.receive.buffer
    assert low.receive.buffer == high.send.buffer
    assert low.send.buffer != low.receive.buffer


def test_context_depends_on_everything():
    """Contract, setup, job, round, cohort, model and task."""
    one = facts()
    contexts = {
        context_of(one),
        context_of(one, h_q=H_U),
        context_of(one, h_u=H_Q),
        context_of(one, job=H_Q),
        context_of(facts(2)),
        context_of(facts(1, (1, 2))),
        context_of(replace(one, model_digest=bytes(32))),
        context_of(replace(one, task_digest=bytes(32))),
    }
    assert len(contexts) == 8


def test_ratchet_erases():
    """The old root is overwritten, not only forgotten."""
    pair = roots(1, 2)
    old = pair._mask.buffer
    pair.take_round(1, bytes(32))
    assert old == bytearray(32)
    with pytest.raises(OutOfOrder, match="erased"):
        pair.take_round(1, bytes(32))
    assert pair._mask.buffer == oracle_root(mac(H_U, DH + KEM), 2)


def test_hybrid_rests_on_both_secrets():
    """Another exchange or another encapsulation is another root."""
    made = {
        bytes(keys.pair_root(exchange=dh, kem_secret=kem, setup_hash=salt).buffer)
        for dh, kem, salt in [
            (DH, KEM, H_U),
            (KEM, KEM, H_U),
            (DH, DH, H_U),
            (DH, b"", H_U),
            (DH, KEM, H_Q),
        ]
    }
    assert len(made) == 5


def test_encapsulation_agrees():
    """ML-KEM: the peer opens what was encapsulated; another ciphertext differs."""
    own = RunKeys(entropy("kem"), hybrid=True)
    secret, ciphertext = keys.encapsulate(own.public.kem)
    assert own.decapsulate(ciphertext) == secret
    assert own.decapsulate(bytes(1088)) != secret
    with pytest.raises(WeakKey, match="length"):
        own.decapsulate(ciphertext[1:])
    with pytest.raises(WeakKey, match="without the hybrid"):
        RunKeys(entropy("no kem"), hybrid=False).decapsulate(ciphertext)


# Points of order 1, 2, 4 and 8 on the curve and its twist.
SMALL_ORDER = [
    "00" * 32,
    "01" + "00" * 31,
    "e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800",
    "5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157",
    "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
]


@pytest.mark.parametrize("point", SMALL_ORDER)
@pytest.mark.parametrize("which", ["mask", "channel"])
def test_small_order_points_are_refused(point: str, which: str):
    """A secret that everybody knows is no secret."""
    own, peer = (RunKeys(entropy(seed), hybrid=False) for seed in "ab")
    good = {"mask": peer.public.mask, "channel": peer.public.channel, "kem": b""}
    bad = keys.PublicRunKeys(**(good | {which: bytes.fromhex(point)}))
    with pytest.raises(WeakKey):
        own.exchange(bad)


def test_zero_secret_is_refused_by_us_too(monkeypatch: pytest.MonkeyPatch):
    """Even if the library one day returned it."""

    class Silent:
        def exchange(self, _: object) -> bytes:
            return bytes(32)

    with pytest.raises(WeakKey):
        keys._exchange(Silent(), RunKeys(entropy("x"), hybrid=False).public.mask)  # type: ignore[arg-type]


def test_sealing_is_bound_to_its_data():
    """Another key, other data, a changed or a cut ciphertext do not open."""
    key = Secret(DH)
    sealed = keys.seal(key, bytearray(b"shares"), b"data")
    assert keys.unseal(key, sealed, b"data", who="a") == b"shares"
    for opener, ciphertext, data in [
        (Secret(KEM), sealed, b"data"),
        (key, sealed, b"datA"),
        (key, sealed[:-1], b"data"),
        (key, sealed[1:], b"data"),
        (key, b"", b"data"),
    ]:
        with pytest.raises(BadShare, match="of site 'a'"):
            keys.unseal(opener, ciphertext, data, who="site 'a'")


def test_secrets_are_not_shown_or_copied():
    """Neither printed, nor pickled, nor deep-copied, nor used after the end."""
    secret = Secret(DH)
    held = [secret, RunKeys(entropy("x"), hybrid=True)]
    for each in held:
        assert DH.hex() not in repr(each)
        assert "..." in repr(each)
        for leave in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError):
                leave(each)
    buffer = secret.buffer
    secret.erase()
    secret.erase()
    assert (bytes(buffer), secret.erased) == (bytes(32), True)
    with pytest.raises(OutOfOrder, match="ended"):
        _ = secret.buffer


def test_values_with_keys_are_not_printed():
    """The text of masks, streams and run secrets shows no key."""
    run = start(3)
    masks = run.sessions[1].begin_round(run.facts())
    for value in (masks, masks.vector[0], run.secrets[1]):
        assert " object at 0x" in repr(value)
