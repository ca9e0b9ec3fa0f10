"""Stores in the fake of Google Cloud Storage, or in a bucket that a person names."""

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

from google.auth.credentials import AnonymousCredentials
from support.fake_gcs import FakeGcs

from cloud_adapters.storage.gcs import GcsStore
from cloud_adapters.storage.gcs_upload import BLOCK_BYTES
from cloud_adapters.storage.retry import Retry
from federation.clock import VirtualClock

_numbers = itertools.count(1)


def quick_retry(**options: Any) -> Retry:
    """Waits that take no time."""
    return Retry(**{"clock": VirtualClock(), **options})


def new_bucket(server: FakeGcs) -> str:
    """Make a bucket and return its name."""
    name = f"bucket-{next(_numbers)}"
    server.add_bucket(name)
    return name


def store(
    server: FakeGcs, prefix: str = "", *, bucket: str = "", **options: Any
) -> GcsStore:
    """A store with small chunks, in a new bucket unless one is named."""
    defaults = {
        "endpoint": server.url,
        "credentials": AnonymousCredentials(),
        "retry": quick_retry(),
        "chunk_bytes": BLOCK_BYTES,
    }
    return GcsStore(bucket or new_bucket(server), prefix, **{**defaults, **options})


@contextlib.contextmanager
def named_store(url: str, endpoint: str) -> Iterator[GcsStore]:
    """A store in a bucket of somebody's; it is empty before and after.

    The whole bucket, since the longest key leaves no room for a prefix.
    """
    bucket = url.removeprefix("gs://").rstrip("/")
    store = GcsStore(bucket, endpoint=endpoint or None)
    found = next(store.list(), None)
    assert found is None, f"{url} is not empty: tests would delete {found}"
    try:
        yield store
    finally:
        for info in store.list():
            store.delete(info.key)
