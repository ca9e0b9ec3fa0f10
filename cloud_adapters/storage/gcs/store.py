"""Objects in a bucket of Google Cloud Storage.

An object's version is its generation, which the service never gives twice. Not here:
errors (``gcs_errors``), connections (``gcs_http``), contents (``gcs_upload``,
``gcs_read``), and what makes writes safe to repeat (``gcs_write``).

Importing this takes a while: ``cloud_adapters.urls`` does so when such a store is
opened.
"""

import secrets
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from itertools import chain, count
from typing import Unpack

from google.auth.credentials import Credentials

from cloud_adapters.storage.checksums import Checksums, checksums_of
from cloud_adapters.storage.gcs import errors as gcs_errors
from cloud_adapters.storage.gcs.http import Ask, GcsHttp, json_of
from cloud_adapters.storage.gcs.lookup import (
    Resource,
    lookup,
    number_in,
    object_path,
    told_apart,
)
from cloud_adapters.storage.gcs.read import ObjectRead
from cloud_adapters.storage.gcs.upload import (
    BLOCK_BYTES,
    CHUNK_BYTES,
    PUT_ID,
    SHA256,
    NewObject,
    Piece,
    UploadSession,
    chunks,
    decoded,
    insert,
)
from cloud_adapters.storage.gcs.write import ABSENT, ObjectWrite
from cloud_adapters.storage.object_keys import (
    CheckedPut,
    CheckedRead,
    folder_of,
    key_in,
    name_in,
)
from cloud_adapters.storage.retry import Retry
from federation.errors import ObjectChanged, ObjectNotFound, StoreError, StoreForbidden
from federation.protocols import Buffer, ObjectInfo, PutArguments, ReadArguments

MAX_SESSIONS = 3  # Of one write, where the service forgets them.

_FIELDS = "name,size,generation,crc32c,metadata,updated"
_OWN_METADATA = frozenset({PUT_ID, SHA256})


