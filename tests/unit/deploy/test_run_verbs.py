"""Following a run that others write."""

import argparse
import json
import re
import signal
import threading
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from support import event_samples
from support.small_jobs import small_job
from support.without_report import simulate

from cloud_adapters.flower.facts import Connected, not_connected
from deploy.aggregator_host import config as aggregator_file, run_list, run_queue
from deploy.cli import commands as cli, run_verbs
from federation import folder_lock
from federation.clock import VirtualClock
from federation.errors import CorruptObject
from federation.event_log import EventWriter, to_line
from federation.events import ModelEvaluated, Warned
from federation.job import job_file
from monitoring.runs.run_folder import RunFolder


def test_line_of_a_killed_writer_is_not_taken_for_the_next(tmp_path: Path):
    """Its successor cuts the torn line off and continues in its place."""
    run = RunFolder(tmp_path)
    run.events.write_bytes(b"first\nto")
    over = False
    lines = run_verbs._lines(run, lambda: over, VirtualClock())
    assert next(lines) == b"first"
    run.events.write_bytes(b"first\nsecond\nthird\nto")
    assert next(lines) == b"second"
    over = True
    assert list(lines) == [b"third"]


def test_run_that_has_not_begun_says_what_it_waits_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Once for each reason."""
    job = small_job()
    first, second = (RunFolder(tmp_path / job.name / name) for name in ("one", "two"))
    for at, run in enumerate((first, second)):
        run_queue.submit(job, run, at=float(at))

    class Acts(VirtualClock):
        """Ends the first run, and later the second."""

        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            looks = round(self.monotonic() / run_verbs.START_LOOK_SECONDS)
            if looks in {2, 4}:
                ended = {2: first, 4: second}[looks]
                run_queue.leave_outcome(ended, run_queue.Outcome(code=0, message=""))

    config = aggregator_file.load(aggregator_toml(tmp_path))
    run_verbs._await_start(second, config, Acts(0.0))
    sites = ", ".join(site.name for site in job.sites)
    assert capsys.readouterr().err.splitlines() == [
        f"crossfed: run two waits for a slot at {sites} (run one)",
        "crossfed: run two waits for its coordinator, and then for its sites",
    ]


def test_run_whose_sites_are_missing_names_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """And says how long it waits; each state once."""
    run = RunFolder(tmp_path / "small" / "one")
    run_queue.submit(small_job(), run, at=0.0)
    states = [
        Connected(there=there, missing=missing, absent=absent, seconds=600.0)
        for there, missing, absent in (
            ((), ("east", "west"), ("east",)),
            (("west",), ("east",), ()),
            (("west", "east"), (), ()),
        )
    ]

    class Meets(VirtualClock):
        """The sites connect one after the other, and then the run ends."""

        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            if not states:
                run_queue.leave_outcome(run, run_queue.Outcome(code=0, message=""))
            elif round(self.monotonic() / run_verbs.START_LOOK_SECONDS) % 2:
                run_queue.note_connected(run, states.pop(0))

    config = aggregator_file.load(aggregator_toml(tmp_path))
    run_verbs._await_start(run, config, Meets(0.0))
    waits = "waits up to 10 min 00 s for"
    absent = not_connected(["east"])
    assert capsys.readouterr().err.splitlines()[1:] == [
        f"crossfed: run one {waits} answers of east, west; {absent}",
        f"crossfed: run one {waits} answers of east; answered: west",
        "crossfed: run one has its sites: west, east",
    ]


def aggregator_toml(folder: Path) -> Path:
    """Where ``crossfed ps`` and ``logs`` find the aggregator's runs."""
    path = folder / "aggregator.toml"
    path.write_text("connect_seconds = 60\n")
    return path


@pytest.mark.parametrize("as_json", [True, False])
def test_logs_are_lines_and_with_json_events(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *, as_json: bool
):
    path = aggregator_toml(tmp_path)
    run = RunFolder(aggregator_file.load(path).runs / "small" / "one")
    run_queue.submit(small_job(), run, at=0.0)
    with EventWriter(run.events) as write:
        write(Warned(at=1.0, message="updates are scaled down"))
    run_queue.leave_outcome(run, run_queue.Outcome(code=0, message=""))
    options = argparse.Namespace(
        aggregator=path,
        clock=VirtualClock(0.0),
        json=as_json,
        run="one",
        follow=True,
    )
    assert run_verbs._logs(options) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert "updates are scaled down" in line
    assert line.startswith("{") == as_json


