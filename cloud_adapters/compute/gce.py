"""Nodes that are instances of Google Compute Engine, in one project.

A launch is found again by a label with the digest of its token, which is also in the
instance's name: a zone has one instance of a name, and the service remembers for days
which it has made. Instances that were deleted are not listed.

The service deletes an instance when its time is over or it is preempted, whatever
runs on it. One that shuts itself down is stopped only, and its disk still costs.

Source: Compute Engine API reference, v1, ``instances``, ``zoneOperations``.
"""

import functools
import hashlib
import json
import re
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeVar
from urllib.parse import urlsplit

import requests
from google.api_core import exceptions as api
from google.api_core.retry import Retry, if_exception_type
from google.auth.credentials import AnonymousCredentials
from google.cloud import compute_v1

from cloud_adapters.compute import gce_errors
from cloud_adapters.compute.machine_types import MachineType
from cloud_adapters.compute.pool import Market, Node, NodeSpec, NodeState, gone
from federation.errors import ComputeUnavailable, MachineRefused, NoCapacity

# GiB of one GPU. Source: Google Cloud documentation, "GPU machine types", 2026.
_GPU_MEMORY_GB: Mapping[str, float] = {
    "nvidia-a100-80gb": 80,
    "nvidia-b200": 180,
    "nvidia-h100-80gb": 80,
    "nvidia-h100-mega-80gb": 80,
    "nvidia-h200-141gb": 141,
    "nvidia-l4": 24,
    "nvidia-tesla-a100": 40,
    "nvidia-tesla-t4": 16,
    "nvidia-tesla-v100": 16,
}


def machine_type(described: Any, zones: Sequence[str]) -> MachineType:
    """Translate a type that some zones have."""
    accelerators = described.accelerators
    gpu = accelerators[0].guest_accelerator_type if accelerators else ""
    return MachineType(
        name=described.name,
        gpus=sum(each.guest_accelerator_count for each in accelerators),
        gpu=gpu,
        gpu_memory_gb=float(_GPU_MEMORY_GB.get(gpu, 0)),
        cpus=described.guest_cpus,
        memory_gb=described.memory_mb / 1024,
        zones=sorted(zones),
    )


