"""What every grid promises.

Starting an engine may take seconds, so each plays one script, ``support.grid_script``,
and the tests look at what came of it. To add a grid, write a function like
``in_process`` and list it in ``ENGINES``.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from support import toy_sites
from support.grid_script import (
    EVERY_SITE,
    JOB_TEXT,
    SITES,
    TASK,
    Played,
    play,
    secure_tasks,
    tasks,
)

from cloud_adapters.local.inproc_grid import InProcessGrid
from cloud_adapters.local.transcript import TranscriptGrid
from cloud_adapters.local.virtual_grid import Machine, VirtualGrid
from federation.clock import SystemClock, VirtualClock
from federation.ids import SiteId
from federation.messages import (
    FailureKind,
    MaskedUpdate,
    Reply,
    SecureAnswer,
    SecureStep,
    SiteEvaluation,
    SiteFailure,
    SiteUpdate,
)
from federation.protocols import Grid
from federation.wire import frame as wire

pytestmark = pytest.mark.slow

Server = Callable[[Grid], Any]


def in_process(server: Server, *, workers: int):
    """Play a script against the in-process grid."""
    handlers = {site: toy_sites.echo_site(site, JOB_TEXT) for site in EVERY_SITE}
    with InProcessGrid(handlers, clock=SystemClock(), workers=workers) as grid:
        return server(grid)


def in_virtual_time(server: Server):
    """Play a script in virtual time, where a site hangs on its own clock."""
    machines = {}
    for site in EVERY_SITE:
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


ENGINES = [
    pytest.param(partial(in_process, workers=1), id="in-process-1"),
    pytest.param(partial(in_process, workers=3), id="in-process-3"),
    pytest.param(with_transcript, id="in-process-with-transcript"),
    pytest.param(in_virtual_time, id="virtual"),
    # In two processes; with one: tests/integration/test_flower_engine.py.
    pytest.param(None, marks=(pytest.mark.flower, pytest.mark.slow), id="flower"),
]


@pytest.fixture(scope="module", params=ENGINES)
def played(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Played]:
    """The script, played by one engine; Flower's starts once for all that need it."""
    if request.param is None:
        yield request.getfixturevalue("flower_story").played
        return
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


def test_bytes_of_a_withdrawn_task_are_returned_once(played: Played):
    """Those of the hanging site; a task that has not gone out may have none."""
    sizes = {r.bytes_down for r in played.train if r.bytes_down}
    assert played.withdrawn_bytes
    first, *_ = played.withdrawn_bytes.values()
    assert first > 0
    assert all(abs(n - min(sizes)) < 200 for n in played.withdrawn_bytes.values())
    late = [r for r in played.withdrawn if r.task_id in played.withdrawn_bytes]
    assert {reply.bytes_down for reply in late} <= {0}
    assert played.again_bytes == {}
