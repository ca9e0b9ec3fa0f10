"""A run in a bucket: its checkpoints, and copies of its other files.

Below the URL of the job each run has a place of its own, ``NAME/ID/``. Checkpoints
are written there and nowhere else. Events are written to the run's folder on this
machine and copied before every checkpoint; the other files are copied at the end. So
a run whose machine is gone can be resumed on another, which fetches what is there.

Not here: ledgers of privacy budgets and keys of sites. They stay in the run's folder,
as they would at the sites, and a run that needs them is resumed where it began.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from cloud_adapters.storage.disk.store import LocalStore
from cloud_adapters.storage.disk.transfer import download, upload
from cloud_adapters.storage.probe import RemovesUnfinished, check_conditions_kept
from cloud_adapters.urls import StoreOptions, open_store, parse_url
from deploy.wiring import store_meters
from deploy.wiring.encryption import encrypted
from deploy.wiring.store_meters import StoreMeters, User
from federation.errors import ObjectNotFound, RunNotFound
from federation.events import Event, RoundFinished
from federation.ids import RunId, SiteId
from federation.job.spec import JobSpec
from federation.protocols import ObjectStore
from monitoring.runs.find import find_runs
from monitoring.runs.run_folder import LAST_BYTES, RunFolder, ends_run


def in_bucket(job: JobSpec) -> bool:
    """Whether a job keeps its runs in a bucket."""
    return parse_url(job.storage.url).is_remote


def open_bucket(job: JobSpec, run_id: str = "") -> ObjectStore:
    """Open a run's place in the job's bucket, or that of all runs of the job.

    Raises:
        JobError: The URL names no store.
        KeyRefused: The job's key file cannot be used.
        NotAuthenticated: There are no credentials for it.
    """
    return encrypted(job, open_plain(job, run_id), run_id=run_id)


def open_plain(job: JobSpec, run_id: str) -> ObjectStore:
    """Open a place as ``open_bucket`` does, without decrypting what is there."""
    below = f"{job.name}/{run_id}" if run_id else job.name
    return open_store(job.storage.url, below=below, options=store_options(job))


# A coordinator that lives has no upload of this age.
UNFINISHED_SECONDS = 24 * 3600.0


def open_kept(job: JobSpec, run: RunFolder, run_id: str) -> ObjectStore:
    """Open where a run keeps its checkpoints, its bucket or folder, not decrypting.

    Raises:
        JobError: The URL names no store.
        NotAuthenticated: There are no credentials for it.
    """
    return open_plain(job, run_id) if in_bucket(job) else LocalStore(run.path)


def store_options(job: JobSpec) -> StoreOptions:
    """A job's options of its store, besides the URL."""
    storage = job.storage
    return StoreOptions(
        endpoint=storage.endpoint,
        region=storage.region,
        bucket_owner=storage.bucket_owner,
        kms_key=storage.kms_key,
    )


class RunPlace:
    """The place of a run's checkpoints, as each user of it reaches it."""

    def __init__(
        self, job: JobSpec, run: RunFolder, run_id: RunId, meters: StoreMeters
    ) -> None:
        """Open the run's place in its bucket, or its folder.

        Raises:
            JobError: The URL names no store.
            KeyRefused: The job's key file cannot be used.
            NotAuthenticated: There are no credentials for it.
        """
        self._job = job
        self._run_id = run_id
        self._meters = meters
        self._plain = open_kept(job, run, run_id)
        self._sites = {site.name: site for site in job.sites}
        self.store = self._of(store_meters.coordinator(job))

    def try_out(self) -> None:
        """Check that the bucket supports the run's checkpoints.

        Before every start and every resume, since a service may have been replaced.
        Parts of uploads of this job's runs that were started a day ago or earlier, and
        never ended, are removed as well.
        A folder of this machine is not tried: its conditions are this product's own.

        Raises:
            StoreUnavailable: The bucket ignores conditions of writes, which would let
                two coordinators complete one run; or it is unreachable.
        """
        if in_bucket(self._job):
            check_conditions_kept(self._plain)
            _remove_unfinished(self._job)

    def store_of(self, name: SiteId) -> ObjectStore:
        """Return the same place, as one of the sites reaches it."""
        return self._of(store_meters.site(self._sites[name]))

    def _of(self, user: User) -> ObjectStore:
        region = self._job.storage.region
        metered = self._meters.metered(self._plain, user, region=region)
        return encrypted(self._job, metered, run_id=self._run_id)


def _remove_unfinished(job: JobSpec) -> None:
    """Remove parts of killed uploads of all runs of a job from its bucket."""
    with contextlib.closing(open_plain(job, "")) as place:
        if isinstance(place, RemovesUnfinished):
            place.remove_unfinished(older_seconds=UNFINISHED_SECONDS)


