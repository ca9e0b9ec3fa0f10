"""Rotations of wrapping keys: nothing with a wrong one, and on after every cut."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.faulty_store import FaultyStore

from cloud_adapters.keys.key_file import KeyFile, add_key
from cloud_adapters.storage.disk.store import LocalStore
from cloud_adapters.storage.encrypted import EncryptedStore
from cloud_adapters.storage.memory import MemoryStore
from deploy import exit_codes
from deploy.cli import commands as cli
from deploy.tools.rewrap import Place, decrypt, rewrap
from deploy.wiring.encryption import EXPORT, NO_KEY, KeyName
from federation.errors import CorruptObject, KeyRefused, RunNotFound, StoreUnavailable
from federation.protocols import ObjectStore

BOUND = "job/run-1/"
NUM_OBJECTS = 5


@pytest.fixture
def key(tmp_path: Path) -> KeyName:
    return new_key(tmp_path / "keys.toml")


def new_key(path: Path) -> KeyName:
    add_key(path)
    return KeyName(name=f"file:{path}")


def path_of(key: KeyName) -> Path:
    return Path(key.name.removeprefix("file:"))


def filled(key: KeyName, store: ObjectStore | None = None) -> Place:
    """A run's place with objects, and one that is not encrypted."""
    store = MemoryStore() if store is None else store
    encrypted = EncryptedStore(store, KeyFile(path_of(key)), prefix=BOUND)
    for number in range(NUM_OBJECTS):
        encrypted.put(f"blob-{number}", [b"x" * number], metadata={"number": "1"})
    store.put("events.jsonl", [b"{}\n"])
    return Place(store=store, bound=BOUND, key=key)


def contents(place: Place, key: KeyName) -> list[bytes]:
    store = EncryptedStore(place.store, KeyFile(path_of(key)), prefix=BOUND)
    return [store.read(f"blob-{number}") for number in range(NUM_OBJECTS)]


def stored(store: ObjectStore) -> dict[str, bytes]:
    return {info.key: store.read(info.key) for info in store.list()}


WHOLE = [b"x" * number for number in range(NUM_OBJECTS)]


def only_newest(key: KeyName, tmp_path: Path) -> KeyName:
    """The key file without its older keys."""
    head, *entries = path_of(key).read_text().split("[[keys]]")
    path = tmp_path / "newest.toml"
    path.touch(mode=0o600)
    path.write_text(f"{head}[[keys]]{entries[-1]}")
    return KeyName(name=f"file:{path}")


def test_rotation_of_a_key_file(key: KeyName, tmp_path: Path):
    """Afterwards the old key is not needed; a second call finds nothing to do."""
    place = filled(key)
    path = path_of(key)
    assert rewrap(place, to=NO_KEY).already == NUM_OBJECTS
    add_key(path)
    done = rewrap(place, to=NO_KEY)
    assert (done.rewrapped, done.already, done.in_clear) == (NUM_OBJECTS, 0, 1)
    assert contents(place, only_newest(key, tmp_path)) == WHOLE
    again = rewrap(place, to=NO_KEY)
    assert (again.rewrapped, again.already) == (0, NUM_OBJECTS)


def test_another_key(key: KeyName, tmp_path: Path):
    """Contents stay as they are encrypted, and metadata with them."""
    place, other = filled(key), new_key(tmp_path / "other.toml")
    before = stored(place.store)
    assert rewrap(place, to=other).rewrapped == NUM_OBJECTS
    assert contents(place, other) == WHOLE
    after = stored(place.store)
    assert [content[1024:] for content in before.values()] == [
        content[1024:] for content in after.values()
    ]
    assert place.store.stat("blob-0").metadata == {"number": "1"}
    with pytest.raises(KeyRefused):
        contents(place, key)


@pytest.mark.parametrize("which", ["from", "to"])
def test_wrong_key_writes_nothing(key: KeyName, tmp_path: Path, which: str):
    """Not one object, also if only the last one has another key."""
    place, wrong = filled(key), new_key(tmp_path / "wrong.toml")
    EncryptedStore(place.store, KeyFile(path_of(wrong)), prefix=BOUND).put("z", [b"z"])
    to = KeyName(name=f"file:{tmp_path}/none.toml") if which == "to" else NO_KEY
    add_key(path_of(key))
    before = stored(place.store)
    with pytest.raises(KeyRefused, match=r"none\.toml" if which == "to" else "not in"):
        rewrap(place, to=to)
    assert stored(place.store) == before


def test_damaged_header_writes_nothing(key: KeyName):
    """The message names the object."""
    place = filled(key)
    content = bytearray(place.store.read("blob-3"))
    content[60] ^= 1
    place.store.put("blob-3", [bytes(content)])
    add_key(path_of(key))
    before = stored(place.store)
    with pytest.raises(CorruptObject, match="blob-3"):
        rewrap(place, to=NO_KEY)
    assert stored(place.store) == before


