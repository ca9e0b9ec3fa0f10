"""The alert rules and the dashboard know the metrics that there are."""

import subprocess
from pathlib import Path

import pytest
from support.programs import program

FILES = Path(__file__).parents[3] / "deploy" / "prometheus"


@pytest.mark.slow
def test_rules_fire_when_they_should() -> None:
    """As Prometheus itself evaluates them."""
    promtool = program("promtool")
    for words in (("check", "alerts.yml"), ("test", "alerts_test.yml")):
        subprocess.run([promtool, words[0], "rules", words[1]], cwd=FILES, check=True)
