"""Find a learning rate and a batch size: short training at one site, before a run.

The range test of Smith 2017 (arXiv:1506.01186, section 3.3): the rate grows by a
constant factor from step to step, and the loss of each batch is noted until it
diverges. Where the smoothed loss falls fastest, steps of that rate help most.

The gradient noise scale of McCandlish et al. 2018 (arXiv:1812.06162, equations 2.9 and
A.2): the number of records whose gradient has as much noise as signal. Batches much
smaller waste few records, and much larger ones save few steps.

Gradients and losses here have no noise: not for jobs with differential privacy.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from clients.data import batches
from clients.data.batches import epoch_order
from clients.data.datasets import Indices
from clients.learning_rate import rate_of
from clients.methods import registry as methods
from clients.methods.guest import LocalRound
from clients.methods.half_precision import autocast
from clients.models.starting_weights import initial_weights
from clients.randomness import seeded_globally, torch_seed
from clients.training.local_federation import Federation
from clients.training.local_steps import LocalOptimizer, groups
from federation.errors import JobError, SiteError
from federation.ids import SiteId
from federation.job.adapter_ranks import ranks_of
from federation.job.metrics import TRAINER
from federation.job.spec import JobSpec, LearningRateSpec
from federation.rounds.local_work import in_round
from federation.tree import map_tree
from federation.vectors import NO_ARRAYS

_SMOOTHING = 0.9  # Of the running mean of losses.
_DIVERGED = 4.0  # Times the smallest loss so far.
_FEWEST_LOSSES = 5
# Steps in a row that float16 skips with an infinite loss: then it is not their batch.
_MOST_OVERFLOWS = 5
_ENLARGED = 2.0**10  # Exact, and of no account to a ratio of gradients.
# Batches whose gradients are compared with their mean.
_NUM_BATCHES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RateRange:
    """Losses by learning rate.

    Attributes:
        rates: Rate of each step, growing.
        losses: Loss of each step's batch, before the step.
        smoothed: Their running mean.
        diverged: Whether the test ended because the loss grew.
        skipped: Steps that float16 did not take, since gradients overflowed.
    """

    rates: Sequence[float]
    losses: Sequence[float]
    smoothed: Sequence[float]
    diverged: bool
    skipped: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundSettings:
    """What training at one site has shown.

    Attributes:
        rates: The range test.
        rate: Where the loss fell fastest; None where it never fell.
        noise_scale: Of gradients at the weights that a run begins with, in records;
            infinite where they are noise alone.
        batch_size: Of the job, which the noise scale is compared with: all records of
            an optimiser step. Where later rounds take larger steps, that of round 1,
            whose steps the range test takes.
        later: First round and batch size of each later value
            (``training.accumulate_from``).
    """

    site: SiteId
    rates: RateRange
    rate: float | None
    noise_scale: float
    batch_size: int
    later: Sequence[tuple[int, int]] = ()


def smoothed(losses: Sequence[float]) -> list[float]:
    """Running mean with weights that decay, without a bias towards its beginning."""
    found, mean = [], 0.0
    for number, loss in enumerate(losses, start=1):
        mean = _SMOOTHING * mean + (1 - _SMOOTHING) * loss
        found.append(mean / (1 - _SMOOTHING**number))
    return found


def has_diverged(losses: Sequence[float]) -> bool:
    """Whether the last of these smoothed losses is infinite, or far above the least."""
    if not math.isfinite(losses[-1]):
        return True
    return len(losses) >= _FEWEST_LOSSES and losses[-1] > _DIVERGED * min(losses)


def steepest(rates: Sequence[float], losses: Sequence[float]) -> float | None:
    """The rate at which a smoothed loss falls fastest, by the logarithm of the rate.

    Args:
        rates: Growing by a constant factor.
        losses: Smoothed and finite, of the same length.

    Returns:
        None if there are too few, or the loss falls nowhere.
    """
    if len(losses) < _FEWEST_LOSSES:
        return None
    slopes = np.gradient(np.asarray(losses), np.log(rates))
    # Before the least loss only: behind it the loss may fall again by chance.
    before = slopes[: int(np.argmin(losses)) + 1]
    place = int(np.argmin(before))
    return float(rates[place]) if before[place] < 0 else None


def noise_scale(squares: Sequence[float], square_of_mean: float, size: int) -> float:
    """Gradient noise scale of batches of one size, in records.

    With unbiased estimates of the noise of a record's gradient, ``S``, and of the
    squared norm of the true gradient, ``G``, from small batches and their mean:
    arXiv:1812.06162, appendix A.1.

    Args:
        squares: Squared norm of each batch's gradient; at least two.
        square_of_mean: That of the mean of these gradients.
        size: Records of a batch.

    Returns:
        ``S / G``; infinity if the estimate of G is not positive.
    """
    small, big = size, size * len(squares)
    mean_square = math.fsum(squares) / len(squares)
    signal = (big * square_of_mean - small * mean_square) / (big - small)
    noise = (mean_square - square_of_mean) / (1 / small - 1 / big)
    return max(noise, 0.0) / signal if signal > 0 else math.inf


def check_findable(job: JobSpec) -> None:
    """Refuse jobs whose settings a short training at one site cannot find.

    Raises:
        JobError: With the key and what to do instead.
    """
    if job.privacy.differential_privacy.enabled:
        raise JobError(
            "a search for settings reads records without noise, and no ledger charges "
            "it: use crossfed tune, which charges each trial, or a job over public "
            "data",
            key="privacy.differential_privacy.unit",
        )
    if job.training.task == TRAINER:
        raise JobError(
            "the learning rate is in the TrainingArguments: name another task to "
            "search with the loop of the job",
            key="training.task",
        )


def find_settings(
    federation: Federation,
    site: SiteId,
    *,
    low: float,
    high: float,
    steps: int,
) -> FoundSettings:
    """Train at one site with a growing learning rate, and measure gradient noise.

    Args:
        federation: The job, its model and data.
        site: Whose data is used.
        low: First rate.
        high: Last rate.
        steps: From one to the other.

    Raises:
        JobError: See ``check_findable``; or the rates are no range.
        SiteError: The site has too few records.
    """
    job = federation.job
    check_findable(job)
    if not (0 < low < high < math.inf and steps >= _FEWEST_LOSSES):
        raise JobError(
            f"use 0 < low < high and at least {_FEWEST_LOSSES} steps", key="--low"
        )
    size, later = job.training.batch_size, job.training.accumulate_from
    job = in_round(job, 1)
    trial = _RangeTest(replace(federation, job=job), site)
    with seeded_globally(torch_seed(job.seed, "settings", site), trial.device):
        noise = trial.noise_scale()
        rates = trial.range_test(low, high, steps)
    last = len(rates.losses) - rates.diverged
    return FoundSettings(
        site=site,
        rates=rates,
        rate=steepest(rates.rates[:last], rates.smoothed[:last]),
        noise_scale=noise,
        batch_size=size * job.training.accumulate,
        later=[(first_round, size * batches) for first_round, batches in later],
    )


def growth(step: int, _: int, *, ratio: float, steps: int) -> float:
    """Factor of the first rate at a step: a schedule, see ``LearningRateSpec``."""
    return float(ratio ** (step / (steps - 1)))


class RangeRecord:
    """Collects the losses of a range test, and ends it when they diverge.

    Attributes:
        rates: See ``RateRange``, as the next two.
        losses: Without infinite ones of skipped steps.
        diverged: Whether the test ends here.
    """

    def __init__(self) -> None:
        """Begin without a step."""
        self.rates: list[float] = []
        self.losses: list[float] = []
        self.diverged = False
        self._overflows: list[tuple[float, float]] = []

    def add(self, rate: float, loss: float, *, is_skipped: bool) -> None:
        """Add a step.

        Args:
            rate: Its learning rate.
            loss: Loss of its batch, before the step.
            is_skipped: Whether float16 did not take it. An infinite loss of such a
                step has changed no weight, so it counts only if it does not pass.
        """
        if is_skipped and not math.isfinite(loss):
            self._overflows.append((rate, loss))
            if len(self._overflows) < _MOST_OVERFLOWS:
                return
        if not math.isfinite(loss) and self._overflows:
            rate, loss = self._overflows[0]
        self._overflows.clear()
        self.rates.append(rate)
        self.losses.append(loss)
        self.diverged = has_diverged(smoothed(self.losses))


class _RangeTest:
    """One site's training from the weights that a run begins with."""

    def __init__(self, federation: Federation, site: SiteId) -> None:
        self._job, self._pool = federation.job, federation.pool
        self._site = site
        self._train = federation.site_data[site][0]
        self._start = initial_weights(self._job, self._pool)
        self.device = self._pool.device

    def range_test(self, low: float, high: float, steps: int) -> RateRange:
        """Take steps with a growing rate until the loss diverges."""
        grows = LearningRateSpec(
            name=f"{__name__}:growth", options={"ratio": high / low, "steps": steps}
        )
        training = self._job.training
        optimizer = replace(training.optimizer, lr=low)
        training = replace(training, optimizer=optimizer, learning_rate=grows)
        job = replace(self._job, training=training)
        walk = batches.stepwise(
            len(self._train),
            batch_size=training.batch_size,
            first_batch=0,
            num_batches=steps * training.accumulate,
            seed=job.seed,
            site=self._site,
        )
        record = RangeRecord()
        with self._pool.borrow() as model:
            model.load(*self._start)
            start = LocalRound(
                job=job,
                site=self._site,
                round_index=1,
                steps=range(job.training.local_steps or 0),
                model=model.module,
                layout=self._pool.layout,
                weights_d=self._start[0],
                kept=NO_ARRAYS,
                lora_rank=ranks_of(job).get(self._site),
            )
            taken = LocalOptimizer(model.module, job, guests=methods.begin(start))
            for number, group in enumerate(groups(walk, training.accumulate)):
                loss = self._backward(model.module, group, taken.scaled)
                before = taken.skipped
                taken.step(number)
                is_skipped = taken.skipped > before
                record.add(rate_of(job, number), loss, is_skipped=is_skipped)
                if record.diverged:
                    break
        return RateRange(
            rates=record.rates,
            losses=record.losses,
            smoothed=smoothed(record.losses),
            diverged=record.diverged,
            skipped=taken.skipped,
        )

    def noise_scale(self) -> float:
        """Compare gradients of batches, at the first weights, with their mean.

        Raises:
            SiteError: The site has too few records.
        """
        size = min(self._job.training.batch_size, len(self._train) // _NUM_BATCHES)
        if size == 0:
            raise SiteError(
                f"site {self._site!r} has {len(self._train)} training records, and "
                f"{_NUM_BATCHES} are needed to measure the noise of gradients: choose "
                "another site"
            )
        order = epoch_order(
            len(self._train), epoch=0, seed=self._job.seed, site=self._site
        )
        squares, total = [], torch.zeros((), dtype=torch.float64, device=self.device)
        with self._pool.borrow() as model:
            model.load(*self._start)
            for chosen in order[: size * _NUM_BATCHES].reshape(_NUM_BATCHES, size):
                self._backward(model.module, [chosen], _enlarged)
                gradient = _gradient(model.module)
                squares.append(float(gradient.square().sum()))
                total = total + gradient / _NUM_BATCHES
                model.module.zero_grad(set_to_none=True)
        return noise_scale(squares, float(total.square().sum()), size)

    def _backward(
        self,
        model: torch.nn.Module,
        group: Sequence[Indices],
        scaled: Callable[[torch.Tensor], torch.Tensor],
    ) -> float:
        """Add gradients of one step's mean loss; returns that loss, in nats."""
        model.train()
        num_examples, found = sum(map(len, group)), 0.0
        for chosen in group:
            inputs, targets = map_tree(
                lambda part: part.to(self.device), self._train.batch(chosen)
            )
            with autocast(self._job.training.precision, self.device):
                loss = self._pool.objective(model, inputs, targets)
            share = len(chosen) / num_examples
            mean = loss.total * (share / max(loss.count, 1))
            scaled(mean).backward()  # type: ignore[no-untyped-call]
            found += mean.item()
        return found


def _enlarged(loss: torch.Tensor) -> torch.Tensor:
    """Multiply a loss, so that float16 does not lose small gradients."""
    return loss * _ENLARGED


def _gradient(model: torch.nn.Module) -> torch.Tensor:
    """All gradients as one vector, in float64."""
    return torch.cat(
        [p.grad.double().reshape(-1) for p in model.parameters() if p.grad is not None]
    )
