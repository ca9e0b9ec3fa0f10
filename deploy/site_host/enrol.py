"""The site's side of enrolment: private keys are made here and never leave.

The first connection asks for the aggregator's root certificate and believes nothing
else; a root of another fingerprint than the token's ends it. Everything after that goes
over TLS that this root alone can vouch for (``enrolment_connection``).
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from clients.privacy.policy_spec import PolicySpec
from deploy import audit_log
from deploy.site_host import config as site_file
from deploy.site_host.config import SiteConfig
from deploy.site_host.enrolment_connection import PASSING, Aggregator, Way
from deploy.site_host.enrolment_roster import check_own_entry, parse_roster
from federation.errors import os_errors
from federation.ids import SiteId
from federation.protocols import Clock
from privacy.membership import certificates, messages as enrolment
from privacy.membership.certificates import (
    MALFORMED,
    PrivateKey,
    key_pem,
    load_key,
    new_key,
    parse_certificate,
)
from privacy.membership.introduction import release
from privacy.membership.messages import EnrolmentReply, Prove
from privacy.membership.token import EnrolmentRefused, Token
from privacy.secagg.agreement import identity, roster
from privacy.secagg.agreement.identity import Identity
from privacy.secagg.agreement.roster import Roster
from privacy.secagg.errors import KeyFileRefused
from privacy.secret_files import read_private, replace_private, write_new

PATIENCE_SECONDS, _AGAIN_SECONDS = 30.0, 2.0

# Opens it: address, root certificate (PEM), and the file of the site's certificate.
Connect = Callable[[str, bytes, Path | None], Way]

_SITE_TOML = Path(__file__).with_name("first_site.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineProof:
    """How this machine's cloud vouches for it.

    Attributes:
        platform: ``aws``, ``gcp`` or ``kubernetes``.
        prove: Makes a proof of a binding.
        signer: Public key of the operator who signs rosters, hexadecimal; empty if
            people compare them.
    """

    platform: str
    prove: Prove
    signer: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteEnrolled:
    """The result of an enrolment.

    Attributes:
        site: Its name.
        expires: When its certificate expires, in seconds since 1970.
        fingerprint: Fingerprint of its identity, for people to compare.
        roster: The roster that it trusts.
        newer: A newer roster that the aggregator has; None if there is none.
    """

    site: str
    folder: Path
    expires: float
    fingerprint: str
    roster: Roster
    newer: Roster | None = None


def enroll(
    token: Token,
    folder: Path,
    *,
    organisation: str,
    clock: Clock,
    connect: Connect = Aggregator,
    vouched: MachineProof | None = None,
) -> SiteEnrolled:
    """Make this folder's site a member of the federation.

    Keys that are in the folder are used; those that are not are made. A site whose
    answer was lost asks again with the same token and folder.

    Args:
        token: What the aggregator's operator has sent.
        folder: Folder of the site; it is made if there is none.
        organisation: Who answers for the site, in words.
        clock: Tells time.
        connect: Opens the connection.
        vouched: The cloud that vouches for this machine, if the token has no secret.

    Raises:
        EnrolmentRefused: The aggregator refuses, cannot be reached or is not the one
            that invited; the message says what to do.
        NotAuthenticated: The cloud gives this machine no identity.
        KeyFileRefused: A key file is damaged, open to others or cannot be written.
    """
    _check_new(token, folder, vouched, clock)
    with os_errors(EnrolmentRefused, f"make {folder}"):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    unknown = connect(token.address, b"", None)
    root = _patiently(lambda: unknown.authority(token.authority), clock)
    own, node_key, key = _keys(folder), _node_key(folder / "node.pem"), new_key()
    request = enrolment.request_enrolment(
        token,
        organisation=organisation,
        release=release(),
        identity=own,
        node_key=node_key,
        key=key,
        platform="" if vouched is None else vouched.platform,
        prove=None if vouched is None else vouched.prove,
    )
    way = connect(token.address, root, None)
    found = enrolment.read_answer(_patiently(lambda: way.post(request), clock))
    expires = _check_certificate(found, key, root, clock=clock)
    members = _check_roster(found, SiteId(token.site), own)
    about = {"address": token.address, "authority": token.authority}
    audit_log.note(folder, "site.enrol", token.site, at=clock.now(), **about)
    _replace(folder / "ca.crt", root)
    # A machine whose operator signs rosters trusts none before.
    if vouched is None or not vouched.signer:
        _replace(folder / "roster.toml", roster.dumps(members).encode())
    if not (folder / "site.toml").exists():
        _replace(folder / "site.toml", _first_settings(token).encode())
    # The last, so that a folder with it is a complete site.
    _replace(folder / "site.pem", found.certificate.encode() + key_pem(key))
    return SiteEnrolled(
        site=token.site,
        folder=folder,
        expires=expires,
        fingerprint=own.public.fingerprint,
        roster=members,
    )


def _check_new(
    token: Token, folder: Path, vouched: MachineProof | None, clock: Clock
) -> None:
    """Refuse a token that a person or a machine cannot use, or an enrolled site."""
    if bool(token.secret) is (vouched is not None):
        raise EnrolmentRefused(
            "a token with a secret is used alone, and one without needs --platform "
            "aws, gcp or kubernetes"
        )
    if vouched is None and holds_certificate(folder, clock=clock):
        raise EnrolmentRefused(
            f"{folder} belongs to an enrolled site: crossfed enroll --renew gets a new "
            "certificate; give another --folder for another site"
        )


def _first_settings(token: Token) -> str:
    """The ``site.toml`` of a site that has none."""
    return _SITE_TOML.read_text(encoding="utf-8").format(
        name=token.site,
        address=token.address,
        functions=json.dumps(PolicySpec().functions),
    )


def renew(
    config: SiteConfig, *, clock: Clock, connect: Connect = Aggregator
) -> SiteEnrolled:
    """Replace the site's certificate by one for a new key.

    The old one holds until it expires, and a running site takes the new one with its
    next connection.

    Raises:
        EnrolmentRefused: See ``enroll``; or the site has no certificate.
        KeyFileRefused: A key file is damaged, open to others or cannot be written.
        RosterRefused: The site's own roster is malformed.
    """
    key = new_key()
    path = _certificate_path(config)
    root = _read(config.authority)
    own, found = _ask(config, key, clock=clock, connect=connect)
    expires = _check_certificate(found, key, root, clock=clock)
    members = roster.load(config.roster)
    newest = parse_roster(found)
    audit_log.note(config.folder, "site.renew", config.file.name, at=clock.now())
    _replace(path, found.certificate.encode() + key_pem(key))
    return SiteEnrolled(
        site=config.file.name,
        folder=config.folder,
        expires=expires,
        fingerprint=own.public.fingerprint,
        roster=members,
        newer=newest if newest.digest != members.digest else None,
    )


def renew_when_due(
    config: SiteConfig, *, clock: Clock, connect: Connect = Aggregator
) -> SiteEnrolled | None:
    """Renew if less than a third of the certificate's time is left.

    Returns:
        What ``renew`` returns; None if it is too early or there is no certificate.

    Raises:
        EnrolmentRefused: See ``renew``.
        KeyFileRefused: See ``renew``.
        RosterRefused: See ``renew``.
    """
    if config.certificate is None:
        return None
    present = _pair(config.certificate)[0]
    left = present.not_valid_after_utc.timestamp() - clock.now()
    if left > certificates.RENEW_BEFORE_SECONDS:
        return None
    return renew(config, clock=clock, connect=connect)


def newest_roster(
    config: SiteConfig, *, clock: Clock, connect: Connect = Aggregator
) -> Roster:
    """Ask the aggregator for its roster; nothing is written.

    Raises:
        EnrolmentRefused: See ``renew``.
        KeyFileRefused: See ``renew``.
    """
    return signed_roster(config, clock=clock, connect=connect)[0]


def signed_roster(
    config: SiteConfig, *, clock: Clock, connect: Connect = Aggregator
) -> tuple[Roster, str]:
    """Ask for the roster and for its operator's signature, which is not checked.

    Returns:
        The roster, and the signature in hexadecimal digits; empty if it has none.

    Raises:
        EnrolmentRefused: See ``renew``.
        KeyFileRefused: See ``renew``.
    """
    _, found = _ask(config, None, clock=clock, connect=connect)
    return parse_roster(found), found.signature


def _ask(
    config: SiteConfig, key: PrivateKey | None, *, clock: Clock, connect: Connect
) -> tuple[Identity, EnrolmentReply]:
    """Show the present certificate, and ask for one of another key if there is one."""
    path = _certificate_path(config)
    present, present_key = _pair(path)
    own = identity.load(config.identity)
    request = enrolment.request_renewal(
        config.file.name,
        made_at=clock.now(),
        release=release(),
        identity=own,
        certificate=present.public_bytes(serialization.Encoding.PEM),
        certificate_key=present_key,
        key=key,
    )
    aggregator = connect(config.file.aggregator.address, _read(config.authority), path)
    answer = _patiently(lambda: aggregator.post(request), clock)
    return own, enrolment.read_answer(answer)


def _patiently(send: Callable[[], bytes], clock: Clock) -> bytes:
    """Send a request, and repeat it while the aggregator cannot answer yet."""
    end = clock.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return send()
        except EnrolmentRefused as error:
            if error.status not in PASSING or clock.monotonic() >= end:
                raise
        clock.sleep(_AGAIN_SECONDS)


def _certificate_path(config: SiteConfig) -> Path:
    if config.certificate is None:
        raise EnrolmentRefused(
            f"site {config.file.name!r} has no certificate (key certificate of "
            "site.toml): enrol it with a token"
        )
    return config.certificate


def _pair(path: Path) -> tuple[x509.Certificate, PrivateKey]:
    """Certificate and key of one file."""
    try:
        certificate = parse_certificate(read_private(path))
    except KeyFileRefused as error:
        if str(path) in str(error):
            raise
        raise KeyFileRefused(
            f"{path} holds no certificate: restore it, or enrol the site again"
        ) from None
    return certificate, load_key(path)


def certificate_ends(config: SiteConfig) -> float | None:
    """When a site's certificate ends, in seconds since 1970; None if it has none.

    Raises:
        KeyFileRefused: Its file is damaged or open to others.
    """
    if config.certificate is None or not config.certificate.exists():
        return None
    ends: float = _pair(config.certificate)[0].not_valid_after_utc.timestamp()
    return ends


def holds_certificate(folder: Path, *, clock: Clock) -> bool:
    """Whether a folder has a certificate that is still valid.

    Raises:
        KeyFileRefused: Its file is damaged or open to others.
    """
    path = folder / "site.pem"
    if not path.exists():
        return False
    expires: float = _pair(path)[0].not_valid_after_utc.timestamp()
    return expires > clock.now()


def _keys(folder: Path) -> Identity:
    path = folder / "identity.pem"
    if path.exists():
        return identity.load(path)
    made = identity.generate(os.urandom)
    made.save(path)
    return made


def _node_key(path: Path) -> PrivateKey:
    if not path.exists():
        made = ec.generate_private_key(ec.SECP384R1())
        with os_errors(KeyFileRefused, f"write {path}"):
            write_new(path, key_pem(made))
    found = load_key(path)
    if not isinstance(found.curve, ec.SECP384R1):
        raise KeyFileRefused(
            f"{path} uses the curve {found.curve.name} and not P-384: move it away, "
            "and a new key is created"
        )
    return found


def _check_certificate(
    found: EnrolmentReply, key: PrivateKey, root: bytes, *, clock: Clock
) -> float:
    """Check a certificate against our key and the pinned root; return its expiry."""
    try:
        certificate = parse_certificate(found.certificate.encode())
        issuer = parse_certificate(root)
        certificate.verify_directly_issued_by(issuer)
        is_ours = certificate.public_key() == key.public_key()
    except (*MALFORMED, InvalidSignature, KeyFileRefused) as error:
        raise EnrolmentRefused(f"the aggregator sent no certificate: {error}") from None
    expires = certificate.not_valid_after_utc.timestamp()
    if not is_ours or expires <= clock.now():
        raise EnrolmentRefused(
            "the aggregator sent a certificate for another key, or one that has "
            "expired by this machine's clock: compare the clocks, and try again"
        )
    return expires


def _check_roster(found: EnrolmentReply, site: SiteId, own: Identity) -> Roster:
    members = parse_roster(found)
    check_own_entry(members, site, own)
    return members


def _read(path: Path) -> bytes:
    return certificates.read_certificate(path).public_bytes(serialization.Encoding.PEM)


def _replace(path: Path, data: bytes) -> None:
    advice = (
        "free some space or make the folder writable, and run the same command again"
    )
    with os_errors(KeyFileRefused, f"write {path}", advice):
        replace_private(path, data)


def config_of(folder: Path) -> SiteConfig:
    """Read a site's ``site.toml``.

    Raises:
        JobError: It is missing or wrong.
    """
    return site_file.load(folder / "site.toml")
