"""Turns of runs, their owners and what they have used, from files."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import event_samples
from support.event_samples import Script
from support.small_jobs import small_job

from cloud_adapters.flower.facts import Connected, FlowerRun
from deploy.aggregator_host import (
    admission,
    monitor_process,
    newcomers,
    owners,
    run_list,
    run_notes,
    run_queue,
)
from deploy.aggregator_host.config import AggregatorConfig, AggregatorFile, QueueSpec
from deploy.aggregator_host.enrolment_book import (
    BookFile,
    EnrolledSite,
    EnrolmentBook,
)
from deploy.aggregator_host.owners import Owner, Usage
from deploy.aggregator_host.run_queue import (
    GiveUp,
    Outcome,
    QueuedRun,
    Requeue,
    TurnOver,
)
from deploy.aggregator_host.scheduler import Plan
from federation.clock import VirtualClock
from federation.errors import CorruptObject, JobError
from federation.event_log import EventWriter, to_line
from federation.events import (
    ModelEvaluated,
    RoundFinished,
    RunFinished,
    RunStarted,
    SiteAnswered,
)
from federation.ids import SiteId
from federation.messages import Resources
from federation.platform_identity import PlatformIdentity
from monitoring.runs.run_folder import REQUEST, RunFolder
from monitoring.views.run_fold import fold
from monitoring.web import run_metrics
from monitoring.web.run_feed import RunFeed
from monitoring.web.run_metrics import RunsCollector
from privacy.secagg.agreement import roster
from privacy.secagg.agreement.identity import generate
from privacy.secagg.agreement.roster import RELAY, SITE, Roster, RosterEntry

RUNNING = FlowerRun(is_over=False, status="running")
OVER = FlowerRun(is_over=True, status="finished failed")
JOB = small_job(num_sites=2)
SITES = frozenset(site.name for site in JOB.sites)


def config(folder: Path, **queue: Any) -> AggregatorConfig:
    file = AggregatorFile(queue=QueueSpec(**queue))
    return AggregatorConfig(file=file, folder=folder)


def submitted(folder: Path, name: str, at: float = 1.0, **about: Any) -> RunFolder:
    run = RunFolder(folder / "runs" / "small" / name)
    run_queue.submit(JOB, run, at=at, **about)
    return run


def queued(run: RunFolder) -> QueuedRun:
    found = run_queue.read(run)
    assert found is not None
    return found


def started(run: RunFolder, at: float, flower_run: int = 7) -> None:
    run_queue.note_start(queued(run), flower_run, fruitless=1, at=at)


def test_newcomers_are_noted_for_runs_while_a_slot_of_theirs_is_free(tmp_path: Path):
    """Not relays, revoked sites, or sites that only the roster or a run has."""
    names = ["a", "b", "c", "d", JOB.sites[0].name]
    people = {name: generate(os.urandom) for name in names}
    entries = [
        RosterEntry(
            site=SiteId(name),
            organisation=name,
            public_key=people[name].public.key,
            role=RELAY if name == "c" else SITE,
        )
        for name in sorted(names)
    ]
    pinned = Roster(
        serial=3,
        aggregator_organisation="x",
        aggregator_key=generate(os.urandom).public.key,
        sites=tuple(entries),
    )
    (tmp_path / "roster.toml").write_text(roster.dumps(pinned))
    book = EnrolmentBook()
    for number, name in enumerate(("a", "b", "c", JOB.sites[0].name)):
        member = EnrolledSite(
            site=name,
            organisation=name,
            release="1",
            identity=people[name].public.key.hex(),
            node_key="",
            node_id=str(number),
            enrolled_at=0.0,
            certificates=(),
            machine=PlatformIdentity(platform="aws", account="1", principal="x"),
        )
        book = book.with_member(member)
    withdrawn = book.without("b", at=1.0)
    BookFile(folder=tmp_path).write(withdrawn.with_member(book.members[1]))
    runs = [queued(submitted(tmp_path, name)) for name in "xy"]

    def found() -> list[list[str]]:
        newcomers.note(tmp_path, runs, {})
        read = (newcomers.read(one.run) for one in runs)
        return [[each.site for each in one.sites] if one else [] for one in read]

    assert found() == [["a"], ["a"]]
    request = runs[1].request
    runs[1] = replace(runs[1], request=replace(request, sites=(*request.sites, "a")))
    assert found() == [[], []]


def noted(run: RunFolder, at: float, *, ends: bool = False) -> None:
    """Note two rounds at a time."""
    kinds = (RunStarted, RoundFinished, *([RunFinished] if ends else []))
    events = [e for e in event_samples.two_sites(2) if isinstance(e, kinds)]
    run.events.write_text("".join(f"{to_line(event)}\n" for event in events))
    os.utime(run.events, (at, at))


def order(
    folder: Path, flower: dict[int, FlowerRun] | None, now: float, **queue: Any
) -> admission.Admission:
    runs = run_queue.handed_over(folder / "runs").runs
    found = config(folder, **queue)
    return admission.admission(found, runs, flower, now=now, lengths=True)


def test_a_run_makes_way_and_waits_with_what_it_has_used(tmp_path: Path):
    run = submitted(tmp_path, "a", owner="ann", priority=3)
    assert not run_queue.is_to_stop(run)
    started(run, 100.0)
    run_queue.ask_to_yield(run)
    with pytest.raises(TurnOver) as over:
        run_queue.is_to_stop(run)
    assert run_queue.goes_on(over.value)
    noted(run, 160.0)
    assert not [*run_queue.decide([queued(run)], {7: RUNNING}, set())]
    (action,) = run_queue.decide([queued(run)], {7: OVER}, {"a"})
    assert isinstance(action, Requeue)
    run_queue.requeue(action.handed, at=170.0)
    found = queued(run)
    assert (found.yields, found.coordinator, found.stop) == (False, None, False)
    asked = found.request
    assert (asked.at, asked.since, asked.used) == (1.0, 170.0, 70.0)
    assert (asked.owner, asked.priority) == ("ann", 3)
    assert frozenset(asked.sites) == SITES


def test_a_person_who_stops_a_run_that_makes_way_is_heard(tmp_path: Path):
    run = submitted(tmp_path, "a")
    started(run, 100.0)
    noted(run, 101.0)
    run_queue.ask_to_yield(run)
    run_queue.ask_to_stop(run, at=0.0)
    assert run_queue.is_to_stop(run)
    run_queue.requeue(queued(run), at=170.0)
    (action,) = run_queue.decide([queued(run)], {7: OVER}, set())  # Not its turn.
    assert isinstance(action, GiveUp)
    assert (action.code, action.reason) == (130, "stopped while it waited")


@pytest.mark.parametrize(("deadline", "limit"), [(600.0, 720.0), (20.0, 150.0)])
def test_a_coordinator_that_notes_nothing_hangs(
    deadline: float, limit: float, tmp_path: Path
):
    """After one deadline and a margin; and not while it writes its report."""
    run = submitted(tmp_path, "a")
    table = json.loads((run.path / REQUEST).read_text())
    assert table["deadline_seconds"] == JOB.schedule.round_deadline_seconds
    (run.path / REQUEST).write_text(json.dumps(table | {"deadline_seconds": deadline}))
    started(run, 1000.0)

    def hangs(after: float) -> bool:
        return queued(run).hangs(1000.0 + after, connect_seconds=20.0)

    assert not hangs(50.0)
    assert hangs(51.0)
    run_queue.note_connected(run, Connected(there=(), missing=("a",), seconds=1.0))
    os.utime(run.path / run_queue.CONNECTED, (1015.0, 1015.0))
    assert not hangs(51.0)
    noted(run, 1020.0)
    assert not hangs(20.0 + limit)
    assert hangs(21.0 + limit)
    # A wait for a site that may come back has ended: the deadline begins.
    os.utime(run.path / run_queue.CONNECTED, (1110.0, 1110.0))
    assert not hangs(110.0 + limit)
    assert hangs(111.0 + limit)
    noted(run, 1120.0, ends=True)
    assert queued(run).is_finishing
    assert not hangs(9e9)


def test_a_run_that_only_writes_its_report_has_left_its_sites(tmp_path: Path):
    one, two = submitted(tmp_path, "a"), submitted(tmp_path, "b", at=2.0)
    started(one, 10.0)
    noted(one, 20.0)
    assert order(tmp_path, {7: RUNNING}, 21.0).plan().start == []
    noted(one, 20.0, ends=True)
    assert order(tmp_path, {7: RUNNING}, 21.0).plan().start == [two.path.name]


def test_a_frozen_coordinator_holds_no_sites(tmp_path: Path):
    """Flower has given it up; it still holds the lock, and does not come back."""
    one, two = submitted(tmp_path, "a"), submitted(tmp_path, "b", at=2.0)
    started(one, 10.0)
    with one.locked("7"):
        assert order(tmp_path, {7: RUNNING}, 11.0).plan().start == []
        assert order(tmp_path, {7: OVER}, 11.0).plan().start == [two.path.name]
    assert order(tmp_path, {7: OVER}, 11.0).plan().start == [one.path.name]


def test_sites_say_how_many_runs_they_take(tmp_path: Path):
    """The newest word counts; one that has said nothing takes one."""
    runs = [submitted(tmp_path, name, at=float(n)) for n, name in enumerate("abc")]
    assert order(tmp_path, {}, 9.0, max_runs=4).plan().start == ["a"]
    for at, number in ((10.0, 3), (20.0, 2)):
        run = runs[int(at == 20.0)]
        run_queue.note_slots(run, {SiteId(name): number for name in SITES})
        os.utime(run.path / run_queue.SLOTS, (at, at))
    assert order(tmp_path, {}, 9.0, max_runs=4).plan().start == ["a", "b"]
    (runs[1].path / run_queue.SLOTS).write_text("[")
    assert order(tmp_path, {}, 9.0, max_runs=4).plan().start == ["a", "b", "c"]


def test_a_request_of_an_earlier_release_is_read(tmp_path: Path):
    """It said only when: the operator's, at the sites of the job."""
    run = submitted(tmp_path, "a", owner="ann")
    (run.path / REQUEST).write_text('{"at": 5.0}')
    found = queued(run).request
    assert (found.owner, found.priority, found.at) == ("operator", 0, 5.0)
    assert frozenset(found.sites) == SITES


