"""Google Compute Engine on loopback: instances, as far as clients launch and end them.

Requests and answers are checked against the discovery document, so that a field or a
value that the service does not know is refused. Names, request ids, operations that
fail later, filters and pages behave as Google documents them. Not here: quotas,
networks, disks that live longer than their instance, and machines: nothing runs.
"""

import dataclasses
import itertools
import json
import re
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from support.google_discovery import Api, NotOfTheApi
from support.google_server import (
    Answer,
    GoogleError,
    GoogleServer,
    Request,
    json_answer,
)

ZONES = ("europe-west4-a", "europe-west4-b")
TYPES = ("e2-standard-4", "g2-standard-4")
PROJECT = "p-1"
_ROOT = "https://www.googleapis.com/compute/v1"

Resource = dict[str, Any]
Params = Mapping[str, str]


class FakeGce(GoogleServer):
    """The service with one project.

    Attributes:
        refusal: Given a launch, its zone and body, what its operation fails with: a
            code and a message, or None.
        page: How many instances a page has.
        console: What every machine has written to its console at last.
        loses: Given a method, whether to carry it out and answer with a failure.
        faults: What the next requests are refused with; None lets one pass.
        routers: Routers of any region; the default network has Cloud NAT.
        routes: Routes of the project.
        slow_operations: Whether an operation is done only when somebody waits for it.
    """

    def __init__(self) -> None:
        """Begin to serve."""
        self._api = Api("compute.v1")
        self._state = threading.RLock()
        self._methods: Mapping[str, Callable[[Params, Resource], Resource]] = {
            "compute.instances.aggregatedList": self._aggregated,
            "compute.instances.delete": self._delete,
            "compute.instances.get": self._get,
            "compute.instances.getSerialPortOutput": self._serial,
            "compute.instances.insert": self._insert,
            "compute.instances.list": self._list,
            "compute.instances.stop": self._stop,
            "compute.machineTypes.list": self._machine_types,
            "compute.routers.list": lambda *_: {"items": self.routers},
            "compute.routes.list": lambda *_: {"items": self.routes},
            "compute.subnetworks.get": self._subnetwork,
            "compute.zoneOperations.get": self._wait,
            "compute.zoneOperations.list": self._operations_of,
            "compute.zoneOperations.wait": self._wait,
        }
        self.clear()
        super().__init__(self._serve)

    def clear(self) -> None:
        """Forget everything."""
        self.refusal: Callable[[str, Resource], tuple[str, str] | None]
        self.refusal = lambda *_: None
        self.page, self.console = 500, ""
        self.slow_operations = False
        self.mend()
        self.routers: list[Resource] = [
            {
                "network": f"{_ROOT}/projects/{PROJECT}/global/networks/default",
                "nats": [
                    {"sourceSubnetworkIpRangesToNat": "ALL_SUBNETWORKS_ALL_IP_RANGES"}
                ],
            }
        ]
        self.routes: list[Resource] = []
        self.inserted: list[Resource] = []
        self.instances: dict[tuple[str, str], Resource] = {}
        self._operations: dict[str, Resource] = {}
        self._of_request: dict[str, str] = {}
        self._numbers = itertools.count(1)

    def mend(self) -> None:
        """Serve as it should."""
        self.loses: Callable[[str], bool] = lambda _: False
        self.faults: list[GoogleError | None] = []

    def cut(self, number: int, when: str) -> Callable[[], bool]:
        """Fail one of the next requests, ``before`` or ``after`` it is carried out.

        Returns:
            Tells whether that has happened.
        """
        fault = GoogleError(503, "backendError", "The network was cut.")
        if when == "before":
            self.faults = [None] * (number - 1) + [fault]
            return lambda: not self.faults
        counted = itertools.count(1)
        reached: list[bool] = []

        def is_it(_: str) -> bool:
            found = next(counted) == number
            reached.extend([True] * found)
            return found

        self.loses = is_it
        return lambda: bool(reached)

    def pool(self) -> Any:
        """A pool of the project, which does not wait before it tries again."""
        from google.api_core.retry import (  # noqa: PLC0415 (seconds to import)
            Retry,
            if_exception_type,
        )

        from cloud_adapters.compute import gce  # noqa: PLC0415

        made = gce.connect(PROJECT, self.url)
        quick = Retry(
            predicate=if_exception_type(*gce._TEMPORARY),
            initial=0.001,
            maximum=0.001,
            timeout=30.0,
        )
        return dataclasses.replace(made, retry=quick)

    def _serve(self, request: Request) -> Answer:
        with self._state:
            try:
                if self.faults and (fault := self.faults.pop(0)) is not None:
                    raise fault
                call = self._api.call(request.method, request.path, request.query)
                body = json.loads(request.body or b"{}")
                self._api.check_request(call.method_id, body)
            except NotOfTheApi as error:
                raise GoogleError(400, "invalid", str(error)) from None
            if call.method_id not in self._methods:
                raise GoogleError(501, "notImplemented", f"no {call.method_id} here")
            if call.params.get("project") != PROJECT:
                words = f"The resource 'projects/{call.params.get('project')}' was not"
                raise GoogleError(404, "notFound", f"{words} found")
            answer = self._methods[call.method_id](call.params, body)
            self._api.check_answer(call.method_id, answer)
            if self.loses(call.method_id):
                raise GoogleError(503, "backendError", "The answer was lost.")
            return json_answer(answer)

    # Instances.

    def _insert(self, params: Params, body: Resource) -> Resource:
        zone, name = params["zone"], body["name"]
        _check_insert(zone, body)
        known = self._of_request.get(params.get("requestId", ""))
        if known is not None:
            return self._operations[known]
        if (zone, name) in self.instances:
            words = f"The resource '{self._link(zone, name)}' already exists"
            raise GoogleError(409, "alreadyExists", words)
        self.inserted.append(body)
        refused = self.refusal(zone, body)
        operation = self._begin("insert", zone, name, refused)
        if "requestId" in params:
            self._of_request[params["requestId"]] = operation["name"]
        if refused is None:
            self.instances[zone, name] = {
                **body,
                "id": str(next(self._numbers)),
                "kind": "compute#instance",
                "zone": f"{_ROOT}/projects/{PROJECT}/zones/{zone}",
                "selfLink": self._link(zone, name),
                "creationTimestamp": _now(),
                "status": "STAGING" if self.slow_operations else "RUNNING",
            }
        return operation

    def _get(self, params: Params, _: Resource) -> Resource:
        found = self.instances.get((params["zone"], params["instance"]))
        if found is None:
            link = self._link(params["zone"], params["instance"])
            raise GoogleError(404, "notFound", f"The resource '{link}' was not found")
        return found

    def _delete(self, params: Params, body: Resource) -> Resource:
        self._get(params, body)
        del self.instances[params["zone"], params["instance"]]
        return self._begin("delete", params["zone"], params["instance"], None)

    def _stop(self, params: Params, body: Resource) -> Resource:
        self._get(params, body)["status"] = "TERMINATED"
        return self._begin("stop", params["zone"], params["instance"], None)

    def _serial(self, params: Params, body: Resource) -> Resource:
        name = self._get(params, body)["name"]
        text = f"{name}: cloud-init finished\n{self.console}"
        return {"contents": text, "next": "1", "start": "0"}

    def _list(self, params: Params, _: Resource) -> Resource:
        found = [
            each
            for (zone, _), each in sorted(self.instances.items())
            if zone == params["zone"] and _matches(each, params.get("filter", ""))
        ]
        return {"kind": "compute#instanceList", "items": found}

    def _aggregated(self, params: Params, _: Resource) -> Resource:
        found = [
            (zone, each)
            for (zone, _), each in sorted(self.instances.items())
            if _matches(each, params.get("filter", ""))
        ]
        begin = int(params.get("pageToken", 0))
        items: dict[str, Resource] = {
            f"zones/{zone}": {
                "warning": {"code": "NO_RESULTS_ON_PAGE", "message": "There are none."}
            }
            for zone in ZONES
        }
        for zone, each in found[begin : begin + self.page]:
            place = items[f"zones/{zone}"]
            place.pop("warning", None)
            place.setdefault("instances", []).append(each)
        answer = {"kind": "compute#instanceAggregatedList", "items": items}
        if begin + self.page < len(found):
            answer["nextPageToken"] = str(begin + self.page)
        return answer

    def _subnetwork(self, params: Params, _: Resource) -> Resource:
        """Any, in a network that is named before the subnet's first hyphen."""
        network = params["subnetwork"].partition("-")[0]
        return {"network": f"{_ROOT}/projects/{PROJECT}/global/networks/{network}"}

    def _machine_types(self, params: Params, _: Resource) -> Resource:
        """Those of ``TYPES``; the last zone has none with a GPU."""
        cpus: Resource = {"name": TYPES[0], "guestCpus": 4, "memoryMb": 16384}
        gpu: Resource = {"name": TYPES[1], "guestCpus": 4, "memoryMb": 16384}
        gpu["accelerators"] = [
            {"guestAcceleratorType": "nvidia-l4", "guestAcceleratorCount": 1}
        ]
        items = [cpus, gpu] if params["zone"] != ZONES[-1] else [cpus]
        return {"kind": "compute#machineTypeList", "items": items}

    # Operations.

    def _begin(
        self, kind: str, zone: str, name: str, refused: tuple[str, str] | None
    ) -> Resource:
        number = next(self._numbers)
        made = {
            "kind": "compute#operation",
            "id": str(number),
            "name": f"operation-{number}",
            "operationType": kind,
            "zone": f"{_ROOT}/projects/{PROJECT}/zones/{zone}",
            "targetLink": self._link(zone, name),
            "selfLink": f"{_ROOT}/projects/{PROJECT}/zones/{zone}/operations/"
            f"operation-{number}",
            "status": "RUNNING",
            "progress": 0,
            "insertTime": _now(),
        }
        if refused is not None:
            code, message = refused
            made["error"] = {"errors": [{"code": code, "message": message}]}
        self._operations[made["name"]] = made
        if not self.slow_operations:
            _finish(made)
        return made

    def _wait(self, params: Params, _: Resource) -> Resource:
        made = self._operations.get(params["operation"])
        if made is None:
            raise GoogleError(404, "notFound", "There is no such operation.")
        _finish(made)
        for each in self.instances.values():
            if each["selfLink"] == made["targetLink"] and each["status"] == "STAGING":
                each["status"] = "RUNNING"
        return made

    def _operations_of(self, params: Params, _: Resource) -> Resource:
        place = f"{_ROOT}/projects/{PROJECT}/zones/{params['zone']}"
        found = [
            each
            for each in self._operations.values()
            if each["zone"] == place and _matches(each, params.get("filter", ""))
        ]
        return {"kind": "compute#operationList", "id": "operations", "items": found}

    def _link(self, zone: str, name: str) -> str:
        return f"{_ROOT}/projects/{PROJECT}/zones/{zone}/instances/{name}"


