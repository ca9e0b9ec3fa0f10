"""How many local steps a round takes, chosen from the times of earlier rounds.

With ``schedule.local_work = "auto"`` a round takes the fewest local steps for which
sites train at least ``schedule.training_share`` of its time. A round of ``n`` steps is
modelled to take::

    T(n) = a + b n        share(n) = b n / T(n)

with ``b`` seconds a step and ``a`` seconds of waiting for messages and sums: the model
of ``federation.rounds.cost`` for the site that the round waits for.

Where sites report how long they trained, each round shows both. Under secure
aggregation the aggregator has arrival times alone, so it needs rounds of different
length: ``b`` is the median slope of all pairs of rounds (Theil 1950; Sen 1968, JASA
63:1379), which is sound while fewer than 29 % of the rounds took long for some other
reason. A short round now and then keeps the pairs apart. If longer rounds take no
longer, rounds get longer still, until steps show.

The steps of the whole run are fixed, ``rounds * training.local_steps``, since learning
rates follow them. Longer rounds make fewer of them.

Pure functions: the state of a run determines the choice.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from statistics import median

from federation.errors import ProtocolError
from federation.job.spec import JobSpec, TrainingSpec
from federation.messages import RoundTask, TaskKind
from federation.protocols import RoundTime, RunProgress

WINDOW = 16  # Rounds whose times are kept.
_RECENT = 8  # Of these, for the median where each round shows the pace.
_PROBE_AFTER = 7  # Rounds of similar length before one that differs.
_APART = 1.5  # Ratio of two numbers of steps that differ.
_MOST_GROWTH = 2
_MOST_STEPS = 1 << 53  # Beyond any job's limit, and exact in float64.


@dataclass(frozen=True, slots=True)
class Pace:
    """What local steps and waiting take in a round.

    Attributes:
        step_seconds: Seconds of a local step, above 0.
        waiting_seconds: Seconds of a round in which the slowest site takes none.
    """

    step_seconds: float
    waiting_seconds: float

    def share(self, steps: int) -> float:
        """The share of a round of so many steps in which that site trains."""
        busy = self.step_seconds * steps
        return busy / (busy + self.waiting_seconds)

    def steps_for(self, share: float) -> int:
        """The fewest steps for which it trains at least this share, below 1."""
        busy = self.waiting_seconds * share / (1 - share)
        # A site may claim to take next to no time, so that the ratio is infinite.
        return max(1, math.ceil(min(busy / self.step_seconds, _MOST_STEPS)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenSteps:
    """The local steps of a round, and why.

    Attributes:
        steps: Steps of the run, counted from 0.
        reason: ``start`` (nothing is measured yet), ``measured``, or ``probe`` (a
            round of another length, to tell steps from waiting).
        pace: As measured; None if it is not known.
        times: The rounds that it was measured in.
    """

    steps: range
    reason: str
    pace: Pace | None
    times: Sequence[RoundTime]


def is_auto(job: JobSpec) -> bool:
    """Whether rounds have different numbers of local steps."""
    return job.schedule.local_work == "auto"


def bounds(job: JobSpec) -> tuple[int, int]:
    """The fewest and the most local steps of a round of a checked job with steps."""
    low = job.training.local_steps or 0
    return low, job.schedule.max_local_steps or low


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


def is_complete(job: JobSpec, progress: RunProgress) -> bool:
    """Whether all local steps of the run are taken, perhaps in fewer rounds."""
    return is_auto(job) and progress.steps_taken >= total_steps(job)


def pace_of(times: Sequence[RoundTime], *, overlap_steps: int) -> Pace | None:
    """Measure the pace of rounds; None if they do not show it.

    Args:
        times: Times of earlier rounds, in their order.
        overlap_steps: Steps of a round that are taken while messages are on their way.
    """
    if not times:
        return None
    if all(time.train_seconds is not None for time in times):
        paces = [_shown(time, overlap_steps) for time in times[-_RECENT:]]
        step = median(pace.step_seconds for pace in paces)
        waiting = median(pace.waiting_seconds for pace in paces)
        return Pace(step, waiting) if step > 0 else None
    slopes = [
        (one.seconds - other.seconds) / (one.num_steps - other.num_steps)
        for one, other in combinations(times, 2)
        if one.num_steps != other.num_steps
    ]
    step = median(slopes) if slopes else 0.0
    if step <= 0:
        return None
    waiting = median(time.seconds - step * time.num_steps for time in times)
    return Pace(step, max(0.0, waiting))


def _shown(time: RoundTime, overlap_steps: int) -> Pace:
    """The pace of one round whose slowest site said how long it trained.

    It says the time of the steps after the model has come, and of what was left of the
    steps that overlap. If these were done by then, messages took longer.
    """
    trained = min(time.train_seconds or 0.0, time.seconds)
    step = trained / (time.num_steps - overlap_steps)
    if time.seconds - trained <= overlap_steps * step:
        return Pace(time.seconds / time.num_steps, 0.0)
    return Pace(step, time.seconds - step * time.num_steps)


def choose(job: JobSpec, progress: RunProgress) -> ChosenSteps | None:
    """Choose the local steps of the next round; None if every round has the job's."""
    if not is_auto(job):
        return None
    low, high = bounds(job)
    times = progress.times
    pace = pace_of(times, overlap_steps=job.training.overlap_steps)
    wanted, reason = (times[-1].num_steps if times else low), "start"
    lengths = {time.num_steps for time in times}
    longest = max(lengths, default=0)
    if pace is not None:
        wanted = pace.steps_for(job.schedule.training_share)
        wanted, reason = min(wanted, _MOST_GROWTH * longest), "measured"
    elif len(lengths) > 1:  # Steps do not show beside the waiting: there are too few.
        wanted, reason = _MOST_GROWTH * longest, "probe"
    wanted = min(max(wanted, low), high)
    if _is_flat(times, wanted):
        wanted, reason = (low if wanted >= _APART * low else 2 * low), "probe"
    left = total_steps(job) - progress.steps_taken
    first = progress.steps_taken
    return ChosenSteps(
        steps=range(first, first + _of_what_is_left(wanted, left, low)),
        reason=reason,
        pace=pace,
        times=times,
    )


