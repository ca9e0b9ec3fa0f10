"""Copies inside S3: the content never passes through this machine."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from cloud_adapters.storage.s3 import upload as s3_upload
from cloud_adapters.storage.s3.calls import Answer, S3Calls
from cloud_adapters.storage.s3.upload import Write
from federation.errors import ObjectExists
from federation.protocols import ObjectInfo

MAX_COPY_BYTES = 5 * 1024**3  # Of one CopyObject.
COPY_PART_BYTES = 512 * 1024**2


def copy(calls: S3Calls, source: str, write: Write) -> ObjectInfo:
    """Copy an object with its metadata; see ``ObjectStore.copy``.

    1. A small object without a condition is one request.
    2. Everything else is a multipart upload whose parts are ranges of the source,
       pinned to its version: completing it can be conditional on every service that
       has conditional writes, which CopyObject cannot.
    """
    found = calls.head(source)
    if source == write.key:
        if write.if_absent:
            raise ObjectExists(f"{source!r} already exists: {calls.where(source)}")
        return found
    write = replace(write, metadata=found.metadata)
    if not write.if_absent and found.size <= MAX_COPY_BYTES:  # 1.
        return _copy_whole(calls, source, write)
    if found.size == 0:  # There is no empty range to copy.
        return s3_upload.put(calls, write, [])
    return _copy_by_parts(calls, found, write)  # 2.


def _source(calls: S3Calls, key: str) -> Answer:
    parameters: Answer = {
        "CopySource": {"Bucket": calls.bucket, "Key": calls.prefix + key}
    }
    if calls.owner is None:
        return parameters
    return {**parameters, "ExpectedSourceBucketOwner": calls.owner}


def _copy_whole(calls: S3Calls, source: str, write: Write) -> ObjectInfo:
    calls.call(
        "copy_object",
        f"copy {calls.where(source)} to {calls.where(write.key)}",
        Key=calls.prefix + write.key,
        **_source(calls, source),
        **calls.encryption.parameters(),
    )
    return calls.head(write.key)


def _copy_by_parts(calls: S3Calls, source: ObjectInfo, write: Write) -> ObjectInfo:
    doing = f"copy {calls.where(source.key)} to {calls.where(write.key)}"
    # The checksums are those of the source: known before the first byte is copied.
    upload = s3_upload.begin(calls, write, crc32c=source.crc32c, sha256=source.sha256)

    def copy_part(number: int) -> Answer:
        first, last = copy_range(number, source.size)
        answer = calls.call(
            "upload_part_copy",
            f"{doing}, part {number}",
            **upload,
            **_source(calls, source.key),
            PartNumber=number,
            CopySourceRange=f"bytes={first}-{last}",
            CopySourceIfMatch=f'"{source.version}"',
        )
        found = answer["CopyPartResult"]
        names = ("ETag", "ChecksumCRC32C")
        return {"PartNumber": number, **{n: found[n] for n in names if n in found}}

    try:
        with ThreadPoolExecutor(
            s3_upload.NUM_WORKERS, thread_name_prefix="s3-copy"
        ) as pool:
            parts = list(pool.map(copy_part, range(1, num_parts(source.size) + 1)))
        return s3_upload.complete(
            calls,
            write,
            upload=upload,
            parts=parts,
            written=replace(source, key=write.key, updated=None),
        )
    except BaseException as error:
        s3_upload.abort(calls, upload, doing, error)
        raise


def num_parts(size: int) -> int:
    """Parts of a copy of so many bytes."""
    return -(-size // _part_bytes(size))


def copy_range(number: int, size: int) -> tuple[int, int]:
    """First and last byte of a part, from its number."""
    first = (number - 1) * _part_bytes(size)
    return first, min(first + _part_bytes(size), size) - 1


def _part_bytes(size: int) -> int:
    return max(COPY_PART_BYTES, -(-size // s3_upload.MAX_PARTS))
