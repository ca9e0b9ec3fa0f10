"""Whether a store keeps to the conditions of writes, found out by trying.

Checkpoints stand on one promise: of two writers that create one object, one is
refused. A service that takes a condition and ignores it reports success to both, and
nothing that happens later would show it: two coordinators would complete one run, each
with a model of its own. So try a store before relying on it, on
objects of the probe's own, with contents of one request and of several parts, whose
conditions services check in different places of their code.

What a probe cannot show is a race that the service loses now and then.
"""

import contextlib
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, Unpack, runtime_checkable

from federation.errors import (
    ObjectChanged,
    ObjectExists,
    ObjectNotFound,
    StoreError,
    StoreUnavailable,
)
from federation.protocols import ObjectInfo, ObjectStore, PutArguments

PREFIX = "probe/"
# What a killed probe has left goes with a later one.
LEFTOVER_SECONDS = 3600.0
NUM_RACERS = 4


@runtime_checkable
class WritesInParts(Protocol):
    """A store that writes large contents by other requests than small ones."""

    def put_in_parts(
        self, key: str, content: bytes, **options: Unpack[PutArguments]
    ) -> ObjectInfo:
        """Write a content, however small it is, as a large one is written."""
        ...


@runtime_checkable
class RemovesUnfinished(Protocol):
    """A store in which uploads of killed processes leave parts."""

    def remove_unfinished(self, *, older_seconds: float) -> int:
        """Remove those that were started so long ago, and return how many."""
        ...


class Put(Protocol):
    """One way to write an object; see ``ObjectStore.put``."""

    def __call__(self, content: bytes, **options: Unpack[PutArguments]) -> ObjectInfo:
        """Write it under the probe's key."""
        ...


def check_conditions_kept(store: ObjectStore) -> None:
    """Try creates and changes that must be refused, small and in parts.

    About twenty small requests; all objects are below ``PREFIX`` and removed again.

    Raises:
        StoreUnavailable: The store made a write that it had to refuse, or refused one
            that it had to make; or it is unreachable.
        StoreForbidden: These credentials may not write, read or delete there.
    """
    for size, put, key in _ways(store):
        with _removed(store, key):
            _check_way(store, put, key, size)
    _check_race(store)
    _remove_leftovers(store)


def _ways(store: ObjectStore) -> Iterator[tuple[str, Put, str]]:
    """Ways of writing, each with the words for it and a key of its own."""
    key = f"{PREFIX}{secrets.token_hex(16)}"

    def whole(content: bytes, **options: Unpack[PutArguments]) -> ObjectInfo:
        return store.put(key, [content], **options)

    yield "a small object", whole, key
    if not isinstance(store, WritesInParts):
        return
    in_parts, key_of_parts = store, f"{PREFIX}{secrets.token_hex(16)}"

    def parts(content: bytes, **options: Unpack[PutArguments]) -> ObjectInfo:
        return in_parts.put_in_parts(key_of_parts, content, **options)

    yield "an object in parts", parts, key_of_parts


def _check_way(store: ObjectStore, put: Put, key: str, size: str) -> None:
    first = put(b"first", if_absent=True)
    _expect(
        ObjectExists,
        lambda: put(b"second", if_absent=True),
        _ignored(store, size, "was created a second time"),
    )
    try:
        put(b"third", if_version=first.version)
    except ObjectChanged as error:
        raise StoreUnavailable(
            f"{store.url} refuses conditional writes that it must accept: {size} was "
            f"not changed although its version {first.version!r} was given; {_ADVICE}"
        ) from error
    _expect(
        ObjectChanged,
        lambda: put(b"fourth", if_version=first.version),
        _ignored(store, size, "was changed under an outdated version"),
    )
    if store.read(key) != b"third":
        raise _ignored(store, size, "was changed by a write that was refused")


def _check_race(store: ObjectStore) -> None:
    """Create one object from several threads at once."""
    key = f"{PREFIX}{secrets.token_hex(16)}"

    def create(number: int) -> int:
        try:
            store.put(key, [str(number).encode()], if_absent=True)
        except ObjectExists:
            return 0
        return 1

    with _removed(store, key), ThreadPoolExecutor(NUM_RACERS, "probe") as pool:
        num_made = sum(pool.map(create, range(NUM_RACERS)))
    if num_made != 1:
        what = f"was created by {num_made} of {NUM_RACERS} at once"
        raise _ignored(store, "a small object", what)


def _expect(
    refusal: type[StoreError], write: Callable[[], object], otherwise: StoreError
) -> None:
    """Make a write that has to be refused."""
    try:
        write()
    except refusal:
        return
    raise otherwise


_ADVICE = (
    "checkpoints need a service that checks If-None-Match and If-Match on PutObject "
    "and CompleteMultipartUpload, or ifGenerationMatch (docs/howto/s3.md names "
    "services), or a folder (storage.url = file://FOLDER)"
)


def _ignored(store: ObjectStore, size: str, what: str) -> StoreError:
    return StoreUnavailable(
        f"{store.url} ignores conditions of writes: {size} {what}, so two coordinators "
        f"could complete one run with different models; {_ADVICE}"
    )


@contextlib.contextmanager
def _removed(store: ObjectStore, key: str) -> Iterator[None]:
    """Remove an object at the end, and hide no error behind that."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(StoreError):
            store.delete(key)
        raise
    store.delete(key)
    try:
        store.stat(key)
    except ObjectNotFound:
        return
    raise StoreUnavailable(
        f"{store.url} still has {key!r} although it was deleted; look for a retention "
        "rule"
    )


def _remove_leftovers(store: ObjectStore) -> None:
    """Remove what probes left that were killed long ago, by the store's own clock."""
    mark = f"{PREFIX}{secrets.token_hex(16)}"
    found = [info for info in store.list(PREFIX) if info.updated is not None]
    if not found:
        return
    with _removed(store, mark):
        now = store.put(mark, [b"now"]).updated or store.stat(mark).updated
        for info in found:
            if now and info.updated and now - info.updated > LEFTOVER_SECONDS:
                store.delete(info.key)
