"""A store over another that fails on the way, as networks and disks do."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

from federation.errors import StoreUnavailable
from federation.protocols import ObjectInfo, ObjectStore


class FaultyStore:
    """Passes everything on, and lets a test meddle with every read."""

    url = "faulty://"

    def __init__(
        self, store: ObjectStore, meddle: Callable[[int, bytes], bytes] | None = None
    ) -> None:
        """Meddle with the n-th read, from 1, of the content that it should have."""
        self.store = store
        self.meddle = meddle or (lambda _, content: content)
        self.ranges: list[tuple[int, int | None]] = []
        self._lock = threading.Lock()

    def read(
        self,
        key: str,
        *,
        start: int = 0,
        length: int | None = None,
        if_version: str | None = None,
    ) -> bytes:
        with self._lock:
            self.ranges.append((start, length))
            number = len(self.ranges)
        content = self.store.read(
            key, start=start, length=length, if_version=if_version
        )
        return self.meddle(number, content)

    def put(self, *args: Any, **options: Any) -> ObjectInfo:
        return self.store.put(*args, **options)

    def stat(self, key: str) -> ObjectInfo:
        return self.store.stat(key)

    def list(self, prefix: str = "", *, start_after: str = "") -> Iterator[ObjectInfo]:
        return self.store.list(prefix, start_after=start_after)

    def delete(self, key: str) -> None:
        self.store.delete(key)

    def close(self) -> None:
        self.store.close()


class FlippingStore(FaultyStore):
    """Flips one bit of one byte in a range, and leaves whole reads alone."""

    def __init__(
        self, store: ObjectStore, at: int, *, times: int = 1 << 30, key: str = ""
    ) -> None:
        super().__init__(store)
        self.at = at
        self.times = times
        self.key = key

    def read(self, key: str, **options: Any) -> bytes:
        content = super().read(key, **options)
        is_range = options.get("start") or options.get("length") is not None
        place = self.at - options.get("start", 0)
        is_other = bool(self.key) and key != self.key
        if is_other or not is_range or not 0 <= place < len(content) or not self.times:
            return content
        self.times -= 1
        return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


def outage(*numbers: int) -> Callable[[int, bytes], bytes]:
    """Let reads of these numbers fail for a while."""

    def meddle(number: int, content: bytes) -> bytes:
        if number in numbers:
            raise StoreUnavailable("the network is gone", temporary=True)
        return content

    return meddle
