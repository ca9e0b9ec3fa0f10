"""Which run is worked on next, from files and from what Flower says."""

import errno
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from support import event_samples
from support.small_jobs import small_job

from cloud_adapters.flower.facts import FlowerRun
from deploy.aggregator_host import run_list as runs, run_notes, run_queue
from deploy.aggregator_host.run_queue import (
    CoordinatorStart,
    FolderInUse,
    GiveUp,
    Outcome,
)
from federation import folder_lock
from federation.errors import (
    CheckpointMismatch,
    CorruptObject,
    FederationError,
    RunConflict,
    RunNotFound,
    StoreUnavailable,
    is_full,
)
from federation.event_log import to_line
from federation.events import RoundFinished, RunFinished, RunStarted
from federation.messages import FailureKind
from monitoring.runs.run_folder import REQUEST, RunFolder

RUNNING = FlowerRun(is_over=False, status="running")
OVER = FlowerRun(is_over=True, status="finished failed")


def handed(root: Path, name: str, at: float) -> RunFolder:
    run = RunFolder(root / "small" / name)
    run_queue.submit(small_job(num_sites=2), run, at=at)
    return run


def started(root: Path, flower_run: int, *, fruitless: int) -> None:
    (one,) = run_queue.handed_over(root).runs
    run_queue.note_start(one, flower_run, fruitless=fruitless)


def looked(
    dead: run_queue.DeadCoordinators, root: Path, now: float = math.inf
) -> list[tuple[RunFolder, int]]:
    return dead.look(run_queue.handed_over(root).runs, now)


def finish_rounds(run: RunFolder, number: int, *, times: int = 1) -> None:
    """Complete so many rounds, each so many times."""
    coordinator = [
        event
        for event in event_samples.two_sites(number)
        if isinstance(event, (RunStarted, RoundFinished))
    ]
    lines = [f"{to_line(event)}\n" for event in coordinator]
    run.events.write_text("".join(lines * times))


def test_only_runs_whose_turn_it_is_are_started(tmp_path: Path):
    """In the order of their requests, and each once."""
    late, early = handed(tmp_path, "a", 2.0), handed(tmp_path, "b", 1.0)
    queue = run_queue.handed_over(tmp_path).runs
    assert [one.run for one in queue] == [early, late]
    (action,) = run_queue.decide(queue, {}, {"b"})
    assert isinstance(action, CoordinatorStart)
    assert action.handed.run == early
    run_queue.note_start(action.handed, 7, fruitless=1)
    queue = run_queue.handed_over(tmp_path).runs
    assert not [*run_queue.decide(queue, {7: RUNNING}, {"b"})]
    assert not [*run_queue.decide(queue, {7: OVER}, set())]  # Another has its slots.
    run_queue.leave_outcome(early, Outcome(code=0, message="completed"))
    queue = run_queue.handed_over(tmp_path).runs
    (action,) = run_queue.decide(queue, {7: OVER}, {"a", "b"})
    assert isinstance(action, CoordinatorStart)
    assert action.handed.run == late


def test_a_run_that_ended_early_is_taken_up(tmp_path: Path):
    """Under its name, behind those that wait already, with all its attempts."""
    run, job = handed(tmp_path, "a", 1.0), small_job(num_sites=2)
    run_queue.ask_to_stop(run, at=0.0)
    started(tmp_path, 7, fruitless=run_queue.MAX_FRUITLESS_STARTS)
    with pytest.raises(RunConflict, match="has not ended"):
        run_queue.find_ended(job, tmp_path)
    run_queue.leave_outcome(run, Outcome(code=130, message="stopped"))
    other = handed(tmp_path, "0", 2.0)
    with pytest.raises(CheckpointMismatch, match=r"rounds: 9 here, \d there"):
        run_queue.find_ended(replace(job, rounds=9), tmp_path)
    assert run_queue.find_ended(job, tmp_path) == run
    run_queue.take_up(run, at=9.0)
    assert not (run.path / run_queue.STOP).exists()
    queue = run_queue.handed_over(tmp_path).runs
    assert [one.run for one in queue] == [other, run]
    assert queue[1].coordinator is None


