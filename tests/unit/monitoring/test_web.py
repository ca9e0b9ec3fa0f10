"""The live page: what it shows, what it sends again, and whom it lets in."""

import asyncio
import json
import re
import shutil
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from support import event_samples
from support.event_samples import Script

from federation.clock import SystemClock
from federation.errors import FederationError
from federation.event_log import EventWriter
from federation.events import (
    Event,
    ModelEvaluated,
    RoundStarted,
    RunFinished,
    RunStarted,
    SiteAnswered,
    SiteFailed,
)
from federation.messages import Energy, FailureKind, Resources
from federation.rounds.cost import SiteSpeed, Speeds
from monitoring.pages import figures, plots, report
from monitoring.runs import event_tail, fold_cache, run_reader
from monitoring.runs.run_folder import RunFolder
from monitoring.runs.run_reader import RunReader
from monitoring.units import format_fraction
from monitoring.views import run_fold, run_plan
from monitoring.views.result_json import result
from monitoring.views.run_fold import fold
from monitoring.views.run_plan import LinkBytes, RunPlan
from monitoring.web import app as web_app
from monitoring.web.app import Changes, Shown, _SharedFeed, _stream, live_app
from monitoring.web.run_feed import INK, SECTIONS, Page, RunFeed, charts
from monitoring.web.run_metrics import RunsCollector

PORT, TOKEN, BEARER = 8642, "a-token-of-many-bits", "another-token"
BASE = f"http://127.0.0.1:{PORT}"
NOW = event_samples.START + 30
HOSTILE = "</pre><script>alert('x')</script>&"


def _write(run: RunFolder, events: list[Event]) -> None:
    with EventWriter(run.events) as log:
        for event in events:
            log(event)


def _page(feed: RunFeed) -> Page:
    feed.look()
    page = feed.page(NOW)
    assert page is not None
    return page


@pytest.mark.slow
def test_sections_are_those_of_the_report(tmp_path: Path) -> None:
    """Each number has the same digits, because each section is the report's own."""
    run = RunFolder(tmp_path)
    _write(run, event_samples.run(Script(epsilon_cap=8.0)))
    page = _page(RunFeed(run))
    whole = report.render(run.view(), "", {}, figures=())
    for name in SECTIONS[1:]:  # The first says that the page is live.
        assert page.sections[name].strip() in whole


@pytest.mark.slow
@pytest.mark.parametrize("reports", [2, 1, 0])
def test_page_has_dollars_energy_and_utilisation_of_the_report(
    tmp_path: Path, reports: int
) -> None:
    """At the prices of the plan; energy of the sites that let it leave."""
    run, sites = RunFolder(tmp_path), event_samples.TWO_SITES
    events = [
        replace(event, resources=_taken(reports=event.site in sites[:reports]))
        if isinstance(event, SiteAnswered)
        else event
        for event in event_samples.run(Script(rounds=4))
    ]
    _write(run, events)
    speed = SiteSpeed(
        name=sites[0],
        train_examples_per_second=9.0,
        evaluate_examples_per_second=9.0,
        down_bytes_per_second=1e6,
        up_bytes_per_second=1e6,
        dollars_per_hour=30.0,
    )
    speeds = Speeds(dollars_per_hour=12.0, sites=(speed,))
    links = tuple(LinkBytes(site=s, down=(1, 2), up=(3, 4)) for s in sites)
    costs = (("aggregator", 0.1), (f"site {sites[0]}", 0.2))
    plan = RunPlan(
        submitted_at=event_samples.START,
        links=links,
        speeds=speeds,
        seconds=(("rounds", 9.0),),
        dollars=costs,
        prices_of="2026-01-02",
    )
    run_plan.write(plan, run.path)
    view, page = run.view(), _page(RunFeed(run))
    whole = report.render(view, "", {}, figures=(), plan=plan)
    for name in SECTIONS[1:]:
        assert page.sections[name].strip() in whole
    (total,) = [
        row
        for row in run_plan.rows(plan, view)
        if row.unit == "dollars" and row.is_total
    ]
    assert total.actual > 0
    summary, planned = page.sections["summary"], page.sections["plan"]
    for section in (summary, planned):
        assert f">{total.actual:,.4f}<" in section
        assert "0.3000" in section
    busy = sum(site.used.busy_seconds for site in view.sites if site.used)
    share = format_fraction(busy / view.totals.site_seconds)
    assert f">{share}<" in summary
    # Four rounds of 1 to 2 kJ at each site that reports it.
    assert (f"{4 * reports} to {8 * reports} kJ" in summary) == bool(reports)
    assert ("of 1 of 2 sites" in summary) == (reports == 1)


