"""How often requests are made again, and when."""

import math
import random

import pytest
from hypothesis import given, strategies as st

from cloud_adapters.storage.retry import LEAST_SECONDS, Retry, seconds_left
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
    """What a person must fix is reported immediately, unchanged."""
    request = Request(error)
    with pytest.raises(type(error)) as caught:
        Retry(clock=request.clock).call(request)
    assert caught.value is error
    assert request.attempts == [1]


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
    retry = Retry(base_seconds=0, deadline_seconds=10, clock=request.clock)
    with pytest.raises(StoreUnavailable, match="tried 3 times in 12 s"):
        retry.call(request)
    asked = Request(unavailable(wait_seconds=30))
    with pytest.raises(StoreUnavailable, match=r"no answer$"):
        Retry(deadline_seconds=10, clock=asked.clock).call(asked)
    assert asked.clock.now() == 0


def test_what_arrives_changed_is_not_tried_until_the_deadline():
    """Patience mends an outage, and not a device that changes bytes."""
    request = Request(*[CorruptObject("x", temporary=True)] * 99)
    with pytest.raises(CorruptObject, match="tried 6 times"):
        Retry(clock=request.clock).call(request)
    assert request.clock.now() < 10


class Outage:
    """A service that is away for a while; each attempt takes its time."""

    def __init__(self, seconds: float, *, attempt_seconds: float = 0.0) -> None:
        self.clock = VirtualClock()
        self.seconds = seconds
        self.attempt_seconds = attempt_seconds
        self.attempts = 0

    def __call__(self, attempt: int) -> float:
        self.attempts = attempt
        begin = self.clock.now()
        self.clock.sleep(min(self.attempt_seconds, seconds_left()))
        if begin < self.seconds:
            raise unavailable()
        return begin


seeds = st.integers(0, 2**32)


@given(seed=seeds, share=st.floats(0, 1), attempt_seconds=st.floats(0, 60))
def test_whatever_ends_before_the_deadline_is_outlasted(
    seed: int, share: float, attempt_seconds: float
):
    """For every outage and every draw, also where each attempt hangs in it.

    The last that hangs must end before the deadline for another to begin.
    """
    seconds = share * (119 - attempt_seconds)
    outage = Outage(seconds, attempt_seconds=attempt_seconds)
    draw = random.Random(seed).uniform  # noqa: S311 (the test's own)
    begun = Retry(clock=outage.clock, uniform=draw).call(outage)
    # Full jitter: not later than the longest wait behind the end of the outage.
    assert begun <= seconds + 10 + attempt_seconds


@given(seed=seeds, attempt_seconds=st.floats(0, 1000))
def test_time_of_a_call_is_bounded(seed: int, attempt_seconds: float):
    """Also where every attempt hangs: it is told how much time is left."""
    outage = Outage(math.inf, attempt_seconds=attempt_seconds)
    draw = random.Random(seed).uniform  # noqa: S311 (the test's own)
    with pytest.raises(StoreUnavailable):
        Retry(clock=outage.clock, uniform=draw).call(outage)
    assert 120 <= outage.clock.now() <= 120 + LEAST_SECONDS


@given(seed=seeds)
def test_no_storm(seed: int):
    """An outage takes about thirty requests of a client, and never many more."""
    outage = Outage(math.inf)
    draw = random.Random(seed).uniform  # noqa: S311 (the test's own)
    with pytest.raises(StoreUnavailable):
        Retry(clock=outage.clock, uniform=draw).call(outage)
    assert 12 <= outage.attempts <= 60


@pytest.mark.parametrize(
    "wrong",
    [
        {"attempts": 0},
        {"corrupt_attempts": 0},
        {"base_seconds": -1.0},
        {"cap_seconds": float("inf")},
        {"deadline_seconds": float("nan")},
    ],
)
def test_numbers_are_checked(wrong: dict[str, float]):
    """A retry without an attempt or an end is a mistake."""
    with pytest.raises(ValueError, match=next(iter(wrong)).split("_")[0]):
        Retry(**wrong)