@pytest.mark.parametrize("as_json", [True, False])
def test_a_run_of_statistics_ends_with_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *, as_json: bool
):
    run = RunFolder(tmp_path / "s" / "one")
    column = {"names": ["0"], "low": -5.0, "high": 5.0}
    document = {
        "name": "s",
        "data": {"source": "support.small_jobs:blobs"},
        "sites": [{"name": "a"}, {"name": "b"}],
        "statistics": {"columns": [column]},
    }
    found = simulate(job_file.parse(document), folder=run.path).statistics
    assert found is not None
    options = argparse.Namespace(json=as_json)
    outcome = run_queue.Outcome(code=0, message="")
    assert run_verbs._tell_outcome(options, run, outcome) == 0
    out = capsys.readouterr().out
    if as_json:
        assert json.loads(out)["statistics"]["records"] == found.records
    else:
        assert f"{found.records:,} of 2 sites" in out


def started(run: RunFolder) -> None:
    """Note that a coordinator was started."""
    handed = run_queue.read(run)
    assert handed is not None
    run_queue.note_start(handed, 7, fruitless=1)


def test_run_that_lost_its_coordinator_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Once, and not while one is about to leave its outcome."""
    run, clock = RunFolder(tmp_path / "small" / "one"), VirtualClock(0.0)
    run_queue.submit(small_job(), run, at=0.0)
    started(run)
    config = aggregator_file.load(aggregator_toml(tmp_path))
    lock = config.lock
    pauses = run_verbs._Pauses(run, config, clock)
    with run.locked():
        for _ in range(50):
            clock.sleep(1.0)
            pauses.look()
    assert not capsys.readouterr().err
    with folder_lock.hold(lock, "taken"):
        for _ in range(2):
            clock.sleep(run_verbs.PAUSE_SECONDS - 1.0)
            pauses.look()
            said = capsys.readouterr().err
        pauses.look()
        assert said == (
            "crossfed: run one has no coordinator: if it was killed, the service "
            "starts another, which resumes from the newest checkpoint and waits for "
            "its sites\n"
        )
        assert not capsys.readouterr().err
    pauses.look()
    said = capsys.readouterr().err
    assert "no aggregator is running here: the run resumes" in said
    assert "crossfed aggregator up" in said


def test_stop_says_whether_a_round_is_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """A run that has made way has events, and nobody works on it."""
    run = RunFolder(tmp_path / "runs" / "small" / "one")
    run_queue.submit(small_job(), run, at=0.0)
    with EventWriter(run.events) as log:
        for event in event_samples.two_sites(3)[:-1]:
            log(event)
    words = ["stop", "one", "--aggregator", str(aggregator_toml(tmp_path))]
    assert cli.main(words) == 0
    assert "without another round" in capsys.readouterr().err
    started(run)
    assert cli.main(words) == 0
    assert "after its current round" in capsys.readouterr().err


@pytest.mark.parametrize(("seconds", "shown"), [(0.4, "soon"), (20.0, "in 20 s")])
def test_start_within_seconds_is_soon(
    seconds: float, shown: str, capsys: pytest.CaptureFixture[str]
):
    """The forecast is no better, and would stand for longer than it says."""
    row = {
        **dict.fromkeys(
            ["run", "job", "status", "owner", "reason", "waits"], "operator"
        ),
        **dict.fromkeys(["age_seconds", "rounds", "priority"], 0),
        "loss": None,
        "without": [],
        "back": [],
        "starts_in_seconds": seconds,
    }
    assert run_verbs._say_rows(argparse.Namespace(json=False), [row]) == 0
    assert shown in capsys.readouterr().out


def test_run_that_is_damaged_is_said_to_be_left_alone(tmp_path: Path):
    """Nobody works on it, whatever is before it."""
    run = RunFolder(tmp_path / "small" / "one")
    run_queue.submit(small_job(), run, at=0.0)
    (run.path / run_queue.COORDINATOR).write_text("{")
    config = aggregator_file.load(aggregator_toml(tmp_path))
    found = run_verbs._waits_for(run, run_queue.handed_over(tmp_path), config, 0.0)
    assert found.startswith("run one is not started: ")
    assert "coordinator.json is damaged" in found


class Interrupted(VirtualClock):
    """A clock whose user presses Ctrl-C as soon as it waits."""

    def __init__(self, run: RunFolder, outcome: run_queue.Outcome | None) -> None:
        super().__init__(0.0)
        self._run, self._outcome = run, outcome

    def sleep(self, _seconds: float) -> None:
        if self._outcome is not None:
            run_queue.leave_outcome(self._run, self._outcome)
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("aggregator.toml", "crossfed watch one"),
        ("my fed/a.toml", "crossfed watch one --aggregator 'my fed/a.toml'"),
    ],
)
def test_who_stops_watching_is_told_how_to_go_on(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    command: str,
):
    monkeypatch.chdir(tmp_path)
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).touch()
    run = RunFolder(tmp_path / "small" / "one")
    run_queue.submit(small_job(), run, at=0.0)
    options = argparse.Namespace(
        aggregator=Path(name), clock=Interrupted(run, None), json=False
    )
    assert run_verbs.follow(options, run) == 0
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"crossfed: the run continues; see it with: {command}"


def looked_at(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """What a browser finds at the address that a verb names; then comes Ctrl-C."""
    found, is_over = list[str](), threading.Event()

    def look() -> None:
        text, address = "", None
        for _ in range(3000):
            text += capsys.readouterr().err
            address = re.search(r"http://\S+token=\S+\n", text)
            if address or is_over.wait(0.01):
                break
        if address:
            with httpx.Client(headers={"connection": "close"}) as browser:
                page = browser.get(address[0].strip(), follow_redirects=True)
            found.extend((page.url.path, page.text))
        # Meanwhile the server sees that the browser has gone.
        if not is_over.wait(0.1):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=look)
    thread.start()
    try:
        assert cli.main([*words]) == 0
    finally:
        is_over.set()
        thread.join()
        signal.signal(signal.SIGINT, before)
    return found


def test_verbs_serve_the_pages_of_runs_that_are_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Until Ctrl-C, which ends no run."""
    run = RunFolder(tmp_path / "runs" / "small" / "one")
    run_queue.submit(small_job(), run, at=0.0)
    with EventWriter(run.events) as log:
        for event in event_samples.two_sites(3)[:-1]:
            log(event)
    at = ["--aggregator", str(aggregator_toml(tmp_path)), "--web"]
    path, text = looked_at(capsys, "watch", "one", *at)
    assert path == "/runs/one"
    assert "Stop after this round" in text
    root = str(tmp_path / "runs")
    path, text = looked_at(capsys, "runs", "--root", root, "--web")
    assert path == "/"
    assert "two-clouds-quickstart" in text