def test_only_its_owners_run_is_taken_up(tmp_path: Path):
    """Two may have jobs of one name."""
    run, job = handed(tmp_path, "a", 1.0), small_job(num_sites=2)
    of_ann = RunFolder(run.path.with_name("b"))
    run_queue.submit(job, of_ann, at=2.0, owner="ann")
    for one in (run, of_ann):
        run_queue.leave_outcome(one, Outcome(code=130, message="stopped"))
    assert run_queue.find_ended(job, tmp_path) == run
    assert run_queue.find_ended(job, tmp_path, owner="ann") == of_ann
    with pytest.raises(RunNotFound, match="ann or operator"):
        run_queue.find_ended(job, tmp_path, owner="bob")


def test_a_persons_request_to_stop_is_no_pause(tmp_path: Path):
    """Whether it comes before or after that of a command that resumes the run."""
    run = handed(tmp_path, "a", 1.0)
    run_queue.ask_to_pause(run)
    assert run_queue.is_pause(run)
    for ask in (partial(run_queue.ask_to_stop, at=0.0), run_queue.ask_to_pause):
        ask(run)
        assert not run_queue.is_pause(run)


def test_only_what_ended_early_is_taken_up(tmp_path: Path):
    """Nothing is done twice, and no other run in its place."""
    job = small_job(num_sites=2)
    with pytest.raises(RunNotFound):
        run_queue.find_ended(job, tmp_path)
    run = handed(tmp_path, "a", 1.0)
    run_queue.leave_outcome(run, Outcome(code=0, message="completed"))
    with pytest.raises(RunConflict, match=r"is completed: .*--extend"):
        run_queue.find_ended(job, tmp_path)
    with pytest.raises(CheckpointMismatch, match="has 1 already"):
        run_queue.find_ended(job, tmp_path, extend=True)


def test_a_coordinator_that_left_its_lock_has_died(tmp_path: Path):
    """Told once, and after some looks: it may be about to leave its outcome."""
    run, dead = handed(tmp_path, "a", 1.0), run_queue.DeadCoordinators()
    started(tmp_path, 7, fruitless=1)
    with run.locked():
        assert not looked(dead, tmp_path)
    looks = [looked(dead, tmp_path) for _ in range(5)]
    assert looks == [[], [], [(run, 7)], [], []]


def test_a_coordinator_that_makes_way_has_time_to_tell_flower(tmp_path: Path):
    """It has noted its end; if it was killed then, its run does not wait a minute."""
    run, dead = handed(tmp_path, "a", 1.0), run_queue.DeadCoordinators()
    started(tmp_path, 7, fruitless=1)
    with run.locked():
        assert not looked(dead, tmp_path)
    finish_rounds(run, 2)
    *_, end = event_samples.two_sites(2)
    assert isinstance(end, RunFinished)
    with run.events.open("a") as events:
        events.write(f"{to_line(replace(end, status='interrupted'))}\n")
    looks = [looked(dead, tmp_path) for _ in range(9)]
    assert looks == [*[[]] * 7, [(run, 7)], []]


def test_a_service_that_starts_knows_a_coordinator_by_what_it_has_noted(tmp_path: Path):
    """Both were killed, and Flower would notice after a minute."""
    run = handed(tmp_path, "a", 1.0)
    (one,) = run_queue.handed_over(tmp_path).runs
    finish_rounds(run, 2)
    written = run.events.stat().st_mtime
    for at, expected in (
        (written - 9.0, [[], [], [(run, 7)]]),
        (written + 9.0, 3 * [[]]),
    ):
        run_queue.note_start(one, 7, fruitless=1, at=at)
        dead = run_queue.DeadCoordinators()
        looks = [looked(dead, tmp_path) for _ in range(3)]
        assert looks == expected
    run_queue.note_start(one, 7, fruitless=1, at=written - 9.0)
    with run.locked("6"):
        dead = run_queue.DeadCoordinators()
        looks = [looked(dead, tmp_path) for _ in range(3)]
    assert not any(looks)


def test_a_coordinator_that_was_started_in_the_future_has_died(tmp_path: Path):
    """By a clock that was set right since; Flower would wait until that time."""
    run = handed(tmp_path, "a", 1.0)
    (one,) = run_queue.handed_over(tmp_path).runs
    run_queue.note_start(one, 7, fruitless=1, at=100.0)
    for now, expected in ((101.0, 3 * [[]]), (99.0, [[], [], [(run, 7)]])):
        dead = run_queue.DeadCoordinators()
        looks = [looked(dead, tmp_path, now) for _ in range(3)]
        assert looks == expected


