"""The process that coordinates one run: Flower's ServerApp, as SuperExec starts it.

``python -P -m deploy.coordinator_process``. What it needs, the run's token among it,
comes through its standard input as JSON: other users of the host can read arguments.
"""

import json
import sys


def main() -> None:
    """Become a ServerApp."""
    from cloud_adapters.flower_launcher import (  # noqa: PLC0415 -- seconds
        Launch,
        run_serverapp,
    )

    run_serverapp(Launch(**json.loads(sys.stdin.read())))


if __name__ == "__main__":
    main()