def test_diverged_loss_has_few_digits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run, events = RunFolder(tmp_path / "small" / "one"), event_samples.two_sites(3)
    with EventWriter(run.events) as write:
        for event in events:
            if isinstance(event, ModelEvaluated):
                count = event.pooled.count
                diverged = replace(event.pooled, loss_sum=4.7e30 * count)
                write(replace(event, pooled=diverged))
            else:
                write(event)
    assert cli.main(["runs", "--root", str(tmp_path)]) == 0
    assert " 4.7e+30 " in capsys.readouterr().out


def test_a_damaged_log_is_shown_as_far_as_it_is_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Each verb names file and line once; how the run ended is known elsewhere."""
    run = RunFolder(tmp_path / "runs" / "small" / "one")
    run_queue.submit(small_job(), run, at=0.0)
    lines = [to_line(event).encode() for event in event_samples.two_sites(3)]
    damaged = [*lines[:-1], b"\xff\x00 garbage", b'{"event": "Warned"', b""]
    run.events.write_bytes(b"\n".join(damaged))
    done = run_queue.Outcome(code=0, message="")
    run_queue.leave_outcome(run, done)
    where = f"{run.events}, line {len(lines)}: "
    at = ["--aggregator", str(aggregator_toml(tmp_path))]
    root = ["--root", str(tmp_path / "runs")]
    for words, shown in {
        ("watch", "one", *at): "completed",
        ("logs", "one", *at): "round  3/3",
        ("ps", *at): "completed",
        ("runs", *root): "3/3",
    }.items():
        assert cli.main([*words]) == 0, words
        told = capsys.readouterr()
        assert shown in told.out, words
        assert told.err.count(where) == 1, words
    assert cli.main(["logs", "one", *at, "--json"]) == 0
    told = capsys.readouterr()
    assert told.out.encode().splitlines() == lines[:-1]
    assert told.err.count(where) == 1
    row = run_list.summary(run)
    assert row["status"] == "completed"
    assert row["error"].startswith(where)
    with pytest.raises(CorruptObject, match=f"line {len(lines)}"):
        run.anchors()  # What a run continues from is never read in part.
