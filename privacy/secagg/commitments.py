"""What a dealer commits to: the secrets of its round and every share of them.

A dealer i shares its secrets of a round, b_i and k_il for every other site l, among
the holders x of the cohort. For each of these shares, and for each secret as the
share of holder 0 (a polynomial's value at 0), there is one commitment::

    SHA-256(LP("xsa-v2/share") LP(ctx_r) u64 i  u64 x  u64 l  LP(share))

with l = i for the self mask. The commitments for one holder, in the order of its
bundle, are a row. The dealer's signed head holds one digest for each holder, of what
was sealed for it and of its row, so that nobody else can exchange either::

    SHA-256(LP(sealed) LP(row))

A commitment hides its share without a nonce: each secret is 32 bytes that no one can
guess, and any t - 1 shares are independent of it. It binds, as SHA-256 has no known
collisions. So a share that differs from its commitment shows who is at fault: on
receipt the dealer, or a holder that lies about it; on release the holder.
"""

import hashlib
from collections.abc import Sequence

from privacy.secagg.canonical import fields, lp, u64
from privacy.secagg.contract import DIGEST_BYTES
from privacy.secagg.shamir import SHARE_BYTES

SECRET = 0  # The holder that no site is: its share is the secret.

_TAG = b"xsa-v2/share"


def secrets_of(dealer: int, cohort: Sequence[int]) -> list[int]:
    """What a dealer's bundles hold, in order: its self mask, then its pairs."""
    return [dealer, *(x for x in cohort if x != dealer)]


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
        cohort: All sites, increasing.
    """
    about = secrets_of(dealer, cohort)
    return b"".join(
        commit_one(
            bytes(bundle[SHARE_BYTES * at : SHARE_BYTES * (at + 1)]),
            context=context,
            dealer=dealer,
            holder=holder,
            about=peer,
        )
        for at, peer in enumerate(about)
    )


def commit_one(
    share: bytes | bytearray, *, context: bytes, dealer: int, holder: int, about: int
) -> bytes:
    """The commitment to one share; ``about`` is l, or the dealer for its self mask."""
    who = u64(dealer) + u64(holder) + u64(about)
    return hashlib.sha256(fields(_TAG, context) + who + lp(bytes(share))).digest()


def in_row(row: bytes, at: int) -> bytes:
    """The commitment at a place of ``secrets_of``."""
    return row[DIGEST_BYTES * at : DIGEST_BYTES * (at + 1)]


def dealt_digest(sealed: bytes, row: bytes) -> bytes:
    """What a head says of one holder; ``sealed`` is empty for what is not sealed."""
    return hashlib.sha256(fields(sealed, row)).digest()
