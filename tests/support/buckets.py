"""What the stores of tests have in common, whichever service they are of."""

import contextlib
from collections.abc import Iterator
from typing import Any, TypeVar

import pytest

from cloud_adapters.storage.retry import Retry
from federation.clock import VirtualClock
from federation.protocols import ObjectStore

_Store = TypeVar("_Store", bound=ObjectStore)


def quick_retry(**options: Any) -> Retry:
    """Waits that take no time."""
    return Retry(**{"clock": VirtualClock(), **options})


@contextlib.contextmanager
def borrowed(store: _Store) -> Iterator[_Store]:
    """A store in somebody's bucket; it is empty before and after.

    The whole bucket, since the longest key leaves no room for a prefix.
    """
    found = next(store.list(), None)
    assert found is None, f"{store.url} is not empty: tests would delete {found}"
    try:
        yield store
    finally:
        for info in store.list():
            store.delete(info.key)


def storage_table(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> dict[str, str]:
    """The table ``storage`` of a job that keeps its runs in a new bucket.

    The fixture's parameter says of which service it is, ``s3`` or ``gs``.
    """
    server: Any
    if request.param == "s3":
        server = request.getfixturevalue("s3_server")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test-key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test-secret")
        name = server.bucket()
    else:
        from support import gcs_stores  # noqa: PLC0415 (slow to import)

        server = request.getfixturevalue("gcs_server")
        name = gcs_stores.new_bucket(server)
    url = f"{request.param}://{name}/our/runs"
    return {"url": url, "endpoint": server.url, "region": "us-east-1"}
