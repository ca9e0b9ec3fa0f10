"""Local training by the user's own loop: a ``transformers.Trainer`` at each site.

A round takes the job's local steps in the loop of the Trainer that ``model.factory``
returned: its optimiser, schedule, clipping, precision, collator, ``compute_loss`` and
callbacks. The job decides which records a batch has, so that epochs go on from round to
round; optimiser state starts afresh with each, and the schedule runs over all steps of
the run. Such a loop computes no gradients of single records, so record-level privacy
refuses it; see docs/adr/models-and-objectives.md.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any, Unpack

import numpy as np

from clients.data import batches
from clients.data.batches import Ordering
from clients.data.datasets import Dataset, Indices, records_of
from clients.methods.filled_parts import check_filled, is_open_sum
from clients.models import weights
from clients.models.loaded_model import LoadedModel
from clients.models.model_pool import Instance, ModelPool
from clients.randomness import seeded_globally, torch_seed
from clients.training.trainer import check_site_data, never
from clients.user_code import place_of
from federation.errors import FederationError, JobError, SiteError, UserCodeError
from federation.ids import SiteId
from federation.job.code_files import unpinned
from federation.job.metrics import LOSS, Metric, evaluated_of, loss_of
from federation.job.selection_checks import counts_for_nan
from federation.job.spec import JobSpec
from federation.messages import MetricSums
from federation.protocols import LocalWeights, RoundCharges
from federation.vectors import NO_ARRAYS, Arrays, IntegerVector, Layout, Role, Vector


@dataclass(eq=False)
class LoopTrainer:
    """Trains in the loop of the user's Trainer; a ``federation.protocols.Trainer``.

    Attributes:
        job: The job, with the task ``trainer``.
        site: Name of the site.
        pool: Where models come from, each with its Trainer.
        train: What to train on.
        held_out: What to evaluate on.
        seed: Seed of the order of examples and of what a model draws in training; the
            job's by default.
        ends_early: Asked after every local step: whether to take no more, since the
            machine is about to go.

    Raises:
        SiteError: The site has nothing to train on, or nothing to evaluate on and the
            job asks for evaluation; or its data is not a list of records.
        JobError: The Trainer computes on another device than the job.
    """

    job: JobSpec
    site: SiteId
    _: KW_ONLY
    pool: ModelPool
    train: Dataset
    held_out: Dataset
    seed: int | None = None
    ends_early: Callable[[], bool] = never

    def __post_init__(self) -> None:
        """Check that job, data and Trainer fit each other."""
        check_site_data(self.job, self.site, self.train, self.held_out)
        for part in (self.train, self.held_out):
            records_of(part, np.zeros(0, np.int64))
        self._seed = self.job.seed if self.seed is None else self.seed
        self._for_nan = counts_for_nan(self.job)
        with self.pool.borrow() as model:
            self._check_same(model.trainer.args)

    def _check_same(self, args: Any) -> None:
        """Refuse a Trainer whose settings contradict the job's.

        Raises:
            JobError: The first one.
        """
        training = self.job.training
        for key, wanted, name, found in (
            ("device", self.pool.device.type, "device", args.device.type),
            (
                "batch_size",
                training.batch_size,
                "per_device_train_batch_size",
                args.per_device_train_batch_size,
            ),
            (
                "accumulate",
                training.accumulate,
                "gradient_accumulation_steps",
                args.gradient_accumulation_steps,
            ),
        ):
            if wanted != found:
                raise JobError(
                    f"is {wanted}, and the Trainer of model.factory has {name} = "
                    f"{found}: use the same value in both",
                    key=f"training.{key}",
                )

    def layout(self) -> Layout:
        """Layout of the model."""
        return self.pool.layout

    def pay(self, **_: Unpack[RoundCharges]) -> None:
        """Keep no ledger; see ``clients.privacy.spending`` for a trainer that does."""

    def spent(self) -> None:
        """Keep no ledger; see ``clients.privacy.spending`` for a trainer that does."""

    def fit(
        self,
        weights_d: Vector,
        integers_m: IntegerVector,
        *,
        round_index: int,
        kept: Arrays = NO_ARRAYS,  # noqa: ARG002 -- such a loop keeps no state
        steps: range | None = None,  # noqa: ARG002 -- the job's; others are refused
    ) -> LocalWeights:
        """Train from the global weights; see ``federation.protocols.Trainer``."""
        seed = torch_seed(self._seed, "training", self.site, round_index)
        with self._alone(seed) as model:
            model.load(weights_d, integers_m)
            module, layout = model.module, self.pool.layout
            loaded = LoadedModel(self.job, module, layout, weights_d)
            trained = {p for p in module.parameters() if p.requires_grad}
            reached: set[Any] = set()
            hooks = [
                p.register_post_accumulate_grad_hook(reached.add)  # type: ignore[no-untyped-call]
                for p in trained
            ]
            try:
                training, num_steps = self._train(model, round_index)
            finally:
                for hook in hooks:
                    hook.remove()
            if is_open_sum(self.job):
                named, idle = weights.parameters_by_name(module), trained - reached
                check_filled(
                    t.name
                    for t in layout.tensors
                    if t.role is Role.PARAMETER and named[t.name] in idle
                )
            local_d, local_m = weights.read(module, layout)
            loaded.correct_(local_d, local_m)
        return LocalWeights(
            weights_d=local_d,
            integers_m=local_m,
            num_examples=len(self.train),
            num_steps=num_steps,
            training=training,
        )

    def evaluate(
        self,
        weights_d: Vector,
        integers_m: IntegerVector,
        *,
        round_index: int,  # noqa: ARG002 -- every round evaluates alike
        kept: Arrays = NO_ARRAYS,  # noqa: ARG002 -- such a loop keeps no state
        max_loss: float | None = None,
    ) -> MetricSums:
        """Sums over the held-out data: the Trainer's means times its records.

        Raises:
            ValueError: ``max_loss`` asks for a clipped loss of each record.
        """
        if max_loss is not None:
            raise ValueError("a Trainer's results are means, which get no noise")
        seed = torch_seed(self.job.seed, "evaluation", self.site)
        with self._alone(seed) as model:
            model.load(weights_d, integers_m)
            with self._users_code(), _settings(model.trainer):
                records = records_of(self.held_out, np.arange(len(self.held_out)))
                means = model.trainer.evaluate(records)
        count, training = len(self.held_out), self.job.training
        bounds = evaluated_of(training)
        return MetricSums(
            count=count,
            loss_sum=self._mean(means, LOSS, loss_of(training)) * count,
            metrics={n: self._mean(means, n, m) * count for n, m in bounds.items()},
        )

    @contextmanager
    def _alone(self, seed: int) -> Iterator[Instance]:
        """Lend a model to one Trainer at a time.

        All Trainers of a process share accelerate's state and torch's generators.
        """
        with seeded_globally(seed, self.pool.device), self.pool.borrow() as model:
            yield model

    @contextmanager
    def _users_code(self) -> Iterator[None]:
        """Report what the user's Trainer raises as an error of the user's code."""
        try:
            yield
        except FederationError:
            raise
        except Exception as error:
            # Foreign code may raise anything. This translates and does not continue.
            name = unpinned(self.job.model.factory)
            raise UserCodeError(name, error, place_of(error)) from error

    def _train(self, model: Instance, round_index: int) -> tuple[MetricSums, int]:
        """Take the local steps of a round."""
        trainer, training = model.trainer, self.job.training
        size, steps = min(training.batch_size, len(self.train)), training.local_steps
        if steps is None:
            num_batches = -(-len(self.train) * training.num_epochs // size)
            steps = -(-num_batches // training.accumulate)
        before = (round_index - 1) * steps
        order = self._order(
            before * training.accumulate, steps * training.accumulate, size
        )
        with self._users_code(), _settings(trainer):
            trainer.args.max_steps = steps * self.job.rounds
            trainer._train_batch_size = size  # noqa: SLF001 -- as auto_find_batch_size does
            trainer.train_dataset = records_of(self.train, order)
            trainer.add_callback(_callback(before, steps, self.ends_early))
            done = trainer.train()
        count = done.global_step * training.accumulate * size
        sums = MetricSums(count=count, loss_sum=done.training_loss * count, metrics={})
        return sums, done.global_step

    def _order(self, first_batch: int, num_batches: int, size: int) -> Indices:
        """Records of a round, batch by batch: the walk of ``clients.data.batches``."""
        ordering = Ordering(seed=self._seed, site=self.site)
        walk = batches.stepwise(
            len(self.train),
            batch_size=size,
            first_batch=first_batch,
            num_batches=num_batches,
            **ordering,
        )
        return np.concatenate(list(walk))

    def _mean(self, means: Mapping[str, float], name: str, metric: Metric) -> float:
        """One of a Trainer's results, within the bounds that the job states."""
        value = means.get(f"eval_{name}")
        if not isinstance(value, int | float):
            found = [each.removeprefix("eval_") for each in means]
            raise SiteError(
                f"the Trainer's evaluation has no number {name!r}: let compute_metrics "
                "return it, or remove it from training.metrics; it has "
                f"{', '.join(found)}"
            )
        if metric == Metric():
            return float(value)
        if math.isnan(value):
            return self._for_nan.get(name, metric.high)
        return float(min(max(value, metric.low), metric.high))


