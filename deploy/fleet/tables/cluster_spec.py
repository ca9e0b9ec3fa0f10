"""The cluster of a site in the deployment file, and what a pod in it may not state."""

import re
from dataclasses import dataclass

from cloud_adapters.compute.pool import NodeLimits
from federation.errors import JobError
from federation.job.job_keys import key

_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_ACCOUNT = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_MOST_CHARS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """The Kubernetes cluster that runs a site, and what its pod gets of a node.

    Attributes:
        context: Of your kubeconfig: the cluster and your credentials for it. There is
            no default, so that `crossfed down` looks where `crossfed up` was.
        namespace: Where the site's job is.
        cpus: Number of CPUs.
        memory_gb: Memory, in GiB.
        gpus: Number of NVIDIA GPUs.
    """

    context: str = ""
    namespace: str = ""
    cpus: int = key(default=2, low=1, high=1024)
    memory_gb: float = key(default=8.0, above=0.0, high=65536.0)
    gpus: int = key(default=0, low=0, high=64)

    @property
    def place(self) -> str:
        """Cluster and namespace, in one name."""
        return f"{self.context}/{self.namespace}"

    @property
    def limits(self) -> NodeLimits:
        """What the pod gets."""
        return NodeLimits(cpus=self.cpus, memory_gb=self.memory_gb, gpus=self.gpus)


def check(cluster: ClusterSpec, *, identity: str, table: str) -> None:
    """Refuse a cluster that cannot be found, or an account that none can have.

    Args:
        cluster: The table.
        identity: Name of the pod's service account; empty for the default one.
        table: Where the machine is in the file.

    Raises:
        JobError: A key is missing or wrong.
    """
    for name in ("context", "namespace"):
        if not getattr(cluster, name):
            raise JobError(
                "is missing for provider kubernetes", key=f"{table}.cluster.{name}"
            )
    if len(cluster.context) > _MOST_CHARS or not cluster.context.isprintable():
        raise JobError(
            f"must be at most {_MOST_CHARS} printable characters",
            key=f"{table}.cluster.context",
        )
    if not _NAMESPACE.fullmatch(cluster.namespace):
        raise JobError(
            f"{cluster.namespace!r:.80} is no namespace: 1 to 63 lower-case letters, "
            "digits and hyphens",
            key=f"{table}.cluster.namespace",
        )
    if identity and not _ACCOUNT.fullmatch(identity):
        raise JobError(
            f"{identity!r:.80} is no service account of Kubernetes",
            key=f"{table}.identity",
        )
