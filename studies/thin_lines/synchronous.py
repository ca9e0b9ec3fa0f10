"""Synchronous data parallel training: what low communication is compared with.

At every step each site computes the gradient of its next batch, the gradients are
averaged, and one optimiser takes a step: what ``DistributedDataParallel`` computes. It
is done here in one process with one model, on the same examples in the same order as
the product's sites would take, with the same schedule, precision, clipping and
optimiser. Its bytes are those of float32 gradients: four for each value, site and step,
each way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file

from clients.data import batches
from clients.methods.half_precision import autocast
from clients.models.starting_weights import initial_weights
from clients.models.weights import read
from clients.training.local_federation import Federation
from clients.training.local_steps import LocalOptimizer
from crossfed import load_job
from deploy.wiring.parts import build_federation
from federation.job.spec import JobSpec
from federation.vectors import IntegerVector, Vector

VALUE_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SynchronousRun:
    """What synchronous training gave.

    Attributes:
        federation: Model and data.
        weights_d: Shape ``(d,)``.
        integers_m: Shape ``(m,)``.
        losses: Of each step, before it was taken: mean over the sites, nats per byte.
    """

    federation: Federation
    weights_d: Vector
    integers_m: IntegerVector
    losses: Sequence[float]

    def window_losses(self, steps: int) -> list[float]:
        """Mean loss of every so many steps, as a round of so many would report it."""
        starts = range(0, len(self.losses), steps)
        return [float(np.mean(self.losses[i : i + steps])) for i in starts]


def train(job: JobSpec) -> SynchronousRun:
    """Take ``rounds * local_steps`` synchronous steps from the job's first model."""
    torch.set_num_threads(job.training.threads)
    federation = build_federation(job)
    pool, training = federation.pool, job.training
    steps = job.rounds * (training.local_steps or 1)
    walks = {
        site: batches.stepwise(
            len(train),
            batch_size=training.batch_size,
            first_batch=0,
            num_batches=steps,
            seed=job.seed,
            site=site,
        )
        for site, (train, _) in federation.site_data.items()
    }
    with pool.borrow() as instance:
        instance.load(*initial_weights(job, pool))
        model = instance.module
        model.train()
        optimizer = LocalOptimizer(model, job)
        losses = [0.0] * steps
        for step in range(steps):
            for site, walk in walks.items():
                inputs, targets = federation.site_data[site][0].batch(next(walk))
                with autocast(training.precision, pool.device):
                    loss = pool.objective(model, inputs, targets)
                mean = loss.total / (loss.count * len(walks))
                mean.backward()  # type: ignore[no-untyped-call]
                losses[step] += mean.item()
            optimizer.step(step)
        weights_d, integers_m = read(model, pool.layout)
    return SynchronousRun(
        federation=federation,
        weights_d=weights_d,
        integers_m=integers_m,
        losses=losses,
    )


def held_out_loss(
    federation: Federation, weights_d: Vector, integers_m: IntegerVector
) -> float:
    """Pooled loss over the held-out data of all sites, in nats per byte."""
    sums = [
        federation.trainer(site).evaluate(weights_d, integers_m, round_index=1)
        for site in federation.site_data
    ]
    return sum(s.loss_sum for s in sums) / sum(s.count for s in sums)


def gradient_bytes(num_values: int, num_sites: int, steps: int) -> int:
    """Bytes that all sites send, or receive, if they exchange each gradient."""
    return VALUE_BYTES * num_values * num_sites * steps


def write_model(path: Path, federation: Federation, weights_d: Vector) -> None:
    """Write weights as ``model.weights`` of a job reads them; whole or not at all."""
    views = federation.pool.layout.float_views(weights_d)
    arrays = {tensor.name: np.ascontiguousarray(view) for tensor, view in views}
    unfinished = path.with_suffix(".part")
    save_file(arrays, unfinished)
    unfinished.replace(path)


def warm_model(document: dict[str, object], steps: int, path: Path) -> None:
    """Train the model that all rows of a seed start from, with AdamW, if need be.

    Args:
        document: The job of any row of the seed and size.
        steps: Synchronous steps.
        path: Where it is, or is to be.
    """
    if path.exists():
        return
    optimizer = {"name": "adamw", "lr": 4e-3, "betas": [0.9, 0.95]}
    overrides = {
        "rounds": steps,
        "training.local_steps": 1,
        "training.optimizer": optimizer,
        "training.learning_rate": {
            "name": "constant",
            "warmup_steps": min(10, steps),
        },
        "aggregation.server_optimizer": None,
        "evaluation": None,
        "privacy": None,
        "communication": None,
    }
    done = train(load_job(document, overrides))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_model(path, done.federation, done.weights_d)
