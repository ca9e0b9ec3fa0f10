"""What a setting forbids, and markup in names, reach nothing that a run shows.

Generated from the table of disclosure and the types of all events: a field or a kind of
event that is new is planted without a line here.
"""

import contextlib
import dataclasses
import html.parser
import importlib.util
import io
import itertools
import json
import re
import types
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints
from xml.etree import ElementTree as ET

import pytest
import tomli_w
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from starlette.testclient import TestClient
from support import event_samples
from support.event_samples import Script
from support.small_jobs import small_job

from deploy import audit_log
from deploy.aggregator_host import run_list, run_queue
from deploy.aggregator_host.alert_delivery import AlertDelivery
from deploy.cli import commands as cli
from deploy.cli.terminal import say
from deploy.wiring import parts as wiring
from deploy.wiring.run_record import RunRecord
from deploy.wiring.store_meters import StoreMeters
from federation.clock import VirtualClock
from federation.event_log import EventWriter
from federation.events import Event
from federation.ids import RunId
from federation.job.disclosure import Exposure, hidden
from federation.job.spec import JobSpec
from federation.messages import FailureKind
from monitoring.pages import model_card, report
from monitoring.runs import run_folder, trackers
from monitoring.runs.run_folder import RunFolder
from monitoring.runs.run_numbers import RunNumbers
from monitoring.terminal import outcome
from monitoring.terminal.live import picture
from monitoring.terminal.progress import PlainProgress
from monitoring.views.result_json import result
from monitoring.web import alerts
from monitoring.web.app import Shown, live_app
from monitoring.web.run_feed import RunFeed
from monitoring.web.run_metrics import RunsCollector
from monitoring.web.traces import RoundTraces

pytestmark = pytest.mark.slow

SITES = ("north", "south", "east")
PRIVATE = {"unit": "record", "target_epsilon": 50.0, "clip_norm": 1.0}
SETTINGS = [
    Exposure(private=private, secure=secure, deployed=deployed)
    for private, secure, deployed in itertools.product((False, True), repeat=3)
]
NOW = event_samples.START + 5000.0
# Two that no sample has: whatever shows one differs from what shows the other.
PLANTED = (17, 43)
TAG = "planted-tag"
MARKUP = f"</pre><{TAG} onx='1'>&\"\x1b[31m\n# planted\u202e"


# Events whose texts are all crossfed's own words, or names that ``check-job`` knows.
OURS = {"PrivacyPlanned", "ModelSelected"}


def job_of(setting: Exposure) -> JobSpec:
    secure = {"secure_aggregation": {"enabled": True, "threshold": 3}}
    private = {"differential_privacy": PRIVATE}
    privacy = (private if setting.private else {}) | (secure if setting.secure else {})
    return small_job(
        num_sites=3,
        rounds=3,
        privacy=privacy,
        aggregation={"weights": "uniform"},
        training={"local_steps": 1, "batch_size": 4, "optimizer": {"lr": 0.5}},
    )


def made(hint: Any, text: str, number: int) -> Any:  # noqa: PLR0911 -- by type
    """A value of a type."""
    arms = [arm for arm in get_args(hint) if arm is not types.NoneType]
    match get_origin(hint) or hint:
        case types.UnionType:
            return made(arms[0], text, number)
        case kind if kind is tuple:
            items = arms if Ellipsis not in arms else arms[:1] * len(SITES)
            return tuple(made(arm, text, number) for arm in items)
        case kind if kind is Mapping or getattr(kind, "__name__", "") == "Mapping":
            return {"correct": float(number)}
        case kind if kind is bool:
            return True
        case kind if issubclass(kind, Enum):
            return next(iter(kind))
        case kind if issubclass(kind, str):
            return text
        case kind if issubclass(kind, int | float):
            return kind(number + 0.25)  # A mean of such sums is not that of others.
        case kind:
            hints = get_type_hints(kind)
            return kind(**{k: made(h, text, number) for k, h in hints.items()})


