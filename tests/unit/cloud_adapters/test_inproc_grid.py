"""Threads, deadlines and memory of the grid in one process.

What every grid promises is in ``contract/test_grid.py``.
"""

import gc
import signal
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support import toy
from support.scripted_grid import reply_to

from cloud_adapters.local import inproc_grid
from cloud_adapters.local.inproc_grid import InProcessGrid
from federation.clock import SystemClock, VirtualClock
from federation.ids import SiteId
from federation.messages import (
    FailureKind,
    Reply,
    RoundTask,
    SiteFailure,
    SiteMessage,
    SiteUpdate,
)
from federation.protocols import Clock
from federation.rounds.gather import exchange
from federation.wire import frame as wire

SITES = toy.SITES
PATIENT, SHORT = 60.0, 0.05


class Handler:
    """A site that does what a function says."""

    def __init__(self, answer: Callable[[RoundTask], SiteMessage]) -> None:
        """Answer with a function."""
        self.handle = answer


def sound(task: RoundTask) -> SiteUpdate:
    """A sound answer."""
    return toy.update(task.site, round_index=task.round_index)


def grid_of(
    answer: Callable[[RoundTask], Any] = sound,
    *,
    sites: Sequence[SiteId] = SITES,
    clock: Clock | None = None,
    **fields: Any,
) -> InProcessGrid:
    """A grid of sites that answer alike."""
    handlers = {site: Handler(answer) for site in sites}
    return InProcessGrid(handlers, clock=clock or SystemClock(), **fields)


def tasks(
    round_index: int = 1, sites: Sequence[SiteId] = SITES, **fields: Any
) -> list[RoundTask]:
    """A task for each site."""
    return [toy.task(site, round_index=round_index, **fields) for site in sites]


def kinds(replies: Sequence[Reply]) -> list[str]:
    """Who said what."""
    return [
        f"{r.message.site} {r.message.kind.value}"
        if isinstance(r.message, SiteFailure)
        else f"{r.message.site} ok"
        for r in replies
    ]


class Gate:
    """Sites wait here until the test lets them continue.

    For them alone time passes: ``clock`` moves on when one is held, so that it misses
    its deadline and no other does, however busy the machine is.
    """

    def __init__(self, *held: str, seconds: float = SHORT) -> None:
        """Hold the named sites, in round 1, each for ``seconds`` of the clock."""
        self._held = held
        self._seconds = seconds
        self.clock = VirtualClock()
        self.entered = threading.Semaphore(0)
        self.opened = threading.Event()
        self.passed = threading.Semaphore(0)

    def __call__(self, task: RoundTask) -> SiteUpdate:
        """Answer, after the gate was opened."""
        if task.site in self._held and task.round_index == 1:
            self.clock.sleep(self._seconds)
            self.entered.release()
            self.opened.wait(timeout=PATIENT)
            self.passed.release()
        return sound(task)


class Alive:
    """Sound answers, and how many of them are still held by somebody."""

    def __init__(self) -> None:
        """Begin with none."""
        self._lock = threading.Lock()
        self.now = self.made = self.most = 0

    def __call__(self, task: RoundTask) -> SiteUpdate:
        """Answer."""
        update = sound(task)
        with self._lock:
            self.now += 1
            self.made += 1
            self.most = max(self.most, self.now)
        weakref.finalize(update.delta_d, self._gone)
        return update

    def _gone(self) -> None:
        with self._lock:
            self.now -= 1


@pytest.fixture(autouse=True)
def _threads_end() -> Iterator[None]:
    """No test leaves a thread behind."""
    before = set(threading.enumerate())  # A grid of another suite may be at work.
    yield
    for thread in threading.enumerate():
        if thread.name == "crossfed-site" and thread not in before:
            thread.join(timeout=PATIENT)
            assert not thread.is_alive()


@pytest.mark.parametrize("arguments", [({}, 1), ({SITES[0]: Handler(sound)}, 0)])
def test_needs_a_site_and_a_worker(arguments: tuple[dict[SiteId, Handler], int]):
    """There is nothing to do otherwise."""
    handlers, workers = arguments
    with pytest.raises(ValueError, match="site and a worker"):
        InProcessGrid(handlers, clock=VirtualClock(), workers=workers)


def test_task_of_an_unknown_site():
    """It is the caller's mistake, reported first."""
    with grid_of() as grid, pytest.raises(ValueError, match=r"has no sites \['z'\]"):
        grid.send(tasks(sites=[SiteId("z")]), deadline_seconds=PATIENT)


