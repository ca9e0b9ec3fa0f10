"""What is noted of the calls to a store."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.faulty_store import FaultyStore, outage

from cloud_adapters.storage.memory import MemoryStore
from cloud_adapters.storage.metered import Meter, MeteredStore, way_to
from cloud_adapters.storage.request_count import carried, note_request
from federation.clock import VirtualClock
from federation.errors import ObjectNotFound, StoreUnavailable
from federation.protocols import ObjectStore


def metered(store: ObjectStore | None = None) -> tuple[MeteredStore, Meter]:
    meter = Meter()
    return MeteredStore(store or MemoryStore(), meter, VirtualClock()), meter


def test_calls_and_bytes():
    """Bytes are those of the content, of whole objects and of ranges."""
    store, meter = metered()
    store.put("a", [b"12345", b"67890"])
    store.put("b", [b"1"])
    store.read("a", start=2, length=3)
    assert len(list(store.list())) == 2
    store.stat("a")
    store.delete("a")
    found = [
        (use.operation, use.calls, use.failed, use.sent_bytes, use.received_bytes)
        for use in meter.take()
    ]
    assert found == [
        ("delete", 1, 0, 0, 0),
        ("list", 1, 0, 0, 0),
        ("put", 2, 0, 11, 0),
        ("read", 1, 0, 0, 3),
        ("stat", 1, 0, 0, 0),
    ]
    assert list(meter.take()) == []


def test_failures():
    """They are calls, and pass on as they are."""
    store, meter = metered(FaultyStore(MemoryStore(), outage(1)))
    with pytest.raises(ObjectNotFound):
        store.stat("missing")
    store.put("key", [b"x"])
    with pytest.raises(StoreUnavailable):
        store.read("key")
    assert store.read("key") == b"x"
    uses = {use.operation: use for use in meter.take()}
    assert (uses["stat"].calls, uses["stat"].failed) == (1, 1)
    read = uses["read"]
    assert (read.calls, read.failed, read.received_bytes) == (2, 1, 1)


def test_a_list_that_is_left_is_no_failure():
    """Whoever wants the first key alone stops there."""
    store, meter = metered()
    store.put("a", [b""])
    store.put("b", [b""])
    listing = store.list()
    next(listing)
    listing.close()  # type: ignore[attr-defined]
    (use,) = (use for use in meter.take() if use.operation == "list")
    assert (use.calls, use.failed) == (1, 0)


def test_threads_share_a_meter():
    """No call is lost."""
    store, meter = metered()
    store.put("key", [b"x" * 10])
    meter.take()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: store.read("key"), range(400)))
    (use,) = meter.take()
    assert (use.calls, use.received_bytes) == (400, 4000)


def test_conditions_and_metadata_pass():
    """A metered store is the store that it meters."""
    store, _ = metered()
    first = store.put("key", [b"x"], if_absent=True, metadata={"a": "b"})
    assert store.stat("key") == first
    assert store.read("key", if_version=first.version) == b"x"
    assert store.url == "memory://"


@pytest.mark.parametrize(
    ("scheme", "region", "cloud", "where", "expected"),
    [
        ("s3", "us-east-1", "aws", "us-east-1", "same region"),
        ("s3", "us-east-1", "aws", "eu-west-1", "other region"),
        ("s3", "us-east-1", "gcp", "us-east1", "internet"),
        ("gs", "us-east1", "gcp", "us-east1", "same region"),
        ("gs", "us-east1", "aws", "us-east1", "internet"),
        ("s3", "", "aws", "us-east-1", "unknown"),
        ("s3", "us-east-1", "aws", "", "unknown"),
        ("s3", "us-east-1", "", "us-east-1", "unknown"),
        ("file", "", "aws", "us-east-1", "this machine"),
    ],
)
def test_ways(scheme: str, region: str, cloud: str, where: str, expected: str):
    """The price depends on whether a cloud or a region is left."""
    way = way_to(scheme, region, from_cloud=cloud, from_region=where)
    assert way == expected


class Asking(FaultyStore):
    """A store that asks its service twice for each read, as when one attempt fails."""

    def read(self, *args: Any, **options: Any) -> bytes:
        note_request()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(carried(note_request)).result()
        return super().read(*args, **options)

    def list(self, *args: Any, **options: Any) -> Any:
        for info in super().list(*args, **options):
            note_request()
            yield info


def test_requests_are_those_of_the_call():
    """Also in threads that work for it; not those that others make meanwhile."""
    store, meter = metered(Asking(MemoryStore()))
    other, elsewhere = metered(Asking(MemoryStore()))
    for one in (store, other):
        one.put("a", [b"x"])
        one.put("b", [b"x"])
    for info in store.list():
        other.read(info.key)
        store.read(info.key)
    note_request()  # Nobody's.
    assert {use.operation: use.requests for use in meter.take()} == {
        "put": 0,
        "list": 2,
        "read": 4,
    }
    assert {use.operation: use.requests for use in elsewhere.take()} == {
        "put": 0,
        "read": 4,
    }


@pytest.mark.slow
def test_requests_of_buckets(s3_server: Any, gcs_server: Any):
    """As many as the services have seen: parts and sessions included."""
    from support import gcs_stores  # noqa: PLC0415 (slow to import)

    for server, store in (
        (s3_server, s3_server.store()),
        (gcs_server, gcs_stores.store(gcs_server)),
    ):
        ours, meter = metered(store)
        before = len(server.requests)
        ours.put("large", iter([bytes(9 * 1024 * 1024)]))
        ours.read("large")
        ours.stat("large")
        assert len(list(ours.list())) == 1
        ours.delete("large")
        counted = sum(use.requests for use in meter.take())
        assert counted == len(server.requests) - before
