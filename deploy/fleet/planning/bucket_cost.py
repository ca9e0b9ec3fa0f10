"""What the bucket of a job costs: requests during its run, and what stays in it."""

from collections.abc import Mapping
from dataclasses import replace

from aggregator.checkpoint import CHUNK_BYTES
from cloud_adapters.urls import parse_url
from deploy.fleet.planning.plan import Alternative
from deploy.fleet.prices import HOURS_PER_MONTH, Prices
from deploy.fleet.tables.providers import AWS, GCP
from federation.job.spec import JobSpec
from federation.rounds import bucket, cost
from federation.rounds.cost import Speeds
from federation.rounds.server_optimizer import server_optimizer

_GIGA, _FLOAT_BYTES = 1e9, 4
_MONTH = HOURS_PER_MONTH * 3600.0


def storage(
    own: Alternative, prices: Prices, speeds: Speeds | None = None
) -> Mapping[str, float] | None:
    """What a run leaves in the bucket of its job; None if it is in no bucket.

    Args:
        own: The job.
        prices: The table.
        speeds: Speeds of the lines; None if they are not known.

    Returns:
        ``bytes``, D, of the model and of the checkpoints that are kept, which hold the
        model and what the server's optimiser needs besides, so at least so many;
        ``dollars_per_month``, D x C, if the table has the cloud; and with speeds,
        ``access_seconds``, T, to read all of it over the fastest line, and
        ``dollars_per_month_and_second``, S = D x C / T, which grows with the price and
        with the speed that it buys.
    """
    job = own.traffic.job
    cloud = _bucket_cloud(job)
    if cloud is None:
        return None
    model = _FLOAT_BYTES * own.traffic.layout.size
    kept = model * (1 + job.storage.keep_checkpoints)
    found, month = {"bytes": float(kept)}, prices.storage_month(cloud)
    if month is not None:
        found["dollars_per_month"] = kept / _GIGA * month
    if month is not None and speeds is not None:
        fastest = max(site.down_bytes_per_second for site in speeds.sites)
        found["access_seconds"] = kept / fastest
        dollars = found["dollars_per_month"] / found["access_seconds"]
        found["dollars_per_month_and_second"] = dollars
    return found


def with_bucket(way: Alternative, prices: Prices) -> Alternative:
    """Add what the bucket of a job costs during its run: requests, and the bytes kept.

    Args:
        way: A way to run a job; one in no bucket is returned as it is.
        prices: The table; a cloud that it lacks makes the dollars unknown.
    """
    job = way.traffic.job
    cloud = _bucket_cloud(job)
    if cloud is None or way.cost is None:
        return way
    model = _FLOAT_BYTES * way.traffic.layout.size
    asked = bucket.requests_of_run(
        model,
        rounds=job.rounds,
        keep=job.storage.keep_checkpoints,
        vectors=len(server_optimizer(job.aggregation.server_optimizer).init(1)),
        chunk_bytes=CHUNK_BYTES,
    )
    kept = storage(way, prices) or {}
    month = kept.get("dollars_per_month", cost.UNKNOWN)
    more = {
        "requests": prices.requests(cloud, writes=asked.writes, reads=asked.reads),
        "storage": month * way.cost.seconds / _MONTH,
    }
    return replace(way, cost=replace(way.cost, dollars={**way.cost.dollars, **more}))


def _bucket_cloud(job: JobSpec) -> str | None:
    """The cloud of a job's bucket; None if it is in none."""
    return {"s3": AWS, "gs": GCP}.get(parse_url(job.storage.url).scheme)
