"""What every grid promises.

Starting an engine may take seconds, so each plays one script, and the tests look at
what came of it. To add a grid, write a function like ``in_process`` and list it in
``ENGINES``.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from support import toy_sites

from cloud_adapters.flower.simulation import run_on_flower_simulation
from cloud_adapters.local.inproc_grid import InProcessGrid
from cloud_adapters.local.transcript import TranscriptGrid
from cloud_adapters.local.virtual_grid import Machine, VirtualGrid
from federation.clock import SystemClock, VirtualClock
from federation.exchange import exchange
from federation.ids import SiteId, TaskId
from federation.messages import (
    FailureKind,
    MaskedUpdate,
    Reply,
    RoundTask,
    SecureAnswer,
    SecureStep,
    SecureTask,
    SiteEvaluation,
    SiteFailure,
    SiteUpdate,
    Task,
    TaskKind,
)
from federation.protocols import Grid
from federation.wire import frame as wire

pytestmark = pytest.mark.slow

SITES = [SiteId(name) for name in ("delta", "alpha-bad", "charlie", "bravo")]
JOB_TEXT = 'name = "toy"  # \u00fc\n'
# A busy machine fails no test.
PATIENT_SECONDS = 600.0

WEIGHTS_D = np.array([1.5, -0.0, np.inf, -np.inf, 1e-45, 3.4e38, 0.1], dtype=np.float32)
NAN_BITS = np.array([0x7FC00001, 0xFFC0FFFF], dtype=np.uint32).view(np.float32)
TASK = RoundTask(
    run_id="run-1",
    round_index=1,
    site=SITES[0],
    kind=TaskKind.TRAIN,
    layout_digest="ab" * 32,
    weights_d=np.concatenate([WEIGHTS_D, NAN_BITS]),
    integers_m=np.array([-(2**63), 2**62, 0], dtype=np.int64),
    evaluate=True,
    evaluate_after=False,
)

Server = Callable[[Grid], Any]


def tasks(sites: list[SiteId] = SITES, **fields: Any) -> list[RoundTask]:
    """One task for each site."""
    return [replace(TASK, site=site, **fields) for site in sites]


def secure_tasks(step: SecureStep, round_index: int) -> list[SecureTask]:
    """One step of secure aggregation for each site."""
    return [
        SecureTask(
            run_id="run-1",
            round_index=round_index,
            site=site,
            step=step,
            body=b"\0for " + site.encode(),
        )
        for site in SITES
    ]


def in_process(server: Server, *, workers: int):
    """Play a script against the in-process grid."""
    handlers = {site: toy_sites.echo_site(site, JOB_TEXT) for site in SITES}
    with InProcessGrid(handlers, clock=SystemClock(), workers=workers) as grid:
        return server(grid)


def in_virtual_time(server: Server):
    """Play a script in virtual time, where a site hangs on its own clock."""
    machines = {}
    for site in SITES:
        clock = VirtualClock()
        machines[site] = Machine(
            handler=toy_sites.EchoSite(
                site,
                JOB_TEXT,
                hang=partial(clock.sleep, toy_sites.HANGING_SECONDS),
            ),
            clock=clock,
            down=1e6,
            up=1e6,
            latency_seconds=0.001,
        )
    return server(VirtualGrid(machines, clock=VirtualClock()))


def with_transcript(server: Server):
    """Play a script against a grid that writes down what passes."""
    with TemporaryDirectory() as folder:
        return in_process(
            lambda grid: server(TranscriptGrid(grid, Path(folder))), workers=1
        )


def flower(server: Server):
    """Play a script on Flower's simulation engine, in two processes."""
    return run_on_flower_simulation(
        server,
        toy_sites.echo_site,
        sites=SITES,
        job_text=JOB_TEXT,
        clock=SystemClock(),
        workers=2,
    )


ENGINES = [
    pytest.param(partial(in_process, workers=1), id="in-process-1"),
    pytest.param(partial(in_process, workers=3), id="in-process-3"),
    pytest.param(with_transcript, id="in-process-with-transcript"),
    pytest.param(in_virtual_time, id="virtual"),
    # With one process: tests/unit/cloud_adapters/test_flower_simulation.py.
    pytest.param(flower, marks=(pytest.mark.flower, pytest.mark.slow), id="flower"),
]


@dataclass
class Played:
    """What came of the script."""

    sites: list[SiteId]
    train: list[Reply]
    again: list[Reply]
    evaluate: list[Reply]
    reverse: list[Reply]
    some: list[Reply]
    none: list[Reply]
    setup: list[Reply]
    masked: list[Reply]
    failing: list[Reply]
    after_break: list[Reply]
    hanging: list[Reply]
    after_hanging: list[Reply]
    sent: list[TaskId]
    overlapping: list[Reply]
    too_early: list[Reply]
    withdrawn: list[Reply]
    nothing: list[Reply]


def until_free(
    send: Callable[[Sequence[Task]], list[Reply]], tasks: Sequence[Task]
) -> list[Reply]:
    """Ask again while a site is busy with what it hung in."""
    while True:
        replies = send(tasks)
        failures = [r.message for r in replies if isinstance(r.message, SiteFailure)]
        if all(failure.kind is not FailureKind.BUSY for failure in failures):
            return replies
        SystemClock().sleep(0.05)