def test_usage_is_added_up_over_an_owners_runs(tmp_path: Path):
    """Whatever its weight; quotas stop what waits and what works, by name."""
    run = submitted(tmp_path, "a", owner="ann")
    started(run, 0.1)
    noted(run, 1000.0)
    runs = run_queue.handed_over(tmp_path / "runs").runs
    used = admission.usage(config(tmp_path), runs, "ann", 1800.1)
    assert used.site_hours == pytest.approx(1.0)
    rounds = [e for e in event_samples.two_sites(2) if isinstance(e, RoundFinished)]
    total = sum(e.bytes_down + e.bytes_up for e in rounds)
    assert used.gigabytes == pytest.approx(total / 1e9)
    assert admission.usage(config(tmp_path), runs, "bob", 1800.1) == Usage(
        site_hours=0.0, gigabytes=0, epsilon=0, dollars=0
    )
    quota = Usage(site_hours=1.5)
    owners.change(tmp_path, "ann", lambda _: Owner(name="ann", quota=quota))
    collector = RunsCollector(list)
    for hours, key in ((0.55, None), (0.65, 0.8), (0.8, 1.0)):
        at = 3600 * hours + 0.1
        found = monitor_process._of_runs(config(tmp_path), collector, at)
        keys = {alert.key for alert in found if alert.key.startswith("owner")}
        assert keys == ({f"owner ann/site_hours/1.5/{key}"} if key else set())
    assert not order(tmp_path, {7: RUNNING}, 1800.1).plan().pause
    plan = order(tmp_path, {7: RUNNING}, 3600.1).plan()
    assert plan.pause == ["a"]
    submitted(tmp_path, "b", owner="ann")
    waits = order(tmp_path, {7: RUNNING}, 3600.1).plan().waits
    assert (
        waits["b"].text()
        == "a quota that allows it: owner 'ann' has used 2 of 1.5 site-hours (quota "
        "site_hours)"
    )


