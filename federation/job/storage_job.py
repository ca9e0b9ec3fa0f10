"""The keys of ``[storage]`` in a job file: where a run is kept, and how."""

from dataclasses import dataclass

from federation.job.job_keys import key


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceSpec:
    """Where the coordinator runs: it decides what the way to its store costs."""

    cloud: str = key(
        "Its cloud; `other` is a machine in neither.",
        default="unknown",
        choices=("unknown", "aws", "gcp", "other"),
    )
    region: str = key("The cloud's name of the region.", default="")


@dataclass(frozen=True, slots=True, kw_only=True)
class EncryptionSpec:
    """Encryption of what is stored, before it leaves this machine."""

    endpoint: str = key(
        "URL of the key service, where that is not the cloud's own.", default=""
    )
    # The last one: its name hides the function from those after it.
    key: str = key(
        "What wraps the data keys of objects: `file:PATH` of a key file, "
        "`aws-kms:ARN` of a key or alias, or "
        "`gcp-kms:projects/P/locations/L/keyRings/R/cryptoKeys/K`."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageSpec:
    """Where runs are kept."""

    url: str = key(
        "Folder of all runs: `file://` and a path, relative to the working "
        "directory; `s3://BUCKET/PREFIX` or `gs://BUCKET/PREFIX` for checkpoints and "
        "results, with a copy of all but the checkpoints in the folder `runs`; or "
        "`memory://` to keep nothing.",
        default="file://runs",
    )
    endpoint: str = key(
        "URL of the service of a bucket, where that is not the cloud's own.", default=""
    )
    region: str = key(
        "Region of the bucket: tells what reading costs, and where an S3 bucket is if "
        "the environment does not say it.",
        default="",
    )
    bucket_owner: str = key(
        "Account number that an S3 bucket must belong to, so that a deleted one is "
        "not somebody else's tomorrow; any by default.",
        default="",
    )
    kms_key: str = key(
        "Key with which the cloud itself encrypts what it stores: the ARN of a key of "
        "AWS KMS for `s3://`, `projects/P/locations/L/keyRings/R/cryptoKeys/K` for "
        "`gs://`; as the bucket is configured by default.",
        default="",
    )
    encryption: EncryptionSpec | None = key(
        "Encryption of checkpoints, and of all files in a bucket, before they leave "
        "this machine; none by default.",
        default=None,
    )
    keep_checkpoints: int = key(
        "Checkpoints that are kept, newest first.", default=3, low=1
    )
    coordinator: PlaceSpec = key(
        "Where the coordinator runs, for the record of what storage is used for.",
        default=PlaceSpec(),
    )
