"""The state of a SuperLink that has never run, with its tables.

Flower makes them by a chain of migrations, which takes half a second of processor time.
Here it is run once for each worker; ``test_superlink_migration.py`` looks at it.
"""

import functools
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from support.forked import shared


def place(database: Path) -> None:
    """Leave one for a SuperLink that is about to start."""
    database.parent.mkdir(mode=0o700, exist_ok=True)
    database.touch(mode=0o600)
    database.write_bytes(_content())


@functools.cache
def _content() -> bytes:
    with tempfile.TemporaryDirectory() as name:
        database, log = Path(name) / "state.db", Path(name) / "log"
        # This process may have no Flower, and no need of it.
        made = shared().start(
            str(database),
            call=f"{__name__}:make",
            out=log,
            err=log,
            environment=os.environ,
        )
        assert made.wait(120) == 0, log.read_text()
        return database.read_bytes()


def make(arguments: Sequence[str]) -> None:
    """Make it as the aggregator's service and the SuperLink do."""
    from cloud_adapters.superlink import migration  # noqa: PLC0415 -- seconds
    from deploy.aggregator_host import superlink_process  # noqa: PLC0415

    (database,) = map(Path, arguments)
    superlink_process.prepare(database)
    migration.migrate(database)
