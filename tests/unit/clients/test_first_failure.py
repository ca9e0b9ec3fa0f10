"""The first failure of a simulation is shown before any other is reported."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event
from types import SimpleNamespace

import pytest

from clients.user_code import FirstFailure


def test_another_failure_waits_until_the_first_is_shown():
    """Sites train in threads: both may fail in the same millisecond."""
    begun, may_end = Event(), Event()
    shown: list[str] = []

    def show(place: str, error: Exception) -> None:
        begun.set()
        assert may_end.wait(60)
        shown.append(f"{place}: {error}")

    first = FirstFailure(show)
    left, right = (SimpleNamespace(site=name, round_index=1) for name in "ab")
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(first, left, ValueError("of the user"))
        assert begun.wait(60)
        other = pool.submit(first, right, ValueError("the same"))
        try:
            with pytest.raises(TimeoutError):
                other.result(0.05)
        finally:
            may_end.set()
        one.result(60)
        other.result(60)
    assert shown == ["first failure: site a, round 1: of the user"]
