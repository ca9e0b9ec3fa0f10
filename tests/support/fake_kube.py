"""A cluster of Kubernetes on loopback: its API server, as far as jobs need it.

What arrives is checked against the models of the official client, field by field in
their only spelling, and against rules of the server that models do not know: names,
labels, amounts, mounts, fields that never change, and the Pod Security Standard
``restricted``. What is answered is checked against the models, too. A test decides what
becomes of each job's pod (``fate``). Not here: machines; nothing runs.
"""

import copy
import dataclasses
import itertools
import json
import re
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from kubernetes import client
from kubernetes.utils.quantity import parse_quantity
from pydantic import BaseModel, ValidationError
from support.google_server import Answer, GoogleServer, Request, json_answer

from federation.clock import SystemClock

NAMESPACE = "crossfed"
ZONES = ("europe-west4-a", "europe-west4-b")
TYPES = ("e2-standard-4", "g2-standard-4")
IMAGE = f"registry.example.org/crossfed-site@sha256:{'ab' * 32}"
_JOBS = f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs"
_PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
_EVENTS = f"/api/v1/namespaces/{NAMESPACE}/events"
_DNS = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_LABEL = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")
_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([\w.-]{0,61}\w)?")
_FIELD = re.compile(r"metadata\.(annotations|labels)\['([^']+)'\]")
_MUTABLE = ("activeDeadlineSeconds", "suspend", "ttlSecondsAfterFinished")

Resource = dict[str, Any]


