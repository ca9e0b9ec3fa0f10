"""What a site remembers outlives it, and is refused if it is damaged."""

import json
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from clients.privacy.site_memory import (
    FileMemory,
    InMemory,
    SiteMemory,
    fresh_secret,
)
from federation.errors import CorruptObject, StoreUnavailable


@pytest.fixture(params=["memory", "files"])
def memory(request: pytest.FixtureRequest, tmp_path: Path) -> SiteMemory:
    return InMemory() if request.param == "memory" else FileMemory(tmp_path / "m")


def test_a_document_begins_empty(memory: SiteMemory):
    assert memory.read("cohorts") == {}


def test_an_update_is_read_back(memory: SiteMemory):
    assert memory.update("cohorts", lambda old: {**old, "a": [1, 2]}) == {"a": [1, 2]}
    memory.update("cohorts", lambda old: {**old, "b": "c"})
    assert memory.read("cohorts") == {"a": [1, 2], "b": "c"}
    assert memory.read("other") == {}


def test_a_change_that_raises_changes_nothing(memory: SiteMemory):
    memory.update("cohorts", lambda _: {"a": 1})

    def fail(old: dict) -> dict:
        old["a"] = 2
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        memory.update("cohorts", fail)
    assert memory.read("cohorts") == {"a": 1}


def test_updates_follow_one_another(memory: SiteMemory):
    """None is lost, whoever else writes."""

    def count(old: dict) -> dict:
        return {"n": old.get("n", 0) + 1}

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: memory.update("count", count), range(40)))
    assert memory.read("count") == {"n": 40}


def test_a_secret_is_drawn_once(memory: SiteMemory):
    first = fresh_secret(memory, "secrets", "run/1")
    assert len(first) == 32
    assert fresh_secret(memory, "secrets", "run/1") == first
    assert fresh_secret(memory, "secrets", "run/2") != first


def test_files_outlive_the_process_and_are_private(tmp_path: Path):
    folder = tmp_path / "m"
    FileMemory(folder).update("secrets", lambda _: {"a": 1})
    assert FileMemory(folder).read("secrets") == {"a": 1}
    assert stat.S_IMODE((folder / "secrets.json").stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    "damage",
    [
        lambda _: "",
        lambda text: text[:-10],
        lambda text: text.replace('"a":1', '"a":2'),
        lambda text: text.replace('"version":1', '"version":2'),
        lambda text: json.dumps({**json.loads(text), "name": "other"}),
        lambda _: "[]",
        lambda _: "[" * 100_000,
    ],
)
def test_damage_is_refused(tmp_path: Path, damage: Callable[[str], str]):
    """Neither read nor written over: the operator is told."""
    memory = FileMemory(tmp_path)
    memory.update("cohorts", lambda _: {"a": 1})
    path = tmp_path / "cohorts.json"
    path.write_text(damage(path.read_text()))
    with pytest.raises(CorruptObject, match=r"cohorts\.json"):
        memory.read("cohorts")
    with pytest.raises(CorruptObject):
        memory.update("cohorts", lambda _: {})


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnavailable, match="file"):
        FileMemory(tmp_path / "file" / "m").update("a", lambda old: old)