def test_a_coordinator_that_has_just_been_started_has_not_died(tmp_path: Path):
    """The one before it had the lock; it takes seconds until it has it, too."""
    run, dead = handed(tmp_path, "a", 1.0), run_queue.DeadCoordinators()
    started(tmp_path, 7, fruitless=1)
    with run.locked():
        looked(dead, tmp_path)
    started(tmp_path, 8, fruitless=1)
    looks = [looked(dead, tmp_path) for _ in range(10)]
    assert not any(looks)


def test_a_lock_is_that_of_its_holder(tmp_path: Path):
    """One that was stopped for a while may hold it when the next one is started."""
    run, dead = handed(tmp_path, "a", 1.0), run_queue.DeadCoordinators()
    started(tmp_path, 8, fruitless=1)
    with run.locked("7"):
        assert run.holder() == "7"
        assert not looked(dead, tmp_path)
    looks = [looked(dead, tmp_path) for _ in range(10)]
    assert not any(looks)
    with run.locked("8"):
        looked(dead, tmp_path)
    looks = [looked(dead, tmp_path) for _ in range(4)]
    assert looks == [[], [], [(run, 8)], []]
    assert run.holder() is None


@pytest.mark.parametrize("flower", [{7: OVER}, {}])
def test_a_coordinator_that_died_is_replaced(
    tmp_path: Path, flower: dict[int, FlowerRun]
):
    """Whether Flower has noticed or has forgotten it."""
    handed(tmp_path, "a", 1.0)
    started(tmp_path, 7, fruitless=1)
    (action,) = run_queue.decide(run_queue.handed_over(tmp_path).runs, flower)
    assert isinstance(action, CoordinatorStart)
    assert action.fruitless == 2


@pytest.mark.parametrize("fruitless", [0, 1, run_queue.MAX_FRUITLESS_STARTS])
def test_no_coordinator_is_started_that_could_only_make_way(
    tmp_path: Path, fruitless: int
):
    """Flower says that the last one is over, but it still holds the folder's lock."""
    run = handed(tmp_path, "a", 1.0)
    if fruitless:
        started(tmp_path, 7, fruitless=fruitless)
    with run.locked("7"):
        queue = run_queue.handed_over(tmp_path).runs
        for flower in ({7: OVER}, {}):
            (action,) = run_queue.decide(queue, flower)
            assert isinstance(action, FolderInUse), flower
    (action,) = run_queue.decide(queue, {7: OVER})
    assert not isinstance(action, FolderInUse)


def test_a_run_that_gets_nowhere_is_given_up(tmp_path: Path):
    """Rounds in between begin the count again; the next run has its turn."""
    run = handed(tmp_path, "a", 1.0)
    started(tmp_path, 7, fruitless=run_queue.MAX_FRUITLESS_STARTS)
    finish_rounds(run, 1)
    (action,) = run_queue.decide(run_queue.handed_over(tmp_path).runs, {7: OVER})
    assert isinstance(action, CoordinatorStart)
    assert action.fruitless == 1
    started(tmp_path, 8, fruitless=run_queue.MAX_FRUITLESS_STARTS)
    other = handed(tmp_path, "b", 2.0)
    given_up, begun = run_queue.decide(run_queue.handed_over(tmp_path).runs, {8: OVER})
    assert isinstance(given_up, GiveUp)
    assert "finished failed" in given_up.reason
    assert isinstance(begun, CoordinatorStart)
    assert begun.handed.run == other


@pytest.mark.parametrize("coordinator", [None, 7])
def test_run_that_is_stopped_before_it_begins_is_over(
    tmp_path: Path, coordinator: int | None
):
    """It may wait for sites that never come; the next one runs immediately."""
    run = handed(tmp_path, "a", 1.0)
    if coordinator is not None:
        started(tmp_path, coordinator, fruitless=1)
    other = handed(tmp_path, "b", 2.0)
    run_queue.ask_to_stop(run, at=0.0)
    ended, begun = run_queue.decide(run_queue.handed_over(tmp_path).runs, {7: RUNNING})
    assert isinstance(ended, GiveUp)
    assert (ended.code, ended.reason) == (130, "stopped before it started")
    assert ended.at_work == coordinator
    assert isinstance(begun, CoordinatorStart)
    assert begun.handed.run == other
    run_queue.leave_outcome(run, Outcome(code=ended.code, message=ended.reason))
    run_queue.leave_outcome(run, Outcome(code=1, message="Flower has ended"))
    assert run_queue.read(run).outcome.code == 130