# The digest of a launch's token; labels take 63 characters.
TOKEN_LABEL = "crossfed-token"  # noqa: S105 -- the name of a label
_TOKEN_DIGITS = 40
_NAME_DIGITS, _NAME_CHARS, _LABEL_CHARS = 12, 63, 63
# Labels as they were given: the service's own take less.
_LABELS_ITEM = "crossfed-labels"
_LOG_CHARS = 64 << 10
_REQUEST_SECONDS = 60.0
# The service answers a wait after two minutes at the latest.
_WAIT_SECONDS, _NUM_WAITS = 150.0, 5
_ANYWHERE = "0.0.0.0/0"
_SCOPE = "https://www.googleapis.com/auth/cloud-platform"
# These machines cannot move to another host while they run.
_HAS_GPU = re.compile(r"(a[2-9]x?|g[2-9])-")
_TEMPORARY = (
    api.TooManyRequests,
    api.ServerError,
    requests.exceptions.ConnectionError,
    requests.exceptions.Timeout,
)
_STATES: Mapping[str, NodeState] = {
    "PENDING": NodeState.STARTING,
    "PROVISIONING": NodeState.STARTING,
    "STAGING": NodeState.STARTING,
    "REPAIRING": NodeState.STARTING,
    "RUNNING": NodeState.RUNNING,
}
_STOPPED = frozenset({"STOPPED", "SUSPENDED", "TERMINATED"})

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class GcePool:
    """Instances of one project, in all its zones; see ``ComputePool``.

    Attributes:
        project: Id of the project.
        clients: Clients of google-cloud-compute.
        retry: How to repeat what fails for a moment.
    """

    project: str
    clients: "GceClients"
    retry: Retry = field(
        default_factory=lambda: Retry(
            predicate=if_exception_type(*_TEMPORARY),
            initial=1.0,
            maximum=10.0,
            timeout=60.0,
        )
    )

    def launch(self, spec: NodeSpec, token: str) -> Node:
        """See ``ComputePool``.

        Raises:
            MachineRefused: There is no such image, network, zone or type.
            QuotaReached: The project may not have more of them.
        """
        digest = hashlib.sha256(token.encode()).hexdigest()[:_TOKEN_DIGITS]
        known = self._found([f'labels.{TOKEN_LABEL} = "{digest}"'])
        if known:
            return known[0]
        if not spec.zones:
            raise MachineRefused(f"cannot launch {spec.name}: name its zones in zones")
        place = _GceLaunch(spec, token, digest)
        failed = {zone: self._failed(place, zone) for zone in spec.zones}
        if None in failed.values():
            return self._made(place)
        refusals = []
        for zone, number in failed.items():
            try:
                self._insert(place, zone, number or 0)
            except NoCapacity as error:
                refusals.append(str(error))
                continue
            return self._made(place)
        raise NoCapacity("; ".join(refusals))

    def nodes(self, labels: Mapping[str, str]) -> Sequence[Node]:
        """See ``ComputePool``; those that are gone are not listed."""
        asked = [f'labels.{name} = "{_label(v)}"' for name, v in labels.items()]
        # Without it, no label would mean every instance of the project.
        found = self._found([f"labels.{TOKEN_LABEL}:*", *asked])
        matching = [node for node in found if labels.items() <= node.labels.items()]
        return sorted(matching, key=lambda node: (node.launched, node.id))

    def terminate(self, ids: Collection[str]) -> None:
        """See ``ComputePool``."""
        ours = {node.id: node for node in self.nodes({})}
        for node_id in sorted(ids & ours.keys()):
            if ours[node_id].trouble or ours[node_id].state is not NodeState.STOPPING:
                zone, _, name = node_id.partition("/")
                request = {"project": self.project, "zone": zone, "instance": name}
                self._call(
                    self.clients.instances.delete_unary,
                    f"end {node_id}",
                    request,
                    missing=None,
                )

    def log(self, node_id: str) -> str:
        """See ``ComputePool``: what the machine wrote to its serial port."""
        zone, _, name = node_id.partition("/")
        if not name:
            return ""
        request = {"project": self.project, "zone": zone, "instance": name}
        doing = f"read the serial port of {node_id}"
        get = self.clients.instances.get_serial_port_output
        answer = self._call(get, doing, request, missing=None)
        return "" if answer is None else str(answer.contents)[-_LOG_CHARS:]

    def clean_up(self) -> None:
        """See ``ComputePool``: the cloud does it."""

    def check_route(self, spec: NodeSpec) -> None:
        """See ``RoutedPool``; a router with peers may know routes of other networks."""
        region = spec.zones[0].rpartition("-")[0]
        # A network that several projects share names its own.
        subnet = _subnet(spec, region).removeprefix("projects/")
        project = subnet.partition("/")[0] if "/regions/" in subnet else self.project
        name = subnet.rpartition("/")[2]
        doing = f"find a way out of {name or 'the default network'} in {region}"
        at = {"project": project, "region": region}
        network = "default"
        if name:
            get, asked = self.clients.subnetworks.get, {**at, "subnetwork": name}
            network = self._call(get, doing, asked).network.rpartition("/")[2]
        for router in self._call(self.clients.routers.list, doing, at):
            is_here = router.network.rpartition("/")[2] == network
            if is_here and (router.bgp_peers or _translates(router, name)):
                return
        for route in self._call(self.clients.routes.list, doing, {"project": project}):
            is_here = route.network.rpartition("/")[2] == network
            if is_here and route.dest_range == _ANYWHERE and not route.next_hop_gateway:
                return
        raise MachineRefused(
            f"cannot {doing}: network {network} has no Cloud NAT there, and machines "
            "have no public address: name another one in subnets "
            "(deploy/terraform/gcp/network makes one), or add Cloud NAT to it"
        )

    def machine_types(
        self, names: Collection[str], zones: Sequence[str]
    ) -> Sequence[MachineType]:
        """See ``MachineCatalogue``; zones must be named."""
        found: dict[str, tuple[Any, list[str]]] = {}
        for zone in zones:
            request = {"project": self.project, "zone": zone}
            doing = f"list types of machines in {zone}"
            list_them = self.clients.machine_types.list
            for each in self._call(list_them, doing, request):
                if each.name in names:
                    found.setdefault(each.name, (each, []))[1].append(zone)
        return [machine_type(*each) for each in found.values()]

    def _found(self, filters: Sequence[str]) -> list[Node]:
        request = {
            "project": self.project,
            "filter": " ".join(f"({each})" for each in filters),
        }
        doing = f"list instances of project {self.project}"

        def read(request: Mapping[str, Any], **options: Any) -> list[Node]:
            pages = self.clients.instances.aggregated_list(request=request, **options)
            return [_node(each) for _, zone in pages for each in zone.instances]

        found: list[Node] = self._call(read, doing, request)
        return found

    def _failed(self, place: "_GceLaunch", zone: str) -> int | None:
        """Count the launches in a zone that have failed; None if one has not."""
        request = {
            "project": self.project,
            "zone": zone,
            "filter": f'targetLink eq ".*/instances/{place.name}"',
        }

        def read(request: Mapping[str, Any], **options: Any) -> list[Any]:
            return list(self.clients.operations.list(request=request, **options))

        found = self._call(read, f"list operations in {zone}", request)
        inserts = [each for each in found if each.operation_type == "insert"]
        for each in inserts:
            if not self._errors(zone, each, place.doing(zone)):
                return None
        return len(inserts)

    def _insert(self, place: "_GceLaunch", zone: str, number: int) -> None:
        # A request that has failed and is repeated gets its failure again.
        request_id = uuid.uuid5(uuid.NAMESPACE_OID, f"{place.token}/{zone}/{number}")
        request = {
            "project": self.project,
            "zone": zone,
            "instance_resource": _instance(place, zone),
            "request_id": str(request_id),
        }
        doing = place.doing(zone)
        insert = self.clients.instances.insert_unary
        operation = self._call(insert, doing, request, exists=None)
        if operation is None:  # Another command was faster.
            return
        errors = self._errors(zone, operation, doing)
        if errors:
            raise gce_errors.of_operation(errors, doing)

    def _errors(
        self, zone: str, operation: Any, doing: str
    ) -> Sequence[tuple[str, str]]:
        """Wait for an operation; codes and messages of its errors.

        Not by the operation's own ``result()``, which asks Google's endpoint whatever
        endpoint the client has.
        """
        done = compute_v1.Operation.Status.DONE
        for _ in range(_NUM_WAITS):
            if operation.status == done:
                return [(each.code, each.message) for each in operation.error.errors]
            request = {
                "project": self.project,
                "zone": zone,
                "operation": operation.name,
            }
            wait = self.clients.operations.wait
            operation = self._call(wait, doing, request, seconds=_WAIT_SECONDS)
        raise ComputeUnavailable(
            f"cannot {doing}: the service has not ended its operation "
            f"{operation.name}: try again, which waits for it"
        )

    def _made(self, place: "_GceLaunch") -> Node:
        """Find a node that was launched, which may have ended since."""
        found = self._found([f'labels.{TOKEN_LABEL} = "{place.digest}"'])
        return found[0] if found else gone(place.spec, place.name)

    def _call(
        self,
        method: Callable[..., _Result],
        doing: str,
        request: Mapping[str, Any],
        *,
        seconds: float = _REQUEST_SECONDS,
        **instead: None,
    ) -> Any:
        """Make a request; ``missing`` and ``exists`` name answers that are none."""
        try:
            return method(request=request, retry=self.retry, timeout=seconds)
        except gce_errors.FAILURES as error:
            if isinstance(error, api.NotFound) and "missing" in instead:
                return None
            if isinstance(error, api.Conflict) and "exists" in instead:
                return None
            raise gce_errors.translate(error, doing) from error


