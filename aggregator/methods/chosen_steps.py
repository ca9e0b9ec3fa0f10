"""Local steps that the aggregator chooses from the times of earlier rounds.

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
rates follow them. Longer rounds make fewer of them. The bounds that sites check are in
``federation.rounds.local_work``.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import median

from federation.events import LocalWorkChosen
from federation.job.spec import JobSpec
from federation.protocols import RoundTime, RunProgress, RunState
from federation.rounds.gather import evaluates
from federation.rounds.guest import ServerGuest
from federation.rounds.local_work import bounds, is_auto, total_steps
from federation.rounds.round_record import RoundRecord
from federation.rounds.round_sums import COMPLETED

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


class ChosenWork(ServerGuest):
    """Chooses the local steps of each round, and ends a run that has taken them all."""

    def is_over(self, state: RunProgress) -> bool:
        """Whether all local steps of the run are taken, perhaps in fewer rounds."""
        return state.steps_taken >= total_steps(self.job)

    def before_round_(self, record: RoundRecord) -> None:
        """Choose the steps of a round, and emit why."""
        choice = choose(self.job, record.state)
        pace, steps, times = choice.pace, choice.steps, choice.times
        record.steps = steps
        record.emit(
            LocalWorkChosen(
                at=record.clock.now(),
                round_index=record.round_index,
                first_step=steps.start,
                num_steps=len(steps),
                reason=choice.reason,
                step_seconds=pace.step_seconds if pace else None,
                waiting_seconds=pace.waiting_seconds if pace else None,
                share=pace.share(len(steps)) if pace else None,
                target=self.job.schedule.training_share,
                rounds=tuple(time.round_index for time in times),
                steps=tuple(time.num_steps for time in times),
                seconds=tuple(time.seconds for time in times),
                train_seconds=tuple(time.train_seconds for time in times),
            )
        )

    def after_round(self, new_state: RunState, record: RoundRecord) -> RunState:
        """Note the steps of a round, and what it took if that is typical."""
        assert record.steps is not None  # noqa: S101 -- chosen before the round
        state, times = record.state, record.state.times
        if record.status == COMPLETED and is_typical(
            self.job,
            state,
            evaluates=evaluates(self.job, state),
            is_usual=record.is_usual,
        ):
            times = observe(
                state,
                record.steps,
                seconds=record.clock.monotonic() - record.sums.start,
                train_seconds=record.sums.last_trained,
            )
        return replace(new_state, steps_taken=record.steps.stop, times=times)


def begin(job: JobSpec) -> ServerGuest | None:
    """Begin a run whose rounds have different numbers of local steps."""
    return ChosenWork(job) if is_auto(job) else None


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


def choose(job: JobSpec, progress: RunProgress) -> ChosenSteps:
    """Choose the local steps of the next round."""
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
