"""Uploads to S3: in one request or in parallel parts, with bounded memory.

The service checks each part against a CRC32C that was computed before it left, and
the whole against the CRC32C and the size of all that the source gave.

Parts are sent by own code over boto3's client. Its ``upload_fileobj`` fails these
tests: it takes no condition (``test_conditions_hold_for_many_parts``), leaves a stream
without CRC32C (``test_streams_are_read_once``), tries again for a number of times and
not until a deadline (``test_outage_of_90_seconds_is_outlasted``,
``test_failed_upload_leaves_nothing``), and not at all what changed on its way
(``test_wrong_bytes_of_a_part``).
"""

import contextlib
import itertools
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from datetime import datetime
from email.utils import parsedate_to_datetime

from cloud_adapters.storage.checksums import Checksums, Crc32c, checksums_of, crc32c
from cloud_adapters.storage.request_count import carried
from cloud_adapters.storage.s3.calls import (
    CRC32C,
    PUT_ID,
    SHA256,
    Answer,
    S3Calls,
    encode_crc32c,
    if_match,
    info_of,
    version_of,
)
from federation.errors import (
    ObjectChanged,
    ObjectExists,
    ObjectNotFound,
    StoreError,
    StoreUnavailable,
)
from federation.protocols import Buffer, ObjectInfo

_LOG = logging.getLogger(__name__)

PART_BYTES = 8 * 1024 * 1024
MAX_PARTS = 10_000

# Parts double in size after so many: with 10,000 of them, 7.8 TiB fit, which is more
# than an object may have, and up to 7.8 GiB no part is larger than the first.
PARTS_OF_ONE_SIZE = 1_000

# In flight at once, besides the part that is being filled; always at least one part.
BYTES_IN_FLIGHT = 8 * PART_BYTES
NUM_WORKERS = 8

REMOVAL_SECONDS = 10.0  # How long the parts of a failed upload are tried to remove.


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """One object that is to be written.

    Attributes:
        metadata: Its writer's.
        put_id: Random; tells this write from all others when an answer is lost.
        if_absent: Fail if the key is taken.
        if_version: Fail unless the object is of this version.
    """

    key: str
    metadata: Mapping[str, str]
    put_id: str
    if_absent: bool = False
    if_version: str | None = None

    def condition(self) -> Answer:
        """The parameters that make the service check it."""
        return {"IfNoneMatch": "*"} if self.if_absent else if_match(self.if_version)


def part_bytes(number: int) -> int:
    """Size of a part, from its number (1 to ``MAX_PARTS``)."""
    return PART_BYTES << (number - 1) // PARTS_OF_ONE_SIZE


class Buffers:
    """Buffers of parts that have been sent, to be filled again.

    Fresh memory costs more than the copy into it.
    """

    def __init__(self) -> None:
        """Begin with none."""
        self._free: deque[bytearray] = deque()

    def take(self, size: int) -> bytearray:
        """Give one of so many bytes; what is in it does not matter."""
        with contextlib.suppress(IndexError):
            while len(buffer := self._free.pop()) != size:
                pass  # Left from smaller parts.
            return buffer
        return bytearray(size)

    def give_back(self, buffer: bytearray) -> None:
        """Take back one that is no longer read."""
        self._free.append(buffer)


def cut(data: Iterable[Buffer], buffers: Buffers) -> Iterator[bytearray]:
    """Cut content into parts of the sizes that S3 takes, each in a buffer of its own.

    The last one is shorter, and there is at least one, even if it is empty.

    Args:
        data: Pieces of any size; each is copied before the next is asked for.
        buffers: Where full parts may be given back to.
    """
    # The first one grows: most objects are far smaller than a part.
    number, part, filled = 1, bytearray(), 0
    for piece in data:
        view = memoryview(piece)
        left = view.cast("B") if view.nbytes else memoryview(b"")
        while left:
            if filled == part_bytes(number):
                yield part
                number, filled = number + 1, 0
                part = buffers.take(part_bytes(number))
            now = left[: part_bytes(number) - filled]
            if filled == len(part):
                part += now
            else:
                memoryview(part)[filled : filled + len(now)] = now
            filled += len(now)
            left = left[len(now) :]
    del part[filled:]
    yield part


