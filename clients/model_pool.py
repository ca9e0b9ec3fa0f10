"""Instances of a job's model, shared by all sites of a process.

A site keeps no model between rounds, so a thousand simulated sites need no more
instances than train at the same time.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from clients import weights
from clients.factories import call_factory, import_factory
from clients.randomness import global_state, seeded_globally, torch_seed
from federation.errors import JobError
from federation.job import JobSpec
from federation.vectors import IntegerVector, Layout, Vector


class ModelPool:
    """Builds a job's model when one is needed and keeps it for the next user.

    Attributes:
        device: Where the models live.
        layout: Layout of the model.
    """

    def __init__(self, job: JobSpec) -> None:
        """Build the first instance, with the job's seed.

        Raises:
            JobError: The factory cannot be imported or called, returns something
                else than a module, or the device is not there.
        """
        self._factory = import_factory(job.model.factory, key="model.factory")
        self._options = job.model.options
        self._seed = torch_seed(job.seed, "initial weights")
        self.device = _device(job.training.device)
        first = self._build()
        self.layout: Layout = weights.layout_of(first, job.model.integer_buffers)
        self._initial = weights.read(first, self.layout)
        self._idle = [first]
        self._lock = threading.Lock()
        self._draws_globally: bool | None = None

    def initial_weights(self) -> tuple[Vector, IntegerVector]:
        """Weights that the job's seed gives: shapes ``(d,)`` and ``(m,)``."""
        weights_d, integers_m = self._initial
        return weights_d.copy(), integers_m.copy()

    @contextmanager
    def borrow(
        self, weights_d: Vector, integers_m: IntegerVector
    ) -> Iterator[torch.nn.Module]:
        """Lend an instance that holds the given weights."""
        with self._lock:
            module = self._idle.pop() if self._idle else None
        if module is None:
            module = self._build()
        weights.load(module, self.layout, weights_d, integers_m)
        try:
            yield module
        finally:
            module.zero_grad(set_to_none=True)
            with self._lock:
                self._idle.append(module)

    @contextmanager
    def randomness(self, seed: int) -> Iterator[None]:
        """Make the draws of a model that trains in this block reproducible.

        Dropout and the like draw from torch's global generators, which all threads
        share: such models train one at a time. The first training shows whether
        this model is one of them; it is also guarded.
        """
        if self._draws_globally is False:
            yield
            return
        with seeded_globally(seed):
            before = global_state(self.device)
            yield
            drew = global_state(self.device) != before
            self._draws_globally = bool(self._draws_globally) or drew

    def _build(self) -> torch.nn.Module:
        with seeded_globally(self._seed):
            module = call_factory(self._factory, self._options, key="model.options")
        if not isinstance(module, torch.nn.Module):
            raise JobError(
                f"returned a {type(module).__name__}, not a torch.nn.Module",
                key="model.factory",
            )
        return module.to(self.device)


def _device(name: str) -> torch.device:
    """Resolve the job's device.

    Raises:
        JobError: It names a CUDA device that this machine does not have.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise JobError(
            f"this machine has {torch.cuda.device_count()} CUDA devices and no "
            f"{name!r}; use auto or cpu",
            key="training.device",
        )
    return device