class GceClients:
    """Clients of the library, made when they are needed: that takes credentials."""

    def __init__(self, endpoint: str) -> None:
        """Use the environment's credentials; see ``connect``."""
        self._options: dict[str, Any] = {"transport": "rest"}
        if endpoint:
            self._options["client_options"] = {"api_endpoint": endpoint}
        if urlsplit(endpoint).scheme == "http":
            self._options["credentials"] = AnonymousCredentials()  # type: ignore[no-untyped-call]

    @functools.cached_property
    def instances(self) -> Any:
        """One for instances."""
        return self._made(compute_v1.InstancesClient)

    @functools.cached_property
    def machine_types(self) -> Any:
        """One for types of machines."""
        return self._made(compute_v1.MachineTypesClient)

    @functools.cached_property
    def routers(self) -> Any:
        """One for routers."""
        return self._made(compute_v1.RoutersClient)

    @functools.cached_property
    def routes(self) -> Any:
        """One for routes."""
        return self._made(compute_v1.RoutesClient)

    @functools.cached_property
    def subnetworks(self) -> Any:
        """One for subnets."""
        return self._made(compute_v1.SubnetworksClient)

    @functools.cached_property
    def operations(self) -> Any:
        """One for operations of zones."""
        return self._made(compute_v1.ZoneOperationsClient)

    def _made(self, kind: Callable[..., Any]) -> Any:
        try:
            return kind(**self._options)
        except gce_errors.FAILURES as error:
            raise gce_errors.translate(error, "open Compute Engine") from error


def connect(project: str, endpoint: str = "") -> GcePool:
    """Open the service with the environment's credentials.

    Args:
        project: Id of the project.
        endpoint: URL of the service, instead of Google's own. To one without TLS goes
            no token.
    """
    return GcePool(project=project, clients=GceClients(endpoint))


class _GceLaunch:
    """What identifies a launch."""

    def __init__(self, spec: NodeSpec, token: str, digest: str) -> None:
        self.spec, self.token, self.digest = spec, token, digest
        word = re.sub(r"[^a-z0-9-]+", "-", f"crossfed-{spec.name.lower()}")
        head = word[: _NAME_CHARS - _NAME_DIGITS - 1].rstrip("-")
        self.name = f"{head}-{digest[:_NAME_DIGITS]}"

    def doing(self, zone: str) -> str:
        """For messages."""
        return f"launch {self.spec.name} ({self.spec.machine}) in {zone}"


