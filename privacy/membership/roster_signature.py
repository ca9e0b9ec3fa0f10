"""Rosters that the operator of several sites has signed.

On a machine that starts by itself, no person compares digests. Its operator's public
key is in its settings instead, and it trusts the rosters that this key has signed, for
this federation. The aggregator passes them on, and cannot make one.
"""

from privacy.membership.messages import unhex
from privacy.membership.token import EnrolmentRefused
from privacy.secagg.agreement.canonical import fields, u64
from privacy.secagg.agreement.identity import (
    SIGNATURE_BYTES,
    Identity,
    Label,
    PublicIdentity,
)
from privacy.secagg.agreement.roster import Roster
from privacy.secagg.errors import BadSignature, RosterRefused


def sign(roster: Roster, *, authority: str, signer: Identity) -> str:
    """Sign a roster; the signature as hexadecimal digits.

    Args:
        roster: Whom to trust; the caller has checked every key in it.
        authority: Fingerprint of the aggregator's authority, which names the
            federation, 64 hexadecimal digits.
        signer: The operator's key.
    """
    return signer.sign(Label.ROSTER, _statement(roster, authority)).hex()


def check(roster: Roster, signature: str, *, authority: str, signer: str) -> None:
    """Check that an operator has signed a roster for a federation.

    Args:
        roster: What the aggregator sent.
        signature: What it sent with it, hexadecimal; empty for none.
        authority: Fingerprint of the authority that this site pins.
        signer: Public key of the operator, 64 hexadecimal digits.

    Raises:
        RosterRefused: The operator has not, as far as the signature shows.
    """
    try:
        found = unhex(signature, "signature")
        if len(found) != SIGNATURE_BYTES:
            raise RosterRefused(
                f"roster {roster.serial} has no signature of the operator of this site"
            )
        PublicIdentity(unhex(signer, "roster_signer")).verify(
            Label.ROSTER, _statement(roster, authority), found, who="the operator"
        )
    except (EnrolmentRefused, ValueError, BadSignature) as error:
        raise RosterRefused(
            f"roster {roster.serial} is not signed by the operator of this site, whose "
            f"key is roster_signer in site.toml: {error}"
        ) from None


def _statement(roster: Roster, authority: str) -> bytes:
    return fields(unhex(authority, "authority"), u64(roster.serial), roster.digest)
