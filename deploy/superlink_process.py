"""Flower's SuperLink behind our gate, as the aggregator's service starts it.

``python -I -m deploy.superlink_process LIMITS ARGUMENT...``, where LIMITS is JSON and
the arguments are those of ``flower-superlink``. What the gate lets through is in
``cloud_adapters.flower_gate``.
"""

import contextlib
import json
import sqlite3
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from cloud_adapters.answer_limits import Limits, free_bytes
from federation.errors import StoreUnavailable

_FULL = 1  # PRAGMA auto_vacuum


def command(limits: Limits, database: Path, arguments: Sequence[str]) -> list[str]:
    """Return the command that starts a SuperLink.

    Args:
        limits: What sites may leave there.
        database: File of its state.
        arguments: Further ones of ``flower-superlink``.
    """
    text = json.dumps({**asdict(limits), "database": str(database)})
    module = ["-I", "-m", "deploy.superlink_process", text]
    return [sys.executable, *module, "--database", str(database), *arguments]


def prepare(database: Path) -> int:
    """Make the file of the state give space back to the disk; no SuperLink may run.

    SQLite keeps the pages of what was deleted. A database in the mode ``FULL`` cuts
    them off with every transaction; one that was made without is written anew once.

    Returns:
        Bytes by which the file became smaller.

    Raises:
        StoreUnavailable: The file is damaged or cannot be written.
    """
    before = database.stat().st_size if database.exists() else 0
    try:
        with contextlib.closing(sqlite3.connect(database)) as connection:
            (mode,) = connection.execute("PRAGMA auto_vacuum").fetchone()
            if mode == _FULL:
                return 0
            (unused,) = connection.execute("PRAGMA freelist_count").fetchone()
            (page,) = connection.execute("PRAGMA page_size").fetchone()
            if free_bytes(database.parent) < 2 * (before - unused * page):
                return 0  # The copy that VACUUM makes would not fit beside it.
            connection.execute(f"PRAGMA auto_vacuum = {_FULL}")
            connection.execute("VACUUM")
    except (sqlite3.Error, OSError) as error:
        raise StoreUnavailable(
            f"cannot prepare the SuperLink's state {database}: {error}; free some "
            "space, or restore the file from its copy"
        ) from error
    database.chmod(0o600)
    return max(0, before - database.stat().st_size)


def main(arguments: list[str]) -> None:
    """Become a SuperLink."""
    from cloud_adapters.flower_gate import run_superlink  # noqa: PLC0415 -- seconds

    facts = json.loads(arguments[0])
    database = Path(facts.pop("database"))
    run_superlink(arguments[1:], Limits(**facts), database)


if __name__ == "__main__":
    main(sys.argv[1:])
