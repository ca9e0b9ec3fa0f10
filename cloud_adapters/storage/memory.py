"""Objects in this process's memory: for tests, and for runs that keep nothing."""

import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from cloud_adapters.storage.checksums import Checksums
from cloud_adapters.storage.object_keys import (
    check_conditions,
    check_key,
    check_metadata,
    check_range,
)
from federation.errors import ObjectChanged, ObjectExists, ObjectNotFound
from federation.protocols import Buffer, ObjectInfo


class MemoryStore:
    """A ``federation.protocols.ObjectStore`` that ends with its process."""

    def __init__(self) -> None:
        """Start empty."""
        self._lock = threading.Lock()
        self._objects: dict[str, tuple[bytes, ObjectInfo]] = {}
        self._num_puts = 0

    @property
    def url(self) -> str:
        """Where it is."""
        return "memory://"

    def put(
        self,
        key: str,
        data: Iterable[Buffer],
        *,
        if_absent: bool = False,
        if_version: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> ObjectInfo:
        """Write an object whole or not at all; see ``ObjectStore.put``."""
        check_key(key)
        check_conditions(if_absent=if_absent, if_version=if_version)
        kept = check_metadata(metadata)
        content = b"".join(data)
        checksums = Checksums()
        checksums.update(content)
        info = ObjectInfo(
            key=key,
            size=len(content),
            version="",
            crc32c=checksums.crc32c,
            sha256=checksums.sha256,
            metadata=kept,
        )
        return self._write(content, info, if_absent=if_absent, if_version=if_version)

    def read(
        self,
        key: str,
        *,
        start: int = 0,
        length: int | None = None,
        if_version: str | None = None,
    ) -> bytes:
        """Bytes of an object; see ``ObjectStore.read``."""
        check_range(start, length)
        content, info = self._find(key)
        if if_version is not None and info.version != if_version:
            raise ObjectChanged(f"{key!r} of the memory store has changed")
        return content[start : None if length is None else start + length]

    def stat(self, key: str) -> ObjectInfo:
        """All that is known of an object; see ``ObjectStore.stat``."""
        return self._find(key)[1]

    def list(self, prefix: str = "", *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Objects under a prefix, as they were at the call, in key order."""
        with self._lock:
            infos = [info for _, info in self._objects.values()]
        found = [i for i in infos if i.key.startswith(prefix) and i.key > start_after]
        return iter(sorted(found, key=lambda info: info.key))

    def delete(self, key: str) -> None:
        """Remove an object; nothing happens if there is none."""
        check_key(key)
        with self._lock:
            self._objects.pop(key, None)

    def copy(self, source: str, target: str, *, if_absent: bool = False) -> ObjectInfo:
        """Copy an object; see ``ObjectStore.copy``."""
        check_key(target)
        content, info = self._find(source)
        return self._write(content, replace(info, key=target), if_absent=if_absent)

    def close(self) -> None:
        """Do nothing: there are no connections."""

    def _write(
        self,
        content: bytes,
        info: ObjectInfo,
        *,
        if_absent: bool,
        if_version: str | None = None,
    ) -> ObjectInfo:
        key = info.key
        with self._lock:
            found = self._objects.get(key)
            if if_absent and found is not None:
                raise ObjectExists(f"{key!r} exists already in the memory store")
            if if_version is not None and (
                found is None or found[1].version != if_version
            ):
                raise ObjectChanged(f"{key!r} of the memory store has changed")
            self._num_puts += 1
            info = replace(info, version=str(self._num_puts))
            self._objects[key] = (content, info)
        return info

    def _find(self, key: str) -> tuple[bytes, ObjectInfo]:
        check_key(key)
        with self._lock:
            found = self._objects.get(key)
        if found is None:
            raise ObjectNotFound(f"there is no {key!r} in the memory store")
        return found
