"""What a job and its pod say about a node. Pure: what the cluster answered in."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cloud_adapters.compute import kube_errors, kube_manifest
from cloud_adapters.compute.pool import Market, Node, NodeState
from federation.errors import ComputeError

JOB_OF_POD = "batch.kubernetes.io/job-name"
_OVER_TIME = "DeadlineExceeded"
# Reasons of a container that waits although nothing is wrong.
_GOES_ON = frozenset({"", "ContainerCreating", "PodInitializing"})
# Exit codes of a program that SIGTERM has ended, and of one that SIGKILL has.
_TERMINATED, _KILLED = 128 + 15, 128 + 9
_OUT_OF_MEMORY = "OOMKilled"
_FINISHED_PODS = frozenset({"Failed", "Succeeded"})
_LOG_CHARS = 64 << 10


def node(job: Any, pods: Sequence[Any]) -> Node:
    """Describe a node.

    Args:
        job: ``V1Job``.
        pods: ``V1Pod`` of any jobs.
    """
    found = pod_of(job, pods)
    given = _given(job)
    state = _state(job, found)
    was_ended = kube_manifest.ENDED in _notes(job)
    market = given.get("market")
    return Node(
        id=job.metadata.name,
        name=str(given.get("name", job.metadata.name)),
        state=state,
        labels={**(job.metadata.labels or {}), **given.get("labels", {})},
        machine=str(given.get("machine", "")),
        zone=_zone(given, found),
        market=Market.SPOT if market == Market.SPOT.value else Market.ON_DEMAND,
        launched=job.metadata.creation_timestamp.timestamp(),
        ended=_ended(job) if state is NodeState.GONE else None,
        trouble="" if was_ended else _trouble(job, found),
        failed=not was_ended and _has_failed(found),
        finished=not was_ended and _has_finished(job, found),
    )


def pod_of(job: Any, pods: Sequence[Any]) -> Any:
    """The newest pod of a job; None if it has none."""
    own = [
        pod
        for pod in pods
        if (pod.metadata.labels or {}).get(JOB_OF_POD) == job.metadata.name
    ]
    return max(own, key=lambda pod: pod.metadata.creation_timestamp, default=None)


def has_begun(pod: Any) -> bool:
    """Whether a pod's program has begun, or ended."""
    return pod is not None and pod.status.phase in {*_FINISHED_PODS, "Running"}


def is_scheduled(pod: Any) -> bool:
    """Whether a pod has a machine."""
    return pod is not None and bool(pod.spec.node_name)


def unschedulable(pod: Any) -> str:
    """Why a pod has no machine, in the scheduler's words; empty if it has one."""
    if pod is None or is_scheduled(pod):
        return ""
    found = [
        each.message or each.reason or "no reason given"
        for each in pod.status.conditions or ()
        if each.type == "PodScheduled" and each.status == "False"
    ]
    return str(found[0]) if found else ""


def not_begun(pod: Any, doing: str) -> ComputeError | None:
    """Why a pod's program cannot begin; None if it may yet."""
    for reason, message in _waits(pod):
        error = kube_errors.not_begun(reason, message, doing)
        if error is not None:
            return error
    return None


def end_of_log(text: str) -> str:
    """The end of a log, in whole lines, by whose text a later look finds its place.

    If the last line alone is too long, the end of that line.
    """
    if len(text) <= _LOG_CHARS:
        return text
    # With the character before, which shows whether a line begins there.
    end = text[-_LOG_CHARS - 1 :]
    return end.partition("\n")[2] or end[1:]


def _state(job: Any, pod: Any) -> NodeState:
    is_over = bool(_condition(job, "Complete") or _condition(job, "Failed"))
    is_alive = pod is not None and pod.status.phase not in _FINISHED_PODS
    ends = (
        job.metadata.deletion_timestamp
        or kube_manifest.ENDED in _notes(job)
        or _condition(job, "FailureTarget")
        or _condition(job, "SuccessCriteriaMet")
    )
    if is_over and not is_alive:
        return NodeState.GONE
    if is_over or ends:
        return NodeState.STOPPING
    is_running = pod is not None and pod.status.phase == "Running"
    return NodeState.RUNNING if is_running else NodeState.STARTING


