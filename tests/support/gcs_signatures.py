"""Signed URLs of Cloud Storage, checked as the service does: an oracle for ours.

Source: https://cloud.google.com/storage/docs/authentication/signatures, version 4.
"""

import hashlib
import time
from calendar import timegm
from collections.abc import Mapping
from urllib.parse import quote

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from support.google_server import Request


class BadSignature(Exception):
    """A URL is not signed, not by whom it says, or not any more good."""


def check_signature(request: Request, signers: Mapping[str, RSAPublicKey]) -> None:
    """Check a request that has its permission in its URL.

    Raises:
        BadSignature: It is not good.
    """
    query = dict(request.query)
    signature = bytes.fromhex(query.pop("X-Goog-Signature"))
    email, _, scope = query["X-Goog-Credential"].partition("/")
    begin = timegm(time.strptime(query["X-Goog-Date"], "%Y%m%dT%H%M%SZ"))
    if not begin - 900 <= time.time() < begin + int(query["X-Goog-Expires"]):
        raise BadSignature("ExpiredToken")
    names = query["X-Goog-SignedHeaders"].split(";")
    canonical = "\n".join(
        [
            request.method,
            request.path,
            "&".join(f"{_quoted(k)}={_quoted(v)}" for k, v in sorted(query.items())),
            *(f"{name}:{request.headers[name]}" for name in names),
            "",
            ";".join(names),
            "UNSIGNED-PAYLOAD",
        ]
    )
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    signed = f"GOOG4-RSA-SHA256\n{query['X-Goog-Date']}\n{scope}\n{digest}"
    try:
        signers[email].verify(signature, signed.encode(), PKCS1v15(), SHA256())
    except InvalidSignature:
        raise BadSignature("SignatureDoesNotMatch") from None


def _quoted(text: str) -> str:
    return quote(text, safe="-_.~")
