"""Another user of the aggregator's host, who tries everything that a user can try.

``main`` is for a process of root's: it gives up its rights for those of a user without
any, and then attacks. The attacker has the authority's certificate, which is public,
and whatever the processes of the host show.
"""

import json
import os
import ssl
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
from flwr.common.serde import fab_to_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListRunsRequest,
    RegisterNodeRequest,
    StartRunRequest,
    StopRunRequest,
    UnregisterNodeRequest,
)
from flwr.proto.fleet_pb2 import RegisterNodeFleetRequest
from flwr.proto.message_pb2 import PullObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    GetNodesRequest,
    PullAppMessagesRequest,
    PullTaskInputRequest,
    PushAppMessagesRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.supercore.constant import TASK_TOKEN_HEADER
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.protobuf.client import ProtobufClient
from support import bundles

from cloud_adapters.superlink.guard import HEADER

CONTROL = {
    "StartRun": ("start-run", StartRunRequest()),
    "ListRuns": ("list-runs", ListRunsRequest()),
    "StopRun": ("stop-run", StopRunRequest(run_id=1)),
    "RegisterNode": ("register-node", RegisterNodeRequest(public_key=b"key")),
    "UnregisterNode": ("unregister-node", UnregisterNodeRequest(node_id=1)),
    "ListNodes": ("list-nodes", ListNodesRequest()),
}
RUNTIME = {
    "AcquireTask": (
        "acquire-task",
        AcquireTaskRequest(supported_task_types=["flwr-serverapp"]),
    ),
    "PullTaskInput": ("pull-task-input", PullTaskInputRequest()),
    "PushTaskOutput": ("push-task-output", PushTaskOutputRequest()),
    "SendTaskHeartbeat": ("send-task-heartbeat", SendTaskHeartbeatRequest()),
    "PushMessages": ("push-messages", PushAppMessagesRequest()),
    "PullMessages": ("pull-messages", PullAppMessagesRequest(message_ids=["one"])),
    "PullObject": (
        "pull-object",
        PullObjectRequest(node=Node(node_id=1), run_id=1, object_id="one"),
    ),
    "GetNodes": ("get-nodes", GetNodesRequest()),
}


class Caller(ProtobufClient):
    """Flower's client, with headers of the attacker's choice."""

    headers: dict[str, str]

    def call(self, path: str, request: Any) -> str:
        """How a call is answered, in a word or two."""
        try:
            self._unary_unary(
                path=path, rpc_method=path, request=request, response_type=type(request)
            )
        except httpx.HTTPStatusError as error:
            return f"HTTP {error.response.status_code}"
        except ValueError:
            return "answered"  # With a message of another type.
        return "answered"

    def _send(self, context: Any, *, stream: bool = False) -> Any:
        context.request.headers.update(self.headers)
        return super()._send(context, stream=stream)


def main(arguments: Sequence[str]) -> None:
    """Attack as a user, and print a JSON object: what came of each attempt.

    Args:
        arguments: The user's number, the address, the authority's file, and folders.
            The variable ``TEST_TOKEN`` has the token of a task.
    """
    number, address, authority, *names = arguments
    user, folders, token = int(number), [*map(Path, names)], os.environ["TEST_TOKEN"]
    root = Path(authority).read_bytes()
    # First, as they import: a checkout in root's own folder is closed to this user.
    context = client_context(root)
    client = Caller.from_server_address(
        address,
        insecure=False,
        root_certificates=root,
        interceptors=[RuntimeVersionHttpInterceptor(component_name="SuperExec")],
    )
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    found = {
        "calls": dict(_calls(client, token)),
        "pages": {
            page: httpx.get(f"https://{address}{page}", verify=context).status_code
            for page in ("/docs", "/openapi.json", "/v1/control/", "/")
        },
        "commands": dict(_commands()),
        "opened": list(_opened_of_processes()),
        "files": [path for folder in folders for path in _files(folder)],
    }
    json.dump(found, sys.stdout)


def client_context(root: bytes) -> Any:
    """Believes the host's authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=root.decode())
    return context


def _calls(client: Caller, token: str) -> Iterator[tuple[str, str]]:
    """Every call, without a secret, with guesses, and with a real task's token."""
    guesses: dict[str, dict[str, str]] = {
        "": {},
        " and no secret": {HEADER: ""},
        " and a guess": {HEADER: "0" * 64},
        " and a token": {TASK_TOKEN_HEADER: token, HEADER: token},
    }
    for how, headers in guesses.items():
        client.headers = headers
        for name, (path, request) in CONTROL.items():
            yield name + how, client.call(f"/v1/control/{path}", request)
        for name, (path, request) in RUNTIME.items():
            yield name + how, client.call(f"/v1/runtime/{path}", request)
        yield (
            f"RegisterNodeFleet{how}",
            client.call(
                "/v1/fleet/register-node", RegisterNodeFleetRequest(public_key=b"key")
            ),
        )
        yield f"StartRun with code{how}", _start_code(client)


def _start_code(client: Caller) -> str:
    """Have code of one's own run as the aggregator's user."""
    fab = bundles.foreign("print(open('ca.key').read())\n")
    return client.call("/v1/control/start-run", StartRunRequest(fab=fab_to_proto(fab)))


def _commands() -> Iterator[tuple[str, str]]:
    """Arguments of every process, as ``ps`` shows them."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            yield path.parent.name, path.read_text(errors="replace").replace("\0", " ")
        except OSError:
            continue


def _opened_of_processes() -> Iterator[str]:
    """What of other processes can be read beyond their arguments."""
    for folder in Path("/proc").glob("[0-9]*"):
        if folder.name == str(os.getpid()):
            continue
        for name in ("environ", "mem", "maps", "fd/0", "cwd/.", "root/."):
            try:
                handle = os.open(folder / name, os.O_RDONLY)
            except OSError:
                continue
            os.close(handle)
            yield str(folder / name)


def _files(folder: Path) -> Iterator[str]:
    """Whatever of a folder can be listed or read."""
    for parent, _, names in os.walk(folder):
        yield parent
        for name in names:
            try:
                handle = os.open(Path(parent) / name, os.O_RDONLY)
            except OSError:
                continue
            os.close(handle)
            yield str(Path(parent) / name)
