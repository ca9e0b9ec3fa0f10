"""Stores in the fake of Google Cloud Storage."""

import itertools
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