@contextmanager
def _settings(trainer: Any) -> Iterator[None]:
    """Have a Trainer only train or evaluate, and put its settings back.

    It writes no checkpoints, logs nothing and evaluates when it is asked.
    """
    before = (trainer.args, trainer.train_dataset, trainer.callback_handler.callbacks)
    trainer.args = args = copy.copy(trainer.args)
    for name in ("save_strategy", "eval_strategy", "logging_strategy"):
        setattr(args, name, type(getattr(args, name)).NO)
    args.train_sampling_strategy = "sequential"  # The order is the job's.
    args.eval_on_start = args.load_best_model_at_end = False
    args.dataloader_drop_last = False  # All held-out records count.
    args.logging_nan_inf_filter = False  # A loss that is not a number is no smaller.
    trainer.callback_handler.callbacks = _fresh(before[2], trainer)
    trainer.optimizer = trainer.lr_scheduler = None
    try:
        yield
    finally:
        trainer.args, trainer.train_dataset, trainer.callback_handler.callbacks = before
        trainer.optimizer = trainer.lr_scheduler = None


def _fresh(callbacks: Sequence[Any], trainer: Any) -> list[Any]:
    """Copy callbacks, but not the Trainer and the model that they may refer to.

    Raises:
        SiteError: One cannot be copied.
    """
    model = trainer.model
    parts = (*model.modules(), *model.parameters(), *model.buffers())
    data = (trainer.train_dataset, trainer.eval_dataset)
    shared = {id(each): each for each in (trainer, *parts, *data)}
    copies = []
    for each in callbacks:
        try:
            copies.append(copy.deepcopy(each, shared))
        except Exception as error:
            # Foreign objects may raise anything. This translates and does not continue.
            name = type(each).__name__
            raise SiteError(
                f"the Trainer's callback {name} cannot be copied, and every round "
                f"begins with a copy: {error}. Have it open files and connections in "
                'on_train_begin, or remove it (report_to = "none")',
                outside=f"the Trainer's callback {name} cannot be copied",
            ) from error
    return copies


class _StepsOfRound:
    """A callback that plays one round of a run's steps."""

    def __init__(self, before: int, steps: int, ends_early: Callable[[], bool]) -> None:
        """Plan a round.

        Args:
            before: Steps of earlier rounds, which the schedule has taken.
            steps: Steps of this round.
            ends_early: Whether to take no more.
        """
        self._before, self._steps, self._ends_early = before, steps, ends_early

    def on_train_begin(self, *_given: Any, **parts: Any) -> None:
        """Have the schedule continue where the last round has left it."""
        schedule = parts["lr_scheduler"]
        if self._before:  # Else torch warns of steps before those of the optimiser.
            schedule.load_state_dict({**schedule.state_dict(), "_step_count": 2})
        for _ in range(self._before):
            schedule.step()

    def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop after the round's last step."""
        if state.global_step >= self._steps or self._ends_early():
            control.should_training_stop = True


def _callback(before: int, steps: int, ends_early: Callable[[], bool]) -> Any:
    """Make a ``transformers.TrainerCallback`` of a round."""
    from transformers import TrainerCallback  # noqa: PLC0415 -- an optional extra

    return type("StepsOfRound", (_StepsOfRound, TrainerCallback), {})(
        before, steps, ends_early
    )
