"""What S3 answers, in this product's errors: which one, and what to do about it.

One row per meaning with its codes, one per kind of exception of the library. A code
without a row falls back on its HTTP status. Messages hold bucket, key, code and
what the service says; never a header, a signature or a token.
"""

from collections.abc import Iterator, Mapping
from http.client import HTTPException
from typing import Any

import botocore.exceptions as boto
import urllib3.exceptions
from botocore.parsers import ResponseParserError

from cloud_adapters.storage.error_table import (
    BUSY,
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
    BucketNotFound,
    NotAuthenticated,
    StoreError,
    StoreForbidden,
    StoreThrottled,
    StoreUnavailable,
)

_ELSEWHERE = Meaning(
    BucketNotFound,
    "the bucket is in another region: set that region in the job or in AWS_REGION",
)
_FORBIDDEN = Meaning(
    StoreForbidden,
    "these credentials may not do this: grant it in the role's policy, the bucket's "
    "policy or the endpoint's policy (docs/howto/s3.md has one)",
)
_KMS_FORBIDDEN = Meaning(
    StoreForbidden,
    "the encryption key is disabled, gone or not granted: the role needs "
    "kms:GenerateDataKey and kms:Decrypt on an enabled key of the bucket's region",
)
_WRONG_KEY = Meaning(
    NotAuthenticated,
    "the service does not know or accept these credentials: check which ones are in "
    "use (aws sts get-caller-identity), and to which endpoint they are sent",
)
_EXPIRED = Meaning(
    NotAuthenticated,
    "the credentials have expired: renew them (aws sso login, or the role's source) "
    "and resume",
)
_CLOCK_SKEW = Meaning(
    NotAuthenticated,
    "this machine's clock is more than 15 minutes off: synchronise it (timedatectl, "
    "chrony) and resume",
)
_NO_CREDENTIALS = Meaning(
    NotAuthenticated,
    "no usable credentials were found: set AWS_PROFILE, give this machine or pod a "
    "role, or sign in (aws sso login)",
)
_THROTTLED = Meaning(
    StoreThrottled,
    "the service asks for fewer requests: use fewer workers, or spread the keys over "
    "more prefixes",
    is_temporary=True,
)
_TOO_LARGE = Meaning(
    StoreUnavailable,
    "the service does not accept an object or a part of this size: write it in several "
    "objects",
)
_ARCHIVED = Meaning(
    StoreUnavailable,
    "the object is archived: restore it, or move it to another storage class",
)
_UPLOAD_GONE = Meaning(
    StoreUnavailable,
    "someone else, or a lifecycle rule that is shorter than the upload, ended it: "
    "start it again",
)
_UNSUPPORTED = Meaning(
    StoreUnavailable,
    "the endpoint does not support this: it must support conditional writes and CRC32C "
    "checksums, as Amazon S3 does",
)
_TLS = Meaning(
    StoreUnavailable,
    "the endpoint's certificate is not trusted here: set AWS_CA_BUNDLE to your "
    "authority, or correct the endpoint",
)
UNCLEAR = Meaning(
    StoreUnavailable,
    "the endpoint does not answer like S3: check its URL, and any proxies in between",
    is_temporary=True,
)

_CODES_OF: Mapping[Meaning, str] = {
    GONE: "NoSuchKey NoSuchVersion",
    NO_BUCKET: "NoSuchBucket InvalidBucketName",
    _ELSEWHERE: (
        "PermanentRedirect TemporaryRedirect AuthorizationHeaderMalformed "
        "IllegalLocationConstraintException"
    ),
    CHANGED: "PreconditionFailed",
    CONFLICT: "ConditionalRequestConflict OperationAborted",
    CORRUPT: "BadDigest XAmzContentChecksumMismatch XAmzContentSHA256Mismatch",
    UNREACHABLE: "IncompleteBody RequestTimeout",
    _FORBIDDEN: "AccessDenied AllAccessDisabled AccountProblem UnauthorizedAccess",
    _KMS_FORBIDDEN: (
        "KMS.DisabledException KMS.NotFoundException KMS.InvalidStateException "
        "KMS.KMSInvalidStateException"
    ),
    _WRONG_KEY: (
        "InvalidAccessKeyId SignatureDoesNotMatch AccessKeyDoesNotExist InvalidToken "
        "InvalidClientTokenId NotSignedUp"
    ),
    _EXPIRED: "ExpiredToken ExpiredTokenException TokenRefreshRequired RequestExpired",
    _CLOCK_SKEW: "RequestTimeTooSkewed",
    _THROTTLED: (
        "SlowDown SlowDownRead SlowDownWrite RequestLimitExceeded "
        "BandwidthLimitExceeded TooManyRequests Throttling ThrottlingException "
        "KMS.ThrottlingException"
    ),
    BUSY: "InternalError ServiceUnavailable",
    _TOO_LARGE: "EntityTooLarge EntityTooSmall MaxMessageLengthExceeded",
    QUOTA: "QuotaExceeded ServiceQuotaExceeded XMinioStorageFull",
    _ARCHIVED: "InvalidObjectState",
    _UPLOAD_GONE: "NoSuchUpload",
    _UNSUPPORTED: "NotImplemented MethodNotAllowed InvalidStorageClass",
    REFUSED: (
        "KeyTooLongError MetadataTooLarge InvalidArgument InvalidRequest InvalidPart "
        "InvalidPartOrder MalformedXML"
    ),
}
CODES = {code: row for row, codes in _CODES_OF.items() for code in codes.split()}

