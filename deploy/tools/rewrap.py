"""Wrap the data keys of a whole place again: after a rotation, or for another key.

Contents stay encrypted as they are, and are not decrypted. A call that is killed is
repeated: objects that already have the new key are skipped where that is visible.
"""

import contextlib
import secrets
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from clients.shards.index import INDEX_KEY
from cloud_adapters.keys.context import DATA_KEY_BYTES
from cloud_adapters.keys.key_file import KeyFile
from cloud_adapters.storage.disk.transfer import download, stream, upload
from cloud_adapters.storage.encrypted import EncryptedStore, context_of
from cloud_adapters.storage.encrypted_format import HEADER_BYTES, MAGIC, Header
from cloud_adapters.urls import StoreOptions, open_store
from deploy.tools.export import CARD
from deploy.wiring import run_store
from deploy.wiring.encryption import (
    DATASET,
    EXPORT,
    KeyName,
    place_of,
    place_of_url,
)
from federation.errors import (
    CorruptObject,
    JobError,
    KeyRefused,
    ObjectChanged,
    ObjectNotFound,
    RunNotFound,
)
from federation.job.spec import JobSpec
from federation.job.storage_job import EncryptionSpec
from federation.protocols import KeyService, ObjectStore
from monitoring.runs.find import find_run
from monitoring.runs.run_folder import RunFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class RewrapResult:
    """The result of ``rewrap``.

    Attributes:
        url: The place.
        rewrapped: Objects whose data key was wrapped again.
        already: Objects that had the new key.
        changed: Objects that others wrote or deleted meanwhile, and that are as they
            left them.
        in_clear: Objects that are not encrypted.
    """

    url: str
    rewrapped: int
    already: int
    changed: int
    in_clear: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A store with encrypted objects, in their stored form.

    Attributes:
        store: Does not decrypt.
        bound: What the objects are bound to.
        key: Opens them.
        run: The run's folder; None of a URL.
    """

    store: ObjectStore
    bound: str
    key: KeyName
    run: RunFolder | None = None


@contextlib.contextmanager
def opened(
    place: str,
    root: Path,
    *,
    key: KeyName,
    service: StoreOptions,
    is_changed: bool = False,
) -> Iterator[Place]:
    """Open a run, or the objects at a URL: a run's place, a dataset or an export.

    Args:
        place: URL; or a folder, run id or job's name.
        root: Folder of all runs.
        key: Key of the objects. Without it, that of the run's job.
        service: Where the store of a URL is, if that is not what the URL says.
        is_changed: Whether no other process of this machine may work on the run.

    Raises:
        JobError: The URL names no store, or no key is named.
        RunNotFound: There is no such run.
        RunConflict: Another process of this machine works on it.
        StoreUnavailable: The store is unreachable.
    """
    with contextlib.ExitStack() as stack:
        if "://" in place:
            if not key:
                raise JobError(
                    "is missing: give the key of the objects there", key=key.argument
                )
            store = open_store(place, options=service)
            stack.callback(store.close)
            yield Place(store=store, bound=_bound(store, place), key=key)
            return
        run = find_run(place, root)
        if is_changed:
            stack.enter_context(run.locked())
        job = run.read_spec()
        run_id, spec = run.run_id() or "", job.storage.encryption
        if not key:
            if spec is None:
                raise JobError(f"the run in {run.path} is not encrypted", key="PLACE")
            key = KeyName(name=spec.key, endpoint=spec.endpoint, argument="PLACE")
        store = run_store.open_kept(job, run, run_id)
        stack.callback(store.close)
        yield Place(store=store, bound=place_of(job.name, run_id), key=key, run=run)


def rewrap(place: Place, *, to: KeyName) -> RewrapResult:
    """Wrap all data keys of a place with the newest key, or with another one.

    1. Open every data key, and try the new key: a wrong one shows before any write.
    2. Rewrite the objects that need it, one by one.

    Args:
        place: Where they are.
        to: Another key than theirs; the newest version of theirs if it names none.

    Raises:
        KeyRefused: A key of an object is unavailable; nothing is written.
        CorruptObject: An object's header is damaged; nothing is written.
        StoreUnavailable: The store or a key service is unreachable.
    """
    with contextlib.ExitStack() as stack:
        old = place.key.open()
        stack.callback(old.close)
        new = None
        if to:
            new = to.open()
            stack.callback(new.close)
        trial = secrets.token_bytes(DATA_KEY_BYTES)
        (new or old).wrap(trial, context_of(place.bound))  # 1.
        states = {
            info.key: _state(place, info.key, old, new)
            for info in list(place.store.list())
        }
        pending = [key for key, state in states.items() if state == _PENDING]
        store = EncryptedStore(place.store, old, prefix=place.bound)
        changed = sum(not _rewrap_one(store, key, new) for key in pending)  # 2.
    if new is not None and place.run is not None:
        _name_in_job(place, place.run, to)
    counts = list(states.values())
    return RewrapResult(
        url=place.store.url,
        rewrapped=len(pending) - changed,
        already=counts.count(_ALREADY),
        changed=changed + counts.count(_GONE),
        in_clear=counts.count(_IN_CLEAR),
    )


def decrypt(place: Place, folder: Path) -> dict[str, int]:
    """Write the content of every encrypted object into a folder.

    A file that is there is replaced when the whole content is there and checked.

    Returns:
        Bytes by key.

    Raises:
        KeyRefused: The key is not that of the objects.
        CorruptObject: An object was changed.
        RunNotFound: Nothing encrypted is there.
        StoreUnavailable: The store is unreachable.
    """
    written = {}
    keys = place.key.open()
    with contextlib.closing(keys):
        store = EncryptedStore(place.store, keys, prefix=place.bound)
        for info in list(place.store.list()):
            if _state(place, info.key, keys, None) == _IN_CLEAR:
                continue
            path = folder / info.key
            path.parent.mkdir(parents=True, exist_ok=True)
            written[info.key] = download(store, info.key, path).size
    if not written:
        raise RunNotFound(f"there is nothing encrypted in {place.store.url}")
    return written


def facts(done: RewrapResult) -> dict[str, Any]:
    """The same as plain values."""
    return asdict(done)


_PENDING, _ALREADY, _GONE, _IN_CLEAR = "pending", "already", "gone", "unencrypted"


def _state(place: Place, key: str, old: KeyService, new: KeyService | None) -> str:
    """Decide what to do with an object, by unwrapping its data key.

    Raises:
        KeyRefused: Neither key opens it.
    """
    try:
        raw = place.store.read(key, start=0, length=HEADER_BYTES)
    except ObjectNotFound:
        return _GONE
    if not raw.startswith(MAGIC):
        _check_in_clear(place.store, key)
        return _IN_CLEAR
    where = f"{key!r} in {place.store.url}"
    wrapped = Header.decode(raw, where).wrapped
    context = context_of(place.bound + key)
    try:
        try:
            old.unwrap(wrapped, context)
        except KeyRefused:
            if new is None:
                raise
            new.unwrap(wrapped, context)  # An earlier call has been here.
            return _ALREADY
    except CorruptObject as error:
        raise CorruptObject(f"{where}: {error}") from error
    is_newest = isinstance(old, KeyFile) and old.is_newest(wrapped)
    return _ALREADY if new is None and is_newest else _PENDING


def _check_in_clear(store: ObjectStore, key: str) -> None:
    """Check that an object does not look unencrypted because of a wrong byte.

    The key that it is encrypted with would be given up.

    Raises:
        CorruptObject: What arrives of it is not what was written.
    """
    parts = stream(store, key)
    if next(parts, b"").startswith(MAGIC):
        raise CorruptObject(
            f"{key!r} in {store.url} was read twice, and differently: try again"
        )
    for _ in parts:
        pass


def _rewrap_one(store: EncryptedStore, key: str, new: KeyService | None) -> bool:
    """Whether an object was still there, and as it was."""
    try:
        store.rewrap(key, keys=new)
    except (ObjectChanged, ObjectNotFound):
        return False
    return True


def _bound(store: ObjectStore, url: str) -> str:
    """The encryption context of the objects at a URL, from what is stored there."""
    for key, bound in ((INDEX_KEY, DATASET), (CARD, EXPORT)):
        with contextlib.suppress(ObjectNotFound):
            store.stat(key)
            return bound
    return place_of_url(url)


def _name_in_job(place: Place, run: RunFolder, to: KeyName) -> None:
    """Write the new key into the run's job, for later readers of the run."""
    job = run.read_spec()
    run.write_job(_with_key(job, to))
    if run_store.in_bucket(job):
        keys = to.open()
        with contextlib.closing(keys):
            store = EncryptedStore(place.store, keys, prefix=place.bound)
            upload(store, run.job.name, run.job)


def _with_key(job: JobSpec, key: KeyName) -> JobSpec:
    spec = EncryptionSpec(key=key.name, endpoint=key.endpoint)
    return replace(job, storage=replace(job.storage, encryption=spec))
