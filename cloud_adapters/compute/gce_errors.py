"""What Compute Engine answers, in this product's errors, with advice.

It refuses in two ways: directly, with a status of HTTP and a reason; or later, with a
code in the operation that it had begun.

Source: Google, "Resource availability errors" and "Troubleshooting creating and
updating a VM".
"""

import re
from collections.abc import Mapping, Sequence

import google.auth.exceptions as auth
import requests
from google.api_core import exceptions as api

from cloud_adapters.compute.refusals import Refusal
from cloud_adapters.storage.gcs import errors as gcs_errors
from federation.errors import (
    ComputeError,
    ComputeForbidden,
    ComputeUnauthenticated,
    ComputeUnavailable,
    MachineRefused,
    NoCapacity,
    QuotaReached,
)

FAILURES = (
    api.GoogleAPIError,
    auth.GoogleAuthError,
    requests.RequestException,
    OSError,
)

_NO_CAPACITY = Refusal(
    NoCapacity, "the zone has no such machine now: name more zones, or try later"
)
_QUOTA = Refusal(
    QuotaReached,
    "the project may not have more of this in this region: end machines, or ask for a "
    "higher quota (console, IAM and admin, Quotas)",
)
_MACHINE = Refusal(
    MachineRefused,
    "the service knows no such machine type, image, zone, network or account, or "
    "refuses their combination: correct what it names",
)
_FORBIDDEN = Refusal(
    ComputeForbidden,
    "these credentials may not do this: grant roles/compute.instanceAdmin.v1 and "
    "roles/compute.networkViewer in the project, roles/iam.serviceAccountUser on the "
    "nodes' service account, and for disk_key the project's Compute Engine service "
    "agent roles/cloudkms.cryptoKeyEncrypterDecrypter on that key",
)
_DISABLED = Refusal(
    ComputeForbidden,
    "the Compute Engine API or billing is not enabled in this project: enable it "
    "(gcloud services enable compute.googleapis.com)",
)
_POLICY = Refusal(
    ComputeForbidden,
    "the organisation's policy forbids it: ask its administrators for an exception",
)
_NOT_ACCEPTED = Refusal(
    ComputeUnauthenticated,
    "the service does not accept these credentials: sign in again (gcloud auth "
    "application-default login), or check the machine's service account",
)
_THROTTLED = Refusal(
    ComputeUnavailable, "the service asks for fewer requests: try again later"
)
_BUSY = Refusal(
    ComputeUnavailable,
    "the service has a fault of its own: try again later, and see its status page",
)
_REFUSED = Refusal(
    ComputeError, "the service refuses the request as it is: correct what it names"
)

# Of operations, and reasons of answers; the first that begins a code counts.
_CODES: Mapping[str, Refusal] = {
    "ZONE_RESOURCE_POOL_EXHAUSTED": _NO_CAPACITY,
    "STOCKOUT": _NO_CAPACITY,
    "IP_SPACE_EXHAUSTED": Refusal(
        NoCapacity, "the subnet has no free addresses: name another one"
    ),
    "QUOTA_EXCEEDED": _QUOTA,
    "GPU_QUOTA": _QUOTA,
    "quotaExceeded": _QUOTA,
    "LIMIT_EXCEEDED": _QUOTA,
    "RESOURCE_NOT_FOUND": _MACHINE,
    "RESOURCE_NOT_READY": _BUSY,
    "resourceNotReady": _BUSY,
    "INVALID_": _MACHINE,
    "UNSUPPORTED_OPERATION": _MACHINE,
    "invalid": _MACHINE,
    "badRequest": _MACHINE,
    "notFound": _MACHINE,
    "CONDITION_NOT_MET": _POLICY,
    "conditionNotMet": _POLICY,
    "accessNotConfigured": _DISABLED,
    "PERMISSION": _FORBIDDEN,
    "RATE_LIMIT_EXCEEDED": _THROTTLED,
    "RESOURCE_OPERATION_RATE_EXCEEDED": _THROTTLED,
    "rateLimitExceeded": _THROTTLED,
    "userRateLimitExceeded": _THROTTLED,
    "INTERNAL_ERROR": _BUSY,
}
_STATUSES: Mapping[int, Refusal] = {
    400: _MACHINE,
    401: _NOT_ACCEPTED,
    403: _FORBIDDEN,
    404: _MACHINE,
    412: _POLICY,
    429: _THROTTLED,
}
_SERVER_ERRORS = 500


def translate(error: Exception, doing: str) -> ComputeError:
    """Turn a failure of the library or an answer of the service into an error of ours.

    Args:
        error: What was raised, one of ``FAILURES``; keep it as the cause.
        doing: What was being done, and where: ``launch site-a in us-central1-a``.
    """
    if isinstance(error, api.GoogleAPICallError):
        reason = next((_reason(each) for each in error.errors), "")
        status = int(error.code or 0)
        fallback = _BUSY if status >= _SERVER_ERRORS else _REFUSED
        row = _of_code(reason) or _STATUSES.get(status) or fallback
        if row is _FORBIDDEN and "Constraint constraints/" in error.message:
            row = _POLICY
        return row.told(doing, f"{status} {reason} {_safe(error.message)}")
    if isinstance(error, api.RetryError) and isinstance(error.cause, Exception):
        return translate(error.cause, doing)
    # What fails on the way to the service means the same for all of Google's.
    advice = next(
        (row.advice for kind, row in gcs_errors.EXCEPTIONS.items() if _is(error, kind)),
        _BUSY.advice,
    )
    is_about_us = isinstance(error, auth.GoogleAuthError) and not isinstance(
        error, auth.TransportError
    )
    kind = ComputeUnauthenticated if is_about_us else ComputeUnavailable
    return Refusal(kind, advice).told(doing, type(error).__name__)


def of_operation(errors: Sequence[tuple[str, str]], doing: str) -> ComputeError:
    """Turn the errors of an operation, codes and messages, into one of ours."""
    code, message = errors[0]
    row = _of_code(code) or _REFUSED
    return row.told(doing, f"{code}: {_safe(message)}")


def _of_code(code: str) -> Refusal | None:
    return next((row for key, row in _CODES.items() if code.startswith(key)), None)


def _reason(detail: object) -> str:
    return str(detail.get("reason", "")) if isinstance(detail, dict) else ""


def _is(error: Exception, kind: type[Exception]) -> bool:
    return isinstance(error, kind)


def _safe(words: str) -> str:
    """Keep addresses out of what a server says: they are long and do not help."""
    words = re.sub(r"^[A-Z]+ https?://\S+: ", "", words)
    return re.sub(r"https?://[^\s'\"]*/(?=projects/)|https?://\S+", "", words)
