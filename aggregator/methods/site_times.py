"""What each site's rounds took, and how long a round waits for it.

With ``schedule.grace = "learnt"`` a round whose quorum has answered waits for each of
the other sites until its own deadline, from when the tasks were sent::

    usual_i    = the largest but one of the newest five times of site i
    deadline_i = usual_i + max(1 s, usual_i / 2)

and at most ``schedule.round_deadline_seconds``, which is also the deadline of a site
that was never asked. So one stall changes no deadline, and a site that has become
slower has a longer one after two answers. Late answers count, too: where the timers of
TCP have to back off (RFC 6298, section 5.5), an answer shows here what it takes. A site
that missed two rounds in a row is still at work on the first, or lost: it is asked as
before, but no round waits for it alone until it has been heard of.
"""

from collections.abc import Sequence
from dataclasses import replace

from aggregator.methods import capacity
from federation.job.spec import LEARNT, JobSpec
from federation.protocols import RoundTime, RunState
from federation.rounds.gather import evaluates
from federation.rounds.guest import ServerGuest
from federation.rounds.local_work import (
    accumulate_in,
    is_by_capacity,
    leaves_steps_open,
    moves_data,
)
from federation.rounds.round_record import RoundRecord
from federation.rounds.schedule import grace_seconds

_ANSWERS = 5  # Of a site, from which its deadline follows.
_LOST = 2  # Rounds in a row that it has missed.


class SiteTimes(ServerGuest):
    """Notes what sites take, and sets their deadlines if these are learnt."""

    def before_round_(self, record: RoundRecord) -> None:
        """Set the deadline of each site that is known."""
        if self.job.schedule.grace != LEARNT:
            return
        most = self.job.schedule.round_deadline_seconds
        is_evaluated = evaluates(self.job, record.state)
        for site in record.cohort:
            if times := record.state.site_times.get(site):
                work = self._work(record.round_index, record.num_steps_of(site))
                times = tuple(self._with(work, time) for time in times)
                given = patience(times, evaluates=is_evaluated)
                record.patience[site] = min(most, given)

    def after_round(self, new_state: RunState, record: RoundRecord) -> RunState:
        """Note what each site took, or for how long it was waited for in vain."""
        before, overdue = record.state.site_times, record.overdue
        heard_of = (*record.late, *(site for site, _ in overdue), *record.times)
        times = {site: before.get(site, ()) for site in heard_of}
        for site, seconds in record.late.items():
            missed = RoundTime(
                round_index=record.round_index,
                num_steps=record.num_steps_of(site),
                seconds=seconds,
                missed=True,
            )
            times[site] = _noted(times[site], missed)
        for (site, index), seconds in overdue.items():
            of_it = [t for t in times[site] if t.missed and t.round_index == index]
            others = [time for time in times[site] if time not in of_it]
            late = RoundTime(
                round_index=record.round_index,
                num_steps=sum(time.num_steps for time in of_it),
                seconds=seconds,
            )
            times[site] = _noted(others, late)
        for site, answered in record.times.items():
            time = answered
            if moves_data(self.job):  # A site's steps follow from its parts.
                time = replace(answered, num_steps=record.num_steps_of(site))
            times[site] = _noted(times[site], time)
        newest = {site: self._newest(found) for site, found in times.items()}
        return replace(new_state, site_times={**before, **newest})

    def _work(self, round_index: int, num_steps: int) -> int:
        """Batches that a site takes in a round, in units that all rounds share."""
        chosen = num_steps if leaves_steps_open(self.job) else 1
        return chosen * accumulate_in(self.job.training, round_index)

    def _with(self, work: int, time: RoundTime) -> RoundTime:
        """Predict what a round takes from one that had less work."""
        less = self._work(time.round_index, time.num_steps) or work
        longer = max(0.0, work / less - 1) * (time.train_seconds or time.seconds)
        return replace(time, seconds=time.seconds + longer)

    def _newest(self, times: Sequence[RoundTime]) -> tuple[RoundTime, ...]:
        """Keep the newest times; rounds that were missed push out no answers."""
        is_learnt = self.job.schedule.grace == LEARNT
        most = _ANSWERS if is_learnt else capacity.WINDOW
        answers = [time for time in times if not time.missed][-most:]
        missed = [time for time in times if time.missed][-capacity.WINDOW :]
        return tuple(time for time in times if time in answers or time in missed)


def begin(job: JobSpec) -> ServerGuest | None:
    """Begin a run in which something follows from what each site takes."""
    is_needed = is_by_capacity(job) or moves_data(job) or job.schedule.grace == LEARNT
    return SiteTimes(job) if is_needed else None


def _noted(before: Sequence[RoundTime], time: RoundTime) -> tuple[RoundTime, ...]:
    """Add a time of a site, without the evaluation, which is kept beside it.

    A site may claim to have worked for any time: no longer than it took.
    """
    evaluated = min(max(0.0, time.evaluate_seconds), time.seconds)
    seconds, trained = time.seconds - evaluated, time.train_seconds
    if trained is not None and not 0 < trained <= seconds:
        trained = seconds
    if not evaluated and before:  # As in the last round that did.
        evaluated = before[-1].evaluate_seconds
    time = replace(
        time, seconds=seconds, train_seconds=trained, evaluate_seconds=evaluated
    )
    return (*before, time)


def patience(times: Sequence[RoundTime], *, evaluates: bool = False) -> float:
    """Return for how many seconds a round waits for a site.

    Args:
        times: Those of its newest rounds, in the order in which they became known.
        evaluates: Whether the round also evaluates.
    """
    answers = [time.seconds for time in times if not time.missed]
    if not answers or all(time.missed for time in times[-_LOST:]):
        return 0.0
    usual = sorted(answers)[-2:][0] + evaluates * times[-1].evaluate_seconds
    return usual + grace_seconds(LEARNT, usual)
