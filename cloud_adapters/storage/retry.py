"""Trying again what may pass, ever further apart, until a deadline.

The one place where requests to a service are repeated: the libraries' own retries
are off, so that attempts are bounded and counted once. Adapters say which of their
errors are temporary; see ``federation.errors.StoreError``.

The deadline decides, and not a number of attempts: with random waits a number of them
may be used up in seconds, long before an outage has passed. An adapter asks
``seconds_left`` how long an attempt may hang, so that the last one ends on time.
"""

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TypeVar

from federation.clock import SystemClock
from federation.errors import CorruptObject, StoreError
from federation.protocols import Clock

_Result = TypeVar("_Result")

# No attempt has to end sooner than this, however late it begins: a request that is
# sent at all gets the time that a healthy service needs. So a call takes at most twice
# this longer than its deadline: to connect, and to wait for an answer.
LEAST_SECONDS = 5.0

_SECONDS_LEFT: ContextVar[Callable[[], float] | None] = ContextVar(
    "seconds_left", default=None
)


def seconds_left() -> float:
    """How long the attempt that runs now may take, at least ``LEAST_SECONDS``.

    Infinite outside of ``Retry.call``.
    """
    left = _SECONDS_LEFT.get()
    return math.inf if left is None else max(LEAST_SECONDS, left())


def _nobody(error: StoreError) -> None:
    """Listen to nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """How long to try, and how long to wait in between.

    The wait before attempt n + 1 is drawn between 0 and ``base_seconds * 2^(n - 1)``,
    at most ``cap_seconds``: "full jitter" of Brooker, Exponential Backoff and Jitter,
    AWS Architecture Blog, 2015. Clients that failed together do not return together.
    A wait that would pass the deadline ends there, for a last attempt: whatever lasts
    less than the deadline is outlasted. By default that makes about 30 attempts.

    Args:
        attempts: How often to try at most, the first time included. The default is far
            more than the deadline leaves room for.
        corrupt_attempts: How often to try at most if changed bytes arrive: unlike an
            outage, waiting does not fix that.
        base_seconds: Bound of the first wait.
        cap_seconds: Bound of every wait, unless the service asks for a longer one.
        deadline_seconds: No attempt begins later than this after the first.
        clock: Tells time and waits.
        uniform: Draws a number between two.
        listener: Called before each wait with the error that is the reason for it,
            from the thread that made the request.
    """

    attempts: int = 200
    corrupt_attempts: int = 6
    base_seconds: float = 0.2
    cap_seconds: float = 10.0
    deadline_seconds: float = 120.0
    clock: Clock = field(default_factory=SystemClock)
    uniform: Callable[[float, float], float] = random.SystemRandom().uniform
    listener: Callable[[StoreError], None] = _nobody

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ValueError: There is no attempt, or a time is negative or infinite.
        """
        for name in ("attempts", "corrupt_attempts"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; it must be at least 1"
                )
        for name in ("base_seconds", "cap_seconds", "deadline_seconds"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} is {value}; it must be a number from 0")

    def call(self, request: Callable[[int], _Result]) -> _Result:
        """Make a request until it goes well, or there is no use in it.

        Args:
            request: Called with the number of the attempt, from 1. From the second
                on, an earlier one may have been carried out with its answer lost.

        Returns:
            What the request returned.

        Raises:
            StoreError: What the last attempt raised; if it was temporary, the message
                says how often and how long we tried, and the cause is kept.
        """
        begin = self.clock.monotonic()
        attempt = 1
        while True:
            try:
                with self._attempt(begin):
                    return request(attempt)
            except StoreError as error:
                if not error.temporary:
                    raise
                seconds = self.clock.monotonic() - begin
                wait_seconds = self._wait_seconds(attempt, seconds, error)
                if wait_seconds is None:
                    raise _given_up(error, attempt, seconds) from error.__cause__
                self.listener(error)
            self.clock.sleep(wait_seconds)
            attempt += 1

    @contextmanager
    def _attempt(self, begin: float) -> Iterator[None]:
        """Let ``seconds_left`` tell the time of this call while a request runs."""
        end = begin + self.deadline_seconds
        token = _SECONDS_LEFT.set(lambda: end - self.clock.monotonic())
        try:
            yield
        finally:
            _SECONDS_LEFT.reset(token)

    def _wait_seconds(
        self, attempt: int, seconds: float, error: StoreError
    ) -> float | None:
        """How long to wait after a failed attempt; None to give up.

        Args:
            attempt: Its number.
            seconds: Since the first one began.
            error: Why it failed.
        """
        most = self.attempts
        if isinstance(error, CorruptObject):
            most = min(most, self.corrupt_attempts)
        left = self.deadline_seconds - seconds
        if attempt >= most or left <= 0 or error.wait_seconds > left:
            return None
        # min() of the exponent: 2.0 ** 1024 is an OverflowError.
        bound = self.base_seconds * 2.0 ** min(attempt - 1, 64)
        drawn = self.uniform(0.0, min(self.cap_seconds, bound))
        return min(left, max(drawn, error.wait_seconds))


def _given_up(error: StoreError, attempts: int, seconds: float) -> StoreError:
    """Make the error of the last attempt say that there were others."""
    if attempts == 1:
        return error
    return type(error)(
        f"{error} (tried {attempts} times in {seconds:.0f} s)",
        temporary=True,
        wait_seconds=error.wait_seconds,
    )
