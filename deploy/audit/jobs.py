"""An audit's changes to a job: as few as its attacks need."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction

from clients.audit.canaries import FACTORY, record_shape
from clients.privacy.site_plans import PrivateSites, SitePlan
from clients.training.local_federation import Federation, SiteData
from clients.training.private_steps import (
    expected_batch,
    largest_batch,
    num_private_steps,
    sensitivity_of_sum,
)
from clients.training.trainer import TorchTrainer
from deploy.audit.rounds import throwaway_id
from federation.errors import JobError
from federation.ids import SiteId
from federation.job.privacy_job import DifferentialPrivacySpec, SecureAggregationSpec
from federation.job.spec import JobSpec, ModelSpec
from federation.protocols import Clock, Trainer
from federation.rounds.local_work import accumulate_in, first_rounds
from privacy.counts import coarse
from privacy.dp import accountant
from privacy.dp.ledger.ledger import InMemoryLedger
from privacy.dp.ledger.ledger_format import Terms

# Records of a private step: their sum is rounded, and a margin for that is taken from
# the clip norm of each (``privacy.dp_sgd.clipping.sum_margin``), 6 % for 30,000.
MAX_DRAWN = 100_000

# What the sampling rate of an audited site may fall short of the job's, at most.
_RATE_ROUNDING = Fraction(1, 100)

_MOST_OF_A_PERSON = 4  # Records of a canary that is a person.

_UNCLIPPED_NORM = 1.0  # Of a canary's gradient where nothing is clipped.
# Times the clip norm: what is clipped is clipped to the norm, and what is not shows.
_WELL_BEYOND = 100.0


def is_summed(job: JobSpec) -> bool:
    """Whether the promise is about opened sums, and not about each update."""
    return job.privacy.differential_privacy.unit == "joint"


def records_of_canary(job: JobSpec) -> int:
    """Records of one canary: of a whole person several, where persons are the unit.

    One more than a step takes of a person, so that which ones is drawn; but no more
    than show what clipping does with several.
    """
    private = job.privacy.differential_privacy
    if not private.of_persons:
        return 1
    return min(private.records_per_person + 1, _MOST_OF_A_PERSON)


def as_attacked(job: JobSpec) -> JobSpec:
    """The job as its attacker sees it run, without rehearsed faults.

    Masks are left out, unless the promise is about what they let through: under
    ``joint`` the attacker sees the sums that are opened.
    """
    job = replace(job, simulation=replace(job.simulation, faults=()))
    if is_summed(job):
        return job
    privacy = replace(job.privacy, secure_aggregation=SecureAggregationSpec())
    return replace(job, privacy=privacy)


def round_weight(job: JobSpec, round_index: int) -> float:
    """How much a round's update counts in the scores of canaries; 1 in round 1.

    A step of B records draws a canary with a probability proportional to B and divides
    it by B, so all rounds move a canary's value equally far on average. The standard
    deviation of their noise is proportional to 1 / B, and the weights of the most
    powerful weighted sum are inversely proportional to the variance.

    Args:
        job: The job; no data decides the weights.
        round_index: From 1.
    """
    training = job.training
    return (accumulate_in(training, round_index) / training.accumulate) ** 2


def with_room_in_sums(job: JobSpec, num_canaries: int) -> JobSpec:
    """Widen the clip norm of updates by what a site's canaries add to one.

    They are orthogonal to all else and to each other. Clipped as a whole, an update
    would show less of each of them; with more room its grid is a little coarser, and
    what is clipped of a record is as before.

    Args:
        job: Its promise is about sums.
        num_canaries: At one site, all of them drawn in one step at the most.
    """
    most = sensitivity_of_sum(job) * math.sqrt(num_canaries)
    secure = replace(
        job.privacy.secure_aggregation,
        clip_norm=math.hypot(job.update_clip_norm, most),
    )
    return replace(job, privacy=replace(job.privacy, secure_aggregation=secure))


def with_canaried_model(federation: Federation, num_canaries: int) -> JobSpec:
    """The job with the model around its model, and without evaluation.

    Dynamic weights need evaluation, and a job without differential privacy may have
    them.

    Args:
        federation: The job's own.
        num_canaries: Coordinates that the model gets.

    Raises:
        JobError: The sites' records differ in shape.
    """
    job = federation.job
    private = job.privacy.differential_privacy
    shapes = {record_shape(train) for train, _ in federation.site_data.values()}
    if len(shapes) > 1:
        raise JobError(
            f"the sites' records have different shapes, {sorted(shapes)}: canaries "
            "need records of one shape"
        )
    norm = _WELL_BEYOND * private.clip_norm
    model = ModelSpec(
        factory=FACTORY,
        options={
            "factory": job.model.factory,
            "options": job.model.options,
            "num_canaries": num_canaries,
            "gradient_norm": norm if private.enabled else _UNCLIPPED_NORM,
            "shape": list(*shapes),
            "task": job.training.task,
        },
        integer_buffers={
            f"model.{name}": role for name, role in job.model.integer_buffers.items()
        },
        frozen=tuple(f"model.{pattern}" for pattern in job.model.frozen),
    )
    every = job.evaluation.every if job.aggregation.weights == "dynamic" else 0
    return replace(job, model=model, evaluation=replace(job.evaluation, every=every))


def with_more_records(
    job: JobSpec, num_records: int, num_canaries: int
) -> tuple[JobSpec, int]:
    """Keep a site's sampling rate and steps although it holds more records.

    Where persons are protected, read "person" for "record".

    Args:
        job: The audited job.
        num_records: Records that the site holds.
        num_canaries: Records that it holds beside them.

    Returns:
        The job for this site, and how many records without a gradient bring the rate
        of each round to that of ``job``: it is never above it, for that is what the
        ledger is charged for, and less than 1 % below, or than one record's worth
        without private steps. Batches are no larger, so that they fit memory. Where
        sums are audited, the learning rate keeps what one record changes of an update.

    Raises:
        JobError: A private step would draw more records than ``MAX_DRAWN``.
    """
    training, unit = job.training, _common_step(job)
    expected = expected_batch(job)
    is_private = job.privacy.differential_privacy.enabled
    enlarge = _on_grid if is_private else _exactly
    found = enlarge(unit, num_records, num_records + num_canaries)
    of_unit, batch_size, total = found

    def enlarged(accumulate: int) -> int:
        # Of a whole number of common steps, so that all rates are off by one factor.
        return accumulate // unit.training.accumulate * of_unit

    most = batch_size * enlarged(largest_batch(job) // training.batch_size)
    if is_private and most > MAX_DRAWN:
        raise JobError(
            f"with {num_canaries} canaries beside {num_records} records a step draws "
            f"{most} records: use fewer canaries, so that it draws at most {MAX_DRAWN}"
        )
    steps = training.local_steps
    if is_private:
        steps = num_private_steps(job, num_records)
    training = replace(
        training,
        batch_size=batch_size,
        accumulate=enlarged(training.accumulate),
        accumulate_from=tuple(
            (first, enlarged(value)) for first, value in training.accumulate_from
        ),
        local_steps=steps,
        local_epochs=None if steps else training.local_epochs,
    )
    job = replace(job, training=training)
    if is_summed(job):
        # The step is divided by a larger batch; noise in the sum is not.
        optimizer = training.optimizer
        lr = optimizer.lr * expected_batch(job) / expected
        job = replace(
            job, training=replace(training, optimizer=replace(optimizer, lr=lr))
        )
    return job, total - num_records - num_canaries


def _common_step(job: JobSpec) -> JobSpec:
    """The job with the largest step of which each round's is a whole multiple."""
    training = job.training
    sizes = (accumulate_in(training, first) for first in first_rounds(training))
    common = replace(training, accumulate=math.gcd(*sizes), accumulate_from=())
    return replace(job, training=common)


