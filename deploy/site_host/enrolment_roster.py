"""Rosters from the aggregator, and when a site accepts one.

Whom a site trusts is its operator's decision: a roster that comes with a certificate is
looked at, and one that is newer takes the place of the site's own when a person has
compared its digest with others, or if the operator has signed it.
"""

from cryptography.hazmat.primitives import hashes

from deploy import audit_log
from deploy.site_host.config import SiteConfig
from federation.errors import SiteError
from federation.ids import SiteId
from privacy.membership import roster_signature
from privacy.membership.certificates import read_certificate
from privacy.membership.introduction import Proposal
from privacy.membership.messages import EnrolmentReply
from privacy.membership.token import EnrolmentRefused
from privacy.secagg.agreement import identity, roster
from privacy.secagg.agreement.identity import Identity
from privacy.secagg.agreement.roster import Roster
from privacy.secagg.errors import RosterRefused, UnknownSite

# Digits of a roster's digest that a person must give.
MIN_DIGEST_DIGITS = 32


def accept_roster(
    config: SiteConfig, newest: Roster, digest: str, *, at: float
) -> None:
    """Trust a newer roster whose digest a person has compared.

    Args:
        config: The site.
        newest: What ``newest_roster`` returned.
        digest: At least 32 hexadecimal digits that it begins with.
        at: Seconds since 1970.

    Raises:
        RosterRefused: The digest is another one's or too short, the roster is older
            than the site's, or it changes the site's or the aggregator's own key.
        StaleRoster: It is older than the one here.
    """
    given = "".join(digest.split()).lower()
    if len(given) < MIN_DIGEST_DIGITS or not newest.digest.hex().startswith(given):
        raise RosterRefused(
            f"the aggregator's roster has the digest {newest.digest.hex()}, not "
            f"{digest[:80]!r}: compare it with the operator of the aggregator and with "
            f"other sites, and give at least {MIN_DIGEST_DIGITS} digits of it"
        )
    _replace(config, newest, roster.load(config.roster), at=at)


def accept_signed(
    config: SiteConfig, newest: Roster, signature: str, *, at: float
) -> bool:
    """Trust a roster that the operator of this site has signed.

    Args:
        config: The site, whose ``roster_signer`` is set.
        newest: What the aggregator sent.
        signature: What it sent with it.
        at: Seconds since 1970.

    Returns:
        Whether it is another one than before.

    Raises:
        RosterRefused: The operator has not signed it, or it changes the site's or the
            aggregator's own key.
        StaleRoster: It is older than the one here.
    """
    authority = read_certificate(config.authority).fingerprint(hashes.SHA256()).hex()
    roster_signature.check(
        newest, signature, authority=authority, signer=config.file.roster_signer
    )
    before = roster.load(config.roster) if config.roster.exists() else None
    if before is not None and before.digest == newest.digest:
        return False
    signer = f"the signer {config.file.roster_signer}"
    _replace(config, newest, before, at=at, who=signer)
    return True


def _replace(
    config: SiteConfig,
    newest: Roster,
    before: Roster | None,
    *,
    at: float,
    who: str | None = None,
) -> None:
    if before is not None:
        before.check_successor(newest)
    if before is not None and newest.aggregator_key != before.aggregator_key:
        raise RosterRefused(
            "the aggregator's own key has changed: if its operator confirms that, pin "
            "the new one with crossfed keys trust --aggregator --replace"
        )
    check_own_entry(newest, SiteId(config.file.name), identity.load(config.identity))
    serial, digest = str(newest.serial), newest.digest.hex()
    audit_log.note(
        config.folder, "roster.accept", serial, at=at, who=who, digest=digest
    )
    roster.save(newest, config.roster)


def check_same(config: SiteConfig, held: Roster, proposal: Proposal) -> None:
    """Check that a run rests on the roster of this site, before it begins.

    The contract says so again; a site would refuse it only in the first round.

    Raises:
        SiteError: It rests on another one.
    """
    serial = proposal.roster_serial
    if proposal.roster_digest in {"", held.digest.hex()}:
        return
    advice = "submit the job again, as a new run"  # This one keeps its older roster.
    if serial >= held.serial:
        command = "crossfed enroll --roster --folder {}"
        advice = f"its operator compares it and accepts it with {command}"
    other = "another " if serial == held.serial else ""
    fault = (
        f"site {config.file.name!r} has roster {held.serial}, but the run has {other}"
        f"roster {serial}: "
    )
    outside = fault + advice.format("DIR")  # Where it is, is the site's business.
    raise SiteError(fault + advice.format(config.folder), outside=outside)


def newest(config: SiteConfig, held: Roster, own: Identity) -> Roster:
    """Read a site's roster again: its operator may have accepted a newer one.

    Args:
        config: The site.
        held: What its agent goes by until now.
        own: The site's key.

    Returns:
        What the file holds.

    Raises:
        RosterRefused: It cannot be read, is no roster, or does not pin the site's key.
        StaleRoster: It is older than ``held``.
    """
    found = roster.load(config.roster)
    held.check_successor(found)
    check_own_entry(found, SiteId(config.file.name), own)
    return found


def differences(before: Roster, after: Roster) -> list[str]:
    """Describe the changes of a newer roster."""
    old = {entry.site: entry for entry in before.sites}
    new = {entry.site: entry for entry in after.sites}
    lines = [f"withdraws {e.role} {s!r}" for s, e in old.items() if s not in new]
    for site, entry in new.items():
        fingerprint = identity.PublicIdentity(entry.public_key).fingerprint
        said = (
            f"{entry.role} {site!r} of {entry.organisation!r}, fingerprint "
            f"{fingerprint}"
        )
        if site not in old:
            lines.append(f"adds {said}")
        elif old[site] != entry:
            same = "the same party with the same data; others need a new name"
            lines.append(f"changes {said}: accept it only for {same}")
    if before.aggregator_key != after.aggregator_key:
        lines.append("changes the key of the aggregator")
    return lines


def check_own_entry(members: Roster, site: SiteId, own: Identity) -> None:
    """Check that a roster pins this site's own key.

    Raises:
        RosterRefused: It does not.
    """
    try:
        entry = members.entry(site)
    except UnknownSite as error:
        raise RosterRefused(f"{error}: this site was removed") from None
    if entry.public_key != own.public.key:
        raise RosterRefused(
            f"roster {members.serial} pins another key for this site: tell the "
            "aggregator's operator, and keep the present roster"
        )


def parse_roster(found: EnrolmentReply) -> Roster:
    """Read the roster of an answer.

    Raises:
        EnrolmentRefused: It is none.
    """
    try:
        return roster.parse(found.roster)
    except RosterRefused as error:
        raise EnrolmentRefused(f"the aggregator sent no roster: {error}") from error
