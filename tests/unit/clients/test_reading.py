"""A ``DataLoader``'s worker processes read the batches that the job chooses."""

import logging
import os
import random
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from clients.data import as_dataset
from clients.data.datasets import Dataset, Indices
from clients.data.reading import BatchReader
from clients.factories import import_factory
from federation.clock import SystemClock
from federation.errors import SiteError, UserCodeError
from federation.folder_lock import hold, is_held

CLOCK = SystemClock()
WALK = [np.array([0, 1]), np.array([3, 2]), np.array([5]), np.array([4, 0])]


class Noisy:
    """Records with what three generators draw, and the process that read them."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        drawn = [random.random(), np.random.rand(), float(torch.rand(()))]  # noqa: NPY002, S311
        return torch.tensor([index, *drawn, os.getpid()]), index % 2


def loaded(dataset: Any, num_workers: int, **settings: Any) -> Dataset:
    """A dataset behind a loader."""
    loader = DataLoader(dataset, num_workers=num_workers, **settings)
    return as_dataset(loader, name="train")


def inputs_of(data: Dataset, walk: list[Indices], first: int = 0) -> torch.Tensor:
    """Inputs of all batches, in a row each."""
    with BatchReader(data, walk, seed=1, first=first) as reader:
        return torch.cat([reader.batch(indices)[0] for indices in reader])


def children() -> set[str]:
    """Processes that this one has started."""
    task = Path(f"/proc/self/task/{os.getpid()}")
    return set((task / "children").read_text().split())


def test_workers_read_the_batches_of_the_walk():
    data = loaded(Noisy(), 2)
    before, state = children(), torch.get_rng_state()
    found = inputs_of(data, WALK)
    assert found[:, 0].tolist() == [0, 1, 3, 2, 5, 4, 0]
    processes = set(found[:, 4].tolist())
    assert len(processes) == 2
    assert os.getpid() not in processes
    assert children() == before
    assert torch.equal(torch.get_rng_state(), state)


def test_draws_depend_on_the_batch_and_not_on_workers():
    """So a round that is taken up in the middle draws what it would have drawn."""
    found = inputs_of(loaded(Noisy(), 2), WALK)[:, :4]
    assert torch.equal(inputs_of(loaded(Noisy(), 1), WALK)[:, :4], found)
    assert torch.equal(
        inputs_of(loaded(Noisy(), 2), WALK[2:], first=2)[:, :4], found[4:]
    )
    assert len(found[:, 1:].unique()) == 3 * len(found)


def test_walk_that_is_left_early_leaves_no_process():
    before = children()
    with BatchReader(loaded(Noisy(), 2), WALK, seed=1) as reader:
        reader.batch(next(iter(reader)))
    assert children() == before


def test_error_of_a_users_dataset_shows_its_own_frames():
    """A worker would show torch's frames, with the user's in a text."""

    def collate(rows: list[Any]) -> Any:
        if len(rows) == 2 and rows[0][0] == 3:
            raise KeyError("colour")
        return torch.tensor([row[0] for row in rows]), torch.zeros(len(rows))

    rows = [(i, 0) for i in range(6)]
    data = loaded(rows, 1, collate_fn=collate)
    with pytest.raises(UserCodeError, match=r"KeyError.*test_reading") as caught:
        inputs_of(data, WALK)
    assert isinstance(caught.value.__cause__, KeyError)


class Killed(Noisy):
    """Ends the process that reads record 5, if it is a worker."""

    def __init__(self) -> None:
        self.owner = os.getpid()

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == 5 and os.getpid() != self.owner:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_killed_worker_is_said_to_be_one():
    """As where the machine has no memory left; and only to those who ask for a batch.

    Torch's handler of SIGCHLD would raise in the main thread, at any line of it.
    """
    with pytest.raises(SiteError, match=r"num_workers=0") as caught:
        inputs_of(loaded(Killed(), 1, timeout=1), WALK)
    assert "pid" not in caught.value.outside
    handler = signal.getsignal(signal.SIGCHLD)
    assert not getattr(handler, "__module__", "").startswith("torch")


def test_batch_that_was_not_announced_is_read_here():
    """A rank without a record reads another one in its place."""
    with BatchReader(loaded(Noisy(), 1), WALK, seed=1) as reader:
        walk: Iterator[Indices] = iter(reader)
        next(walk)
        assert reader.batch(np.array([4]))[0][:, 0].tolist() == [4]
        assert reader.batch(next(walk))[0][:, 0].tolist() == [3, 2]


def only_here(owner: int, rows: list[Any]) -> Any:
    """Needs what a worker lacks, as much shared memory or a connection."""
    if os.getpid() != owner:
        raise ValueError("rows differ") from OSError("no shared memory")
    return torch.tensor([row[0] for row in rows]), torch.zeros(len(rows))


def test_workers_that_cannot_read_are_logged_once(caplog: pytest.LogCaptureFixture):
    """With what the error began with."""
    rows = [(i, 0) for i in range(6)]
    data = loaded(rows, 1, collate_fn=partial(only_here, os.getpid()))
    with caplog.at_level(logging.WARNING), BatchReader(data, WALK, seed=1) as reader:
        found = [reader.batch(indices)[0].tolist() for indices in reader]
    assert found == [walked.tolist() for walked in WALK]
    (logged,) = caplog.messages
    assert "(OSError: no shared memory)" in logged


def test_batch_without_room_in_shared_memory_is_read_here(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """In a container /dev/shm may be small: the site must not wait for ever."""

    def full(_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("unable to write to /torch_1: No space left on device")

    monkeypatch.setattr(torch.Tensor, "share_memory_", full)
    with caplog.at_level(logging.WARNING):
        found = inputs_of(loaded(Noisy(), 1), WALK)
    assert found[:, 4].unique().tolist() == [os.getpid()]
    assert "No space left" in caplog.text


class Stuck(Noisy):
    """Waits for record 5 as for a disk that does not answer, and ignores Ctrl-C."""

    def __init__(self) -> None:
        self.pid, self.told = os.pipe()

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == 5:
            os.kill(os.getpid(), signal.SIGINT)
            os.write(self.told, f"{os.getpid()}\n".encode())
            signal.pause()
        return super().__getitem__(index)


def test_stuck_worker_ends_with_its_site(tmp_path: Path):
    """Also if the site is killed; else the site's lock would stay, and it could not
    start again."""
    stuck = Stuck()
    data = loaded(stuck, 1)
    site = os.fork()
    if site == 0:
        try:
            with hold(tmp_path / "lock", "held"):
                inputs_of(data, WALK)
        finally:
            os._exit(1)
    worker = int(os.read(stuck.pid, 20))
    os.kill(site, signal.SIGKILL)
    os.waitpid(site, 0)
    for _ in range(500):
        if not is_held(tmp_path / "lock"):
            return
        CLOCK.sleep(0.01)
    os.kill(worker, signal.SIGKILL)
    pytest.fail("the worker stays, and with it the site's lock")


@pytest.mark.filterwarnings("ignore:Got pickle error")
def test_dataset_that_cannot_be_pickled_is_refused():
    """With "spawn", as one that holds an open file."""
    rows = Noisy()
    rows.close = lambda: None  # type: ignore[attr-defined]
    data = loaded(rows, 1, multiprocessing_context="spawn")
    with pytest.raises(SiteError, match=r"cannot start.*fork.*pickle"):
        inputs_of(data, WALK)


def test_users_file_needs_forked_workers(tmp_path: Path):
    """Started anew, a worker could not import it."""
    file = tmp_path / "rows.py"
    file.write_text("class Rows(list): pass\ndef rows(): return Rows([(1.0, 0)])\n")
    rows = import_factory(f"{file}:rows")()
    assert loaded(rows, 1).workers is not None  # type: ignore[attr-defined]
    with pytest.raises(SiteError, match=r"train is .*'spawn'.*num_workers=0"):
        loaded(rows, 1, multiprocessing_context="spawn")
    loaded(rows, 0)