def _exactly(job: JobSpec, num_records: int, least: int) -> tuple[int, int, int]:
    """Enlarge a step of ordinary batches in proportion to its records.

    Returns:
        Batches of a step, records of a batch, and records of the site: at least
        ``least``.
    """
    expected, most = expected_batch(job), job.training.batch_size
    drawn = -(-expected * least // num_records)
    fewest = -(-drawn // most)
    accumulate = min(range(fewest, 2 * fewest), key=lambda n: n * -(-drawn // n))
    batch_size = -(-drawn // accumulate)
    total = -(-accumulate * batch_size * num_records // expected)
    return accumulate, batch_size, total


def _on_grid(job: JobSpec, num_records: int, least: int) -> tuple[int, int, int]:
    """Enlarge a private step, whose rate follows from coarse numbers of records.

    Of the coarse numbers above ``least`` it takes the first for which whole batches
    come near enough to the job's rate. Twice the site's own, or four times and so on,
    always fits.

    Returns:
        As ``_exactly``.
    """
    expected, most = expected_batch(job), job.training.batch_size
    own, total = coarse(num_records), coarse(least)
    while True:
        drawn = Fraction(expected * total, own)
        fewest = math.ceil(drawn / most)
        accumulate = max(range(fewest, 2 * fewest), key=lambda n: n * (drawn // n))
        batch_size = drawn // accumulate
        if accumulate * batch_size >= (1 - _RATE_ROUNDING) * drawn:
            break
        total = coarse(total + 1)
    # The number as it is will do where it is rounded up to this.
    return accumulate, batch_size, least if coarse(least) == total else total


PlanSites = Callable[[Federation, Clock], PrivateSites | None]


def meaning_of(private: DifferentialPrivacySpec) -> tuple[str, str]:
    """What neighbours differ in, and how steps sample."""
    if private.of_persons:
        return accountant.PERSON_RELATION, accountant.PERSON_SAMPLING
    return accountant.NEIGHBOURING_RELATION, accountant.SAMPLING_ASSUMPTION


def plans_of(private: PrivateSites | None) -> Mapping[SiteId, SitePlan]:
    """Plans of private sites; none where nothing is promised."""
    return {} if private is None else private.plans


def trainer_of(
    federation: Federation,
    name: SiteId,
    data: SiteData,
    plan: SitePlan | None,
    ledger: InMemoryLedger | None,
) -> Trainer:
    """Make a site's trainer as a run does."""
    train, held_out = data
    trainer = TorchTrainer(
        federation.job,
        name,
        pool=federation.pool,
        train=train,
        held_out=held_out,
        private=None if plan is None else plan.training,
    )
    if plan is None or ledger is None:
        return trainer
    return plan.budgeted(trainer, ledger)


def ledger_of(
    federation: Federation, name: SiteId, plan: SitePlan, clock: Clock
) -> InMemoryLedger:
    """Make a ledger that is not stored."""
    private = federation.job.privacy.differential_privacy
    terms = Terms(
        run_id=throwaway_id(),
        site=name,
        job_digest="0" * 64,
        delta=plan.delta,
        epsilon_cap=plan.epsilon_cap,
        unit=private.unit,
        relation=meaning_of(private)[0],
    )
    return InMemoryLedger(terms, clock=clock)
