"""Programs of crossfed on this host, and the settings that they read."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from cloud_adapters.compute.pool import NodeSpec
from deploy.fleet.deployment import Deployment
from federation import durable_files
from federation.job import code_files

_WRITTEN = "# Written by crossfed up from the deployment file: change that one."


def program(deployment: Deployment, role: str, words: Sequence[str]) -> NodeSpec:
    """A node of this host that runs a command of crossfed.

    Args:
        deployment: The node belongs to it.
        role: Name of the node.
        words: The command, without ``crossfed``.
    """
    named_in = (deployment.plan.job, deployment.plan.path.resolve())
    folders = dict.fromkeys(str(file.parent) for file in named_in)
    return NodeSpec(
        name=role,
        command=[sys.executable, "-m", "crossfed", *words],
        # A user's own files are found from the files that name them.
        environment={code_files.FOLDERS: os.pathsep.join(folders)},
        labels={},
        max_seconds=deployment.max_seconds,
    )


def write_settings(path: Path, document: Mapping[str, Any]) -> None:
    """Write what a party reads when it starts, if it is not what is there.

    Raises:
        StoreUnavailable: The folder cannot be written.
    """
    text = f"{_WRITTEN}\n{tomli_w.dumps(document)}".encode()
    if path.read_bytes() != text:
        durable_files.replace_file(path, [text])
