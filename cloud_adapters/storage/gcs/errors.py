"""What Google Cloud Storage answers, in this product's errors, with advice.

One row per reason and status of the service, one per kind of exception on the way to
it. Messages hold bucket, key, reason and what the service says; never a header, a
token, or the URL of an upload session, which is a permission by itself.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping

import google.auth.exceptions as auth
import requests
import urllib3.exceptions
from google.resumable_media import InvalidResponse

from cloud_adapters.storage.error_table import (
    CHANGED,
    CONFLICT,
    CORRUPT,
    GONE,
    NO_BUCKET,
    QUOTA,
    REFUSED,
    UNREACHABLE,
    Meaning,
    of_status,
)
from federation.errors import (
    NotAuthenticated,
    StoreError,
    StoreForbidden,
    StoreThrottled,
    StoreUnavailable,
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
    "the project or its billing account is disabled: someone has to enable it",
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
    "the service asks for fewer requests (it accepts about one write per second for "
    "one object): use fewer workers, or other keys",
    is_temporary=True,
)


class UploadGone(StoreUnavailable):
    """An upload session that the service has dropped, with its content."""


_UPLOAD_GONE = Meaning(
    UploadGone,
    "the upload session ended before the upload: put the object again",
)
_TOO_LARGE = Meaning(
    StoreUnavailable,
    "the service does not accept an object of this size (at most 5 TiB): write it in "
    "several objects",
)
_KEPT = Meaning(
    StoreForbidden,
    "a retention policy or a hold protects the object: wait until it ends, or write "
    "under another key",
)
_UNSUPPORTED = Meaning(
    StoreUnavailable,
    "the endpoint does not support this: it must provide Cloud Storage's JSON API",
)
UNCLEAR = Meaning(
    StoreUnavailable,
    "the endpoint does not answer like Cloud Storage: check its URL, and any proxies "
    "in between",
    is_temporary=True,
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
    "conditionNotMet": CHANGED,
    "conflict": CONFLICT,
    "objectUnderActiveHold": _KEPT,
    "orgPolicyViolated": _PERIMETER,
    "quotaExceeded": QUOTA,
    "rateLimitExceeded": _THROTTLED,
    "retentionPolicyNotMet": _KEPT,
    "uploadTooLarge": _TOO_LARGE,
    "userRateLimitExceeded": _THROTTLED,
    "vpcServiceControls": _PERIMETER,
}

STATUSES: Mapping[int, Meaning] = {
    400: REFUSED,
    401: _NOT_ACCEPTED,
    403: _FORBIDDEN,
    404: GONE,
    405: _UNSUPPORTED,
    408: UNREACHABLE,
    409: CONFLICT,
    410: _UPLOAD_GONE,
    412: CHANGED,
    413: _TOO_LARGE,
    429: _THROTTLED,
    499: _UPLOAD_GONE,
    501: _UNSUPPORTED,
}

# The service has no reason of their own for these; its words tell.
WORDS: Mapping[tuple[int, str], Meaning] = {
    (400, r"crc32c|md5|checksum|doesn't match calculated"): CORRUPT,
    (400, r"kms"): _KMS,
    (403, r"kms"): _KMS,
    (403, r"billing"): _BILLING,
    (404, r"bucket does not exist"): NO_BUCKET,
}

# The first row that fits counts: special ones come before their parents.
EXCEPTIONS: Mapping[type[Exception], Meaning] = {
    auth.DefaultCredentialsError: _NO_CREDENTIALS,
    auth.RefreshError: _NOT_RENEWED,
    auth.TransportError: UNREACHABLE,
    auth.GoogleAuthError: _NOT_ACCEPTED,
    # That of google-cloud-storage, which takes long to import, is a subclass.
    InvalidResponse: UNCLEAR,
    requests.exceptions.SSLError: _TLS,
    requests.exceptions.InvalidURL: REFUSED,
    requests.exceptions.InvalidSchema: REFUSED,
    requests.RequestException: UNREACHABLE,
    urllib3.exceptions.HTTPError: UNREACHABLE,
    OSError: UNREACHABLE,
}

# What to translate; all else that is raised on the way is a mistake in the code.
FAILURES = tuple(EXCEPTIONS)

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
    if is_session and meaning is GONE:
        meaning = _UPLOAD_GONE
    said = " ".join(filter(None, (str(status), reason, words)))
    asked = response.headers.get("Retry-After", "")
    return meaning.told(doing, said, asked_to_wait=asked)


def of_exception(error: Exception, doing: str) -> StoreError:
    """Turn a failure on the way to the service into an error of ours.

    Only the exception's kind is repeated: its words may hold a session's URL.
    """
    meaning = next(
        (row for kind, row in EXCEPTIONS.items() if isinstance(error, kind)), REFUSED
    )
    if isinstance(error, auth.RefreshError):
        if error.retryable:
            meaning = UNREACHABLE
        elif re.search(r"\biat\b|\bclock\b", str(error)):
            meaning = _CLOCK_SKEW
    return meaning.told(doing, type(error).__name__)


@contextlib.contextmanager
def translated(doing: str) -> Iterator[None]:
    """Turn failures of connections, credentials and the library into errors of ours."""
    try:
        yield
    except FAILURES as error:
        raise of_exception(error, doing) from error


def _meaning(status: int, reason: str, words: str) -> Meaning:
    for (its_status, pattern), row in WORDS.items():
        if status == its_status and re.search(pattern, words, re.IGNORECASE):
            return row
    return REASONS.get(reason) or STATUSES.get(status) or of_status(status)


def _said(response: requests.Response) -> tuple[str, str]:
    """Extract reason and message from an error of any form."""
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
    """Shorten a server's message, and remove addresses."""
    return re.sub(r"https?://\S+", "...", " ".join(words.split()))[:_MAX_WORDS]
