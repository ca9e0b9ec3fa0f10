"""The order of a protocol's steps, enforced by the object that takes them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Generic, TypeVar

from privacy.secagg.errors import OutOfOrder

StepT = TypeVar("StepT", bound=Enum)


class Steps(Generic[StepT]):
    """Which step is due. A step that fails is the last: nothing follows it.

    Args:
        first: The step that is due first.
        aborted: The step that is due, forever, after a failure.
        erase: Called after a failure, to overwrite what is secret.
    """

    def __init__(
        self, first: StepT, *, aborted: StepT, erase: Callable[[], None]
    ) -> None:
        """Make the first step due."""
        self.due = first
        self._aborted = aborted
        self._erase = erase

    @contextmanager
    def take(self, step: StepT, *, then: StepT) -> Iterator[None]:
        """Take a step and make another one due if it succeeds.

        Raises:
            OutOfOrder: Another step is due. Nothing changes then.
        """
        if self.due is not step:
            raise OutOfOrder(
                f"{step.value!r} is not due now; expected: {self.due.value!r}"
            )
        # Due again only at the very end: a failure anywhere leaves it aborted.
        self.due = self._aborted
        try:
            yield
        except BaseException:
            self._erase()
            raise
        self.due = then
