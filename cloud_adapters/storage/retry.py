"""Trying again what may pass: a few times, ever further apart, within a deadline.

The one place where requests to a service are repeated: the libraries' own retries
are off, so that attempts are bounded and counted once. Adapters say which of their
errors are temporary; see ``federation.errors.StoreError``.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from federation.clock import SystemClock
from federation.errors import StoreError
from federation.protocols import Clock

_Result = TypeVar("_Result")


def _nobody(error: StoreError) -> None:
    """Listen to nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """How often to try, and how long to wait in between.

    The wait before attempt n + 1 is drawn between 0 and ``base_seconds * 2^(n - 1)``,
    at most ``cap_seconds``: "full jitter" of Brooker, Exponential Backoff and Jitter,
    AWS Architecture Blog, 2015. Clients that failed together do not return together.

    Args:
        attempts: How often to try at most, the first time included.
        base_seconds: Bound of the first wait.
        cap_seconds: Bound of every wait, unless the service asks for a longer one.
        deadline_seconds: No attempt begins later than this after the first.
        clock: Tells time and waits.
        uniform: Draws a number between two.
        listener: Called before each wait with the error that is the reason for it,
            from the thread that made the request.
    """

    attempts: int = 6
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
        if self.attempts < 1:
            raise ValueError(f"cannot make {self.attempts} attempts: at least one")
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
                return request(attempt)
            except StoreError as error:
                if not error.temporary:
                    raise
                seconds = self.clock.monotonic() - begin
                wait_seconds = self._wait_seconds(attempt, error)
                if (
                    attempt >= self.attempts
                    or seconds + wait_seconds > self.deadline_seconds
                ):
                    raise _given_up(error, attempt, seconds) from error.__cause__
                self.listener(error)
            self.clock.sleep(wait_seconds)
            attempt += 1

    def _wait_seconds(self, attempt: int, error: StoreError) -> float:
        # min() of the exponent: 2.0 ** 1024 is an OverflowError.
        most = self.base_seconds * 2.0 ** min(attempt - 1, 64)
        drawn = self.uniform(0.0, min(self.cap_seconds, most))
        return max(drawn, error.wait_seconds)


def _given_up(error: StoreError, attempts: int, seconds: float) -> StoreError:
    """Make the error of the last attempt say that there were others."""
    if attempts == 1:
        return error
    return type(error)(
        f"{error} (tried {attempts} times in {seconds:.0f} s)",
        temporary=True,
        wait_seconds=error.wait_seconds,
    )
