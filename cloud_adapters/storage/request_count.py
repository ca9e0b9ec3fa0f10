"""How many requests a call to a store makes of its service.

A bill counts requests: a call may be many (parts, pages, attempts). Senders report
each with ``note_request``; callers count them with ``counting``. The count follows
a call into the threads that work for it if they are handed their work through
``carried``.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from functools import partial
from typing import ParamSpec, TypeVar

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


class RequestCount:
    """A number that several threads add to."""

    def __init__(self) -> None:
        """Begin at nothing."""
        self._lock = threading.Lock()
        self._number = 0

    @property
    def number(self) -> int:
        """Requests so far."""
        return self._number

    def add(self) -> None:
        """Count one more."""
        with self._lock:
            self._number += 1


_COUNT: ContextVar[RequestCount | None] = ContextVar("count", default=None)


def note_request() -> None:
    """Say that a request is about to be sent."""
    count = _COUNT.get()
    if count is not None:
        count.add()


@contextmanager
def counting(count: RequestCount) -> Iterator[None]:
    """Count the requests of this block, and not for callers that count around it."""
    token = _COUNT.set(count)
    try:
        yield
    finally:
        _COUNT.reset(token)


def carried(
    function: Callable[_Parameters, _Result],
) -> Callable[_Parameters, _Result]:
    """Make a function that counts for this call, in whichever thread it runs.

    It may be called once at a time.
    """
    return partial(copy_context().run, function)
