"""The coordinator's grid, the process that it runs in, and SuperExec, which starts it."""

import importlib
from collections.abc import Iterable
from typing import Any

from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest as ConfirmMessageReceivedRequest,
    PullObjectRequest as PullObjectRequest,
)
from flwr.proto.runtime_pb2 import (
    PullAppMessagesRequest as PullAppMessagesRequest,
    PushAppMessagesRequest as PushAppMessagesRequest,
)
from flwr.supercore.constant import TaskType as TaskType
from flwr.supercore.logger import (
    mirror_output_to_queue as mirror_output_to_queue,
    restore_output as restore_output,
)
from flwr.supercore.runtime import RuntimeHttpClient as RuntimeHttpClient
from flwr.supercore.superexec.executor import (
    ExecutionSpec as ExecutionSpec,
    LaunchResult as LaunchResult,
)
from flwr.superlink.grid import http_grid as http_grid
from flwr.superlink.grid.http_grid import HttpGrid as HttpGrid

from cloud_adapters.flower.private.messages import KEEPS_CONTENT


def pull_request(message_ids: Iterable[str]) -> Any:
    """Ask for the answers to some messages; Flower 1.43 calls them by another name."""
    if KEEPS_CONTENT:
        return PullAppMessagesRequest(message_ids=message_ids)
    request: Any = PullAppMessagesRequest
    return request(reply_to_message_ids={"vals": list(message_ids)})


def serverapp_module() -> Any:
    """Flower's ServerApp process; a function of the same name hides the module."""
    return importlib.import_module("flwr.superlink.runtime.run_serverapp")


def superexec_module() -> Any:
    """Flower's SuperExec; a function of the same name hides the module."""
    return importlib.import_module("flwr.supercore.superexec.run_superexec")