@pytest.mark.parametrize("workers", [1, 2, 7])
def test_thousand_sites_answer_in_order(workers: int):
    """The window moves along."""
    sites = [SiteId(f"s{i}") for i in range(1000)]
    with grid_of(sites=sites, workers=workers) as grid:
        replies = exchange(grid, tasks(sites=sites), deadline_seconds=PATIENT)
        assert [reply.message.site for reply in replies] == sites


def test_order_does_not_follow_speed():
    """The first task is the slowest, and still the first answer."""
    done = threading.Barrier(2)

    def answer(task: RoundTask) -> SiteUpdate:
        if task.site != SITES[2]:
            done.wait(timeout=PATIENT)  # c and a finish together, b after one of them
        return sound(task)

    with grid_of(answer, workers=2) as grid:
        replies = exchange(grid, tasks(), deadline_seconds=PATIENT)
        assert kinds(list(replies)) == ["c ok", "a ok", "b ok"]


@pytest.mark.parametrize("workers", [1, 3])
def test_at_most_so_many_work_at_once(workers: int):
    """A machine has only so many cores."""
    lock, at_work, most = threading.Lock(), [0], [0]

    def answer(task: RoundTask) -> SiteUpdate:
        with lock:
            at_work[0] += 1
            most[0] = max(most[0], at_work[0])
        SystemClock().sleep(0.001)
        with lock:
            at_work[0] -= 1
        return sound(task)

    sites = [SiteId(f"s{i}") for i in range(20)]
    with grid_of(answer, sites=sites, workers=workers) as grid:
        list(exchange(grid, tasks(sites=sites), deadline_seconds=PATIENT))
    assert most[0] <= workers


def test_quick_sites_and_receiver_take_turns():
    """Waking a thread for each answer would take longer than the answers."""
    turns: list[str] = []

    def note(who: str) -> None:
        if turns[-1:] != [who]:
            turns.append(who)

    def answer(task: RoundTask) -> SiteUpdate:
        note("sites")
        return sound(task)

    sites = [SiteId(f"s{i}") for i in range(300)]
    with grid_of(answer, sites=sites, clock=VirtualClock()) as grid:
        for _ in exchange(grid, tasks(sites=sites), deadline_seconds=PATIENT):
            note("receiver")
    assert turns[:2] == ["sites", "receiver"]
    assert len(turns) < 60  # 10, or some more where the machine is busy, for 600.


def test_slow_site_does_not_hold_up_replies_of_quick_ones():
    """A turn ends, also if no site has answered since."""
    gate = Gate(SITES[1], seconds=0.0)
    with grid_of(gate, clock=gate.clock) as grid:
        list(exchange(grid, tasks(2), deadline_seconds=PATIENT))  # All of them quick.
        replies = exchange(grid, tasks(), deadline_seconds=2 * PATIENT)
        assert kinds([next(replies)]) == ["c ok"]
        assert not gate.passed.acquire(blocking=False)  # The slow one is still slow.
        gate.opened.set()
        assert kinds(list(replies)) == ["a ok", "b ok"]


def test_slow_receiver_does_not_hold_up_quick_sites():
    """A turn ends, also if the receiver does not come back."""
    gate = Gate(SITES[2], seconds=0.0)
    with grid_of(gate, clock=gate.clock) as grid:
        grid.send(tasks(), deadline_seconds=PATIENT)
        assert kinds(list(grid.receive())) == ["c ok"]
        assert gate.entered.acquire(timeout=PATIENT)
        gate.opened.set()


def test_bytes_of_a_task_are_counted_once():
    """However often the site answers."""
    with grid_of(fault=lambda _task, answer: [answer()] * 2) as grid:
        asked = tasks(sites=SITES[:1])
        replies = list(exchange(grid, asked, deadline_seconds=PATIENT))
    up = wire.encoded_size(replies[0].message)
    down = wire.encoded_size(asked[0])
    assert [(r.bytes_down, r.bytes_up) for r in replies] == [(down, up), (0, up)]