class KubeError(Exception):
    """A refusal, as a Status of Kubernetes."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        """Refuse with a status of HTTP."""
        super().__init__(message)
        self.code, self.reason = code, reason

    def answer(self) -> Answer:
        """The Status."""
        body = {
            "kind": "Status",
            "apiVersion": "v1",
            "status": "Failure",
            "message": str(self),
            "reason": self.reason,
            "code": self.code,
        }
        return json_answer(body, self.code)


class FakeKube(GoogleServer):
    """The API server, with one namespace.

    Attributes:
        fate: Given a job, what becomes of its pod: ``running``, ``unschedulable``,
            ``pulling``, a reason for which its container waits, ``exit N``, or
            ``refused MESSAGE`` for an event in place of a pod.
        slow_end: Whether pods outlive their job's end until ``let_go``.
        page: How many resources a page has at most.
        refusal: Given a request, what it is refused with; None lets it pass.
        loses: Given a request, whether to carry it out and answer with a failure.
        zone: Where pods run; a cluster before Kubernetes 1.35 does not say it.
        log_of: Given a job, what its program has written.
        ends: Called with a job whose pod gets SIGTERM.
    """

    def __init__(self) -> None:
        """Begin to serve."""
        self._state = threading.RLock()
        self.clear()
        super().__init__(self._serve)

    def clear(self) -> None:
        """Forget everything."""
        self.fate: Callable[[Resource], str] = lambda _: "running"
        self.slow_end = False
        self.page = 500
        self.zone: str | None = ""
        self.mend()
        self.created: list[Resource] = []
        self.jobs: dict[str, Resource] = {}
        self.pods: dict[str, Resource] = {}
        self.events: list[Resource] = []
        self.logs: dict[str, str] = {}
        self.log_of: Callable[[str], str] = lambda name: self.logs.get(name, "")
        self.ends: Callable[[str], None] = lambda _: None
        self._numbers = itertools.count(1)

    def mend(self) -> None:
        """Serve as it should."""
        self.refusal: Callable[[Request], KubeError | None] = lambda _: None
        self.loses: Callable[[Request], bool] = lambda _: False

    def cut(self, number: int, when: str) -> Callable[[], bool]:
        """Fail one of the next requests, ``before`` or ``after`` it is carried out.

        Returns:
            Tells whether that has happened.
        """
        counted = itertools.count(1)
        reached: list[bool] = []

        def is_it(_: Request) -> bool:
            found = next(counted) == number
            reached.extend([True] * found)
            return found

        if when == "before":
            fault = KubeError(503, "ServiceUnavailable", "The network was cut.")
            self.refusal = lambda request: fault if is_it(request) else None
        else:
            self.loses = is_it
        return lambda: bool(reached)

    def pool(self, **options: Any) -> Any:
        """A pool of the namespace."""
        from cloud_adapters.compute import kube_jobs  # noqa: PLC0415 (its library)

        clock = options.pop("clock", SystemClock())
        made = kube_jobs.connect("test", NAMESPACE, clock=clock, endpoint=self.url)
        return dataclasses.replace(made, **options)

    def finish(self, name: str, code: int) -> None:
        """Have the program of a job's pod end by itself."""
        with self._state:
            job, status = self.jobs[name], self.pods[name]["status"]
            ended = {"exitCode": code, "reason": "Error" if code else "Completed"}
            status["containerStatuses"][0]["state"] = {"terminated": ended}
            status["phase"] = "Failed" if code else "Succeeded"
            if code:
                self._fail(job, "BackoffLimitExceeded", "its program failed")
                return
            job["status"] = {"startTime": job["status"]["startTime"], "succeeded": 1}
            job["status"]["completionTime"] = _now()
            job["status"]["conditions"] = [_condition("Complete", "Completed")]

    def let_go(self) -> None:
        """Have every pod end that was asked to."""
        with self._state:
            for job in self.jobs.values():
                if job["spec"].get("activeDeadlineSeconds") == 1:
                    self._fail(job, "DeadlineExceeded", "Job was active too long")

    def _serve(self, request: Request) -> Answer:
        with self._state:
            try:
                refused = self.refusal(request)
                if refused is not None:
                    raise refused
                answer = self._answer(request)
            except KubeError as error:
                return error.answer()
            lost = KubeError(503, "ServiceUnavailable", "The answer was lost.")
            return lost.answer() if self.loses(request) else answer

    def _answer(self, request: Request) -> Answer:
        name = request.path.rpartition("/")[2]
        routes: Mapping[tuple[str, str], Callable[[], Answer]] = {
            ("POST", _JOBS): lambda: _json(
                client.V1Job, self._create(json.loads(request.body)), 201
            ),
            ("GET", _JOBS): lambda: self._page("JobList", self.jobs, request),
            ("GET", _PODS): lambda: self._page("PodList", self.pods, request),
            ("GET", _EVENTS): lambda: self._events_of(request),
            ("GET", f"{_JOBS}/{name}"): lambda: _json(client.V1Job, self._job(name)),
            ("PATCH", f"{_JOBS}/{name}"): lambda: _json(
                client.V1Job, self._patch(name, request)
            ),
        }
        found = routes.get((request.method, request.path))
        if found is not None:
            return found()
        if request.path.startswith(_PODS) and name == "log":
            return self._log(request.path.split("/")[-2], request.query)
        words = f"the server has no {request.method} {request.path}"
        raise KubeError(404, "NotFound", words)

    # Jobs.

    def _create(self, body: Resource) -> Resource:
        _check_job(body)
        name = body["metadata"]["name"]
        if name in self.jobs:
            words = f'jobs.batch "{name}" already exists'
            raise KubeError(409, "AlreadyExists", words)
        self.created.append(copy.deepcopy(body))
        made = copy.deepcopy(body)
        made["metadata"] |= self._born(name)
        made["status"] = {"startTime": _now(), "active": 1}
        self.jobs[name] = made
        self._make_pod(made)
        return made

    def _job(self, name: str) -> Resource:
        if name not in self.jobs:
            raise KubeError(404, "NotFound", f'jobs.batch "{name}" not found')
        return self.jobs[name]

    def _patch(self, name: str, request: Request) -> Resource:
        if request.headers["content-type"] != "application/merge-patch+json":
            raise KubeError(415, "UnsupportedMediaType", "no such patch is known here")
        before = self._job(name)
        after = _merged(before, json.loads(request.body))
        _strict(client.V1Job, after)
        frozen = [copy.deepcopy(each["spec"]) for each in (before, after)]
        for spec in frozen:
            for key in _MUTABLE:
                spec.pop(key, None)
        if frozen[0] != frozen[1]:
            words = f'Job.batch "{name}" is invalid: spec: field is immutable'
            raise KubeError(422, "Invalid", words)
        self.jobs[name] = after
        is_over = after["status"].get("conditions")
        if after["spec"].get("activeDeadlineSeconds") == 1 and not is_over:
            self.ends(name)
            if self.slow_end and name in self.pods:
                self.pods[name]["metadata"]["deletionTimestamp"] = _now()
                after["status"]["conditions"] = [_condition("FailureTarget")]
            else:
                self._fail(after, "DeadlineExceeded", "Job was active too long")
        return after

    def _fail(self, job: Resource, reason: str, message: str) -> None:
        name = job["metadata"]["name"]
        if reason == "DeadlineExceeded":
            self.pods.pop(name, None)
        found = [
            _condition(each, reason, message) for each in ("FailureTarget", "Failed")
        ]
        job["status"] = {"startTime": job["status"]["startTime"], "failed": 1}
        job["status"]["conditions"] = found

    # Pods.

    def _make_pod(self, job: Resource) -> None:
        name, template = job["metadata"]["name"], copy.deepcopy(job["spec"]["template"])
        fate, trouble = self.fate(job), _not_restricted(template["spec"])
        if trouble:
            fate = f'refused pods "{name}-x" is forbidden: violates PodSecurity '
            fate += f'"restricted:latest": {trouble}'
        kind, _, words = fate.partition(" ")
        if kind == "refused":
            self.events.append(self._event(name, f"Error creating: {words}"))
            return
        metadata = template["metadata"] | self._born(f"{name}-abcde")
        metadata["labels"] = {
            **metadata["labels"],
            "batch.kubernetes.io/job-name": name,
            "job-name": name,
        }
        pod: Resource = {"metadata": metadata, "spec": template["spec"]}
        pod["status"] = self._status(pod, kind, words)
        self.pods[name] = pod
        if kind == "exit":
            reason = "BackoffLimitExceeded"
            self._fail(job, reason, "Job has reached the specified backoff limit")

    def _status(self, pod: Resource, kind: str, words: str) -> Resource:
        if kind == "unschedulable":
            message = words or "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
            found = {"type": "PodScheduled", "status": "False"}
            found |= {"reason": "Unschedulable", "message": message}
            return {"phase": "Pending", "conditions": [found]}
        pod["spec"]["nodeName"] = "node-1"
        if self.zone is not None:
            key = "topology.kubernetes.io/zone"
            pod["metadata"]["labels"][key] = self.zone or _first_zone(pod["spec"])
        conditions = [{"type": "PodScheduled", "status": "True"}]
        phase = "Pending"
        if kind == "running":
            phase, state = "Running", {"running": {"startedAt": _now()}}
        elif kind == "exit":
            phase = "Failed"
            state = {"terminated": {"exitCode": int(words), "reason": "Error"}}
        else:
            reason = "ContainerCreating" if kind == "pulling" else kind
            state = {"waiting": {"reason": reason, "message": words}}
        (container,) = pod["spec"]["containers"]
        about = {"name": container["name"], "image": container["image"]}
        about |= {"imageID": "", "ready": kind == "running", "restartCount": 0}
        return {
            "phase": phase,
            "conditions": conditions,
            "containerStatuses": [{**about, "state": state}],
        }

    def _log(self, pod: str, query: Mapping[str, str]) -> Answer:
        found = [p for p in self.pods.values() if p["metadata"]["name"] == pod]
        if not found:
            raise KubeError(404, "NotFound", f'pods "{pod}" not found')
        names = [each["name"] for each in found[0]["spec"]["containers"]]
        if query.get("container") not in names:
            raise KubeError(400, "BadRequest", f"container is not valid for pod {pod}")
        if found[0]["status"]["phase"] == "Pending":
            words = f'container in pod "{pod}" is waiting to start: ContainerCreating'
            raise KubeError(400, "BadRequest", words)
        lines = self.log_of(pod.removesuffix("-abcde")).splitlines(keepends=True)
        text = "".join(lines[-int(query.get("tailLines", len(lines) or 1)) :])
        return Answer(200, {"Content-Type": "text/plain"}, text.encode())

    # Lists.

    def _page(
        self, kind: str, resources: Mapping[str, Resource], request: Request
    ) -> Answer:
        terms = [*filter(None, request.query.get("labelSelector", "").split(","))]
        found = [
            each
            for _, each in sorted(resources.items())
            if all(_matches(each["metadata"].get("labels", {}), t) for t in terms)
        ]
        begin = int(request.query.get("continue", 0))
        end = begin + min(self.page, int(request.query.get("limit", self.page)))
        metadata = {"resourceVersion": "1"}
        if end < len(found):
            metadata["continue"] = str(end)
        version = "batch/v1" if kind == "JobList" else "v1"
        model = getattr(client, f"V1{kind}")
        body = {"kind": kind, "apiVersion": version, "metadata": metadata}
        return _json(model, {**body, "items": found[begin:end]})

    def _events_of(self, request: Request) -> Answer:
        wanted = dict(
            term.split("=") for term in request.query["fieldSelector"].split(",")
        )
        if wanted.keys() - {"involvedObject.name", "reason"}:
            raise KubeError(400, "BadRequest", f"no such fields: {wanted}")
        found = [
            each
            for each in self.events
            if each["reason"] == wanted.get("reason", each["reason"])
            and each["involvedObject"]["name"] == wanted["involvedObject.name"]
        ]
        body = {"kind": "EventList", "apiVersion": "v1", "metadata": {}}
        return _json(client.CoreV1EventList, {**body, "items": found})

    def _event(self, job: str, message: str) -> Resource:
        return {
            "metadata": self._born(f"{job}.{next(self._numbers)}"),
            "involvedObject": {"kind": "Job", "name": job, "namespace": NAMESPACE},
            "reason": "FailedCreate",
            "message": message,
            "type": "Warning",
        }

    def _born(self, name: str) -> Resource:
        number = next(self._numbers)
        return {
            "name": name,
            "namespace": NAMESPACE,
            "uid": f"00000000-0000-4000-8000-{number:012}",
            "resourceVersion": str(number),
            "creationTimestamp": _now(),
        }


