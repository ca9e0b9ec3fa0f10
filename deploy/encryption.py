"""Encryption of what a run keeps in its store: ``storage.encryption`` of a job.

Encrypted are checkpoints, what sites keep for themselves in a simulation, and the
copies of a run's files in a bucket. Not encrypted are the files in the run's folder on
this machine: events, result, report and the model itself.
"""

from cloud_adapters.keys.names import open_keys
from cloud_adapters.storage.encrypted import EncryptedStore
from federation.job import JobSpec
from federation.protocols import ObjectStore


def encrypted(job: JobSpec, store: ObjectStore, *, run_id: str = "") -> ObjectStore:
    """Encrypt what goes into a store, if the job says so.

    Objects are bound to job and run, so that one of another run does not pass.

    Args:
        job: The job.
        store: The run's place; or that of all runs of the job.
        run_id: The run; empty for all.

    Raises:
        JobError: The job names no key.
        KeyRefused: Its key file cannot be used.
    """
    spec = job.storage.encryption
    if spec is None:
        return store
    place = f"{job.name}/{run_id}/" if run_id else f"{job.name}/"
    keys = open_keys(spec.key, endpoint=spec.endpoint)
    return EncryptedStore(store, keys, prefix=place)