def test_silent_site_is_unreachable():
    """The task was sent, nothing came."""
    with grid_of(fault=lambda _task, _answer: []) as grid:
        (reply,) = exchange(grid, tasks(sites=SITES[:1]), deadline_seconds=PATIENT)
    assert kinds([reply]) == ["c unreachable"]
    assert (reply.bytes_down > 0, reply.bytes_up) == (True, 0)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (KeyError("lost"), "KeyError: 'lost'"),
        (SystemExit(3), "SystemExit: 3"),
        (KeyboardInterrupt(), "KeyboardInterrupt: "),
        (ValueError("two\nlines"), "ValueError: two lines"),
    ],
)
def test_whatever_a_handler_raises_is_a_crash(error: BaseException, text: str):
    """It ends neither the thread nor the run, and the site is asked again."""

    def answer(task: RoundTask) -> SiteUpdate:
        if task.round_index == 1 and task.site == SITES[1]:
            raise error
        return sound(task)

    with grid_of(answer) as grid:
        replies = list(exchange(grid, tasks(), deadline_seconds=PATIENT))
        again = list(exchange(grid, tasks(2), deadline_seconds=PATIENT))
    assert kinds(replies) == ["c ok", "a crashed", "b ok"]
    assert replies[1].message.message == text
    assert kinds(again) == ["c ok", "a ok", "b ok"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"num_steps": -1}, "c invalid"),
        ({"delta_d": np.ones((2, 2), dtype=np.float32)}, "c invalid"),
        ({"site": SITES[1]}, "c invalid"),
    ],
)
def test_message_that_no_site_could_send(change: dict[str, Any], expected: str):
    """It could not travel, or speaks for another site."""
    with grid_of(lambda task: replace(sound(task), **change)) as grid:
        replies = exchange(grid, tasks(sites=SITES[:1]), deadline_seconds=PATIENT)
        assert kinds(list(replies)) == [expected]


def test_hanging_site_gives_up_its_thread():
    """The others continue, and it is busy until it comes back; then it is late."""
    gate = Gate(SITES[0])
    with grid_of(gate, clock=gate.clock) as grid:
        first = list(exchange(grid, tasks(), deadline_seconds=SHORT))
        second = list(exchange(grid, tasks(2), deadline_seconds=PATIENT))
        gate.opened.set()
        _wait_until(lambda: not grid._busy)
        third = list(exchange(grid, tasks(3), deadline_seconds=PATIENT))
    assert kinds(first) == ["c deadline", "a ok", "b ok"]
    advice = "raise schedule.round_deadline_seconds if a round takes longer"
    assert first[0].message.message == f"gave no answer within 0.05 s: {advice}"
    assert kinds(second) == ["c busy", "a ok", "b ok"]
    assert second[0].message.message == f"is still working on round 1: {advice}"
    assert kinds(third) == ["c late", "c ok", "a ok", "b ok"]


def test_late_answer_counts_its_bytes_up_and_keeps_no_update():
    """The task's bytes were counted with the deadline."""
    gate = Gate(SITES[0])
    with grid_of(gate, clock=gate.clock) as grid:
        (missed,) = exchange(grid, tasks(sites=SITES[:1]), deadline_seconds=SHORT)
        gate.opened.set()
        _wait_until(lambda: not grid._busy)
        late, _ = exchange(grid, tasks(2, SITES[:1]), deadline_seconds=PATIENT)
    assert isinstance(late.message, SiteFailure)
    assert late.message.round_index == 1
    assert (missed.bytes_up, late.bytes_down) == (0, 0)
    assert late.bytes_up == wire.encoded_size(sound(tasks()[0]))


def test_crash_after_the_deadline_is_not_told_twice():
    """The site had failed anyway."""
    gate = Gate(SITES[0])

    def answer(task: RoundTask) -> SiteMessage:
        gate(task)
        return toy.failure(task.site, round_index=task.round_index)

    with grid_of(answer, clock=gate.clock) as grid:
        list(exchange(grid, tasks(sites=SITES[:1]), deadline_seconds=SHORT))
        gate.opened.set()
        _wait_until(lambda: not grid._busy)
        replies = list(exchange(grid, tasks(2, SITES[:1]), deadline_seconds=PATIENT))
    assert kinds(replies) == ["c crashed"]


def test_deadline_is_of_the_sites_own_time():
    """Late is late, even if nobody was looking when the deadline passed."""
    clock = VirtualClock()

    def answer(task: RoundTask) -> SiteUpdate:
        clock.sleep(10 if task.site == SITES[1] else 3)
        return sound(task)

    with grid_of(answer, clock=clock) as grid:
        replies = list(exchange(grid, tasks(), deadline_seconds=5.0))
    assert [k for k in kinds(replies) if "late" not in k] == [
        "c ok",
        "a deadline",
        "b ok",
    ]