def play(grid: Grid) -> Played:
    """Send the script's tasks; a site hangs while a file is there."""
    hold = Path(os.environ[toy_sites.HOLD])

    def send(tasks: Sequence[Task], seconds: float = PATIENT_SECONDS) -> list[Reply]:
        return list(exchange(grid, tasks, deadline_seconds=seconds))

    def receive_all() -> list[Reply]:
        found: list[Reply] = []
        while replies := grid.receive():
            found += replies
        return found

    def send_and_leave() -> None:
        replies = exchange(
            grid, tasks(round_index=50), deadline_seconds=PATIENT_SECONDS
        )
        next(iter(replies))
        replies.close()  # type: ignore[attr-defined]

    train = send(tasks())
    begin = SystemClock().monotonic()
    again = send(tasks())
    # Ample for those that do not hang.
    deadline = max(1.0, 10 * (SystemClock().monotonic() - begin))
    evaluate = send(tasks(round_index=2, kind=TaskKind.EVALUATE))
    reverse, some = send(tasks(SITES[::-1])), send(tasks(SITES[1:3]))
    none = send([])
    setup = send(secure_tasks(SecureStep.ADVERTISE, 0))
    masked = send(tasks(round_index=3, secure=b"\0contract\xff"))
    failing = send(tasks(round_index=toy_sites.FAILING_ROUND))
    send_and_leave()
    after_break = send(tasks(round_index=51))
    hold.touch()
    # Returns while the site hangs, or never.
    hanging = send(tasks(round_index=toy_sites.HANGING_ROUND), deadline)
    hold.unlink()
    after_hanging = until_free(send, tasks(round_index=toy_sites.HANGING_ROUND + 1))
    sent = [*grid.send(tasks(round_index=60), deadline_seconds=PATIENT_SECONDS)]
    sent += grid.send(tasks(round_index=61), deadline_seconds=PATIENT_SECONDS)
    overlapping = receive_all()
    hold.touch()
    hanging_ids = grid.send(
        tasks([SITES[1]], round_index=toy_sites.HANGING_ROUND),
        deadline_seconds=PATIENT_SECONDS,
    )
    too_early = [*grid.receive(timeout_seconds=0.1)]
    left_ids = grid.send(tasks(round_index=62), deadline_seconds=PATIENT_SECONDS)
    grid.withdraw([*hanging_ids, *left_ids[:2]])
    hold.unlink()
    withdrawn = receive_all()
    return Played(
        sent=sent,
        overlapping=overlapping,
        too_early=too_early,
        withdrawn=withdrawn,
        nothing=[*grid.receive()],
        sites=list(grid.sites()),
        train=train,
        again=again,
        evaluate=evaluate,
        reverse=reverse,
        some=some,
        none=none,
        setup=setup,
        masked=masked,
        failing=failing,
        after_break=after_break,
        hanging=hanging,
        after_hanging=after_hanging,
    )


@pytest.fixture(scope="module", params=ENGINES)
def played(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Played]:
    """The script, played by one engine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(toy_sites.HOLD, str(tmp_path_factory.mktemp("played") / "hold"))
        yield request.param(play)


def by_site(replies: list[Reply], round_index: int) -> dict[SiteId, Reply]:
    """Replies of one round; late ones of rounds before are left out."""
    of_round = [r for r in replies if r.message.round_index == round_index]
    return {reply.message.site: reply for reply in of_round}


def senders(replies: list[Reply]) -> list[SiteId]:
    """Who answered, in order."""
    return [reply.message.site for reply in replies]


def test_sites_are_in_the_order_of_the_job(played: Played):
    """Not in alphabetic order and not in that of node numbers."""
    assert played.sites == SITES


def test_every_site_answers_once(played: Played):
    """In a simulation in the order of the tasks, so that sums are reproducible."""
    assert senders(played.train) == SITES
    assert senders(played.reverse) == SITES[::-1]


def test_only_the_asked_answer(played: Played):
    """A cohort is not the whole federation."""
    assert senders(played.some) == SITES[1:3]


def test_no_task_means_no_reply(played: Played):
    """An empty cohort is no special case."""
    assert played.none == []


def test_values_arrive_bit_for_bit(played: Played):
    """Infinities, denormals, signed zeros and the bits of NaN included."""
    for reply in played.train:
        assert isinstance(reply.message, SiteUpdate)
        assert reply.message.delta_d.tobytes() == TASK.weights_d[::-1].tobytes()
        np.testing.assert_array_equal(reply.message.integers_m, TASK.integers_m + 1)


def test_fields_arrive_as_they_were_sent(played: Played):
    """Both ways, and every site speaks for itself and knows its job."""
    for reply in played.train:
        update = reply.message
        assert update.num_examples == sum(update.site.encode())
        assert update.training.metrics["correct"] == len(JOB_TEXT)
        assert (update.run_id, update.round_index) == ("run-1", 1)
        assert update.layout_digest == TASK.layout_digest
        assert (update.evaluation is None, update.evaluation_after) == (False, None)
        assert [phase.name for phase in update.phases] == ["echo"]


def test_evaluation_is_answered_by_an_evaluation(played: Played):
    """The kind of the task reaches the site."""
    assert sorted(senders(played.evaluate)) == sorted(SITES)
    assert {type(r.message) for r in played.evaluate} == {SiteEvaluation}


def test_steps_of_secure_aggregation_arrive(played: Played):
    """Also before the first round; bytes are carried as they are."""
    replies = by_site(played.setup, 0)
    assert set(replies) == set(SITES)
    for task in secure_tasks(SecureStep.ADVERTISE, 0):
        reply = replies[task.site]
        assert isinstance(reply.message, SecureAnswer)
        assert reply.message.step is SecureStep.ADVERTISE
        assert reply.message.body == task.body[::-1]
        assert reply.message.round_index == 0
        assert reply.bytes_down == wire.encoded_size(task)
        assert reply.bytes_up == wire.encoded_size(reply.message)


def test_masked_updates_arrive_bit_for_bit(played: Played):
    """Words, the 64 bits of the header's words, and what is signed."""
    for reply in played.masked:
        update = reply.message
        assert isinstance(update, MaskedUpdate)
        assert update.words.tobytes() == TASK.weights_d[::-1].tobytes()
        expected_h = TASK.integers_m.view(np.uint64) + np.uint64(1)
        np.testing.assert_array_equal(update.header_h, expected_h)
        assert update.body == b"\xfftcartnoc\0"
        assert reply.bytes_up == wire.encoded_size(update)


