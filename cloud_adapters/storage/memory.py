"""Objects in this process's memory: for tests, and for runs that keep nothing."""

import threading
from collections.abc import Iterable, Iterator

from cloud_adapters.storage.keys import check_key, check_range
from federation.errors import ObjectExists, ObjectNotFound
from federation.protocols import Buffer, ObjectInfo


class MemoryStore:
    """A ``federation.protocols.ObjectStore`` that ends with its process."""

    def __init__(self) -> None:
        """Start empty."""
        self._lock = threading.Lock()
        self._objects: dict[str, tuple[bytes, ObjectInfo]] = {}
        self._num_puts = 0

    def put(
        self, key: str, data: Iterable[Buffer], *, if_absent: bool = False
    ) -> ObjectInfo:
        """Write an object whole or not at all; see ``ObjectStore.put``."""
        check_key(key)
        content = b"".join(data)
        with self._lock:
            if if_absent and key in self._objects:
                raise ObjectExists(f"{key!r} exists already in the memory store")
            self._num_puts += 1
            info = ObjectInfo(key=key, size=len(content), version=str(self._num_puts))
            self._objects[key] = (content, info)
        return info

    def read(self, key: str, *, start: int = 0, length: int | None = None) -> bytes:
        """Bytes of an object; see ``ObjectStore.read``."""
        check_range(start, length)
        content, _ = self._find(key)
        return content[start : None if length is None else start + length]

    def stat(self, key: str) -> ObjectInfo:
        """Size and version of an object; see ``ObjectStore.stat``."""
        return self._find(key)[1]

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Objects under a prefix, as they were at the call, in key order."""
        with self._lock:
            infos = [info for _, info in self._objects.values()]
        found = [info for info in infos if info.key.startswith(prefix)]
        return iter(sorted(found, key=lambda info: info.key))

    def delete(self, key: str) -> None:
        """Remove an object; nothing happens if there is none."""
        check_key(key)
        with self._lock:
            self._objects.pop(key, None)

    def _find(self, key: str) -> tuple[bytes, ObjectInfo]:
        check_key(key)
        with self._lock:
            found = self._objects.get(key)
        if found is None:
            raise ObjectNotFound(f"there is no {key!r} in the memory store")
        return found
