"""The job of a node, as Kubernetes is asked for it. Pure: a node in, a manifest out.

It has no secrets: anyone who may list jobs can read it. The pod fulfils the Pod
Security Standard ``restricted``, gets no token of the cluster's API, and ends by
itself, by two deadlines: the job's and the kubelet's.

Source: Kubernetes API reference, ``batch/v1`` and ``core/v1``; labels of spot nodes:
documentation of GKE, EKS, AKS and Karpenter.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cloud_adapters.compute.pool import Market, NodeLimits, NodeSpec

# Of the launch: the digest of its token.
TOKEN_LABEL = "crossfed-token"  # noqa: S105 -- the name of a label
# Name and labels as they were given, since Kubernetes takes few characters; the
# market; and that someone has asked the node to end.
GIVEN, ENDED = "crossfed/given", "crossfed/ended"
_USER_DATA = "crossfed/user-data"
# The image's user, its folder, and where it finds the node's user data.
USER, STATE = 10001, "/var/lib/crossfed"
USER_DATA = "/etc/crossfed/user-data"
CONTAINER = "crossfed"
# A finished job is listed for so long, and then removed by the cluster.
REMEMBERED_SECONDS = 24 * 3600
# SIGTERM is the leave notice; it takes a few seconds.
GRACE_SECONDS = 30
TOKEN_DIGITS = 40
_NAME_DIGITS, _NAME_CHARS = 12, 63
_LABEL = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")
ZONE = "topology.kubernetes.io/zone"
MACHINE = "node.kubernetes.io/instance-type"
_GPU = "nvidia.com/gpu"
# How nodes say that they may be preempted: a label and its value.
_SPOT = (
    ("cloud.google.com/gke-spot", "true"),
    ("eks.amazonaws.com/capacityType", "SPOT"),
    ("karpenter.sh/capacity-type", "spot"),
    ("kubernetes.azure.com/scalesetpriority", "spot"),
)
_TMP_GB = 1

Manifest = dict[str, Any]


def job_name(name: str, digest: str) -> str:
    """Name the job of a launch: one namespace has one job of a name."""
    word = re.sub(r"[^a-z0-9-]+", "-", f"crossfed-{name.lower()}")
    head = word[: _NAME_CHARS - _NAME_DIGITS - 1].rstrip("-")
    return f"{head}-{digest[:_NAME_DIGITS]}"


def label(value: str) -> str:
    """Make a label's value of any text."""
    if _LABEL.fullmatch(value):
        return value
    digest = hashlib.sha256(value.encode()).hexdigest()[:_NAME_DIGITS]
    word = re.sub(r"[^A-Za-z0-9_.-]", "-", value).lstrip("-_.")
    return f"{word[: _NAME_CHARS - _NAME_DIGITS - 1] or 'x'}-{digest}"


def selector(labels: Mapping[str, str]) -> str:
    """Select nodes that carry labels with these values.

    Without labels that is every node, but not every job of the namespace.
    """
    return ",".join([TOKEN_LABEL, *(f"{n}={label(v)}" for n, v in labels.items())])


def job(spec: NodeSpec, digest: str) -> Manifest:
    """Write the job of a node.

    Args:
        spec: The node; ``limits`` is stated.
        digest: Digest of the launch's token.
    """
    labels = {
        **{name: label(value) for name, value in spec.labels.items()},
        "app.kubernetes.io/name": "crossfed-site",
        "app.kubernetes.io/part-of": "crossfed",
        TOKEN_LABEL: digest,
    }
    given = {
        "name": spec.name,
        "labels": dict(spec.labels),
        "machine": spec.machine,
        "zones": list(spec.zones),
        "market": spec.market.value,
    }
    seconds = max(1, round(spec.max_seconds))
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": job_name(spec.name, digest),
            "labels": labels,
            "annotations": {GIVEN: json.dumps(given)},
        },
        "spec": {
            "backoffLimit": 0,
            "completions": 1,
            "parallelism": 1,
            "activeDeadlineSeconds": seconds,
            "ttlSecondsAfterFinished": REMEMBERED_SECONDS,
            # A pod that is lost is gone, with what it had: another node follows it.
            "podReplacementPolicy": "Failed",
            "template": {
                "metadata": {
                    "labels": labels,
                    "annotations": {
                        _USER_DATA: spec.user_data,
                        # A move for the cluster's convenience would end the node.
                        "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
                        "karpenter.sh/do-not-disrupt": "true",
                    },
                },
                "spec": _pod(spec, seconds),
            },
        },
    }