def _check_insert(zone: str, body: Resource) -> None:
    """Refuse what the document does not say that the service refuses."""
    if zone not in ZONES:
        words = f"Invalid value for field 'zone': '{zone}'. Unknown zone."
        raise GoogleError(400, "invalid", words)
    kind = body["machineType"].rpartition("/")[2]
    if kind not in TYPES:
        words = f"Invalid value for field 'resource.machineType': '{kind}'."
        raise GoogleError(400, "invalid", words)
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", body["name"]):
        raise GoogleError(400, "invalid", f"Invalid value: {body['name']!r}")
    for key, value in body.get("labels", {}).items():
        if not (
            re.fullmatch(r"[a-z][a-z0-9_-]{0,62}", key)
            and re.fullmatch(r"[a-z0-9_-]{0,63}", value)
        ):
            raise GoogleError(400, "invalid", f"Invalid label {key}: {value}")


def _finish(operation: Resource) -> None:
    operation["status"] = "DONE"
    operation["progress"] = 100
    operation["endTime"] = _now()
    if "error" in operation:
        operation["httpErrorStatusCode"] = 503
        operation["httpErrorMessage"] = "SERVICE UNAVAILABLE"


_TERM = re.compile(r'\(?([\w.-]+)\s*(=|:|eq)\s*(\*|"[^"]*"|[^\s()]+)\)?(\s+AND\s+|\s*)')


def _matches(resource: Resource, text: str) -> bool:
    """Whether a filter lets a resource through.

    Raises:
        GoogleError: It is not of the form that is understood here.
    """
    end = 0
    while end < len(text):
        found = _TERM.match(text, end)
        if found is None:
            raise GoogleError(400, "invalid", f"Invalid filter {text!r}")
        value: Any = resource
        for part in found[1].split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if not _holds(value, found[2], found[3].strip('"')):
            return False
        end = found.end()
    return True


def _holds(value: Any, operator: str, wanted: str) -> bool:
    if value is None:
        return False
    if operator == "eq":
        return re.fullmatch(wanted, str(value)) is not None
    return value == wanted or (operator == ":" and wanted == "*")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
