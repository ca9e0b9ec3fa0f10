"""Metrics of runs: the numbers of the view, and a bounded number of series."""

import math
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from support import event_samples
from support.event_samples import Script

from federation.event_log import EventWriter
from federation.events import Event, ModelEvaluated, RoundFinished, RunFinished
from federation.messages import FailureKind
from monitoring.runs import fold_cache, numbers_reader, run_numbers
from monitoring.runs.find import find_runs
from monitoring.runs.numbers_reader import NumbersReader
from monitoring.runs.run_folder import RunFolder
from monitoring.runs.run_numbers import RunNumbers
from monitoring.views.run_fold import fold
from monitoring.web import run_metrics
from monitoring.web.run_metrics import RunsCollector

Samples = dict[tuple[str, ...], float]


def _write(run: RunFolder, events: list[Event]) -> None:
    with EventWriter(run.events) as log:
        for event in events:
            log(event)


def _take(run: RunFolder, events: list[Event]) -> None:
    """Write events as a coordinator does."""
    numbers = NumbersReader(run.events)
    numbers.look()
    with EventWriter(run.events) as log:
        for event in events:
            log(event)
            numbers.take(event)


def _further(labels: dict[str, str]) -> list[str]:
    return [value for name, value in sorted(labels.items()) if name != "job"]


