"""Encryption of stored objects, with the key of a job or a command.

Of a run with ``storage.encryption`` are encrypted checkpoints, what sites keep for
themselves in a simulation, and the copies of a run's files in a bucket. Not encrypted
are the files in the run's folder on this machine: events, result, report and the model
itself. Datasets and exports are encrypted where the command that writes them names a
key.
"""

from dataclasses import dataclass

from cloud_adapters.keys.names import open_keys
from cloud_adapters.storage.encrypted import EncryptedStore
from federation.errors import JobError
from federation.job.spec import JobSpec
from federation.protocols import KeyService, ObjectStore

# What the objects of a dataset and of an export are bound to, wherever they are: they
# may be moved, and one does not pass for the other or for an object of a run.
DATASET, EXPORT = "dataset/", "export/"

_RUN_PARTS = 2  # The job's name and the run's id end the URL of a run's place.


def encrypted(job: JobSpec, store: ObjectStore, *, run_id: str = "") -> ObjectStore:
    """Encrypt objects of a store, if the job requests it.

    Objects are bound to job and run, so that one of another run does not pass.

    Args:
        job: Its ``storage.encryption`` names the wrapping key.
        store: The run's place; or that of all runs of the job.
        run_id: The run; empty for all.

    Raises:
        JobError: The job names no key.
        KeyRefused: Its key file cannot be used.
    """
    spec = job.storage.encryption
    if spec is None:
        return store
    keys = open_keys(spec.key, endpoint=spec.endpoint)
    return EncryptedStore(store, keys, prefix=place_of(job.name, run_id))


def place_of(job_name: str, run_id: str) -> str:
    """The encryption context of a run's objects, or of all runs of a job."""
    return f"{job_name}/{run_id}/" if run_id else f"{job_name}/"


def place_of_url(url: str) -> str:
    """The encryption context of a run's objects, from the URL of the run's place.

    Raises:
        JobError: It is too short to be one.
    """
    parts = [part for part in url.partition("://")[2].split("/") if part]
    if len(parts) < _RUN_PARTS:
        raise JobError(
            f"{url!r} is no run, dataset or export: give the URL of a run's own place, "
            "such as s3://BUCKET/PREFIX/JOB/RUNID"
        )
    return place_of(*parts[-_RUN_PARTS:])


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyName:
    """A key in an argument or an option.

    Attributes:
        name: See ``open_keys``; empty for no encryption.
        endpoint: URL of a service other than the cloud's own.
        argument: Where it was named, for messages.
    """

    name: str = ""
    endpoint: str = ""
    argument: str = "--encryption-key"

    def __bool__(self) -> bool:
        """Whether there is encryption."""
        return bool(self.name)

    def open(self) -> KeyService:
        """Open the service that holds it.

        Raises:
            JobError: It names no key.
            KeyRefused: Its key file cannot be used.
        """
        try:
            return open_keys(self.name, endpoint=self.endpoint)
        except JobError as error:
            raise JobError(error.reason, key=self.argument) from error


NO_KEY = KeyName()


def encrypted_with(key: KeyName, store: ObjectStore, *, place: str) -> ObjectStore:
    """Encrypt objects of a store, if there is a key.

    Args:
        key: Names a wrapping key, or none.
        store: Any.
        place: What its objects are bound to: ``DATASET`` or ``EXPORT``.

    Raises:
        JobError: It names no key.
        KeyRefused: Its key file cannot be used.
    """
    return EncryptedStore(store, key.open(), prefix=place) if key else store