def test_usage_counts_half_after_a_day(tmp_path: Path):
    """For whose turn it is; a quota counts all of it."""
    run = submitted(tmp_path, "a", owner="ann")
    started(run, 100.0)
    run_queue.leave_outcome(run, Outcome(code=0, message=""))
    os.utime(run.path / run_queue.OUTCOME, (200.0, 200.0))
    runs = run_queue.handed_over(tmp_path / "runs").runs
    found = [
        admission.admission(config(tmp_path), runs, {}, now=200.0 + days * 86_400.0)
        for days in (0, 1, 2)
    ]
    assert [each.shares["ann"].used for each in found] == pytest.approx(
        [200.0, 100.0, 50.0]
    )
    used = admission.usage(config(tmp_path), runs, "ann", 86_600.0).site_hours
    assert used == pytest.approx(200.0 / 3600.0)


def test_run_that_its_sites_refused_is_on_the_page_and_in_the_metrics(tmp_path: Path):
    """It has no events; metrics name it for a day, as alerts do."""
    run, clock = submitted(tmp_path, "a"), VirtualClock(time.time())
    why = "site b does not take part\n"
    run_queue.leave_outcome(run, Outcome(code=1, message=why * 100))
    (row,) = run_list.of_aggregator(config(tmp_path), clock).rows()
    assert (row["name"], row["job"], row["status"]) == ("a", "small", "failed")
    assert row["note"].startswith("site b does not take part site b")
    assert len(row["note"]) <= run_list.MAX_NOTE_CHARS

    def told() -> dict[str, str]:
        found = monitor_process._collector(config(tmp_path), clock).collect()
        status = next(each for each in found if each.name == "crossfed_run_status")
        return {s.labels["run"]: s.labels["status"] for s in status.samples}

    assert told() == {"a": "failed"}
    clock.sleep(monitor_process.RECENT_SECONDS + 60)
    assert told() == {}


