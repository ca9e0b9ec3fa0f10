"""What a run used stores for, as a table of the report and a line on the terminal."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from federation.events import StoreUse, StoreUsed
from monitoring.units import format_bytes, format_count
from monitoring.views.run_view import RunView

MAX_STORE_ROWS = 100

# The words of ``cloud_adapters.storage.metered``, which is on another floor.
_THIS_MACHINE, _INTERNET = "this machine", "internet"


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageTotal:
    """All uses together.

    Attributes:
        calls: Of all operations.
        requests: Likewise.
        failed: Likewise.
        sent_bytes: Written.
        received_bytes: Read.
        seconds: Of all calls, one after another.
        spared_calls: Reads that disk caches made unnecessary.
        spared_bytes: What they would have received.
    """

    calls: int
    requests: int
    failed: int
    sent_bytes: int
    received_bytes: int
    seconds: float
    spared_calls: int
    spared_bytes: int


def shown(view: RunView) -> Sequence[StoreUsed]:
    """The stores that the report lists: those of the coordinator and others first."""
    sites = set(view.started.sites)
    order = sorted(view.storage, key=lambda used: (used.who in sites, used.url))
    return order[:MAX_STORE_ROWS]


def total(storage: Iterable[StoreUsed]) -> StorageTotal:
    """Add up what stores were used for."""
    entries = tuple(storage)
    uses = [use for used in entries for use in used.uses]
    return StorageTotal(
        calls=sum(use.calls for use in uses),
        requests=sum(use.requests for use in uses),
        failed=sum(use.failed for use in uses),
        sent_bytes=sum(use.sent_bytes for use in uses),
        received_bytes=sum(use.received_bytes for use in uses),
        seconds=sum(use.seconds for use in uses),
        spared_calls=sum(used.spared_calls for used in entries),
        spared_bytes=sum(used.spared_bytes for used in entries),
    )


def line(view: RunView) -> str | None:
    """Say in one line what clouds were asked for; None if none was."""
    remote = [used for used in view.storage if used.way != _THIS_MACHINE]
    if not remote:
        return None
    found = total(remote)
    far = total(used for used in remote if used.way == _INTERNET)
    parts = [
        format_count(found.requests, "request"),
        f"{format_bytes(found.sent_bytes)} written",
        f"{format_bytes(found.received_bytes)} read",
    ]
    if over := far.sent_bytes + far.received_bytes:
        parts.append(f"{format_bytes(over)} of that over the internet")
    if found.spared_calls:
        reads = format_count(found.spared_calls, "read")
        parts.append(f"the cache spared {reads} of {format_bytes(found.spared_bytes)}")
    return ", ".join(parts)


def rows(used: StoreUsed) -> Sequence[StoreUse]:
    """Its operations, those that move content first."""
    order = {"put": 0, "read": 1}
    return sorted(
        used.uses, key=lambda use: (order.get(use.operation, 2), use.operation)
    )
