"""How often requests are made again, and when."""

import itertools

import pytest

from cloud_adapters.storage.retry import Retry
from federation.clock import VirtualClock
from federation.errors import (
    CorruptObject,
    StoreError,
    StoreForbidden,
    StoreThrottled,
    StoreUnavailable,
)

CAUSE = ConnectionResetError("reset")


class Request:
    """Fails with the errors it is given, one after another, and then answers."""

    def __init__(self, *errors: StoreError, seconds: float = 0.0) -> None:
        self.clock = VirtualClock()
        self.errors = iter(errors)
        self.seconds = seconds
        self.attempts: list[int] = []
        self.begun: list[float] = []

    def __call__(self, attempt: int) -> str:
        self.attempts.append(attempt)
        self.begun.append(self.clock.now())
        self.clock.sleep(self.seconds)
        for error in self.errors:
            raise error from CAUSE
        return "answer"


def unavailable(wait_seconds: float = 0.0) -> StoreUnavailable:
    return StoreUnavailable("no answer", temporary=True, wait_seconds=wait_seconds)


def longest(low: float, high: float) -> float:
    assert low == 0.0
    return high


def test_success_is_not_repeated():
    """What goes well is done once and without a wait."""
    request = Request()
    assert Retry(clock=request.clock).call(request) == "answer"
    assert (request.attempts, request.clock.now()) == ([1], 0.0)


@pytest.mark.parametrize(
    "error",
    [
        unavailable(),
        StoreThrottled("slow", temporary=True),
        CorruptObject("x", temporary=True),
    ],
)
def test_temporary_errors_are_tried_again(error: StoreError):
    """Requests are told which attempt they are, and listeners why."""
    request, heard = Request(error, error), list[StoreError]()
    retry = Retry(clock=request.clock, listener=heard.append)
    assert retry.call(request) == "answer"
    assert request.attempts == [1, 2, 3]
    assert heard == [error, error]


@pytest.mark.parametrize("error", [StoreForbidden("no"), StoreUnavailable("disk full")])
def test_lasting_errors_are_not(error: StoreError):
    """What a person must mend is said at once, and as it was."""
    request = Request(error)
    with pytest.raises(type(error)) as caught:
        Retry(clock=request.clock).call(request)
    assert caught.value is error
    assert request.attempts == [1]


def test_other_errors_pass():
    """A bug is no reason to wait."""
    with pytest.raises(ZeroDivisionError):
        Retry(clock=VirtualClock()).call(lambda attempt: 1 // (attempt - 1))


def test_waits_double_up_to_the_cap():
    """The bound of the wait doubles; with the longest draws that is the wait."""
    request = Request(*[unavailable()] * 5)
    retry = Retry(base_seconds=1, cap_seconds=5, clock=request.clock, uniform=longest)
    retry.call(request)
    waits = [b - a for a, b in itertools.pairwise(request.begun)]
    assert waits == [1, 2, 4, 5, 5]


def test_waits_are_drawn():
    """Full jitter: any wait from nothing to the bound, another each time."""
    request = Request(*[unavailable()] * 40)
    Retry(attempts=41, base_seconds=1, cap_seconds=1, clock=request.clock).call(request)
    waits = [b - a for a, b in itertools.pairwise(request.begun)]
    assert all(0 <= wait <= 1 for wait in waits)
    # The chance that 40 draws all lie on one side of the middle is 2^-39.
    assert min(waits) < 0.5 < max(waits)


def test_the_service_may_ask_for_a_longer_wait():
    """Even beyond our cap."""
    request = Request(unavailable(wait_seconds=30))
    Retry(cap_seconds=1, clock=request.clock).call(request)
    assert request.begun == [0, 30]


def test_attempts_are_bounded():
    """The last error says how often we tried, and has the cause of the last one."""
    request = Request(*[unavailable()] * 9, seconds=2)
    retry = Retry(attempts=3, base_seconds=0, clock=request.clock)
    with pytest.raises(
        StoreUnavailable, match=r"no answer \(tried 3 times in 6 s\)"
    ) as e:
        retry.call(request)
    assert request.attempts == [1, 2, 3]
    assert e.value.__cause__ is CAUSE
    assert e.value.temporary


def test_no_attempt_begins_after_the_deadline():
    """Nor do we wait for a time that would not be used."""
    request = Request(*[unavailable()] * 99, seconds=4)
    retry = Retry(attempts=99, base_seconds=0, deadline_seconds=10, clock=request.clock)
    with pytest.raises(StoreUnavailable, match="tried 3 times in 12 s"):
        retry.call(request)
    asked = Request(unavailable(wait_seconds=30))
    with pytest.raises(StoreUnavailable, match=r"no answer$"):
        Retry(deadline_seconds=10, clock=asked.clock).call(asked)
    assert asked.clock.now() == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"attempts": 0},
        {"base_seconds": -1.0},
        {"cap_seconds": float("inf")},
        {"deadline_seconds": float("nan")},
    ],
)
def test_numbers_are_checked(wrong: dict[str, float]):
    """A retry without an attempt or an end is a mistake."""
    with pytest.raises(ValueError, match=next(iter(wrong)).split("_")[0]):
        Retry(**wrong)
