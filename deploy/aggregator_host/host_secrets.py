"""Secrets of the aggregator's host, which protect the SuperLink's interfaces.

Two files in the aggregator's folder, only for their owner. ``control.secret`` is for
the service and the operator's commands, which start runs and let nodes in;
``superexec.secret`` is for what starts and runs coordinators.
"""

import secrets
from pathlib import Path

from privacy.secagg.errors import KeyFileRefused
from privacy.secret_files import read_private, write_new

CONTROL, RUNTIME = "control.secret", "superexec.secret"
# What the process that coordinates a run has no use for.
HIDDEN = ("ca.key", "server.key", CONTROL, RUNTIME)
# Beside the folder of an aggregator that crossfed up has made: it signs rosters.
OPERATOR = "operator.pem"
SECRET_BYTES = 64


def make(folder: Path) -> list[str]:
    """Write missing secrets.

    Returns:
        Their names.

    Raises:
        OSError: A file cannot be written.
    """
    missing = [name for name in (CONTROL, RUNTIME) if not (folder / name).exists()]
    for name in missing:
        write_new(folder / name, secrets.token_bytes(SECRET_BYTES))
    return missing


def read(path: Path) -> bytes:
    """Read a secret.

    Raises:
        KeyFileRefused: It is missing, others may read it, or it is too short.
    """
    found = read_private(path)
    if len(found) < SECRET_BYTES:
        raise KeyFileRefused(
            f"{path} is too short for a secret: remove it, and crossfed aggregator up "
            "creates a new one"
        )
    return found
