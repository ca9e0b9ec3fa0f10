"""Secret sharing: t shares give the secret, fewer give nothing."""

import itertools
import time
from collections.abc import Callable

import pytest
from hypothesis import given, strategies as st
from support.examples import few
from support.secagg_parties import entropy

from privacy.secagg.arithmetic import shamir
from privacy.secagg.errors import BadShare

SECRET = bytes(range(32))


def shares_of(secret: bytes = SECRET, threshold: int = 3, count: int = 5):
    holders = range(1, count + 1)
    return shamir.split(
        [secret], threshold, holders, random_bytes=entropy("coefficients")
    )


def test_field_is_of_prime_order():
    """Fermat to several bases, and no smaller candidate above 2^256."""

    def passes(n: int) -> bool:
        return all(pow(base, n - 1, n) == 1 for base in (2, 3, 5, 7, 11, 13))

    assert passes(shamir.PRIME)
    assert not any(passes(2**256 + k) for k in range(1, 297, 2))


@few(60)
@given(
    secret=st.binary(min_size=32, max_size=32),
    holders=st.lists(st.integers(1, 200), min_size=1, max_size=12, unique=True),
    data=st.data(),
)
def test_any_t_shares_restore_the_secret(
    secret: bytes, holders: list[int], data: st.DataObject
):
    """Whoever they are and in whatever order."""
    threshold = data.draw(st.integers(1, len(holders)))
    shares = shamir.split([secret], threshold, holders, random_bytes=entropy("e"))
    chosen = data.draw(st.permutations(holders))[:threshold]
    restored = shamir.combine([(x, shares[x]) for x in chosen], threshold)
    assert secret == restored


@pytest.mark.parametrize("secret", [bytes(32), b"\xff" * 32])
def test_extreme_secrets_are_restored(secret: bytes):
    """Zero and the largest secret are elements of the field."""
    shares = shares_of(secret)
    assert all(len(share) == 33 for share in shares.values())
    assert secret == shamir.combine(list(shares.items())[:3], 3)


def test_every_secret_fits_to_too_few_shares():
    """With t - 1 shares, each secret is explained by one more share."""
    shares = shares_of()
    pair = [(x, shares[x]) for x in (1, 2)]
    seen = set()
    for guess in range(50):
        third = (3, (guess + 1).to_bytes(33, "big"))
        try:
            seen.add(bytes(shamir.combine([*pair, third], 3)))
        except BadShare:
            continue
    assert SECRET not in seen
    assert len(seen) > 45


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s[:2],
        lambda s: s[:4],
        lambda s: [s[0], s[1], s[1]],
        lambda s: [s[0], s[1], (s[1][0], s[2][1])],
        lambda s: [s[0], s[1], (3, s[2][1][1:])],
        lambda s: [s[0], s[1], (3, s[2][1] + b"\0")],
        lambda s: [s[0], s[1], (0, s[2][1])],
        lambda s: [s[0], s[1], (-3, s[2][1])],
        lambda s: [s[0], s[1], (3, b"\xff" * 33)],
        lambda s: [s[0], s[1], (3, shamir.PRIME.to_bytes(33, "big"))],
    ],
)
def test_unusable_shares_are_refused(
    change: Callable[[list[tuple[int, bytes]]], list[tuple[int, bytes]]],
):
    """Too few, too many, duplicates, wrong lengths and values out of range."""
    with pytest.raises(BadShare):
        shamir.combine(change(list(shares_of().items())), 3)


def test_secret_beyond_32_bytes_is_refused():
    """A wrong share that leads out of the secrets' range is noticed."""
    value = (2**256 + 5).to_bytes(33, "big")
    with pytest.raises(BadShare, match="32-byte secret"):
        shamir.combine([(7, value)], 1)


@pytest.mark.parametrize(
    ("secret", "threshold", "holders"),
    [
        (SECRET[1:], 1, [1]),
        (SECRET, 0, [1]),
        (SECRET, 2, [1]),
        (SECRET, 1, [1, 1]),
        (SECRET, 1, [0, 1]),
        (SECRET, 1, [shamir.MAX_SHARES]),
    ],
)
def test_bad_arguments_are_refused(secret: bytes, threshold: int, holders: list[int]):
    """The value at 0 is the secret itself and is never dealt out."""
    with pytest.raises(ValueError, match=r"secret|holder"):
        shamir.split([secret], threshold, holders, random_bytes=entropy("e"))


def test_coefficients_are_fresh():
    """Two splits of one secret have no share in common."""
    random_bytes = entropy("one stream")
    first, second = (
        shamir.split([SECRET], 3, range(1, 6), random_bytes=random_bytes)
        for _ in range(2)
    )
    assert all(first[x] != second[x] for x in first)


def test_frozen_shares():
    """Shares of a known polynomial: 297 + 2x + x^2, in plain arithmetic."""
    pool = iter([(1).to_bytes(48, "big") + (2).to_bytes(48, "big")])
    secret = (297).to_bytes(32, "big")
    shares = shamir.split([secret], 3, [1, 2, 9], random_bytes=lambda _: next(pool))
    values = {x: int.from_bytes(share, "big") for x, share in shares.items()}
    assert values == {x: 297 + 2 * x + x * x for x in (1, 2, 9)}


@few(40)
@given(
    secrets=st.lists(st.binary(min_size=32, max_size=32), min_size=1, max_size=5),
    holders=st.lists(
        st.sampled_from([1, 2, 64, 255, shamir.MAX_SHARES - 1]),
        min_size=1,
        max_size=5,
        unique=True,
    ),
    data=st.data(),
)
def test_secrets_split_together_are_those_split_alone(
    secrets: list[bytes], holders: list[int], data: st.DataObject
):
    """Each has its own polynomial; the largest coefficients spill into no other."""
    threshold = data.draw(st.integers(1, len(holders)))
    largest = (shamir.PRIME - 1).to_bytes(48, "big") * (threshold - 1)
    pools = [
        largest if data.draw(st.booleans()) else entropy(f"{at}")(48 * (threshold - 1))
        for at in range(len(secrets))
    ]
    pool = iter(pools)
    shares = shamir.split(
        secrets, threshold, holders, random_bytes=lambda _: next(pool)
    )
    for at, (secret, drawn) in enumerate(zip(secrets, pools, strict=True)):
        terms = [int.from_bytes(secret, "big")]
        for k in range(threshold - 1):
            piece = drawn[48 * (threshold - 2 - k) : 48 * (threshold - 1 - k)]
            terms.append(int.from_bytes(piece, "big"))
        for x in holders:
            value = sum(term * x**k for k, term in enumerate(terms)) % shamir.PRIME
            assert shares[x][33 * at : 33 * (at + 1)] == value.to_bytes(33, "big")


@pytest.mark.slow
def test_speed_at_64_sites():
    """A round's sharing of one site, and one secret's restoring, with slack."""
    holders = range(1, 65)
    start = time.process_time()
    shamir.split([SECRET] * 64, 43, holders, random_bytes=entropy("e"))
    split_seconds = time.process_time() - start
    shares = shamir.split([SECRET], 43, holders, random_bytes=entropy("e"))
    shamir.combine(list(shares.items())[:43], 43)
    start = time.process_time()
    for chosen in itertools.repeat(list(shares.items())[:43], 100):
        shamir.combine(chosen, 43)
    combine_seconds = (time.process_time() - start) / 100
    assert split_seconds < 0.1
    assert combine_seconds < 0.005