def test_repeated_rounds_are_no_progress(tmp_path: Path):
    """Neither in ``ps`` nor where a coordinator is judged by what it has done."""
    run = handed(tmp_path, "a", 1.0)
    finish_rounds(run, 3)
    started(tmp_path, 7, fruitless=run_queue.MAX_FRUITLESS_STARTS)
    finish_rounds(run, 3, times=2)
    (one,) = run_queue.handed_over(tmp_path).runs
    assert one.rounds == 3
    (action,) = run_queue.decide([one], {7: OVER})
    assert isinstance(action, GiveUp)
    finish_rounds(run, 4)
    (one,) = run_queue.handed_over(tmp_path).runs
    (action,) = run_queue.decide([one], {7: OVER})
    assert isinstance(action, CoordinatorStart)
    assert action.fruitless == 1


def test_rounds_of_a_damaged_record_are_counted_without_it(tmp_path: Path):
    """A torn or damaged line ends neither the service nor ``ps``."""
    run = handed(tmp_path, "a", 1.0)
    finish_rounds(run, 2)
    with run.events.open("ab") as events:
        events.write(b'{"event": "RoundFinished", "round_index": \n')
        events.write(b'{"event": "RoundFinished", "round')
    (one,) = run_queue.handed_over(tmp_path).runs
    assert one.rounds == 2


def test_status_tells_what_a_coordinator_is_at(tmp_path: Path):
    """In ``ps`` and ``runs``: a run that the service resumes is not interrupted."""

    def status() -> str:
        (one,) = run_queue.handed_over(tmp_path).runs
        if run.exists():
            assert runs.summary(run)["status"] == one.status
        return one.status

    run = handed(tmp_path, "a", 1.0)
    assert status() == "waiting"
    started(tmp_path, 7, fruitless=1)
    assert status() == "waiting"  # For its coordinator, and then for its sites.
    finish_rounds(run, 2)
    assert status() == "waiting"  # Its service was restarted, say.
    with run.locked():
        assert status() == "running"
        (one,) = run_queue.handed_over(tmp_path).runs
        run_queue.note_start(one, 8, fruitless=1, at=4e9)
        assert status() == "waiting"  # For sites, before it goes on.
    run_queue.note_start(one, 8, fruitless=1, at=10.0)
    *_, end = event_samples.two_sites(2)
    assert isinstance(end, RunFinished)
    for ended, expected in (("interrupted", "waiting"), ("completed", "finishing")):
        finish_rounds(run, 2)
        with run.events.open("a") as events:
            events.write(f"{to_line(replace(end, status=ended))}\n")
        assert status() == expected
    run_queue.note_start(one, 9, fruitless=1, at=4e9)
    assert status() == "waiting"  # Another coordinator resumes it.
    run_queue.leave_outcome(run, Outcome(code=0, message=""))
    assert status() == "completed"


def test_a_site_that_fails_in_every_round_is_named(tmp_path: Path):
    """Although it is connected; in rounds with surplus answers nobody knows who."""
    run = handed(tmp_path, "a", 1.0)
    started(tmp_path, 7, fruitless=1)
    _, gcp = event_samples.TWO_SITES
    failures = tuple((index, gcp, FailureKind.CRASHED) for index in (1, 2, 3, 4))

    def away(rounds: int, *, failed: bool = True, kind: str = "") -> list[str]:
        events = event_samples.run(event_samples.Script(failures=failures))
        kept = [e for e in events if getattr(e, "round_index", 0) <= rounds]
        lines = [
            replace(e, failed=tuple((kind or k, n) for k, n in e.failed if failed))
            if isinstance(e, RoundFinished)
            else e
            for e in kept
            if not isinstance(e, RunFinished)
        ]
        run.events.unlink(missing_ok=True)
        run.events.write_text("".join(f"{to_line(e)}\n" for e in lines))
        (one,) = run_queue.handed_over(tmp_path).runs
        return [*one.away]

    assert not away(2)
    assert away(4) == [f"{gcp} (no update in its last 4 rounds)"]
    assert not away(4, failed=False)
    assert not away(5)
    assert not away(4, kind="surplus")  # As a replica's that is never the first.