def _instance(place: _GceLaunch, zone: str) -> dict[str, Any]:
    spec = place.spec
    region = zone.rpartition("-")[0]
    labels = {name: _label(value) for name, value in spec.labels.items()}
    labels[TOKEN_LABEL] = place.digest
    interface = {"network": "global/networks/default"}  # Without an external address.
    if spec.subnets:
        interface = {"subnetwork": _subnet(spec, region)}
    items = {
        _LABELS_ITEM: json.dumps({"name": spec.name, "labels": dict(spec.labels)}),
        "block-project-ssh-keys": "true",
        "user-data": spec.user_data,
    }
    accounts = [{"email": spec.identity, "scopes": [_SCOPE]}] if spec.identity else []
    gpus = {
        "accelerator_type": f"zones/{zone}/acceleratorTypes/{spec.accelerator}",
        "accelerator_count": spec.gpus,
    }
    return {
        "name": place.name,
        "machine_type": f"zones/{zone}/machineTypes/{spec.machine}",
        "labels": labels,
        "metadata": {"items": [{"key": n, "value": v} for n, v in items.items()]},
        "disks": [
            {
                "boot": True,
                "disk_encryption_key": {"kms_key_name": spec.disk_key}
                if spec.disk_key
                else None,
                "auto_delete": True,
                "initialize_params": {
                    "source_image": spec.image,
                    "disk_size_gb": spec.disk_gb,
                    "labels": labels,
                },
            }
        ],
        "network_interfaces": [interface],
        "tags": {"items": list(spec.firewalls)},
        "service_accounts": accounts,
        "guest_accelerators": [gpus] if spec.accelerator else [],
        "scheduling": _scheduling(spec),
        "shielded_instance_config": {
            "enable_secure_boot": True,
            "enable_vtpm": True,
            "enable_integrity_monitoring": True,
        },
    }


def _subnet(spec: NodeSpec, region: str) -> str:
    """Path of the subnet of a machine; empty for the default network."""
    for subnet in spec.subnets:
        return subnet if "/" in subnet else f"regions/{region}/subnetworks/{subnet}"
    return ""


def _translates(router: Any, subnet: str) -> bool:
    """Whether a router has Cloud NAT for a subnet; empty for one of any name."""
    return any(
        nat.source_subnetwork_ip_ranges_to_nat != "LIST_OF_SUBNETWORKS"
        or not subnet
        or any(each.name.rpartition("/")[2] == subnet for each in nat.subnetworks)
        for nat in router.nats
    )


def _scheduling(spec: NodeSpec) -> dict[str, Any]:
    is_spot = spec.market is Market.SPOT
    made: dict[str, Any] = {
        "provisioning_model": "SPOT" if is_spot else "STANDARD",
        "instance_termination_action": "DELETE",
        "max_run_duration": {"seconds": round(spec.max_seconds)},
        "automatic_restart": not is_spot,
    }
    if is_spot or spec.gpus or _HAS_GPU.match(spec.machine):
        made["on_host_maintenance"] = "TERMINATE"
    return made


def _label(value: str) -> str:
    """Make a label's value of any: the service takes few characters."""
    if re.fullmatch(rf"[a-z0-9_-]{{0,{_LABEL_CHARS}}}", value):
        return value
    digest = hashlib.sha256(value.encode()).hexdigest()[:_NAME_DIGITS]
    word = re.sub(r"[^a-z0-9_-]", "-", value.lower())
    return f"{word[: _LABEL_CHARS - _NAME_DIGITS - 1]}-{digest}"


def _node(instance: Any) -> Node:
    zone = instance.zone.rpartition("/")[2]
    given = _given(instance)
    is_spot = instance.scheduling.provisioning_model == "SPOT"
    trouble = ""
    if instance.status in _STOPPED:
        trouble = (
            "it is stopped, and its disk still costs: end it "
            f"({instance.status_message or instance.status})"
        )
    return Node(
        id=f"{zone}/{instance.name}",
        name=str(given.get("name", instance.name)),
        state=_STATES.get(instance.status, NodeState.STOPPING),
        labels={**instance.labels, **given.get("labels", {})},
        machine=instance.machine_type.rpartition("/")[2],
        zone=zone,
        market=Market.SPOT if is_spot else Market.ON_DEMAND,
        launched=datetime.fromisoformat(instance.creation_timestamp).timestamp(),
        trouble=trouble,
    )


def _given(instance: Any) -> Mapping[str, Any]:
    """Name and labels as they were given; empty if someone has removed them."""
    items = {item.key: item.value for item in instance.metadata.items}
    try:
        found = json.loads(items.get(_LABELS_ITEM, ""))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