def events_of(setting: Exposure, text: str = "planted") -> list[Event]:
    """A whole run, and one event of each kind that it lacks."""
    sites = (text, *SITES[1:]) if text == MARKUP else SITES
    script = Script(
        sites=sites,
        rounds=3,
        job_name=text,
        secure=setting.secure,
        epsilon_cap=8.0 if setting.private else None,
        failures=((2, sites[0], FailureKind.CRASHED),),
        message=text,
        warning=text,
        labels=(text, "other"),
    )
    *events, last = event_samples.run(script)
    engine = "deployed" if setting.deployed else "inproc"
    events[0] = dataclasses.replace(events[0], engine=engine, task=text)
    lacking = [
        kind for kind in get_args(Event) if kind not in {*map(type, events), type(last)}
    ]
    for kind in lacking:
        hints = get_type_hints(kind)
        changes: dict[str, Any] = {"at": last.at, "round_index": 3}
        changes |= {"sites": sites} if hints.get("sites") == tuple[str, ...] else {}
        known = {name: changes[name] for name in changes.keys() & hints}
        words = "planted" if kind.__name__ in OURS else text
        events.append(dataclasses.replace(made(kind, words, 1), **known))
    return [*events, last]


def planted(event: Event, names: frozenset[str], number: int) -> Event:
    """The event with another value in each of some fields."""
    hints = get_type_hints(type(event))

    def other(value: Any, hint: Any) -> Any:
        if isinstance(value, tuple) and value:  # As long as those beside it.
            inner = get_args(hint)[0]
            return tuple(made(inner, f"planted-{number}", number) for _ in value)
        return made(hint, f"planted-{number}", number)

    values = {name: other(getattr(event, name), hints[name]) for name in names}
    return dataclasses.replace(event, **values)


def shown(
    setting: Exposure, events: Sequence[Event], folder: Path, *, draws: bool = False
) -> Mapping[str, str]:
    """Everything that is made of a run, by its name."""
    job, clock = job_of(setting), VirtualClock(NOW)
    run, terminal = RunFolder(folder / "small" / "run"), io.StringIO()
    record = RunRecord(
        job,
        run,
        RunId("20260101-000000-000000"),
        pool=wiring.build_federation(job).pool,
        clock=clock,
        meters=StoreMeters(clock),
        introduce=lambda: (),
        listeners=[PlainProgress(terminal)],
    )
    with record._open():
        for event in events:
            record.emit(event)
    view, collector = run.view(), RunsCollector(lambda: [run])
    registry, numbers = CollectorRegistry(), RunNumbers()
    registry.register(collector)
    for event in run.read_events():
        numbers.add(event)
    screen = Console(file=io.StringIO(), width=120)
    screen.print(picture(view, screen, now=NOW))
    feed = RunFeed(run)
    feed.look()
    page = feed.page(NOW)
    assert page is not None
    woken, said = list[str](), io.StringIO()
    AlertDelivery(
        places={"here": woken.append},
        path=folder / "alerts.json",
        clock=clock,
        listener=woken.append,
    ).deliver([*alerts.of_run("run", numbers, NOW, status="failed")])
    with contextlib.redirect_stdout(said):
        for line in outcome.lines(view):
            say(line)
    compared = run_folder.render_comparison([run, run]) if draws else ""
    points = trackers.points_of(view)
    model = model_card.ModelFile(
        size=1, sha256="ab", num_tensors=1, num_values=1, types=("F32",)
    )
    figures = None if draws else ()
    return {
        "events": run.events.read_text("utf-8"),
        "terminal": terminal.getvalue(),
        "screen": screen.file.getvalue(),  # type: ignore[attr-defined]
        "report": report.render(view, run.read_job(), {}, figures=figures),
        "comparison": compared,
        "page": json.dumps([page.title, page.charts, page.timeline], default=vars_of),
        **{f"section {name}": text for name, text in page.sections.items()},
        "metrics": generate_latest(registry).decode(),
        "trackers": repr({name: point.value for name, point in points.items()}),
        "alerts": "\n".join(woken),
        "traces": _traces(run),
        "result": json.dumps(result(view)),
        "outcome": said.getvalue(),
        "card": model_card.model_card(view, run.read_job(), model),
    }


def _traces(run: RunFolder) -> str:
    if importlib.util.find_spec("opentelemetry") is None:
        return ""
    traces = RoundTraces()
    return "".join(
        s.to_json() for event in run.read_events() for s in traces.add(event)
    )


def vars_of(value: Any) -> Any:
    return dataclasses.asdict(value)


def runs_of(
    setting: Exposure, forbidden_by: Exposure, folder: Path
) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """What is shown of two runs that differ in what another setting forbids."""
    events = events_of(setting)
    names = {type(e): hidden(type(e).__name__, forbidden_by) for e in events}
    one, other = (
        shown(
            setting,
            [planted(event, names[type(event)], number) for event in events],
            folder / str(number),
        )
        for number in PLANTED
    )
    return one, other