def test_bytes_are_those_of_the_wire(played: Played):
    """Whether or not anything was serialised."""
    for reply, task in zip(played.train, tasks(), strict=True):
        assert reply.bytes_down == wire.encoded_size(task)
        assert reply.bytes_up == wire.encoded_size(reply.message)


def test_times_are_in_order(played: Played):
    """A reply comes after its question, and both after earlier exchanges."""
    for reply in played.train:
        assert reply.asked_seconds <= reply.answered_seconds
    last = max(reply.answered_seconds for reply in played.train)
    assert all(last <= reply.asked_seconds for reply in played.evaluate)


def test_same_tasks_have_the_same_answers(played: Played):
    """Nothing of an exchange leaks into the next."""
    sizes = [wire.encode_bytes(reply.message) for reply in played.train]
    assert sizes == [wire.encode_bytes(reply.message) for reply in played.again]


def test_failure_of_a_site_is_handed_on(played: Played):
    """In the site's own words, and the others are not concerned."""
    replies = by_site(played.failing, toy_sites.FAILING_ROUND)
    failure = replies.pop(SiteId("alpha-bad")).message
    assert isinstance(failure, SiteFailure)
    assert failure.kind is FailureKind.CRASHED
    assert failure.message.startswith('no disk for name = "toy"')
    assert {type(r.message) for r in replies.values()} == {SiteUpdate}
    assert len(replies) == len(SITES) - 1


def test_exchange_may_be_left_early(played: Played):
    """The next one has all its own answers."""
    assert set(by_site(played.after_break, 51)) == set(SITES)
    for reply in by_site(played.after_break, 51).values():
        assert isinstance(reply.message, SiteUpdate)


def test_hanging_site_misses_the_deadline(played: Played):
    """It is reported once, while it hangs, and the others are not concerned."""
    replies = by_site(played.hanging, toy_sites.HANGING_ROUND)
    assert len(played.hanging) == len(replies) == len(SITES)
    reply = replies.pop(SiteId("alpha-bad"))
    assert isinstance(reply.message, SiteFailure)
    assert reply.message.kind is FailureKind.DEADLINE
    assert {type(r.message) for r in replies.values()} == {SiteUpdate}


def test_site_that_hung_answers_again(played: Played):
    """When it has come back, it is asked like the others."""
    replies = by_site(played.after_hanging, toy_sites.HANGING_ROUND + 1)
    assert set(replies) == set(SITES)
    assert {type(r.message) for r in replies.values()} == {SiteUpdate}


def test_two_rounds_are_open_at_once(played: Played):
    """Every task has an id of its own, and one reply that bears it."""
    assert len(set(played.sent)) == len(played.sent) == 2 * len(SITES)
    assert sorted(r.task_id for r in played.overlapping) == sorted(played.sent)
    for index, round_index in enumerate((60, 61)):
        replies = by_site(played.overlapping, round_index)
        ids = played.sent[index * len(SITES) : (index + 1) * len(SITES)]
        assert [replies[site].task_id for site in SITES] == ids
        assert {type(r.message) for r in replies.values()} == {SiteUpdate}


def test_receive_waits_no_longer_than_it_may(played: Played):
    """The site hangs for longer."""
    assert played.too_early == []


def test_withdrawn_task_is_closed(played: Played):
    """What comes of it is late; all other tasks are answered, and nothing is open."""
    answered = [r for r in played.withdrawn if isinstance(r.message, SiteUpdate)]
    of_round = [r.message.site for r in answered if r.message.round_index == 62]
    assert set(SITES[2:]) <= set(of_round)
    assert played.nothing == []
