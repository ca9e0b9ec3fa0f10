"""What a deployment leaves when its nodes have ended, what that costs, and its removal.

Privacy ledgers are never removed, nor what they need: the folders of sites, and of each
private run the job and the events, which hold the anchors of the sites' ledgers.
"""

import contextlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cloud_adapters.storage.disk.part_file import file_errors
from cloud_adapters.urls import StoreOptions, open_store, parse_url
from deploy.fleet.machine_spec import AWS, GCP
from deploy.fleet.prices import Prices
from deploy.fleet.state import Deployment
from deploy.wiring import run_store
from deploy.wiring.exchange import ExchangeSpec
from federation.errors import FederationError, RunConflict
from federation.job.spec import JobSpec
from federation.job.storage_job import StorageSpec
from federation.protocols import ObjectStore
from monitoring.runs.run_folder import RunFolder
from privacy.dp.ledger.ledger_files import LEDGER_NAME

_CLOUDS = {"s3": AWS, "gs": GCP, "aws-kms": AWS, "gcp-kms": GCP}
_GIGA = 1e9
# Of a private run: its job, and the events, which hold the anchors of ledgers.
_FOR_LEDGERS = frozenset({"job.toml", "events.jsonl"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """Something that stays when nodes have ended.

    Attributes:
        what: In words.
        place: Where.
        num_bytes: How much it holds; None if that is not known, or of a key.
        dollars: What it costs a month; None if that is not known.
        trouble: Why something is not known.
    """

    what: str
    place: str
    num_bytes: int | None
    dollars: float | None = 0.0
    trouble: str = ""


def leftovers(
    deployment: Deployment, job: JobSpec | None, prices: Prices
) -> Sequence[Leftover]:
    """What a deployment leaves in its folder, in buckets and at key services.

    Args:
        deployment: Its nodes need not have ended.
        job: Its job, which may name a bucket and keys; None if it cannot be read.
        prices: What storage and keys cost.
    """
    return [*_folders(deployment), *_buckets(deployment, job, prices)]


def _folders(deployment: Deployment) -> Iterator[Leftover]:
    aggregator, runs = deployment.plan.aggregator, deployment.plan.aggregator / "runs"
    if runs.exists():
        yield _folder("runs and results", runs)
    if aggregator.exists():
        size = _size(aggregator) - _size(runs)
        what = "keys and state of the aggregator"
        yield Leftover(what=what, place=str(aggregator), num_bytes=size)
    # Those of sites that were removed from the file are as private as the others.
    wanted = {site.name for site in deployment.plan.file.sites}
    for place in sorted(deployment.plan.site("x").parent.glob("*/")):
        removed = "" if place.name in wanted else ", which is not in the file"
        what = f"keys, ledgers and state of {place.name}{removed}"
        yield _folder(what, place)
    nodes = deployment.plan.folder / "nodes"
    if nodes.exists():
        yield _folder("logs of nodes", nodes)


def _buckets(
    deployment: Deployment, job: JobSpec | None, prices: Prices
) -> Iterator[Leftover]:
    exchange = deployment.plan.file.exchange
    if job is not None and run_store.in_bucket(job):
        opens = partial(run_store.open_plain, job, "")
        yield _bucket("runs in the bucket", job.storage.url, prices, opens)
    if exchange.url:
        options = StoreOptions(
            endpoint=exchange.endpoint,
            region=exchange.region,
            bucket_owner=exchange.bucket_owner,
            kms_key=exchange.kms_key,
        )
        opens = partial(open_store, exchange.url, options=options)
        yield _bucket("messages in transit", exchange.url, prices, opens)
    for cloud, name in _keys(exchange if job is None else job.storage, exchange):
        yield Leftover(
            what="key, if nothing else uses it",
            place=name,
            num_bytes=None,
            dollars=prices.key_month(cloud),
        )


def _keys(*specs: StorageSpec | ExchangeSpec) -> Iterator[tuple[str, str]]:
    """Yield the cloud and the name of each key that a cloud keeps, once."""
    found = {}
    for spec in specs:
        if spec.kms_key:
            found[spec.kms_key] = AWS if spec.kms_key.startswith("arn:") else GCP
        if spec.encryption is not None:
            service, _, name = spec.encryption.key.partition(":")
            if service in _CLOUDS:
                found[name] = _CLOUDS[service]
    yield from ((cloud, name) for name, cloud in found.items())


def _bucket(
    what: str, url: str, prices: Prices, opens: Callable[[], ObjectStore]
) -> Leftover:
    """Look at a bucket; one that cannot be reached hides nothing else."""
    trouble = ""
    num_bytes = dollars = None
    try:
        with contextlib.closing(opens()) as store:
            num_bytes = sum(info.size for info in store.list())
    except FederationError as error:
        trouble = str(error)
    cloud = _CLOUDS.get(parse_url(url).scheme)
    month = 0.0 if cloud is None else prices.storage_month(cloud)
    if num_bytes is not None and month is not None:
        dollars = num_bytes / _GIGA * month
    return Leftover(
        what=what, place=url, num_bytes=num_bytes, dollars=dollars, trouble=trouble
    )


def _folder(what: str, place: Path) -> Leftover:
    return Leftover(what=what, place=str(place), num_bytes=_size(place))


def _size(place: Path) -> int:
    return sum(path.lstat().st_size for path in place.rglob("*") if not path.is_dir())


def purge(deployment: Deployment, job: JobSpec | None) -> tuple[int, Sequence[Path]]:
    """Delete runs and results of a deployment whose nodes have ended.

    Those of a job in a bucket go from there, too. A run folder with a ledger stays as
    it is. Called again after it was interrupted, this continues.

    Args:
        deployment: Of what.
        job: Its job, which may keep runs in a bucket; None if it cannot be read.

    Returns:
        Bytes that were deleted, and folders of runs of which something stays.

    Raises:
        RunConflict: Another process works on a run.
        StoreError: Something cannot be deleted.
    """
    bucket = job if job is not None and run_store.in_bucket(job) else None
    deleted, kept = 0, []
    for place in sorted((deployment.plan.aggregator / "runs").glob("*/*/")):
        run = RunFolder(place)
        # That of a simulation: its sites remember it in a folder beside it.
        if place.name == run.memory.name or any(place.rglob(LEDGER_NAME)):
            kept.append(place)
            continue
        if run.is_locked():
            raise RunConflict(f"another process is using {place}: wait until it ends")
        stays = _FOR_LEDGERS if _is_private(run) else frozenset[str]()
        if bucket is not None and place.parent.name == bucket.name:
            deleted += _purge_bucket(bucket, place.name, stays)
        deleted += _purge_folder(place, stays)
        if place.exists():
            kept.append(place)
    return deleted, kept


def _is_private(run: RunFolder) -> bool:
    """Whether ledgers may need a run; one whose job cannot be read may be."""
    try:
        job = run.read_spec()
    except FederationError:
        return True
    return job.privacy.differential_privacy.enabled


def _purge_bucket(job: JobSpec, run_id: str, stays: frozenset[str]) -> int:
    deleted = 0
    with contextlib.closing(run_store.open_plain(job, run_id)) as store:
        for info in [*store.list()]:
            if info.key not in stays:
                store.delete(info.key)
                deleted += info.size
    return deleted


def _purge_folder(place: Path, stays: frozenset[str]) -> int:
    deleted = 0
    with file_errors("delete", place):
        # The request first: without it no aggregator takes the run up.
        order = sorted(place.iterdir(), key=lambda path: path.name != "request.json")
        for path in order:
            if path.name in stays:
                continue
            if path.is_dir() and not path.is_symlink():
                deleted += _size(path)
                shutil.rmtree(path)
            else:
                deleted += path.lstat().st_size
                path.unlink()
        if not any(place.iterdir()):
            place.rmdir()
    return deleted