def _taken(*, reports: bool) -> Resources:
    energy = Energy(joules=(1e3, 2e3), grams=None, method="RAPL")
    return Resources(
        busy_seconds=0.5,
        cpu_seconds=None,
        peak_memory_bytes=None,
        method="process",
        energy=energy if reports else None,
    )


def test_page_lists_no_more_links_than_sites() -> None:
    """Each refresh would send the 2,000 rows of 1,000 sites."""
    names = tuple(f"site-{at:03d}" for at in range(report.MAX_SITE_ROWS + 50))
    view = fold(event_samples.run(Script(sites=names, rounds=1)))
    links = tuple(LinkBytes(site=s, down=(1, 2), up=(3, 4)) for s in names)
    plan = RunPlan(submitted_at=0.0, links=links, speeds=None)
    shown = report.context(view, plan=plan)["plan_rows"]
    assert len(shown) == 2 * (report.MAX_SITE_ROWS + 1)
    whole = {row.what: row for row in run_plan.rows(plan, view)}
    assert all(whole[row.what] == row for row in shown)


def test_lines_have_the_colours_of_the_palette() -> None:
    """Which people who are colour-blind tell apart."""
    view = fold(event_samples.run(Script(epsilon_cap=8.0)))
    found = {colour for each in charts(view).values() for _, colour in each.lines}
    assert found - {INK} <= {*figures.SITE_COLOURS}


def test_charts_hold_the_numbers_of_the_report() -> None:
    """To the digit, in its tables and in its pictures."""
    view = fold(event_samples.run(Script()))
    shown, rounds = charts(view), result(view)["rounds"]
    assert shown["bytes"].rows == tuple(
        (each["round"], each["bytes_up"] / 1e6, each["bytes_down"] / 1e6)
        for each in rounds
    )
    for name, key, scale in (
        *(("loss", "loss", 1), ("quality", "accuracy", 100)),
        ("seconds", "seconds", 1),
    ):
        points = {row[0]: row[1] for row in shown[name].rows}
        assert {each["round"]: scale * each[key] for each in rounds}.items() <= (
            points.items()
        ), name
    training = plots.training_losses(view)
    picture = plots._curves(view, "", lambda loss: loss, training=training)
    assert picture is not None
    drawn = {str(each.get_label()): each for each in picture.axes[0].lines}
    for at, (name, _) in enumerate(shown["loss"].lines, start=1):
        rows = [(row[0], row[at]) for row in shown["loss"].rows if row[at] is not None]
        assert [*zip(*drawn[name].get_data(), strict=True)] == rows


def test_run_that_only_evaluates_has_no_figures(tmp_path: Path) -> None:
    """Its one point is no line; the loss is in the tiles."""
    run, events = RunFolder(tmp_path), event_samples.run(Script(rounds=1))
    started, last = events[0], events[-1]
    assert isinstance(started, RunStarted)
    first = next(e for e in events if isinstance(e, ModelEvaluated))
    _write(run, [replace(started, rounds=0), replace(first, round_index=0), last])
    page = _page(RunFeed(run))
    assert page.charts == {}
    assert page.timeline is None


@pytest.mark.slow
def test_damaged_and_torn_lines_cost_only_themselves(tmp_path: Path) -> None:
    """What is whole is shown, and the page says how much was not."""
    run = RunFolder(tmp_path)
    events = event_samples.run(Script(rounds=3))
    _write(run, events)
    *lines, last = run.events.read_bytes().splitlines(keepends=True)
    run.events.write_bytes(b"".join([*lines[:5], b'{"event": \xff\n', *lines[5:]]))
    feed = RunFeed(run)
    assert _page(feed).state == "interrupted"
    shown = _page(feed).sections["log"]
    assert "1 damaged line of events.jsonl" in shown
    assert f"{run.events}, line 6: " in shown
    with run.events.open("ab") as log:
        log.write(last[:10])
        log.flush()
        assert not feed.look()
        log.write(last[10:])
    assert isinstance(events[-1], RunFinished)
    assert _page(feed).state == "ended"


