"""Nodes that are jobs of a Kubernetes cluster, in one namespace.

A job is named by the digest of its launch's token, and a namespace has one job of a
name. A node is ended by moving its job's deadline into the past: the job fails, its pod
gets SIGTERM, and the job stays for a day as the record of a token that was used.

A job that cannot start is not left to wait: it would begin, and cost, later and
unseen. So a launch waits until there is a machine for it, or ends it.

Source: Kubernetes API reference, ``batch/v1``; documentation, "Jobs".
"""

import functools
import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kubernetes import client, config
from kubernetes.client import ApiException

from cloud_adapters.compute import kube_errors, kube_manifest, kube_nodes
from cloud_adapters.compute.kube_manifest import TOKEN_LABEL
from cloud_adapters.compute.pool import Node, NodeSpec, NodeState, gone, log_of
from federation.errors import ComputeError, ComputeForbidden

if TYPE_CHECKING:
    from federation.protocols import Clock

_REQUEST_SECONDS = (5.0, 60.0)
_LOG_LINES, _SHOWN_CHARS, _AGAIN_SECONDS = 2000, 2000, 0.5
# Between looks at a job without a machine: a share of the time that it has waited.
_LOOK_SECONDS, _MOST_LOOK_SECONDS, _LOOK_SHARE = 1.0, 5.0, 0.05
_MERGE = "application/merge-patch+json"
_NOT_FOUND, _CONFLICT, _BAD_REQUEST = 404, 409, 400


@dataclass(frozen=True, slots=True, kw_only=True)
class KubePool:
    """Jobs of one namespace; see ``ComputePool``.

    Attributes:
        namespace: Where they are.
        place: Cluster and namespace, for messages.
        clients: Clients of the official library.
        clock: Tells time.
        tries: How often to make a request that fails for a moment.
        page_size: How many jobs to ask for at once.
        schedule_seconds: How long the cluster may take to find or add a machine.
        pull_seconds: How long to look whether the image is refused, after that.
    """

    namespace: str
    place: str
    clients: "KubeClients"
    clock: "Clock"
    tries: int = 4
    page_size: int = 200
    schedule_seconds: float = 300.0
    pull_seconds: float = 30.0

    def launch(self, spec: NodeSpec, token: str) -> Node:
        """See ``ComputePool``; it waits until there is a machine for the node.

        Raises:
            MachineRefused: The cluster refuses the job, its pod or the image.
            QuotaReached: The namespace may not have more.
        """
        digest = hashlib.sha256(token.encode()).hexdigest()
        digest = digest[: kube_manifest.TOKEN_DIGITS]
        doing = f"launch {spec.name} in {self.place}"
        made = self._call(
            self.clients.batch.create_namespaced_job,
            doing,
            namespace=self.namespace,
            body=kube_manifest.job(spec, digest),
            instead={_CONFLICT: None},
        )
        name = kube_manifest.job_name(spec.name, digest)
        return self._settled(spec, name, doing, is_new=made is not None)

    def nodes(self, labels: Mapping[str, str]) -> Sequence[Node]:
        """See ``ComputePool``; those that are gone are listed for a day."""
        selector = kube_manifest.selector(labels)
        jobs = self._all(self.clients.batch.list_namespaced_job, "jobs", selector)
        pods = self._all(self.clients.core.list_namespaced_pod, "pods", selector)
        found = [kube_nodes.node(job, pods) for job in jobs]
        matching = [node for node in found if labels.items() <= node.labels.items()]
        return sorted(matching, key=lambda node: (node.launched, node.id))

    def terminate(self, ids: Collection[str]) -> None:
        """See ``ComputePool``."""
        if not ids:
            return
        over = (NodeState.GONE, NodeState.STOPPING)
        ours = {node.id for node in self.nodes({}) if node.state not in over}
        for name in sorted(ours & {*ids}):
            self._end(name)

    def log(self, node_id: str) -> str:
        """See ``ComputePool``: what the pod's program wrote, while there is the pod."""
        selector = f"{TOKEN_LABEL},{kube_nodes.JOB_OF_POD}={node_id}"
        if kube_manifest.label(node_id) != node_id:
            return ""
        pods = self._all(self.clients.core.list_namespaced_pod, "pods", selector)
        if not pods:
            return ""
        newest = max(pods, key=lambda pod: pod.metadata.creation_timestamp)
        # It has none before the program begins, and none after the pod was removed.
        text = self._call(
            self.clients.core.read_namespaced_pod_log,
            f"read the log of {node_id} in {self.place}",
            name=newest.metadata.name,
            namespace=self.namespace,
            container=kube_manifest.CONTAINER,
            tail_lines=_LOG_LINES,
            instead={_BAD_REQUEST: None, _NOT_FOUND: None},
        )
        return kube_nodes.end_of_log(str(text or ""))

    def clean_up(self) -> None:
        """See ``ComputePool``: the cluster removes what ended jobs leave."""

    def _end(self, name: str) -> None:
        self._call(
            self.clients.batch.patch_namespaced_job,
            f"end {name} in {self.place}",
            name=name,
            namespace=self.namespace,
            body={
                "metadata": {"annotations": {kube_manifest.ENDED: "true"}},
                "spec": {"activeDeadlineSeconds": 1, "suspend": False},
            },
            _content_type=_MERGE,
            instead={_NOT_FOUND: None},
        )

    def _settled(self, spec: NodeSpec, name: str, doing: str, *, is_new: bool) -> Node:
        """Wait until a job has a machine, and end it if it gets none."""
        begin = self.clock.monotonic()
        scheduled: float | None = None
        while True:
            job = self._call(
                self.clients.batch.read_namespaced_job,
                doing,
                name=name,
                namespace=self.namespace,
                instead={_NOT_FOUND: None},
            )
            if job is None:
                return gone(spec, name)
            selector = f"{kube_nodes.JOB_OF_POD}={name}"
            pods = self._all(self.clients.core.list_namespaced_pod, "pods", selector)
            node, pod = kube_nodes.node(job, pods), kube_nodes.pod_of(job, pods)
            now = self.clock.monotonic()
            if node.state in {NodeState.GONE, NodeState.STOPPING} or (
                kube_nodes.has_begun(pod)
            ):
                return self._begun(node, doing, is_new=is_new)
            if kube_nodes.is_scheduled(pod) and scheduled is None:
                scheduled = now
            error = self._refused(name, pod, doing, waited=now - begin)
            if error is not None:
                self._end(name)
                raise error
            if scheduled is not None and now - scheduled >= self.pull_seconds:
                return node
            pause = max(_LOOK_SECONDS, _LOOK_SHARE * (now - begin))
            self.clock.sleep(min(pause, _MOST_LOOK_SECONDS))

    def _begun(self, node: Node, doing: str, *, is_new: bool) -> Node:
        """A node that runs; or that has ended, which a new one must not have.

        The caller would take it for one of before, and launch another.
        """
        if is_new and node.state is NodeState.GONE:
            raise ComputeError(
                f"cannot {doing}: it ended right after its start: "
                f"{node.trouble or 'no failure'}. Its log ends:\n"
                f"{log_of(self, node.id)[-_SHOWN_CHARS:]}"
            )
        return node

    def _refused(
        self, name: str, pod: Any, doing: str, *, waited: float
    ) -> ComputeError | None:
        """Why a job gets no pod, machine or container; None if it may yet."""
        if kube_nodes.is_scheduled(pod):
            return kube_nodes.not_begun(pod, doing)
        told = "" if pod is not None else self._not_admitted(name, doing)
        if told:
            return kube_errors.not_admitted(told, doing)
        if waited < self.schedule_seconds:
            return None
        message = kube_nodes.unschedulable(pod) or "the scheduler says nothing"
        return kube_errors.not_scheduled(message, doing)

    def _not_admitted(self, name: str, doing: str) -> str:
        """Why the cluster has made no pod for a job, as an event tells it."""
        try:
            found = self._call(
                self.clients.core.list_namespaced_event,
                doing,
                namespace=self.namespace,
                field_selector=f"involvedObject.name={name},reason=FailedCreate",
            )
        except ComputeForbidden:
            # Some may not read events; then the time that a machine may take counts.
            return ""
        told = [str(each.message or "") for each in found.items]
        return next(filter(kube_errors.is_refusal, told), "")

    def _all(self, method: Callable[..., Any], what: str, selector: str) -> list[Any]:
        found: list[Any] = []
        following: dict[str, Any] = {}
        while True:
            page = self._call(
                method,
                f"list {what} in {self.place}",
                namespace=self.namespace,
                label_selector=selector,
                limit=self.page_size,
                **following,
            )
            found += page.items
            if page.metadata is None or not page.metadata.var_continue:
                return found
            following = {"_continue": page.metadata.var_continue}

    def _call(
        self,
        method: Callable[..., Any],
        doing: str,
        *,
        instead: Mapping[int, None] | None = None,
        **parameters: Any,
    ) -> Any:
        """Make a request; ``instead`` has statuses whose answer is None.

        Every request may be repeated: a job is made under its own name, and ended
        for good.
        """
        for left in reversed(range(self.tries)):
            try:
                return method(**parameters, _request_timeout=_REQUEST_SECONDS)
            except kube_errors.FAILURES as error:
                if isinstance(error, ApiException) and error.status in (instead or {}):
                    return None
                if not (left and kube_errors.is_temporary(error)):
                    raise kube_errors.translate(error, doing) from error
            self.clock.sleep(_AGAIN_SECONDS * 2 ** (self.tries - left))
        raise AssertionError


