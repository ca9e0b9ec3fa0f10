"""Ranges have no checksum of their own: whoever reads one finds a byte that is wrong.

Services sum whole objects, so a store passes a range on as it came.
"""

import ast
import contextlib
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from support.faulty_store import FlippingStore
from support.source_code import nodes

import aggregator
import clients
import cloud_adapters
import deploy
import federation
import monitoring
import privacy
from cloud_adapters.keys.key_file import KeyFile, add_key
from cloud_adapters.storage.disk.transfer import download, stream
from cloud_adapters.storage.encrypted import EncryptedStore
from cloud_adapters.storage.memory import MemoryStore
from cloud_adapters.storage.retry import Retry
from deploy.tools.rewrap import Place, rewrap
from deploy.wiring.encryption import KeyName
from federation.clock import VirtualClock
from federation.errors import CorruptObject, KeyRefused
from federation.protocols import ObjectStore

Get = Callable[[ObjectStore, Path], object]

CONTENT = bytes(range(200)) * 3
PART = 64
ONCE = Retry(attempts=1, clock=VirtualClock())

# Who reads ranges, and what they compare what they read with.
CALLERS = {
    "cloud_adapters/storage/disk/transfer.py": "the checksum of the whole object",
    "cloud_adapters/storage/encrypted.py": "the tags of segments and trailer",
    # tests/unit/aggregator/test_checkpoint.py
    "aggregator/checkpoint_objects.py": "the digest in the manifest, or of it",
    # tests/contract/test_site_state.py
    "clients/training/site_state.py": "the digest in its second line",
    # tests/unit/clients/test_private_kept_steps.py
    "clients/training/kept_steps.py": "nothing: a charge of no steps has no answer",
    # tests/unit/clients/test_home_copies.py
    "clients/home/folder_copy.py": "the digest of each piece in the head",
    "deploy/tools/rewrap.py": "the whole object, before it counts as in clear",
    "deploy/wiring/job_data.py": "nothing: an index taken for another kind is no index",
    "deploy/doctor/store.py": "the bytes that it has written itself",
    "deploy/wiring/run_store.py": "nothing: a resume checks the run that it chooses",
}
PASSING_ON = {
    "cloud_adapters/storage/metered.py",
}


@pytest.mark.slow
def test_all_who_read_ranges_are_known():
    """Whoever is new here says what it checks, and has a test below."""
    found = set()
    packages = (aggregator, clients, cloud_adapters, deploy, federation, monitoring)
    for package in (*packages, privacy):
        root = Path(package.__path__[0])
        for path in root.rglob("*.py"):
            # To parse all of them takes a second.
            text = path.read_text("utf-8")
            may_read = re.search(r"\b(?:read|Read)\(", text)
            may_read = may_read and re.search(r"\b(?:start|length) ?=|\*\*", text)
            if may_read and any(map(_reads_a_range, nodes(path))):
                found.add(path.relative_to(root.parent).as_posix())
    assert found == CALLERS.keys() | PASSING_ON


def _reads_a_range(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    # None is for ``**options``, which may hold both.
    if not {"start", "length", None} & {keyword.arg for keyword in node.keywords}:
        return False
    called = node.func
    name = called.attr if isinstance(called, ast.Attribute) else ""
    is_s3 = isinstance(called, ast.Name) and called.id == "Read"
    return is_s3 or name == "read"


def _stream(store: ObjectStore, _: Path) -> object:
    return list(stream(store, "key", part_bytes=PART, retry=ONCE))


def _download(store: ObjectStore, folder: Path) -> object:
    return download(store, "key", folder / "file", part_bytes=PART, retry=ONCE)


@pytest.mark.parametrize("get", [_stream, _download])
@pytest.mark.parametrize("at", [0, 63, 64, 300, 599])
def test_of_a_transfer(
    get: Callable[[ObjectStore, Path], object], at: int, tmp_path: Path
):
    """The end of a stream and a file are not reached."""
    store = MemoryStore()
    store.put("key", [CONTENT])
    with pytest.raises(CorruptObject, match="as it was written"):
        get(FlippingStore(store, at), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def keys(tmp_path: Path) -> KeyFile:
    add_key(tmp_path / "keys.toml")
    return KeyFile(tmp_path / "keys.toml")


VERBS: dict[str, Callable[[EncryptedStore], object]] = {
    "range": lambda store: store.read("key", start=0, length=len(CONTENT)),
    "to the end": lambda store: store.read("key", start=1),
    "rewrap": lambda store: store.rewrap("key"),
}


@pytest.mark.parametrize("verb", VERBS)
def test_of_an_encrypted_object(verb: str, keys: KeyFile):
    """Every byte of it; and nothing takes its place that was read wrong."""
    store = MemoryStore()
    EncryptedStore(store, keys, segment_bytes=PART).put("key", [CONTENT])
    stored = store.read("key")
    for at in range(0, len(stored), 7):
        far = EncryptedStore(FlippingStore(store, at), keys, segment_bytes=PART)
        # A flip behind what is read is not met.
        found: object = None
        with contextlib.suppress(CorruptObject, KeyRefused):
            found = VERBS[verb](far)
        if verb in {"range", "to the end"}:
            assert found in {None, CONTENT, CONTENT[1:]}
        else:
            assert found is None, at
        assert [info.key for info in store.list()] == ["key"]
        assert store.read("key") == stored


def test_of_a_header_that_is_looked_at(tmp_path: Path):
    """An object is not passed over as one in clear, and its key then given up."""
    path = tmp_path / "keys.toml"
    add_key(path)
    store = MemoryStore()
    EncryptedStore(store, KeyFile(path), prefix="run/").put("key", [CONTENT])
    add_key(path)
    place = Place(
        store=FlippingStore(store, 0), bound="run/", key=KeyName(name=f"file:{path}")
    )
    with pytest.raises(CorruptObject):
        rewrap(place, to=KeyName())
    assert rewrap(
        Place(store=store, bound="run/", key=place.key), to=KeyName()
    ).rewrapped
