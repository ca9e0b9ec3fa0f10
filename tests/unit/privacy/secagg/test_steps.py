"""The order of steps."""

from enum import Enum

import pytest

from privacy.secagg.errors import OutOfOrder
from privacy.secagg.protocol.setup import Steps


class Step(Enum):
    ONE = "one"
    TWO = "two"
    ABORTED = "aborted"


def test_steps_follow_each_other():
    """A step is due once, and another step changes nothing."""
    erased: list[int] = []
    steps = Steps(Step.ONE, aborted=Step.ABORTED, erase=lambda: erased.append(1))
    with pytest.raises(OutOfOrder, match="'two' is not due now; expected: 'one'"):
        steps.take(Step.TWO, then=Step.ONE).__enter__()
    with steps.take(Step.ONE, then=Step.TWO):
        pass
    with pytest.raises(OutOfOrder):
        steps.take(Step.ONE, then=Step.TWO).__enter__()
    assert steps.due is Step.TWO
    assert erased == []


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_failure_erases_and_ends(error: type[BaseException]):
    """Whatever the failure, and even if it is caught outside."""
    erased: list[int] = []
    steps = Steps(Step.ONE, aborted=Step.ABORTED, erase=lambda: erased.append(1))
    with pytest.raises(error), steps.take(Step.ONE, then=Step.TWO):
        raise error
    assert erased == [1]
    assert steps.due is Step.ABORTED


def test_step_is_not_due_while_it_is_taken():
    """A step that calls back into itself is refused."""
    steps = Steps(Step.ONE, aborted=Step.ABORTED, erase=lambda: None)
    with (
        pytest.raises(OutOfOrder),
        steps.take(Step.ONE, then=Step.TWO),
        steps.take(Step.ONE, then=Step.TWO),
    ):
        pass
