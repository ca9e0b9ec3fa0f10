"""What a cluster of Kubernetes answers, in this product's errors, with advice.

It refuses in two ways: the API server directly, with a status of HTTP; or a controller
later, with an event of the job or a condition of its pod.

Source: Kubernetes documentation, "API concepts", "Pod lifecycle" and "Resource quotas".
"""

import json
from collections.abc import Mapping

import urllib3
from kubernetes.client import ApiException
from kubernetes.config import ConfigException

from cloud_adapters.compute.refusals import Refusal
from federation.errors import (
    ComputeError,
    ComputeForbidden,
    ComputeUnauthenticated,
    ComputeUnavailable,
    ComputeUnreachable,
    MachineRefused,
    NoCapacity,
    QuotaReached,
)

# An answer of another form than the library's models is a ValueError.
FAILURES = (
    ApiException,
    ConfigException,
    urllib3.exceptions.HTTPError,
    OSError,
    ValueError,
)

# What a pool asks for, in its namespace.
PERMISSIONS = (
    "jobs.batch: create, get, list, patch",
    "pods: list",
    "pods/log: get",
    "events: list",
)
_QUOTA = Refusal(
    QuotaReached,
    "the namespace may not have more: end jobs, or ask the cluster's operators for a "
    "larger ResourceQuota",
)
_MACHINE = Refusal(
    MachineRefused, "the cluster refuses the job as it is: correct what it names"
)
_POLICY = Refusal(
    MachineRefused,
    "the cluster does not admit the pod: its operators' policy, limits or service "
    "accounts do not fit; correct what it names",
)
_FORBIDDEN = Refusal(
    ComputeForbidden,
    "these credentials may not do this: grant a Role in the namespace, as in "
    f"deploy/kubernetes/overlays/jobs ({'; '.join(PERMISSIONS)})",
)
_NO_PLACE = Refusal(
    MachineRefused, "there is no such namespace: make it, or correct namespace"
)
_NOT_ACCEPTED = Refusal(
    ComputeUnauthenticated,
    "the cluster does not accept these credentials: sign in again (kubectl auth "
    "whoami, with the same context)",
)
_NO_CONTEXT = Refusal(
    ComputeUnauthenticated,
    "there are no credentials for this cluster: correct context, or have KUBECONFIG "
    "name the file that has it (kubectl config get-contexts)",
)
_THROTTLED = Refusal(
    ComputeUnavailable, "the API server asks for fewer requests: try again later"
)
_BUSY = Refusal(
    ComputeUnavailable, "the API server has a fault of its own: try again later"
)
_AWAY = Refusal(
    ComputeUnreachable,
    "the API server cannot be reached: check the network, and the server and "
    "certificate of this context",
)
_NO_IMAGE = Refusal(
    MachineRefused,
    "its nodes cannot pull the image: correct release.image, and see that the "
    "namespace's service account may pull it",
)
_NO_NODE = Refusal(
    NoCapacity,
    "no node fits now, and none was added in time: name more zones, another type, or "
    "less of cpus, memory_gb, gpus or disk_gb; or try later",
)

_STATUSES: Mapping[int, Refusal] = {
    400: _MACHINE,
    401: _NOT_ACCEPTED,
    403: _FORBIDDEN,
    404: _NO_PLACE,
    409: _BUSY,
    422: _MACHINE,
    429: _THROTTLED,
}
_OVER_QUOTA, _SERVER_ERRORS = "exceeded quota", 500
# Of a container that waits; what time alone may cure is not among them.
NO_IMAGE = frozenset(
    {"ErrImageNeverPull", "ImageInspectError", "ImagePullBackOff", "InvalidImageName"}
)
NO_CONTAINER = frozenset({"CreateContainerConfigError", "CreateContainerError"})


def is_temporary(error: Exception) -> bool:
    """Whether the same request may succeed a moment later."""
    if isinstance(error, ApiException):
        row = _STATUSES.get(error.status or 0)
        return row is _THROTTLED or (error.status or 0) >= _SERVER_ERRORS
    return isinstance(error, urllib3.exceptions.HTTPError)


def translate(error: Exception, doing: str) -> ComputeError:
    """Turn a failure of the library or the cluster into an error of ours.

    Args:
        error: What was raised, one of ``FAILURES``; keep it as the cause.
        doing: What was being done, and where: ``launch site-a in gke/crossfed``.
    """
    if isinstance(error, ApiException):
        status = error.status or 0
        words = _words(error)
        row = _STATUSES.get(status)
        if row is _FORBIDDEN and _OVER_QUOTA in words:
            row = _QUOTA
        fallback = _BUSY if status >= _SERVER_ERRORS else _MACHINE
        return (row or fallback).told(doing, f"{status} {words}")
    if isinstance(error, ConfigException):
        return _NO_CONTEXT.told(doing, str(error))
    if isinstance(error, urllib3.exceptions.HTTPError | OSError):
        return _AWAY.told(doing, type(error).__name__)
    return _BUSY.told(doing, f"its answer cannot be read: {type(error).__name__}")


def is_refusal(message: str) -> bool:
    """Whether the event of a pod that was not made says that none will be.

    Anything else may be a fault that passes: the cluster tries again.
    """
    return "is forbidden" in message or "is invalid" in message


def not_admitted(message: str, doing: str) -> ComputeError:
    """A pod that the cluster did not make, by the message of the job's event."""
    row = _QUOTA if _OVER_QUOTA in message else _POLICY
    return row.told(doing, message)


def not_scheduled(message: str, doing: str) -> ComputeError:
    """A pod for which no node was found in time."""
    return _NO_NODE.told(doing, message)


def not_begun(reason: str, message: str, doing: str) -> ComputeError | None:
    """A container that waits for a reason; None if it may yet begin."""
    if reason in NO_IMAGE:
        return _NO_IMAGE.told(doing, f"{reason}: {message}")
    if reason in NO_CONTAINER:
        return _MACHINE.told(doing, f"{reason}: {message}")
    return None


def _words(error: ApiException) -> str:
    """The message of a Status; headers and the rest help nobody."""
    try:
        found = json.loads(error.body or "")
    except ValueError:
        found = None
    message = found.get("message") if isinstance(found, dict) else None
    return str(message or error.reason or "no message")
