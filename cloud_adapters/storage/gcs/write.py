"""Writes to Google Cloud Storage that may be repeated.

A content of one chunk goes in one request or, if it has more than the 8 MB that the
library sends so, in two. A larger one goes through an upload session: the service
keeps what has arrived, and gives the object its name when all is there, so that a
broken connection costs a chunk. One chunk is in memory.

An answer can be lost after a write was carried out. So no attempt but the first goes
out without a condition on the generation that it replaces, and where a condition
fails, the put-id in the object's metadata tells whether it was ours that came first.
"""

import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import count

import numpy as np
from google.cloud.storage import Blob, Bucket

from cloud_adapters.storage.checksums import Checksums, Crc32c, checksums_of
from cloud_adapters.storage.error_table import CORRUPT
from cloud_adapters.storage.gcs import errors as gcs_errors
from cloud_adapters.storage.gcs.calls import (
    PUT_ID,
    SHA256,
    GcsCalls,
    encoded,
    number_in,
)
from federation.errors import (
    ObjectChanged,
    ObjectExists,
    ObjectNotFound,
    StoreError,
    StoreUnavailable,
)
from federation.protocols import Buffer

ABSENT = 0  # The generation of what is not there.
MAX_SESSIONS = 3  # Of one write, where the service forgets them.
_MULTIPART_BYTES = 8 * 1024 * 1024  # What the library sends in one request.
_BINARY = "application/octet-stream"
_SMALL_BYTES = 256 * 1024

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


class ChunkReader:
    """A content as the file that the library reads, chunk by chunk.

    The first chunk is read at once, to see whether there are more. All chunks are in
    one buffer: fresh memory costs more than the copy into it. They are arrays, the one
    kind of buffer that the library's CRC32C takes and that may be written again.
    """

    def __init__(self, data: Iterable[Buffer], chunk_bytes: int) -> None:
        """Read the first chunk."""
        self._pieces = iter(data)
        self._rest = memoryview(b"")
        self._buffer = np.empty(min(chunk_bytes, _SMALL_BYTES), np.uint8)
        self.sums = Crc32c()  # Of what the library has read.
        self._first: Bytes | None = self._next(chunk_bytes)

    @property
    def is_done(self) -> bool:
        """Whether all of the content has been read."""
        return self._first is None and not self._fill()

    def whole(self) -> memoryview | None:
        """Return the content if it is one chunk."""
        if self._first is None or self._fill():
            return None
        return self._first.data

    def tell(self) -> int:
        """Return how many bytes the library has read."""
        return self.sums.size

    def read(self, size: int) -> Bytes:
        """Return the next chunk: fewer bytes than ``size`` only at the end.

        It is good until the next one is read.
        """
        chunk, self._first = self._first, None
        if chunk is None:
            chunk = self._next(size)
        self.sums.update(chunk.data)
        return chunk

    def _next(self, size: int) -> Bytes:
        filled = 0
        while filled < size and self._fill():
            if filled == len(self._buffer):  # Most contents are small.
                larger = np.empty(size, np.uint8)
                larger[:filled] = self._buffer
                self._buffer = larger
            taken = self._rest[: min(size, len(self._buffer)) - filled]
            self._buffer.data[filled : filled + taken.nbytes] = taken
            self._rest = self._rest[taken.nbytes :]
            filled += taken.nbytes
        return self._buffer[:filled]

    def _fill(self) -> bool:
        while not self._rest.nbytes:
            piece = next(self._pieces, None)
            if piece is None:
                return False
            view = memoryview(piece)
            self._rest = view.cast("B") if view.nbytes else memoryview(b"")
        return True


