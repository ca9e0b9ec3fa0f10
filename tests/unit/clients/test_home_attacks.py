"""A home that is torn, put back or half made never forgets what its site has spent."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.homes import NAMES, Machine, first

from clients.home.folder_copy import PACKS
from clients.home.lease import KEY
from cloud_adapters.storage.memory import MemoryStore
from federation.errors import CorruptObject, HomeConflict, JobError, StoreUnavailable


class Killed(BaseException):
    """The process ends here."""


def kill(*_: object, **__: object) -> None:
    raise Killed


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def half_made(folder: Path, store: MemoryStore) -> Machine:
    """A site whose process ended between the head's first two writes."""
    made = first(folder, store)
    made.ledger_folder.mkdir(parents=True)
    (made.ledger_folder / "state-0000000002").write_bytes(b"of round 2")
    made.home.confirm = kill  # type: ignore[method-assign]
    with pytest.raises(Killed):
        made.enter()
    return made


def test_a_home_that_was_half_made_costs_the_folder_nothing(
    tmp_path: Path, store: MemoryStore
):
    """States of rounds are nowhere else yet."""
    made = half_made(tmp_path / "first", store)
    assert Machine(made.folder, store).enter()
    assert (made.ledger_folder / "state-0000000002").read_bytes() == b"of round 2"


def test_a_home_that_was_half_made_makes_no_site_of_an_empty_folder(
    tmp_path: Path, store: MemoryStore
):
    half_made(tmp_path / "first", store)
    with pytest.raises(JobError, match="no site: enrol it first"):
        Machine(tmp_path / "second", store).enter()


def test_a_takeover_that_is_killed_leaves_no_folder_that_counts_as_newer(
    tmp_path: Path, store: MemoryStore
):
    """The lease is renewed while older files are still being replaced."""
    former = first(tmp_path / "first", store)
    former.enter()
    former.charge(1)
    following = Machine(tmp_path / "second", store)
    following.enter(take_over=True)
    following.charge(2)
    (following.folder / "roster.toml").write_text("a newer roster")
    following.home.confirm()
    following.home.release()
    again = Machine(former.folder, store)

    def restore(*_: object, **__: object) -> None:
        again.home.renew()
        raise Killed

    again.home.copy.restore = restore  # type: ignore[method-assign]
    with pytest.raises(Killed):
        again.enter()
    last = Machine(former.folder, store)
    assert last.enter()
    assert last.rounds() == [1, 2]
    assert (last.folder / "roster.toml").read_text() == "a newer roster"


def _file(**changes: object) -> Callable[[dict[str, Any]], None]:
    return lambda head: head["files"][0].update(changes)


def _piece(**changes: object) -> Callable[[dict[str, Any]], None]:
    return lambda head: head["files"][0]["pieces"][0].update(changes)


@pytest.mark.parametrize(
    "change",
    [
        *(_file(path=path) for path in ("", "runs", "runs/\0", "runs/\ud800", "../x")),
        *(_piece(pack=key) for key in ("", "../x", f"{PACKS}0000000001-{'0' * 32}")),
        *(_piece(length=length) for length in (-1, 0, 1 << 40)),
        _piece(offset=-1),
    ],
)
def test_heads_that_name_what_is_not_there_are_refused(
    tmp_path: Path, store: MemoryStore, change: Callable[[dict[str, Any]], None]
):
    """In words, and nothing is written outside of the folder."""
    holder = first(tmp_path / "first", store)
    holder.enter()
    holder.home.release()
    head = json.loads(store.read(KEY))
    change(head)
    store.put(KEY, [json.dumps(head).encode()])
    with pytest.raises(CorruptObject, match=r"no home has|restore the newest version"):
        Machine(tmp_path / "second", store).enter()
    assert {path.name for path in tmp_path.iterdir()} == {"first", "second"}


def test_a_folder_in_the_place_of_a_file_is_named(tmp_path: Path, store: MemoryStore):
    holder = first(tmp_path / "first", store)
    holder.enter()
    holder.home.release()
    other = Machine(tmp_path / "second", store)
    (other.folder / NAMES[-1]).mkdir()
    with pytest.raises(StoreUnavailable, match=NAMES[-1]):
        other.enter()


def test_a_damaged_number_of_a_round_ends_no_takeover(
    tmp_path: Path, store: MemoryStore
):
    """Its run refuses it; the site has others."""
    holder = first(tmp_path / "first", store)
    path = holder.ledger_folder / "rounds" / "run.round"
    path.parent.mkdir(parents=True)
    path.write_text("damaged")
    holder.enter()
    other = Machine(tmp_path / "second", store)
    other.enter(take_over=True)
    other.home.release()
    path.write_text("7\n")
    assert Machine(holder.folder, store).enter()
    assert path.read_text() == "damaged"


def test_a_takeover_during_a_takeover_is_told_as_what_it_is(
    tmp_path: Path, store: MemoryStore
):
    """And not as damage: the later machine has removed what it has replaced."""
    first(tmp_path / "first", store).enter()
    second, third = (Machine(tmp_path / name, store) for name in ("second", "third"))
    restore = second.home.copy.restore

    def overtaken(*files: Any, **named: Any) -> None:
        assert third.enter(take_over=True)
        for name in NAMES:
            (third.folder / name).write_text("renewed")
        third.home.confirm()
        restore(*files, **named)

    second.home.copy.restore = overtaken  # type: ignore[method-assign]
    with pytest.raises(HomeConflict, match="on third, fence 3"):
        second.enter(take_over=True)
