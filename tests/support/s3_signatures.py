"""Signed URLs of S3, checked as the service does: an oracle for ours.

Source: https://docs.aws.amazon.com/AmazonS3/latest/API/sigv4-query-string-auth.html.
"""

import hashlib
import hmac
import time
from calendar import timegm
from typing import Any
from urllib.parse import parse_qsl, quote


def refusal_of_signature(
    environ: dict[str, Any], secret: str
) -> tuple[str, str, str] | None:
    """What Amazon says to a request whose URL holds its permission; None if it is good.

    Args:
        environ: The request, of WSGI.
        secret: The key that should have signed it.

    Returns:
        Status, code and message of the refusal.
    """
    query = dict(parse_qsl(environ["QUERY_STRING"], keep_blank_values=True))
    signature = query.pop("X-Amz-Signature", None)
    if signature is None:
        return None
    begin = timegm(time.strptime(query["X-Amz-Date"], "%Y%m%dT%H%M%SZ"))
    if time.time() >= begin + int(query["X-Amz-Expires"]):
        return "403 Forbidden", "AccessDenied", "Request has expired"
    if not hmac.compare_digest(signature, _signature(environ, query, secret)):
        return "403 Forbidden", "SignatureDoesNotMatch", "The signatures differ."
    return None


def _signature(environ: dict[str, Any], query: dict[str, str], secret: str) -> str:
    names = query["X-Amz-SignedHeaders"].split(";")
    path, _, _ = environ["RAW_URI"].partition("?")
    canonical = "\n".join(
        [
            environ["REQUEST_METHOD"],
            path,
            "&".join(f"{_quoted(k)}={_quoted(v)}" for k, v in sorted(query.items())),
            *(f"{name}:{environ['HTTP_' + _of_wsgi(name)]}" for name in names),
            "",
            ";".join(names),
            "UNSIGNED-PAYLOAD",
        ]
    )
    _, *scope = query["X-Amz-Credential"].split("/")
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    signed = f"AWS4-HMAC-SHA256\n{query['X-Amz-Date']}\n{'/'.join(scope)}\n{digest}"
    key = f"AWS4{secret}".encode()
    for part in (*scope, signed):
        key = hmac.digest(key, part.encode(), "sha256")
    return key.hex()


def _of_wsgi(header: str) -> str:
    return header.upper().replace("-", "_")


def _quoted(text: str) -> str:
    return quote(text, safe="-_.~")
