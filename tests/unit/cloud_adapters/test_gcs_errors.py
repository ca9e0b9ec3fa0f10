"""What Cloud Storage answers, and what it becomes."""

import json

import google.auth.exceptions as auth
import pytest
import requests
import urllib3.exceptions

from cloud_adapters.storage.gcs import errors as gcs_errors
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

DOING = "read 'key' of gs://bucket"


def answer(status: int, body: object, **headers: str) -> requests.Response:
    response = requests.Response()
    response.status_code = status
    response.headers.update(headers)
    response._content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return response


def refusal(status: int, reason: str, message: str) -> requests.Response:
    errors = [{"reason": reason, "domain": "global", "message": message}]
    error = {"code": status, "message": message, "errors": errors}
    return answer(status, {"error": error})


REFUSALS = [
    (400, "invalid", "Invalid argument.", StoreUnavailable, "correct what it names"),
    (400, "invalid", "Provided CRC32C doesn't match", CorruptObject, "proxy"),
    (400, "invalid", "Cloud KMS key is disabled", StoreForbidden, "encryption key"),
    (401, "authError", "Invalid Credentials", NotAuthenticated, "sign in again"),
    (403, "forbidden", "x does not have access", StoreForbidden, "docs/howto/gcs.md"),
    (403, "forbidden", "no cloudkms permission", StoreForbidden, "encryption key"),
    (403, "forbidden", "billing is disabled", StoreForbidden, "billing account"),
    (403, "accountDisabled", "disabled", StoreForbidden, "billing account"),
    (403, "vpcServiceControls", "prohibited", StoreForbidden, "perimeter"),
    (403, "retentionPolicyNotMet", "retained", StoreForbidden, "retention"),
    (403, "quotaExceeded", "quota", StoreUnavailable, "quota"),
    (404, "notFound", "No such object: b/k", ObjectNotFound, "no such object"),
    (404, "notFound", "The specified bucket does not exist.", BucketNotFound, "name"),
    (405, "methodNotAllowed", "", StoreUnavailable, "JSON API"),
    (410, "gone", "", gcs_errors.UploadGone, "put the object again"),
    (412, "conditionNotMet", "", ObjectChanged, "version"),
    (413, "uploadTooLarge", "", StoreUnavailable, "5 TiB"),
    (418, "teapot", "", StoreUnavailable, "correct what it names"),
]
PASSING = [
    (403, "rateLimitExceeded", StoreThrottled),
    (408, "requestTimeout", StoreUnavailable),
    (409, "conflict", StoreUnavailable),
    (429, "rateLimitExceeded", StoreThrottled),
    (500, "backendError", StoreUnavailable),
    (503, "backendError", StoreUnavailable),
    (504, "gatewayTimeout", StoreUnavailable),
]


@pytest.mark.parametrize(("status", "reason", "message", "kind", "advice"), REFUSALS)
def test_refusals(
    status: int, reason: str, message: str, kind: type[StoreError], advice: str
):
    """Each says what was done where, what to check and what the service said."""
    error = gcs_errors.of_answer(refusal(status, reason, message), DOING)
    assert type(error) is kind
    assert str(error).startswith(f"cannot {DOING}: ")
    assert advice in str(error)
    assert message in str(error)
    assert error.temporary is (kind is CorruptObject)


@pytest.mark.parametrize(("status", "reason", "kind"), PASSING)
def test_what_passes(status: int, reason: str, kind: type[StoreError]):
    """These are worth another attempt."""
    error = gcs_errors.of_answer(refusal(status, reason, "later"), DOING)
    assert (type(error), error.temporary) == (kind, True)


@pytest.mark.parametrize("status", [404, 410])
def test_session_that_is_gone_is_no_missing_object(status: int):
    """404 of an upload session is not 404 of an object."""
    response = refusal(status, "notFound", "Not Found")
    error = gcs_errors.of_answer(response, DOING, is_session=True)
    assert type(error) is gcs_errors.UploadGone
    assert "upload session" in str(error)


def test_words_of_the_service_are_bounded_and_hold_no_addresses():
    """A server cannot fill the log, nor put a session's URL into it."""
    words = "see https://storage/upload?upload_id=secret " + "x" * 5000
    message = str(gcs_errors.of_answer(refusal(400, "invalid", words), DOING))
    assert "secret" not in message
    assert len(message) < 600


EXCEPTIONS = [
    (auth.DefaultCredentialsError("none"), NotAuthenticated, "no credentials"),
    (auth.RefreshError("invalid_grant"), NotAuthenticated, "not be renewed"),
    (auth.RefreshError("check your iat and exp values"), NotAuthenticated, "clock"),
    (auth.RefreshError("5xx", retryable=True), StoreUnavailable, "network"),
    (auth.TransportError("no route"), StoreUnavailable, "network"),
    (auth.InvalidOperation("anonymous"), NotAuthenticated, "no credentials"),
    (requests.exceptions.SSLError("bad"), StoreUnavailable, "certificate"),
    (requests.exceptions.InvalidURL("bad"), StoreUnavailable, "correct"),
    (requests.ConnectionError("cut"), StoreUnavailable, "network"),
    (requests.ReadTimeout("slow"), StoreUnavailable, "network"),
    (urllib3.exceptions.ProtocolError("cut"), StoreUnavailable, "network"),
    (ConnectionResetError(104, "reset"), StoreUnavailable, "network"),
    (KeyError("?"), StoreUnavailable, "correct"),
]


@pytest.mark.parametrize(("raised", "kind", "advice"), EXCEPTIONS)
def test_exceptions(raised: Exception, kind: type[StoreError], advice: str):
    """The kind is named; words of libraries are not repeated."""
    error = gcs_errors.of_exception(raised, DOING)
    assert type(error) is kind
    assert advice in str(error)
    assert type(raised).__name__ in str(error)
    assert error.temporary is (advice == "network")
