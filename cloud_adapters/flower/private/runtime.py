"""Runtime: the coordinator's grid, and the process that it runs in."""

import importlib
from typing import Any

from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest as ConfirmMessageReceivedRequest,
    PullObjectRequest as PullObjectRequest,
)
from flwr.proto.runtime_pb2 import (
    PullAppMessagesRequest as PullAppMessagesRequest,
    PushAppMessagesRequest as PushAppMessagesRequest,
)
from flwr.supercore.logger import (
    mirror_output_to_queue as mirror_output_to_queue,
    restore_output as restore_output,
)
from flwr.supercore.runtime import RuntimeHttpClient as RuntimeHttpClient
from flwr.superlink.grid import http_grid as http_grid
from flwr.superlink.grid.http_grid import HttpGrid as HttpGrid


def serverapp_module() -> Any:
    """Flower's ServerApp process; a function of the same name hides the module."""
    return importlib.import_module("flwr.superlink.runtime.run_serverapp")
