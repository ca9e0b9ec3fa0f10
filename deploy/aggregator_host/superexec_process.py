"""Flower's SuperExec with our launcher, as the aggregator's service starts it.

``python -P -m crossfed.child deploy.aggregator_host.superexec_process FACTS``, where
FACTS is JSON. It starts ``deploy.aggregator_host.coordinator_process`` for every run
that has the bundle of this release: see ``cloud_adapters.superlink.launcher``.
"""

import json
import sys
from pathlib import Path

from deploy.aggregator_host import host_secrets

# Without the working directory, but with PYTHONPATH: a job may name functions there.
_PYTHON = [sys.executable, "-P", "-m", "crossfed.child"]


def command(
    address: str, *, folder: Path, bundle: str, config: Path | None = None
) -> list[str]:
    """Return the command that starts a SuperExec.

    Args:
        address: Address of the SuperLink, ``127.0.0.1:PORT``.
        folder: The aggregator's: its authority speaks for the SuperLink, and its
            secrets are hidden from coordinators.
        bundle: SHA-256 of the only bundle that is started, in hexadecimal.
        config: The aggregator's configuration.
    """
    facts = {
        "address": address,
        "folder": str(folder),
        "bundle": bundle,
        "config": "" if config is None else str(config),
    }
    return [*_PYTHON, "deploy.aggregator_host.superexec_process", json.dumps(facts)]


def main(arguments: list[str]) -> None:
    """Become a SuperExec."""
    from cloud_adapters.superlink.launcher import (  # noqa: PLC0415 -- seconds
        Confines,
        SuperLinkPlace,
        run_superexec,
    )

    facts = json.loads(arguments[0])
    folder = Path(facts["folder"])
    run_superexec(
        SuperLinkPlace(address=facts["address"], authority=str(folder / "ca.crt")),
        Confines(bundle=facts["bundle"], folder=str(folder), config=facts["config"]),
        secret=host_secrets.read(folder / host_secrets.RUNTIME),
        command=[*_PYTHON, "deploy.aggregator_host.coordinator_process"],
    )


if __name__ == "__main__":
    main(sys.argv[1:])
