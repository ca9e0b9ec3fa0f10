"""Metrics of runs: the numbers of the view, and a bounded number of series."""

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from support import event_samples
from support.event_samples import Script

from federation.event_log import EventWriter
from federation.events import Event
from federation.messages import FailureKind
from monitoring.runs.find import find_runs
from monitoring.runs.run_folder import RunFolder
from monitoring.views.run_fold import fold
from monitoring.web import run_metrics
from monitoring.web.run_metrics import RunsCollector

Samples = dict[tuple[str, ...], float]


def _write(run: RunFolder, events: list[Event]) -> None:
    with EventWriter(run.events) as log:
        for event in events:
            log(event)


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


def test_further_sites_and_older_runs_cost_no_series(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten thousand sites do not fill the operator's database."""
    monkeypatch.setattr(run_metrics, "MAX_SITES", 3)
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