def put(
    calls: S3Calls, write: Write, data: Iterable[Buffer], *, in_parts: bool = False
) -> ObjectInfo:
    """Write an object: see ``ObjectStore.put``.

    Args:
        calls: To the bucket.
        write: What is to be written.
        data: Its content.
        in_parts: Send even a small one in parts.
    """
    buffers = Buffers()
    parts = cut(data, buffers)
    front = list(itertools.islice(parts, 2))
    if len(front) == 1 and not in_parts:
        return _put_whole(calls, write, front[0])
    upload = _Upload(calls, write, checksums_of(data), buffers)
    return upload.put(_chain(front, parts))


def _chain(front: list[bytearray], rest: Iterator[bytearray]) -> Iterator[bytearray]:
    """Put parts back in front, and keep no hold of them."""
    while front:
        yield front.pop(0)
    yield from rest


def _put_whole(calls: S3Calls, write: Write, content: bytearray) -> ObjectInfo:
    doing = f"write {calls.where(write.key)}"
    checksums = Checksums()
    checksums.update(content)
    written = _info(write, checksums, sha256=checksums.sha256)

    def request(attempt: int) -> ObjectInfo:
        try:
            answer = calls.once(
                "put_object",
                doing,
                Key=calls.prefix + write.key,
                Body=content,
                ChecksumCRC32C=encode_crc32c(checksums.crc32c),
                Metadata=_metadata(write, checksums.crc32c, checksums.sha256),
                **write.condition(),
                **calls.encryption.parameters(),
            )
        except (ObjectChanged, ObjectNotFound) as error:
            found = _ours(calls, write, written) if attempt > 1 else None
            if found is None:
                raise refusal(calls, write) from error
            return found
        return replace(written, version=version_of(answer))

    return calls.retry.call(request)


@dataclass(frozen=True, slots=True, kw_only=True)
class _SentPart:
    """A part that the service has."""

    number: int
    size: int
    crc32c: str
    etag: str

    def entry(self) -> Answer:
        """What names it when the upload is completed."""
        checksum = encode_crc32c(self.crc32c)
        return {
            "PartNumber": self.number,
            "ETag": self.etag,
            "ChecksumCRC32C": checksum,
        }


