"""The SuperLink's state changes in one step, wherever that is interrupted."""

import importlib.util
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from cloud_adapters.flower import simulation as flower_simulation
from federation.errors import StoreUnavailable

if importlib.util.find_spec("flwr") is None:
    pytest.skip("the flower extra is not installed", allow_module_level=True)
flower_simulation.import_flower()

from alembic import command  # noqa: E402
from alembic.script import ScriptDirectory  # noqa: E402
from sqlalchemy import Engine, create_engine, event  # noqa: E402

from cloud_adapters.flower.private.superlink import build_alembic_config  # noqa: E402
from cloud_adapters.superlink import migration  # noqa: E402

pytestmark = [
    pytest.mark.flower,
    # Of Flower's way to call its library.
    pytest.mark.filterwarnings("ignore:No path_separator found:DeprecationWarning"),
]


class Killed(BaseException):
    """Nothing that runs after it, as after a SIGKILL."""


@contextmanager
def killed_at(statement: int) -> Iterator[None]:
    """Interrupt whatever executes so many statements."""
    left = [statement]

    def count(*_: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise Killed

    event.listen(Engine, "before_cursor_execute", count)
    try:
        with pytest.raises(Killed):
            yield
    finally:
        event.remove(Engine, "before_cursor_execute", count)


def rows(database: Path, query: str) -> list[Any]:
    """What a query finds."""
    with closing(sqlite3.connect(database)) as connection:
        return connection.execute(query).fetchall()


def outdated(database: Path) -> None:
    """Make a state as the Flower before the last migration did, with a row of ours."""
    engine = create_engine(f"sqlite:///{database}")
    config = build_alembic_config(engine)
    scripts = ScriptDirectory.from_config(config)
    last = scripts.get_revision(scripts.get_heads()[0])
    assert isinstance(last.down_revision, str)
    command.upgrade(config, last.down_revision)
    engine.dispose()
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE kept (value)")
        connection.execute("INSERT INTO kept VALUES (7)")
        connection.commit()


def test_a_new_state_is_complete_or_not_there(tmp_path: Path):
    """Also in a folder whose name means something else in a URL."""
    folder = tmp_path / "a?b#%3F"
    folder.mkdir()
    database = folder / "state.db"
    with killed_at(90):
        migration.migrate(database)
    assert not database.exists()
    migration.migrate(database)
    assert migration._is_current(database)
    assert [path.name for path in folder.iterdir()] == ["state.db"]
    assert [*tmp_path.iterdir()] == [folder]
    assert database.stat().st_mode & 0o777 == 0o600


def test_an_older_state_is_as_it_was_or_current(tmp_path: Path):
    database = tmp_path / "state.db"
    outdated(database)
    version = rows(database, "SELECT * FROM alembic_version")
    with killed_at(8):
        migration.migrate(database)
    assert rows(database, "SELECT * FROM alembic_version") == version
    migration.migrate(database)
    assert migration._is_current(database)
    assert rows(database, "SELECT value FROM kept") == [(7,)]
    assert [path.name for path in tmp_path.iterdir()] == ["state.db"]


def test_a_current_state_is_left_alone_and_a_newer_one_refused(tmp_path: Path):
    database = tmp_path / "state.db"
    migration.migrate(database)
    before = database.stat()
    migration.migrate(database)
    after = database.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("UPDATE alembic_version SET version_num = 'later'")
        connection.commit()
    with pytest.raises(StoreUnavailable, match="the version of Flower"):
        migration.migrate(database)
    assert rows(database, "SELECT * FROM alembic_version") == [("later",)]


def test_damage_is_named(tmp_path: Path):
    database = tmp_path / "state.db"
    database.write_bytes(b"SQLite format 3\0" + bytes(range(256)) * 16)
    damaged = database.read_bytes()
    with pytest.raises(StoreUnavailable, match=r"state\.db up to date") as caught:
        migration.migrate(database)
    assert database.read_bytes() == damaged
    assert "\n" not in str(caught.value)


def test_a_link_to_another_disk_stays(tmp_path: Path):
    database, elsewhere = tmp_path / "state.db", tmp_path / "disk"
    elsewhere.mkdir()
    database.symlink_to(elsewhere / "state.db")
    migration.migrate(database)
    assert database.is_symlink()
    assert [path.name for path in elsewhere.iterdir()] == ["state.db"]
