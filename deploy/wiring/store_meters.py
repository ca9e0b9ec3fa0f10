"""Measures the use of a run's stores: by whom, and over which route.

A simulation's sites are where the job says that they are, and so is its coordinator:
the reported route is the one that they would take. Deployed, a coordinator's uses are
in the run's events, and a site's in its own folder (``site_agent``).
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cloud_adapters.storage.cached import ObjectCache
from cloud_adapters.storage.metered import Meter, MeteredStore, way_to
from federation.events import StoreUsed
from federation.job.spec import JobSpec, SiteSpec
from federation.protocols import Clock, ObjectStore

COORDINATOR = "coordinator"
ALL_SITES = "all sites"

# Takes a store, the region of its bucket, and the cache of what is read from it.
Watch = Callable[[ObjectStore, str, ObjectCache | None], ObjectStore]

_UNKNOWN = frozenset({"local", "unknown"})


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """A user of a store, and its place.

    Attributes:
        name: ``coordinator``, a site's, or ``all sites``.
        cloud: As in the job; empty if unknown.
        region: The cloud's name of it; empty if unknown.
    """

    name: str
    cloud: str = ""
    region: str = ""


@dataclass(slots=True)
class _CacheMeter:
    """A cache, and how much of its use has been reported."""

    cache: ObjectCache
    hits: int = 0
    hit_bytes: int = 0


class StoreMeters:
    """Measures every use of the stores that pass through it."""

    def __init__(self, clock: Clock) -> None:
        """Begin with no store."""
        self._clock = clock
        self._lock = threading.Lock()  # A site that restarts comes from its own thread.
        self._meters: dict[tuple[str, str, str], Meter] = {}
        self._caches: dict[tuple[str, str, str], list[_CacheMeter]] = {}

    def metered(
        self,
        store: ObjectStore,
        user: User,
        *,
        region: str = "",
        cache: ObjectCache | None = None,
    ) -> ObjectStore:
        """Measure a store's use from now on.

        Args:
            store: Any; the encrypted bytes are counted of one that is below an
                encrypted one.
            user: By whom.
            region: Region of the bucket; empty if unknown.
            cache: What reads of this user are spared by.
        """
        scheme = store.url.partition("://")[0]
        way = way_to(scheme, region, from_cloud=user.cloud, from_region=user.region)
        place = (store.url, user.name, way)
        with self._lock:
            if cache is not None:
                self._caches.setdefault(place, []).append(_CacheMeter(cache))
            meter = self._meters.setdefault(place, Meter())
        return MeteredStore(store, meter, self._clock)

    def watch(self, user: User) -> Watch:
        """Return a function that measures the stores of a user's data."""
        return lambda store, region, cache: self.metered(
            store, user, region=region, cache=cache
        )

    def used(self) -> Iterator[StoreUsed]:
        """Return the use of stores since the last time."""
        with self._lock:
            meters = sorted(
                (place, meter)
                for place, meter in self._meters.items()
                if meter.is_used or place in self._caches
            )
        for place, meter in meters:
            url, who, way = place
            uses, (calls, num_bytes) = tuple(meter.take()), self._spared(place)
            if uses or calls:
                yield StoreUsed(
                    at=self._clock.now(),
                    url=url,
                    way=way,
                    uses=uses,
                    who=who,
                    spared_calls=calls,
                    spared_bytes=num_bytes,
                )

    def _spared(self, place: tuple[str, str, str]) -> tuple[int, int]:
        """Hits of the caches since the last time, and their bytes."""
        calls = num_bytes = 0
        for spared in self._caches.get(place, ()):
            counts = spared.cache.counts
            hits, hit_bytes = counts.hits, counts.hit_bytes
            calls += hits - spared.hits
            num_bytes += hit_bytes - spared.hit_bytes
            spared.hits, spared.hit_bytes = hits, hit_bytes
        return calls, num_bytes


def coordinator(job: JobSpec) -> User:
    """The coordinator, at the job's place."""
    place = job.storage.coordinator
    return User(name=COORDINATOR, cloud=_known(place.cloud), region=place.region)


def site(spec: SiteSpec) -> User:
    """One of the sites, at the job's place."""
    return User(name=spec.name, cloud=_known(spec.cloud), region=spec.region)


def all_sites(job: JobSpec) -> User:
    """The sites that share the job's dataset; they are somewhere if all are there."""
    sharing = [spec for spec in job.sites if spec.data is None]
    places = {(_known(spec.cloud), spec.region) for spec in sharing}
    cloud, region = places.pop() if len(places) == 1 else ("", "")
    return User(name=ALL_SITES, cloud=cloud, region=region)


def _known(cloud: str) -> str:
    return "" if cloud in _UNKNOWN else cloud
