"""Secrets of the aggregator's host, which protect the SuperLink's interfaces.

Files in the aggregator's folder, only for their owner. ``control.secret`` is for
the service and the operator's commands, which start runs and let nodes in;
``superexec.secret`` is for what starts and runs coordinators; ``page.token`` and
``metrics.token`` open the live page and its metrics.
"""

import secrets
from pathlib import Path

from privacy.secagg.errors import KeyFileRefused
from privacy.secret_files import read_private, write_new

CONTROL, RUNTIME = "control.secret", "superexec.secret"
# What opens the live page, where runs can be stopped, and its metrics.
PAGE, METRICS = "page.token", "metrics.token"
# What the process that coordinates a run has no use for.
HIDDEN = ("ca.key", "server.key", CONTROL, RUNTIME, PAGE, METRICS)
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
    fresh = {
        CONTROL: secrets.token_bytes(SECRET_BYTES),
        RUNTIME: secrets.token_bytes(SECRET_BYTES),
        # They go into an address and a header.
        PAGE: secrets.token_urlsafe(32).encode(),
        METRICS: secrets.token_urlsafe(32).encode(),
    }
    missing = [name for name in fresh if not (folder / name).exists()]
    for name in missing:
        write_new(folder / name, fresh[name])
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


def tokens(folder: Path) -> tuple[str, str]:
    """The tokens of the live page and of its metrics.

    Raises:
        KeyFileRefused: One is missing, or others may read it.
    """
    page, metrics = (read_private(folder / name) for name in (PAGE, METRICS))
    return page.decode().strip(), metrics.decode().strip()
