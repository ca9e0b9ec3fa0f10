"""Local training with torch: from the global weights to the site's own.

One round at a site, as FedAvg's ClientUpdate (McMahan et al. 2017,
arXiv:1602.05629, Algorithm 1) with the proximal term of FedProx (Li et al. 2020,
arXiv:1812.06127, equation 2) if the job asks for it. Optimiser state starts afresh
in every round, so a site has nothing to lose between rounds.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import islice

import numpy as np
import torch

from clients import batches, weights
from clients.datasets import Batch, Dataset, Indices
from clients.model_pool import ModelPool
from clients.objectives import OBJECTIVES
from clients.private_steps import (
    PrivateGradient,
    PrivateTraining,
    num_private_steps,
    sampling_rate,
    takes_private_steps,
)
from clients.randomness import torch_seed
from clients.shards.order import ReadsAhead, telling_ahead
from federation.errors import SiteError
from federation.ids import SiteId
from federation.job import JobSpec, LearningRateSpec, OptimizerSpec
from federation.messages import MetricSums
from federation.protocols import LocalResult
from federation.vectors import IntegerVector, Layout, Vector


class TorchTrainer:
    """Trains a job's model on the data of one site."""

    def __init__(
        self,
        job: JobSpec,
        site: SiteId,
        *,
        pool: ModelPool,
        train: Dataset,
        held_out: Dataset,
        private: PrivateTraining | None = None,
    ) -> None:
        """Bring a job, a site's name and its data together.

        Args:
            job: The job.
            site: Name of the site.
            pool: Where models come from.
            train: What to train on.
            held_out: What to evaluate on.
            private: Makes every gradient differentially private; None for none.

        Raises:
            SiteError: The site has nothing to train on, or nothing to evaluate on
                and the job asks for evaluation; or it has too few records for
                private steps.
            ValueError: The job's unit of privacy and ``private`` contradict each
                other.
        """
        if len(train) == 0:
            raise SiteError(f"site {site!r} has no training examples")
        if len(held_out) == 0 and job.evaluation.every > 0:
            raise SiteError(
                f"site {site!r} has no held-out examples; give it some or set "
                "evaluation.every = 0"
            )
        if takes_private_steps(job) != (private is not None):
            raise ValueError("private training is what the job asks for, or is not")
        if private is not None:
            sampling_rate(job, len(train))
        self._private = private
        self._is_protected = job.privacy.differential_privacy.unit != "none"
        self._job = job
        self._site = site
        self._pool = pool
        self._train_data = train
        self._held_out = held_out
        self._objective = OBJECTIVES[job.training.task]
        if private is None:
            # Data that is far away begins to come while the first task is on its way
            # and held-out data is read. After a resume this is the wrong guess.
            self._indices(1)

    def layout(self) -> Layout:
        """Layout of the model."""
        return self._pool.layout

    def fit(
        self, weights_d: Vector, integers_m: IntegerVector, *, round_index: int
    ) -> LocalResult:
        """Train from the global weights; see ``federation.protocols.Trainer``."""
        seed = torch_seed(self._job.seed, "training", self._site, round_index)
        with self._pool.borrow() as model:

            def train() -> LocalResult:
                model.load(weights_d, integers_m)
                if self._private is not None and self._private.in_sum:
                    return self._one_step(model.module, self._private, integers_m)
                return self._train(model.module, round_index, weights_d)

            return self._pool.draws.run(train, kind="train", seed=seed)

    def evaluate(self, weights_d: Vector, integers_m: IntegerVector) -> MetricSums:
        """Sums over the site's held-out data."""
        return self.evaluate_clipped(weights_d, integers_m, max_loss=None)

    def evaluate_clipped(
        self, weights_d: Vector, integers_m: IntegerVector, *, max_loss: float | None
    ) -> MetricSums:
        """Sums over the held-out data, each prediction's loss clipped, in nats."""
        seed = torch_seed(self._job.seed, "evaluation", self._site)
        with self._pool.borrow() as model:

            def evaluate() -> MetricSums:
                model.load(weights_d, integers_m)
                return self._evaluate(model.module, max_loss)

            return self._pool.draws.run(evaluate, kind="evaluate", seed=seed)

    def spent(self) -> None:
        """Keep no ledger; see ``clients.budget`` for a trainer that does."""

    def _train(
        self, model: torch.nn.Module, round_index: int, weights_d: Vector
    ) -> LocalResult:
        """Train a model that holds the global weights."""
        layout = self._pool.layout
        lost_d = None
        if weights.is_rounded(layout):  # By bfloat16 parameters, for example.
            lost_d = weights_d - weights.read(model, layout)[0]
        before_m = weights.read(model, layout)[1]
        training: MetricSums | None = None
        if self._private is None:
            training, num_steps = self._steps(model, round_index)
        else:
            num_steps = self._private_steps(model, round_index, self._private)
        local_d, local_m = weights.read(model, layout)
        if lost_d is not None:
            # What the model could not hold is not what training changed.
            local_d += lost_d
        if self._is_protected:
            # Nothing leaves but what noise goes into.
            weights.copy_untrained(model, layout, source_d=weights_d, out_d=local_d)
            local_m = before_m
        return LocalResult(
            weights_d=local_d,
            integers_m=local_m,
            num_examples=len(self._train_data),
            num_steps=num_steps,
            training=training,
        )

    def _steps(
        self, model: torch.nn.Module, round_index: int
    ) -> tuple[MetricSums, int]:
        """Take this round's local steps."""
        training = self._job.training
        model.train()
        parameters = [p for p in model.parameters() if p.requires_grad]
        anchor = (
            [p.detach().clone() for p in parameters] if training.proximal_mu else []
        )
        optimizer = _optimizer(parameters, training.optimizer)
        sums = _Sums(self._pool.device)
        step = first_step = (round_index - 1) * self._steps_per_round()
        for group in _groups(self._indices(round_index), training.accumulate):
            num_examples = sum(map(len, group))
            for chosen in group:
                inputs, targets = self._on_device(self._train_data.batch(chosen))
                with self._autocast():
                    loss = self._objective(model, inputs, targets)
                # Every example of a step counts the same, whatever its batch.
                share = len(chosen) / num_examples
                mean = loss.total / (loss.count / share)
                mean.backward()  # type: ignore[no-untyped-call]
                sums.add(loss.total, loss.count, loss.correct)
            if anchor:  # The gradient of mu/2 |x - theta|^2.
                _add_proximal(parameters, anchor, training.proximal_mu)
            if training.clip_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(parameters, training.clip_grad_norm)
            _set_learning_rate(optimizer, self._job, step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
        return sums.metrics(), step - first_step

    def _private_steps(
        self, model: torch.nn.Module, round_index: int, private: PrivateTraining
    ) -> int:
        """Take this round's local steps with differentially private gradients.

        Nothing is counted on the way: sums over the samples would have no noise.
        """
        training, size = self._job.training, len(self._train_data)
        model.train()
        parameters = [p for p in model.parameters() if p.requires_grad]
        anchor = (
            [p.detach().clone() for p in parameters] if training.proximal_mu else []
        )
        optimizer = _optimizer(parameters, training.optimizer)
        gradient = PrivateGradient(model, self._job, private, num_records=size)
        num_steps = num_private_steps(self._job, size)
        first_step = (round_index - 1) * num_steps
        for step in range(first_step, first_step + num_steps):
            for chosen in gradient.draw():
                loss = partial(self._sum_of_means, model, chosen)
                gradient.add_(loss, len(chosen))
            gradient.release_()
            if anchor:  # It depends on no record.
                _add_proximal(parameters, anchor, training.proximal_mu)
            _set_learning_rate(optimizer, self._job, step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return num_steps

    def _one_step(
        self,
        model: torch.nn.Module,
        private: PrivateTraining,
        integers_m: IntegerVector,
    ) -> LocalResult:
        """Take one step of plain SGD whose noise is added inside the secure sum."""
        model.train()
        gradient = PrivateGradient(
            model, self._job, private, num_records=len(self._train_data)
        )
        for chosen in gradient.draw():
            gradient.add_(partial(self._sum_of_means, model, chosen), len(chosen))
        update_d = np.empty(self._pool.layout.size, dtype=np.float32)
        gradient.write_update(
            model,
            self._pool.layout,
            lr=self._job.training.optimizer.lr,
            out_d=update_d,
        )
        return LocalResult(
            weights_d=update_d,
            integers_m=integers_m.copy(),
            num_examples=len(self._train_data),
            num_steps=1,
            training=None,
            is_update=True,
        )

    def _sum_of_means(self, model: torch.nn.Module, chosen: Indices) -> torch.Tensor:
        """Sum over records of each record's mean loss over its predictions."""
        inputs, targets = self._on_device(self._train_data.batch(chosen))
        with self._autocast():
            loss = self._objective(model, inputs, targets)
        return loss.total / (loss.count / len(chosen))

    @torch.no_grad()
    def _evaluate(self, model: torch.nn.Module, max_loss: float | None) -> MetricSums:
        model.eval()
        sums = _Sums(self._pool.device)
        size = self._job.evaluation.batch_size
        total = len(self._held_out)
        walk = (np.arange(i, min(i + size, total)) for i in range(0, total, size))
        for chosen in telling_ahead(self._held_out, walk):
            inputs, targets = self._on_device(self._held_out.batch(chosen))
            with self._autocast():
                loss = self._objective(model, inputs, targets, max_loss=max_loss)
            sums.add(loss.total, loss.count, loss.correct)
        return sums.metrics()

    def _steps_per_round(self) -> int:
        training = self._job.training
        if training.local_steps is not None:
            return training.local_steps
        batches_per_epoch = -(-len(self._train_data) // training.batch_size)
        num_batches = (training.local_epochs or 1) * batches_per_epoch
        return -(-num_batches // training.accumulate)

    def _indices(self, round_index: int) -> Iterator[Indices]:
        """Yield the examples of each batch of a round."""
        training, data = self._job.training, self._train_data
        # Data that is told in advance hears of the next round's first batches too.
        ahead, shuffle = 0, None
        if isinstance(data, ReadsAhead):
            shuffle = data.epoch_order
            if round_index < self._job.rounds:
                ahead = -(-data.examples_ahead // training.batch_size)
        if training.local_steps is not None:
            num_batches = training.local_steps * training.accumulate
            walk = batches.stepwise(
                len(data),
                batch_size=training.batch_size,
                first_batch=(round_index - 1) * num_batches,
                num_batches=num_batches + ahead,
                seed=self._job.seed,
                site=self._site,
                shuffle=shuffle,
            )
            return telling_ahead(data, walk, num_batches)
        num_epochs = training.local_epochs or 1
        walk = batches.epochwise(
            len(data),
            batch_size=training.batch_size,
            first_epoch=(round_index - 1) * num_epochs,
            num_epochs=num_epochs + bool(ahead),
            seed=self._job.seed,
            site=self._site,
            shuffle=shuffle,
        )
        per_epoch = -(-len(data) // training.batch_size)
        return telling_ahead(data, walk, num_epochs * per_epoch)

    def _on_device(self, batch: Batch) -> Batch:
        inputs, targets = batch
        device = self._pool.device
        return (
            inputs.to(device, non_blocking=True),
            None if targets is None else targets.to(device, non_blocking=True),
        )

    def _autocast(self) -> AbstractContextManager[object]:
        if self._job.training.precision == "fp32":
            return nullcontext()
        return torch.autocast(self._pool.device.type, dtype=torch.bfloat16)


class _Sums:
    """Adds up losses on the device and reads them once, at the end."""

    def __init__(self, device: torch.device) -> None:
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        self._correct = torch.zeros((), dtype=torch.int64, device=device)
        self._count = 0

    def add(self, total: torch.Tensor, count: int, correct: torch.Tensor) -> None:
        self._loss += total.detach()
        self._correct += correct
        self._count += count

    def metrics(self) -> MetricSums:
        return MetricSums(
            count=self._count,
            loss_sum=float(self._loss),
            correct=int(self._correct),
        )


def learning_rate(spec: LearningRateSpec, lr: float, step: int, steps: int) -> float:
    """Learning rate at a local step of the run.

    Args:
        spec: The schedule.
        lr: The optimiser's learning rate.
        step: 0 for the first step of the first round.
        steps: Local steps of the whole run; of no account to ``constant``.
    """
    if step < spec.warmup_steps:
        return lr * (step + 1) / spec.warmup_steps
    if spec.name == "constant":
        return lr
    progress = (step - spec.warmup_steps) / max(steps - spec.warmup_steps, 1)
    left = (
        1 - progress
        if spec.name == "linear"
        else (1 + math.cos(math.pi * min(progress, 1.0))) / 2
    )
    return lr * (spec.final_fraction + (1 - spec.final_fraction) * max(left, 0.0))


def _set_learning_rate(
    optimizer: torch.optim.Optimizer, job: JobSpec, step: int
) -> None:
    training = job.training
    steps = job.rounds * (training.local_steps or 0)
    rate = learning_rate(training.learning_rate, training.optimizer.lr, step, steps)
    for group in optimizer.param_groups:
        group["lr"] = rate


def _optimizer(
    parameters: Sequence[torch.nn.Parameter], spec: OptimizerSpec
) -> torch.optim.Optimizer:
    if spec.name == "sgd":
        return torch.optim.SGD(
            parameters,
            lr=spec.lr,
            momentum=spec.momentum,
            nesterov=spec.nesterov,
            weight_decay=spec.weight_decay,
        )
    algorithm: type[torch.optim.Adam]
    algorithm = torch.optim.AdamW if spec.name == "adamw" else torch.optim.Adam
    first, second = spec.betas
    return algorithm(
        parameters, lr=spec.lr, betas=(first, second), weight_decay=spec.weight_decay
    )


def _groups(items: Iterator[Indices], size: int) -> Iterator[list[Indices]]:
    """Cut a stream of batches into the batches of one optimiser step."""
    while group := list(islice(items, size)):
        yield group


@torch.no_grad()
def _add_proximal(
    parameters: Sequence[torch.nn.Parameter], anchor: Sequence[torch.Tensor], mu: float
) -> None:
    for parameter, origin in zip(parameters, anchor, strict=True):
        if parameter.grad is None:  # No batch of this step has used it.
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad.add_(parameter - origin, alpha=mu)