def test_time_in_the_queue_is_not_the_sites():
    """Three sites of 3 s on one thread all keep a deadline of 5 s."""
    clock = VirtualClock()

    def answer(task: RoundTask) -> SiteUpdate:
        clock.sleep(3)
        return sound(task)

    with grid_of(answer, clock=clock) as grid:
        replies = list(exchange(grid, tasks(), deadline_seconds=5.0))
    assert kinds(replies) == ["c ok", "a ok", "b ok"]
    assert [(r.asked_seconds, r.answered_seconds) for r in replies] == [
        (0.0, 3.0),
        (3.0, 6.0),
        (6.0, 9.0),
    ]


def test_left_exchange_does_not_make_its_sites_busy():
    """The next task of a site waits until it has finished the last."""
    gate = Gate(SITES[0])
    with grid_of(gate, workers=2) as grid:
        replies = exchange(
            grid, tasks(sites=SITES[1:] + SITES[:1]), deadline_seconds=PATIENT
        )
        next(replies)
        gate.entered.acquire()
        replies.close()  # type: ignore[attr-defined]
        following = exchange(grid, tasks(2), deadline_seconds=PATIENT)
        threading.Timer(SHORT, gate.opened.set).start()
        assert [k for k in kinds(list(following)) if "late" not in k] == [
            "c ok",
            "a ok",
            "b ok",
        ]


def test_site_that_hangs_in_a_left_exchange():
    """Its thread is given up when its deadline passes, and it is busy."""
    gate = Gate(SITES[0])
    with grid_of(gate, clock=gate.clock) as grid:
        replies = exchange(
            grid, tasks(sites=SITES[1:] + SITES[:1]), deadline_seconds=SHORT
        )
        next(replies)
        gate.entered.acquire()
        replies.close()  # type: ignore[attr-defined]
        following = list(exchange(grid, tasks(2), deadline_seconds=PATIENT))
        gate.opened.set()
    assert kinds(following) == ["c busy", "a ok", "b ok"]


def test_replies_have_one_receiver():
    """An exchange takes the replies to whatever is open; the other one ends."""
    with grid_of() as grid:
        old = exchange(grid, tasks(), deadline_seconds=PATIENT)
        next(old)
        new = list(exchange(grid, tasks(2), deadline_seconds=PATIENT))
        assert list(old) == []
    assert [reply.message.round_index for reply in new] == [1, 1, 2, 2, 2]


def test_overdue_answer_comes_after_the_word_that_it_is():
    """Also if nobody took that word before the answer came."""
    gate = Gate(SITES[0], SITES[1])
    with grid_of(gate, clock=gate.clock, workers=2) as grid:
        grid.send(tasks(), deadline_seconds=SHORT)
        gate.entered.acquire()
        gate.entered.acquire()
        replies = [*grid.receive()]
        gate.opened.set()
        _wait_until(lambda: not grid._busy)
        while received := grid.receive():
            replies += received
    assert kinds([r for r in replies if r.message.site == "a"]) == [
        "a deadline",
        "a late",
    ]


def test_memory_is_bounded_over_all_open_tasks(monkeypatch: pytest.MonkeyPatch):
    """However many times something was sent."""
    monkeypatch.setattr(inproc_grid, "MAX_AHEAD", 4)
    alive = Alive()
    sites = [SiteId(f"s{i}") for i in range(30)]
    with grid_of(alive, sites=sites, workers=3) as grid:
        for site in sites:
            grid.send(tasks(sites=[site]), deadline_seconds=PATIENT)
        num_taken = 0
        while replies := grid.receive():
            num_taken += len(replies)
            replies.clear()
    assert num_taken == len(sites)
    assert alive.most <= 4 + 1  # And the one that was taken last.


def test_closed_grid_answers_nobody():
    """It does not wait for ever either."""
    grid = grid_of()
    grid.close()
    grid.close()
    replies = exchange(grid, tasks(), deadline_seconds=PATIENT)
    with pytest.raises(ValueError, match="the grid was closed"):
        next(replies)


def test_close_in_the_middle_wakes_who_waits():
    """From another thread."""
    gate = Gate(SITES[0])
    grid = grid_of(gate)
    replies = exchange(grid, tasks(), deadline_seconds=PATIENT)
    closer = threading.Thread(target=lambda: (gate.entered.acquire(), grid.close()))
    closer.start()
    with pytest.raises(ValueError, match="the grid was closed"):
        next(replies)
    gate.opened.set()
    closer.join()


