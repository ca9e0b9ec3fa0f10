"""Objects in this process's memory: for tests, and for runs that store nothing."""

import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Unpack

from cloud_adapters.storage.checksums import Checksums
from cloud_adapters.storage.object_keys import CheckedPut, CheckedRead, check_key
from federation.errors import ObjectChanged, ObjectExists, ObjectNotFound
from federation.protocols import Buffer, ObjectInfo, PutArguments, ReadArguments


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
        self, key: str, data: Iterable[Buffer], **options: Unpack[PutArguments]
    ) -> ObjectInfo:
        """Write an object whole or not at all; see ``ObjectStore.put``."""
        check_key(key)
        put = CheckedPut(**options)
        kept = put.kept
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
        return self._write(content, info, put)

    def read(self, key: str, **options: Unpack[ReadArguments]) -> bytes:
        """Bytes of an object; see ``ObjectStore.read``."""
        part = CheckedRead(**options)
        content, info = self._find(key)
        if part.if_version not in {None, info.version}:
            raise ObjectChanged(f"{key!r} of the memory store has changed")
        end = None if part.length is None else part.start + part.length
        return content[part.start : end]

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

    def close(self) -> None:
        """Do nothing: there are no connections."""

    def _write(self, content: bytes, info: ObjectInfo, put: CheckedPut) -> ObjectInfo:
        key = info.key
        with self._lock:
            found = self._objects.get(key)
            if put.if_absent and found is not None:
                raise ObjectExists(f"{key!r} already exists in the memory store")
            if put.if_version not in {None, found[1].version if found else None}:
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
