"""Says that a run will miss its deadline, or has missed it: the run continues."""

from collections.abc import Callable

from deploy.fleet.keeping.run_progress import WorkLeft

_HOUR = 3600.0


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
        work = count * progress.round_seconds / _HOUR - progress.done_hours(now)
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
