"""Repeats what a passing fault of a cloud has ended, within a deployment's hours.

Each step of ``up`` and ``down`` can be done again, and a launch that is repeated has
the same token. A budget that is spent meanwhile ends the next attempt; machines end by
themselves then, as when their hours are over.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TypeVar

from cloud_adapters.compute.refusals import PASSING
from deploy.fleet.deployment_file import DeploymentPlan
from federation.errors import ComputeError
from federation.protocols import Clock

# After a fault: so long, then twice as long, up to the last.
RETRY_SECONDS, MOST_RETRY_SECONDS = 5.0, 300.0
_HOUR = 3600.0

_Result = TypeVar("_Result")


class Patience:
    """Waits between the attempts of one command."""

    def __init__(
        self, plan: DeploymentPlan, *, clock: Clock, tell: Callable[[str], None]
    ) -> None:
        """Begin with the first attempt; ``tell`` is called with each new fault."""
        self._clock, self._tell = clock, tell
        self._end = clock.monotonic() + plan.file.max_hours * _HOUR
        self._pause, self._told = RETRY_SECONDS, ""

    def is_worn_out(self, error: ComputeError) -> bool:
        """Wait after a fault; True at once if no further attempt is to be made.

        Because it needs a person, or the hours of the deployment are over.
        """
        now = self._clock.monotonic()
        if not isinstance(error, PASSING) or now >= self._end:
            return True
        if str(error) != self._told:
            self._tell(f"{error}; tried again until it succeeds")
        self._told = str(error)
        self._clock.sleep(min(self._pause, self._end - now))
        self._pause = min(2 * self._pause, MOST_RETRY_SECONDS)
        return False

    @contextmanager
    def entered(
        self, make: Callable[[], AbstractContextManager[_Result]]
    ) -> Iterator[_Result]:
        """Enter what ``make`` returns once no passing fault keeps it from that."""
        with ExitStack() as stack:
            yield self.repeated(lambda: stack.enter_context(make()))

    def repeated(self, attempt: Callable[[], _Result]) -> _Result:
        """Make an attempt until no passing fault ends it.

        Raises:
            ComputeError: A fault that needs a person, or the last one.
        """
        while True:
            try:
                return attempt()
            except ComputeError as error:
                if self.is_worn_out(error):
                    raise
