"""Measures the use of a store: calls, requests, bytes and seconds, as on a bill.

A call may be several requests (parts, pages, attempts). Bytes are those of the
content; what failed calls moved is not known.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Unpack

from cloud_adapters.storage.request_count import RequestCount, counting
from federation.events import StoreUse
from federation.protocols import (
    Buffer,
    Clock,
    ObjectInfo,
    ObjectStore,
    PutArguments,
    ReadArguments,
)

SAME_REGION = "same region"
OTHER_REGION = "other region"
INTERNET = "internet"
THIS_MACHINE = "this machine"
UNKNOWN = "unknown"

_CLOUDS = {"s3": "aws", "gs": "gcp"}


def way_to(scheme: str, region: str, *, from_cloud: str, from_region: str) -> str:
    """Name the route between a place and a store, which determines the price.

    Args:
        scheme: Scheme of the store's URL.
        region: Region of the bucket; empty if unknown.
        from_cloud: Cloud of the place: ``aws``, ``gcp``, another, or empty if unknown.
        from_region: Its region there; empty if unknown.

    Returns:
        One of the five constants of this module.
    """
    if scheme not in _CLOUDS:
        return THIS_MACHINE
    if not from_cloud:
        return UNKNOWN
    if from_cloud != _CLOUDS[scheme]:
        return INTERNET
    if not region or not from_region:
        return UNKNOWN
    return SAME_REGION if region == from_region else OTHER_REGION


class Meter:
    """Adds up calls by operation; threads may share it."""

    def __init__(self) -> None:
        """Begin at nothing."""
        self._lock = threading.Lock()
        self._uses: dict[str, StoreUse] = {}

    def add(self, use: StoreUse) -> None:
        """Record a call, or several."""
        with self._lock:
            self._uses[use.operation] = use.plus(self._uses.get(use.operation))

    @property
    def is_used(self) -> bool:
        """Whether there were calls since the last time."""
        return bool(self._uses)

    def take(self) -> Sequence[StoreUse]:
        """Return the calls since the last time, by name of the operation."""
        with self._lock:
            uses, self._uses = self._uses, {}
        return [uses[operation] for operation in sorted(uses)]


class MeteredStore:
    """A ``federation.protocols.ObjectStore`` that records each call to another one."""

    def __init__(self, store: ObjectStore, meter: Meter, clock: Clock) -> None:
        """Note calls to ``store`` in ``meter``, timed by ``clock``."""
        self._store = store
        self._meter = meter
        self._clock = clock

    @property
    def url(self) -> str:
        """Where it is."""
        return self._store.url

    def put(
        self, key: str, data: Iterable[Buffer], **options: Unpack[PutArguments]
    ) -> ObjectInfo:
        """Write an object whole or not at all; see ``ObjectStore.put``."""
        with self._call("put") as note:
            info = self._store.put(key, data, **options)
            note.sent_bytes = info.size
        return info

    def read(self, key: str, **options: Unpack[ReadArguments]) -> bytes:
        """Bytes of an object; see ``ObjectStore.read``."""
        with self._call("read") as note:
            content = self._store.read(key, **options)
            note.received_bytes = len(content)
        return content

    def stat(self, key: str) -> ObjectInfo:
        """All that is known of an object; see ``ObjectStore.stat``."""
        with self._call("stat"):
            return self._store.stat(key)

    def list(self, prefix: str = "", *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Objects under a prefix, in the order of their keys."""
        # The seconds are the consumer's too: the pages come while it works.
        with self._noted("list") as note:
            found = self._store.list(prefix, start_after=start_after)
            while True:
                # What the consumer asks of others meanwhile is not this call's.
                with counting(note.requests):
                    info = next(found, None)
                if info is None:
                    return
                yield info

    def delete(self, key: str) -> None:
        """Remove an object; nothing happens if there is none."""
        with self._call("delete"):
            self._store.delete(key)

    def close(self) -> None:
        """Let go of connections."""
        self._store.close()

    @contextmanager
    def _call(self, operation: str) -> Iterator["_Note"]:
        with self._noted(operation) as note, counting(note.requests):
            yield note

    @contextmanager
    def _noted(self, operation: str) -> Iterator["_Note"]:
        note, failed = _Note(), 1
        begin = self._clock.monotonic()
        try:
            yield note
            failed = 0
        except GeneratorExit:  # The caller has seen enough.
            failed = 0
            raise
        finally:
            self._meter.add(
                StoreUse(
                    operation=operation,
                    calls=1,
                    failed=failed,
                    sent_bytes=note.sent_bytes,
                    received_bytes=note.received_bytes,
                    seconds=self._clock.monotonic() - begin,
                    requests=note.requests.number,
                )
            )


class _Note:
    """What is known of a call; its bytes when it has gone well."""

    def __init__(self) -> None:
        self.sent_bytes = 0
        self.received_bytes = 0
        self.requests = RequestCount()
