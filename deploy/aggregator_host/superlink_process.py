"""Flower's SuperLink behind our guard and our gate, as the service starts it.

``python -I -m deploy.aggregator_host.superlink_process FACTS ARGUMENT...``, where FACTS
is JSON and the arguments are those of ``flower-superlink``. Who may call is in
``cloud_adapters.superlink.guard``, and what sites may leave in
``cloud_adapters.superlink.gate``.
"""

import contextlib
import json
import sqlite3
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from cloud_adapters.nginx.config import FLEET_CALLS
from cloud_adapters.storage.disk.sqlite_url import sqlite_url
from cloud_adapters.superlink.answer_limits import Limits
from deploy.aggregator_host import host_secrets
from federation.errors import StoreUnavailable

# What is answered without a secret: calls of sites, and whether it is there.
PUBLIC_PATHS = (*(f"/v1/fleet/{call}" for call in FLEET_CALLS), "/health")

_FULL = 1  # PRAGMA auto_vacuum


def command(
    limits: Limits, database: Path, secrets: Path, arguments: Sequence[str]
) -> list[str]:
    """Return the command that starts a SuperLink.

    Args:
        limits: What sites may leave there.
        database: File of its state.
        secrets: Folder of ``deploy.aggregator_host.host_secrets``.
        arguments: Further ones of ``flower-superlink``.
    """
    facts = {
        "limits": asdict(limits),
        "database": str(database),
        "secrets": str(secrets),
    }
    return [
        *(
            sys.executable,
            "-I",
            "-m",
            "deploy.aggregator_host.superlink_process",
            json.dumps(facts),
        ),
        *("--database", sqlite_url(database)),
        *("--superexec-auth-secret-file", str(secrets / host_secrets.RUNTIME)),
        *arguments,
    ]


def prepare(database: Path) -> None:
    """Set the state's file to release disk space; no SuperLink may be running.

    SQLite keeps the pages of what was deleted; in the mode ``FULL`` it cuts them off
    with every transaction. The mode takes effect with ``VACUUM``.

    Raises:
        StoreUnavailable: The file is damaged or cannot be written.
    """
    try:
        with contextlib.closing(sqlite3.connect(database)) as connection:
            database.chmod(0o600)
            (mode,) = connection.execute("PRAGMA auto_vacuum").fetchone()
            if mode != _FULL:
                connection.execute(f"PRAGMA auto_vacuum = {_FULL}")
                connection.execute("VACUUM")
    except (sqlite3.Error, OSError) as error:
        raise StoreUnavailable(
            f"cannot prepare the SuperLink's state {database}: {error}; free some "
            "space, or restore the file from a backup"
        ) from error


def main(arguments: list[str]) -> None:
    """Become a SuperLink."""
    from cloud_adapters.superlink import (  # noqa: PLC0415 -- seconds
        gate as flower_gate,
        guard as flower_guard,
        middleware_bypass,
        migration as flower_migration,
        poll_cache,
    )

    facts = json.loads(arguments[0])
    secrets = Path(facts["secrets"])
    poll_cache.install()
    flower_guard.install(
        control=host_secrets.read(secrets / host_secrets.CONTROL),
        runtime=host_secrets.read(secrets / host_secrets.RUNTIME),
        public=PUBLIC_PATHS,
    )
    middleware_bypass.install()
    database = Path(facts["database"])
    try:
        flower_migration.migrate(database)
    except StoreUnavailable as error:
        sys.exit(f"superlink: {error}")
    flower_gate.install(Limits(**facts["limits"]), database)
    flower_gate.run_superlink(arguments[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