def _is_flat(times: Sequence[RoundTime], wanted: int) -> bool:
    """Whether arrival times alone would soon no longer tell steps from waiting."""
    if len(times) < 2 or all(time.train_seconds is not None for time in times):  # noqa: PLR2004
        return False
    lengths = [*(time.num_steps for time in times[-_PROBE_AFTER:]), wanted]
    return max(lengths) < _APART * min(lengths)


def _of_what_is_left(wanted: int, left: int, low: int) -> int:
    """Leave no rest that is shorter than a round may be; ``wanted`` is long enough.

    Two rounds of ``low`` steps are no longer than one may be: ``job_checks``.
    """
    if wanted >= left:
        return left
    if left - wanted >= low:
        return wanted
    return left - low if left >= 2 * low else left


def observe(
    progress: RunProgress, steps: range, *, seconds: float, train_seconds: float | None
) -> tuple[RoundTime, ...]:
    """Add the time of a round to the newest ones.

    Args:
        progress: Before the round.
        steps: Those of the round.
        seconds: From its first task to its result.
        train_seconds: How long the site trained that answered last; None if sites do
            not say. It may claim any time, also an infinite one, which no checkpoint
            could hold: no more than the round's is kept.
    """
    if train_seconds is not None:
        train_seconds = min(train_seconds, seconds)
    time = RoundTime(
        round_index=progress.round_index + 1,
        num_steps=len(steps),
        seconds=seconds,
        train_seconds=train_seconds,
    )
    return (*progress.times, time)[-WINDOW:]


def is_typical(
    job: JobSpec, progress: RunProgress, *, evaluates: bool, is_usual: bool
) -> bool:
    """Whether the next round takes as long as others of as many steps.

    The first one also starts programs; if few rounds evaluate, these take longer; and
    so do those that exchange more than others, as the first one after a restart may.

    Args:
        job: The run's.
        progress: Before the round.
        evaluates: Whether the round evaluates the model that it begins with.
        is_usual: Whether it exchanges what most rounds do; see ``RoundRecord``.
    """
    is_first = progress.steps_taken == 0
    return is_usual and not is_first and evaluates == (job.evaluation.every == 1)


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
    """Check a site's task against the range of steps that the job allows.

    Raises:
        ProtocolError: The task asks for other steps.
    """
    steps = task.steps
    if not is_auto(job) or task.kind is not TaskKind.TRAIN:
        if steps is not None:
            raise ProtocolError(
                "was asked for a number of local steps that the job does not leave open"
            )
        return
    if steps is None:
        raise ProtocolError("received no number of local steps, which the job needs")
    low, high = bounds(job)
    if not low <= len(steps) <= high or steps.stop > total_steps(job):
        raise ProtocolError(
            f"was asked for {len(steps)} local steps after {steps.start}; the job "
            f"allows {low} to {high} in a round and {total_steps(job)} in the run"
        )
