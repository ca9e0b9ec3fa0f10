"""Flower's SuperExec with our launcher, as the aggregator's service starts it.

``python -P -m deploy.superexec_process FACTS``, where FACTS is JSON. It starts
``deploy.coordinator_process`` for every run that has the bundle of this release: see
``cloud_adapters.flower_launcher``.
"""

import json
import sys
from pathlib import Path

from deploy import host_secrets

# Without the working directory, but with PYTHONPATH: a job may name functions there.
_PYTHON = [sys.executable, "-P", "-m"]


def command(address: str, *, authority: Path, secret: Path, bundle: str) -> list[str]:
    """Return the command that starts a SuperExec.

    Args:
        address: Of the SuperLink, ``127.0.0.1:PORT``.
        authority: File of the certificates that speak for it.
        secret: File of the secret of Runtime.
        bundle: SHA-256 of the only bundle that is started, in hexadecimal.
    """
    facts = {
        "address": address,
        "authority": str(authority),
        "secret": str(secret),
        "bundle": bundle,
    }
    return [*_PYTHON, "deploy.superexec_process", json.dumps(facts)]


def main(arguments: list[str]) -> None:
    """Become a SuperExec."""
    from cloud_adapters.flower_launcher import (  # noqa: PLC0415 -- seconds
        SuperLinkPlace,
        run_superexec,
    )

    facts = json.loads(arguments[0])
    run_superexec(
        SuperLinkPlace(address=facts["address"], authority=facts["authority"]),
        secret=host_secrets.read(Path(facts["secret"])),
        bundle=facts["bundle"],
        command=[*_PYTHON, "deploy.coordinator_process"],
    )


if __name__ == "__main__":
    main(sys.argv[1:])
