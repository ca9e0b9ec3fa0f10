"""One site of a baseline: it trains, exchanges what the method exchanges, and counts.

A step of a paced site takes a given time, as if a device of its own did its work: sites
of a study share cores, and those of a federation do not. The model's blocks wait until
their part of this time is over, one third of it before forward passes and two before
backward passes, so that a method may exchange meanwhile. If the machine is so busy that
the work takes longer than this time, the step does, too.
"""

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from exchanges import (
    VALUE_BYTES,
    Exchange,
    OneBit,
    Ring,
    Star,
    TopK,
    Tree,
    ring_bytes,
    serve_star,
)
from lines import Hosts
from torch import distributed, nn

from clients.data import batches
from clients.learning_rate import rate_of
from clients.models.starting_weights import initial_weights
from clients.training.local_federation import Federation
from clients.training.local_steps import make_optimizers
from federation.ids import SiteId
from federation.vectors import Vector

METHODS = (
    "DDP",
    "parameter server",
    "all-reduce, recursive doubling",
    "all-reduce, ring",
    "ZeRO-3 (FSDP2)",
    "top-k 1 %, error feedback",
    "1 bit, error feedback",
    "DiLoCo of torchft",
)
TORCHFT = METHODS[-1]
_DENSITY = 0.01


@dataclass
class Times:
    """How long a site's training takes.

    Attributes:
        pace: Seconds of a step; 0 for those of its work alone.
        work: Processor seconds of this thread's training so far.
        begin: When the step began.
    """

    pace: float
    work: float = 0.0
    begin: float = 0.0

    @contextmanager
    def training(self) -> Iterator[None]:
        """Count this thread's work until the end of the block; waiting is none."""
        begin = time.thread_time()
        yield
        self.work += time.thread_time() - begin

    def wait_until(self, part: float) -> None:
        """Wait until a part of the step's time is over."""
        due = self.begin + part * self.pace
        time.sleep(max(0.0, due - time.perf_counter()))

    def trained(self, steps: int) -> float:
        """Seconds of training in so many steps."""
        return steps * self.pace or self.work


@dataclass(frozen=True, kw_only=True)
class Site:
    """A site's model, data and optimiser.

    Attributes:
        federation: Model and data.
        name: The site.
        rank: Its number.
        group: Of the sites.
        hosts: Where it is.
        times: Of its training.
    """

    federation: Federation
    name: SiteId
    rank: int
    group: distributed.ProcessGroup
    hosts: Hosts
    times: Times

    @property
    def size(self) -> int:
        """Number of sites."""
        return self.group.size()

    @property
    def num_values(self) -> int:
        """Values of the model."""
        return self.federation.pool.layout.size

    def model(self) -> nn.Module:
        """Make a model that holds the weights that all methods begin with."""
        job, pool = self.federation.job, self.federation.pool
        with pool.borrow() as instance:
            instance.load(*initial_weights(job, pool))
            model = copy.deepcopy(instance.module)
        blocks = list(model.blocks)  # type: ignore[arg-type]
        for number, block in enumerate(blocks):
            self._pace(block, number, len(blocks))
        return model.train()

    def _pace(self, block: nn.Module, number: int, num_blocks: int) -> None:
        forth = (number + 1) / num_blocks / 3
        back = 1 / 3 + (num_blocks - number) / num_blocks * 2 / 3

        def before(*_: Any) -> None:
            if torch.is_grad_enabled():
                self.times.wait_until(forth)

        block.register_forward_pre_hook(before)
        block.register_full_backward_pre_hook(lambda *_: self.times.wait_until(back))

    def losses(self, model: nn.Module, steps: int) -> Iterator[torch.Tensor]:
        """Yield the loss of each step's batch: those that the product would take."""
        job, pool = self.federation.job, self.federation.pool
        train, _ = self.federation.site_data[self.name]
        walk = batches.stepwise(
            len(train),
            batch_size=job.training.batch_size,
            first_batch=0,
            num_batches=steps,
            seed=job.seed,
            site=self.name,
        )
        for index in walk:
            self.times.begin = time.perf_counter()
            inputs, targets = train.batch(index)
            with self.times.training():
                loss = pool.objective(model, inputs, targets)
                mean = loss.total / loss.count
            yield mean

    def step(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, number: int
    ) -> None:
        """Clip, and step along the gradients that are there."""
        job = self.federation.job
        if job.training.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), job.training.clip_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = rate_of(job, number)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Make the optimiser of the job: AdamW."""
        (found,) = make_optimizers(model, self.federation.job.training.optimizer)
        return found


@dataclass
class Count:
    """What steps took, without the first ones, in which connections are made.

    Attributes:
        skip: How many are the first ones.
        seconds: Of each other step.
    """

    skip: int = 1
    seconds: list[float] = field(default_factory=list)
    _begin: float = 0.0
    _bytes: tuple[int, int] | None = None

    def tick(self, site: Site) -> None:
        """Note the end of a step."""
        now = time.perf_counter()
        self.skip -= 1
        if self.skip < 0:
            self.seconds.append(now - self._begin)
        elif self.skip == 0:
            self._bytes = site.hosts.counted()
            site.times.work = 0.0
        self._begin = now

    def result(self, site: Site) -> dict[str, Any]:
        """Means of a step."""
        ended, steps = site.hosts.counted(), len(self.seconds)
        measured: tuple[float | None, ...] = (None, None)
        if ended is not None and self._bytes is not None:
            pairs = zip(ended, self._bytes, strict=True)
            measured = tuple((end - begin) / steps for end, begin in pairs)
        wall = sum(self.seconds)
        return {
            "steps_timed": steps,
            "seconds_a_step": wall / steps,
            "trains": site.times.trained(steps) / wall,
            "interface_down": measured[0],
            "interface_up": measured[1],
        }


def run(method: str, site: Site, steps: int) -> tuple[dict[str, Any], Vector]:
    """Train with a method; what steps took, and this site's weights: shape ``(d,)``."""
    trainer: Callable[[Site, int], tuple[Count, nn.Module, float]]
    if method == METHODS[0]:
        trainer = _data_parallel
    elif method == METHODS[4]:
        trainer = _sharded
    elif method == TORCHFT:
        import torchft_rank

        local_steps = torchft_rank.local_steps(steps)
        return _found(site, *torchft_rank.train(site, steps), local_steps)
    else:
        exchange = _exchange(method, site.group, site.size)
        count, model, formula = _exchanged(site, steps, exchange)
        return _found(site, count, model, formula)
    return _found(site, *trainer(site, steps))


