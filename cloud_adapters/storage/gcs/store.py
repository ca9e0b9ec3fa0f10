"""Objects in a bucket of Google Cloud Storage.

An object's version is its generation, which the service never gives twice. Not here:
errors (``errors``), single requests (``calls``, over ``transport``), and what makes
writes safe to repeat (``write``).

Importing this takes a while: ``cloud_adapters.urls`` does so when such a store is
opened.
"""

import re
import secrets
from collections.abc import Generator, Iterable, Iterator
from typing import Unpack

import requests
from google.auth.credentials import Credentials
from google.cloud.storage import Blob, Bucket

from cloud_adapters.storage.gcs import errors as gcs_errors
from cloud_adapters.storage.gcs.calls import PUT_ID, GcsCalls, decoded, info_of
from cloud_adapters.storage.gcs.write import ABSENT, ObjectWrite
from cloud_adapters.storage.object_keys import (
    CheckedPut,
    CheckedRead,
    folder_of,
    key_in,
    name_in,
)
from cloud_adapters.storage.resumed_read import PIECE_BYTES, Answer, ResumedRead
from cloud_adapters.storage.retry import Retry
from federation.errors import ObjectChanged, ObjectNotFound, StoreForbidden
from federation.protocols import Buffer, ObjectInfo, PutArguments, ReadArguments

BLOCK_BYTES = 256 * 1024  # Chunks are multiples of this, but for the last.
# Each waits for an answer, so few and large ones: benchmarks/storage_cloud.py.
CHUNK_BYTES = 32 * 1024 * 1024

