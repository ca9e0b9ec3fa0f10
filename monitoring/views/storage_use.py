"""A run's use of stores, as a table of the report and a line on the terminal."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce

from federation.events import StoreUse, StoreUsed
from monitoring.units import format_bytes, format_count
from monitoring.views.run_view import RunView

MAX_STORE_ROWS = 100

# The words of ``cloud_adapters.storage.metered``, which is on another floor.
_THIS_MACHINE, _INTERNET = "this machine", "internet"

_NOTHING = StoreUse(
    operation="", calls=0, failed=0, sent_bytes=0, received_bytes=0, seconds=0.0
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageTotal:
    """All uses together.

    Attributes:
        all_uses: Uses of all operations.
        spared_calls: Reads that disk caches made unnecessary.
        spared_bytes: What they would have received.
    """

    all_uses: StoreUse
    spared_calls: int
    spared_bytes: int


def shown(view: RunView) -> Sequence[StoreUsed]:
    """The stores that the report lists: those of the coordinator and others first."""
    sites = set(view.started.sites)
    order = sorted(view.storage, key=lambda used: (used.who in sites, used.url))
    return order[:MAX_STORE_ROWS]


def total(storage: Iterable[StoreUsed]) -> StorageTotal:
    """Add up the use of stores."""
    entries = tuple(storage)
    uses = [use for used in entries for use in used.uses]
    return StorageTotal(
        all_uses=reduce(lambda one, other: other.plus(one), uses, _NOTHING),
        spared_calls=sum(used.spared_calls for used in entries),
        spared_bytes=sum(used.spared_bytes for used in entries),
    )


def line(view: RunView) -> str | None:
    """Summarise the requests to clouds in one line; None without any."""
    remote = [used for used in view.storage if used.way != _THIS_MACHINE]
    if not remote:
        return None
    every = total(remote)
    found = every.all_uses
    far = total(used for used in remote if used.way == _INTERNET).all_uses
    parts = [
        format_count(found.requests, "request"),
        f"{format_bytes(found.sent_bytes)} written",
        f"{format_bytes(found.received_bytes)} read",
    ]
    if over := far.sent_bytes + far.received_bytes:
        parts.append(f"{format_bytes(over)} of that over the internet")
    if every.spared_calls:
        reads = format_count(every.spared_calls, "read")
        parts.append(f"the cache saved {reads} of {format_bytes(every.spared_bytes)}")
    return ", ".join(parts)


def rows(used: StoreUsed) -> Sequence[StoreUse]:
    """Its operations, those that move content first."""
    order = {"put": 0, "read": 1}
    return sorted(
        used.uses, key=lambda use: (order.get(use.operation, 2), use.operation)
    )
