"""Hours in which machines may be started."""

from datetime import UTC, datetime

import pytest

from deploy.fleet import spec
from federation.errors import JobError


def seconds(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


def opens(window: str, now: str) -> str:
    found = spec.parse_window(window, key="start.window")
    assert found is not None
    at = datetime.fromtimestamp(found.opens(seconds(now)), UTC)
    return f"{at:%m-%d %H:%M}"


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        ("2026-11-23 12:00", "11-23 21:00"),
        ("2026-11-23 21:00", "11-23 21:00"),
        ("2026-11-23 23:30", "11-23 23:30"),
        ("2026-11-24 04:59", "11-24 04:59"),
        ("2026-11-24 05:00", "11-24 21:00"),
    ],
)
def test_a_window_over_midnight_opens_in_the_evening(now: str, expected: str):
    """Berlin is an hour ahead of UTC in winter."""
    assert opens("22:00-06:00 Europe/Berlin", now) == expected


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        ("2026-11-23 00:59", "11-23 01:00"),
        ("2026-11-23 03:00", "11-23 03:00"),
        ("2026-11-23 05:00", "11-24 01:00"),
    ],
)
def test_a_window_within_a_day_opens_once_a_day(now: str, expected: str):
    assert opens("01:00-05:00 UTC", now) == expected


def test_the_night_in_which_clocks_change_is_as_long_as_it_is():
    """Two in the morning of 25 October comes an hour later in Berlin."""
    assert opens("04:00-06:00 Europe/Berlin", "2026-10-24 12:00") == "10-25 03:00"


def test_a_window_in_the_hour_that_comes_twice_opens_twice():
    """Between its two times it is closed."""
    window = "02:15-02:45 Europe/Berlin"
    assert opens(window, "2026-10-25 00:00") == "10-25 00:15"
    assert opens(window, "2026-10-25 01:10") == "10-25 01:15"
    assert opens(window, "2026-10-25 01:20") == "10-25 01:20"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("at night", "is no window: write it as '22:00-06:00 Europe/Berlin'"),
        ("25:00-06:00 UTC", "is no window"),
        ("22:00-06:00", "is no window"),
        ("22:00-22:00 UTC", "is empty"),
        ("22:00-06:00 Europe/Atlantis", "is no time zone"),
        ("22:00-06:00 ../etc/passwd", "is no window"),
        ("22:00-06:00 /etc/passwd", "is no time zone"),
    ],
)
def test_what_is_no_window_is_refused(text: str, message: str):
    with pytest.raises(JobError, match=message):
        spec.parse_window(text, key="start.window")