class KubeClients:
    """Clients of the library, made when they are needed: that takes credentials."""

    def __init__(self, context: str, endpoint: str) -> None:
        """Use the environment's credentials; see ``connect``."""
        self._context, self._endpoint = context, endpoint

    @functools.cached_property
    def batch(self) -> Any:
        """One for jobs."""
        return client.BatchV1Api(self._api)

    @functools.cached_property
    def core(self) -> Any:
        """One for pods, logs and events."""
        return client.CoreV1Api(self._api)

    @functools.cached_property
    def _api(self) -> Any:
        settings = client.Configuration()
        # What fails is repeated here, where every request may be.
        settings.retries = False
        if urlsplit(self._endpoint).scheme == "http":
            settings.host = self._endpoint
            return client.ApiClient(settings)
        try:
            config.load_kube_config(
                context=self._context, client_configuration=settings
            )
        except kube_errors.FAILURES as error:
            doing = f"open the cluster of context {self._context}"
            raise kube_errors.translate(error, doing) from error
        settings.host = self._endpoint or settings.host
        return client.ApiClient(settings)


def connect(
    context: str, namespace: str, *, clock: "Clock", endpoint: str = ""
) -> KubePool:
    """Open a cluster with the credentials of a context.

    Args:
        context: Of the files that ``KUBECONFIG`` names, or of ``~/.kube/config``.
        namespace: Where the jobs are.
        clock: Tells time.
        endpoint: URL of the API server, instead of the context's own. To one without
            TLS go no credentials, and the context is not read.
    """
    return KubePool(
        namespace=namespace,
        place=f"{context}/{namespace}",
        clients=KubeClients(context, endpoint),
        clock=clock,
    )
