"""The alert rules and the dashboard know the metrics that there are."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.registry import CollectorRegistry
from support import event_samples
from support.event_samples import Script
from support.programs import program

from federation.event_log import EventWriter
from federation.messages import FailureKind
from monitoring.runs.run_folder import RunFolder
from monitoring.web.run_metrics import RunsCollector

FILES = Path(__file__).parents[3] / "deploy" / "prometheus"
NAME = re.compile(r"crossfed_\w+")


def test_every_metric_that_the_files_name_exists(tmp_path: Path) -> None:
    """A rule about a metric that was renamed would never fire."""
    run = RunFolder(tmp_path)
    failures = ((2, event_samples.TWO_SITES[0], FailureKind.CRASHED),)
    with EventWriter(run.events) as log:
        for event in event_samples.run(Script(epsilon_cap=8.0, failures=failures)):
            log(event)
    registry = CollectorRegistry()
    registry.register(RunsCollector(lambda: [run]))
    text = generate_latest(registry).decode()
    there = {line.partition("{")[0] for line in text.splitlines()}
    dashboard = json.loads((FILES / "dashboard.json").read_text())
    asked = {e["expr"] for panel in dashboard["panels"] for e in panel["targets"]}
    asked |= set((FILES / "alerts.yml").read_text().splitlines())
    named = {name for text in asked for name in NAME.findall(text)}
    assert len(named) > 8
    assert named <= there


def test_documented_scrape_keeps_the_label_of_a_job() -> None:
    """Otherwise Prometheus names every run's job after the scrape."""
    page = (FILES.parents[1] / "docs" / "howto" / "live-page.md").read_text()
    text = page.partition("# prometheus.yml\n")[2].partition("```")[0]
    (scrape,) = yaml.safe_load(text)["scrape_configs"]
    assert scrape["honor_labels"] is True


@pytest.mark.slow
def test_rules_fire_when_they_should() -> None:
    """As Prometheus itself evaluates them."""
    promtool = program("promtool")
    for words in (("check", "alerts.yml"), ("test", "alerts_test.yml")):
        subprocess.run([promtool, words[0], "rules", words[1]], cwd=FILES, check=True)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["zero / zero", "1 / zero", "1 + zero"])
def test_rule_fires_for_a_loss_that_is_not_finite(tmp_path: Path, loss: str) -> None:
    """Series of promtool's tests hold numbers alone, so a rule of its own makes it."""
    labels = '{run="r", job="j"}'
    record = {"record": "crossfed_run_loss", "expr": loss}
    rules = {"groups": [{"name": "diverges", "rules": [record]}]}
    (tmp_path / "loss.yml").write_text(json.dumps(rules))
    told = {
        "exp_labels": {"run": "r", "job": "j", "severity": "warning"},
        "exp_annotations": {
            "summary": "The loss of j is not a finite number",
            "description": "Stop it with crossfed stop r, and lower the learning rate.",
        },
    }
    status = 'crossfed_run_status{run="r", job="j", status="running"}'
    case = {
        "interval": "1m",
        "input_series": [
            {"series": f"zero{labels}", "values": "0x20"},
            {"series": status, "values": "1x20"},
        ],
        "alert_rule_test": [
            {
                "alertname": "CrossfedLossNotFinite",
                "eval_time": "4m",
                "exp_alerts": [] if loss == "1 + zero" else [told],
            }
        ],
    }
    files = [str(FILES / "alerts.yml"), str(tmp_path / "loss.yml")]
    (tmp_path / "test.yml").write_text(
        json.dumps({"rule_files": files, "evaluation_interval": "1m", "tests": [case]})
    )
    command = [program("promtool"), "test", "rules", str(tmp_path / "test.yml")]
    subprocess.run(command, check=True)
