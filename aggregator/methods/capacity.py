"""More local steps or more data at faster sites, so that all end a round together.

With ``schedule.allocation = "capacity"`` site ``i``, which takes ``b_i`` seconds a step
and waits ``a_i`` seconds for messages, takes ``n_i`` steps so that for one ``T``::

    a_i + b_i n_i = T        sum_i n_i = N training.local_steps

within the bounds of the job. The first round, of equal work, takes the fewest steps,
and the next ones the rest: so the slowest sites soon hold up nobody. Sites scale their
updates to the mean of the round's steps (``steps_each``; FedNova: Wang et al. 2020,
arXiv:2007.07481), so that the fast ones do not pull the model to themselves.

Each answer shows both numbers (``aggregator.methods.site_times``); of the newest three
the median counts. One slow round changes nothing, and a site whose speed has changed is
known after two. A site that misses the deadline shows no number: it is taken to be
twice as slow as that, so that it gets fewer steps until it is in time. Seconds of
evaluation are part of ``a_i`` in the rounds that evaluate.

Under secure aggregation only the time of arrival is known. Then seconds a step count,
``(a_i + b_i n_i) / n_i``, as if no site waited: each round leaves a part ``a_i / T`` of
the way to the same ``T``. Slopes between rounds would show ``b_i``, but rounds are soon
alike, and differ by noise.

With ``data.placement = "dynamic"`` ``n_i`` are parts of one dataset, of which each is
at one site in a round. They are dealt out in the order of the sites, so that a part
moves only where a boundary does. A site that has answered none of the last ``WINDOW``
rounds has none of its own, or nobody would train on them: until it answers, it is asked
for the first ones, which another site has, too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

import numpy as np

from aggregator.methods.chosen_steps import Pace, pace_of
from federation.ids import SiteId
from federation.job.spec import JobSpec
from federation.protocols import RoundTime
from federation.rounds.gather import evaluates
from federation.rounds.guest import ServerGuest
from federation.rounds.local_work import (
    PARTS,
    allocated,
    by_capacity,
    fewest_parts,
    is_by_capacity,
    moves_data,
    steps_each,
)
from federation.rounds.round_record import RoundRecord

WINDOW = 3  # Rounds of a site whose times count.
_FASTEST = 1e-9  # Seconds of a step: a site may claim to take next to none.
_LATE = 2.0  # Times the deadline that a site is taken to need which missed it.


class Capacity(ServerGuest):
    """Gives each site of a round its steps."""

    def before_round_(self, record: RoundRecord) -> None:
        """Choose the steps of each site."""
        known, is_evaluated = record.state.site_times, evaluates(self.job, record.state)
        paces = {
            site: found
            for site in record.cohort
            if (found := _pace(known.get(site, ()), evaluates=is_evaluated)) is not None
        }
        each = steps_each(self.job, record.round_index)
        for site, num_steps in allocate(self.job, record.cohort, paces, each).items():
            record.steps_of[site] = allocated(self.job, record.round_index, num_steps)


class Placement(Capacity):
    """Gives each site of a round its part of the data."""

    def before_round_(self, record: RoundRecord) -> None:
        """Deal the data out."""
        super().before_round_(record)
        first, times = (record.round_index - 1) * PARTS, record.state.site_times
        silent = [s for s in record.cohort if _is_silent(times.get(s, ()), record)]
        if len(silent) < len(record.cohort):
            few = range(first, first + fewest_parts(self.job))
            record.steps_of |= dict.fromkeys(silent, few)
        else:
            silent = []
        sizes = {s: each for s, each in record.steps_of.items() if s not in silent}
        ends = np.cumsum([0, *map(len, sizes.values())])
        ends = (first + ends * PARTS // ends[-1]).tolist()
        for site, start, stop in zip(sizes, ends, ends[1:], strict=False):
            record.steps_of[site] = range(start, stop)


def _is_silent(times: Sequence[RoundTime], record: RoundRecord) -> bool:
    last = max((time.round_index for time in times if not time.missed), default=0)
    return record.round_index - last > WINDOW


def begin(job: JobSpec) -> ServerGuest | None:
    """Begin a run whose faster sites take more steps, or have more data."""
    if moves_data(job):
        return Placement(job)
    return Capacity(job) if is_by_capacity(job) else None


def _pace(times: Sequence[RoundTime], *, evaluates: bool = False) -> Pace | None:
    """What steps and waiting take at a site; None before its first answer."""
    times = [_guessed(time) for time in times if time.num_steps][-WINDOW:]
    if not times:
        return None
    found = None
    if all(time.train_seconds is not None for time in times):
        found = pace_of(times, overlap_steps=0)
    if found is None:
        found = Pace(median(time.seconds / time.num_steps for time in times), 0.0)
    waiting = found.waiting_seconds + evaluates * times[-1].evaluate_seconds
    return replace(found, waiting_seconds=waiting)


def _guessed(time: RoundTime) -> RoundTime:
    """Guess what a round takes at a site that missed it."""
    if not time.missed:
        return time
    seconds = _LATE * time.seconds
    return replace(time, seconds=seconds, train_seconds=seconds)


def allocate(
    job: JobSpec,
    cohort: Sequence[SiteId],
    paces: Mapping[SiteId, Pace],
    each: int | None = None,
) -> Mapping[SiteId, int]:
    """Choose the local steps of each site of a round.

    Args:
        job: Sets their bounds, and their mean.
        cohort: The sites.
        paces: What is known of them; others count as fast as the median.
        each: Their mean in this round, if it is another one.

    Returns:
        Steps by site. Their sum is that of equal work, unless bounds forbid it.
    """
    each = each or job.training.local_steps or 0
    if moves_data(job):
        each = PARTS // len(cohort)
    if not paces:
        return dict.fromkeys(cohort, each)
    usual = Pace(
        median(pace.step_seconds for pace in paces.values()),
        median(pace.waiting_seconds for pace in paces.values()),
    )
    known = [paces.get(site, usual) for site in cohort]
    found = by_capacity(
        job,
        [pace.waiting_seconds for pace in known],
        [max(pace.step_seconds, _FASTEST) for pace in known],
        total=each * len(cohort),
    )
    return dict(zip(cohort, found, strict=True))
