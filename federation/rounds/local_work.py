"""How many local steps a round takes, and of how many batches each.

What a job fixes, and what a site checks. ``aggregator.methods.chosen_steps`` chooses
the number of steps from the times of earlier rounds, if the job leaves it open.

Pure functions.

Shape suffix: s sites of a round.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from federation.errors import ProtocolError
from federation.job.evaluation_job import evaluates_only
from federation.job.spec import JobSpec, TrainingSpec
from federation.messages import RoundTask, TaskKind

PARTS = 4096  # Of a dataset that moves between sites.

_MAKE_UP = 3  # Rounds by capacity that make up for the short first one.
_MOST_TIMES = 4  # Without a limit in the job: times its local steps.
_HALVINGS = 60  # Of the interval in which T lies: float64 has 53 bits.


def is_auto(job: JobSpec) -> bool:
    """Whether rounds have different numbers of local steps."""
    return job.schedule.local_work == "auto"


def is_by_capacity(job: JobSpec) -> bool:
    """Whether faster sites take more local steps in a round."""
    return job.schedule.allocation == "capacity"


def moves_data(job: JobSpec) -> bool:
    """Whether each task says on which part of the data a site trains.

    A task's steps are then the parts, from a multiple of ``PARTS`` on that is its own
    in each round.
    """
    return job.data is not None and job.data.placement == "dynamic"


def leaves_steps_open(job: JobSpec) -> bool:
    """Whether each task says how many local steps, or which data, it asks for."""
    return is_auto(job) or is_by_capacity(job) or moves_data(job)


def fewest_parts(job: JobSpec) -> int:
    """The fewest parts of the data that a site has in a round."""
    return max(1, PARTS // (_MOST_TIMES * len(job.sites)))


def records_of(parts: range, total: int) -> range:
    """Return the records in some parts of a dataset of ``total`` records."""
    first = parts.start % PARTS
    return range(first * total // PARTS, (first + len(parts)) * total // PARTS)


def bounds(job: JobSpec) -> tuple[int, int]:
    """The fewest and the most local steps of a round of a checked job with steps."""
    low, most = job.training.local_steps or 0, job.schedule.max_local_steps
    if is_by_capacity(job):
        # An update of n steps is scaled by low / n, as if its rate were so much higher.
        return max(1, low // _MOST_TIMES), most or _MOST_TIMES * low
    return low, most or low


def by_capacity(
    job: JobSpec, waiting: Sequence[float], each: Sequence[float], *, total: int
) -> list[int]:
    """Divide steps, or parts of the data, so that all sites of a round end together.

    Args:
        job: Sets the bounds for a site.
        waiting: Seconds in which each site waits.
        each: Seconds of a step of each.
        total: How many to divide; kept to unless the bounds forbid it.
    """
    waiting_s, step_s = np.array(waiting), np.array(each)
    low, high = (fewest_parts(job), PARTS) if moves_data(job) else bounds(job)
    begin, end = 0.0, float(np.max(waiting_s + high * step_s))
    for _ in range(_HALVINGS):
        middle = (begin + end) / 2
        wanted_s = ((middle - waiting_s) / step_s).clip(low, high)
        begin, end = (middle, end) if wanted_s.sum() < total else (begin, middle)
    wanted_s = ((end - waiting_s) / step_s).clip(low, high)
    found_s = np.floor(wanted_s).astype(np.int64)
    # What rounding down has left goes to those that lost most by it.
    left = min(total, round(float(wanted_s.sum()))) - int(found_s.sum())
    found_s[np.argsort(found_s - wanted_s, kind="stable")[: max(0, left)]] += 1
    found: list[int] = found_s.tolist()
    return found


def steps_each(job: JobSpec, round_index: int) -> int:
    """Mean of the steps of a round by capacity, to which sites scale their updates.

    The first round measures, with equal work of the fewest steps that a site may take.
    The next rounds share what it has left, as far as the most allows. A buffer waits
    for nobody.
    """
    each, before = job.training.local_steps or 0, round_index - 1
    if job.buffer_size is not None or before > _MAKE_UP:
        return each
    fewest, most = bounds(job)
    if not before:
        return fewest
    left = each - fewest
    more = left * before // _MAKE_UP - left * (before - 1) // _MAKE_UP
    return min(most, each + more)


def allocated(job: JobSpec, round_index: int, num_steps: int) -> range:
    """Return the steps of a site that takes as many as its speed allows.

    A round's steps begin at a multiple of the most that it may have: so no site takes
    a step of the run twice, whatever other rounds asked for.
    """
    first = (round_index - 1) * bounds(job)[1]
    return range(first, first + num_steps)


def schedule_step(job: JobSpec, round_index: int, steps: range, number: int) -> int:
    """Find a step's place in the schedule of the learning rate.

    Sites that take more steps in a round go through the same part of the schedule.

    Args:
        job: A checked job.
        round_index: The round, from 1.
        steps: Those that the site takes in it, counted over the run from 0.
        number: One of them.
    """
    if not is_by_capacity(job):
        return number
    each = job.training.local_steps or 0
    done = (number - steps.start) * each // len(steps)
    return (round_index - 1) * each + done


def total_steps(job: JobSpec) -> int:
    """Local steps of a site that takes part in the whole run."""
    return job.rounds * (job.training.local_steps or 0)


def accumulate_in(training: TrainingSpec, round_index: int) -> int:
    """Batches of a step in a round, from 1: a schedule that no data decides.

    Larger batches lower the noise of steps as smaller learning rates do: Smith et al.
    2018, arXiv:1711.00489, section 3.
    """
    found = training.accumulate
    for first_round, value in training.accumulate_from:
        if first_round <= round_index:
            found = value
    return found


def first_rounds(training: TrainingSpec) -> tuple[int, ...]:
    """The first round of each size of step, increasing from 1."""
    return (1, *(first for first, _ in training.accumulate_from))


def in_round(job: JobSpec, round_index: int) -> JobSpec:
    """Return the job as it is in one round: all of its steps are alike."""
    training = job.training
    if not training.accumulate_from:
        return job
    accumulate = accumulate_in(training, round_index)
    training = replace(training, accumulate=accumulate, accumulate_from=())
    return replace(job, training=training)


def batches_before(training: TrainingSpec, round_index: int, first_step: int) -> int:
    """Batches of the run that a site has taken before a round.

    Args:
        training: The job's ``training`` table.
        round_index: The round, from 1.
        first_step: Local steps of the run before it.
    """
    if not training.accumulate_from:
        return first_step * training.accumulate
    values = [(1, training.accumulate), *training.accumulate_from, (round_index, 0)]
    each = training.local_steps or 0
    return each * sum(
        value * max(0, min(end, round_index) - start)
        for (start, value), (end, _) in pairwise(values)
    )


def fewest_rounds(job: JobSpec) -> int:
    """The number of rounds if each takes as many steps as it may."""
    if not is_auto(job):
        return job.rounds
    return -(-total_steps(job) // bounds(job)[1])


def check_not_taken(steps: range, taken: int) -> None:
    """Check that a site is not asked for steps of the run that it has taken before.

    With the same steps come the same records: an aggregator could have a site go
    through a few of them again and again. A round that is repeated, since its result
    was lost, begins where the round before it ended.

    Args:
        steps: Those of a task.
        taken: Steps of the run up to the end of the site's last round before it.

    Raises:
        ProtocolError: The task begins before.
    """
    if steps.start < taken:
        raise ProtocolError(
            f"was asked to begin at step {steps.start} of the run, but has taken "
            f"{taken} in earlier rounds"
        )


def check_task(job: JobSpec, task: RoundTask) -> None:
    """Check a site's task against the work that the job allows.

    Raises:
        ProtocolError: The task asks for other steps; or, in a job that only evaluates,
            for training, or for results of another model than its own.
    """
    steps = task.steps
    if evaluates_only(job) and (task.kind is TaskKind.TRAIN or task.based_on):
        raise ProtocolError(
            "was asked for more than the results of model.weights, but the job only "
            "evaluates that model (rounds = 0)"
        )
    if not leaves_steps_open(job) or task.kind is not TaskKind.TRAIN:
        if steps is not None:
            raise ProtocolError(
                "was asked for a number of local steps that the job does not leave open"
            )
        return
    if steps is None:
        raise ProtocolError("received no number of local steps, which the job needs")
    if moves_data(job):
        _check_parts(job, task.round_index, steps)
        return
    low, high = bounds(job)
    if is_by_capacity(job):
        first = allocated(job, task.round_index, 0).start
        limit, is_there = f"from {first} on", steps.start == first
    else:
        most = total_steps(job)
        limit, is_there = f"and {most} in the run", steps.stop <= most
    if not low <= len(steps) <= high or not is_there:
        raise ProtocolError(
            f"was asked for {len(steps)} local steps after {steps.start}; the job "
            f"allows {low} to {high} in a round, {limit}"
        )


def _check_parts(job: JobSpec, round_index: int, parts: range) -> None:
    first = (round_index - 1) * PARTS
    within = first <= parts.start < parts.stop <= first + PARTS
    if not within or len(parts) < fewest_parts(job):
        raise ProtocolError(
            f"was asked for parts {parts.start} to {parts.stop} of the data; the job "
            f"allows at least {fewest_parts(job)} of {first} to {first + PARTS}"
        )