@dataclass(slots=True, kw_only=True)
class ObjectWrite:
    """One write.

    Attributes:
        calls: To the bucket.
        name: The whole name of the object.
        metadata: As the caller gave it, and a random put-id, which tells this write
            from every other.
        generation: That the object must have before; ``ABSENT``, or None for any.
        kms_key: Customer-managed key to encrypt it with; None for the bucket's.
        doing: For messages.
    """

    calls: GcsCalls
    name: str
    metadata: Mapping[str, str]
    generation: int | None
    kms_key: str | None
    doing: str

    def put(self, data: Iterable[Buffer], chunk_bytes: int, *, in_parts: bool) -> Blob:
        """Write a content.

        Args:
            data: The content.
            chunk_bytes: What a session sends in one request.
            in_parts: Whether even a small content goes through a session.

        Raises:
            ObjectExists: Another object has the name, and none should.
            ObjectChanged: The object has not the generation that was named.
            CorruptObject: Other bytes arrived than were sent.
            StoreError: See ``gcs.errors``.
        """
        content = ChunkReader(data, chunk_bytes)
        whole = content.whole()
        if whole is not None and len(whole) <= _MULTIPART_BYTES and not in_parts:
            sums = Checksums()
            sums.update(whole)
            return self._checked(self._insert(bytes(whole), sums), sums)
        known = checksums_of(data if whole is None else [whole])
        again = None if iter(data) is data else data
        for number in count(1):
            try:
                blob = self._upload(content, chunk_bytes, known)
                break
            except gcs_errors.UploadGone:
                if again is None or number == MAX_SESSIONS:
                    raise
            content = ChunkReader(again, chunk_bytes)
        while not content.is_done:  # A service that ended early has made an object.
            content.read(chunk_bytes)
        return self._checked(blob, known or content.sums)

    def _blob(self, bucket: Bucket, known: Checksums | None) -> Blob:
        blob = bucket.blob(self.name, kms_key_name=self.kms_key)
        blob.metadata = {**self.metadata}
        if known is not None:
            blob.metadata = {**self.metadata, SHA256: known.sha256}
            blob.crc32c = encoded(known.crc32c)  # The service compares.
        return blob

    def _insert(self, content: bytes, sums: Checksums) -> Blob:
        """Write in one request, with another attempt where it may not have arrived."""

        def attempt(number: int) -> Blob:
            generation = self.generation
            if generation is None and number > 1:
                there = self._find()
                if there is not None and self._is_ours(there):
                    return there
                generation = ABSENT if there is None else there.generation
            try:
                return self.calls.once(self.doing, lambda b: send(b, generation))
            except ObjectChanged as error:
                ours = self._ours()
                if ours is None:
                    raise self._refusal(error) from error.__cause__
                return ours

        def send(bucket: Bucket, generation: int | None) -> Blob:
            blob = self._blob(bucket, sums)
            blob.upload_from_file(
                io.BytesIO(content),
                size=len(content),
                content_type=_BINARY,
                if_generation_match=generation,
                checksum=None,
                retry=None,
            )
            return blob

        return self.calls.retry.call(attempt)

    def _upload(
        self, content: ChunkReader, chunk_bytes: int, known: Checksums | None
    ) -> Blob:
        """Write by a session, each request of which is tried again by itself."""

        def send(bucket: Bucket) -> Blob:
            blob = self._blob(bucket, known)
            blob.chunk_size = chunk_bytes
            blob.upload_from_file(
                content,
                content_type=_BINARY,
                if_generation_match=self.generation,
                checksum=None,  # It would remove whatever has the name by now.
                retry=None,
            )
            return blob

        try:
            return self.calls.once(
                self.doing, send, crc32c=lambda: encoded(content.sums.crc32c)
            )
        except BaseException as error:
            self.calls.abandon_upload()
            if isinstance(error, ObjectChanged):
                ours = self.calls.retry.call(lambda _: self._ours())
                if ours is None:
                    raise self._refusal(error) from error.__cause__
                return ours
            # The answer to the last chunk may be lost, and the session gone with it.
            if not isinstance(error, StoreUnavailable) or not content.is_done:
                raise
            ours = self.calls.retry.call(lambda _: self._ours())
            if ours is None:
                raise
            return ours

    def _checked(self, blob: Blob, sent: Checksums | Crc32c) -> Blob:
        """Remove an object that differs from what was sent.

        Raises:
            CorruptObject: It does.
        """
        if blob.crc32c is None:
            raise gcs_errors.UNCLEAR.told(self.doing, "no crc32c in its answer")
        found = f"{number_in(blob, 'size', self.doing)} bytes of CRC32C {blob.crc32c}"
        expected = f"{sent.size} bytes of CRC32C {encoded(sent.crc32c)}"
        if found != expected:
            generation = number_in(blob, "generation", self.doing)
            self.calls.delete(self.name, self.doing, generation)
            raise CORRUPT.told(self.doing, f"{found} instead of {expected}")
        return blob

    def _refusal(self, error: ObjectChanged) -> StoreError:
        if self.generation is None:  # Someone wrote between our two requests.
            return StoreUnavailable(str(error), temporary=True)
        if self.generation == ABSENT:
            return ObjectExists(f"cannot {self.doing}: an object has this key")
        return error

    def _ours(self) -> Blob | None:
        """Return the object under the name if this write made it; one attempt.

        Raises:
            StoreError: It cannot be known now; taking that for a "no" would
                report a conflict with itself.
        """
        try:
            there = self._find()
        except StoreError as error:
            if error.temporary:
                raise
            return None  # Who may write and not read keeps the first answer.
        return there if there is not None and self._is_ours(there) else None

    def _find(self) -> Blob | None:
        try:
            return self.calls.lookup(self.name, self.doing)
        except ObjectNotFound:
            return None

    def _is_ours(self, there: Blob) -> bool:
        found: Mapping[str, str] = there.metadata or {}
        return found.get(PUT_ID) == self.metadata[PUT_ID]
