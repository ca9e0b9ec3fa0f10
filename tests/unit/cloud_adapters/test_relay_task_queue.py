"""Questions and answers between the threads of a relay."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from cloud_adapters.relays.task_queue import (
    SILENT_SECONDS,
    QuestionKind,
    RelayQuestion,
    TaskQueue,
)
from federation.clock import SystemClock, VirtualClock
from federation.ids import SiteId

EAST, WEST = SiteId("east"), SiteId("west")


def question(body: bytes = b"task") -> RelayQuestion:
    return RelayQuestion.of(QuestionKind.TASK, [body], seconds=5.0, max_bytes=10)


def answer_next(queue: TaskQueue, site: SiteId, body: bytes) -> None:
    asked = queue.next(site, wait_seconds=5.0)
    assert asked is not None
    assert queue.limit(site, asked.name) == 10
    assert queue.answer(site, asked.name, body)


def test_answers_come_back_by_site():
    queue = TaskQueue([EAST, WEST], SystemClock())
    with ThreadPoolExecutor(2) as pool:
        for site in (EAST, WEST):
            pool.submit(answer_next, queue, site, site.encode())
        found = queue.ask(
            dict.fromkeys([EAST, WEST], question()),
            seconds=5,
            stopped=threading.Event(),
        )
    assert found == {EAST: b"east", WEST: b"west"}


def test_question_is_given_again_until_it_is_answered():
    """To a site that was restarted; and nobody answers another's, or one twice."""
    queue, found = TaskQueue([EAST, WEST], SystemClock()), {}
    asked = {EAST: question()}
    with ThreadPoolExecutor(1) as pool:
        wait = pool.submit(queue.ask, asked, seconds=5, stopped=threading.Event())
        first, again = (queue.next(EAST, wait_seconds=5.0) for _ in range(2))
        assert first == again == asked[EAST]
        assert queue.next(WEST, wait_seconds=0.0) is None
        assert not queue.answer(WEST, first.name, b"")
        assert not queue.answer(EAST, question(b"other").name, b"")
        assert queue.limit(EAST, question(b"other").name) is None
        assert queue.answer(EAST, first.name, b"done")
        assert not queue.answer(EAST, first.name, b"twice")
        found = wait.result()
    assert found == {EAST: b"done"}


def test_silent_site_is_not_awaited():
    """But one of which nothing is known yet has time to connect."""
    clock = VirtualClock()
    queue = TaskQueue([EAST], clock)
    assert queue.next(EAST, wait_seconds=0.0) is None
    clock.sleep(SILENT_SECONDS + 1)
    found = queue.ask({EAST: question()}, seconds=1e6, stopped=threading.Event())
    assert found == {EAST: None}


def test_silent_site_is_awaited_with_patience():
    """It may be about to connect, and comes before the patience is over."""
    queue = TaskQueue([EAST], SystemClock(), silent_seconds=0.0)
    with ThreadPoolExecutor(1) as pool:
        asked, stopped = {EAST: question()}, threading.Event()
        wait = pool.submit(queue.ask, asked, seconds=60, patience=30, stopped=stopped)
        answer_next(queue, EAST, b"late")
        assert wait.result() == {EAST: b"late"}


def test_wait_ends_with_the_relay():
    queue, stopped = TaskQueue([EAST], SystemClock()), threading.Event()
    stopped.set()
    assert queue.ask({EAST: question()}, seconds=60, stopped=stopped) == {EAST: None}
    with pytest.raises(KeyError, match="west"):
        queue.ask({WEST: question()}, seconds=60, stopped=stopped)
