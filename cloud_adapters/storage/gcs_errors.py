"""What Google Cloud Storage answers, in this product's errors, with advice.

One row per reason and status of the service, one per kind of exception on the way to
it. Messages hold bucket, key, reason and what the service says; never a header, a
token, or the URL of an upload session, which is a permission by itself.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import google.auth.exceptions as auth
import requests
import urllib3.exceptions

from federation.errors import (
    BucketNotFound,
    CorruptObject,
    NotAuthenticated,
    ObjectChanged,
    ObjectNotFound,
    StoreError,
    StoreForbidden,
    StoreThrottled,
    StoreUnavailable,
)


@dataclass(frozen=True, slots=True)
class Meaning:
    """What an answer or an exception means to us.

    Attributes:
        error: What to raise.
        advice: What a person can do.
        is_temporary: Whether the same request may succeed a moment later.
    """

    error: type[StoreError]
    advice: str
    is_temporary: bool = False


_GONE = Meaning(ObjectNotFound, "there is no such object")
_NO_BUCKET = Meaning(
    BucketNotFound,
    "the bucket does not exist: correct its name in the URL, or create it",
)
_CHANGED = Meaning(ObjectChanged, "the object is not of the version that was named")
_CONFLICT = Meaning(
    StoreUnavailable,
    "others write the same object at the same time; try again later",
    is_temporary=True,
)
_CORRUPT = Meaning(
    CorruptObject,
    "other bytes arrived than were sent: if it happens again, look for a proxy or "
    "a network device on the way that changes traffic",
    is_temporary=True,
)
_FORBIDDEN = Meaning(
    StoreForbidden,
    "these credentials may not do this, or the object does not exist and they may "
    "not list the bucket: grant it on the bucket (docs/howto/gcs.md has the roles)",
)
_KMS = Meaning(
    StoreForbidden,
    "the encryption key is disabled, gone, in another location, or not granted: "
    "Cloud Storage's service agent needs "
    "roles/cloudkms.cryptoKeyEncrypterDecrypter on an enabled key in the "
    "bucket's location",
)
_PERIMETER = Meaning(
    StoreForbidden,
    "the organisation's policy (a VPC service perimeter or a constraint) forbids "
    "it: ask its administrators for an exception",
)
_BILLING = Meaning(
    StoreForbidden,
    "the project or its billing account is disabled: a person has to enable it",
)
_NOT_ACCEPTED = Meaning(
    NotAuthenticated,
    "the service does not accept these credentials: sign in again (gcloud auth "
    "application-default login), or check the machine's service account",
)
_NO_CREDENTIALS = Meaning(
    NotAuthenticated,
    "no credentials were found: sign in (gcloud auth application-default login), "
    "give this machine or pod a service account, or set "
    "GOOGLE_APPLICATION_CREDENTIALS to a workload identity federation file",
)
_NOT_RENEWED = Meaning(
    NotAuthenticated,
    "the credentials could not be renewed: sign in again (gcloud auth "
    "application-default login), or check the service account and the trust "
    "between the clouds",
)
_CLOCK_SKEW = Meaning(
    NotAuthenticated,
    "this machine's clock is off: synchronise it (timedatectl, chrony) and resume",
)
_THROTTLED = Meaning(
    StoreThrottled,
    "the service asks for fewer requests (of one object it takes about one write "
    "per second): use fewer workers, or other keys",
    is_temporary=True,
)
_BUSY = Meaning(
    StoreUnavailable,
    "the service has a fault of its own: try again later, and see its status page",
    is_temporary=True,
)
_UNREACHABLE = Meaning(
    StoreUnavailable,
    "the connection failed or broke: check network, endpoint, proxy and firewall",
    is_temporary=True,
)
_UPLOAD_GONE = Meaning(
    StoreUnavailable,
    "the upload session has ended before the upload: put the object again",
)
_TOO_LARGE = Meaning(
    StoreUnavailable,
    "the service does not take an object of this size (at most 5 TiB): write it in "
    "several objects",
)
_QUOTA = Meaning(
    StoreUnavailable, "a quota is used up: free space or ask for a higher one"
)
_KEPT = Meaning(
    StoreForbidden,
    "a retention policy or a hold keeps the object: wait for its end, or write "
    "under another key",
)
_UNSUPPORTED = Meaning(
    StoreUnavailable,
    "the endpoint does not do this: it has to speak Cloud Storage's JSON API",
)
_REFUSED = Meaning(
    StoreUnavailable, "the service refuses the request as it is: correct what it names"
)
_TLS = Meaning(
    StoreUnavailable,
    "the endpoint's certificate is not trusted here: set REQUESTS_CA_BUNDLE to your "
    "authority, or correct the endpoint",
)

# Reasons say more than their status does.
REASONS: Mapping[str, Meaning] = {
    "accountDisabled": _BILLING,
    "UserProjectAccountProblem": _BILLING,
    "conditionNotMet": _CHANGED,
    "conflict": _CONFLICT,
    "objectUnderActiveHold": _KEPT,
    "orgPolicyViolated": _PERIMETER,
    "quotaExceeded": _QUOTA,
    "rateLimitExceeded": _THROTTLED,
    "retentionPolicyNotMet": _KEPT,
    "uploadTooLarge": _TOO_LARGE,
    "userRateLimitExceeded": _THROTTLED,
    "vpcServiceControls": _PERIMETER,
}

STATUSES: Mapping[int, Meaning] = {
    400: _REFUSED,
    401: _NOT_ACCEPTED,
    403: _FORBIDDEN,
    404: _GONE,
    405: _UNSUPPORTED,
    408: _UNREACHABLE,
    409: _CONFLICT,
    410: _UPLOAD_GONE,
    412: _CHANGED,
    413: _TOO_LARGE,
    429: _THROTTLED,
    499: _UPLOAD_GONE,
    501: _UNSUPPORTED,
}

# The service has no reason of their own for these; its words tell.
WORDS: Mapping[tuple[int, str], Meaning] = {
    (400, r"crc32c|md5|checksum|doesn't match calculated"): _CORRUPT,
    (400, r"kms"): _KMS,
    (403, r"kms"): _KMS,
    (403, r"billing"): _BILLING,
    (404, r"bucket does not exist"): _NO_BUCKET,
}

# The first row that fits counts: special ones come before their parents.
EXCEPTIONS: Mapping[type[Exception], Meaning] = {
    auth.DefaultCredentialsError: _NO_CREDENTIALS,
    auth.RefreshError: _NOT_RENEWED,
    auth.TransportError: _UNREACHABLE,
    auth.GoogleAuthError: _NOT_ACCEPTED,
    requests.exceptions.SSLError: _TLS,
    requests.exceptions.InvalidURL: _REFUSED,
    requests.exceptions.InvalidSchema: _REFUSED,
    requests.RequestException: _UNREACHABLE,
    urllib3.exceptions.HTTPError: _UNREACHABLE,
    OSError: _UNREACHABLE,
}

MAX_WAIT_SECONDS = 60.0  # More than that, a person should hear of it.
_MAX_WORDS = 300


def of_answer(
    response: requests.Response, doing: str, *, is_session: bool = False
) -> StoreError:
    """Turn a refusal of the service into an error of ours.

    Args:
        response: With its body still to be read, or read.
        doing: What was being done, and where: ``read gs://bucket/key``.
        is_session: Whether an upload session was asked, which can be gone itself.
    """
    status = response.status_code
    reason, words = _said(response)
    meaning = _meaning(status, reason, words)
    if is_session and meaning is _GONE:
        meaning = _UPLOAD_GONE
    asked = response.headers.get("Retry-After", "")
    said = " ".join(filter(None, (str(status), reason, words)))
    return meaning.error(
        f"cannot {doing}: {meaning.advice} ({said})",
        temporary=meaning.is_temporary,
        wait_seconds=(
            min(float(asked), MAX_WAIT_SECONDS) if asked.isdecimal() else 0.0
        ),
    )


def of_exception(error: Exception, doing: str) -> StoreError:
    """Turn a failure on the way to the service into an error of ours.

    Only the exception's kind is repeated: its words may hold a session's URL.
    """
    meaning = next(
        (row for kind, row in EXCEPTIONS.items() if isinstance(error, kind)), _REFUSED
    )
    if isinstance(error, auth.RefreshError):
        if error.retryable:
            meaning = _UNREACHABLE
        elif re.search(r"\biat\b|\bclock\b", str(error)):
            meaning = _CLOCK_SKEW
    return meaning.error(
        f"cannot {doing}: {meaning.advice} ({type(error).__name__})",
        temporary=meaning.is_temporary,
    )


def corrupt(doing: str, details: str) -> CorruptObject:
    """Say that what we counted is not what the service counted."""
    return CorruptObject(
        f"cannot {doing}: {_CORRUPT.advice} ({details})", temporary=True
    )


def _meaning(status: int, reason: str, words: str) -> Meaning:
    for (its_status, pattern), row in WORDS.items():
        if status == its_status and re.search(pattern, words, re.IGNORECASE):
            return row
    other = _BUSY if status >= 500 else _REFUSED  # noqa: PLR2004 (an HTTP status)
    return REASONS.get(reason) or STATUSES.get(status, other)


def _said(response: requests.Response) -> tuple[str, str]:
    """Take reason and words out of an error, whatever form it has."""
    try:
        body = response.json()
    except requests.RequestException:
        return "", _safe(_text(response))
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict):
        return "", ""
    details = error.get("errors")
    first = details[0] if isinstance(details, list) and details else {}
    reason = str(first.get("reason", "")) if isinstance(first, dict) else ""
    return _safe(reason), _safe(str(error.get("message", "")))


def _text(response: requests.Response) -> str:
    """Return a plain answer; a web page says nothing that helps."""
    try:
        text = response.text
    except requests.RequestException:
        return ""
    return "" if "<" in text else text


def _safe(words: str) -> str:
    """Bound what a server says, and keep addresses out of it."""
    return re.sub(r"https?://\S+", "...", " ".join(words.split()))[:_MAX_WORDS]
