"""Objects in a bucket of Amazon S3, or of a service that speaks as S3 does.

Conditional writes are the service's own (If-None-Match, If-Match), so they hold
between processes and clouds. An object's version is its ETag, which follows from the
content: an object that gets back an earlier content gets back its version too.

An object that came as a stream of more than one part has no SHA-256 in its metadata,
which S3 takes before the content; its CRC32C is kept by the service. A file or a list,
which can be gone through twice, has both.

Not here: client-side encryption, caches, downloads to files.
"""

import contextlib
import re
import secrets
from collections.abc import Generator, Iterable, Iterator
from typing import Any, Unpack

from cloud_adapters.storage.object_keys import (
    CheckedPut,
    CheckedRead,
    folder_of,
    key_in,
    name_in,
)
from cloud_adapters.storage.resumed_read import (
    PIECE_BYTES,
    Answer as Asked,
    ResumedRead,
)
from cloud_adapters.storage.retry import Retry
from cloud_adapters.storage.s3 import errors as s3_errors, upload as s3_upload
from cloud_adapters.storage.s3.calls import (
    Answer,
    Clients,
    S3Calls,
    ServerSideEncryption,
    check_said,
    if_match,
    info_of,
    updated_of,
    version_of,
)
from federation.errors import (
    ObjectChanged,
    ObjectNotFound,
    StoreForbidden,
    StoreUnavailable,
)
from federation.protocols import Buffer, ObjectInfo, PutArguments, ReadArguments

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