def _scrape(collector: RunsCollector) -> Samples:
    """Values by name and the labels after run and job, as a Prometheus reads them."""
    registry = CollectorRegistry()
    registry.register(collector)
    text = generate_latest(registry).decode()
    return {
        (sample.name, sample.labels.pop("run"), *_further(sample.labels)): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_numbers_are_those_of_the_view(tmp_path: Path) -> None:
    """Whatever has been told is there, and follows the run."""
    run = RunFolder(tmp_path / "job" / "run")
    failures = ((2, "gcp-us-central1", FailureKind.DEADLINE),)
    events = event_samples.run(Script(rounds=5, epsilon_cap=8.0, failures=failures))
    half = len(events) // 2
    collector = RunsCollector(lambda: find_runs(tmp_path))
    _write(run, events[:half])
    early = _scrape(collector)
    assert early["crossfed_run_status", "run", "running"] == 1
    _write(run, events[half:])
    found, view = _scrape(collector), fold(events)
    assert found["crossfed_run_status", "run", view.status] == 1
    assert ("crossfed_run_status", "run", "running") not in found
    assert view.last_evaluated is not None
    assert found["crossfed_run_loss", "run"] == view.last_evaluated.pooled.loss
    assert view.total_spent is not None
    assert found["crossfed_run_epsilon", "run"] == view.total_spent.epsilon
    assert found["crossfed_run_epsilon_cap", "run"] == 8.0
    assert found["crossfed_run_bytes_total", "run", "up"] == view.bytes_up
    assert found["crossfed_run_bytes_total", "run", "down"] == view.bytes_down
    for site in view.sites:
        key = ("crossfed_site_answers_total", "run", site.site)
        assert found[key] == site.answered
    deadline = ("crossfed_site_failures_total", "run", "deadline", "gcp-us-central1")
    assert found[deadline] == 1


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_loss_that_diverged_is_not_absent(tmp_path: Path, loss: float) -> None:
    """An alert rule needs it; a Prometheus can hold it."""
    run = RunFolder(tmp_path / "job" / "run")
    events = event_samples.run(Script(rounds=2))
    at = max(n for n, e in enumerate(events) if isinstance(e, ModelEvaluated))
    last = events[at]
    assert isinstance(last, ModelEvaluated)
    events[at] = replace(last, pooled=replace(last.pooled, loss_sum=loss))
    _take(run, events)
    found = _scrape(RunsCollector(lambda: [run]))["crossfed_run_loss", "run"]
    assert str(found) == str(loss)


def test_further_sites_and_older_runs_cost_no_series(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten thousand sites do not fill the operator's database."""
    monkeypatch.setattr(run_numbers, "MAX_SITES", 3)
    monkeypatch.setattr(run_metrics, "MAX_RUNS", 2)
    sites = tuple(f"site-{index}" for index in range(9))
    for name in ("a", "b", "c"):
        script = Script(sites=sites, rounds=2)
        _write(RunFolder(tmp_path / "job" / name), event_samples.run(script))
    found = _scrape(RunsCollector(lambda: find_runs(tmp_path)))
    assert {key[1] for key in found} == {"b", "c"}
    answers = {
        k[2]: v
        for k, v in found.items()
        if k[:2] == ("crossfed_site_answers_total", "b")
    }
    assert len(answers) == 4
    assert answers["other"] == 2 * 6
    assert sum(answers.values()) == 2 * 9


@pytest.mark.parametrize(
    "events",
    [event_samples.resumed(), event_samples.private()],
    ids=["resumed", "private"],
)
def test_monitor_that_starts_reads_only_what_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: list[Event]
) -> None:
    """Its counters are those of every event, also where a coordinator was killed."""
    monkeypatch.setattr(numbers_reader, "ROUND_BYTES", 1)
    run, plain = (
        RunFolder(tmp_path / "job" / "run"),
        RunFolder(tmp_path / "job2" / "run"),
    )
    stays = RunsCollector(lambda: [plain])
    for at in range(0, len(events), 7):
        _take(run, events[at : at + 7])
        _write(plain, events[at : at + 7])
        assert _scrape(RunsCollector(lambda: [run])) == _scrape(stays)
        assert NumbersReader(run.events).look() == NumbersReader(plain.events).look()
    ended = next(e for e in events[::-1] if isinstance(e, RoundFinished | RunFinished))
    rest = len(events) - 1 - events.index(ended)
    place = NumbersReader(run.events)._tail.place[0]
    assert run.events.read_bytes().count(b"\n", place) == rest
    assert not (plain.path / numbers_reader.NAME).exists()


def test_numbers_of_another_log_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor those that are damaged, of another release, or of a log begun anew."""
    monkeypatch.setattr(numbers_reader, "ROUND_BYTES", 1)
    run, other = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "other")
    _take(run, event_samples.run(Script(rounds=5, seed=1)))
    _take(other, event_samples.run(Script(rounds=6, seed=2)))
    cached = run.path / numbers_reader.NAME
    own, foreign = cached.read_bytes(), (other.path / numbers_reader.NAME).read_bytes()
    cached.unlink()
    expected = NumbersReader(run.events).look()
    damaged = own.replace(b'"rounds": 5', b'"rounds": 7')
    assert damaged != own
    body = damaged.partition(b"\n")[2]
    older = body.replace(b'"release": "', b'"release": "0')
    stale = fold_cache._seal(older) + older
    strange = own.partition(b"\n")[2].replace(b'"worse"', b'"worst"')
    odd = fold_cache._seal(strange) + strange
    for content in (own, foreign, own[:-20], damaged, stale, odd, b"", b"{}\n{}"):
        cached.write_bytes(content)
        assert NumbersReader(run.events).look() == expected
    cached.write_bytes(own)
    run.events.unlink()
    events = event_samples.run(Script(rounds=9, seed=3))[:20]
    _write(run, events)
    found, folded = NumbersReader(run.events).look(), RunNumbers()
    for event in events:
        folded.add(event)
    assert found == folded


def test_scrape_does_not_wait_for_a_long_log(tmp_path: Path) -> None:
    """Another thread reads it, which ends after the scrape."""
    run, reads, scraped = (
        RunFolder(tmp_path / "job" / "run"),
        threading.Event(),
        threading.Event(),
    )
    _write(run, event_samples.run(Script(rounds=3)))

    def find() -> list[RunFolder]:
        if not reads.is_set():
            reads.set()
            scraped.wait(5.0)
        return [run]

    collector = RunsCollector(find)
    thread = threading.Thread(target=collector.look)
    thread.start()
    assert reads.wait(60.0)
    assert _scrape(collector) == {}
    scraped.set()
    thread.join()
    ended = "crossfed_run_rounds_ended_total", "run", "completed"
    assert _scrape(collector)[ended] == 3
