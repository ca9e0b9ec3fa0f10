"""Bring the SuperLink's state up to date in one step.

Flower changes its tables by a chain of migrations, each with several statements, and
SQLite keeps every statement for itself. A SuperLink that is killed between two of them
leaves tables from which no later one can start, so they change in a copy.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util.exc import CommandError
from sqlalchemy import Engine, create_engine
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from cloud_adapters.flower.private.superlink import (
    build_alembic_config,
    run_migrations,
)
from cloud_adapters.storage.disk.sqlite_url import sqlite_url
from federation.durable_files import flush
from federation.errors import StoreUnavailable

_SUFFIX = ".migrating"
_OF_SQLITE = ("", "-journal", "-wal", "-shm")


def migrate(database: Path) -> None:
    """Give a database the tables of this version of Flower.

    No SuperLink may be using it. A process that is killed meanwhile leaves the
    database as it was, and a copy that the next call removes. Does nothing if the
    tables are current.

    Args:
        database: The file, or a link to it; it is made if it is not there.

    Raises:
        StoreUnavailable: The file is damaged or of a newer Flower, or the disk is full.
    """
    # A copy takes the place of the file, and not of a link to another disk.
    database = database.resolve()
    draft = database.with_name(database.name + _SUFFIX)
    try:
        _remove(draft)
        if database.exists() and _is_current(database):
            return
        _copy(database, draft)
        with _engine(draft) as engine:
            run_migrations(engine)
        _replace(database, draft)
    except (sqlite3.Error, SQLAlchemyError, CommandError, OSError) as error:
        # Without the statement and the advice that SQLAlchemy adds.
        reason = error.orig if isinstance(error, DBAPIError) else error
        raise StoreUnavailable(
            f"cannot bring the SuperLink's state {database} up to date: {reason}; free "
            "some space, start the version of Flower that wrote it, or restore it from "
            "a backup"
        ) from error


@contextmanager
def _engine(file: Path) -> Iterator[Engine]:
    engine = create_engine(sqlite_url(file))
    try:
        yield engine
    finally:
        engine.dispose()


def _is_current(database: Path) -> bool:
    with _engine(database) as engine, engine.connect() as connection:
        found = MigrationContext.configure(connection).get_current_heads()
        wanted = ScriptDirectory.from_config(build_alembic_config(engine)).get_heads()
    return {*found} == {*wanted}


def _copy(database: Path, draft: Path) -> None:
    """Copy what is there, and leave no write-ahead log beside it for another file."""
    draft.touch(0o600)
    if not database.exists():
        return
    with (
        closing(sqlite3.connect(database)) as source,
        closing(sqlite3.connect(draft)) as target,
    ):
        source.backup(target)
        source.execute("PRAGMA journal_mode = DELETE")


def _replace(database: Path, draft: Path) -> None:
    """Rename the copy, when all of it is in its one file and on the disk."""
    with closing(sqlite3.connect(draft)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
    flush(draft)
    draft.replace(database)
    flush(database.parent)


def _remove(draft: Path) -> None:
    for suffix in _OF_SQLITE:
        draft.with_name(draft.name + suffix).unlink(missing_ok=True)