_RESUMED = [
    *event_samples.run(Script(rounds=9, stop_after=7, seed=3)),
    *event_samples.run(Script(rounds=9, first_round=4, start=event_samples.START + 90)),
]
_LOGS = {
    "failures": event_samples.run(
        Script(
            rounds=9,
            failures=(
                (2, "aws-us-east-1", FailureKind.CRASHED),
                (3, "gcp-us-central1", FailureKind.SURPLUS),
                (8, "aws-us-east-1", FailureKind.CRASHED),
            ),
            lost=(5,),
        )
    ),
    "private": event_samples.run(Script(rounds=9, epsilon_cap=8.0)),
    "secure": event_samples.run(Script(rounds=9, secure=True, adapts=True)),
    "resumed": _RESUMED,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", _LOGS)
def test_settled_rounds_leave_every_number_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Read at once or piece by piece, by one page or by the next from its cache."""
    monkeypatch.setattr(run_fold, "MAX_REPORTS", 1)
    monkeypatch.setattr(event_tail, "BLOCK_BYTES", 2_000)
    monkeypatch.setattr(fold_cache, "WORTH_BYTES", 1)
    run, events = RunFolder(tmp_path), _LOGS[name]
    feeds = [RunFeed(run)]
    for at in range(0, len(events), 7):
        _write(run, events[at : at + 7])
        feeds[0].look()
        feeds[1:] = [RunFeed(run)]  # It begins with what the first one has left.
    assert (run.path / run_reader.NAME).exists()
    whole = fold(events)
    expected = report.render_sections(whole, SECTIONS, is_live=False)
    for feed in feeds:
        page = _page(feed)
        assert {n: page.sections[n] for n in SECTIONS} == expected
        assert page.charts == charts(whole)
        assert page.sections["log"] == _page(feeds[0]).sections["log"]
        assert feed._reader.fold.view().past is not None


@pytest.mark.slow
def test_cache_of_another_log_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor one that is damaged or torn: the page is that of the log that is there."""
    monkeypatch.setattr(fold_cache, "WORTH_BYTES", 1)
    run, other = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "other")
    _write(run, event_samples.run(Script(rounds=5, seed=1)))
    _write(other, event_samples.run(Script(rounds=5, seed=2)))
    cached = run.path / run_reader.NAME
    for each in (other, run):
        RunFeed(each).look()
    expected = _page(RunFeed(other)).sections
    own = (other.path / run_reader.NAME).read_bytes()
    body = own.partition(b"\n")[2]
    changed = re.sub(rb'(bytes_up\\": )(\d)', rb"\g<1>9\2", body)
    assert changed != body
    older = json.dumps({**json.loads(body), "release": "0", "log": ["stale"]}).encode()
    strange = body.replace(b'"settled"', b'"set"')
    assert strange != body
    for content in (
        *(cached.read_bytes(), own.replace(body, changed), own[:-20], body),
        fold_cache._seal(strange) + strange,
        *(fold_cache._seal(older) + older, b"", b"{", b"{}\n{}", b"\xff\n" * 2),
    ):
        (other.path / run_reader.NAME).write_bytes(content)
        assert _page(RunFeed(other)).sections == expected