def test_run_that_has_made_way_waits_wherever_one_looks(tmp_path: Path):
    """In the list, on its page, which offers no button, and in the metrics."""
    run, clock = submitted(tmp_path, "a"), VirtualClock(time.time())
    events = event_samples.run(Script(rounds=4, stop_after=2))
    assert isinstance(events[-1], RunFinished)
    started(run, 100.0)
    with EventWriter(run.events) as write:
        for event in [*events[:-1], replace(events[-1], status="interrupted")]:
            write(event)
    pages = run_list.of_aggregator(config(tmp_path), clock)
    feed = RunFeed(run, queued=pages.queued)
    feed.look()

    def words() -> set[str]:
        page = feed.page(clock.now(), whole=False)
        assert page is not None
        assert 'status interrupted"' not in page.sections["masthead"]
        found = monitor_process._collector(config(tmp_path), clock).collect()
        status = next(each for each in found if each.name == "crossfed_run_status")
        (row,) = pages.rows()
        return {row["status"], page.state, status.samples[0].labels["status"]}

    # The service has not looked yet, and nobody may resume the run.
    assert "stopped" not in words()
    run_queue.requeue(queued(run), at=200.0)
    assert words() == {"waiting"}
    assert not feed.is_over
    with EventWriter(run.events) as write:
        write(replace(events[-1], status="stopped"))
    run_queue.leave_outcome(run, Outcome(code=1, message=""))
    feed.look()
    page = feed.page(clock.now())
    assert page is not None
    assert page.state == "stopped"
    # Who has the page open sees that another one resumes the run.
    assert not feed.is_over
    run_queue.take_up(run, at=300.0)
    assert words() == {"waiting"}
    started(run, 1e10)
    with run.locked():
        assert words() == {"waiting"}


def test_old_run_that_goes_on_keeps_its_alerts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """However many newer ones have ended meanwhile."""
    monkeypatch.setattr(run_metrics, "MAX_RUNS", 2)
    for name in "abcd":
        run = submitted(tmp_path, name)
        noted(run, 10.0)
        if name != "a":
            run_queue.leave_outcome(run, Outcome(code=0, message="completed"))
    collector = monitor_process._collector(config(tmp_path), VirtualClock(1e9))
    assert set(collector.look()) == {"a", "d"}


