"""What the stores of tests have in common, whichever service they are of."""

import contextlib
from collections.abc import Iterator
from typing import Any, TypeVar

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
