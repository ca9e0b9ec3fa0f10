"""The keys of ``[storage]`` in a job file: where a run is kept, and how."""

from dataclasses import dataclass

from federation.job.job_keys import key


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceSpec:
    """Where the coordinator runs, which determines what access to its store costs.

    Attributes:
        cloud: Its cloud; `other` means neither.
        region: Region, as the cloud names it.
    """

    cloud: str = key(default="unknown", choices=("unknown", "aws", "gcp", "other"))
    region: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncryptionSpec:
    """Encryption on this machine, before objects are stored.

    Attributes:
        endpoint: URL of the key service, if it is not the cloud's own.
        key: Key that wraps the objects' data keys: `file:PATH` of a key file,
            `aws-kms:ARN` of a key or alias, or
            `gcp-kms:projects/P/locations/L/keyRings/R/cryptoKeys/K`.
    """

    endpoint: str = ""
    # The last one: its name hides the function from those after it.
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageSpec:
    """Where runs are kept.

    Attributes:
        url: Folder of all runs: `file://` and a path, relative to the working
            directory; `s3://BUCKET/PREFIX` or `gs://BUCKET/PREFIX` for checkpoints and
            results, with a copy of everything except checkpoints in the folder `runs`;
            or `memory://` to keep nothing.
        endpoint: URL of the bucket's service, if it is not the cloud's own.
        region: Region of the bucket: determines the cost of reading, and locates an S3
            bucket if the environment names no region.
        bucket_owner: Account number that must own the S3 bucket; any by default.
        kms_key: Key that the cloud encrypts stored objects with: the ARN of an AWS KMS
            key for `s3://`, `projects/P/locations/L/keyRings/R/cryptoKeys/K` for
            `gs://`; by default, the bucket's configuration decides.
        encryption: Encryption of checkpoints, and of all files in a bucket, before they
            leave this machine; none by default.
        keep_checkpoints: Number of checkpoints to keep: the newest ones.
        coordinator: Where the coordinator runs, for the record of what storage is used
            for.
    """

    url: str = "file://runs"
    endpoint: str = ""
    region: str = ""
    bucket_owner: str = ""
    kms_key: str = ""
    encryption: EncryptionSpec | None = None
    keep_checkpoints: int = key(default=3, low=1)
    coordinator: PlaceSpec = PlaceSpec()
