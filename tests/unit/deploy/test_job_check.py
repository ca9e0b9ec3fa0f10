"""What a job is said to cost before it runs."""

import re
from pathlib import Path
from typing import Any

import pytest
from support.small_jobs import small_job

from deploy.cli import job_check
from deploy.wiring import parts as wiring
from federation.clock import VirtualClock
from federation.errors import JobError

SPEEDS = """
combine_seconds = 2.0
dollars_per_hour = 3.6
dollars_per_gigabyte = 1e6

[[sites]]
name = "site-0"
train_examples_per_second = 32.0
evaluate_examples_per_second = 3.0
down_bytes_per_second = 1e3
up_bytes_per_second = 1e3
latency_seconds = 0.5
dollars_per_hour = 36.0
dollars_per_gigabyte = 1e6
"""


def test_time_and_cost_follow_from_stated_speeds(tmp_path: Path) -> None:
    """Two rounds of one site, added up by hand."""
    (tmp_path / "speeds.toml").write_text(SPEEDS)
    federation = wiring.build_federation(small_job(rounds=2))
    found = job_check.forecast(federation, VirtualClock(), tmp_path / "speeds.toml")
    assert found.traffic is not None
    assert found.cost is not None
    down, up = (span.high for span in found.traffic.of_run())
    # Two rounds and the final evaluation: each has two messages and a combination.
    # One step of 32 examples a round; 12 held-out examples each time.
    seconds = 3 * (1.0 + 2.0) + 2 * 1.0 + 3 * 4.0 + (down + up) / 1e3
    assert found.cost.seconds == pytest.approx(seconds)
    assert found.cost.dollars == pytest.approx(
        {
            "machines": seconds * 0.01,
            "aggregator": seconds * 0.001,
            "traffic up": up / 1e3,
            "traffic down": down / 1e3,
        }
    )


def test_a_site_without_stated_speeds_is_named(tmp_path: Path) -> None:
    """Nothing is assumed of it."""
    (tmp_path / "speeds.toml").write_text(SPEEDS)
    federation = wiring.build_federation(small_job(num_sites=2))
    told = r"speeds\.toml: sites: has no table for site 'site-1'"
    with pytest.raises(JobError, match=told):
        job_check.forecast(federation, VirtualClock(), tmp_path / "speeds.toml")


def checked(schedule: dict[str, Any] | None = None, **secure: Any) -> str:
    """What is said of nine sites under secure aggregation, or in the clear."""
    rule = {"weights": "uniform"}
    if "groups" in secure:
        rule |= {"combine": "median", "byzantine_sites": 1}
    options = {"num_train": 150, "num_held_out": 30}
    job = small_job(
        num_sites=9,
        aggregation=rule,
        schedule=schedule or {},
        data={"source": "support.small_jobs:blobs", "options": options},
        privacy={"secure_aggregation": {"enabled": bool(secure), **secure}},
    )
    return " ".join(
        job_check.forecast(wiring.build_federation(job), VirtualClock()).promises
    )


def test_check_says_what_bounds_a_bad_site() -> None:
    """The clip norm alone, or a rule over groups; nothing where updates are seen."""
    assert "the clip norm, 10. For" in checked(hybrid=True)
    assert "by up to 4 times the clip norm, 40: with few" in checked(levels=4)
    expected = "median over 3 groups of 3 or more sites, which all sites draw together"
    assert re.search(f"{expected}.*: .* 1 bad site", checked(groups=3))
    assert not checked()
    named = [[f"site-{i + first}" for i in range(3)] for first in (0, 3, 6)]
    buffered = checked(hybrid=True, schedule={"mode": "buffered", "groups": named})
    assert buffered.endswith("move the mean by up to the clip norm, 10")
