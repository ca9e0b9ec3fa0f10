"""Differentially private gradients for local training: DP-SGD, step by step.

Source: Abadi et al. 2016, arXiv:1607.00133, Algorithm 1. Each step draws a Poisson
sample of the site's records, clips the gradient of every record, adds them up, lets
the Gaussian mechanism release the sum, and divides it by the number of records that
were expected. A record is an example; of a language model it is one window of tokens.
Where the unit of privacy is a person, read "person" for "record": a step draws persons
and some records of each, and clips the mean gradient of these (``privacy.dp.persons``).

How many steps a site takes and how it samples is defined here once, for training and
for accounting. Both follow from the number of records rounded up to the grid of
``privacy.counts``: the rate, delta and noise that leave a site would otherwise give
its exact number of records away. The rate on the grid is the rate that steps really
sample with, so the accountant needs no margin for it. The ledger is not here.

Guarantee:
    The trainable weights after a round are post-processing of what ``event_of``
    describes, for anyone without the keys. All else of a model stays as it
    came: buffers and frozen parameters are put back after every batch.

    The proof needs that what a record adds depends on that record, and on draws that
    no data decides, alone. So dropout, augmentation and all else that draws from the
    global generators of torch, NumPy or Python, in steps and in noised evaluation,
    begins each time with states from ``random_bytes`` (``clients.randomness.fill``).
    Then the draws of all other records have the same distribution with and without a
    record, whichever place each has: for any values of these draws the two sums
    differ by one clipped gradient, and a mixture of such pairs is as private as each.
    With draws by a seed that others know, one record more would change the masks of
    all behind it, by any number of clip norms. Records are collated one by one
    (``Dataset.apart``) for the same reason. With ``unit = "site"`` neither is needed:
    the clip bounds all that a site's records, in any batch, change.

    The same with several ranks. Each samples among records of its own, with a key of
    its own, so that all together are a Poisson sample of the site. Their sums are added
    in float64, which is in the margin of ``privacy.dp_sgd.clipping.sum_margin`` for
    float64; noise is added once, by the first rank, which gives the others what it
    released and nothing else.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from clients.data.privacy_units import plural_of_units
from clients.models import weights
from clients.randomness import RandomBytes
from clients.ranks.peers import NO_PEERS, Peers
from federation.errors import SiteError
from federation.job.spec import JobSpec
from federation.rounds.local_work import (
    accumulate_in,
    bounds,
    first_rounds,
    in_round,
    is_by_capacity,
)
from federation.vectors import Layout, Vector
from privacy.counts import coarse
from privacy.dp.events import PrivacyEvent
from privacy.dp.mechanism import GaussianMechanism
from privacy.dp.persons import DrawnRecords, Persons
from privacy.dp.poisson import poisson_indices
from privacy.dp_sgd.clipping import CLIPPINGS, ClippedSum
from privacy.dp_sgd.person_batch import PersonBatch
from privacy.keystream import KEY_BYTES, Keystream, uniform_words


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivateTraining:
    """How a site's gradients are made private.

    Attributes:
        clip_norm: Largest Euclidean norm of a record's gradient, in the units of the
            loss over those of the weights.
        noise_multiplier: Standard deviation of the noise over the sensitivity,
            calibrated to the budget.
        clipping: ``auto``, ``hooks`` or ``ghost``, see ``privacy.dp_sgd.clipping``.
        in_sum: Noise is added inside the secure sum. What a step gives is then not
            private by itself, and must leave the site masked or not at all.
        random_bytes: Where keys come from, and what models and data draw from; never
            the job's seed, which others know.

    Raises:
        ValueError: ``clipping`` is unknown.
    """

    clip_norm: float
    noise_multiplier: float
    clipping: str = "auto"
    in_sum: bool = False
    random_bytes: RandomBytes = field(default=os.urandom, repr=False)

    def __post_init__(self) -> None:
        """Check the one value that is not checked elsewhere."""
        if self.clipping not in CLIPPINGS:
            raise ValueError(f"clipping is {self.clipping!r}, not one of {CLIPPINGS}")

    def mechanism(self, size: int) -> GaussianMechanism:
        """Make the mechanism for ``size`` values: see ``ModelPool.num_trained``."""
        return GaussianMechanism(
            clip_norm=self.clip_norm,
            noise_multiplier=self.noise_multiplier,
            size=size,
        )


def takes_private_steps(job: JobSpec) -> bool:
    """Whether the job's unit asks for clipped gradients of records or persons."""
    return job.privacy.differential_privacy.clips_gradients