class S3Store:
    """A ``federation.protocols.ObjectStore`` over S3.

    It may be used by several threads at once, but not after a fork. Every write that
    is not seen through leaves nothing under its key; parts that a killed process left
    behind go with ``remove_unfinished``, or by the bucket's lifecycle rule.
    """

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        endpoint_url: str | None = None,
        region: str | None = None,
        encryption: ServerSideEncryption | None = None,
        bucket_owner: str | None = None,
        retry: Retry | None = None,
        client: Any = None,
    ) -> None:
        """Use a bucket; nothing is asked of it yet.

        Args:
            bucket: Its name.
            prefix: Before every key, without slashes at its ends; may be empty.
            endpoint_url: Endpoint URL of a service other than Amazon's.
            region: Of the bucket; by default, that of the profile or environment.
            encryption: By the service; as the bucket is configured, by default.
            bucket_owner: Account number that the bucket must belong to: without it, a
                bucket that was deleted may be someone else's tomorrow.
            retry: How often to try; sensible by default.
            client: Of boto3, in place of one with the environment's credentials; its
                own retries are to be off.

        Raises:
            ValueError: Bucket or prefix are not of the permitted form.
            NotAuthenticated: The profile that the environment names is not there.
        """
        if not _BUCKET.fullmatch(bucket):
            raise ValueError(f"{bucket[:80]!r} cannot be a bucket name")
        self._calls = S3Calls(
            clients=Clients(endpoint_url=endpoint_url, region=region, given=client),
            bucket=bucket,
            prefix=folder_of(prefix),
            retry=retry or Retry(),
            encryption=encryption or ServerSideEncryption(),
            owner=bucket_owner,
        )

    @property
    def url(self) -> str:
        """Where it is."""
        return self._calls.where().removesuffix("/")

    def put(
        self, key: str, data: Iterable[Buffer], **options: Unpack[PutArguments]
    ) -> ObjectInfo:
        """Write an object whole or not at all; see ``ObjectStore.put``.

        Content of more than one part (8 MiB) goes up in parallel parts, with at most
        about 100 MiB of memory for objects of up to 60 GiB.
        """
        return s3_upload.put(self._calls, self._write(key, options), data)

    def put_in_parts(
        self, key: str, content: bytes, **options: Unpack[PutArguments]
    ) -> ObjectInfo:
        """Write even a small content in parts; see ``probe.WritesInParts``."""
        write = self._write(key, options)
        return s3_upload.put(self._calls, write, [content], in_parts=True)

    def _write(self, key: str, options: PutArguments) -> s3_upload.Write:
        put = CheckedPut(**options)
        return s3_upload.Write(
            key=self._check(key),
            metadata=put.kept,
            put_id=secrets.token_hex(16),
            if_absent=put.if_absent,
            if_version=put.if_version,
        )

    def read(self, key: str, **options: Unpack[ReadArguments]) -> bytes:
        """Bytes of an object; see ``ObjectStore.read``."""
        self._check(key)
        part = CheckedRead(**options)
        if part.length == 0:  # HTTP has no empty range.
            found = self.stat(key)
            if part.if_version not in {None, found.version}:
                raise ObjectChanged(f"{self._calls.where(key)} has changed")
            return b""
        read = ResumedRead(
            lambda *asked: self._ask(key, *asked),
            doing=f"read {self._where(key)}",
            start=part.start,
            length=part.length,
            version=part.if_version,
            clock=self._calls.retry.clock,
        )
        return self._calls.retry.call(lambda _: read.attempt())

    def _ask(
        self, key: str, begin: int, end: int | None, version: str | None
    ) -> Asked | None:
        """Ask once for bytes of an object; see ``resumed_read.Ask``."""
        calls, doing = self._calls, f"read {self._where(key)}"
        wanted: Answer = {}
        if begin or end is not None:
            wanted = {"Range": f"bytes={begin}-{'' if end is None else end - 1}"}
        try:
            answer = calls.once(
                "get_object",
                doing,
                Key=calls.prefix + key,
                ChecksumMode="ENABLED",
                **wanted,
                **if_match(version),
            )
        except StoreForbidden as error:
            calls.check_absent(key, error)
            raise
        except StoreUnavailable as error:
            if s3_errors.code_of(error.__cause__) in {"InvalidRange", "416"}:
                return None
            raise
        if wanted and "ContentRange" not in answer:
            answer["Body"].close()
            raise StoreUnavailable(
                f"cannot {doing}: the endpoint does not support ranges"
            )
        info = info_of(key, answer)
        return Asked(
            version=info.version,
            size=info.size,
            crc32c=info.crc32c,
            pieces=_pieces(calls, doing, answer),
        )

    def stat(self, key: str) -> ObjectInfo:
        """All that is known of an object; see ``ObjectStore.stat``."""
        return self._calls.head(self._check(key))

    def list(self, prefix: str = "", *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Objects under a prefix, in key order, page by page as they are asked for.

        S3 orders by the bytes of UTF-8, which is the order of code points. Objects
        that others wrote under names that no key can have are left out.
        """
        calls = self._calls
        asked: Answer = (
            {"StartAfter": calls.prefix + start_after} if start_after else {}
        )
        while True:
            answer = calls.call(
                "list_objects_v2",
                f"list {calls.where(prefix)}",
                Prefix=calls.prefix + prefix,
                **asked,
            )
            for entry in answer.get("Contents", ()):
                check_said(f"list {calls.where(prefix)}", entry, ("Key",))
                key = key_in(calls.prefix, entry["Key"])
                if key is not None:
                    check_said(f"list {calls.where(key)}", entry, ("Size", "ETag"))
                    yield _listed(key, entry)
            if not answer.get("IsTruncated"):
                return
            asked = {"ContinuationToken": answer["NextContinuationToken"]}

    def delete(self, key: str) -> None:
        """Remove an object; nothing happens if there is none."""
        name = name_in(self._calls.prefix, key)
        try:
            self._calls.call("delete_object", f"delete {self._where(key)}", Key=name)
        except ObjectNotFound:
            return

    def remove_unfinished(self, *, older_seconds: float) -> int:
        """Remove parts of killed uploads; see ``probe.RemovesUnfinished``."""
        return s3_upload.remove_unfinished(self._calls, older_seconds=older_seconds)

    def close(self) -> None:
        """Let go of connections; the store is not used afterwards."""
        self._calls.clients.close()

    def __repr__(self) -> str:
        """Where it is, and nothing of its credentials."""
        return f"S3Store({self.url!r})"

    def _where(self, key: str) -> str:
        return self._calls.where(key)

    def _check(self, key: str) -> str:
        name_in(self._calls.prefix, key)
        return key


def _listed(key: str, entry: Answer) -> ObjectInfo:
    return ObjectInfo(
        key=key,
        size=int(entry["Size"]),
        version=version_of(entry),
        updated=updated_of(entry),
    )


def _pieces(calls: S3Calls, doing: str, answer: Answer) -> Generator[bytes, None, None]:
    """Yield the pieces of a body as they come, and check its length."""
    body, missing = answer["Body"], int(answer["ContentLength"])
    # read() of the public stream waits for all that it is asked for, and no timeout
    # ends that; read1() gives what is there.
    read = getattr(body._raw_stream, "read1", body.read)  # noqa: SLF001
    with contextlib.closing(body):
        while piece := calls.understand(doing, lambda: read(PIECE_BYTES)):
            missing -= len(piece)
            yield piece
    if missing:
        raise StoreUnavailable(
            f"cannot {doing}: the connection broke with {missing} bytes missing; check "
            "network and proxy",
            temporary=True,
        )
