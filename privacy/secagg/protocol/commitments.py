"""What a dealer commits to: the secrets of its round and every share of them.

A dealer i shares its secrets of a round, b_i and k_il for every other site l, among
the holders x of the cohort. For each of these shares, and for each secret as the
share of holder 0 (a polynomial's value at 0), there is one commitment::

    SHA-256(LP("xsa-v2/share") LP(ctx_r) u64 i  u64 x  u64 l  LP(share))

with l = i for the self mask. The commitments for one holder, in the order of its
bundle, are a row. The dealer's signed head holds one digest for each holder, of what
was sealed for it and of its row, so that nobody else can exchange either::

    SHA-256(LP(sealed) LP(row))    for holder 0 and those of the cohort, in order

A commitment hides its share without a nonce: each secret is 32 bytes that no one can
guess, and any t - 1 shares are independent of it. It binds, as SHA-256 has no known
collisions. So a share that differs from its commitment shows who is at fault: on
receipt the dealer, or a holder that lies about it; on release the holder.
"""

import hashlib
import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache

from privacy.secagg.agreement.canonical import lp, u64
from privacy.secagg.agreement.contract import MAX_MEMBERS
from privacy.secagg.agreement.message import DIGEST_BYTES
from privacy.secagg.arithmetic.shamir import SHARE_BYTES

SECRET = 0  # The holder that no site is: its share is the secret.

_TAGGED = lp(b"xsa-v2/share")
_TWO = struct.Struct(">QQ")


def secrets_of(dealer: int, cohort: Sequence[int]) -> list[int]:
    """What a dealer's bundles hold, in order: its self mask, then its pairs."""
    return [dealer, *(x for x in cohort if x != dealer)]


def place_of(dealer: int, about: int, cohort: Sequence[int]) -> int:
    """Where ``secrets_of`` has a secret."""
    if about == dealer:
        return 0
    return cohort.index(about) + (about < dealer)


def place_of_holder(holder: int, cohort: Sequence[int]) -> int:
    """Where a head has the digest of what is dealt to a site."""
    return 1 + cohort.index(holder)  # Behind that of ``SECRET``.


def commit(
    bundle: bytes | bytearray,
    *,
    context: bytes,
    dealer: int,
    holder: int,
    cohort: Sequence[int],
) -> bytes:
    """The row for one holder.

    Args:
        bundle: Its shares, one after another, or the secrets if it is ``SECRET``.
        context: ctx_r.
        dealer: Who dealt them.
        holder: Who holds them.
        cohort: All sites of the round, increasing.
    """
    copy = hashlib.sha256(_beginning(context, dealer, holder)).copy
    digests, shares, at = [], memoryview(bundle), 0
    for about in _abouts(dealer, tuple(cohort)):
        one = copy()
        one.update(about)
        one.update(shares[at : at + SHARE_BYTES])
        digests.append(one.digest())
        at += SHARE_BYTES
    return b"".join(digests)


def commit_one(
    share: bytes | bytearray, *, context: bytes, dealer: int, holder: int, about: int
) -> bytes:
    """The commitment to one share; ``about`` is l, or the dealer for its self mask."""
    begun = hashlib.sha256(_beginning(context, dealer, holder))
    begun.update(_TWO.pack(about, len(share)))
    begun.update(share)
    return begun.digest()


@lru_cache(maxsize=MAX_MEMBERS)
def _abouts(dealer: int, cohort: tuple[int, ...]) -> list[bytes]:
    """The header of each share of a bundle: whose secret, and LP's length."""
    return [_TWO.pack(about, SHARE_BYTES) for about in secrets_of(dealer, cohort)]


def _beginning(context: bytes, dealer: int, holder: int) -> bytes:
    """What all commitments for one holder begin with, encoded once."""
    return _TAGGED + lp(context) + _TWO.pack(dealer, holder)


def in_row(row: bytes, at: int) -> bytes:
    """The commitment at a place of ``secrets_of``, or a holder's digest in a head."""
    return row[DIGEST_BYTES * at : DIGEST_BYTES * (at + 1)]


def dealt_digests(sealed: Mapping[int, bytes], rows: Mapping[int, bytes]) -> bytes:
    """What a head says: the digests of all holders, see ``place_of_holder``.

    Args:
        sealed: What was sealed, by holder.
        rows: The rows of all holders; none in P1.
    """
    digests = [dealt_digest(sealed.get(x, b""), rows[x]) for x in sorted(rows)]
    return b"".join(digests)


def dealt_digest(sealed: bytes, row: bytes) -> bytes:
    """What a head says of one holder; ``sealed`` is empty for what is not sealed."""
    digest = hashlib.sha256(u64(len(sealed)))
    for piece in (sealed, u64(len(row)), row):
        digest.update(piece)
    return digest.digest()
