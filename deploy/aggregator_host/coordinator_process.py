"""The process that coordinates one run: Flower's ServerApp, as SuperExec starts it.

``python -P -m deploy.aggregator_host.coordinator_process``. What it needs, the run's
token among it, comes through its standard input as JSON: other users of the host can
read arguments.

It reads what sites send. So it first gives up the right to read the secrets of the
aggregator's folder, for good, where the kernel has Landlock.
"""

import json
import os
import sys
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

from cloud_adapters.local import landlock
from deploy.aggregator_host import host_secrets
from federation.job import code_files
from privacy import own_folder


def main() -> None:
    """Become a ServerApp."""
    facts: dict[str, Any] = json.loads(sys.stdin.read())
    config = facts["config"]
    confine(Path(facts["folder"]), exchange_folders(Path(config)) if config else [])
    if config:
        code_files.look_in(Path(config).parent)
    from cloud_adapters.superlink.launcher import Launch, run_serverapp  # noqa: PLC0415 -- seconds

    run_serverapp(Launch(**facts))


def exchange_folders(config: Path) -> list[Path]:
    """Folders of this machine that the exchange uses, from an ``aggregator.toml``.

    As it is now: the service may have read an earlier one. Errors in it are reported
    where it is checked. That imports numpy, which starts a thread, and only the
    threads of this one are confined with it.
    """
    table: Any = {}
    with suppress(OSError, ValueError):
        table = tomllib.loads(config.read_text(encoding="utf-8")).get("exchange", {})
    if not isinstance(table, dict):
        return []
    scratch, url = str(table.get("scratch", "")), str(table.get("url", ""))
    place = url.removeprefix("file://") if url.startswith("file://") else ""
    return [Path(name) for name in (scratch, place) if name.startswith("/")]


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
    if (folder.parent / host_secrets.OPERATOR).exists():
        landlock.hide(folder.parent, (host_secrets.OPERATOR,))


if __name__ == "__main__":
    main()
