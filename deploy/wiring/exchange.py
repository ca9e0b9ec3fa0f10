"""The store for large models and updates between the parties."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cloud_adapters.transport.frames import THRESHOLD_BYTES, Frames
from cloud_adapters.urls import StoreOptions, open_store, parse_url
from deploy.wiring.encryption import KeyName, encrypted_with
from deploy.wiring.store_meters import Watch
from federation.errors import JobError
from federation.job.job_keys import key
from federation.job.storage_job import EncryptionSpec
from federation.protocols import ObjectStore

# What encrypted objects are bound to: one of a run or a dataset does not pass for one.
EXCHANGE = "exchange/"

_MB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeSpec:
    """Store for messages that are too large to send directly.

    Attributes:
        url: Store that the aggregator and all sites can reach: `s3://BUCKET/PREFIX`,
            `gs://BUCKET/PREFIX`, or `file://` and an absolute path on a file system
            that they share. If empty, a model above the threshold is an error.
        endpoint: URL of the bucket's service, if it is not the cloud's own.
        region: Region of an S3 bucket, if the environment names none.
        bucket_owner: Account number that must own the S3 bucket; any by default.
        kms_key: Key that the cloud encrypts stored objects with; by default, the
            bucket's configuration decides.
        encryption: Encryption before anything leaves this machine; the same key at all
            parties. None by default.
        scratch: Folder for vectors that are in use, as unnamed files. By default
            `scratch` in the working folder; a tmpfs is faster, but uses memory.
        threshold_mb: Messages larger than this many MiB go through the store.
    """

    url: str = ""
    endpoint: str = ""
    region: str = ""
    bucket_owner: str = ""
    kms_key: str = ""
    encryption: EncryptionSpec | None = None
    scratch: str = ""
    threshold_mb: int = key(default=THRESHOLD_BYTES // _MB, low=1, high=256)


def check(spec: ExchangeSpec) -> None:
    """Refuse a URL that cannot be one of a store for several machines.

    Raises:
        JobError: It cannot.
    """
    if not spec.url:
        return
    try:
        parsed = parse_url(spec.url)
    except JobError as error:
        raise JobError(error.reason, key="exchange.url") from error
    if parsed.is_remote:
        return
    if parsed.scheme != "file" or not Path(parsed.place).is_absolute():
        raise JobError(
            f"{spec.url!r} is not the same place for all parties: use s3://, gs:// or "
            "file:// with an absolute path",
            key="exchange.url",
        )


@contextlib.contextmanager
def opened(
    spec: ExchangeSpec, scratch: Path, *, watch: Watch | None = None
) -> Iterator[Frames]:
    """Open the store, if there is one, during the block.

    Args:
        spec: Which.
        scratch: Folder for vectors that are in use, unless it names another.
        watch: Notes what the store is used for.

    Raises:
        JobError: It, or the key of its encryption, cannot be.
        KeyRefused: The key file cannot be used.
        NotAuthenticated: There are no credentials for it.
    """
    threshold = spec.threshold_mb * _MB
    store = open_exchange(spec, watch=watch)
    if store is None:
        yield Frames(threshold_bytes=threshold)
        return
    with contextlib.closing(store):
        place = Path(spec.scratch) if spec.scratch else scratch
        try:
            yield Frames(store=store, scratch=place, threshold_bytes=threshold)
        finally:
            with contextlib.suppress(OSError):  # It may never have been made.
                scratch.rmdir()


def open_exchange(
    spec: ExchangeSpec, *, watch: Watch | None = None
) -> ObjectStore | None:
    """Open only the store; None if there is none. Raises like ``opened``."""
    if not spec.url:
        return None
    options = StoreOptions(
        endpoint=spec.endpoint,
        region=spec.region,
        bucket_owner=spec.bucket_owner,
        kms_key=spec.kms_key,
    )
    try:
        store = open_store(spec.url, options=options)
    except JobError as error:
        raise JobError(error.reason, key="exchange.url") from error
    if watch is not None:  # Below the encryption: what is billed.
        store = watch(store, spec.region, None)
    if spec.encryption is not None:
        name = KeyName(
            name=spec.encryption.key,
            endpoint=spec.encryption.endpoint,
            argument="exchange.encryption.key",
        )
        store = encrypted_with(name, store, place=EXCHANGE)
    return store