@dataclass(eq=False)
class _Upload:
    """A multipart upload.

    1. Begin it; nothing is visible under the key until the end.
    2. Send parts in parallel, each tried again by itself and with its CRC32C.
    3. Complete it, under the write's condition.
    If anything fails, wait for what is in flight and remove all parts.
    """

    calls: S3Calls
    write: Write
    known: Checksums | None
    buffers: Buffers

    def __post_init__(self) -> None:
        """Begin nothing yet."""
        self._doing = f"write {self.calls.where(self.write.key)}"
        self._upload: Answer = {}  # What each of its requests names.

    def put(self, parts: Iterator[bytearray]) -> ObjectInfo:
        name, known = self.calls.prefix + self.write.key, self.known
        answer = self.calls.call(  # 1.
            "create_multipart_upload",
            self._doing,
            Key=name,
            Metadata=_metadata(
                self.write,
                known.crc32c if known else None,
                known.sha256 if known else None,
            ),
            ChecksumAlgorithm="CRC32C",
            ChecksumType="FULL_OBJECT",
            **self.calls.encryption.parameters(),
        )
        self._upload = {"Key": name, "UploadId": answer["UploadId"]}
        try:
            sent = self._send_all(parts)  # 2.
            written = self._written(sent)
            return self.calls.retry.call(  # 3.
                lambda attempt: self._complete(sent, written, attempt)
            )
        except BaseException as error:
            self._abort(error)
            raise

    def _send_all(self, parts: Iterator[bytearray]) -> list[_SentPart]:
        sent: list[_SentPart] = []
        pending: dict[Future[_SentPart], int] = {}
        pool = ThreadPoolExecutor(NUM_WORKERS, "s3-upload")
        try:
            for number, part in enumerate(parts, 1):
                size = len(part)
                while pending and sum(pending.values()) + size > BYTES_IN_FLIGHT:
                    sent += _ended(pending)
                send = carried(self._send)
                pending[pool.submit(send, number, part)] = size
                # Nothing here may hold it: the next one is filled meanwhile.
                del part
            while pending:
                sent += _ended(pending)
        finally:
            # Also on failure: a part that came after the removal would stay behind.
            pool.shutdown(wait=True, cancel_futures=True)
        return sorted(sent, key=lambda part: part.number)

    def _send(self, number: int, part: bytearray) -> _SentPart:
        checksum = crc32c(part)
        answer = self.calls.call(
            "upload_part",
            f"{self._doing}, part {number}",
            **self._upload,
            PartNumber=number,
            Body=part,
            ChecksumCRC32C=encode_crc32c(checksum),
        )
        size = len(part)
        self.buffers.give_back(part)
        return _SentPart(number=number, size=size, crc32c=checksum, etag=answer["ETag"])

    def _written(self, sent: list[_SentPart]) -> ObjectInfo:
        """Say what will be known of the object, but for its version.

        Raises:
            StoreUnavailable: What was sent is not what was read before.
        """
        whole = Crc32c()
        for part in sent:
            whole.join(part.crc32c, part.size)
        if self.known is not None and self.known.crc32c != whole.crc32c:
            raise StoreUnavailable(
                f"cannot {self._doing}: its content changed while it was being read; "
                "write it when it is complete"
            )
        known = None if self.known is None else self.known.sha256
        return _info(self.write, whole, sha256=known)

    def _complete(
        self, sent: list[_SentPart], written: ObjectInfo, attempt: int
    ) -> ObjectInfo:
        """Make the parts an object, unless the write's condition fails; once."""
        try:
            answer = self.calls.once(
                "complete_multipart_upload",
                self._doing,
                **self._upload,
                MultipartUpload={"Parts": [part.entry() for part in sent]},
                ChecksumType="FULL_OBJECT",
                ChecksumCRC32C=encode_crc32c(str(written.crc32c)),
                MpuObjectSize=written.size,
                **self.write.condition(),
            )
        except StoreError as error:
            if error.temporary:
                raise
            found = _ours(self.calls, self.write, written) if attempt > 1 else None
            if found is not None:
                return found
            if isinstance(error, ObjectChanged | ObjectNotFound):
                raise refusal(self.calls, self.write) from error
            raise
        return replace(written, version=version_of(answer))

    def _abort(self, error: BaseException) -> None:
        """Remove the parts of an upload that failed with ``error``.

        Not for long: a service that was out of reach for a whole deadline is not to
        hold the caller for another one, and ``remove_unfinished`` removes later what is
        left.
        """
        retry = replace(self.calls.retry, deadline_seconds=REMOVAL_SECONDS)
        doing = f"{self._doing}, remove its parts"
        try:
            retry.call(
                lambda _: self.calls.once(
                    "abort_multipart_upload", doing, **self._upload
                )
            )
        except ObjectNotFound:
            pass
        except StoreError:
            error.add_note(
                "The parts that had been sent could not be removed, and cost storage "
                "until the bucket's lifecycle rule AbortIncompleteMultipartUpload ends "
                "them."
            )


def _ended(pending: dict[Future[_SentPart], int]) -> list[_SentPart]:
    """Wait until a part has been sent, and take all that are out of ``pending``."""
    done, _ = wait(pending, return_when=FIRST_COMPLETED)
    for future in done:
        del pending[future]
    return [future.result() for future in done]