def test_progress_is_read_on_from_look_to_look(tmp_path: Path):
    """Repeated and killed rounds count; a log that is another one is read anew."""
    log, events = tmp_path / "events.jsonl", event_samples.resumed()
    assert run_notes.read(log).events == []
    for number, event in enumerate(events, 1):
        with EventWriter(log) as write:
            write(event)
        found = run_notes.read(log)
        view = fold(events[:number])
        assert run_notes.num_bytes(log) == view.bytes_up + view.bytes_down
    assert view.superseded.bytes_up > 0
    ends = [e for e in events if isinstance(e, RoundFinished)]
    evaluated = [e for e in events if isinstance(e, ModelEvaluated)]
    assert found.loss == pytest.approx(evaluated[-1].pooled.loss)
    assert not found.is_noisy
    noised = tmp_path / "noised.jsonl"
    with EventWriter(noised) as write:
        for event in event_samples.private(3):
            write(event)
    assert run_notes.read(noised).is_noisy
    done = [e for e in found.events if isinstance(e, RoundFinished)]
    assert [e.round_index for e in done] == [e.round_index for e in ends]
    assert {e.asked for e in done} == {()}
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join([*lines[:4], b"{torn\n", *lines[4:-1], lines[-1][:9]]))
    assert len(run_notes.read(log).events) in {len(found.events), len(found.events) - 1}
    log.unlink()
    assert run_notes.read(log).events == []


def test_dollars_are_time_and_bytes_at_the_prices_that_are_stated(tmp_path: Path):
    """And where a price is not, an owner with such a quota has no run."""
    run = submitted(tmp_path, "a", owner="ann")
    started(run, 0.1)
    noted(run, 1000.0)
    sample = event_samples.two_sites(2)
    events = [event for event in sample if not isinstance(event, RunFinished)]
    lines = [f"{to_line(event)}\n" for event in events]
    for name, site in zip(events[0].sites, sorted(SITES), strict=True):
        lines = [line.replace(name, site) for line in lines]
    run.events.write_text("".join(lines[:-6]))  # Without the last round.
    runs = run_queue.handed_over(tmp_path / "runs").runs
    made = Owner(name="ann", quota=Usage(dollars=4.0))
    owners.change(tmp_path, "ann", lambda _: made)
    priced = config(tmp_path, prices="speeds.toml")

    def plan() -> Plan:
        flower = {7: RUNNING}
        return admission.admission(priced, runs, flower, now=3600.1).plan()

    assert admission.usage(priced, runs, "ann", 3600.1).dollars is None
    assert plan().pause == ["a"]
    with pytest.raises(JobError, match=r"dollars.*queue\.prices"):
        admission.check_submission(priced, JOB, "ann", 0, now=9.0)
    speed = (
        "train_examples_per_second = 1.0\nevaluate_examples_per_second = 1.0\n"
        "down_bytes_per_second = 1.0\nup_bytes_per_second = 1.0\n"
    )
    tables = [
        f'[[sites]]\nname = "{site}"\n{speed}dollars_per_hour = {price}\n'
        f"dollars_per_gigabyte = 100.0\n"
        for site, price in zip(sorted(SITES), (1.0, 2.0), strict=True)
    ]
    file = tmp_path / "speeds.toml"
    file.write_text("dollars_per_hour = 0.5\n" + tables[0])
    assert admission.usage(priced, runs, "ann", 3600.1).dollars is None
    file.write_text("dollars_per_hour = 0.5\n" + "".join(tables))
    sent = sum(site.bytes_up for site in run.view().sites if site.site in SITES)
    used = admission.usage(priced, runs, "ann", 3600.1).dollars
    assert used == pytest.approx(1.0 + 2.0 + 0.5 + sent / 1e7)
    assert not plan().pause
    assert admission.check_submission(priced, JOB, "ann", 0, now=9.0) == "ann"
    owners.change(tmp_path, "ann", lambda _: replace(made, quota=Usage(dollars=3.0)))
    assert plan().pause == ["a"]
    # Bytes of its last minute count as soon as it has ended.
    run.events.write_text("".join(lines))
    run_queue.leave_outcome(run, Outcome(code=0, message=""))
    os.utime(run.path / run_queue.OUTCOME, (3600.1, 3600.1))
    then = sum(site.bytes_up for site in run.view().sites if site.site in SITES)
    assert then > sent > 0
    runs = run_queue.handed_over(tmp_path / "runs").runs
    used = admission.usage(priced, runs, "ann", 3600.1).dollars
    assert used == pytest.approx(1.0 + 2.0 + 0.5 + then / 1e7)