class GcsStore:
    """A ``federation.protocols.ObjectStore`` over Cloud Storage."""

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        endpoint: str | None = None,
        credentials: Credentials | None = None,
        kms_key: str | None = None,
        retry: Retry | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """Name a place; nothing is read or written yet.

        Args:
            bucket: Its name.
            prefix: Prefix of every key, without a slash at the end; empty for the whole
                bucket.
            endpoint: Instead of Google's own, such as a private network's. To one
                without TLS goes no token, unless ``credentials`` are given.
            credentials: By default those that the environment provides.
            kms_key: Customer-managed key that encrypts what is written,
                ``projects/P/locations/L/keyRings/R/cryptoKeys/K``.
            retry: How often to try.
            chunk_bytes: What is sent in one request.

        Raises:
            ValueError: The prefix is no key, or ``chunk_bytes`` is not a multiple of
                256 KiB.
        """
        if chunk_bytes <= 0 or chunk_bytes % BLOCK_BYTES:
            raise ValueError(f"chunk_bytes is {chunk_bytes}, not a multiple of 256 KiB")
        self._bucket = bucket
        self._prefix = folder_of(prefix)
        self._http = GcsHttp(endpoint, credentials)
        self._kms_key = kms_key
        self._retry = retry or Retry()
        self._chunk_bytes = chunk_bytes

    @property
    def url(self) -> str:
        """Where it is."""
        return f"gs://{self._bucket}/{self._prefix}".rstrip("/")

    def put(
        self, key: str, data: Iterable[Buffer], **options: Unpack[PutArguments]
    ) -> ObjectInfo:
        """Write an object whole or not at all; see ``ObjectStore.put``.

        The service compares the content with its CRC32C before giving it its name.
        The SHA-256 has to be known when an upload begins: ``stat`` has that of
        contents of one chunk and of those that can be gone through twice, such as
        lists and files, and None of streams.
        """
        writing = self._writing(key, options)
        new = writing.new
        parts = chunks(data, self._chunk_bytes)
        first = next(parts)
        if not first.is_last:
            again = None if iter(data) is data else data
            parts = chain([first], parts)
            return self._upload(writing, parts, checksums_of(data), again=again)
        whole = Checksums()
        whole.update(first.content)
        resource = writing.repeated(
            lambda it: insert(self._http, new, first.content, whole, it)
        )
        self._check(resource, new, size=whole.size, crc32c=whole.crc32c)
        return _info(key, resource)

    def put_in_parts(
        self, key: str, content: bytes, **options: Unpack[PutArguments]
    ) -> ObjectInfo:
        """Write even a small content by a session; see ``probe.WritesInParts``."""
        writing = self._writing(key, options)
        parts = chunks([content], self._chunk_bytes)
        return self._upload(writing, parts, checksums_of([content]))

    def _writing(self, key: str, options: PutArguments) -> ObjectWrite:
        put = CheckedPut(**options)
        new = self._new(key, put.kept, f"write {key!r} to {self.url}")
        generation = ABSENT if put.if_absent else _generation(put.if_version, new.doing)
        return ObjectWrite(
            http=self._http, retry=self._retry, new=new, generation=generation
        )

    def _upload(
        self,
        writing: ObjectWrite,
        parts: Iterable[Piece],
        known: Checksums | None,
        *,
        again: Iterable[Buffer] | None = None,
    ) -> ObjectInfo:
        """Send a content by an upload session.

        Args:
            writing: The write.
            parts: The content.
            known: Of the content, where it was read before.
            again: The content once more, where it can be read again: for another
                session if the service forgets the first.
        """
        new = writing.new
        for number in count(1):
            session = UploadSession(self._http, self._retry, new, known)
            try:
                resource = writing.through(session, parts)
                break
            except gcs_errors.UploadGone:
                if again is None or number == MAX_SESSIONS:
                    raise
            parts = chunks(again, self._chunk_bytes)
        sums = known or session.sums
        self._check(resource, new, size=sums.size, crc32c=sums.crc32c)
        return _info(new.name.removeprefix(self._prefix), resource)

    def _check(
        self, resource: Resource, new: NewObject, *, size: int, crc32c: str
    ) -> None:
        """Remove an object that differs from what was sent.

        Raises:
            CorruptObject: It is not.
        """
        found = number_in(resource, "size", new.doing)
        if "crc32c" not in resource:
            raise gcs_errors.UNCLEAR.told(new.doing, "no crc32c in its answer")
        actual = f"{found} bytes of CRC32C {decoded(resource['crc32c'])}"
        expected = f"{size} bytes of CRC32C {crc32c}"
        if actual != expected:
            generation = number_in(resource, "generation", new.doing)
            self._delete(new.name, new.doing, str(generation))
            raise gcs_errors.corrupt(new.doing, f"{actual} instead of {expected}")

    def read(self, key: str, **options: Unpack[ReadArguments]) -> bytes:
        """Bytes of an object; see ``ObjectStore.read``."""
        part = CheckedRead(**options)
        path = self._path(key)
        doing = f"read {key!r} of {self.url}"
        version = _generation(part.if_version, doing)
        if part.length == 0:  # HTTP has no such range.
            self._stat(key, doing, version)
            return b""
        clock = self._retry.clock
        reading = ObjectRead(self._http, path, doing, version=version, clock=clock)
        try:
            return self._retry.call(lambda _: reading.attempt(part.start, part.length))
        except StoreForbidden as error:
            raise self._told_apart(key, doing, error) from error

    def stat(self, key: str) -> ObjectInfo:
        """All that the store knows of an object; see ``ObjectStore.stat``."""
        return _info(key, self._stat(key, f"look up {key!r} of {self.url}"))

    def _stat(self, key: str, doing: str, version: str | None = None) -> Resource:
        name = self._name(key)
        return self._retry.call(
            lambda _: lookup(
                self._http, self._bucket, name, doing=doing, generation=version
            )
        )

    def _told_apart(self, key: str, doing: str, error: StoreForbidden) -> StoreError:
        name = self._name(key)
        return told_apart(self._http, self._bucket, name, doing=doing, error=error)

    def _json(self, ask: Ask) -> Resource:
        return self._retry.call(lambda _: json_of(self._http.send(ask), ask.doing))

    def list(self, prefix: str = "", *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Objects under a prefix in the order of their keys; see ``ObjectStore.list``.

        Names in the bucket that are no keys, such as the "folders" that Google's
        console makes, are passed over.
        """
        doing = f"list {prefix!r} of {self.url}"
        params = {
            "prefix": self._prefix + prefix,
            "startOffset": self._prefix + start_after,
            "fields": f"nextPageToken,items({_FIELDS})",
        }
        params = {name: value for name, value in params.items() if value}
        while True:
            ask = Ask(
                doing=doing,
                method="GET",
                url=f"/storage/v1/b/{self._bucket}/o",
                params=params,
            )
            page = self._json(ask)
            for resource in page.get("items", ()):
                key = key_in(self._prefix, str(resource.get("name", "")))
                if key is not None and key > start_after:
                    yield _info(key, resource)
            token = page.get("nextPageToken")
            if token is None:
                return
            if token == params.get("pageToken"):
                raise gcs_errors.UNCLEAR.told(doing, "the same page follows itself")
            params = {**params, "pageToken": token}

    def delete(self, key: str) -> None:
        """Remove an object; nothing happens if there is none."""
        doing = f"delete {key!r} of {self.url}"
        try:
            self._delete(self._name(key), doing, None)
        except StoreForbidden as error:
            refusal = self._told_apart(key, doing, error)
            if not isinstance(refusal, ObjectNotFound):
                raise

    def _delete(self, name: str, doing: str, generation: str | None) -> None:
        params = {} if generation is None else {"ifGenerationMatch": generation}
        url = object_path(self._bucket, name)
        ask = Ask(doing=doing, method="DELETE", url=url, params=params, ok=_DELETED)
        try:
            self._retry.call(lambda _: self._http.send(ask))
        except ObjectNotFound:
            return  # Never there, or the answer to an earlier attempt was lost.

    def close(self) -> None:
        """Let go of connections."""
        self._http.close()

    def _name(self, key: str) -> str:
        return name_in(self._prefix, key)

    def _path(self, key: str) -> str:
        return object_path(self._bucket, self._name(key))

    def _new(self, key: str, metadata: Mapping[str, str], doing: str) -> NewObject:
        return NewObject(
            bucket=self._bucket,
            name=self._name(key),
            metadata=metadata,
            put_id=secrets.token_hex(16),
            kms_key=self._kms_key,
            doing=doing,
        )


_DELETED = frozenset({200, 204})


def _generation(version: str | None, doing: str) -> str | None:
    """Read a version as a generation.

    Raises:
        ObjectChanged: It is none, so no object has it. The service takes 0 for "no
            object", and refuses what is no number.
    """
    if version is None or (version.isdecimal() and int(version) > 0):
        return version
    raise ObjectChanged(f"cannot {doing}: no object has the version {version[:40]!r}")


def _info(key: str, resource: Resource) -> ObjectInfo:
    """Read an object's information from the API's resource."""
    metadata: Mapping[str, str] = resource.get("metadata", {})
    doing = f"look at {key!r}"
    crc = resource.get("crc32c")
    updated = resource.get("updated")
    return ObjectInfo(
        key=key,
        size=number_in(resource, "size", doing),
        version=str(number_in(resource, "generation", doing)),
        crc32c=None if crc is None else decoded(crc),
        sha256=metadata.get(SHA256),
        metadata={k: v for k, v in metadata.items() if k not in _OWN_METADATA},
        updated=None
        if updated is None
        else datetime.fromisoformat(updated).timestamp(),
    )