class Cut(FaultyStore):
    """Fails at the n-th write, from 0."""

    def __init__(self, store: ObjectStore, number: int) -> None:
        super().__init__(store)
        self.left = number

    def put(self, *args: Any, **options: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise StoreUnavailable("the cable is cut")
        return self.store.put(*args, **options)


@pytest.mark.parametrize("number", range(NUM_OBJECTS))
@pytest.mark.parametrize("is_other", [False, True])
def test_a_cut_call_is_made_again(
    key: KeyName, tmp_path: Path, *, number: int, is_other: bool
):
    """What was done is not done twice, and all can be read in between."""
    place = filled(key)
    to = new_key(tmp_path / "other.toml") if is_other else NO_KEY
    add_key(path_of(key))
    cut = Place(store=Cut(place.store, number), bound=BOUND, key=key)
    with pytest.raises(StoreUnavailable):
        rewrap(cut, to=to)
    done = rewrap(place, to=to)
    assert (done.already, done.rewrapped) == (number, NUM_OBJECTS - number)
    assert contents(place, to or key) == WHOLE


class Busy(FaultyStore):
    """Somebody else works there: after the first header was read for a rewrap."""

    def __init__(self, store: ObjectStore, act: Callable[[], Any]) -> None:
        super().__init__(store)
        self.act: Callable[[], Any] | None = act

    def put(self, *args: Any, **options: Any) -> Any:
        if self.act is not None:
            act, self.act = self.act, None
            act()
        return self.store.put(*args, **options)


def test_what_others_write_meanwhile_stays(key: KeyName):
    """A newer object is not replaced by the older one."""
    place = filled(key)
    add_key(path_of(key))
    ours = EncryptedStore(place.store, KeyFile(path_of(key)), prefix=BOUND)

    def act() -> None:
        ours.put("blob-0", [b"newer"])
        place.store.delete("blob-4")

    busy = Place(store=Busy(place.store, act), bound=BOUND, key=key)
    done = rewrap(busy, to=NO_KEY)
    assert (done.rewrapped, done.changed) == (NUM_OBJECTS - 2, 2)
    assert ours.read("blob-0") == b"newer"


def test_decrypt(key: KeyName, tmp_path: Path):
    """What is encrypted comes out as it went in, and nothing else does."""
    place = filled(key)
    written = decrypt(place, tmp_path / "out")
    assert written == {f"blob-{n}": n for n in range(NUM_OBJECTS)}
    names = [path.name for path in sorted((tmp_path / "out").iterdir())]
    assert names == list(written)
    assert (tmp_path / "out" / "blob-4").read_bytes() == b"xxxx"
    with pytest.raises(RunNotFound, match="nothing encrypted"):
        decrypt(Place(store=MemoryStore(), bound=BOUND, key=key), tmp_path)


def test_by_url(key: KeyName, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The command finds out what is there: here an export."""
    folder = tmp_path / "export"
    store = EncryptedStore(LocalStore(folder), KeyFile(path_of(key)), prefix=EXPORT)
    store.put("README.md", [b"# card"])
    add_key(path_of(key))
    url = f"file://{folder}"
    command = ["storage", "rewrap", url, "--encryption-key", key.name]
    assert cli.main([*command, "--json"]) == exit_codes.DONE
    assert json.loads(capsys.readouterr().out)["rewrapped"] == 1
    out = ["--out", str(tmp_path / "out"), "--encryption-key", key.name]
    assert cli.main(["storage", "decrypt", url, *out, "--json"]) == exit_codes.DONE
    assert json.loads(capsys.readouterr().out)
    assert (tmp_path / "out" / "README.md").read_bytes() == b"# card"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["file://x/job/run"], "--encryption-key: is missing"),
        (["file:///", "--encryption-key", "KEY"], "run, dataset or export"),
        (["ftp://x", "--encryption-key", "KEY"], "scheme"),
        (["file://x/job/run", "--encryption-key", "keys.toml"], "not name a key"),
        (["no-such-run"], "there is no run"),
    ],
)
def test_wrong_arguments(
    arguments: list[str],
    words: str,
    key: KeyName,
    capsys: pytest.CaptureFixture[str],
):
    """One line each."""
    named = [key.name if text == "KEY" else text for text in arguments]
    assert cli.main(["storage", "rewrap", *named]) == exit_codes.BAD_JOB
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


def test_over_to_a_key_of_kms(key: KeyName, kms_server: Any):
    """And not with a disabled one: that shows before anything is written."""
    place, name = filled(key), kms_server.add_key()
    to = KeyName(name=f"gcp-kms:{name}", endpoint=kms_server.url)
    kms_server.keys[name].disabled = {0}
    before = stored(place.store)
    with pytest.raises(KeyRefused, match="disabled"):
        rewrap(place, to=to)
    assert stored(place.store) == before
    kms_server.keys[name].disabled = set()
    assert rewrap(place, to=to).rewrapped == NUM_OBJECTS
    there = Place(store=place.store, bound=BOUND, key=to)
    # Which version of the key wrapped is not told, so all are done again.
    kms_server.keys[name].versions.append(bytes(range(32)))
    assert rewrap(there, to=NO_KEY).rewrapped == NUM_OBJECTS
    kms_server.keys[name].disabled = {0}
    assert len(decrypt_all(there)) == NUM_OBJECTS  # The old version is not needed.
    kms_server.keys[name].disabled = {0, 1}
    after = stored(place.store)
    with pytest.raises(KeyRefused):
        rewrap(there, to=NO_KEY)
    assert stored(place.store) == after


def decrypt_all(place: Place) -> list[bytes]:
    store = EncryptedStore(place.store, place.key.open(), prefix=place.bound)
    return [store.read(f"blob-{number}") for number in range(NUM_OBJECTS)]
