"""Stores in the fake of Google Cloud Storage, or in a bucket that a person names."""

import itertools
from contextlib import AbstractContextManager
from typing import Any

from google.auth.credentials import AnonymousCredentials
from support.buckets import borrowed, quick_retry
from support.fake_gcs import FakeGcs

from cloud_adapters.storage.gcs.store import BLOCK_BYTES, GcsStore

_numbers = itertools.count(1)


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


def named_store(url: str, endpoint: str) -> AbstractContextManager[GcsStore]:
    """A store in a bucket of somebody's, with small chunks; empty before and after."""
    bucket = url.removeprefix("gs://").rstrip("/")
    store = GcsStore(bucket, endpoint=endpoint or None, chunk_bytes=BLOCK_BYTES)
    return borrowed(store)