@pytest.mark.parametrize("setting", SETTINGS[1:], ids=str)
def test_what_a_setting_forbids_changes_nothing_that_is_shown(
    setting: Exposure, tmp_path: Path
) -> None:
    """Two runs that differ in nothing but forbidden values look the same."""
    one, other = runs_of(setting, setting, tmp_path)
    assert one == other


def test_the_same_values_show_where_they_are_allowed(tmp_path: Path) -> None:
    """Or the test above would plant nothing."""
    one, other = runs_of(SETTINGS[0], SETTINGS[-1], tmp_path)
    differing = {name for name in one if one[name] != other[name]}
    assert {"events", "terminal", "report", "trackers", "traces", "result"} <= differing


class Tags(html.parser.HTMLParser):
    """Finds elements and attributes that were planted."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.found += [tag for each in (tag, *dict(attrs)) if each in {TAG, "onx"}]

    def handle_comment(self, data: str) -> None:
        self.found += [data] if TAG in data else []


def test_markup_in_names_and_messages_is_text(tmp_path: Path) -> None:
    """In pages it is no element, in logs no line and no command to a terminal."""
    texts = shown(SETTINGS[0], events_of(SETTINGS[0], MARKUP), tmp_path, draws=True)
    pages = [n for n in texts if n in {"report", "comparison"} or n.startswith("sec")]
    for name in pages:
        tags = Tags()
        tags.feed(texts[name])
        assert not tags.found, name
    assert TAG in texts["report"]
    for name in ("terminal", "screen", "outcome", "alerts"):
        assert not set(texts[name]) & {"\x1b", "\u202e", "\r"}, name
    for name in ("terminal", "alerts", "card"):
        assert not any(x.startswith("# planted") for x in texts[name].splitlines()), (
            name
        )
    outside = re.sub(r"(`+).*?\1", "", texts["card"], flags=re.DOTALL)
    assert f"<{TAG}" not in outside
    families = text_string_to_metric_families(texts["metrics"])
    labels = {text for f in families for s in f.samples for text in s.labels.values()}
    assert MARKUP in labels


def test_markup_in_lists_sweeps_and_records_is_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a run's error, of what it waits for, and of who did what to it."""
    runs, setting = [], SETTINGS[0]
    for name in ("one", "other"):
        run = RunFolder(tmp_path / "runs" / "small" / name)
        run_queue.submit(job_of(setting), run, at=NOW, owner=MARKUP)
        # A user's own key, which the figures of a sweep compare.
        job = {"name": MARKUP, "training": {"word": MARKUP + name}}
        run.job.write_text(tomli_w.dumps(job), "utf-8")
        with EventWriter(run.events) as log:
            for event in events_of(setting, MARKUP):
                if type(event).__name__ not in OURS:  # With privacy, less is drawn.
                    log(event)
        run_queue.leave_outcome(run, run_queue.Outcome(code=1, message=MARKUP))
        runs.append(run)
    waits = dict.fromkeys(("run", "job", "owner", "priority", "waits"), MARKUP)
    app = live_app(
        Shown(
            rows=lambda: [{**run_list.summary(run), "name": MARKUP} for run in runs],
            find={}.get,
            actions={},
            queue=lambda: [{**waits, "starts_in_seconds": None}],
        ),
        token=TAG,
        port=8642,
        clock=VirtualClock(NOW),
    )
    page = TestClient(app, base_url="http://127.0.0.1:8642").get(f"/?token={TAG}").text
    figures = run_folder.leave_sweep(runs, tmp_path / "sweep")
    texts = {path.name: path.read_text("utf-8") for path in figures}
    assert len(texts) > 1
    for name, text in {"list": page, **texts}.items():
        tags = Tags()
        tags.feed(text)
        assert not tags.found, name
    for text in texts.values():
        ET.fromstring(text)  # noqa: S314 -- our own file: it has no odd character
    assert page.count(f"&lt;{TAG}") >= 2 * len(runs) + len(waits)
    assert {n for n, text in texts.items() if "&lt;/pre&gt;" in text} >= {
        *("utilisation.svg", "sensitivity.svg", "tornado.svg")
    }
    about = {"at": NOW, "who": MARKUP, "reason": MARKUP}
    audit_log.note(tmp_path, "run.stop", MARKUP, **about)
    assert cli.main(["audit-log", str(tmp_path / audit_log.FILE)]) == 0
    said = capsys.readouterr().out
    assert TAG in said
    assert not set(said) & {"\x1b", "\u202e", "\r"}
    assert not any(line.startswith("# planted") for line in said.splitlines())
