"""Local training with torch: from the global weights to the site's own.

One round at a site is FedAvg's ClientUpdate (McMahan et al. 2017, arXiv:1602.05629,
Algorithm 1): for each batch loss, backward and a step, in which the methods of the job
are guests (``clients.methods``). The trainer itself keeps nothing between rounds: what
optimiser and methods keep comes and goes with each of them.
"""

import logging
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import KW_ONLY, dataclass
from functools import partial
from itertools import islice
from typing import Unpack

import numpy as np
import torch

from clients.data import batches
from clients.data.batches import ALONE, Ordering, Rank
from clients.data.datasets import (
    Batch,
    Dataset,
    Indices,
    first_not_finite,
    not_finite_records,
)
from clients.data.privacy_units import held_out_units, num_units, persons_of
from clients.data.reading import BatchReader
from clients.methods import registry as methods
from clients.methods.guest import UNSTABLE, LocalRound, NotFinite
from clients.methods.half_precision import autocast
from clients.methods.overlap import AheadSteps, Beginning, WorkAhead, own_model
from clients.models import weights
from clients.models.evaluation_notes import EvaluationNotes
from clients.models.loaded_model import LoadedModel
from clients.models.model_pool import Instance, ModelPool
from clients.models.objectives import results_by_record, stays_finite
from clients.randomness import SECRET_BYTES, Seed, global_generators, torch_seed
from clients.ranks.checks import check_shares
from clients.ranks.peers import NO_PEERS, Peers, Sums
from clients.shards.order import reads_ahead, telling_ahead
from clients.sixteen_bits import note_slow
from clients.training import subgroups
from clients.training.interrupted_steps import InterruptedSteps, LostSteps
from clients.training.kept_steps import KeptSteps, start_digest
from clients.training.local_steps import LocalOptimizer, groups
from clients.training.private_steps import (
    PrivateGradient,
    PrivateTraining,
    num_private_steps,
    sampling_rate,
    takes_private_steps,
)
from federation.errors import SiteError
from federation.ids import SiteId
from federation.job.adapter_ranks import sent_places
from federation.job.metrics import computed_of, metrics_of
from federation.job.spec import JobSpec
from federation.messages import MetricSums
from federation.protocols import LocalUpdate, LocalWeights, RoundCharges
from federation.rounds.local_work import (
    accumulate_in,
    batches_before,
    bounds,
    first_rounds,
    in_round,
    leaves_steps_open,
    moves_data,
    records_of,
)
from federation.tree import map_tree, num_records
from federation.vectors import (
    NO_ARRAYS,
    Arrays,
    IntegerVector,
    Layout,
    Vector,
    is_finite,
)

_LOG = logging.getLogger(__name__)


def never() -> bool:
    """Take all steps of a round."""
    return False


def check_site_data(
    job: JobSpec, site: SiteId, train: Dataset, held_out: Dataset
) -> None:
    """Check that a site has records to train on, and to evaluate on if that is asked.

    Raises:
        SiteError: It has none.
    """
    if len(train) == 0:
        raise SiteError(f"site {site!r} has no training examples")
    if len(held_out) == 0 and job.evaluation.every > 0:
        raise SiteError(
            f"site {site!r} has no held-out examples; give it some, or set "
            "evaluation.every = 0"
        )