# Where the code says nothing: answers to HEAD have no body, and some endpoints
# have codes of their own.
STATUSES: Mapping[int, Meaning] = {
    301: _ELSEWHERE,
    307: _ELSEWHERE,
    401: _WRONG_KEY,
    403: _FORBIDDEN,
    404: GONE,
    405: _UNSUPPORTED,
    408: UNREACHABLE,
    409: CONFLICT,
    412: CHANGED,
    413: _TOO_LARGE,
    429: _THROTTLED,
    501: _UNSUPPORTED,
    507: QUOTA,
}

# The first row that fits counts: special ones come before their parents.
EXCEPTIONS: Mapping[type[Exception], Meaning] = {
    boto.NoCredentialsError: _NO_CREDENTIALS,
    boto.PartialCredentialsError: _NO_CREDENTIALS,
    boto.CredentialRetrievalError: _NO_CREDENTIALS,
    boto.MetadataRetrievalError: _NO_CREDENTIALS,
    boto.TokenRetrievalError: _NO_CREDENTIALS,
    boto.NoAuthTokenError: _NO_CREDENTIALS,
    boto.ProfileNotFound: _NO_CREDENTIALS,
    boto.ConfigNotFound: _NO_CREDENTIALS,
    boto.InvalidConfigError: _NO_CREDENTIALS,
    boto.SSOError: _EXPIRED,
    boto.SSLError: _TLS,
    boto.FlexibleChecksumError: CORRUPT,
    boto.HTTPClientError: UNREACHABLE,
    boto.ConnectionError: UNREACHABLE,
    boto.IncompleteReadError: UNREACHABLE,
    urllib3.exceptions.HTTPError: UNREACHABLE,
    HTTPException: UNREACHABLE,
    OSError: UNREACHABLE,
    ResponseParserError: UNCLEAR,
    boto.BotoCoreError: REFUSED,
}

# What to translate; all else that is raised on the way is a mistake in the code.
FAILURES = (boto.ClientError, *EXCEPTIONS)


def code_of(error: BaseException | None) -> str:
    """The service's code of a failure; empty if it is none of the service's."""
    if not isinstance(error, boto.ClientError):
        return ""
    return str(error.response.get("Error", {}).get("Code", ""))


def status_of(error: BaseException | None) -> int:
    """The HTTP status of a failure; 0 if there was no answer."""
    if not isinstance(error, boto.ClientError):
        return 0
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def meaning_of(error: Exception) -> Meaning:
    """Find the row of the tables that fits."""
    if isinstance(error, boto.ClientError):
        return _meaning_of_answer(code_of(error), status_of(error))
    return next(row for kind, row in EXCEPTIONS.items() if isinstance(error, kind))


def _meaning_of_answer(code: str, status: int) -> Meaning:
    if code.isdecimal():  # HEAD: botocore takes the status for the code.
        status = int(code)
    row = CODES.get(code)
    if row is None and code.startswith("KMS."):
        row = _KMS_FORBIDDEN
    return row or STATUSES.get(status) or of_status(status)


def translate(error: Exception, doing: str) -> StoreError:
    """Turn a failure of the library or the service into an error of ours.

    Args:
        error: What was raised, one of ``FAILURES``; keep it as the cause.
        doing: What was being done, and where: ``read s3://bucket/key``.
    """
    return meaning_of(error).told(
        doing,
        "; ".join(_said(error)),
        asked_to_wait=_headers(error).get("retry-after", ""),
    )


def _headers(error: Exception) -> Mapping[str, str]:
    if not isinstance(error, boto.ClientError):
        return {}
    answer: Mapping[str, Any] = error.response.get("ResponseMetadata", {})
    headers: Mapping[str, str] = answer.get("HTTPHeaders", {})
    return headers


def _said(error: Exception) -> Iterator[str]:
    """What is safe to repeat of a failure.

    Of an answer that is code, message and region. Other exceptions may hold a URL
    with a signature in it, so their kind has to do.
    """
    if not isinstance(error, boto.ClientError):
        yield type(error).__name__
        return
    details: Mapping[str, str] = error.response.get("Error", {})
    yield f"{details.get('Code', 'no code')}: {details.get('Message', 'no message')}"
    region = _headers(error).get("x-amz-bucket-region") or details.get("Region")
    if region and meaning_of(error) is _ELSEWHERE:
        yield f"the bucket is in {region}"