def _json(model: type[BaseModel], body: Resource, status: int = 200) -> Answer:
    """Answer with a resource that its model accepts."""
    model.model_validate(body)
    return json_answer(body, status)


def _strict(model: Any, body: Resource) -> None:
    """Refuse what a model does not know, also a field in the spelling of Python."""
    try:
        found = model.model_validate(body)
    except ValidationError as error:
        raise KubeError(422, "Invalid", f"it is invalid: {error}") from None
    known = json.loads(json.dumps(found.to_dict(serialize=True), default=_plain))
    if _without_none(known) != _without_none(body):
        raise KubeError(422, "Invalid", "it has fields in another spelling")


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.strftime("%Y-%m-%dT%H:%M:%SZ")
    return value.to_dict(serialize=True)


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [_without_none(each) for each in value]
    return value


def _check_job(body: Resource) -> None:
    """Refuse what the server refuses and models do not."""
    _strict(client.V1Job, body)
    name, spec = body["metadata"].get("name", ""), body["spec"]
    template = spec["template"]
    pod, (container,) = template["spec"], template["spec"]["containers"]
    labels = {**body["metadata"]["labels"], **template["metadata"]["labels"]}
    mounts = {each["name"] for each in container["volumeMounts"]}
    rules = {
        f"metadata.name: {name!r}": _DNS.fullmatch(name),
        f"labels: {labels}": all(
            _KEY.fullmatch(k) and _LABEL.fullmatch(v) for k, v in labels.items()
        ),
        "annotations are too large": sum(
            len(k) + len(v) for k, v in template["metadata"]["annotations"].items()
        )
        < 256 << 10,
        "spec.activeDeadlineSeconds": spec["activeDeadlineSeconds"] >= 0,
        "spec.template.spec.restartPolicy": pod["restartPolicy"] == "Never",
        "containers[0].name": _DNS.fullmatch(container["name"]),
        "containers[0].image": container.get("image"),
        "volumeMounts name no volume": mounts <= {v["name"] for v in pod["volumes"]},
        "resources": _amounts_fit(container["resources"]),
        "fieldPath": _fields_fit(template),
        "weights": all(
            1 <= each["weight"] <= 100
            for each in pod["affinity"]["nodeAffinity"].get(
                "preferredDuringSchedulingIgnoredDuringExecution", ()
            )
        ),
    }
    for what, holds in rules.items():
        if not holds:
            words = f'Job.batch "{name}" is invalid: {what}: Invalid value'
            raise KubeError(422, "Invalid", words)


