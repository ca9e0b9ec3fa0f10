"""When machines may be started: quiet hours, in the time of a place.

Pure. A window is text such as ``22:00-06:00 Europe/Berlin``; it may include midnight.
"""

import re
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from federation.errors import JobError

_WINDOW = re.compile(r"(\d\d:\d\d)-(\d\d:\d\d) ([A-Za-z0-9_+/-]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWindow:
    """Hours of every day.

    Attributes:
        begin: When it opens.
        end: When it closes; before ``begin`` for a window over midnight.
        zone: Whose time.
    """

    begin: time
    end: time
    zone: ZoneInfo

    def opens(self, now: float) -> float:
        """When machines may be started: ``now`` if it is open, in seconds since 1970.

        Days on which the clocks change count as the zone's rules say.
        """
        here = datetime.fromtimestamp(now, UTC).astimezone(self.zone)
        at = here.time().replace(tzinfo=None)
        if self.begin <= self.end:
            is_open = self.begin <= at < self.end
        else:
            is_open = at >= self.begin or at < self.end
        if is_open:
            return now
        day = here.date() if at < self.begin else here.date() + timedelta(days=1)
        begin = datetime.combine(day, self.begin, tzinfo=self.zone)
        if begin.timestamp() <= now:  # In the hour that comes twice.
            begin = begin.replace(fold=1)
        return begin.timestamp()

    def text(self, seconds: float) -> str:
        """Write a time as people of the place do."""
        here = datetime.fromtimestamp(seconds, UTC).astimezone(self.zone)
        return f"{here:%Y-%m-%d %H:%M} {self.zone.key}"


def parse(text: str, *, key: str) -> StartWindow | None:
    """Read a window; None for an empty text.

    Raises:
        JobError: It is no window, or its zone is not known here.
    """
    if not text:
        return None
    found = _WINDOW.fullmatch(text)
    refusal = JobError(
        f"{text!r:.100} is no window: write it as '22:00-06:00 Europe/Berlin'", key=key
    )
    if found is None:
        raise refusal
    try:
        begin, end = (time.fromisoformat(found[group]) for group in (1, 2))
    except ValueError as error:
        raise refusal from error
    if begin == end:
        raise JobError(f"{text!r} is empty: its hours must differ", key=key)
    try:
        zone = ZoneInfo(found[3])
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise JobError(
            f"{found[3]!r} is no time zone that this machine knows: name one such as "
            "Europe/Berlin or UTC",
            key=key,
        ) from error
    return StartWindow(begin=begin, end=end, zone=zone)