@dataclass(eq=False)
class TorchTrainer:
    """Trains a job's model on the data of one site.

    Attributes:
        site: Name of the site.
        pool: Where models come from.
        train: What to train on.
        held_out: What to evaluate on.
        private: Makes every gradient differentially private; None for none.
        peers: The site's other ranks; each of them calls what this one calls.
        seed: Seed of the order of examples and of what a model draws in training; the
            job's by default.
        ends_early: Asked after every local step: whether to take no more, since the
            machine is about to go. What the steps have led to is the round's result.
        kept_steps: Keeps the steps of a round that the site cannot end; None to keep
            none.

    Raises:
        SiteError: The site has nothing to train on, or nothing to evaluate on and the
            job asks for evaluation; or it has too few records for private steps or
            for its ranks.
        JobError: A batch cannot be shared out evenly, and the data needs it.
        ValueError: The job's unit of privacy and ``private`` contradict each other,
            or there are several ranks and noise in the secure sum.
    """

    job: JobSpec
    site: SiteId
    _: KW_ONLY
    pool: ModelPool
    train: Dataset
    held_out: Dataset
    private: PrivateTraining | None = None
    peers: Peers = NO_PEERS
    seed: int | None = None
    ends_early: Callable[[], bool] = never
    kept_steps: KeptSteps | None = None

    def __post_init__(self) -> None:
        """Check that job and data fit each other."""
        job, private = self.job, self.private
        check_site_data(job, self.site, self.train, self.held_out)
        self.held_out = held_out_units(job, self.train, self.held_out)
        if private is not None:
            self.train, self.held_out = self.train.apart(), self.held_out.apart()
        if takes_private_steps(job) != (private is not None):
            raise ValueError("private training is what the job asks for, or is not")
        if private is not None:
            if self.peers.count > 1 and private.in_sum:
                raise ValueError("with noise in the sum one rank takes the step")
            for first in first_rounds(job.training):
                sampling_rate(in_round(job, first), num_units(job, self.train))
        self._persons = persons_of(job, self.train)
        self._split: Sequence[Indices] | None = None  # By subgroup.
        check_shares(job, self.site, self.train, self.peers.count)
        note_slow(job.training, self.pool.device, self.pool.noted)
        self._is_protected = job.privacy.differential_privacy.enabled
        self._seed = job.seed if self.seed is None else self.seed
        self._objective = self.pool.objective
        self._lora_rank = self.pool.ranks.get(self.site)
        self._ahead = WorkAhead(job, self._first_steps)
        self._notes = EvaluationNotes(
            job,
            self.site,
            self.held_out,
            noted=self.pool.noted,
            is_over=self.peers.count > 1,  # A rank may have a part of the model.
        )
        if private is None and not moves_data(job):
            # Data that is far away begins to come while the first task is on its way
            # and held-out data is read. After a resume this is the wrong guess.
            self._indices(1, self._steps_of(1))

    def _draws_of(self, seed: int, *purpose: str | int) -> Seed:
        """What models and data draw from; secret where records are protected."""
        if self.private is not None:
            return self.private.random_bytes(SECRET_BYTES)
        return torch_seed(seed, *purpose)

    def layout(self) -> Layout:
        """Layout of the model."""
        return self.pool.layout

    def own_spans(self) -> tuple[tuple[int, int], ...]:
        """Places of the weights that this rank returns; see ``weights``."""
        is_first = self.peers.rank.rank == 0
        with self.pool.borrow() as model:
            return weights.own_spans(model.module, self.pool.layout, is_first=is_first)

    def pay(self, **_: Unpack[RoundCharges]) -> None:
        """Keep no ledger; see ``clients.privacy.spending`` for a trainer that does."""

    def fit(
        self,
        weights_d: Vector,
        integers_m: IntegerVector,
        *,
        round_index: int,
        kept: Arrays = NO_ARRAYS,
        steps: range | None = None,
    ) -> LocalWeights | LocalUpdate:
        """Train from the global weights; see ``federation.protocols.Trainer``."""
        steps = steps or self._steps_of(round_index)
        # Every rank draws for itself; the first one draws what it would draw alone.
        mine = (self.peers.rank.rank,) if self.peers.rank.rank else ()
        seed = self._draws_of(self._seed, "training", self.site, round_index, *mine)
        begin = self._ahead.beginning(
            round_index,
            (weights_d, integers_m),
            kept,
            layout=self.pool.layout,
            first_step=steps.start,
        )
        with self.pool.borrow() as model:

            def train() -> LocalWeights | LocalUpdate:
                if self.private is not None and self.private.in_sum:
                    model.load(weights_d, integers_m, kept)
                    return self._one_step(model.module, self.private, integers_m)
                start = self._local_round(
                    model.module, round_index, steps, weights_d, begin.kept
                )
                return self._train(model, start, begin)

            return self.peers.draw(self.pool.draws, train, kind="train", seed=seed)

    def work_ahead(
        self, round_index: int, kept: Arrays, first_step: int | None = None
    ) -> None:
        """Begin with a round's first steps; see ``federation.protocols.WorksAhead``."""
        if first_step is None:
            first_step = self._steps_of(round_index).start
        self._ahead.begin(round_index, kept, first_step)

    def _first_steps(
        self, round_index: int, kept: Arrays, first_step: int
    ) -> AheadSteps:
        """Take a round's first steps from the site's own weights."""
        own = own_model(kept)
        assert own is not None  # noqa: S101 -- as both callers have seen
        seed = self._draws_of(self._seed, "training ahead", self.site, round_index)
        # How many more the round takes may not be known yet.
        steps = range(first_step, first_step + bounds(self.job)[0])
        with self.pool.borrow() as model:

            def train() -> AheadSteps:
                model.load(*own)
                start = self._local_round(
                    model.module, round_index, steps, own[0], kept
                )
                optimizer = LocalOptimizer(
                    start.model, self.job, kept, guests=methods.begin(start)
                )
                sums = Sums(self.pool.device, self.peers, metrics_of(self.job.training))
                stop = self.job.training.overlap_steps
                gradients = (
                    self._gradients(start, optimizer, sums, stop=stop)
                    if self.private is None
                    else self._private_gradients(start, self.private, stop=stop)
                )
                with closing(gradients):
                    for number in gradients:
                        optimizer.step(number)
                weights_d, integers_m = weights.read(model.module, self.pool.layout)
                return AheadSteps(
                    weights_d=weights_d,
                    integers_m=integers_m,
                    kept={**optimizer.kept(), **methods.states(optimizer.guests)},
                    training=sums.metrics(),
                )

            return self.peers.draw(self.pool.draws, train, kind="train", seed=seed)

    def evaluate(
        self,
        weights_d: Vector,
        integers_m: IntegerVector,
        *,
        round_index: int,  # noqa: ARG002 -- every round evaluates alike
        kept: Arrays = NO_ARRAYS,
        max_loss: float | None = None,
    ) -> MetricSums:
        """Sums over the held-out data, each prediction's loss clipped, in nats."""
        seed = self._draws_of(self.job.seed, "evaluation", self.site)
        with self.pool.borrow() as model:

            def evaluate() -> MetricSums:
                model.load(weights_d, integers_m, kept)
                return self._evaluate(model.module, max_loss)

            return self.peers.draw(
                self.pool.draws, evaluate, kind="evaluate", seed=seed
            )

    def spent(self) -> None:
        """Keep no ledger; see ``clients.privacy.spending`` for a trainer that does."""

    def _train(
        self, instance: Instance, start: LocalRound, begin: Beginning
    ) -> LocalWeights:
        """Train in a round: FedAvg's ClientUpdate, with the job's methods as guests.

        Args:
            instance: Its model is trained in place.
            start: The round.
            begin: What training begins with, and steps that were taken ahead.
        """
        model, layout = start.model, start.layout
        instance.load(begin.weights_d, begin.integers_m, begin.kept)
        loaded = LoadedModel(self.job, model, layout, begin.weights_d)
        guests = methods.begin(start)
        optimizer = LocalOptimizer(model, self.job, begin.kept, guests=guests)
        sums = Sums(self.pool.device, self.peers, metrics_of(self.job.training))
        with self._interruption(start, loaded, optimizer, sums) as interruption:
            num_steps = begin.num_steps + interruption.resume()
            gradients = (
                self._gradients(start, optimizer, sums, first=num_steps)
                if self.private is None
                else self._private_gradients(start, self.private, first=num_steps)
            )
            with closing(gradients):
                for number in gradients:
                    optimizer.step(start.place(number))
                    num_steps += 1
                    interruption.after_step(num_steps)
        training = begin.total(sums.metrics()) if self.private is None else None
        num_steps -= optimizer.skipped
        for guest in guests:
            guest.end_(num_steps)
        local_d, local_m = weights.read(model, layout)
        if training is not None and not math.isfinite(training.loss_sum):
            if optimizer.skipped or not is_finite(local_d):
                self._check_finite(start, loaded)
            if optimizer.skipped:
                training = None  # Of a step not taken; a secure sum has no NaN.
        loaded.correct_(local_d, local_m)
        return LocalWeights(
            weights_d=local_d,
            integers_m=local_m,
            num_examples=len(self._records(start.steps)),
            num_steps=num_steps,
            training=training,
            kept={**optimizer.kept(), **methods.arrays(guests, local_d, local_m)},
        )

    def _local_round(
        self,
        model: torch.nn.Module,
        round_index: int,
        steps: range,
        weights_d: Vector,
        kept: Arrays,
    ) -> LocalRound:
        return LocalRound(
            job=self.job,
            site=self.site,
            round_index=round_index,
            steps=steps,
            model=model,
            layout=self.pool.layout,
            weights_d=weights_d,
            kept=kept,
            lora_rank=self._lora_rank,
            peers=self.peers,
        )

    def _gradients(
        self,
        start: LocalRound,
        optimizer: LocalOptimizer,
        sums: Sums,
        *,
        first: int = 0,
        stop: int | None = None,
    ) -> Generator[int]:
        """Compute the gradients of a round's steps from ``first`` to ``stop``.

        Yields:
            The number of each step, counted over the run, when its gradients are there;
            until the site must leave.
        """
        start.model.train()
        wrapped = self.peers.wrap(start.model)
        size = accumulate_in(self.job.training, start.round_index)
        last = None if stop is None else stop * size
        walk = islice(self._indices(start.round_index, start.steps), first * size, last)
        seed = self._draws_of(self._seed, "reading", self.site, start.round_index)
        with BatchReader(self.train, walk, seed=seed, first=first * size) as reader:
            every = groups(iter(reader), size)
            for number, group in enumerate(every, start=start.steps.start + first):
                self._add_gradients(wrapped, reader, group, sums, optimizer.scaled)
                yield number
                if self.ends_early():
                    break

    def _interruption(
        self,
        start: LocalRound,
        loaded: LoadedModel,
        optimizer: LocalOptimizer,
        sums: Sums,
    ) -> LostSteps:
        """What keeps a round's steps, if anything does; ranks keep none."""
        if self.kept_steps is None or self.peers.count > 1:
            return LostSteps()
        # Steps are a part of what a round begins with where its number does not say.
        steps = start.steps if leaves_steps_open(self.job) else None
        generators = global_generators(self.pool.device)
        if self.private is not None:
            # The next steps draw afresh, and states of generators are secret.
            steps, generators = None, []
        return InterruptedSteps(
            self.kept_steps,
            start,
            partial(
                start_digest, start.weights_d, loaded.integers_m, start.kept, steps
            ),
            optimizer=optimizer,
            sums=sums,
            generators=generators,
            seed=torch_seed(self._seed, "training", self.site, start.round_index),
        )

    def _check_finite(self, start: LocalRound, loaded: LoadedModel) -> None:
        """Find the record that made losses infinite, and weights or gradients.

        Raises:
            NotFinite: It is one of this round's batches. Not where whole sites are
                protected, whose answer must not tell this: the site's log does.
        """
        if self.peers.count > 1:
            return

        def is_handled(batch: Batch) -> bool:
            with self.pool.borrow() as fresh:
                fresh.load(start.weights_d, loaded.integers_m, start.kept)
                return self.stays_finite(fresh.module, batch, gradients=True)

        walk = self._indices(start.round_index, start.steps)
        bad = first_not_finite(self.train, walk, is_handled)
        if bad is not None:
            error = NotFinite(
                not_finite_records("training", bad),
                outside=UNSTABLE,
            )
            if not self._is_protected:
                raise error
            _LOG.warning("site %s: %s", self.site, error)

    def _add_gradients(
        self,
        model: torch.nn.Module,
        reader: BatchReader,
        group: list[Indices],
        sums: Sums,
        scaled: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """Add the gradients of one step's batches."""
        num_examples = self.peers.total(sum(map(len, group)))
        for number, chosen in enumerate(group, start=1):
            # A rank without an example goes through one all the same, and counts
            # nothing.
            read = chosen if len(chosen) else np.zeros(1, dtype=np.int64)
            batch = reader.batch(read)
            with self.peers.adding(model, last=number == len(group)):
                self._add_gradient(
                    model,
                    batch,
                    sums,
                    scaled,
                    size=len(chosen),
                    num_examples=num_examples,
                )

    def _add_gradient(
        self,
        model: torch.nn.Module,
        batch: Batch,
        sums: Sums,
        scaled: Callable[[torch.Tensor], torch.Tensor],
        *,
        size: int,
        num_examples: int,
    ) -> None:
        """Add the gradient of a batch that counts for ``size`` examples of a step."""
        inputs, targets = self._on_device(batch)
        with self._autocast():
            loss = self._objective(model, inputs, targets)
        if not loss.total.requires_grad:
            raise SiteError(
                "the loss has no gradient: in the model (model.factory), compute the "
                "logits from its parameters, without detach(), item() or no_grad()"
            )
        if size == 0:
            (loss.total * 0.0).backward()  # type: ignore[no-untyped-call]
            return
        # Every example of a step counts the same, whatever its batch and its rank;
        # the mean over the ranks is still to be taken.
        share = size * self.peers.count / num_examples
        mean = loss.total / (max(loss.count, 1) / share)
        scaled(mean).backward()  # type: ignore[no-untyped-call]
        sums.add(loss.loss, loss.count, loss.metrics)

    def _private_gradients(
        self,
        start: LocalRound,
        private: PrivateTraining,
        *,
        first: int = 0,
        stop: int | None = None,
    ) -> Generator[int]:
        """Compute differentially private gradients of steps as ``_gradients`` does.

        Nothing is counted on the way: sums over the samples would have no noise. All
        steps were charged, so that fewer cost no more.

        Yields:
            The number of each step, counted over the run, when its gradient is there;
            until the site must leave.
        """
        model = start.model
        model.train()
        gradient = PrivateGradient(
            model,
            in_round(self.job, start.round_index),  # As it is charged for.
            private,
            num_records=len(self.train),
            persons=self._persons,
            peers=self.peers,
        )
        for number in start.steps[first:stop]:
            for drawn in gradient.draw():
                loss = self._private_loss(model, drawn.records)
                gradient.add_(loss, drawn)
            gradient.release_()
            yield number
            if self.ends_early():
                break

    def _one_step(
        self,
        model: torch.nn.Module,
        private: PrivateTraining,
        integers_m: IntegerVector,
    ) -> LocalUpdate:
        """Take one step of plain SGD whose noise is added inside the secure sum."""
        model.train()
        gradient = PrivateGradient(
            model, self.job, private, num_records=len(self.train)
        )
        for drawn in gradient.draw():
            gradient.add_(self._private_loss(model, drawn.records), drawn)
        update_d = np.empty(self.pool.layout.size, dtype=np.float32)
        gradient.write_update(
            model,
            self.pool.layout,
            lr=self.job.training.optimizer.lr,
            out_d=update_d,
        )
        if self._lora_rank is not None:
            update_d[~sent_places(self.pool.layout, self._lora_rank)] = 0
        return LocalUpdate(
            update_d=update_d,
            integers_m=integers_m.copy(),
            num_examples=len(self.train),
            num_steps=1,
            training=None,
        )

    def _private_loss(
        self, model: torch.nn.Module, chosen: Indices
    ) -> Callable[[], torch.Tensor]:
        """Read a batch, and return what computes its loss for per-record gradients.

        Raises:
            JobError: The model mixes records.
        """
        batch = self._on_device(self.train.batch(chosen))
        self.check_apart(model, batch, gradients=True)
        return partial(self._sum_of_means, model, batch)

    def stays_finite(
        self, model: torch.nn.Module, batch: Batch, *, gradients: bool
    ) -> bool:
        """Whether a model handles some records; see ``objectives.stays_finite``."""
        with self._autocast():
            return stays_finite(
                self._objective, model, self._on_device(batch), gradients=gradients
            )

    def _sum_of_means(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Sum over records of each record's mean loss over its predictions."""
        inputs, targets = batch
        with self._autocast():
            loss = self._objective(model, inputs, targets)
        return loss.sum_of_means(num_records(inputs))

    def check_apart(
        self, model: torch.nn.Module, batch: Batch, *, gradients: bool
    ) -> None:
        """Check that a model does not mix the records of a batch.

        Raises:
            JobError: It does.
        """
        results = results_by_record(
            self._objective, self.job.training, gradients=gradients
        )

        def forward(model: torch.nn.Module, batch: Batch) -> object:
            with self._autocast():
                return results(model, batch)

        self.pool.records_apart.check(model, batch, forward, gradients=gradients)

    def _evaluate(self, model: torch.nn.Module, max_loss: float | None) -> MetricSums:
        """Sums over all held-out records, walked through by subgroup."""
        if self._split is None:  # Of held-out data, which may be far away.
            self._split = subgroups.split(self.job, self.site, self.held_out)
        found = self._split
        parts = [self._evaluate_part(model, max_loss, places) for places in found]
        return subgroups.pooled(self.job, [*map(len, found)], parts)

    @torch.no_grad()
    def _evaluate_part(
        self, model: torch.nn.Module, max_loss: float | None, places: Indices
    ) -> MetricSums:
        """Sums over some of the held-out records."""
        model.eval()
        metrics = computed_of(self.job.training)
        sums = Sums(self.pool.device, self.peers, metrics)
        size, notes = self.job.evaluation.batch_size, self._notes
        total, rank = len(places), self.peers.rank
        starts = range(rank.rank * size, total, rank.world_size * size)
        walk = [places[i : i + size] for i in starts]
        if self.peers.is_sharded and len(walk) * rank.world_size * size < total:
            walk.append(np.arange(1))  # Others need this rank's part once more.
        told = telling_ahead(self.held_out, iter(walk))
        seed = self._draws_of(self._seed, "reading", self.site, "held-out")
        with BatchReader(self.held_out, told, seed=seed) as reader:
            for number, chosen in enumerate(reader):
                inputs, targets = self._on_device(reader.batch(chosen))
                if self.private is not None and max_loss is not None:
                    # What one record adds to the sums is promised here too.
                    self.check_apart(model, (inputs, targets), gradients=False)
                with self._autocast():
                    loss = self._objective(model, inputs, targets, max_loss=max_loss)
                if number < len(starts):
                    sums.add(loss.loss, loss.count, loss.metrics)
                if number == 0:
                    first = inputs
        found = sums.metrics()
        # Afterwards: a model that draws random numbers draws the same in every round.
        if walk:
            notes.on_batch(model, first)
        if total:
            handled = partial(self.stays_finite, model, gradients=False)
            notes.on_result(found, walk, handled)
        return found

    def _steps_of(self, round_index: int) -> range:
        """Steps of the run that a round takes if every round takes as many."""
        count = self._steps_per_round()
        return range((round_index - 1) * count, round_index * count)

    def _steps_per_round(self) -> int:
        training = self.job.training
        if self.private is not None:
            return num_private_steps(self.job, num_units(self.job, self.train))
        if training.local_steps is not None:
            return training.local_steps
        batches_per_epoch = -(-len(self.train) // training.batch_size)
        num_batches = training.num_epochs * batches_per_epoch
        return -(-num_batches // training.accumulate)

    def _indices(self, round_index: int, steps: range) -> Iterator[Indices]:
        """Yield this rank's examples of each batch of a round."""
        if reads_ahead(self.train):  # Each rank has its own shards.
            return self._walk(round_index, steps, self.peers.rank)
        return map(self.peers.part, self._walk(round_index, steps, ALONE))

    def _walk(self, round_index: int, steps: range, rank: Rank) -> Iterator[Indices]:
        """Yield the examples of each batch of a round, or a rank's share of them."""
        training, data = self.job.training, self.train
        batch_size = training.batch_size // rank.world_size
        # Data that reads ahead also learns the next round's first batches.
        ahead, shuffle = 0, None
        if reads_ahead(data):
            shuffle = data.epoch_order
            if steps.stop < self.job.rounds * self._steps_per_round():
                ahead = -(-data.examples_ahead // batch_size)
        ordering = Ordering(seed=self._seed, site=self.site, shuffle=shuffle, rank=rank)
        if training.local_steps is not None:
            num_batches = len(steps) * accumulate_in(training, round_index)
            walk = batches.stepwise(
                len(data),
                batch_size=batch_size,
                first_batch=batches_before(training, round_index, steps.start),
                num_batches=num_batches + ahead,
                **ordering,
            )
            return telling_ahead(data, walk, num_batches)
        num_epochs, records = training.num_epochs, self._records(steps)
        if moves_data(self.job):  # The next round's records are not known yet.
            ahead, ordering["shuffle"] = 0, None
        walk = batches.epochwise(
            len(records),
            batch_size=batch_size,
            first_epoch=(round_index - 1) * num_epochs,
            num_epochs=num_epochs + bool(ahead),
            **ordering,
        )
        if records.start:
            walk = (chosen + records.start for chosen in walk)
        per_epoch = -(-len(records) // training.batch_size)
        return telling_ahead(data, walk, num_epochs * per_epoch)

    def _records(self, steps: range) -> range:
        """Find the records that a round trains on.

        Raises:
            SiteError: There are none in the part of the data that the round gives.
        """
        total = len(self.train)
        if not moves_data(self.job):
            return range(total)
        found = records_of(steps, total)
        if not found:
            raise SiteError(
                f"there are only {total} training examples, too few to be dealt out in "
                'each round: set data.placement = "static"'
            )
        return found

    def _on_device(self, batch: Batch) -> Batch:
        device = self.pool.device
        moved: Batch = map_tree(lambda t: t.to(device, non_blocking=True), batch)
        return moved

    def _autocast(self) -> AbstractContextManager[object]:
        return autocast(self.job.training.precision, self.pool.device)
