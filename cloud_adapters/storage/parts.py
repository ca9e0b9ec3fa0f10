"""Parts of an object, workers that fetch them, and buffers that hold them."""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

PART_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Bytes ``[start, start + length)``, the ``number``-th part from 0."""

    number: int
    start: int
    length: int


def parts_of(size: int, part_bytes: int) -> Iterator[Part]:
    """Yield the parts of so many bytes, in order; none of an empty object.

    Raises:
        ValueError: ``part_bytes`` is not positive.
    """
    if part_bytes < 1:
        raise ValueError(f"a part cannot have {part_bytes} bytes: at least one")
    for number, start in enumerate(range(0, size, part_bytes)):
        yield Part(number=number, start=start, length=min(part_bytes, size - start))


def fetch_all(
    parts: Iterable[Part], fetch: Callable[[Part], None], *, workers: int
) -> None:
    """Fetch parts in threads; each worker holds one at a time.

    After a failure, or when the caller is interrupted, no further part is started.

    Raises:
        Exception: What ``fetch`` raised first.
        ValueError: There is no worker.
    """
    todo, lock, stop = iter(parts), threading.Lock(), threading.Event()

    def work() -> None:
        while not stop.is_set():
            with lock:
                part = next(todo, None)
            if part is None:
                return
            try:
                fetch(part)
            except BaseException:
                stop.set()
                raise

    with ThreadPoolExecutor(workers, "parts") as pool:
        try:
            futures = [pool.submit(work) for _ in range(workers)]
            for future in futures:
                future.result()
        finally:
            stop.set()