@pytest.mark.slow
def test_damage_of_what_a_cache_has_covered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Near its ends it is seen, and costs a line; elsewhere the numbers stay right."""
    monkeypatch.setattr(fold_cache, "WORTH_BYTES", 1)
    run = RunFolder(tmp_path)
    _write(run, event_samples.run(Script(rounds=30, stop_after=30)))
    expected = _page(RunFeed(run))
    whole = run.events.read_bytes()
    for place, is_seen in ((500, True), (len(whole) // 2, False), (-500, True)):
        damaged = bytearray(whole)
        damaged[place] = 0xFF
        run.events.write_bytes(damaged)
        page = _page(RunFeed(run))
        assert ("1 damaged line" in page.sections["log"]) == is_seen, place
        if not is_seen:
            assert page.sections == expected.sections
        run.events.write_bytes(whole)
        assert _page(RunFeed(run)).sections == expected.sections


@pytest.mark.slow
def test_run_that_begins_anew_shows_nothing_of_the_old_one(tmp_path: Path) -> None:
    """To a browser that has its page open, and lacks what the new one does not have."""
    run, changes = RunFolder(tmp_path), Changes()
    _write(run, event_samples.run(Script(rounds=6, epsilon_cap=8.0)))
    feed = RunFeed(run)
    old = changes.to(_page(feed))
    assert {"epsilon", "loss"} < {*old["figures"]}
    shutil.rmtree(tmp_path)
    events = event_samples.run(Script(rounds=9, seed=3, start=event_samples.START + 90))
    first = next(at for at, e in enumerate(events) if isinstance(e, RoundStarted))
    _write(run, events[: first + 1])
    begun = changes.to(_page(feed))
    assert begun["title"].endswith("0/9")
    assert (begun["figures"], begun["charts"]) == ([], {})
    _write(run, events[first + 1 :])
    assert _page(feed) == _page(RunFeed(run))
    assert changes.to(_page(feed))["charts"]["loss"]["from"] == 0


@pytest.mark.slow
def test_curve_of_a_restored_backup_is_cut(tmp_path: Path) -> None:
    """Its points are those that the browser has, but fewer."""
    run, changes = RunFolder(tmp_path), Changes()
    events = event_samples.run(Script(rounds=6))
    _write(run, events)
    feed = RunFeed(run)
    known = changes.to(_page(feed))["charts"]["bytes"]["rows"]
    run.events.unlink()
    _write(run, events[: len(events) // 2])
    cut = changes.to(_page(feed))["charts"]["bytes"]
    assert (cut["from"], cut["rows"]) == (3, ())
    assert len(known) == 6


def test_run_that_was_stopped_has_not_ended(tmp_path: Path) -> None:
    """One that makes way for another goes on later."""
    run, events = RunFolder(tmp_path), event_samples.run(Script(rounds=2))
    assert isinstance(events[-1], RunFinished)
    pages = {}
    for status in ("interrupted", "failed", "completed", "exhausted"):
        run.events.unlink(missing_ok=True)
        _write(run, [*events[:-1], replace(events[-1], status=status)])
        pages[status] = _page(RunFeed(run))
    assert "has ended" in pages["completed"].sections["now"]
    assert "has ended" not in pages["interrupted"].sections["now"]
    # The button that resumes a run follows this.
    assert [page.state for page in pages.values()] == [
        *("stopped", "stopped"),
        *("ended", "ended"),
    ]
    assert web_app.ACTIONS["resume"][1] == "stopped"


def test_task_of_an_earlier_round_stays_inside_the_timeline(tmp_path: Path) -> None:
    """In a buffered run; and a task that nobody needed has not failed."""
    run = RunFolder(tmp_path)
    failures = ((2, event_samples.TWO_SITES[1], FailureKind.SURPLUS),)
    events = event_samples.run(Script(rounds=2, failures=failures))
    first = next(e for e in events if isinstance(e, SiteAnswered))
    _write(
        run,
        [
            replace(e, asked_seconds=-3.0, phases=()) if e is first else e
            for e in events
        ],
    )
    page = _page(RunFeed(run))
    assert page.timeline is not None
    bars = page.timeline["bars"]
    assert min(begin for _, begin, _, _ in bars) == 0.0
    ends = [begin + seconds for _, begin, seconds, _ in bars]
    assert any(end == pytest.approx(first.answered_seconds) for end in ends)
    assert "failed" not in page.timeline["colours"]


@pytest.mark.slow
@pytest.mark.parametrize("hours", [-1, 1])
def test_clock_or_a_pause_leaves_rounds_in_their_order(
    tmp_path: Path, hours: int
) -> None:
    """Set back, or resumed an hour later: bars keep their length, one after another."""
    run = RunFolder(tmp_path)
    events = event_samples.run(Script(rounds=6))
    _write(run, events)
    usual = _page(RunFeed(run))
    run.events.unlink()
    starts = [at for at, e in enumerate(events) if isinstance(e, RoundStarted)]
    late = [
        replace(event, at=event.at + 3600.0 * hours) for event in events[starts[3] :]
    ]
    _write(run, [*events[: starts[3]], *late])
    page = _page(RunFeed(run))
    assert page.timeline is not None
    assert usual.timeline is not None
    offsets = [offset for _, offset in page.timeline["rounds"]]
    assert offsets == pytest.approx([o for _, o in usual.timeline["rounds"]], abs=0.2)
    assert page.timeline["seconds"] == pytest.approx(usual.timeline["seconds"], abs=0.2)
    assert page.charts == usual.charts


@pytest.mark.slow
def test_another_file_in_its_place_is_read_anew(tmp_path: Path) -> None:
    """A restored backup is shorter; a deleted folder is no run that goes on."""
    run, numbers = RunFolder(tmp_path), RunsCollector(lambda: [run])
    events = event_samples.run(Script(rounds=6))
    half = len(events) // 2
    _write(run, events)
    feed = RunFeed(run)
    assert _page(feed).title.endswith("6/6")
    assert numbers.look()[tmp_path.name].ended["completed"] == 6
    run.events.unlink()
    assert feed.look()
    gone = _page(feed)
    assert gone.state == "deleted"
    assert "was deleted" in gone.sections["now"]
    _write(run, events[:half])
    restored = _page(feed)
    assert (restored.title, restored.state) == (
        "two-clouds-quickstart 3/6",
        "interrupted",
    )
    assert numbers.look()[tmp_path.name].ended["completed"] < 6
    for event in events[half:]:
        _write(run, [event])
    assert _page(feed).sections == _page(RunFeed(run)).sections


@pytest.mark.slow
def test_killed_run_is_not_shown_as_going_on(tmp_path: Path) -> None:
    """Nobody waits for its sites, and it has no time left."""
    run = RunFolder(tmp_path)
    events = event_samples.run(Script(rounds=6))
    _write(run, events[: len(events) // 2])
    killed = _page(RunFeed(run))
    assert killed.state == "interrupted"
    assert "was interrupted" in killed.sections["now"]
    assert "Waits for" not in killed.sections["now"]
    with run.locked():
        going = _page(RunFeed(run))
    assert going.state == "live"
    assert "was interrupted" not in going.sections["now"]


def test_frozen_site_is_blamed_alone(tmp_path: Path) -> None:
    """As in `ps`: the others are not asked before it is back, or given up."""
    run, (first, second) = RunFolder(tmp_path), event_samples.TWO_SITES
    events = event_samples.run(Script(rounds=6))
    starts = [at for at, e in enumerate(events) if isinstance(e, RoundStarted)]
    _write(run, events[: starts[3] + 1])
    soon, late = events[starts[3]].at + 0.1, events[starts[3]].at + 3600.0
    with run.locked():
        feeds = RunFeed(run), RunFeed(run, missing=lambda _run: [second])
        for feed in feeds:
            assert feed.look()
        pages = [feed.page(now) for feed in feeds for now in (soon, late)]
    texts = [page.sections["now"] for page in pages if page is not None]
    assert [f"Waits for {first}, {second}" in text for text in texts] == [
        *(True, True),
        *(False, False),
    ]
    assert all(f"Waits for {second}" in text for text in texts[2:])
    # A round that stalls says nothing about the time that is left.
    assert [" left." in text for text in texts] == [True, False, True, False]


def test_revoked_site_is_called_so(tmp_path: Path) -> None:
    """Its node is gone, which without the operator's record is only unreachable."""
    run, (site, _) = RunFolder(tmp_path), event_samples.TWO_SITES
    script = Script(failures=((2, site, FailureKind.UNREACHABLE),))
    events = event_samples.run(script)
    fails = next(at for at, e in enumerate(events) if isinstance(e, SiteFailed))
    _write(run, events[: fails + 1])
    with run.locked():
        feeds = RunFeed(run), RunFeed(run, revoked=lambda: [site])
        plain, revoked = (_page(feed).sections["now"] for feed in feeds)
    assert f"{site}: unreachable" in plain
    assert f"{site}: revoked" in revoked
    assert "unreachable" not in revoked