def _amounts_fit(resources: Resource) -> bool:
    limits = {k: parse_quantity(v) for k, v in resources["limits"].items()}
    requests = {k: parse_quantity(v) for k, v in resources["requests"].items()}
    return all(0 < v <= limits[k] for k, v in requests.items())


def _fields_fit(template: Resource) -> bool:
    items = [
        item
        for volume in template["spec"]["volumes"]
        for item in volume.get("downwardAPI", {}).get("items", ())
    ]
    found = [_FIELD.fullmatch(item["fieldRef"]["fieldPath"]) for item in items]
    return all(f and f[2] in template["metadata"][f[1]] for f in found)


def _not_restricted(pod: Resource) -> str:
    """What of a pod the Pod Security Standard ``restricted`` forbids."""
    own = pod.get("securityContext", {})
    (container,) = pod["containers"]
    inner = container.get("securityContext", {})
    rules = {
        "allowPrivilegeEscalation": inner.get("allowPrivilegeEscalation") is False,
        "unrestricted capabilities": inner.get("capabilities") == {"drop": ["ALL"]},
        "runAsNonRoot": own.get("runAsNonRoot") is True and own.get("runAsUser") != 0,
        "seccompProfile": own.get("seccompProfile") == {"type": "RuntimeDefault"},
        "restricted volume types": all(
            {"emptyDir", "downwardAPI"} & volume.keys() for volume in pod["volumes"]
        ),
        "host namespaces": not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys(),
    }
    return ", ".join(what for what, holds in rules.items() if not holds)