def test_close_does_not_wait_for_hanging_sites(monkeypatch: pytest.MonkeyPatch):
    """Not for long if a site itself hangs, and not at all for a rehearsed fault."""
    monkeypatch.setattr(inproc_grid, "CLOSING_SECONDS", SHORT)
    gate = Gate(SITES[0])
    with grid_of(gate, clock=gate.clock) as grid:
        list(exchange(grid, tasks(), deadline_seconds=SHORT))
    assert not gate.passed.acquire(blocking=False)
    gate.opened.set()
    monkeypatch.setattr(inproc_grid, "CLOSING_SECONDS", PATIENT)
    held = Gate(SITES[0])

    def hang(task: RoundTask, answer: Callable[[], SiteMessage]) -> list[SiteMessage]:
        held(task)
        return [answer()]

    grid = grid_of(clock=held.clock, fault=hang)
    with closing(grid):
        list(exchange(grid, tasks(), deadline_seconds=SHORT))
        start = SystemClock().monotonic()
    assert SystemClock().monotonic() - start < PATIENT / 2
    held.opened.set()


def test_close_waits_for_sites_that_were_given_up():
    """They are inside a library as well, which may be in the middle of a step."""
    gate = Gate(SITES[0])
    with grid_of(gate, clock=gate.clock) as grid:
        list(exchange(grid, tasks(), deadline_seconds=SHORT))
        threading.Timer(SHORT, gate.opened.set).start()
    assert gate.passed.acquire(blocking=False)


@pytest.mark.parametrize(("ahead", "workers"), [(1, 1), (4, 1), (4, 3)])
def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch, ahead: int, workers: int):
    """Only so many finished updates wait, and none stays after it was taken."""
    monkeypatch.setattr(inproc_grid, "MAX_AHEAD", max(ahead, workers))
    alive = Alive()
    sites = [SiteId(f"s{i}") for i in range(50)]
    gc.disable()
    try:
        with grid_of(alive, sites=sites, workers=workers) as grid:
            replies = exchange(grid, tasks(sites=sites), deadline_seconds=PATIENT)
            for reply in replies:
                kept = weakref.ref(reply.message.delta_d)
                SystemClock().sleep(0.0005)  # Let the threads run ahead.
                del reply
                assert kept() is None
            assert (alive.made, alive.now) == (50, 0)
    finally:
        gc.enable()
    assert alive.most <= max(ahead, workers) + 1  # And the one that is being folded.


def test_late_masked_update_is_not_kept():
    """Of what comes too late only the word is kept, masked or not."""
    replies = [reply_to(toy.masked(), bytes_down=5, bytes_up=7)]
    (reply,) = inproc_grid.late_word(replies)
    assert isinstance(reply.message, SiteFailure)
    assert reply.message.kind is FailureKind.LATE
    assert (reply.bytes_down, reply.bytes_up) == (0, 7)


def test_left_exchange_keeps_no_update():
    """What was finished and not taken is let go."""
    alive = Alive()
    with grid_of(alive) as grid:
        replies = exchange(grid, tasks(), deadline_seconds=PATIENT)
        next(replies)
        _wait_until(lambda: alive.made == 3)
        replies.close()  # type: ignore[attr-defined]
        _wait_until(lambda: alive.now == 0)


def test_signal_that_another_thread_got_is_handled_while_receiving():
    """Nothing else would wake the main thread, in which handlers run."""

    def stop(_number: int, _frame: object) -> None:
        handled.set()
        raise KeyboardInterrupt

    begun, over = threading.Event(), threading.Event()
    handled = threading.Event()
    in_time = []

    def site(task: RoundTask) -> SiteMessage:
        begun.set()
        over.wait(PATIENT)
        return sound(task)

    def interrupt() -> None:
        begun.wait(PATIENT)
        SystemClock().sleep(SHORT)  # The receiver waits by now.
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        in_time.append(handled.wait(PATIENT / 6))
        over.set()

    before = signal.signal(signal.SIGUSR1, stop)
    try:
        with grid_of(site) as grid:
            grid.send(tasks(sites=SITES[:1]), deadline_seconds=PATIENT)
            other = threading.Thread(target=interrupt)
            other.start()
            with pytest.raises(KeyboardInterrupt):
                grid.receive()
            other.join()
        assert in_time == [True]
    finally:
        signal.signal(signal.SIGUSR1, before)


def _wait_until(condition: Callable[[], bool]) -> None:
    end = SystemClock().monotonic() + PATIENT
    while SystemClock().monotonic() < end:
        if condition():
            return
        SystemClock().sleep(0.001)
    raise AssertionError(f"it did not come to pass within {PATIENT:g} s")
