"""How a site's agent goes: at once, or after the task that it works on."""

import queue

from cloud_adapters.compute.notices import Notice
from deploy.site_host.departure import MARGIN_SECONDS, Departure, watch
from federation.clock import SystemClock
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
    assert departure.at_once() is LeaveReason.SPOT


def test_a_machine_that_is_about_to_go_takes_no_task():
    departure, told = Departure(), queue.SimpleQueue[str]()
    watch(lambda: Notice(seconds=60.0, text="x"), departure, CLOCK, told.put)
    assert departure.at_once() is LeaveReason.SPOT
    assert told.get(timeout=1) == "x: this site takes no task"
