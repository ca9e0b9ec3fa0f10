"""What the head of a deployment has in a cluster besides its job. Pure: manifests.

The head is the node that launches the others there. Its state is on a volume that one
pod at a time can mount, wherever it runs, and the other nodes reach it by a Service.

Source: Kubernetes API reference, ``core/v1`` and ``batch/v1``; documentation,
"Persistent Volumes" (``ReadWriteOncePod``) and "Pod failure policy".
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from cloud_adapters.compute.pool import ClusterHead, Node, NodeState
from federation.errors import MachineRefused

# On the Service, on its pods and on the volume: the name of the Service.
SERVICE_LABEL = "crossfed-service"
# The context of a program that runs in the cluster: its pod's service account.
IN_CLUSTER = "in-cluster"
PORT_NAME = "sites"

Manifest = dict[str, Any]


def claim(head: ClusterHead, labels: Mapping[str, str]) -> Manifest:
    """Write the claim of a head's volume.

    Args:
        head: Settings of the aggregator's pod.
        labels: By which it is found.
    """
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {
            "name": head.volume,
            "labels": {**labels, SERVICE_LABEL: head.service},
        },
        "spec": {
            # Two pods of one machine could mount a ReadWriteOnce volume, and keys and
            # ledgers must have one writer.
            "accessModes": ["ReadWriteOncePod"],
            "resources": {"requests": {"storage": f"{head.volume_gb}Gi"}},
        },
    }


def service(head: ClusterHead, labels: Mapping[str, str]) -> Manifest:
    """Write the Service that leads to a head's pod, inside the cluster alone.

    Args:
        head: Settings of the aggregator's pod.
        labels: By which it is found.
    """
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": head.service,
            "labels": {**labels, SERVICE_LABEL: head.service},
        },
        "spec": {
            "type": "ClusterIP",
            "selector": {SERVICE_LABEL: head.service},
            "ports": [
                {
                    "name": PORT_NAME,
                    "protocol": "TCP",
                    "port": head.port,
                    "targetPort": head.port,
                }
            ],
        },
    }


def check_own(body: Manifest, found: Sequence[Any], doing: str) -> None:
    """Refuse a volume or a Service that was not made for this head.

    Args:
        body: What could not be made, because something has its name.
        found: All of the kind that were made for the head.
        doing: What is being done, for the message.

    Raises:
        MachineRefused: What has the name is not among them.
    """
    name = body["metadata"]["name"]
    if name not in {each.metadata.name for each in found}:
        raise MachineRefused(
            f"cannot {doing}: the namespace has another {body['kind']} {name}, which "
            "does not belong to this deployment: rename the deployment, or delete the "
            f"{body['kind']}"
        )


def services_of_gone(nodes: Sequence[Node], services: Sequence[Any]) -> Collection[str]:
    """Names of Services whose heads have all ended.

    Args:
        nodes: All of a namespace.
        services: Those that were made for heads. An ended head is listed for a day,
            in which something else may have taken the name of its Service.
    """
    gone, alive = set[str](), set[str]()
    for node in nodes:
        name = node.labels.get(SERVICE_LABEL)
        if name:
            (gone if node.state is NodeState.GONE else alive).add(name)
    made = {each.metadata.name for each in services}
    return (gone - alive) & made


def of_job() -> Manifest:
    """What the job of a head has besides that of any node.

    A pod that the cluster evicts is replaced, and finds its volume; one whose program
    fails is not, because the next one would fail, too.
    """
    return {
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "Ignore",
                    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                },
                {
                    "action": "FailJob",
                    "onExitCodes": {"operator": "NotIn", "values": [0]},
                },
            ]
        }
    }


def of_pod(head: ClusterHead) -> Manifest:
    """What the pod of a head has besides that of any node."""
    found: Manifest = {"automountServiceAccountToken": True}
    if head.host:
        # Not every network lets a pod reach itself through its own Service.
        found["hostAliases"] = [{"ip": "127.0.0.1", "hostnames": [head.host]}]
    return found


def volume(head: ClusterHead) -> Manifest:
    """The volume of a head's state, in its pod."""
    return {"persistentVolumeClaim": {"claimName": head.volume}}
