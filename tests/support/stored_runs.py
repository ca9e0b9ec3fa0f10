"""Synthetic runs that use object stores."""

from dataclasses import replace

from support import event_samples

from federation.events import Event, StoreUse, StoreUsed


def stored() -> list[Event]:
    """A run in a bucket, whose sites read data from buckets and a cache."""
    put = StoreUse(
        operation="put",
        calls=3,
        failed=0,
        sent_bytes=2_000_000,
        received_bytes=0,
        seconds=1.5,
        requests=7,
    )
    stat = StoreUse(
        operation="stat",
        calls=2,
        failed=1,
        sent_bytes=0,
        received_bytes=0,
        seconds=0.25,
        requests=2,
    )
    read = replace(
        stat, operation="read", failed=0, received_bytes=5_000_000, requests=3
    )
    run_in_bucket = StoreUsed(
        at=2.0,
        url="s3://federation-runs/experiments/two-clouds/20260101-000000-abcdef",
        way="same region",
        uses=(put, stat),
        who="coordinator",
    )
    data = StoreUsed(
        at=2.0,
        url="gs://hospital-b/shards/digits",
        way="internet",
        uses=(read,),
        who=event_samples.TWO_SITES[1],
        spared_calls=4,
        spared_bytes=12_500_000,
    )
    here = StoreUsed(
        at=2.0, url="file://data", way="this machine", uses=(read,), who="all sites"
    )
    *events, last = event_samples.two_sites(2)
    return [*events, data, run_in_bucket, here, last]