def test_run_waits_for_memory_that_its_job_states_or_sites_have_reported(
    tmp_path: Path,
):
    """What is not known takes none, and a run has a site for itself in any case."""
    first, second = sorted(SITES)
    limits = {SiteId(first): (4, 1000, 0), SiteId(second): (4, 0, 500)}

    def run_of(name: str, job: str, at: float, **needs: int) -> RunFolder:
        run = RunFolder(tmp_path / "runs" / job / name)
        run_queue.submit(small_job(num_sites=2, schedule=needs), run, at=at)
        return run

    def waits() -> dict[str, str]:
        queue = run_queue.handed_over(tmp_path / "runs").runs
        about = config(tmp_path, max_runs=9)
        found = admission.admission(about, queue, {7: RUNNING}, now=9.0).plan()
        return {name: wait.text() for name, wait in found.waits.items()}

    works = run_of("a", "stated", 1.0, memory_mib=700, gpu_memory_mib=300)
    started(works, 1.0)
    run_queue.note_slots(works, limits)
    run_of("b", "more", 2.0, memory_mib=400)
    assert waits() == {"b": f"400 MiB of memory at {first} (run a)"}
    (tmp_path / "runs" / "more" / "b" / REQUEST).unlink()
    run_of("c", "gpus", 3.0, gpu_memory_mib=201)
    assert waits() == {"c": f"201 MiB of GPU memory at {second} (run a)"}
    (tmp_path / "runs" / "gpus" / "c" / REQUEST).unlink()
    run_of("d", "fits", 4.0, memory_mib=300, gpu_memory_mib=200)
    run_of("e", "unknown", 5.0)
    assert waits() == {}
    before = run_of("f", "unknown", 0.5)
    used = Resources(
        busy_seconds=1.0, cpu_seconds=1.0, peak_memory_bytes=301 << 20, method="process"
    )
    events = [
        replace(event, site=first, resources=used)
        if isinstance(event, SiteAnswered)
        else event
        for event in event_samples.two_sites(2)
    ]
    before.events.write_text("".join(f"{to_line(event)}\n" for event in events))
    run_queue.leave_outcome(before, Outcome(code=0, message=""))
    (tmp_path / "runs" / "fits" / "d" / REQUEST).unlink()
    assert waits() == {"e": f"301 MiB of memory at {first} (run a)"}
    (works.path / REQUEST).unlink()
    assert waits() == {}


def test_a_turn_lasts_until_a_round_has_ended(tmp_path: Path):
    """Whatever its start takes: two runs would start in turn, and neither work."""
    runs = [submitted(tmp_path, name, owner=name) for name in "ab"]
    started(runs[0], 100.0)
    assert not order(tmp_path, {7: RUNNING}, 1000.0, slice_seconds=20.0).plan().pause
    noted(runs[0], 1000.0)
    events = [e for e in event_samples.two_sites(1) if isinstance(e, RoundFinished)]
    lines = [f"{to_line(replace(event, at=900.0))}\n" for event in events]
    runs[0].events.write_text(runs[0].events.read_text() + "".join(lines))
    plan = order(tmp_path, {7: RUNNING}, 1000.0, slice_seconds=20.0).plan()
    assert plan.pause == ["a"]