def test_dead_site_beside_replicas_counts_as_failing():
    """Of replicas all but the first are surplus in every round."""
    events = event_samples.two_sites(1)
    (started,) = [event for event in events if isinstance(event, RunStarted)]
    (ended,) = [event for event in events if isinstance(event, RoundFinished)]
    notes = run_notes.RunNotes()
    notes.add(replace(started, replicas=(("a", "b"),)))
    failed = (("surplus", 1), ("crashed", 1))
    told = replace(ended, asked=("a", "b", "c"), answered=("a",), failed=failed)
    for _ in range(3):
        notes.add(told)
    assert notes.unheard == {"c": 3}


def test_a_folder_holds_one_run(tmp_path: Path):
    """And what is damaged says which file."""
    run = handed(tmp_path, "a", 1.0)
    with pytest.raises(RunConflict, match="choose another folder"):
        run_queue.submit(small_job(num_sites=2), run, at=2.0)
    (run.path / run_queue.OUTCOME).write_text('{"code": "0"}')
    with pytest.raises(CorruptObject, match=r"outcome\.json is damaged"):
        run_queue.read(run)
    assert run_queue.read(RunFolder(tmp_path / "none")) is None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (REQUEST, b""),
        (REQUEST, b"\xff\xfe"),
        (REQUEST, b'{"at": NaN}'),
        (REQUEST, b"[" * 100_000),
        (run_queue.COORDINATOR, b'{"flower_run": "x", "fruitless": 1, "rounds": 0}'),
        (run_queue.OUTCOME, b'{"code": "0"}'),
    ],
)
def test_a_damaged_run_keeps_nobody_waiting(tmp_path: Path, name: str, text: bytes):
    """It is left alone and told, with the file, and the next run has its turn."""
    damaged, sound = handed(tmp_path, "a", 1.0), handed(tmp_path, "b", 2.0)
    (damaged.path / name).write_bytes(text)
    queue = run_queue.handed_over(tmp_path)
    assert [one.run for one in queue.damaged] == [damaged]
    assert f"{damaged.path / name} is damaged" in queue.damaged[0].reason
    (action,) = run_queue.decide(queue.runs, {})
    assert isinstance(action, CoordinatorStart)
    assert action.handed.run == sound


def test_locks_are_seen_and_let_go(tmp_path: Path):
    """A lock that nobody holds is none, whether its file is there or not."""
    path = tmp_path / "folder" / "lock"
    assert not folder_lock.is_held(path)
    with folder_lock.hold(path, "taken"):
        assert folder_lock.is_held(path)
        with (
            pytest.raises(FederationError, match="taken"),
            folder_lock.hold(path, "taken"),
        ):
            pass
    assert not folder_lock.is_held(path)


def test_a_lock_that_is_a_link_is_not_written(tmp_path: Path):
    """Somebody else has put it there: what it names would be emptied."""
    run, other = RunFolder(tmp_path / "run"), tmp_path / "other"
    other.write_text("precious")
    run.path.mkdir()
    run.lock.symlink_to(other)
    with pytest.raises(StoreUnavailable), run.locked("7"):
        pass
    assert other.read_text() == "precious"


def test_no_coordinator_is_started_where_none_could_write(tmp_path: Path):
    """The complaint names the folder; the try leaves nothing."""
    run = handed(tmp_path, "a", 1.0)
    before = sorted(run.path.iterdir())
    run_queue.check_room(run)
    assert sorted(run.path.iterdir()) == before
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StoreUnavailable, match=str(tmp_path / "file")):
        run_queue.check_room(RunFolder(tmp_path / "file"))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EACCES])
def test_a_full_disk_is_known_by_its_cause(number: int):
    """However deep: a run whose disk is full continues when it is not."""
    error = StoreUnavailable("cannot write")
    assert not is_full(error)
    error.__cause__ = OSError(number, "of the system")
    assert is_full(error) == (number != errno.EACCES)
