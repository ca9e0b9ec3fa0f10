"""``[home]`` of ``site.toml``: where a site's keys, ledgers and memory outlive it."""

from dataclasses import dataclass
from pathlib import Path, PurePath

from cloud_adapters.storage.retry import Retry
from cloud_adapters.urls import StoreOptions, open_store, parse_url
from deploy.wiring.encryption import KeyName, encrypted_with
from federation.errors import JobError
from federation.job.job_keys import key
from federation.job.storage_job import EncryptionSpec
from federation.protocols import ObjectStore

# A request gives up in time for a second one within a lease.
_REQUEST_SHARE = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class HomeSpec:
    """Store that keeps the site's keys, ledgers and memory for its next machine.

    Attributes:
        url: Store of this site only: `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX`, or
            `file://` and an absolute path on a disk that outlives the machine. If
            empty, the folder is the only copy.
        endpoint: URL of the bucket's service, if it is not the cloud's own.
        region: Region of an S3 bucket, if the environment names none.
        bucket_owner: Account number that must own the S3 bucket; any by default.
        kms_key: Key that the cloud encrypts stored objects with; by default, the
            bucket's configuration decides.
        encryption: Encryption before anything leaves this machine; a bucket requires
            it.
        lease_seconds: How long a machine may be silent before another takes over.
    """

    url: str = ""
    endpoint: str = ""
    region: str = ""
    bucket_owner: str = ""
    kms_key: str = ""
    encryption: EncryptionSpec | None = None
    lease_seconds: float = key(default=60.0, low=1.0, high=3600.0)


def check(spec: HomeSpec, identity: str) -> None:
    """Refuse a home that could not keep a site.

    Args:
        spec: The table.
        identity: Key `identity` of ``site.toml``.

    Raises:
        JobError: It could not.
    """
    if not spec.url:
        return
    try:
        parsed = parse_url(spec.url)
    except JobError as error:
        raise JobError(error.reason, key="home.url") from error
    if parsed.is_remote and spec.encryption is None:
        raise JobError(
            f"{spec.url!r} would hold this site's private keys unencrypted: set "
            "home.encryption.key",
            key="home.encryption",
        )
    if not parsed.is_remote and (
        parsed.scheme != "file" or not Path(parsed.place).is_absolute()
    ):
        raise JobError(
            f"{spec.url!r} is not a place that outlives the machine: use s3://, gs:// "
            "or file:// with an absolute path",
            key="home.url",
        )
    if not is_inside(identity):
        raise JobError(
            f"{identity!r} is outside of the site's folder, so that home.url would not "
            "keep it: name a file inside the folder",
            key="identity",
        )


def is_inside(path: str) -> bool:
    """Whether a path of ``site.toml`` is inside the site's folder."""
    pure = PurePath(path)
    return bool(path) and not pure.is_absolute() and ".." not in pure.parts


def open_home(spec: HomeSpec, site: str) -> ObjectStore:
    """Open the store of a site's home. Objects are bound to the site.

    Raises:
        JobError: It, or the key of its encryption, cannot be.
        KeyRefused: The key file cannot be used.
        NotAuthenticated: There are no credentials for it.
    """
    options = StoreOptions(
        endpoint=spec.endpoint,
        region=spec.region,
        bucket_owner=spec.bucket_owner,
        kms_key=spec.kms_key,
        retry=Retry(deadline_seconds=spec.lease_seconds * _REQUEST_SHARE),
    )
    try:
        store = open_store(spec.url, options=options)
    except JobError as error:
        raise JobError(error.reason, key="home.url") from error
    if spec.encryption is None:
        return store
    name = KeyName(
        name=spec.encryption.key,
        endpoint=spec.encryption.endpoint,
        argument="home.encryption.key",
    )
    return encrypted_with(name, store, place=f"home/{site}/")
