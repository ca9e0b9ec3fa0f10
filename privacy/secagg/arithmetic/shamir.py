"""Shamir's secret sharing of 32-byte secrets, over the field of 2^256 + 297.

A. Shamir, "How to share a secret", CACM 22 (1979). The secret is the value at 0 of
a random polynomial of degree t - 1; client x holds the value at x >= 1.
The prime is the smallest above 2^256, so that every 32-byte secret is an element.
Secrets, as 32 bytes, and shares, as 33, are numbers in big-endian order.

This is the only primitive of the protocol that is ours. Python's integers do not
take constant time: anyone who can time the splitting process on its own machine is
inside the boundary of the site's agent already. Shares carry no authentication
here: dealers commit to them in ``commitments``, and ``messages`` signs.
"""

from collections.abc import Sequence
from functools import lru_cache

from privacy.keystream import RandomBytes
from privacy.secagg.errors import BadShare

PRIME = 2**256 + 297
SECRET_BYTES = 32
SHARE_BYTES = 33
MAX_SHARES = 1 << 16

# 384 bits modulo a 257-bit prime: a bias below 2^-127 for each coefficient.
_COEFFICIENT_BYTES = 48


def split(
    secrets: Sequence[bytes | bytearray],
    threshold: int,
    holders: Sequence[int],
    *,
    random_bytes: RandomBytes,
) -> dict[int, bytearray]:
    """Split secrets so that any ``threshold`` holders can restore each of them.

    Args:
        secrets: 32 bytes each.
        threshold: Shares that restore one, t, in ``1..len(holders)``.
        holders: Distinct client numbers x >= 1.
        random_bytes: Source of the coefficients.

    Returns:
        For each holder its shares, 33 bytes of each secret, one after another.

    Guarantee:
        Fewer than ``threshold`` shares of a secret are statistically independent of
        it and of the others.

    Raises:
        ValueError: An argument is out of range.
    """
    if any(len(secret) != SECRET_BYTES for secret in secrets):
        raise ValueError(f"a secret must have {SECRET_BYTES} bytes")
    if not 1 <= threshold <= len(holders):
        raise ValueError(f"{len(holders)} holders cannot have threshold {threshold}")
    if len(set(holders)) != len(holders):
        raise ValueError("a holder is listed twice")
    if not all(1 <= x < MAX_SHARES for x in holders):
        raise ValueError(f"holders are numbered from 1 to {MAX_SHARES - 1}")
    polynomials = [
        [*_coefficients(threshold - 1, random_bytes), int.from_bytes(secret, "big")]
        for secret in secrets
    ]
    # Side by side in one number, with room for the values before their reduction:
    # a polynomial of degree t - 1 stays below PRIME * t * x^(t - 1).
    growth = (threshold - 1) * max(holders).bit_length() + threshold.bit_length()
    lane_bytes = SHARE_BYTES + growth // 8 + 1
    packed = [
        int.from_bytes(b"".join(c.to_bytes(lane_bytes, "big") for c in column), "big")
        for column in zip(*polynomials, strict=True)
    ]
    num_bytes = lane_bytes * len(secrets)
    return {
        x: _reduced(_evaluate(packed, x).to_bytes(num_bytes, "big"), lane_bytes)
        for x in holders
    }


def combine(shares: Sequence[tuple[int, bytes]], threshold: int) -> bytearray:
    """Restore a secret from exactly ``threshold`` shares.

    Args:
        shares: Pairs of holder and share.
        threshold: The t that the secret was split with.

    Returns:
        The 32 bytes, in an array that the caller can overwrite. A share that was
        changed gives another secret, not an error: see ``commitments``.

    Raises:
        BadShare: The shares are too many or too few, a holder is there twice, or a
            share or the result is out of range.
    """
    if len(shares) != threshold:
        raise BadShare(
            f"{len(shares)} shares were given instead of exactly {threshold}"
        )
    holders = tuple(x for x, _ in shares)
    weights = _weights_at_zero(holders)
    total = sum(
        weight * _decode(x, share)
        for weight, (x, share) in zip(weights, shares, strict=True)
    )
    value = total % PRIME
    if value >> (8 * SECRET_BYTES):
        raise BadShare("the shares do not combine to a 32-byte secret")
    return bytearray(value.to_bytes(SECRET_BYTES, "big"))


def _coefficients(count: int, random_bytes: RandomBytes) -> list[int]:
    pool = random_bytes(_COEFFICIENT_BYTES * count) if count else b""
    return [
        int.from_bytes(pool[at : at + _COEFFICIENT_BYTES], "big") % PRIME
        for at in range(0, len(pool), _COEFFICIENT_BYTES)
    ]


def _evaluate(coefficients: list[int], x: int) -> int:
    # Horner's rule without reduction: x is small, so numbers grow by a few bits a
    # step, which is cheaper than reducing every time.
    value = 0
    for coefficient in coefficients:
        value = value * x + coefficient
    return value


def _reduced(values: bytes, lane_bytes: int) -> bytearray:
    """The adjacent shares, before their reduction, in ``values``."""
    number = int.from_bytes
    shares = [
        (number(values[at : at + lane_bytes], "big") % PRIME).to_bytes(
            SHARE_BYTES, "big"
        )
        for at in range(0, len(values), lane_bytes)
    ]
    return bytearray().join(shares)


@lru_cache(maxsize=256)
def _weights_at_zero(holders: tuple[int, ...]) -> tuple[int, ...]:
    """Lagrange weights of the value at 0; holders are public."""
    if len(set(holders)) != len(holders):
        raise BadShare("a holder of a share is listed twice")
    if not all(1 <= x < MAX_SHARES for x in holders):
        raise BadShare(f"holders of shares are numbered from 1 to {MAX_SHARES - 1}")
    weights = []
    for x in holders:
        top = bottom = 1
        for other in holders:
            if other != x:
                top *= -other
                bottom *= x - other
        weights.append(top * pow(bottom, -1, PRIME) % PRIME)
    return tuple(weights)


def encode_secret(secret: bytes | bytearray) -> bytes:
    """A secret as the share that holder 0 would have."""
    return _encode(int.from_bytes(secret, "big"))


def _encode(value: int) -> bytes:
    return value.to_bytes(SHARE_BYTES, "big")


def _decode(holder: int, share: bytes) -> int:
    if len(share) != SHARE_BYTES:
        raise BadShare(
            f"the share of site {holder} has {len(share)} bytes instead of "
            f"{SHARE_BYTES}"
        )
    value = int.from_bytes(share, "big")
    if value >= PRIME:
        raise BadShare(f"the share of site {holder} is not an element of the field")
    return value