def _trouble(job: Any, pod: Any) -> str:
    failed = _condition(job, "Failed")
    if failed is not None and failed.reason == _OVER_TIME:
        return "its time was over"
    if job.spec.suspend:
        return "it is suspended: resume its job, or end it"
    told = [unschedulable(pod), *_ends(pod)]
    told += [f"{r}: {m}" for r, m in _waits(pod) if r not in _GOES_ON]
    if failed is not None:
        told.append(f"{failed.reason}: {failed.message}")
    return next(filter(None, told), "")


def _ends(pod: Any) -> Iterator[str]:
    """How containers of a pod have failed, and why the pod was."""
    if pod is None:
        return
    for each in pod.status.container_statuses or ():
        ended = each.state.terminated if each.state is not None else None
        if ended is not None and ended.exit_code:
            yield f"its program ended with {ended.exit_code} ({ended.reason})"
    if pod.status.phase == "Failed":
        yield f"{pod.status.reason or 'Failed'}: {pod.status.message or ''}".strip(": ")


def _has_failed(pod: Any) -> bool:
    """Whether a pod's program failed by itself, as the next one would.

    A pod that was evicted or preempted has a reason of its own, or the condition
    ``DisruptionTarget``. Source: Kubernetes documentation, "Pod disruption conditions".
    """
    if pod is None or pod.status.phase != "Failed" or pod.status.reason:
        return False
    if _is_disrupted(pod):
        return False
    states = [each.state for each in pod.status.container_statuses or ()]
    ended = [each.terminated for each in states if each and each.terminated]
    return any(
        each.reason == _OUT_OF_MEMORY or each.exit_code not in {0, _TERMINATED, _KILLED}
        for each in ended
    )


def _has_finished(job: Any, pod: Any) -> bool:
    """Whether a pod's program has ended with 0 although nobody asked it to.

    It also ends so when its machine is drained: then the pod is deleted or disrupted.
    """
    if pod is None or pod.metadata.deletion_timestamp or _is_disrupted(pod):
        return False
    return _condition(job, "Complete") is not None


def _is_disrupted(pod: Any) -> bool:
    return any(
        each.type == "DisruptionTarget" and each.status == "True"
        for each in pod.status.conditions or ()
    )


def _waits(pod: Any) -> Iterator[tuple[str, str]]:
    """Reasons and messages of containers that wait."""
    if pod is None:
        return
    for each in pod.status.container_statuses or ():
        waiting = each.state.waiting if each.state is not None else None
        if waiting is not None:
            yield str(waiting.reason or ""), str(waiting.message or "")


def _condition(job: Any, kind: str) -> Any:
    """A condition of a job that holds; None if it does not."""
    for each in job.status.conditions or () if job.status is not None else ():
        if each.type == kind and each.status == "True":
            return each
    return None


def _ended(job: Any) -> float | None:
    found = _condition(job, "Failed") or _condition(job, "Complete")
    at = job.status.completion_time or found.last_transition_time
    return None if at is None else float(at.timestamp())


def _zone(given: Mapping[str, Any], pod: Any) -> str:
    """Of the pod, since Kubernetes 1.35; before, it is known if only one is named."""
    label = (pod.metadata.labels or {}).get(kube_manifest.ZONE) if pod else None
    zones = given.get("zones", ())
    only = zones[0] if len(zones) == 1 and is_scheduled(pod) else ""
    return str(label or only)


def _notes(job: Any) -> Mapping[str, str]:
    return job.metadata.annotations or {}


def _given(job: Any) -> Mapping[str, Any]:
    """What was given; empty if someone has removed it, or put something else there.

    Anyone who may launch jobs in the namespace can write it, and must not hide another
    node.
    """
    try:
        found = json.loads(_notes(job).get(kube_manifest.GIVEN, ""))
    except (ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    labels, zones = found.get("labels", {}), found.get("zones", [])
    is_sound = isinstance(labels, dict) and isinstance(zones, list)
    texts = [*labels.values(), *zones] if is_sound else [None]
    return found if all(isinstance(each, str) for each in texts) else {}
