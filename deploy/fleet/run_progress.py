"""How far a run is, as its events say: what a deadline has to know."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from monitoring.runs.run_folder import RunFolder

_HOUR = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkLeft:
    """How far a run is.

    Attributes:
        started: When it began, in seconds since 1970.
        rounds_left: Rounds to come.
        round_seconds: Median time of a round so far.
        round_began: When the round in progress began; None between two rounds.
    """

    started: float
    rounds_left: int
    round_seconds: float
    round_began: float | None = None

    def work_hours(self, now: float) -> float:
        """How much work is left, at the median pace."""
        return self.rounds_left * self.round_seconds / _HOUR - self.done_hours(now)

    def done_hours(self, now: float) -> float:
        """How much of the round in progress is done, at the median pace."""
        if self.round_began is None:
            return 0.0
        return min(max(0.0, now - self.round_began), self.round_seconds) / _HOUR


class ReadProgress:
    """Reads a run's progress from its events, when there are new ones."""

    def __init__(self, run: RunFolder, rounds: int) -> None:
        """Of a run with a number of rounds."""
        self._run, self._rounds = run, rounds
        self._size = -1
        self._found: WorkLeft | None = None

    def __call__(self) -> WorkLeft | None:
        """How far it is; None before the end of its first round."""
        if not self._run.exists():
            return None
        size = self._run.events.stat().st_size
        if size != self._size:
            self._size, self._found = size, self._read()
        return self._found

    def _read(self) -> WorkLeft | None:
        view = self._run.view()
        took = [each.finished.seconds for each in view.rounds if each.finished]
        if not took:
            return None
        return WorkLeft(
            started=view.first_started_at,
            rounds_left=max(0, self._rounds - len(took)),
            round_seconds=median(took),
            round_began=None if view.current is None else view.current.started_at,
        )


class MissedDeadline:
    """Reports each of the two once."""

    def __init__(self, hours: float, tell: Callable[[str], None]) -> None:
        """Begin.

        Args:
            hours: ``deadline_hours``, after the run has begun.
            tell: Called with a word about the deadline.
        """
        self._hours, self._tell = hours, tell
        self._is_expected = self._is_past = False

    def look(self, progress: WorkLeft, now: float) -> None:
        """Report what the progress of a run calls for.

        Args:
            progress: How far the run is.
            now: Seconds since 1970.
        """
        count = progress.rounds_left
        if not count or self._is_past:
            return
        work = progress.work_hours(now)
        left = self._hours - (now - progress.started) / _HOUR
        rest = f"{count} round{'s' * (count > 1)} left, {work:.1f} h at the pace so far"
        if left <= 0:
            self._is_past = True
            self._tell(
                f"deadline_hours = {self._hours:g} are over, with {rest}: the run "
                "continues until max_hours or max_dollars"
            )
        elif work > left and not self._is_expected:
            self._is_expected = True
            self._tell(
                f"deadline_hours = {self._hours:g} will probably be missed: {rest}, in "
                f"{left:.1f} h"
            )
