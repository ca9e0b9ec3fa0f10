"""Questions and answers between the threads of a relay."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from cloud_adapters.relays.desk import (
    SILENT_SECONDS,
    QuestionKind,
    RelayDesk,
    RelayQuestion,
)
from federation.clock import SystemClock, VirtualClock
from federation.ids import SiteId

EAST, WEST = SiteId("east"), SiteId("west")


def question(body: bytes = b"task") -> RelayQuestion:
    return RelayQuestion.of(QuestionKind.TASK, [body], seconds=5.0, max_bytes=10)


def answer_next(desk: RelayDesk, site: SiteId, body: bytes) -> None:
    asked = desk.next(site, wait_seconds=5.0)
    assert asked is not None
    assert desk.limit(site, asked.name) == 10
    assert desk.answer(site, asked.name, body)


def test_answers_come_back_by_site():
    desk = RelayDesk([EAST, WEST], SystemClock())
    with ThreadPoolExecutor(2) as pool:
        for site in (EAST, WEST):
            pool.submit(answer_next, desk, site, site.encode())
        found = desk.ask(
            dict.fromkeys([EAST, WEST], question()),
            seconds=5,
            stopped=threading.Event(),
        )
    assert found == {EAST: b"east", WEST: b"west"}


def test_question_is_given_again_until_it_is_answered():
    """To a site that was restarted; and nobody answers another's, or one twice."""
    desk, found = RelayDesk([EAST, WEST], SystemClock()), {}
    asked = {EAST: question()}
    with ThreadPoolExecutor(1) as pool:
        wait = pool.submit(desk.ask, asked, seconds=5, stopped=threading.Event())
        first, again = (desk.next(EAST, wait_seconds=5.0) for _ in range(2))
        assert first == again == asked[EAST]
        assert desk.next(WEST, wait_seconds=0.0) is None
        assert not desk.answer(WEST, first.name, b"")
        assert not desk.answer(EAST, question(b"other").name, b"")
        assert desk.limit(EAST, question(b"other").name) is None
        assert desk.answer(EAST, first.name, b"done")
        assert not desk.answer(EAST, first.name, b"twice")
        found = wait.result()
    assert found == {EAST: b"done"}


def test_silent_site_is_not_awaited():
    """But one of which nothing is known yet has time to connect."""
    clock = VirtualClock()
    desk = RelayDesk([EAST], clock)
    assert desk.next(EAST, wait_seconds=0.0) is None
    clock.sleep(SILENT_SECONDS + 1)
    found = desk.ask({EAST: question()}, seconds=1e6, stopped=threading.Event())
    assert found == {EAST: None}


def test_silent_site_is_awaited_with_patience():
    """It may be about to connect, and comes before the patience is over."""
    clock = VirtualClock()
    desk = RelayDesk([EAST], clock)
    clock.sleep(SILENT_SECONDS + 1)
    with ThreadPoolExecutor(1) as pool:
        asked, stopped = {EAST: question()}, threading.Event()
        wait = pool.submit(desk.ask, asked, seconds=60, patience=30, stopped=stopped)
        answer_next(desk, EAST, b"late")
        assert wait.result() == {EAST: b"late"}


def test_wait_ends_with_the_relay():
    desk, stopped = RelayDesk([EAST], SystemClock()), threading.Event()
    stopped.set()
    assert desk.ask({EAST: question()}, seconds=60, stopped=stopped) == {EAST: None}
    with pytest.raises(KeyError, match="west"):
        desk.ask({WEST: question()}, seconds=60, stopped=stopped)
