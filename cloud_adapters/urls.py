"""From the URL in a job file to the store that it names.

Clients of clouds are imported when a store of theirs is opened, and not before: they
take longer than all the rest of a command that needs none.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from cloud_adapters.extras import naming_extras
from cloud_adapters.storage.disk.store import LocalStore
from cloud_adapters.storage.memory import MemoryStore
from cloud_adapters.storage.object_keys import check_key
from cloud_adapters.storage.retry import Retry
from federation.errors import JobError
from federation.protocols import ObjectStore

_KEY = "storage.url"
# Not memory://: it keeps nothing.
_POSSIBLE = (
    "use file://FOLDER, s3://BUCKET/PREFIX (Amazon S3) or gs://BUCKET/PREFIX (Google "
    "Cloud Storage)"
)
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
_ACCOUNT = re.compile(r"[0-9]{12}")
_KMS_KEYS = {
    "s3": re.compile(r"arn:aws[a-z-]*:kms:[a-z0-9-]+:[0-9]{12}:(key|alias)/[\w/-]+"),
    "gs": re.compile(r"projects/[^/]+/locations/[^/]+/keyRings/[^/]+/cryptoKeys/[^/]+"),
}
_ARN_FORM = "the ARN of a key of AWS KMS"
_NAME_FORM = "projects/P/locations/L/keyRings/R/cryptoKeys/K"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreUrl:
    """What the URL of a store says.

    Attributes:
        scheme: ``file``, ``memory``, ``s3`` or ``gs``.
        place: Folder or bucket; empty in memory.
        prefix: Prefix of every key in the bucket, without slashes at its ends.
    """

    scheme: str
    place: str = ""
    prefix: str = ""

    @property
    def is_remote(self) -> bool:
        """Whether it is a bucket, and not of this machine."""
        return self.scheme in {"s3", "gs"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """What a URL does not say.

    Attributes:
        endpoint: URL of a service other than the cloud's own; if empty, that of
            ``AWS_ENDPOINT_URL`` or ``STORAGE_EMULATOR_HOST``, or the cloud's.
        region: Region of an S3 bucket; the environment's if empty.
        bucket_owner: Account number that an S3 bucket must belong to; any if empty.
        kms_key: Key with which the service itself encrypts what is written: an ARN
            for ``s3``, ``projects/...`` for ``gs``; as the bucket is configured if
            empty.
        retry: How often to try; the store's own rule if None.
    """

    endpoint: str = ""
    region: str = ""
    bucket_owner: str = ""
    kms_key: str = ""
    retry: Retry | None = None


_NO_OPTIONS = StoreOptions()


def parse_url(url: str) -> StoreUrl:
    """Take the URL of a store apart; nothing is opened.

    Args:
        url: ``file://`` and a path, relative to the working directory or absolute,
            taken as it stands; ``s3://`` or ``gs://`` with a bucket and perhaps a
            prefix; or ``memory://``, a new and empty store.

    Raises:
        JobError: The URL is malformed, or of an unknown scheme.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        raise JobError(f"{url!r} is not a URL; {_POSSIBLE}", key=_KEY)
    if scheme == "file" and rest and "\0" not in rest:
        return StoreUrl(scheme=scheme, place=rest)
    if scheme == "memory" and not rest:
        return StoreUrl(scheme=scheme)
    if scheme in {"s3", "gs"}:
        return _parse_bucket(url, scheme, rest)
    if scheme in {"file", "memory"}:
        raise JobError(f"{url!r} does not name a store; {_POSSIBLE}", key=_KEY)
    raise JobError(f"the scheme {scheme!r} is unknown; {_POSSIBLE}", key=_KEY)


def open_store(
    url: str, *, below: str = "", options: StoreOptions = _NO_OPTIONS
) -> ObjectStore:
    """Open the store that a URL names; nothing is read or written yet.

    Args:
        url: See ``parse_url``.
        below: Prefix of every key, behind the URL's own.
        options: What the URL does not say.

    Raises:
        JobError: The URL is malformed, or of an unknown scheme.
        NotAuthenticated: There are no credentials for it.
        MissingExtra: The cloud's client is not installed.
    """
    parsed = parse_url(url)
    if not parsed.is_remote and (options.kms_key or options.bucket_owner):
        raise JobError(
            f"{url!r} is not in a cloud: kms_key and bucket_owner apply only to "
            "buckets; storage.encryption encrypts on this machine",
            key=_KEY,
        )
    if parsed.scheme == "memory":
        return MemoryStore()
    if parsed.scheme == "file":
        return LocalStore(Path(parsed.place) / below)
    prefix = "/".join(part for part in (parsed.prefix, below) if part)
    try:
        _check_options(parsed.scheme, options)
        if parsed.scheme == "s3":
            return _open_s3(parsed.place, prefix, options)
        return _open_gcs(parsed.place, prefix, options)
    except ValueError as error:
        raise JobError(f"{url!r} does not name a store: {error}", key=_KEY) from error


def _parse_bucket(url: str, scheme: str, rest: str) -> StoreUrl:
    bucket, _, prefix = rest.partition("/")
    if not _BUCKET.fullmatch(bucket):
        raise JobError(
            f"{url!r} does not name a store: {bucket!r} cannot be a bucket, whose name "
            "has lower-case letters, digits, '.', '_' and '-'",
            key=_KEY,
        )
    prefix = prefix.removesuffix("/")
    try:
        if prefix:
            check_key(prefix)
    except ValueError as error:
        raise JobError(f"{url!r} does not name a store: {error}", key=_KEY) from error
    return StoreUrl(scheme=scheme, place=bucket, prefix=prefix)


def _check_options(scheme: str, options: StoreOptions) -> None:
    """Refuse what the service would refuse only when the first object is written."""
    owner, key = options.bucket_owner, options.kms_key
    if owner and (scheme != "s3" or _ACCOUNT.fullmatch(owner) is None):
        raise ValueError(
            f"bucket_owner {owner!r} must be an account number of 12 digits, and is "
            "only for s3://"
        )
    if key and _KMS_KEYS[scheme].fullmatch(key) is None:
        form = _ARN_FORM if scheme == "s3" else _NAME_FORM
        raise ValueError(f"kms_key {key!r} must be {form} for {scheme}://")


@naming_extras()
def _open_s3(bucket: str, prefix: str, options: StoreOptions) -> ObjectStore:
    from cloud_adapters.storage.s3.calls import ServerSideEncryption  # noqa: PLC0415
    from cloud_adapters.storage.s3.store import S3Store  # noqa: PLC0415 -- slow to import

    encryption = None
    if options.kms_key:
        encryption = ServerSideEncryption(kind="aws:kms", kms_key=options.kms_key)
    return S3Store(
        bucket,
        prefix,
        endpoint_url=options.endpoint or None,
        region=options.region or None,
        encryption=encryption,
        bucket_owner=options.bucket_owner or None,
        retry=options.retry,
    )


@naming_extras()
def _open_gcs(bucket: str, prefix: str, options: StoreOptions) -> ObjectStore:
    from cloud_adapters.storage.gcs.store import GcsStore  # noqa: PLC0415 -- slow to import

    return GcsStore(
        bucket,
        prefix,
        endpoint=options.endpoint or os.environ.get("STORAGE_EMULATOR_HOST"),
        kms_key=options.kms_key or None,
        retry=options.retry,
    )