def _first_zone(pod: Resource) -> str:
    """The zone that a pod prefers."""
    affinity = pod["affinity"]["nodeAffinity"]
    preferred = affinity.get("preferredDuringSchedulingIgnoredDuringExecution", ())
    terms = [
        each["preference"] for each in sorted(preferred, key=lambda e: -e["weight"])
    ]
    required = affinity["requiredDuringSchedulingIgnoredDuringExecution"]
    for term in [*terms, *required["nodeSelectorTerms"]]:
        for each in term["matchExpressions"]:
            if each["key"] == "topology.kubernetes.io/zone":
                return str(each["values"][0])
    return ZONES[0]


def _matches(labels: Mapping[str, str], term: str) -> bool:
    key, equals, value = term.partition("=")
    return key in labels and (not equals or labels[key] == value)


def _merged(old: Any, patch: Any) -> Any:
    """JSON merge patch: RFC 7396."""
    if not isinstance(patch, dict):
        return patch
    made = copy.deepcopy(old) if isinstance(old, dict) else {}
    for key, value in patch.items():
        if value is None:
            made.pop(key, None)
        else:
            made[key] = _merged(made.get(key), value)
    return made


def _condition(
    kind: str, reason: str = "DeadlineExceeded", message: str = ""
) -> Resource:
    return {
        "type": kind,
        "status": "True",
        "reason": reason,
        "message": message,
        "lastTransitionTime": _now(),
    }


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
