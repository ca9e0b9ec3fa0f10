"""Every failure of S3 has a meaning, an advice, and a place in the tree of errors."""

import inspect

import botocore.exceptions
import pytest
from botocore.exceptions import ClientError
from botocore.parsers import ResponseParserError

from cloud_adapters.storage.s3 import errors as s3_errors
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


def failure(code: str, status: int = 400, **headers: str) -> ClientError:
    answer = {
        "Error": {"Code": code, "Message": "what the service says"},
        "ResponseMetadata": {"HTTPStatusCode": status, "HTTPHeaders": headers},
    }
    return ClientError(answer, "GetObject")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (failure("NoSuchKey", 404), ObjectNotFound),
        (failure("NoSuchBucket", 404), BucketNotFound),
        (failure("404", 404), ObjectNotFound),
        (failure("PermanentRedirect", 301), BucketNotFound),
        (failure("PreconditionFailed", 412), ObjectChanged),
        (failure("412", 412), ObjectChanged),
        (failure("BadDigest"), CorruptObject),
        (failure("AccessDenied", 403), StoreForbidden),
        (failure("KMS.DisabledException"), StoreForbidden),
        (failure("KMS.SomethingNew"), StoreForbidden),
        (failure("SomethingNew", 403), StoreForbidden),
        (failure("InvalidAccessKeyId", 403), NotAuthenticated),
        (failure("ExpiredToken"), NotAuthenticated),
        (failure("RequestTimeTooSkewed", 403), NotAuthenticated),
        (failure("SlowDown", 503), StoreThrottled),
        (failure("SomethingNew", 429), StoreThrottled),
        (failure("EntityTooLarge"), StoreUnavailable),
        (failure("SomethingNew", 400), StoreUnavailable),
        (failure("SomethingNew", 599), StoreUnavailable),
        (botocore.exceptions.NoCredentialsError(), NotAuthenticated),
        (ResponseParserError("not XML"), StoreUnavailable),
        (ConnectionResetError(), StoreUnavailable),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, Exception) else "",
)
def test_failures_become_ours(error: Exception, expected: type[StoreError]):
    """The kind tells a caller what it can do; the message tells a person."""
    translated = s3_errors.translate(error, "read s3://bucket/key")
    assert type(translated) is expected
    assert "cannot read s3://bucket/key: " in str(translated)


@pytest.mark.parametrize(
    "code", ["QuotaExceeded", "ServiceQuotaExceeded", "XMinioStorageFull"]
)
def test_quota_is_named(code: str):
    """Whatever the service calls it; trying again does not help."""
    translated = s3_errors.translate(failure(code, 409), "write s3://bucket/key")
    assert "a quota is used up: free space" in str(translated)
    assert not translated.temporary


@pytest.mark.parametrize("code", ["ConditionalRequestConflict", "OperationAborted"])
def test_conflict_is_named_whatever_the_status(code: str):
    """Another writer was faster; the same request may go well a moment later."""
    translated = s3_errors.translate(failure(code), "write s3://bucket/key")
    assert "writing the same object" in str(translated)
    assert translated.temporary


TEMPORARY = [
    *[failure(code) for code in ("SlowDown", "RequestTimeout", "InternalError")],
    *[failure("BadDigest"), failure("OperationAborted", 409)],
    *[failure("unknown", status) for status in (408, 429, 500, 502, 503, 504)],
    botocore.exceptions.EndpointConnectionError(endpoint_url="x"),
    botocore.exceptions.ConnectTimeoutError(endpoint_url="x"),
    botocore.exceptions.ReadTimeoutError(endpoint_url="x"),
    botocore.exceptions.ConnectionClosedError(endpoint_url="x"),
    botocore.exceptions.ProxyConnectionError(proxy_url="x"),
    botocore.exceptions.ResponseStreamingError(error="x"),
    botocore.exceptions.IncompleteReadError(actual_bytes=1, expected_bytes=2),
    ResponseParserError("not XML"),
]


@pytest.mark.parametrize("error", TEMPORARY, ids=lambda error: str(error)[:60])
def test_what_may_pass_is_temporary(error: Exception):
    """The same request may go well a moment later."""
    assert s3_errors.translate(error, "read").temporary


def test_every_failure_of_the_library_has_a_row():
    """Only what it says of its own service models, and warnings, has none."""
    for name, kind in inspect.getmembers(botocore.exceptions, inspect.isclass):
        own = kind.__module__ == botocore.exceptions.__name__
        if (
            own
            and not name.endswith("Warning")
            and "ModelAttribute" not in str(kind.__mro__)
        ):
            assert issubclass(kind, s3_errors.FAILURES), name


def test_the_service_may_ask_for_a_longer_wait():
    """Retry-After counts, up to a minute, in seconds alone."""
    waits = [
        s3_errors.translate(failure("SlowDown", **{"retry-after": asked}), "read")
        for asked in ("7", "86400", "Fri, 31 Dec 1999 23:59:59 GMT", "")
    ]
    assert [error.wait_seconds for error in waits] == [7, 60, 0, 0]


def test_connection_errors_do_not_repeat_urls():
    """A URL may carry a signature; the exception's kind has to do."""
    url = "https://bucket.example/key?X-Amz-Signature=secret"
    error = botocore.exceptions.EndpointConnectionError(endpoint_url=url)
    assert "secret" not in str(s3_errors.translate(error, "read s3://bucket/key"))
