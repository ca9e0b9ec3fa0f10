"""SuperExec, which starts the coordinator's process."""

import importlib
from typing import Any

from flwr.supercore.constant import TaskType as TaskType
from flwr.supercore.superexec.executor import (
    ExecutionSpec as ExecutionSpec,
    LaunchResult as LaunchResult,
)


def superexec_module() -> Any:
    """Flower's SuperExec; a function of the same name hides the module."""
    return importlib.import_module("flwr.supercore.superexec.run_superexec")