def serve(method: str, *, num_sites: int, num_values: int, steps: int) -> None:
    """Be the server of a method that has one."""
    if method == METHODS[1]:
        for _ in range(steps):
            serve_star(num_sites, num_values)


def _found(
    site: Site, count: Count, model: nn.Module, formula: float, local_steps: int = 1
) -> tuple[dict[str, Any], Vector]:
    found = {**count.result(site), "formula_each_way": formula}
    found["local_steps"] = local_steps
    return found, _weights(site, model)


def _exchange(method: str, group: distributed.ProcessGroup, server: int) -> Exchange:
    exchanges: dict[str, Exchange] = {
        METHODS[1]: Star(server),
        METHODS[2]: Tree(group),
        METHODS[3]: Ring(group),
        METHODS[5]: TopK(group, _DENSITY),
        METHODS[6]: OneBit(group),
    }
    return exchanges[method]


def _exchanged(
    site: Site, steps: int, exchange: Exchange
) -> tuple[Count, nn.Module, float]:
    """Train; after each backward pass gradients are exchanged as one vector."""
    model, count = site.model(), Count()
    optimizer, parameters = site.optimizer(model), list(model.parameters())
    for number, loss in enumerate(site.losses(model, steps)):
        with site.times.training():
            loss.backward()  # type: ignore[no-untyped-call]
        gradients = [p.grad for p in parameters if p.grad is not None]
        flat_d = torch.cat([each.reshape(-1) for each in gradients])
        exchange(flat_d)
        sizes = [each.numel() for each in gradients]
        pieces = torch.split(flat_d, sizes)
        for gradient, piece in zip(gradients, pieces, strict=True):
            gradient.copy_(piece.view_as(gradient))
        with site.times.training():
            site.step(model, optimizer, number)
        count.tick(site)
    return count, model, exchange.bytes_each(site.num_values, site.size)


def _data_parallel(site: Site, steps: int) -> tuple[Count, nn.Module, float]:
    """Train with torch's own: buckets are reduced during the backward pass."""
    from torch.nn.parallel import DistributedDataParallel

    model, count = site.model(), Count()
    wrapped = DistributedDataParallel(model, process_group=site.group)
    optimizer = site.optimizer(model)
    for number, loss in enumerate(site.losses(wrapped, steps)):
        with site.times.training():
            loss.backward()  # type: ignore[no-untyped-call]
            site.step(model, optimizer, number)
        count.tick(site)
    return count, model, ring_bytes(site.num_values, site.size)


def _sharded(site: Site, steps: int) -> tuple[Count, nn.Module, float]:
    """Each site holds a part of every block, and gets the others when it needs them.

    Rajbhandari et al. 2020, arXiv:1910.02054, section 7: parameters twice, gradients
    once, each ``(n - 1) / n`` of the model.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    model, count = site.model(), Count()
    mesh = DeviceMesh.from_group(site.group, "cpu")
    for unit in (*model.blocks, model):  # type: ignore[misc]
        fully_shard(unit, mesh=mesh, reshard_after_forward=True)
    optimizer = site.optimizer(model)
    for number, loss in enumerate(site.losses(model, steps)):
        with site.times.training():
            loss.backward()  # type: ignore[no-untyped-call]
            site.step(model, optimizer, number)
        count.tick(site)
    each = 3 * (site.size - 1) / site.size * VALUE_BYTES * site.num_values
    return count, model, each


def _weights(site: Site, model: nn.Module) -> Vector:
    """A model's values as one vector."""
    named = dict(model.named_parameters())
    weights_d = np.zeros(site.num_values, np.float32)
    for spec, view in site.federation.pool.layout.float_views(weights_d):
        value = named[spec.name].detach()
        if hasattr(value, "full_tensor"):
            value = value.full_tensor()
        view[...] = value.numpy()
    return weights_d