class Copies:
    """Copies of a run's files in its bucket, kept up to date."""

    def __init__(self, run: RunFolder, store: ObjectStore) -> None:
        """Copy a run's files to its place in a store."""
        self._run = run
        self._store = store

    def begin(self) -> None:
        """Copy the job: a store that cannot be written to shows it before training.

        Raises:
            StoreUnavailable: The store is unreachable, or forbids it.
        """
        self._copy(self._run.job)

    def listen(self, event: Event) -> None:
        """Copy the events that lead up to each checkpoint, before it is written.

        A checkpoint without its events would belong to a run that cannot be reported.

        Raises:
            StoreUnavailable: The store is unreachable.
        """
        if isinstance(event, RoundFinished):
            self._copy(self._run.events)

    def leave(self) -> None:
        """Copy everything, the record of events last, since it names the others.

        Raises:
            StoreUnavailable: The store is unreachable.
        """
        run = self._run
        files = (run.job, run.model, run.statistics, run.result, run.report)
        for path in (*files, run.events):
            if path.is_file():
                self._copy(path)

    def _copy(self, path: Path) -> None:
        upload(self._store, path.name, path)


def newest_folder(job: JobSpec, root: Path, *, unfinished: bool = True) -> Path:
    """Folder of a job's newest run, on this machine or in its bucket.

    Args:
        job: Names its runs.
        root: Folder of all runs on this machine.
        unfinished: Prefer the newest run that has rounds left.

    Raises:
        RunNotFound: There is none in either.
        StoreUnavailable: The bucket is unreachable.
    """
    found = [run for run in find_runs(root) if run.path.parent == root / job.name]
    here = {run.path.name: run for run in found}
    with contextlib.ExitStack() as stack:
        there: dict[str, ObjectStore] = {}
        if in_bucket(job):
            store = stack.enter_context(contextlib.closing(open_bucket(job)))
            there = dict.fromkeys(_runs(store), store)
        # The service of an aggregator resumes those that were submitted to it.
        submitted = {name for name, run in here.items() if run.is_submitted()}
        names = sorted((here.keys() | there.keys()) - submitted, reverse=True)
        if not names:
            places = f"{job.storage.url} or in {root}" if in_bucket(job) else f"{root}"
            raise RunNotFound(
                f"there is no run of the job {job.name!r} in {places} to resume: omit "
                "--resume to start one, or give the run's folder with --out"
            )
        left = (
            name
            for name in (names if unfinished else ())
            if not (name in here and here[name].is_ended())
            and (name not in there or _is_left(there[name], name))
        )
        return root / job.name / next(left, names[0])


def _is_left(store: ObjectStore, name: str) -> bool:
    """Whether a run in a bucket has rounds left for a simulation."""
    key = f"{name}/events.jsonl"
    size = store.stat(key).size
    # No text in JSON has such quotes.
    if b'"engine": "deployed"' in store.read(key, length=min(size, LAST_BYTES)):
        return False
    return not ends_run(store.read(key, start=max(0, size - LAST_BYTES)))


def fetch(job: JobSpec, run: RunFolder) -> None:
    """Update a run's folder from its bucket, before it is resumed.

    Nothing happens if the folder knows as much: a killed run has written events after
    those that it copied.

    Raises:
        RunConflict: Another process works on the run.
        RunNotFound: What the run needs is in the folder that it began in.
        StoreUnavailable: The bucket is unreachable.
    """
    if not in_bucket(job):
        return
    with run.locked(), _bucket_of(job, run) as store:
        if store is None:
            return
        try:
            there = store.stat(run.events.name)
        except ObjectNotFound:
            return
        here = run.events.stat().st_size if run.exists() else 0
        if there.size <= here:
            return
        _check_resumable(job, run)
        download(store, run.events.name, run.events, if_version=there.version)


@contextlib.contextmanager
def _bucket_of(job: JobSpec, run: RunFolder) -> Iterator[ObjectStore | None]:
    """Open the place of the run in a folder; of the newest if the folder is empty."""
    run_id = run.run_id() or run.named_id()
    if run_id is None:
        with contextlib.closing(open_bucket(job)) as store:
            run_id = max(_runs(store), default=None)
    if run_id is None:
        yield None
        return
    with contextlib.closing(open_bucket(job, run_id)) as store:
        yield store


def _runs(store: ObjectStore) -> Iterator[RunId]:
    """Runs whose events are in a store of a job's runs."""
    after = ""
    while (info := next(store.list(start_after=after), None)) is not None:
        name = info.key.partition("/")[0]
        with contextlib.suppress(ObjectNotFound):
            store.stat(f"{name}/events.jsonl")
            yield RunId(name)
        # Behind every key of this run: "0" comes after "/".
        after = f"{name}0"


def _check_resumable(job: JobSpec, run: RunFolder) -> None:
    if job.privacy.differential_privacy.enabled:
        raise RunNotFound(
            f"{run.path} is not the folder in which the run spent its privacy budget: "
            "resume it on the machine where it started, or copy that folder here"
        )
