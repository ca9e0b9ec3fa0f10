"""What the head of a deployment reads when its pod starts. Pure: values in, text out.

A deployment file for the pod, and the job. There is no secret in it: anyone who may
list pods can read it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tomli_w

from cloud_adapters.compute.kube_head import IN_CLUSTER
from deploy.fleet.deployment_file import DeploymentFile
from deploy.fleet.starting.cluster_head import PORT
from federation.errors import JobError
from federation.typed_json import encode

# Kubernetes allows 256 KiB for all annotations of a pod together.
MAX_BYTES = 200 << 10
# In the folder of the pod.
FILE, JOB, FOLDER = "fed.toml", "job.toml", "deployment"
# Keys of the aggregator's table that are the same in the pod.
_KEPT = ("connect_seconds", "dollars_per_hour", "dollars_per_gigabyte")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadBundle:
    """What a head is given.

    Attributes:
        name: Name of the deployment.
        owner: Random name of the folder that launches it; its nodes carry it, too.
        deployment: Text of its deployment file.
        job: Text of the job.
    """

    name: str
    owner: str
    deployment: str
    job: str

    def text(self) -> str:
        """The bundle as the pod reads it.

        Raises:
            JobError: It is larger than an annotation may be.
        """
        found = json.dumps(encode(self))
        if len(found.encode()) > MAX_BYTES:
            raise JobError(
                f"deployment file and job have {len(found.encode())} bytes, and a pod "
                f"takes {MAX_BYTES}: shorten one of them",
                key="job",
            )
        return found


def for_pod(document: Mapping[str, Any], file: DeploymentFile) -> str:
    """Write the deployment file of a head: the aggregator is local there.

    Args:
        document: The deployment file as it was written.
        file: What was read of it.
    """
    machine = file.aggregator
    table = document.get("aggregator", {})
    aggregator = {name: table[name] for name in _KEPT if name in table}
    aggregator["address"] = machine.address
    aggregator["listen"] = machine.listen or f"0.0.0.0:{PORT}"
    return tomli_w.dumps(
        {
            **document,
            "job": JOB,
            "folder": FOLDER,
            "aggregator": aggregator,
            "sites": [_site(each) for each in document["sites"]],
        }
    )


def _site(table: Mapping[str, Any]) -> Mapping[str, Any]:
    """A site's table, whose cluster is that of the pod.

    The pod knows its API server, and the file's endpoint may work only from outside,
    for example through a tunnel. One without TLS stays: no credentials are sent to it,
    and those of the pod are not read.
    """
    machine = dict(table["machine"])
    machine["cluster"] = {**machine["cluster"], "context": IN_CLUSTER}
    if not machine.get("endpoint", "").startswith("http:"):
        machine.pop("endpoint", None)
    return {**table, "machine": machine}