@pytest.mark.slow
def test_browser_that_leaves_lets_no_other_read_meanwhile(tmp_path: Path) -> None:
    """Its thread reads on, and two would count events twice or not at all."""
    others = list[threading.Thread]()

    def revoked() -> tuple[str, ...]:  # Asked for while the page is made.
        if not others:
            others.append(threading.Thread(target=feed._refresh))
            others[0].start()
            others[0].join(0.2)
            assert others[0].is_alive()
        return ()

    run = RunFolder(tmp_path)
    _write(run, event_samples.run(Script(rounds=3)))
    shown = Shown(rows=list, find={}.get, actions={}, revoked=revoked)
    feed = _SharedFeed(run, shown, SystemClock())
    feed._refresh()
    others[0].join()


async def _first(stream: AsyncIterator[str]) -> str:
    return await anext(stream)


def test_long_run_that_has_ended_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it is in what it left, and there is never any news."""
    monkeypatch.setattr(fold_cache, "WORTH_BYTES", 1)
    monkeypatch.setattr(web_app, "LOOK_SECONDS", 0.001)
    run = RunFolder(tmp_path)
    _write(run, event_samples.run(Script(rounds=3)))
    RunReader(run.events).look()
    assert fold_cache.read(tmp_path / run_reader.NAME) is not None
    shown = Shown(rows=list, find={}.get, actions={})
    stream = _stream(_SharedFeed(run, shown, SystemClock()))
    first = asyncio.run(_first(stream))
    assert first.startswith("data: ")
    assert "3/3" in first


def test_names_and_messages_are_text(tmp_path: Path) -> None:
    """Whatever a site may choose is escaped wherever the page shows it."""
    run = RunFolder(tmp_path)
    failures = ((2, HOSTILE, FailureKind.CRASHED),)
    script = Script(sites=(HOSTILE, "b"), failures=failures, message=HOSTILE)
    events = event_samples.run(script)
    _write(run, events[: len(events) // 2])
    page = _page(RunFeed(run))
    assert page.timeline is not None
    assert HOSTILE in page.timeline["rows"]  # The script writes it as text.
    for html in page.sections.values():
        assert "<script" not in html
    assert "&lt;script&gt;" in page.sections["sites"]


@pytest.mark.slow
def test_only_changes_are_sent(tmp_path: Path) -> None:
    """A browser gets each row of a chart once, and all of them after a resume."""
    run = RunFolder(tmp_path)
    events = event_samples.run(Script(rounds=6, stop_after=6))
    half = len(events) // 2
    feed, changes = RunFeed(run), Changes()
    _write(run, events[:half])
    first = changes.to(_page(feed))
    _write(run, events[half:])
    second = changes.to(_page(feed))
    assert "summary" in second["sections"]
    rows = first["charts"]["bytes"]["rows"]
    assert second["charts"]["bytes"]["from"] == len(rows) > 0
    assert changes.to(_page(feed))["charts"] == {}
    assert changes.to(_page(feed))["sections"] == {}
    # Another coordinator continues from the third round.
    _write(run, event_samples.run(Script(rounds=6, first_round=3, seed=5)))
    again = changes.to(_page(feed))["charts"]["loss"]
    known = [*rows[: again["from"]], *again["rows"]]
    assert again["from"] <= 3
    assert len(known) == len(_page(feed).charts["loss"].rows)
    json.dumps(first, allow_nan=False)


QUEUED = {
    "run": "20260102-000000-abcdef",
    "job": "next",
    "owner": "ann",
    "priority": 2,
    "waits": "a slot at north",
    "starts_in_seconds": 320.0,
}


@pytest.fixture(name="client")
def _client(tmp_path: Path) -> TestClient:
    run = RunFolder(tmp_path / "job" / "20260101-000000-abcdef")
    _write(run, event_samples.run(Script(rounds=2)))

    def stop(_: RunFolder) -> None:
        raise FederationError("it has ended already")

    shown = Shown(
        rows=lambda: [{"name": run.path.name, "job": "job", "status": "unreadable"}],
        find={run.path.name: run}.get,
        actions={"stop": stop},
        queue=lambda: [QUEUED],
        trouble=lambda: "the disk is <full>",
    )
    app = live_app(
        shown,
        token=TOKEN,
        port=PORT,
        clock=SystemClock(),
        metrics=RunsCollector(lambda: [run]),
        metrics_token=BEARER,
    )
    return TestClient(app, base_url=BASE, follow_redirects=False)


def _enter(client: TestClient) -> None:
    answer = client.get(f"/?token={TOKEN}")
    assert answer.status_code == 303
    assert answer.headers["location"] == "/"
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie


RUN = "/runs/20260101-000000-abcdef"


@pytest.mark.parametrize("path", ["/", RUN, f"{RUN}/changes", "/static/live.js"])
def test_nobody_looks_without_the_token(client: TestClient, path: str) -> None:
    """Another user of the host learns nothing, not even which runs there are."""
    assert client.get(path).status_code == 403
    assert client.get(f"{path}?token=wrong").status_code == 403
    client.cookies.set(f"crossfed-{PORT}", "wrong")
    assert client.get(path).status_code == 403
    assert "20260101" not in client.get(path).text


def test_list_of_runs_says_what_holds_up_all(client: TestClient) -> None:
    _enter(client)
    assert "the disk is &lt;full&gt;" in client.get("/").text


def test_token_opens_the_pages(client: TestClient) -> None:
    """The address gives a cookie, and the address that remains holds no token."""
    _enter(client)
    assert "20260101-000000-abcdef" in client.get("/").text
    page = client.get(RUN)
    assert page.status_code == 200
    assert "default-src 'none'" in page.headers["content-security-policy"]
    # With no-referrer a browser names no Origin, and its own forms are refused.
    assert page.headers["referrer-policy"] == "same-origin"
    assert client.get("/static/live.js").status_code == 200
    assert client.get("/runs/another").status_code == 404
    assert client.get("/compare?run=another").status_code == 404


def test_list_says_what_runs_wait_for(client: TestClient) -> None:
    _enter(client)
    text = client.get("/").text
    for word in ("20260102-000000-abcdef", "ann", "a slot at north", "in 5 min 20 s"):
        assert word in text


def test_runs_are_compared(client: TestClient, tmp_path: Path) -> None:
    """From two on."""
    _enter(client)
    run = RUN.rpartition("/")[2]
    RunFolder(tmp_path / "job" / run).job.write_text('name = "job"\n', "utf-8")
    assert client.get(f"/compare?run={run}").status_code == 400
    page = client.get(f"/compare?run={run}&run={run}")
    assert page.status_code == 200
    assert page.text.count(run) > 1


def test_address_of_another_host_is_no_way_out(client: TestClient) -> None:
    """The redirect stays here, whatever the path begins with."""
    answer = client.get(f"{BASE}//evil.example/?token={TOKEN}")
    assert answer.headers["location"] == "/evil.example/"


def test_rebound_name_is_refused(client: TestClient) -> None:
    """A page of the internet whose name leads here keeps its name."""
    _enter(client)
    answer = client.get("/", headers={"host": f"evil.example:{PORT}"})
    assert answer.status_code == 421


def test_changes_come_from_the_page_itself(client: TestClient) -> None:
    """A form of another site, which the cookie would not go with, is refused anyway."""
    _enter(client)
    for origin in ({}, {"origin": "http://evil.example"}, {"origin": "null"}):
        answer = client.post(f"{RUN}/stop", headers=origin)
        assert answer.status_code == 403
    answer = client.post(f"{RUN}/stop", headers={"origin": BASE})
    assert answer.status_code == 409
    assert "it has ended already" in answer.text
    answer = client.post(f"{RUN}/delete", headers={"origin": BASE})
    assert answer.status_code == 404


def test_metrics_have_a_token_of_their_own(client: TestClient) -> None:
    """It opens nothing else, and whoever may look at the pages may see metrics."""
    bearer = {"authorization": f"Bearer {BEARER}"}
    assert "crossfed_run_loss" in client.get("/metrics", headers=bearer).text
    for wrong in ({}, {"authorization": "Bearer x"}, {"authorization": BEARER}):
        refused = client.get("/metrics", headers=wrong)
        assert refused.status_code == 403
        assert "metrics.token" in refused.text
    for path in ("/", RUN, f"{RUN}/changes"):
        assert client.get(path, headers=bearer).status_code == 403
    _enter(client)
    assert client.get("/metrics").status_code == 200
