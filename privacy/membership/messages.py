"""Messages of enrolment: an invitation, a request with proofs, a certificate.

The aggregator's operator invites a site and hands its operator a token, which names the
aggregator's address, the fingerprint of its authority, the site and a secret. The site
makes its keys itself and sends their public halves with the secret; each key signs all
of them, so that nobody can enrol a key that is not theirs. Later the site shows its
certificate to get the next one.

A machine of a cloud needs no secret. What all its keys sign names the aggregator by the
fingerprint of its authority instead, and the digest of that, the *binding*, is in the
proof by which its cloud vouches for it: the proof is worth nothing with other keys or
at another aggregator. The binding of a pod of a cluster is of its lasting keys alone,
so that it is known before the request.

Here are the messages and the proofs, and no I/O; the token is in ``enrolment_token``.
The aggregator's side is in ``enrolment_service``, the site's in ``enrolment_site``.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from federation.ids import check_name
from federation.platform_identity import KUBERNETES, PLATFORMS
from federation.typed_json import decode, encode, refuse_constant
from privacy.membership.certificates import PrivateKey, signing_request
from privacy.membership.token import EnrolmentRefused, Token
from privacy.secagg.agreement.canonical import fields, float64
from privacy.secagg.agreement.identity import Identity, Label, PublicIdentity
from privacy.secagg.errors import BadSignature

VERSION = 1
# Clocks may differ by this much; an older renewal counts as a replay.
FRESH_SECONDS = 600.0
MAX_MESSAGE_BYTES = 64 << 10  # of a request
MAX_ANSWER_BYTES = 2 << 20  # a roster has at most half of it
MAX_PEM_CHARS = 4096
# Status of an answer to a machine that is not invited yet: it tries again.
TOO_EARLY = 425
MAX_WORDS_CHARS = 256

# A signed request of AWS with its session token, or a token of Google.
MAX_PROOF_CHARS = 8192

_ENROLMENT, _RENEWAL = b"crossfed-1 enrolment", b"crossfed-1 renewal"
_PLATFORM = b"crossfed-1 enrolment by platform"
_KEYS = b"crossfed-1 keys of a pod"

Message = TypeVar("Message")

# From a binding to the proof of a cloud.
Prove = Callable[[str], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Enrolment:
    """A site's request to enrol; only the aggregator sees it, through TLS.

    Attributes:
        kind: ``enrolment``.
        version: Version of this message.
        secret: Secret of the token, hexadecimal; empty if a platform vouches.
        site: Its name.
        organisation: Who answers for it, in words.
        release: Release of crossfed at the site.
        request: Signing request for its certificate, PEM.
        node_key: Public key that Flower knows the site by, PEM, on P-384.
        identity: Public key of its identity, 64 hexadecimal digits.
        node_proof: Signature of all of this by the node's key, hexadecimal.
        identity_proof: The same by the identity.
        platform: Cloud that vouches for the machine, ``aws`` or ``gcp``, or
            ``kubernetes``; empty if the secret admits it.
        proof: What the cloud has signed, or can check; see ``cloud_adapters.identity``.
    """

    kind: str
    version: int
    secret: str = field(repr=False)
    site: str
    organisation: str
    release: str
    request: str
    node_key: str
    identity: str
    node_proof: str
    identity_proof: str
    platform: str = ""
    proof: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewal:
    """A site's request for a new certificate, or for only the newest roster.

    Attributes:
        kind: ``renewal``.
        version: Version of this message.
        site: Its name.
        made_at: When, in seconds since 1970.
        release: Release of crossfed at the site.
        request: Signing request, PEM; empty for only the roster.
        certificate: The present one, PEM.
        certificate_proof: Signature of all of this by its key, hexadecimal.
        identity_proof: The same by the identity.
    """

    kind: str
    version: int
    site: str
    made_at: float
    release: str
    request: str
    certificate: str
    certificate_proof: str
    identity_proof: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EnrolmentReply:
    """The aggregator's answer.

    Attributes:
        version: Version of this message.
        certificate: The site's, PEM; empty if none was asked for.
        roster: Text of the roster.
        signature: Of the roster by the operator of its sites, hexadecimal; empty if
            there is none.
    """

    version: int
    certificate: str
    roster: str
    signature: str = ""


def request_enrolment(
    token: Token,
    *,
    organisation: str,
    release: str,
    identity: Identity,
    node_key: PrivateKey,
    key: PrivateKey,
    platform: str = "",
    prove: Prove | None = None,
) -> bytes:
    """Ask to be enrolled; private keys sign and are not in it.

    Args:
        token: The invitation.
        organisation: Who answers for the site, in words.
        release: Release of crossfed at the site.
        identity: The site's signing key (Ed25519).
        node_key: The key that Flower knows it by.
        key: The key of its certificate.
        platform: Cloud that vouches for this machine, if the token has no secret.
        prove: Makes the cloud's proof of a binding.
    """
    asked = Enrolment(
        kind="enrolment",
        version=VERSION,
        secret=token.secret.hex(),
        site=token.site,
        organisation=organisation,
        release=release,
        request=signing_request(token.site, key).decode(),
        node_key=public_pem(node_key).decode(),
        identity=identity.public.key.hex(),
        node_proof="",
        identity_proof="",
        platform=platform,
    )
    said = _enrolment_statement(asked, token.authority)
    proofs = {
        "node_proof": node_key.sign(said, ec.ECDSA(hashes.SHA384())).hex(),
        "identity_proof": identity.sign(Label.ENROLMENT, said).hex(),
    }
    if prove is not None:
        proofs["proof"] = prove(binding(asked, token.authority))
    return _dump({**_plain(asked), **proofs})


def request_renewal(
    site: str,
    *,
    made_at: float,
    release: str,
    identity: Identity,
    certificate: bytes,
    certificate_key: PrivateKey,
    key: PrivateKey | None,
) -> bytes:
    """Ask for a certificate of another key, or, without one, for the roster."""
    asked = Renewal(
        kind="renewal",
        version=VERSION,
        site=site,
        made_at=made_at,
        release=release,
        request="" if key is None else signing_request(site, key).decode(),
        certificate=certificate.decode(),
        certificate_proof="",
        identity_proof="",
    )
    said = _renewal_statement(asked)
    proofs = {
        "certificate_proof": certificate_key.sign(
            said, ec.ECDSA(hashes.SHA256())
        ).hex(),
        "identity_proof": identity.sign(Label.ENROLMENT, said).hex(),
    }
    return _dump({**_plain(asked), **proofs})


def read_request(body: bytes) -> Enrolment | Renewal:
    """Read a site's request, without checking proofs.

    Raises:
        EnrolmentRefused: It is too long, malformed or of another version.
    """
    found = _load(body, limit=MAX_MESSAGE_BYTES)
    kinds = {"enrolment": Enrolment, "renewal": Renewal}
    kind = kinds.get(str(found.get("kind")))
    if kind is None:
        raise EnrolmentRefused("this is neither an enrolment nor a renewal", status=400)
    asked: Enrolment | Renewal = _typed(found, kind)
    _check_words(asked)
    return asked


def read_answer(body: bytes) -> EnrolmentReply:
    """Read the aggregator's answer.

    Raises:
        EnrolmentRefused: It is malformed or of another version.
    """
    return _typed(_load(body, limit=MAX_ANSWER_BYTES), EnrolmentReply)


def answer(*, certificate: bytes, roster: str, signature: str = "") -> bytes:
    """Encode the answer to an accepted site."""
    said = EnrolmentReply(
        version=VERSION,
        certificate=certificate.decode(),
        roster=roster,
        signature=signature,
    )
    return _dump(_plain(said))


def refusal(reason: str) -> bytes:
    """Encode the answer to a rejected site."""
    return _dump({"version": VERSION, "refused": reason})


def read_refusal(body: bytes) -> str:
    """Why a site was rejected, in words."""
    try:
        reason = str(_load(body, limit=MAX_ANSWER_BYTES).get("refused", ""))
    except EnrolmentRefused:
        reason = ""
    printable = "".join(c for c in reason[:500] if c.isprintable())
    return printable or "it gives no reason"


def check_enrolment(asked: Enrolment, authority: str) -> ec.EllipticCurvePublicKey:
    """Check that a site holds the keys that it wants to enrol.

    The signing request's own signature is checked where it is answered.

    Args:
        asked: What it sent.
        authority: Fingerprint of the aggregator's authority, 64 hexadecimal digits.

    Returns:
        The node's key.

    Raises:
        EnrolmentRefused: A key is none, is on another curve or has not signed.
    """
    said = _enrolment_statement(asked, authority)
    node = _public_key(asked.node_key)
    _check_ecdsa(node, asked.node_proof, said, hashes.SHA384(), whose="node")
    _check_identity(asked.identity, asked.identity_proof, said)
    return node


def check_renewal(
    asked: Renewal, certificate: x509.Certificate, *, identity: str, now: float
) -> None:
    """Check that a renewal is recent, and signed by certificate and identity.

    Raises:
        EnrolmentRefused: It is not.
    """
    if not abs(now - asked.made_at) <= FRESH_SECONDS:
        raise EnrolmentRefused(
            f"the request is {now - asked.made_at:.0f} s old by this clock: set the "
            "clocks of both machines (NTP) and try again"
        )
    said = _renewal_statement(asked)
    key = certificate.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise EnrolmentRefused("this is not a site's certificate")
    _check_ecdsa(
        key, asked.certificate_proof, said, hashes.SHA256(), whose="certificate"
    )
    _check_identity(identity, asked.identity_proof, said)


def keys_digest(asked: Enrolment) -> str:
    """SHA-256 of the keys that make a site; binds an invitation to its first user."""
    keys = fields(asked.identity.encode(), asked.node_key.encode())
    return hashlib.sha256(keys).hexdigest()


def binding(asked: Enrolment, authority: str) -> str:
    """What a cloud's proof must name: SHA-256 of what all keys sign, hexadecimal.

    Of a pod, it is of aggregator, site and the two keys that stay the same in all its
    requests; what else they ask for, these keys sign.

    Args:
        asked: The request of a machine that a platform vouches for.
        authority: Fingerprint of the aggregator's authority.
    """
    if asked.platform == KUBERNETES:
        words = (asked.site, asked.node_key, asked.identity)
        said = [text.encode() for text in words]
        keys = fields(_KEYS, unhex(authority, "authority"), *said)
        return hashlib.sha256(keys).hexdigest()
    return hashlib.sha256(_enrolment_statement(asked, authority)).hexdigest()


def public_pem(key: PrivateKey) -> bytes:
    """Public half of a key as Flower and we write it."""
    return key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def unhex(digits: str, what: str) -> bytes:
    """Read hexadecimal digits in their only spelling.

    Raises:
        EnrolmentRefused: They are none.
    """
    try:
        found = bytes.fromhex(digits)
    except ValueError:
        found = b""
    if found.hex() != digits:
        raise EnrolmentRefused(f"{what} is not hexadecimal", status=400)
    return found


def _enrolment_statement(asked: Enrolment, authority: str) -> bytes:
    """What all keys sign: who invited, by secret or by name, and every public half."""
    words = (asked.site, asked.organisation, asked.release)
    keys = (asked.request, asked.node_key, asked.identity)
    said = [text.encode() for text in (*words, *keys)]
    if asked.platform:
        head = (_PLATFORM, unhex(authority, "authority"), asked.platform.encode())
        return fields(*head, *said)
    secret = hashlib.sha256(unhex(asked.secret, "secret")).digest()
    return fields(_ENROLMENT, secret, *said)


def _renewal_statement(asked: Renewal) -> bytes:
    words = (asked.site, asked.release, asked.request, asked.certificate)
    return fields(_RENEWAL, float64(asked.made_at), *(text.encode() for text in words))


def _check_words(asked: Enrolment | Renewal) -> None:
    """Lengths before content."""
    for name, value in _plain(asked).items():
        is_pem = name in {"request", "node_key", "certificate"}
        limit = MAX_PEM_CHARS if is_pem else MAX_WORDS_CHARS
        limit = MAX_PROOF_CHARS if name == "proof" else limit
        if not isinstance(value, str):
            continue
        if len(value) > limit or not (is_pem or value.isprintable()):
            raise EnrolmentRefused(
                f"{name} must be at most {limit} printable characters", status=400
            )
    if isinstance(asked, Enrolment):
        by_secret = asked.secret and not asked.platform and not asked.proof
        by_platform = asked.platform in PLATFORMS and asked.proof and not asked.secret
        if not (by_secret or by_platform):
            raise EnrolmentRefused(
                "an enrolment has a secret, or a platform and its proof", status=400
            )
    try:
        check_name(asked.site)
        "".join(v for v in _plain(asked).values() if isinstance(v, str)).encode()
        if isinstance(asked, Renewal):
            float64(asked.made_at)
    except ValueError as error:
        raise EnrolmentRefused(str(error), status=400) from None


def _public_key(pem: str) -> ec.EllipticCurvePublicKey:
    try:
        key = serialization.load_pem_public_key(pem.encode())
    except (ValueError, UnsupportedAlgorithm):
        raise EnrolmentRefused(
            "the node's key is not a public key", status=400
        ) from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(
        key.curve, ec.SECP384R1
    ):
        raise EnrolmentRefused("the node's key must be on the curve P-384", status=400)
    return key


def _check_ecdsa(
    key: ec.EllipticCurvePublicKey,
    proof: str,
    said: bytes,
    algorithm: hashes.HashAlgorithm,
    *,
    whose: str,
) -> None:
    try:
        key.verify(unhex(proof, "proof"), said, ec.ECDSA(algorithm))
    except InvalidSignature:
        raise EnrolmentRefused(
            f"the signature of the {whose} key is missing or wrong"
        ) from None


def _check_identity(identity: str, proof: str, said: bytes) -> None:
    try:
        key = PublicIdentity(unhex(identity, "identity"))
        key.verify(Label.ENROLMENT, said, unhex(proof, "proof"), who="the site")
    except (ValueError, BadSignature) as error:
        raise EnrolmentRefused(
            f"the signature of the identity is missing or wrong: {error}"
        ) from None


def _plain(value: Enrolment | Renewal | EnrolmentReply) -> dict[str, object]:
    found = encode(value)
    assert isinstance(found, dict)  # noqa: S101 -- a dataclass is written as an object
    return found


def _dump(value: dict[str, object]) -> bytes:
    return json.dumps(value, allow_nan=False).encode()


def _load(body: bytes, *, limit: int) -> dict[str, object]:
    if len(body) > limit:
        raise EnrolmentRefused(f"a message must have at most {limit} bytes", status=413)
    try:
        found = json.loads(body, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        raise EnrolmentRefused("this is not JSON", status=400) from None
    if not isinstance(found, dict):
        raise EnrolmentRefused("this is not a crossfed message", status=400)
    return found


def _typed(found: dict[str, object], kind: type[Message]) -> Message:
    version = found.get("version")
    if version != VERSION or isinstance(version, bool):
        raise EnrolmentRefused(
            f"the message has version {version!r:.20}, but this side uses version "
            f"{VERSION}: install the same release of crossfed on both sides",
            status=400,
        )
    try:
        made = decode(found, kind, where=kind.__name__)
    except (ValueError, RecursionError) as error:
        raise EnrolmentRefused(f"a malformed message: {error}", status=400) from None
    assert isinstance(made, kind)  # noqa: S101 -- what decode was asked for
    return made
