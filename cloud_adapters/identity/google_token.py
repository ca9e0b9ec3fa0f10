"""Identity tokens of Google's machines: asked for there, and checked anywhere.

The audience of a token is the binding of what a machine asks for, so that the token is
worth nothing for anything else. A token of ``format=full`` also says which machine it
is; one that was made with a service account's key, or by someone who may act as it,
does not, and is refused.

Source: Google, "Verifying the identity of instances"; RFC 7519; RFC 7515.
"""

import base64
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from cloud_adapters.net import short_requests
from federation.errors import NotAuthenticated, PlatformUnavailable, ProofRefused
from federation.platform_identity import GCP, PlatformIdentity
from federation.protocols import Clock

CERTIFICATES = "https://www.googleapis.com/oauth2/v1/certs"
# Of the audience; ``.invalid`` is no registered domain.
AUDIENCE = "https://crossfed.invalid/enrolment/"
ISSUERS = frozenset({"https://accounts.google.com", "accounts.google.com"})
# A token holds for an hour, and ours is used immediately.
FRESH_SECONDS, SKEW_SECONDS = 600.0, 60.0
MAX_TOKEN_CHARS = 8192
_MAX_BYTES = 1 << 16
_KEEP_SECONDS, _AGAIN_SECONDS = 3600.0, 30.0
_OK = 200


def identity_token(audience: str) -> str:
    """Request this machine's identity token, signed by Google; it is a secret.

    Raises:
        NotAuthenticated: This is no machine of Google's, or has no service account.
    """
    import google.auth.exceptions  # noqa: PLC0415 -- the extra gcp; checking needs none
    import google.auth.transport.requests  # noqa: PLC0415
    from google.oauth2 import id_token  # noqa: PLC0415

    try:
        token: str = id_token.fetch_id_token(
            google.auth.transport.requests.Request(),  # type: ignore[no-untyped-call]
            audience,
        )
    except (google.auth.exceptions.GoogleAuthError, OSError) as error:
        raise NotAuthenticated(
            "Google provides no identity token here: run on a machine or pod with a "
            f"service account ({type(error).__name__})"
        ) from error
    return token


def prove(binding: str) -> str:
    """Have Google vouch for this machine and a binding.

    Raises:
        NotAuthenticated: See ``identity_token``.
    """
    return identity_token(AUDIENCE + binding)


@dataclass(kw_only=True)
class GoogleVerifier:
    """Checks tokens; threads may share it.

    Attributes:
        clock: Tells time.
        certificates: URL of Google's certificates, by their ids.
    """

    clock: Clock
    certificates: str = CERTIFICATES
    _known: Mapping[str, str] = field(default_factory=dict, init=False)
    _next_look: float = field(default=0.0, init=False)
    _valid_until: float = field(default=0.0, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def verify(self, proof: str, binding: str) -> PlatformIdentity:
        """Say which machine a token is about.

        Args:
            proof: The token.
            binding: What it must have been made for.

        Raises:
            ProofRefused: It is not by Google, not for this, too old or not a machine's.
            PlatformUnavailable: Google's certificates cannot be read.
        """
        signed, head, claims, signature = _parts(proof)
        # The algorithm is ours and never the token's: "none" and HMAC are others.
        if head.get("alg") != "RS256":
            raise ProofRefused("the token of Google is not signed with RS256")
        certificate = self._certificate(head.get("kid"))
        try:
            key = x509.load_pem_x509_certificate(certificate.encode()).public_key()
        except ValueError as error:
            raise PlatformUnavailable(
                f"{self.certificates} holds no certificate: {error}"
            ) from None
        if not isinstance(key, rsa.RSAPublicKey):
            raise PlatformUnavailable(f"{self.certificates} has a key that is not RSA")
        try:
            key.verify(signature, signed, padding.PKCS1v15(), hashes.SHA256())
        except InvalidSignature:
            raise ProofRefused("the token is not signed by Google") from None
        self._check_claims(claims, binding)
        return _machine(claims)

    def _check_claims(self, claims: Mapping[str, Any], binding: str) -> None:
        if claims.get("iss") not in ISSUERS:
            raise ProofRefused("the token was not issued by Google's accounts")
        if claims.get("aud") != AUDIENCE + binding:
            raise ProofRefused(
                "the token of Google was made for other keys, another site or another "
                "aggregator"
            )
        now = self.clock.now()
        issued, expires = (_seconds(claims.get(name)) for name in ("iat", "exp"))
        if expires <= now - SKEW_SECONDS:
            raise ProofRefused(f"the token of Google expired {now - expires:.0f} s ago")
        if not -SKEW_SECONDS <= now - issued <= FRESH_SECONDS:
            raise ProofRefused(
                f"the token of Google is {now - issued:.0f} s old by this clock: set "
                "the clocks of both machines (NTP) and try again"
            )

    def _certificate(self, kid: object) -> str:
        """Find a certificate by its id, and ask for new ones now and then."""
        if not isinstance(kid, str):
            raise ProofRefused("the token is signed with no key of Google's")
        with self._lock:
            now = self.clock.monotonic()
            is_missing = kid not in self._known or now >= self._valid_until
            # Invented ids cause no further requests.
            if is_missing and now >= self._next_look:
                self._next_look = now + _AGAIN_SECONDS
                self._known = self._read()
                self._valid_until = now + _KEEP_SECONDS
            found = self._known.get(kid)
        if found is None:
            raise ProofRefused("the token is signed with no key of Google's")
        return found

    def _read(self) -> Mapping[str, str]:
        answer = short_requests.ask(self.certificates, max_bytes=_MAX_BYTES)
        try:
            found = json.loads(answer.body)
        except (ValueError, RecursionError):
            found = None
        if (
            answer.status != _OK
            or not isinstance(found, dict)
            or not all(isinstance(each, str) for each in found.values())
        ):
            raise PlatformUnavailable(
                f"{self.certificates} returns no certificates (HTTP {answer.status})"
            )
        return found


def _parts(token: str) -> tuple[bytes, Mapping[str, Any], Mapping[str, Any], bytes]:
    """What is signed, its two halves, and the signature."""
    words = token.split(".")
    if len(token) > MAX_TOKEN_CHARS or len(words) != 3:  # noqa: PLR2004 -- of a JWT
        raise ProofRefused("this is not a token of Google")
    head, claims, signature = words
    return (
        f"{head}.{claims}".encode(),
        _object(_decoded(head)),
        _object(_decoded(claims)),
        _decoded(signature),
    )


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(
            text.encode("ascii") + b"=" * (-len(text) % 4), b"-_", validate=True
        )
    except ValueError:
        raise ProofRefused("this is not a token of Google") from None


def _object(data: bytes) -> Mapping[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ProofRefused("this is not a token of Google")
    return found


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ProofRefused("the token of Google does not say when it was made")
    return float(value)


def _machine(claims: Mapping[str, Any]) -> PlatformIdentity:
    machine = claims.get("google")
    machine = machine.get("compute_engine") if isinstance(machine, dict) else None
    if not isinstance(machine, dict):
        raise ProofRefused(
            "the token of Google is about no machine: it was made with a key of the "
            "service account, or by someone who acts as it"
        )
    email, is_verified = claims.get("email"), claims.get("email_verified")
    names = [machine.get(key) for key in ("project_id", "zone", "instance_name")]
    if is_verified is not True or not all(isinstance(n, str) for n in (email, *names)):
        raise ProofRefused("the token of Google names no service account or machine")
    project, zone, name = names
    return PlatformIdentity(
        platform=GCP,
        account=str(project),
        principal=str(email),
        instance=f"{zone}/{name}",
    )
