"""A site's home: what a new machine gets, and who may not spend any more."""

import shutil
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from support.awkward_store import AwkwardStore
from support.homes import LEASE_SECONDS, NAMES, RUN, Machine, first

from clients.home.folder_copy import LARGE_BYTES, PACKS, PIECE_BYTES
from clients.home.lease import KEY, read_head
from cloud_adapters.storage.memory import MemoryStore
from federation.clock import VirtualClock
from federation.errors import (
    CorruptObject,
    HomeConflict,
    JobError,
    StoreUnavailable,
)
from federation.protocols import ObjectInfo
from privacy.dp.errors import LedgerDamaged


@pytest.fixture
def store() -> AwkwardStore:
    return AwkwardStore(MemoryStore())


@pytest.fixture
def holder(tmp_path: Path, store: AwkwardStore) -> Machine:
    """A machine that holds the home and has answered two rounds."""
    made = first(tmp_path / "first", store)
    assert made.enter()
    made.charge(1)
    made.charge(2)
    return made


def test_an_empty_folder_becomes_the_site(holder: Machine, tmp_path: Path):
    """Files, modes and ledger; what is only of a machine stays there."""
    (holder.folder / "site.toml").write_text("name = 'site-0'")
    (holder.folder / "memory").mkdir()
    (holder.folder / "memory" / "ledgers.json").write_text("{}")
    (holder.folder / "memory" / "ledgers.lock").touch()
    state = holder.ledger_folder / "state-0000000002"
    state.write_bytes(bytes(range(251)) * (LARGE_BYTES // 250))
    holder.home.confirm()
    holder.home.release()
    other = Machine(tmp_path / "second", holder.store)
    assert other.enter()
    ours, theirs = (
        {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file()
        }
        for folder in (other.folder, holder.folder)
    )
    kept = theirs.keys() - {"site.toml", "memory/ledgers.lock", "home.json"}
    assert {name: ours[name] for name in kept} == {name: theirs[name] for name in kept}
    assert ours.keys() == kept | {"home.json"}
    for path in other.folder.rglob("*"):
        expected = 0o700 if path.is_dir() else 0o600
        if path.name != "home.json":
            assert stat.S_IMODE(path.stat().st_mode) == expected, path
    assert other.rounds() == [1, 2]


def test_a_growing_ledger_costs_its_last_piece(holder: Machine):
    """And no pack is left that nothing refers to."""
    holder.charge(3)
    path = holder.ledger_folder / "notes"
    path.write_bytes(b"a" * PIECE_BYTES + b"b")
    holder.home.confirm()
    stored = sum(info.size for info in holder.store.list(PACKS))
    with path.open("ab") as file:
        file.write(b"c" * 100)
    holder.home.confirm()
    after = sum(info.size for info in holder.store.list(PACKS))
    assert after - stored <= 101
    used = {p.pack for f in holder.home.lease.head.files for p in f.pieces}
    assert {info.key for info in holder.store.list(PACKS)} == used


@pytest.mark.parametrize("seconds", [-1e9, 0.0, 1e9], ids=["past", "same", "future"])
def test_a_silent_holder_is_replaced_whatever_its_clock_says(
    holder: Machine, tmp_path: Path, seconds: float
):
    """Only by the newcomer's own count of seconds, from when it began to watch."""
    start = holder.clock.now() + seconds
    other = Machine(tmp_path / "second", holder.store, VirtualClock(start))
    assert not other.enter(looks=11)
    assert other.clock.now() - start < LEASE_SECONDS * 1.1
    again = Machine(tmp_path / "third", holder.store, VirtualClock(start))
    assert again.enter()
    assert LEASE_SECONDS * 1.1 <= again.clock.now() - start < LEASE_SECONDS * 1.3
    with pytest.raises(HomeConflict, match="on third, fence 2"):
        holder.charge(3)


def test_a_holder_that_renews_is_not_replaced(holder: Machine, tmp_path: Path):
    other = Machine(tmp_path / "second", holder.store)

    def wait(seconds: float) -> bool:
        other.clock.sleep(seconds)
        holder.home.renew()
        return other.clock.now() > 10 * LEASE_SECONDS

    assert not other.home.enter(wait=wait, head_key=lambda: None)  # type: ignore[arg-type,return-value]
    (told,) = other.told
    assert told.startswith("this site runs on first (fence 1): waiting until it ")
    holder.charge(3)


def test_a_renewed_certificate_does_not_wait_for_a_task(
    holder: Machine, tmp_path: Path
):
    """The renewal of the lease stores it, and nothing that a task has begun."""
    (holder.folder / "node.pem").write_text("another key")
    state = holder.ledger_folder / "state-0000000003"
    state.write_text("half a round")
    holder.home.renew()
    other = Machine(tmp_path / "second", holder.store)
    assert other.enter(take_over=True)
    assert (other.folder / "node.pem").read_text() == "another key"
    assert not (other.ledger_folder / state.name).exists()


@pytest.mark.parametrize("leaves", ["released", "restarted", "operator"])
def test_nobody_waits_for_a_holder_that_is_known_to_be_gone(
    holder: Machine, tmp_path: Path, leaves: str
):
    """It said so, it was a process of this folder, or a person knows."""
    folder = holder.folder if leaves == "restarted" else tmp_path / "second"
    if leaves == "released":
        holder.home.release()
    other = Machine(folder, holder.store)
    assert other.enter(take_over=leaves == "operator", looks=0)
    assert other.rounds() == [1, 2]


def test_a_paused_holder_cannot_spend(holder: Machine, store: AwkwardStore):
    """It is stopped between its look at the home and its write."""
    other = Machine(holder.folder.parent / "second", store)
    store.meanwhile = lambda: other.enter(take_over=True)
    with pytest.raises(HomeConflict, match="nothing is charged") as caught:
        holder.charge(3)
    assert "second" not in caught.value.outside
    assert holder.home.lease.seconds_left == 0.0  # So it says no farewell either.
    other.charge(3)
    assert other.rounds() == [1, 2, 3]
    with pytest.raises(HomeConflict):
        holder.home.renew()


def test_a_charge_that_was_not_confirmed_counts(holder: Machine, tmp_path: Path):
    """The former machine comes back, and its folder has charged what nobody knows."""
    other = Machine(tmp_path / "second", holder.store)
    assert other.enter(take_over=True)
    holder.clock.sleep(1.0)
    with pytest.raises(HomeConflict):
        holder.charge(3)
    for folder, last in (holder.ledger_folder, 3), (other.ledger_folder, 2):
        answered = folder / "rounds" / f"{RUN}.round"
        answered.parent.mkdir()
        answered.write_text(f"{last}\n")
    other.charge(3)
    other.charge(4)
    other.home.release()
    back = Machine(holder.folder, holder.store)
    assert back.enter()
    assert back.rounds() == [1, 2, 3, 4, 0]
    assert (holder.ledger_folder / "rounds" / f"{RUN}.round").read_text() == "3\n"
    assert "counted 1 charges of this machine" in back.told[0]
    back.home.release()
    third = Machine(tmp_path / "third", holder.store)
    assert third.enter()
    assert third.rounds() == [1, 2, 3, 4, 0]


def test_a_restart_goes_on_with_what_only_the_folder_has(
    holder: Machine, store: AwkwardStore
):
    """The store was away when the charge was to be confirmed."""
    store.is_away = True
    with pytest.raises(StoreUnavailable):
        holder.charge(3)
    store.is_away = False
    again = Machine(holder.folder, store)
    assert again.enter(looks=0)
    found = read_head(store)
    assert found is not None
    assert again.rounds() == [1, 2, 3]
    assert found[0].changes == again.home.lease.head.changes
    last = Machine(holder.folder.parent / "second", store)
    assert last.enter()
    assert last.rounds() == [1, 2, 3]


def test_a_lost_file_comes_back(holder: Machine):
    """Losing a ledger here does not lose it there."""
    shutil.rmtree(holder.ledger_folder)
    holder.home.confirm()
    again = Machine(holder.folder, holder.store)
    assert again.enter()
    assert again.rounds() == [1, 2]


@pytest.mark.parametrize("whole", [True, False], ids=["folder", "ledger"])
def test_a_backup_of_the_folder_takes_no_charge_back(holder: Machine, *, whole: bool):
    """The home is newer than what was put back, be it all of it or the ledger alone."""
    backup = holder.folder.with_name("backup")
    shutil.copytree(holder.folder, backup)
    holder.charge(3)
    holder.charge(4)
    if not whole:
        shutil.copy(holder.folder / "home.json", backup)
    shutil.rmtree(holder.folder)
    backup.rename(holder.folder)
    again = Machine(holder.folder, holder.store)
    assert again.enter()
    assert again.rounds() == [1, 2, 3, 4]


@pytest.mark.parametrize("fates", [["lost"], ["late"], ["away"], ["well", "late"]])
def test_a_lost_reply_loses_no_charge(
    holder: Machine, store: AwkwardStore, fates: list[str]
):
    """Whether the write was carried out is found out, or it is tried again."""
    store.fates += fates  # type: ignore[arg-type]
    try:
        holder.charge(3)
    except StoreUnavailable:
        store.deliver()
        holder.home.confirm()
    other = Machine(holder.folder.parent / "second", store)
    assert other.enter()
    assert other.rounds() == [1, 2, 3]


def test_a_store_that_was_put_back_is_refused(holder: Machine, store: AwkwardStore):
    """This folder was stored there in a newer state."""
    old = store.read(KEY)
    packs = {info.key: store.read(info.key) for info in store.list(PACKS)}
    holder.charge(3)
    for key, content in {**packs, KEY: old}.items():
        store.put(key, [content])
    again = Machine(holder.folder, store)
    with pytest.raises(HomeConflict, match="restored from a copy"):
        again.enter()
    store.delete(KEY)
    with pytest.raises(HomeConflict, match="holds no home, but"):
        again.enter()
    (holder.folder / "home.json").unlink()
    assert again.enter()
    assert again.rounds() == [1, 2, 3]


@pytest.mark.parametrize("loses", [False, True], ids=["head", "objects"])
def test_a_file_that_only_the_home_has_outlives_a_copy(
    holder: Machine, store: AwkwardStore, *, loses: bool
):
    """If its object is there; if not, it does not keep the site from moving."""
    old = store.read(KEY)
    packs = {info.key for info in store.list(PACKS)}
    notes = holder.folder / "runs" / "old" / "notes"
    notes.parent.mkdir()
    notes.write_text("of an old run")
    holder.home.confirm()
    shutil.rmtree(notes.parent)
    store.put(KEY, [old])
    if loses:
        for info in [*store.list(PACKS)]:
            if info.key not in packs:
                store.delete(info.key)
    holder.home.renew()
    other = Machine(holder.folder.parent / "second", store)
    assert other.enter()
    assert (other.folder / "runs" / "old" / "notes").exists() is not loses


def test_only_packs_of_former_holders_are_removed(holder: Machine, store: AwkwardStore):
    """Those of a later one are named by a head that is not known here."""
    former, later = (f"{PACKS}{fence:010d}-{'a' * 32}" for fence in (1, 3))
    for key in (former, later):
        store.put(key, [b"a pack"])
    other = Machine(holder.folder.parent / "second", store)
    assert other.enter(take_over=True)
    assert other.home.lease.head.fence == 2
    left = {info.key for info in store.list(PACKS)}
    assert (former in left, later in left) == (False, True)


def test_a_round_that_another_machine_has_ended_is_not_gone_on_with(
    holder: Machine, store: AwkwardStore
):
    """Its state is of no use, and would be the beginning of the next one."""
    other = Machine(holder.folder.parent / "second", store)
    assert other.enter(take_over=True)
    other.charge(3)
    other.home.release()
    state = holder.ledger_folder / "state-0000000003"
    state.write_text("half a round")
    again = Machine(holder.folder, store)
    assert again.enter()
    assert again.rounds() == [1, 2, 3]
    assert not state.exists()


@pytest.mark.parametrize("notices", ["charge", "renewal"])
def test_a_running_holder_repairs_a_store_that_was_put_back(
    holder: Machine, store: AwkwardStore, notices: str
):
    """It still knows all files, and stores again what the copy did not have."""
    old = {info.key: store.read(info.key) for info in store.list()}
    holder.charge(3)
    for info in [*store.list()]:
        store.delete(info.key)
    for key, content in old.items():
        store.put(key, [content])
    if notices == "charge":
        holder.charge(4)
    else:
        holder.home.renew()
    other = Machine(holder.folder.parent / "second", store)
    assert other.enter()
    assert other.rounds() == [1, 2, 3, 4][: 4 if notices == "charge" else 3]


def test_homes_of_other_sites_are_refused(holder: Machine, tmp_path: Path):
    other = first(tmp_path / "second", holder.store)
    (other.folder / NAMES[0]).write_text("another identity")
    with pytest.raises(HomeConflict, match="is another identity"):
        other.enter()
    holder.home.copy.store.put(
        KEY, [holder.store.read(KEY).replace(b'"site":"site-0"', b'"site":"site-9"')]
    )
    with pytest.raises(HomeConflict, match="home of site 'site-9'"):
        Machine(tmp_path / "fourth", holder.store).enter()
    empty = Machine(tmp_path / "third", AwkwardStore(MemoryStore()))
    with pytest.raises(JobError, match="enrol it first"):
        empty.enter()


def test_damaged_copies_are_refused(holder: Machine, store: AwkwardStore):
    (key, *_) = [info.key for info in store.list(PACKS)]
    content = bytearray(store.read(key))
    content[0] ^= 1
    store.put(key, [content])
    other = Machine(holder.folder.parent / "second", store)
    with pytest.raises(CorruptObject, match="what was stored"):
        other.enter()


@pytest.mark.parametrize("body", [b"", b"{", b'{"version":2}', b"[" * 100_000])
def test_damaged_heads_are_refused(holder: Machine, store: AwkwardStore, body: bytes):
    store.put(KEY, [body])
    with pytest.raises(CorruptObject, match=r"not the head .*site's home"):
        Machine(holder.folder, store).enter()


def test_no_file_leaves_the_folder(holder: Machine, store: AwkwardStore):
    """A store that somebody else writes to names any path."""
    path = holder.ledger_folder.relative_to(holder.folder).as_posix()
    body = store.read(KEY).replace(path.encode(), b"runs/../../.." + b"/x" * 3)
    store.put(KEY, [body])
    with pytest.raises(CorruptObject, match="that no home has"):
        Machine(holder.folder.parent / "second", store).enter()


def test_a_damaged_ledger_of_the_folder_stops_the_site(holder: Machine, tmp_path: Path):
    """What it had charged cannot be compared with the home."""
    other = Machine(tmp_path / "second", holder.store)
    assert other.enter(take_over=True)
    other.charge(3)
    other.home.release()
    ledger = holder.ledger_folder / "ledger.jsonl"
    ledger.write_bytes(
        ledger.read_bytes().replace(b'"round_index":2', b'"round_index":9')
    )
    with pytest.raises(LedgerDamaged, match="not match its contents"):
        Machine(holder.folder, holder.store).enter()


class _Careless(AwkwardStore):
    """A service that takes conditions and ignores them."""

    def put(self, key: str, data: object, **_options: object) -> ObjectInfo:
        return self.store.put(key, data)  # type: ignore[arg-type]


def test_a_store_that_ignores_conditions_is_refused(tmp_path: Path):
    made = first(tmp_path / "first", _Careless(MemoryStore()))
    with pytest.raises(HomeConflict, match="ignores conditions of writes"):
        made.enter()
    with pytest.raises(HomeConflict):
        made.home.confirm()


class _Lying(AwkwardStore):
    """Returns the version of another object after a write."""

    def put(self, key: str, data: object, **options: object) -> ObjectInfo:
        info = super().put(key, data, **options)  # type: ignore[arg-type]
        return replace(info, version="nonsense") if key == KEY else info


def test_a_store_that_lies_about_versions_loses_no_charge(tmp_path: Path):
    """The next write fails, and is made again with the version that is there."""
    made = first(tmp_path / "first", _Lying(MemoryStore()))
    assert made.enter()
    made.charge(1)
    made.charge(2)
    other = Machine(tmp_path / "second", made.store)
    assert other.enter(take_over=True)
    assert other.rounds() == [1, 2]
    with pytest.raises(HomeConflict):
        made.charge(3)


def test_an_outage_longer_than_the_lease_ends_the_holder(
    holder: Machine, store: AwkwardStore
):
    store.is_away = True
    with pytest.raises(StoreUnavailable):
        holder.home.renew()
    holder.clock.sleep(LEASE_SECONDS)
    with pytest.raises(HomeConflict, match="was not renewed for 60 s"):
        holder.home.renew()
    store.is_away = False
    with pytest.raises(HomeConflict):
        holder.charge(3)


def test_a_lease_counts_from_before_a_slow_write(holder: Machine, store: AwkwardStore):
    """Another machine counts from when the write has arrived, before its reply."""
    seconds = LEASE_SECONDS / 2
    store.meanwhile = lambda: holder.clock.sleep(seconds)
    holder.home.renew()
    assert holder.home.lease.seconds_left == pytest.approx(LEASE_SECONDS - seconds)
    other = Machine(holder.folder.parent / "second", store)
    assert other.enter(take_over=True)
    holder.clock.sleep(LEASE_SECONDS - seconds)
    with pytest.raises(HomeConflict, match="on second, fence 2"):
        holder.home.confirm()  # Although no file has changed.


def test_a_full_disk_after_the_write_loses_no_charge(holder: Machine, tmp_path: Path):
    """The home has the charge, and this folder's note of it cannot be written."""
    blocked = holder.folder / ".home.json.tmp"
    blocked.mkdir()
    with pytest.raises(StoreUnavailable, match=r"cannot write .*home\.json"):
        holder.charge(3)
    blocked.rmdir()
    again = Machine(holder.folder, holder.store)
    assert again.enter(looks=0)
    assert again.rounds() == [1, 2, 3]
    other = Machine(tmp_path / "second", holder.store)
    assert other.enter(take_over=True)
    assert other.rounds() == [1, 2, 3]


def test_a_full_disk_before_the_write_stores_nothing(holder: Machine):
    """A charge is in the folder first."""
    before = holder.store.read(KEY)
    (holder.ledger_folder / "ledger.head").unlink()
    (holder.ledger_folder / "ledger.head").mkdir()
    with pytest.raises(StoreUnavailable):
        holder.charge(3)
    assert holder.store.read(KEY) == before