def _pod(spec: NodeSpec, seconds: int) -> Manifest:
    pod: Manifest = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": seconds,
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "affinity": {"nodeAffinity": _affinity(spec)},
        "tolerations": [*_tolerations(spec)],
        "containers": [_container(spec)],
        "volumes": [
            {"name": "state", "emptyDir": {"sizeLimit": f"{spec.disk_gb}Gi"}},
            {"name": "tmp", "emptyDir": {"sizeLimit": f"{_TMP_GB}Gi"}},
            {
                "name": "user-data",
                "downwardAPI": {
                    "items": [
                        {
                            "path": USER_DATA.rpartition("/")[2],
                            "fieldRef": {
                                "fieldPath": f"metadata.annotations['{_USER_DATA}']"
                            },
                        }
                    ]
                },
            },
        ],
    }
    if spec.identity:
        pod["serviceAccountName"] = spec.identity
    return pod


def _container(spec: NodeSpec) -> Manifest:
    return {
        "name": CONTAINER,
        "image": spec.image,
        "imagePullPolicy": "IfNotPresent",
        "command": [_literal(word) for word in spec.command],
        "env": [
            {"name": name, "value": _literal(value)}
            for name, value in spec.environment.items()
        ],
        "resources": _resources(spec),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "state", "mountPath": STATE},
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 -- its own
            {
                "name": "user-data",
                "mountPath": USER_DATA.rpartition("/")[0],
                "readOnly": True,
            },
        ],
    }


def _literal(text: str) -> str:
    """Keep Kubernetes from reading ``$(NAME)`` in a text."""
    return text.replace("$", "$$")


def _resources(spec: NodeSpec) -> Manifest:
    limits = spec.limits or NodeLimits(cpus=1, memory_gb=1.0)
    amounts = {
        "cpu": str(limits.cpus),
        "memory": f"{math.ceil(limits.memory_gb * 1024)}Mi",
        "ephemeral-storage": f"{spec.disk_gb + _TMP_GB}Gi",
    }
    if limits.gpus:
        amounts[_GPU] = str(limits.gpus)
    return {"limits": amounts, "requests": amounts}


def _affinity(spec: NodeSpec) -> Manifest:
    """Where the pod may run: zones, the best first, type of machine and market."""
    common = []
    if spec.zones:
        common.append(_among(ZONE, spec.zones))
    if spec.machine:
        common.append(_among(MACHINE, [spec.machine]))
    if spec.market is Market.SPOT:  # One of these labels; terms are alternatives.
        terms = [[*common, _among(name, [value])] for name, value in _SPOT]
    else:
        others = [
            {"key": name, "operator": "NotIn", "values": [value]}
            for name, value in _SPOT
        ]
        terms = [[*common, *others]]
    affinity: Manifest = {
        "requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [{"matchExpressions": term} for term in terms]
        }
    }
    if len(spec.zones) > 1:
        affinity["preferredDuringSchedulingIgnoredDuringExecution"] = [
            {
                "weight": max(1, 100 - 10 * place),
                "preference": {"matchExpressions": [_among(ZONE, [zone])]},
            }
            for place, zone in enumerate(spec.zones)
        ]
    return affinity


def _among(key: str, values: Sequence[str]) -> Mapping[str, Any]:
    return {"key": key, "operator": "In", "values": list(values)}


def _tolerations(spec: NodeSpec) -> Iterator[Manifest]:
    """Taints that keep other pods away from such nodes."""
    if spec.limits is not None and spec.limits.gpus:
        yield {"key": _GPU, "operator": "Exists", "effect": "NoSchedule"}
    if spec.market is Market.SPOT:
        for name, value in _SPOT:
            yield {
                "key": name,
                "operator": "Equal",
                "value": value,
                "effect": "NoSchedule",
            }
