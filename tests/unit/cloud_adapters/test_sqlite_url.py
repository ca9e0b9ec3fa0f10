"""The path of a database survives in a URL."""

from pathlib import Path

import pytest

from cloud_adapters.storage.disk.sqlite_url import sqlite_url
from cloud_adapters.superlink.answer_limits import Limits
from deploy.aggregator_host import superlink_process


@pytest.mark.parametrize("folder", ["plain", "a b", "a?b", "a#b", "a%3Fb", "50%", "ü?"])
def test_a_database_is_the_file_that_was_named(tmp_path: Path, folder: str):
    """As SQLAlchemy reads the URL; a question mark begins no options."""
    sqlalchemy = pytest.importorskip("sqlalchemy")
    place = tmp_path / folder
    place.mkdir()
    url = sqlalchemy.make_url(sqlite_url(place / "state.db"))
    assert (url.database, dict(url.query)) == (str(place / "state.db"), {})
    engine = sqlalchemy.create_engine(url)
    engine.connect().close()
    engine.dispose()
    assert [path.name for path in place.iterdir()] == ["state.db"]
    assert [*tmp_path.iterdir()] == [place]


def test_the_superlink_gets_such_a_url(tmp_path: Path):
    """It would keep its state in another file than the one that was prepared."""
    database = tmp_path / "a?b" / "state.db"
    limits = Limits(answer=1, site=1, run=1, reserve=1)
    words = superlink_process.command(limits, database, tmp_path, [])
    assert words[words.index("--database") + 1] == sqlite_url(database)
