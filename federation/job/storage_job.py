"""The keys of ``[storage]`` in a job file: where a run is kept, and how."""

from dataclasses import dataclass

from federation.job.job_keys import key


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceSpec:
    """Where the coordinator runs: it decides what the way to its store costs.

    Attributes:
        cloud: Its cloud; `other` is a machine in neither.
        region: The cloud's name of the region.
    """

    cloud: str = key(default="unknown", choices=("unknown", "aws", "gcp", "other"))
    region: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncryptionSpec:
    """Encryption of what is stored, before it leaves this machine.

    Attributes:
        endpoint: URL of the key service, where that is not the cloud's own.
        key: What wraps the data keys of objects: `file:PATH` of a key file,
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
            results, with a copy of all but the checkpoints in the folder `runs`; or
            `memory://` to keep nothing.
        endpoint: URL of the service of a bucket, where that is not the cloud's own.
        region: Region of the bucket: tells what reading costs, and where an S3 bucket
            is if the environment does not say it.
        bucket_owner: Account number that an S3 bucket must belong to, so that a deleted
            one is not somebody else's tomorrow; any by default.
        kms_key: Key with which the cloud itself encrypts what it stores: the ARN of a
            key of AWS KMS for `s3://`, `projects/P/locations/L/keyRings/R/cryptoKeys/K`
            for `gs://`; as the bucket is configured by default.
        encryption: Encryption of checkpoints, and of all files in a bucket, before they
            leave this machine; none by default.
        keep_checkpoints: Checkpoints that are kept, newest first.
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
