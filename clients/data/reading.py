"""Reading batches, in worker processes where a user's ``DataLoader`` asks for some.

The job decides which records make a batch, and so a loader's own batches and order do
not count. Its workers do: each reads and collates whole batches of the walk that a
round takes, ahead of the step that needs them. What a dataset draws from the generators
of torch, ``random`` and ``numpy.random`` in a worker depends on the number of the batch
alone, not on the worker, so that it is the same with any number of workers and in a
round that is taken up in the middle.
"""

import hashlib
import logging
import random
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch.utils.data import DataLoader

from clients.data.datasets import Batch, Dataset, Indices
from clients.data.loader_workers import LoaderWorkers
from clients.randomness import SECRET_BYTES, Seed, fill, torch_seed
from clients.user_code import sentence
from federation.errors import SiteError
from federation.tree import leaves

_LOG = logging.getLogger(__name__)
_WORDS = 2**32


@dataclass(frozen=True, slots=True)
class _ReadBatch:
    """What a worker has read.

    Attributes:
        indices: Of the batch.
        batch: None if it could not be read.
        fault: Why.
    """

    indices: Indices
    batch: Batch | None
    fault: str = ""


class BatchReader:
    """Reads the batches of one walk through a dataset.

    Iterate over it for the indices of each batch, and ask for each batch once and in
    that order. Close it, or use it as a context, to end its workers.
    """

    def __init__(
        self,
        dataset: Dataset,
        walk: Iterable[Indices],
        *,
        seed: Seed,
        first: int = 0,
    ) -> None:
        """Prepare; workers start with the first batch.

        Args:
            dataset: What is read.
            walk: Indices of each batch.
            seed: Of what the dataset draws in workers; see ``seeded_globally``.
            first: Number of the first batch of the walk.
        """
        self._dataset = dataset
        self._walk = enumerate(walk, start=first)
        self._seed = seed
        self._ready: deque[_ReadBatch] = deque()
        self._has_warned = False
        workers = getattr(dataset, "workers", None)
        self._indices = (
            self._by_workers(workers)
            if isinstance(workers, LoaderWorkers)
            else self._here()
        )

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the workers."""
        self.close()

    def close(self) -> None:
        """End the workers, if there are any; batches can no longer be asked for."""
        self._indices.close()
        self._ready.clear()

    def __iter__(self) -> Iterator[Indices]:
        """Yield the indices of each batch.

        Raises:
            SiteError: A worker process has ended, or takes too long.
        """
        return self._indices

    def batch(self, indices: Indices) -> Batch:
        """Return the batch of these indices, which iteration has just yielded.

        What a worker could not read is read again here, so that an error of a user's
        code comes with its own frames. So is a batch that was not announced.
        """
        read = self._ready.popleft() if self._ready else None
        if read is None or read.indices is not indices:
            return self._dataset.batch(indices)
        if read.batch is not None:
            return read.batch
        batch = self._dataset.batch(indices)
        self._warn(read.fault)
        return batch

    def _warn(self, fault: str) -> None:
        """Log that workers fail where this process does not: they only cost time."""
        if self._has_warned:
            return
        self._has_warned = True
        _LOG.warning(
            "worker processes of the DataLoader that the data source returned cannot "
            "read batches that this process can (%s): in a container, give them more "
            "shared memory (/dev/shm); open files and connections in __getitem__; or "
            "set num_workers=0",
            fault,
        )

    def _here(self) -> Generator[Indices]:
        for _, indices in self._walk:
            yield indices

    def _by_workers(self, workers: LoaderWorkers) -> Generator[Indices]:
        loader: DataLoader[Any] = DataLoader(
            _Batches(self._dataset, self._seed),  # type: ignore[arg-type]
            sampler=self._walk,
            batch_size=None,
            collate_fn=_unchanged,
            # Else the loader would draw from the generator that models draw from.
            generator=torch.Generator().manual_seed(_number(self._seed)),
            **workers.settings,
        )
        batches = _started(loader)
        try:
            while (read := _next(batches)) is not None:
                self._ready.append(read)
                yield read.indices
        finally:
            # Deleting it would do, but the traceback of an error may still hold it.
            batches._shutdown_workers()  # type: ignore[attr-defined]  # noqa: SLF001


class _Batches:
    """Batches by number and indices, as a worker reads them."""

    def __init__(self, dataset: Dataset, seed: Seed) -> None:
        self._dataset = dataset
        self._seed = seed

    def __getitem__(self, key: tuple[int, Indices]) -> _ReadBatch:
        number, indices = key
        # The process is a worker's, in which nothing else draws.
        if isinstance(self._seed, int):
            drawn = torch_seed(self._seed, "batch", number)
            torch.manual_seed(drawn)  # noqa: TID251
            random.seed(drawn)
            np.random.seed(drawn % _WORDS)  # noqa: NPY002, TID251
        else:
            fill([torch.default_generator], _expanded(self._seed, number))
        try:
            batch = self._dataset.batch(indices)
            # Here, and not by torch's sending thread: where /dev/shm is full, that
            # loses the batch, and the site would wait for it without end.
            for part in leaves(batch):
                part.share_memory_()
            return _ReadBatch(indices, batch)
        except Exception as error:  # noqa: BLE001 - The site reads it again.
            return _ReadBatch(indices, None, sentence(_cause(error)))


def _expanded(secret: bytes, number: int) -> bytes:
    """The secret of a batch; -1 for what is drawn before the first one."""
    name = number.to_bytes(8, "big", signed=True)
    return hashlib.shake_256(secret + name).digest(SECRET_BYTES)


def _number(seed: Seed) -> int:
    """A seed of 63 bits for what a loader itself draws."""
    if isinstance(seed, int):
        return seed
    return int.from_bytes(_expanded(seed, -1)[:8], "big") >> 1


def _cause(error: BaseException) -> BaseException:
    """What an error began with: ours may name a fault that only this process lacks."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _unchanged(read: Any) -> Any:
    return read


def _started(loader: "DataLoader[_ReadBatch]") -> Iterator[_ReadBatch]:
    """Start the workers.

    Raises:
        SiteError: They cannot be started: with "spawn", what they read must be pickled.
    """
    before = signal.getsignal(signal.SIGCHLD)
    try:
        return iter(loader)
    except Exception as error:
        # Of torch, the operating system, or a user's class that is pickled.
        fault = (
            "worker processes of the DataLoader that the data source returned cannot "
            'start: set multiprocessing_context="fork" or num_workers=0'
        )
        raise SiteError(f"{fault} ({sentence(error)})", outside=fault) from error
    finally:
        # Torch's handler raises in the main thread, wherever that is, if a worker was
        # killed. Without it, waiting for a batch notices the same within seconds.
        if threading.current_thread() is threading.main_thread() and before is not None:
            signal.signal(signal.SIGCHLD, before)


def _next(batches: Iterator[_ReadBatch]) -> _ReadBatch | None:
    """Wait for the next batch; None after the last one.

    Raises:
        SiteError: A worker was killed, is stuck, or failed to begin.
    """
    try:
        return next(batches, None)
    except Exception as error:
        # RuntimeErrors are torch's: a worker was killed, or its timeout is over. Others
        # are the user's, raised again with the worker's frames in their text.
        advice = (
            "give it more memory (in a container also /dev/shm) or time"
            if isinstance(error, RuntimeError)
            else "check its worker_init_fn"
        )
        fault = (
            "a worker process of the DataLoader that the data source returned has "
            f"failed: {advice}, or set num_workers=0"
        )
        text = str(error).strip().rpartition("\n")[2]
        raise SiteError(f"{fault} ({text})", outside=fault) from error
