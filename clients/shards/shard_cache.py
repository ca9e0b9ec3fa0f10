"""Open shards of one dataset, and those being fetched."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, InitVar, dataclass

from clients.shards import parquet_shard, tar_shard
from clients.shards.index import (
    INDEX_KEY,
    DatasetIndex,
    Labels,
    RowLayout,
    Rows,
    Shard,
    Split,
    check_content,
    read_index,
)
from cloud_adapters.storage.cached import ObjectCache
from cloud_adapters.storage.retry import Retry
from federation.errors import CorruptObject, FederationError, ObjectNotFound, SiteError
from federation.protocols import ObjectStore

MEMORY_BYTES = 512 * 1024 * 1024
THREADS = 4
# An outage of minutes is waited out: a site that gives up has lost its round.
PATIENCE = Retry(
    attempts=24, base_seconds=1.0, cap_seconds=30.0, deadline_seconds=600.0
)

_DECODE: dict[str, Callable[[bytes | memoryview, RowLayout], Rows]] = {
    "tar": tar_shard.decode,
    "parquet": parquet_shard.decode,
}


@dataclass(eq=False)
class ShardCache:
    """Opens shards, keeps the last used ones, and fetches some in advance.

    It may be used by several threads at once.

    Attributes:
        store: Where the dataset is.
        index: What it consists of.
        cache: Where shards are kept on disk; None for nowhere.
        window: Shards that are read together. Two windows are held, even if they
            are larger than ``memory_bytes``.
        memory_bytes: Of the shards that are open.
        threads: Shards that are fetched in advance at the same time; 0 for none.
        retry: Attempts beyond the store's own: a training waits rather than ends.
    """

    store: ObjectStore
    index: DatasetIndex
    _: KW_ONLY
    cache: ObjectCache | None
    window: InitVar[int]
    memory_bytes: InitVar[int] = MEMORY_BYTES
    threads: InitVar[int] = THREADS
    retry: Retry = PATIENCE

    def __post_init__(self, window: int, memory_bytes: int, threads: int) -> None:
        """Nothing is read yet."""
        shards = (*self.index.train.shards, *self.index.held_out.shards)
        self._size = max(
            memory_bytes, 2 * (window + 1) * max(shard.bytes for shard in shards)
        )
        self._pool = ThreadPoolExecutor(threads, "shards") if threads else None
        self._open: OrderedDict[str, Future[Rows]] = OrderedDict()
        self._bytes: dict[str, int] = {}
        # Open ones whose fetch has not started.
        self._waiting: set[Future[Rows]] = set()
        self._mutex = threading.Lock()

    def rows(self, split: Split, number: int) -> Rows:
        """Open a shard, or wait for it if it is being fetched.

        One that still waits for a thread is fetched by this one: who needs a shard now
        does not queue behind those that are needed later.

        Raises:
            CorruptObject: It is cut short, gone, or not what the index names.
            SiteError: It is gone, and another version of the dataset is there.
            StoreUnavailable: The store has been unreachable for long.
        """
        # Only who needs a shard is patient: threads that fetch in advance would keep a
        # process that wants to end.
        return self.retry.call(lambda _: self._rows(split, number))

    def expect(self, split: Split, numbers: Iterable[int]) -> None:
        """Begin to fetch shards that are not open."""
        if self._pool is None:
            return
        for number in numbers:
            with self._mutex:
                future, is_new = self._find(split, number)
            if is_new:
                self._pool.submit(self._fill_waiting, future, split, number)

    def content(self, about: Shard | Labels) -> bytes | memoryview:
        """Read an object of the dataset, through the cache, and check it."""

        def fetch() -> bytes:
            try:
                content = self.store.read(about.key)
            except ObjectNotFound as error:
                raise self._gone(about) from error
            check_content(content, about, self.store.url)
            return content

        if self.cache is None:
            return fetch()
        return self.cache.get(about.sha256, about.bytes, fetch)

    def _gone(self, about: Shard | Labels) -> FederationError:
        """Say why an object is not there."""
        try:
            now = read_index(self.store).version
        except FederationError:
            now = self.index.version
        if now == self.index.version:
            return CorruptObject(
                f"{about.key!r} is not in {self.store.url}, but {INDEX_KEY} lists it: "
                "write the dataset again with `crossfed data shard`, which sends what "
                "is missing"
            )
        return SiteError(
            f"the dataset in {self.store.url} was replaced while it was being read: it "
            f"now has version {now}, but this process opened version "
            f"{self.index.version}, whose shards are gone; start again with the new "
            "version, or write the old data to a separate URL"
        )

    def _find(self, split: Split, number: int) -> tuple[Future[Rows], bool]:
        """Find a shard that is open or being fetched; say whether it is new."""
        shard = split.shards[number]
        future = self._open.get(shard.key)
        if future is not None:
            self._open.move_to_end(shard.key)
            return future, False
        future = self._open[shard.key] = Future()
        self._bytes[shard.key] = shard.bytes
        self._waiting.add(future)
        self._forget_oldest()
        return future, True

    def _begin(self, future: Future[Rows]) -> bool:
        """Whether the caller must fetch a shard, because no other caller does."""
        is_ours = future in self._waiting
        self._waiting.discard(future)
        return is_ours

    def _rows(self, split: Split, number: int) -> Rows:
        key = split.shards[number].key
        with self._mutex:
            # In one go: a shard that waits may be let go at any time.
            future, _ = self._find(split, number)
            is_ours = self._begin(future)
        if is_ours:
            self._fill(future, split, number)
        try:
            return future.result()
        except BaseException:
            with self._mutex:  # So that it is tried again.
                if self._open.get(key) is future:
                    del self._open[key], self._bytes[key]
            raise

    def _forget_oldest(self) -> None:
        total = sum(self._bytes.values())
        while total > self._size and len(self._open) > 1:
            key, future = self._open.popitem(last=False)
            total -= self._bytes.pop(key)
            # Then it is not needed: a caller that needs it has started to fetch it.
            self._waiting.discard(future)

    def _fill_waiting(self, future: Future[Rows], split: Split, number: int) -> None:
        """Fetch a shard, unless someone else does or it was released."""
        with self._mutex:
            is_ours = self._begin(future)
        if is_ours:
            self._fill(future, split, number)

    def _fill(self, future: Future[Rows], split: Split, number: int) -> None:
        try:
            rows = self._decode(split, number)
        except BaseException as error:  # noqa: BLE001 -- the waiting thread gets it
            future.set_exception(error)
        else:
            future.set_result(rows)

    def _decode(self, split: Split, number: int) -> Rows:
        shard = split.shards[number]
        layout = RowLayout(
            examples=shard.examples,
            first=sum(before.examples for before in split.shards[:number]),
            input_shape=split.input_shape,
            input_type=shard.input_type,
            has_classes=split.targets == "class",
            target_shape=split.target_shape,
            target_type=shard.target_type,
        )
        try:
            return _DECODE[self.index.encoding](self.content(shard), layout)
        except (ValueError, TypeError) as error:
            raise CorruptObject(
                f"{shard.key!r} in {self.store.url} disagrees with {INDEX_KEY}: "
                f"{error}; write the dataset again with `crossfed data shard "
                "--replace`"
            ) from error
