"""The process that coordinates one run: Flower's ServerApp, as SuperExec starts it.

``python -P -m deploy.coordinator_process``. What it needs, the run's token among it,
comes through its standard input as JSON: other users of the host can read arguments.

It reads what sites send. So it first gives up the right to read the secrets of the
aggregator's folder, for good, where the kernel has Landlock.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from cloud_adapters import landlock
from deploy import aggregator_file, exchange, host_secrets, own_folder


def main() -> None:
    """Become a ServerApp."""
    facts: dict[str, Any] = json.loads(sys.stdin.read())
    # As it is now: the service may have read an earlier one.
    config = facts["config"]
    spec = aggregator_file.load(Path(config)).file.exchange if config else None
    confine(Path(facts["folder"]), [] if spec is None else exchange.folders(spec))
    from cloud_adapters.flower_launcher import (  # noqa: PLC0415 -- seconds
        Launch,
        run_serverapp,
    )

    run_serverapp(Launch(**facts))


def confine(folder: Path, places: list[Path]) -> None:
    """Give up reading the secrets of a folder.

    Args:
        folder: The aggregator's.
        places: Folders to make before, since what is made later beside the
            aggregator's folder cannot be read either.

    Raises:
        OSError: A folder cannot be made, or the kernel refuses.
    """
    temporary = folder / "flower" / "tmp"
    for place in (temporary, *places):
        own_folder.make(place)
    os.environ["TMPDIR"] = str(temporary)
    landlock.hide(folder, host_secrets.HIDDEN)


if __name__ == "__main__":
    main()
