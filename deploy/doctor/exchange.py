"""Finds whether the store of the exchange works for this machine, and how fast.

The aggregator leaves an object where models are kept, which sites fetch; a site leaves
one below its own name. Each is written over the next time, since a site need not be
allowed to delete, or to read what it has written.
"""

import contextlib
import os
from collections.abc import Iterator

from deploy.doctor.checks import Check, ok, problem, warning
from deploy.wiring import exchange
from deploy.wiring.exchange import ExchangeSpec
from federation.errors import FederationError, ObjectNotFound
from federation.protocols import Clock, ObjectStore

PROBE_BYTES = 4 << 20
SLOW_BYTES_PER_SECOND = 1e6
AGGREGATORS_PROBE = "model/doctor/probe"
_NAME = "exchange"


def sites_probe(site: str) -> str:
    """Key of a site's object."""
    return f"sites/{site}/doctor/probe"


def checks(spec: ExchangeSpec, *, site: str | None, clock: Clock) -> Iterator[Check]:
    """Write and read an object, as a run would.

    Args:
        spec: Settings of the store.
        site: Whose configuration names it; None for the aggregator's.
        clock: Measures how long it takes.
    """
    try:
        store = exchange.open_exchange(spec)
        if store is None:
            yield ok(_NAME, f"none: models above {spec.threshold_mb} MiB are refused")
            return
        with contextlib.closing(store):
            yield _written(store, site, clock)
            yield _read(store, site, clock)
    except FederationError as error:
        yield problem(
            _NAME,
            f"{spec.url}: {error}",
            "correct [exchange], or this machine's permissions there: see "
            "docs/howto/every-federation.md",
        )


def _written(store: ObjectStore, site: str | None, clock: Clock) -> Check:
    key = AGGREGATORS_PROBE if site is None else sites_probe(site)
    content = os.urandom(PROBE_BYTES)  # Or something on the way would compress it.
    begin = clock.monotonic()
    store.put(key, [content])
    return _speed(f"writing to {store.url}:", clock.monotonic() - begin)


def _read(store: ObjectStore, site: str | None, clock: Clock) -> Check:
    begin = clock.monotonic()
    try:
        store.read(AGGREGATORS_PROBE)
    except ObjectNotFound:
        if site is None:
            raise
        return warning(
            _NAME,
            f"{store.url} has nothing to read yet",
            "ask the aggregator's operator to run crossfed doctor --aggregator",
        )
    return _speed(f"reading from {store.url}:", clock.monotonic() - begin)


def _speed(what: str, seconds: float) -> Check:
    speed = PROBE_BYTES / max(seconds, 1e-9)
    found = f"{what} {speed / 1e6:.1f} MB/s"
    if speed >= SLOW_BYTES_PER_SECOND:
        return ok(_NAME, found)
    advice = "a large model will take a long time: raise round_deadline_seconds"
    return warning(_NAME, found, advice)