def refusal(calls: S3Calls, write: Write) -> StoreError:
    """The error for a write whose condition did not hold."""
    where = calls.where(write.key)
    if write.if_absent:
        return ObjectExists(f"{write.key!r} already exists: {where}")
    return ObjectChanged(
        f"{write.key!r} does not have the given version, or is gone: {where}"
    )


def _ours(calls: S3Calls, write: Write, written: ObjectInfo) -> ObjectInfo | None:
    """The object, if it is what an earlier attempt wrote whose answer was lost."""
    with contextlib.suppress(ObjectNotFound):
        answer = calls.head_once(write.key)
        found = info_of(write.key, answer)
        is_same = found.size == written.size and (
            None in {found.crc32c, written.crc32c} or found.crc32c == written.crc32c
        )
        if answer.get("Metadata", {}).get(PUT_ID) == write.put_id and is_same:
            return replace(written, version=found.version)
    return None


def _info(write: Write, sums: Checksums | Crc32c, *, sha256: str | None) -> ObjectInfo:
    """What will be known of the object, but for its version."""
    return ObjectInfo(
        key=write.key,
        size=sums.size,
        version="",
        crc32c=sums.crc32c,
        sha256=sha256,
        metadata=write.metadata,
    )


def _metadata(write: Write, crc32c: str | None, sha256: str | None) -> Answer:
    added = {PUT_ID: write.put_id, CRC32C: crc32c, SHA256: sha256}
    return {**write.metadata, **{name: v for name, v in added.items() if v is not None}}


def remove_unfinished(calls: S3Calls, *, older_seconds: float) -> int:
    """Remove the parts of uploads that were started long ago, and return how many.

    A service that does not list uploads, or not to these credentials, ends no run:
    the log says so, and the bucket's lifecycle rule does the same.

    Args:
        calls: To the bucket; what is not below its prefix stays.
        older_seconds: Uploads that were started later stay: they may be in progress.

    Raises:
        ValueError: The prefix is empty: uploads of others would go.
    """
    if not calls.prefix:
        raise ValueError("uploads are removed below a prefix, not in a whole bucket")
    try:
        return _remove_unfinished(calls, older_seconds)
    except StoreError as error:
        _LOG.info("parts of killed uploads stay below %s: %s", calls.where(), error)
        return 0


def _remove_unfinished(calls: S3Calls, older_seconds: float) -> int:
    doing, removed = f"list unfinished uploads below {calls.where()}", 0
    asked: Answer = {}
    while True:
        answer = calls.call(
            "list_multipart_uploads", doing, Prefix=calls.prefix, **asked
        )
        now = _now(answer)
        for upload in answer.get("Uploads", ()):
            begun = upload.get("Initiated")
            if now is None or not isinstance(begun, datetime):
                continue
            if (now - begun).total_seconds() <= older_seconds:
                continue
            removed += _remove_one(calls, str(upload["Key"]), str(upload["UploadId"]))
        if not answer.get("IsTruncated"):
            return removed
        asked = {
            "KeyMarker": answer["NextKeyMarker"],
            "UploadIdMarker": answer["NextUploadIdMarker"],
        }


def _remove_one(calls: S3Calls, name: str, upload_id: str) -> int:
    if not name.startswith(calls.prefix):  # A service that ignores the prefix.
        return 0
    doing = f"remove an unfinished upload of s3://{calls.bucket}/{name}"
    try:
        calls.call("abort_multipart_upload", doing, Key=name, UploadId=upload_id)
    except ObjectNotFound:  # Someone else was quicker.
        return 0
    return 1


def _now(answer: Answer) -> datetime | None:
    """The service's time; None if it does not say it."""
    said = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date", "")
    try:
        return parsedate_to_datetime(said)
    except ValueError:
        return None
