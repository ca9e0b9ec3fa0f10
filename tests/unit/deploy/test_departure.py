"""How a site's agent leaves: immediately, or after the task that it works on."""

import queue
import threading
from collections.abc import Callable

import pytest

from cloud_adapters.compute.notices import Notice
from deploy.site_host.departure import (
    LOOK_SECONDS,
    MARGIN_SECONDS,
    Departure,
    watch,
)
from federation.clock import SystemClock, VirtualClock
from federation.messages import LeaveReason

CLOCK = SystemClock()


def test_nothing_is_left_before_somebody_asks():
    departure = Departure()
    assert departure.at_once() is None
    assert departure.after_this() is None


def test_the_first_reason_counts():
    """A supervisor stops an agent whose machine is taken back."""
    departure = Departure()
    departure.soon(LeaveReason.SPOT)
    assert departure.at_once() is None
    assert departure.after_this() is LeaveReason.SPOT
    departure.now(LeaveReason.SIGTERM)
    assert departure.at_once() is LeaveReason.SPOT


@pytest.mark.slow
def test_a_notice_lets_the_task_end_if_there_is_time():
    """And ends it before the machine goes."""
    answers: queue.SimpleQueue[Notice | None] = queue.SimpleQueue()
    answers.put(None)
    answers.put(Notice(seconds=MARGIN_SECONDS + 0.3, text="x"))
    departure, told = Departure(), queue.SimpleQueue[str]()
    watch(answers.get, departure, CLOCK, told.put)
    assert departure.after_this() is None
    assert (
        told.get(timeout=60) == "x in 20 s: this site leaves after its task, within 0 s"
    )
    assert departure.last.wait(60)
    assert departure.stopped.wait(60)
    assert departure.hurry.is_set()
    assert departure.at_once() is LeaveReason.SPOT


class SteppedEvent(threading.Event):
    """An event whose waits end immediately, and move a clock on."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock
        self.waits: list[tuple[float, bool]] = []
        self.hurried: Callable[[], bool] = lambda: False

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self._clock.sleep(timeout)
        self.waits.append((self._clock.monotonic(), self.hurried()))
        return False


@pytest.mark.parametrize(
    ("seconds", "hurry_at", "gone_at"), [(120.0, 95.0, 100.0), (30.0, 5.0, 10.0)]
)
def test_training_ends_early_enough_for_its_answer(
    seconds: float, hurry_at: float, gone_at: float
):
    """Two minutes on EC2, half a minute on Compute Engine."""
    clock = VirtualClock()
    stopped = SteppedEvent(clock)
    departure = Departure(stopped=stopped)
    stopped.hurried = departure.hurry.is_set
    answers = iter([None, Notice(seconds=seconds, text="x")])
    watch(lambda: next(answers), departure, clock, lambda _: None)
    assert departure.hurry.wait(60)
    while not stopped.is_set():
        threading.Event().wait(0.01)
    first_look, hurry, gone = stopped.waits
    assert first_look == (LOOK_SECONDS, False)
    assert hurry == (LOOK_SECONDS + hurry_at, False)
    assert gone == (LOOK_SECONDS + gone_at, True)


def test_a_machine_that_is_about_to_go_takes_no_task():
    departure, told = Departure(), queue.SimpleQueue[str]()
    watch(lambda: Notice(seconds=60.0, text="x"), departure, CLOCK, told.put)
    assert departure.at_once() is LeaveReason.SPOT
    assert told.get(timeout=1) == "x: this site takes no task"