_FIELDS = "nextPageToken,items(name,size,generation,crc32c,metadata,updated)"
_BEYOND = 416  # The range begins behind the object's end.


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
        self._prefix = folder_of(prefix)
        self._calls = GcsCalls(
            bucket,
            endpoint=endpoint,
            credentials=credentials,
            retry=retry or Retry(),
        )
        self._kms_key = kms_key
        self._chunk_bytes = chunk_bytes

    @property
    def url(self) -> str:
        """Where it is."""
        return f"gs://{self._calls.bucket_name}/{self._prefix}".rstrip("/")

    def put(
        self, key: str, data: Iterable[Buffer], **options: Unpack[PutArguments]
    ) -> ObjectInfo:
        """Write an object whole or not at all; see ``ObjectStore.put``.

        The service compares the content with its CRC32C before giving it its name.
        The SHA-256 has to be known when an upload begins: ``stat`` has that of
        contents of one chunk and of those that can be gone through twice, such as
        lists and files, and None of streams.
        """
        write = self._write(key, options)
        return info_of(key, write.put(data, self._chunk_bytes, in_parts=False))

    def put_in_parts(
        self, key: str, content: bytes, **options: Unpack[PutArguments]
    ) -> ObjectInfo:
        """Write even a small content by a session; see ``probe.WritesInParts``."""
        write = self._write(key, options)
        return info_of(key, write.put([content], self._chunk_bytes, in_parts=True))

    def _write(self, key: str, options: PutArguments) -> ObjectWrite:
        put, doing = CheckedPut(**options), f"write {key!r} to {self.url}"
        return ObjectWrite(
            calls=self._calls,
            name=name_in(self._prefix, key),
            metadata={**put.kept, PUT_ID: secrets.token_hex(16)},
            generation=ABSENT if put.if_absent else _generation(put.if_version, doing),
            kms_key=self._kms_key,
            doing=doing,
        )

    def read(self, key: str, **options: Unpack[ReadArguments]) -> bytes:
        """Bytes of an object; see ``ObjectStore.read``."""
        part, name = CheckedRead(**options), name_in(self._prefix, key)
        doing = f"read {key!r} of {self.url}"
        generation = _generation(part.if_version, doing)
        retry = self._calls.retry
        if part.length == 0:  # HTTP has no such range.
            retry.call(lambda _: self._calls.lookup(name, doing, generation))
            return b""

        def ask(begin: int, end: int | None, version: str | None) -> Answer | None:
            # "gzip": the service sends what is stored, whatever its encoding.
            headers = {"accept-encoding": "gzip"}
            if begin or end is not None:
                headers["range"] = f"bytes={begin}-{'' if end is None else end - 1}"
            query = "" if version is None else f"&ifGenerationMatch={version}"
            answer = self._calls.get_media(name, query, headers, doing)
            return _taken(answer, doing)

        read = ResumedRead(
            ask,
            doing=doing,
            start=part.start,
            length=part.length,
            version=part.if_version,
            clock=retry.clock,
        )
        try:
            return retry.call(lambda _: read.attempt())
        except StoreForbidden as error:
            raise self._calls.told_apart(name, doing, error) from error

    def stat(self, key: str) -> ObjectInfo:
        """All that the store knows of an object; see ``ObjectStore.stat``."""
        name, doing = name_in(self._prefix, key), f"look up {key!r} of {self.url}"
        blob = self._calls.retry.call(lambda _: self._calls.lookup(name, doing))
        return info_of(key, blob)

    def list(self, prefix: str = "", *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Objects under a prefix in the order of their keys; see ``ObjectStore.list``.

        Names in the bucket that are no keys, such as the "folders" that Google's
        console makes, are passed over.
        """
        doing = f"list {prefix!r} of {self.url}"
        token: str | None = None

        def page(bucket: Bucket) -> tuple[list[Blob], str | None]:
            # One iterator a page: after an error it would seem to be at its end.
            blobs = bucket.list_blobs(
                prefix=self._prefix + prefix or None,
                start_offset=self._prefix + start_after or None,
                fields=_FIELDS,
                page_token=token,
                retry=None,
            )
            return [*next(blobs.pages)], blobs.next_page_token

        while True:
            blobs, following = self._calls.call(doing, page)
            for blob in blobs:
                key = key_in(self._prefix, blob.name)
                if key is not None and key > start_after:
                    yield info_of(key, blob)
            if following is None:
                return
            if following == token:
                raise gcs_errors.UNCLEAR.told(doing, "the same page follows itself")
            token = following

    def delete(self, key: str) -> None:
        """Remove an object; nothing happens if there is none."""
        name, doing = name_in(self._prefix, key), f"delete {key!r} of {self.url}"
        try:
            self._calls.delete(name, doing)
        except StoreForbidden as error:
            refusal = self._calls.told_apart(name, doing, error)
            if not isinstance(refusal, ObjectNotFound):
                raise

    def close(self) -> None:
        """Let go of connections."""
        self._calls.close()


def _generation(version: str | None, doing: str) -> int | None:
    """Read a version as a generation.

    Raises:
        ObjectChanged: It is none, so no object has it. The service takes 0 for "no
            object", and refuses what is no number.
    """
    if version is None:
        return None
    if version.isascii() and version.isdecimal() and int(version) > 0:
        return int(version)
    raise ObjectChanged(f"cannot {doing}: no object has the version {version[:40]!r}")


def _taken(answer: requests.Response, doing: str) -> Answer | None:
    if answer.status_code == _BEYOND:
        answer.close()
        return None

    def pieces() -> Generator[bytes, None, None]:
        with answer, gcs_errors.translated(doing):
            # read() would lose what came before a cut.
            while piece := answer.raw.read1(PIECE_BYTES, decode_content=False):
                yield piece

    # "bytes 3-7/10", or all there is.
    size = answer.headers.get("Content-Range", "").rpartition("/")[2]
    crc32c = re.search(r"crc32c=([^,]+)", answer.headers.get("X-Goog-Hash", ""))
    return Answer(
        version=answer.headers.get("X-Goog-Generation"),
        size=int(size) if size.isdecimal() else None,
        crc32c=None if crc32c is None else decoded(crc32c[1]),
        pieces=pieces(),
    )
