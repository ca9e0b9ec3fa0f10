"""Who vouches for machines, on loopback: STS of AWS, and Google's signed tokens.

``CheckingSts`` computes every signature again, from what has arrived. ``GoogleMachine``
is a machine's metadata service and the page of Google's certificates in one.
"""

import base64
import hashlib
import hmac
import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from support.google_server import Answer, GoogleServer, Request, json_answer

from federation.clock import SystemClock

ACCOUNT, ROLE, INSTANCE = "123456789012", "crossfed-site", "i-0123456789abcdef0"
PROJECT, ZONE, MACHINE = "p-1", "europe-west4-a", "site-b"
EMAIL = "site@p-1.iam.gserviceaccount.com"
AWS_KEYS = {
    "AWS_ACCESS_KEY_ID": "ASIATESTTESTTESTTEST",
    "AWS_SECRET_ACCESS_KEY": "secret-of-the-machine",
    "AWS_SESSION_TOKEN": "session-of-the-machine",
}


def arn_of(role: str = ROLE, session: str = INSTANCE, account: str = ACCOUNT) -> str:
    """Who signs, as STS names it."""
    return f"arn:aws:sts::{account}:assumed-role/{role}/{session}"


class CheckingSts(GoogleServer):
    """STS: it answers who has signed, if the signature is right.

    Attributes:
        arn: Who has the machine's credentials.
        secret: Their secret key.
        session: Their session token.
        asked: Headers of all requests.
        says: Makes the answer of a name; a test may replace it.
    """

    def __init__(self) -> None:
        self.arn = arn_of()
        self.secret = AWS_KEYS["AWS_SECRET_ACCESS_KEY"]
        self.session = AWS_KEYS["AWS_SESSION_TOKEN"]
        self.asked: list[Mapping[str, str]] = []
        self.says: Callable[[str], Answer] = _identity
        super().__init__(self._serve)

    def _serve(self, request: Request) -> Answer:
        self.asked.append(request.headers)
        if (request.method, request.path) != ("POST", "/"):
            return Answer(404)
        if request.body != b"Action=GetCallerIdentity&Version=2011-06-15":
            return Answer(400)
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.rpartition("=")[2], self._signature(request)):
            return json_answer({"Error": {"Code": "SignatureDoesNotMatch"}}, 403)
        if request.headers["x-amz-security-token"] != self.session:
            return json_answer({"Error": {"Code": "InvalidClientTokenId"}}, 403)
        return self.says(self.arn)

    def _signature(self, request: Request) -> str:
        """Signature Version 4, as the service computes it."""
        words = dict(
            part.strip().partition("=")[::2]
            for part in request.headers["authorization"].partition(" ")[2].split(",")
        )
        names = words["SignedHeaders"].split(";")
        canonical = "\n".join(
            [
                *("POST", "/", ""),
                *(f"{name}:{request.headers.get(name, '')}" for name in names),
                *("", ";".join(names), hashlib.sha256(request.body).hexdigest()),
            ]
        )
        _, *scope = words["Credential"].split("/")
        date = request.headers["x-amz-date"]
        digest = hashlib.sha256(canonical.encode()).hexdigest()
        key = f"AWS4{self.secret}".encode()
        signed = f"AWS4-HMAC-SHA256\n{date}\n{'/'.join(scope)}\n{digest}"
        for part in (*scope, signed):
            key = hmac.digest(key, part.encode(), "sha256")
        return key.hex()


def _identity(arn: str) -> Answer:
    found = {"Account": arn.split(":")[4], "Arn": arn, "UserId": "AROA:x"}
    result = {"GetCallerIdentityResult": found}
    return json_answer({"GetCallerIdentityResponse": result})


@cache
def key_of(name: str) -> rsa.RSAPrivateKey:
    """A key of Google's, or of somebody else's."""
    del name
    return rsa.generate_private_key(65537, 2048)


@cache
def certificate_of(name: str) -> str:
    """Its certificate, PEM."""
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key_of(name).public_key())
        .serial_number(1)
        .not_valid_before(datetime(2026, 1, 1, tzinfo=UTC))
        .not_valid_after(datetime(2026, 1, 1, tzinfo=UTC) + timedelta(days=3650))
        .sign(key_of(name), hashes.SHA256())
    )
    return made.public_bytes(serialization.Encoding.PEM).decode()


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def token(
    audience: str,
    *,
    now: float,
    head: Mapping[str, Any] | None = None,
    key: str = "google",
    machine: Mapping[str, Any] | None = None,
    **claims: Any,
) -> str:
    """An identity token of a machine, signed by a key of that name."""
    about: Mapping[str, Any] = {
        "project_id": PROJECT,
        "project_number": 1,
        "zone": ZONE,
        "instance_id": "12345",
        "instance_name": MACHINE,
    }
    body = {
        "iss": "https://accounts.google.com",
        "aud": audience,
        "azp": "1234567890",
        "sub": "1234567890",
        "email": EMAIL,
        "email_verified": True,
        "iat": int(now),
        "exp": int(now) + 3600,
        "google": {"compute_engine": {**about, **(machine or {})}},
        **claims,
    }
    first = {"alg": "RS256", "kid": "google", "typ": "JWT", **(head or {})}
    signed = ".".join(_encoded(json.dumps(part).encode()) for part in (first, body))
    signature = key_of(key).sign(signed.encode(), padding.PKCS1v15(), hashes.SHA256())
    return f"{signed}.{_encoded(signature)}"


class GoogleMachine(GoogleServer):
    """A machine's metadata service, and the page of Google's certificates.

    Attributes:
        now: Tells time.
        changes: Of the tokens that it gives.
        certificates: By their ids.
        looks: How often they were read.
    """

    def __init__(self) -> None:
        self.now: Callable[[], float] = SystemClock().now
        self.changes: dict[str, Any] = {}
        self.certificates = {"google": certificate_of("google")}
        self.looks = 0
        super().__init__(self._serve)

    def _serve(self, request: Request) -> Answer:
        if request.path == "/certs":
            self.looks += 1
            return json_answer(self.certificates)
        headers = {"Metadata-Flavor": "Google", "Content-Type": "application/text"}
        if request.headers.get("metadata-flavor") != "Google":
            return Answer(403, headers)
        if request.path.endswith("/identity"):
            assert request.query["format"] == "full"
            made = token(request.query["audience"], now=self.now(), **self.changes)
            return Answer(200, headers, made.encode())
        account = {"email": EMAIL, "aliases": ["default"]}
        headers["Content-Type"] = "application/json"
        return Answer(200, headers, json.dumps(account).encode())