def test_what_a_run_still_takes_follows_its_rounds_and_not_its_start(tmp_path: Path):
    """Rounds of 3 s, the first of 10, that began 20 s after the coordinator."""
    sample = event_samples.two_sites(2)
    (begun,) = (e for e in sample if isinstance(e, RunStarted))
    (ended, *_) = (e for e in sample if isinstance(e, RoundFinished))
    rounds = [
        replace(ended, round_index=index, at=at, seconds=seconds)
        for index, at, seconds in (
            *((1, 30.0, 10.0), (2, 33.0, 2.9), (3, 36.0, 2.9), (4, 39.0, 2.9)),
        )
    ]
    job = small_job(num_sites=2, rounds=20)
    for name in ("a", "b"):
        folder = RunFolder(tmp_path / "runs" / "small" / name)
        run_queue.submit(job, folder, at=float(name == "b"))
    run = RunFolder(tmp_path / "runs" / "small" / "a")
    run.events.write_text(
        "".join(f"{to_line(e)}\n" for e in (replace(begun, at=20.0), *rounds))
    )
    started(run, 0.5)
    works, waits = order(tmp_path, {7: RUNNING}, 40.0).candidates
    assert works.seconds_left == pytest.approx(16 * 3.0 - 1.0)
    # One that begins has its coordinator to start, too.
    assert waits.seconds_left == pytest.approx(26.5 + 20 * 3.0)
    assert works.round_seconds == waits.round_seconds == pytest.approx(3.0)


def check(folder: Path, owner: str, priority: int = 0, epsilon: float = 0.0) -> str:
    job = JOB
    if epsilon:
        private = {"unit": "record", "target_epsilon": epsilon, "clip_norm": 1.0}
        job = small_job(
            num_sites=2,
            aggregation={"weights": "uniform"},
            privacy={"differential_privacy": private},
        )
    return admission.check_submission(config(folder), job, owner, priority, now=9.0)


def test_what_no_quota_fits_is_refused_when_it_is_submitted(tmp_path: Path):
    assert check(tmp_path, "operator", 100) == "operator"
    with pytest.raises(JobError, match="no owner 'ann'"):
        check(tmp_path, "ann")
    made = Owner(name="ann", max_priority=2, quota=Usage(epsilon=3.0))
    owners.change(tmp_path, "ann", lambda _: made)
    assert check(tmp_path, "ann", 2, epsilon=3.0) == "ann"
    for priority in (3, -1):
        with pytest.raises(JobError, match="priorities from 0 to 2"):
            check(tmp_path, "ann", priority)
    with pytest.raises(JobError, match=r"quota epsilon") as refused:
        check(tmp_path, "ann", epsilon=3.1)
    assert refused.value.key == "privacy.differential_privacy.target_epsilon"
    # A run that has not ended may still spend all that it plans.
    private = {"unit": "record", "target_epsilon": 2.0}
    job = small_job(
        num_sites=2,
        aggregation={"weights": "uniform"},
        privacy={"differential_privacy": private},
    )
    run = RunFolder(tmp_path / "runs" / "small" / "a")
    run_queue.submit(job, run, at=1.0, owner="ann")
    with pytest.raises(JobError, match=r"open runs may spend 2\b"):
        check(tmp_path, "ann", epsilon=1.1)
    assert check(tmp_path, "ann", epsilon=1.0) == "ann"
    assert check(tmp_path, "ann") == "ann"
    run_queue.leave_outcome(run, Outcome(code=1, message="failed"))
    assert check(tmp_path, "ann", epsilon=3.0) == "ann"
    nothing = replace(made, quota=Usage(gigabytes=0.0))
    owners.change(tmp_path, "ann", lambda before: replace(nothing, token=before.token))  # type: ignore[union-attr]
    with pytest.raises(JobError, match=r"0 of 0 GB"):
        check(tmp_path, "ann")


def test_owners_are_kept_and_a_damaged_file_is_no_empty_one(tmp_path: Path):
    owners.change(tmp_path, "bob", lambda _: Owner(name="bob", weight=2.0))
    owners.change(tmp_path, "ann", lambda _: Owner(name="ann"))
    found = owners.read(tmp_path)
    assert [one.name for one in found.owners] == ["ann", "bob"]
    assert (tmp_path / owners.FILE).stat().st_mode & 0o777 == 0o600
    (tmp_path / owners.FILE).write_text("{")
    with pytest.raises(CorruptObject, match="restore it"):
        owners.read(tmp_path)