def sensitivity_of_sum(job: JobSpec) -> float:
    """Most that one record changes an update of one step, in weight units.

    The step of plain SGD, ``lr * sum / expected batch`` over gradients clipped to C.
    """
    clip_norm = job.privacy.differential_privacy.clip_norm
    return job.training.optimizer.lr * clip_norm / expected_batch(job)


def expected_batch(job: JobSpec) -> int:
    """Records, or persons, that a step samples on average."""
    return job.training.batch_size * job.training.accumulate


def largest_batch(job: JobSpec) -> int:
    """Records, or persons, that a step of any round samples on average, at most."""
    training = job.training
    most = max(accumulate_in(training, first) for first in first_rounds(training))
    return training.batch_size * most


def units_at_once(job: JobSpec) -> int:
    """Records, or persons, of which a step computes the gradients at the same time.

    So many persons that their records are a batch, and at least one.
    """
    private, batch_size = job.privacy.differential_privacy, job.training.batch_size
    if not private.of_persons:
        return batch_size
    return max(1, batch_size // private.records_per_person)


def sampling_rate(job: JobSpec, num_records: int) -> float:
    """Probability of each record to be in a step: the batch over the coarse number.

    A step samples as many records as the job's batch on average, or up to a fifth
    fewer.

    Args:
        job: The job; of one round (``in_round``) where steps grow, here and below.
        num_records: Training records that the site holds; persons where these are the
            unit, here and below: see ``privacy_units.num_units``.

    Raises:
        SiteError: The site holds fewer records than a step is to sample.
    """
    expected, most = expected_batch(job), coarse(num_records)
    if most < expected:
        raise SiteError(
            f"the site holds at most {most} {plural_of_units(job)}, and a private step "
            f"samples {expected} on average: lower training.batch_size or "
            "training.accumulate"
        )
    return expected / most


def num_private_steps(job: JobSpec, num_records: int) -> int:
    """Steps of a round; an epoch samples every record once on average.

    Where tasks say how many: what the noise is planned for. With ``auto`` that is the
    mean, since the steps of the run are fixed; by capacity the most in any round.
    """
    if is_by_capacity(job):
        return bounds(job)[1]
    if job.training.local_steps is not None:
        return job.training.local_steps
    per_epoch = round(1 / sampling_rate(job, num_records))
    return job.training.num_epochs * per_epoch


def most_private_steps(job: JobSpec, num_records: int) -> int:
    """Steps of a round at most, which a round in reserve may take."""
    return max(bounds(job)[1], num_private_steps(job, num_records))


def event_of(
    job: JobSpec, num_records: int, mechanism: GaussianMechanism
) -> PrivacyEvent:
    """Describe what a site releases by one round of training.

    Args:
        job: Sets the batch size and the local steps.
        num_records: Training records that the site holds.
        mechanism: Returned by ``PrivateTraining.mechanism``.

    Raises:
        SiteError: The site holds too few records.
    """
    return PrivacyEvent(
        noise_multiplier=mechanism.effective_multiplier,
        sampling_rate=sampling_rate(job, num_records),
        steps=num_private_steps(job, num_records),
        slack=mechanism.slack,
    )


def events_by_round(
    job: JobSpec, num_records: int, mechanism: GaussianMechanism
) -> tuple[tuple[int, PrivacyEvent], ...]:
    """Describe what a site releases by each round of training.

    Args:
        job: The job; larger steps of later rounds (``training.accumulate_from``) have
            a larger sampling rate. The schedule is in the job, so no data decides it.
        num_records: Training records that the site holds.
        mechanism: Returned by ``PrivateTraining.mechanism``.

    Returns:
        First round of each kind, increasing from 1, and the event of one such round.

    Raises:
        SiteError: The site holds too few records for the largest step.
    """
    return tuple(
        (first, event_of(in_round(job, first), num_records, mechanism))
        for first in first_rounds(job.training)
    )


class PrivateGradient:
    """The private gradient of a model's steps.

    For each step: ``draw`` once, ``add_`` for each of its batches, ``release_``.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        job: JobSpec,
        private: PrivateTraining,
        *,
        num_records: int,
        persons: Persons | None = None,
        peers: Peers = NO_PEERS,
    ) -> None:
        """Take fresh keys.

        Args:
            model: Trained in place.
            job: A job with a unit of privacy.
            private: How it is made private.
            num_records: Training records of the whole site.
            persons: Whose they are, if a step samples persons.
            peers: The site's other ranks, each with the same model.

        Raises:
            SiteError: The site holds too few records.
        """
        num_units = num_records if persons is None else persons.count
        self._rate = sampling_rate(job, num_units)
        self._expected = expected_batch(job)
        self._num_units = peers.rank.share(num_units)
        self._persons = persons
        self._most = job.privacy.differential_privacy.records_per_person
        self._at_once = units_at_once(job)
        self._peers = peers
        self._random_bytes = private.random_bytes
        self._sum = ClippedSum(
            model,
            clip_norm=private.clip_norm,
            clipping=private.clipping,
            batch_size=self._at_once * (1 if persons is None else self._most),
            expected_records=self._expected,
        )
        self._mechanism = private.mechanism(self._sum.sum_d.numel())
        self._sampling = Keystream(self._random_bytes(KEY_BYTES))
        self._choice: Keystream | None = None
        frozen = [p for p in model.parameters() if not p.requires_grad]
        self._untrained = [
            (tensor, tensor.detach().clone()) for tensor in (*model.buffers(), *frozen)
        ]

    def draw(self) -> Iterator[DrawnRecords]:
        """Sample this rank's records of a step, in batches that fit memory.

        There is no batch at all if the sample is empty; the step is taken all the
        same, since its absence would be noticed.
        """
        self._sum.sum_d.zero_()
        chosen = poisson_indices(self._num_units, self._rate, self._sampling)
        chosen = chosen * self._peers.count + self._peers.rank.rank
        for start in range(0, len(chosen), self._at_once):
            batch = chosen[start : start + self._at_once]
            if self._persons is None:
                yield DrawnRecords(records=batch)
            else:
                yield self._persons.draw(
                    batch, most=self._most, draw_words=self._draw_words
                )

    def add_(self, loss: Callable[[], torch.Tensor], drawn: DrawnRecords) -> None:
        """Add the clipped gradients of a batch; see ``ClippedSum.add_``."""
        persons = None
        if drawn.sizes is not None:
            persons = PersonBatch(sizes=drawn.sizes, most=self._most)
        self._sum.add_(loss, len(drawn.records), persons)
        self._put_back()

    def _draw_words(self, count: int) -> NDArray[np.uint64]:
        # A key for a stream by itself: how much of it is used depends on the records.
        if self._choice is None:
            self._choice = Keystream(self._random_bytes(KEY_BYTES))
        return uniform_words(self._choice, count)

    def write_update(
        self, model: torch.nn.Module, layout: Layout, *, lr: float, out_d: Vector
    ) -> None:
        """Write what a step of plain SGD would change, without noise.

        Straight from the sum: through the weights, whose last digits are coarser,
        rounding would move neighbouring updates further apart.

        Args:
            model: The one that this is the gradient of.
            layout: Layout of the flat vector.
            lr: Learning rate.
            out_d: Shape ``(d,)``; zero where nothing is trained.
        """
        factor = -lr / self._expected
        parameters = weights.parameters_by_name(model)
        for spec, view in layout.float_views(out_d):
            parameter = parameters.get(spec.name)
            if parameter is None or not parameter.requires_grad:
                view[...] = 0.0
                continue
            part = self._sum.part_of(parameter).view(parameter.shape)
            view[...] = (part * factor).cpu().numpy()

    def release_(self) -> None:
        """Add noise and make the result the gradient of the model's parameters."""
        if self._peers.total_at_first_(self._sum.sum_d):
            self._add_noise_(self._sum.sum_d)
        self._peers.as_at_first_(self._sum.sum_d)
        self._sum.write_gradients(self._expected)

    def _add_noise_(self, sum_d: torch.Tensor) -> None:
        if sum_d.device.type == "cpu":
            self._mechanism.release_(sum_d.numpy(), self._random_bytes)
        else:
            host_d: np.ndarray[tuple[int], np.dtype[np.float64]] = sum_d.cpu().numpy()
            self._mechanism.release_(host_d, self._random_bytes)
            sum_d.copy_(torch.from_numpy(host_d))

    @torch.no_grad()
    def _put_back(self) -> None:
        # What layers note of the records they see has no noise, and later steps
        # would depend on it.
        for tensor, before in self._untrained:
            tensor.copy_(before)
