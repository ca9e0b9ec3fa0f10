"""``crossfed plan``, as it is typed: what it refuses, names and prints."""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from support.small_jobs import small_job

from deploy.cli import main
from deploy.fleet import forecast, prices
from federation.job import job_file

ROOT = Path(__file__).parents[3]


def deployed(folder: Path, *names: str) -> Path:
    """Write a job with two sites, and a deployment of sites on this host."""
    job = small_job(num_sites=2, rounds=4)
    (folder / "job.toml").write_text(tomli_w.dumps(job_file.document(job)))
    sites = [{"name": name, "dollars_per_hour": 36.0} for name in names]
    path = folder / "fed.toml"
    path.write_text(tomli_w.dumps({"name": "fed", "job": "job.toml", "sites": sites}))
    return path


def test_a_site_that_the_job_lacks_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Its price would be ignored, and the dollars wrong."""
    assert main(["plan", str(deployed(tmp_path, "site-0", "site-7"))]) == 2
    err = capsys.readouterr().err
    assert "sites[1].name" in err
    assert "'site-7'" in err


def test_a_plan_says_what_the_budget_does_not_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Nobody takes ``max_dollars`` for the whole bill."""
    path = deployed(tmp_path, "site-0", "site-1")
    assert main(["plan", str(path)]) == 0
    assert "max_dollars" not in capsys.readouterr().err
    path.write_text(f"max_dollars = 7.0\n{path.read_text()}")
    assert main(["plan", str(path), "--json"]) == 0
    (notice,) = json.loads(capsys.readouterr().out)["notices"]
    assert all(x in notice for x in ("max_dollars = 7", "traffic", "NAT", "disks"))


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "1e999", "much"])
def test_amounts_are_finite(value: str, capsys: pytest.CaptureFixture[str]):
    """Each would pass every comparison, or none."""
    with pytest.raises(SystemExit) as end:
        main(["plan", "fed.toml", f"--month-gb={value}"])
    assert end.value.code == 2
    err = capsys.readouterr().err
    assert "argument --month-gb:" in err
    assert "finite" in err
    assert repr(value) in err


def test_traffic_may_be_nothing(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "there-is-no.toml", "--month-gb", "0"]) == 2
    assert "--month-gb" not in capsys.readouterr().err


Plan = Callable[..., tuple[Any, str]]


@pytest.fixture
def planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Plan:
    """Plans a deployment at stated speeds; returns its JSON and what it tells."""
    line = {"down_bytes_per_second": 1e6, "up_bytes_per_second": 1e6}
    rate = {"train_examples_per_second": 1e3, "evaluate_examples_per_second": 1e3}
    sites = [{"name": f"site-{index}", **line, **rate} for index in range(2)]
    speeds = tmp_path / "speeds.toml"
    speeds.write_text(tomli_w.dumps({"sites": sites}))

    def plan(file: Path, *options: str, code: int = 0) -> tuple[Any, str]:
        given = ["plan", str(file), "--json", "--speeds", str(speeds), *options]
        assert main(given) == code
        out, err = capsys.readouterr()
        return json.loads(out), err

    return plan


def test_stated_prices_have_no_day(tmp_path: Path, planned: Plan):
    found, _ = planned(deployed(tmp_path, "site-0", "site-1"))
    assert found["prices_of"] is None


@pytest.mark.slow
def test_a_simulated_run_shows_speeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """They are kept for later plans, whose prices come from the deployment."""
    file, run = str(deployed(tmp_path, "site-0", "site-1")), str(tmp_path / "run")
    assert main(["simulate", str(tmp_path / "job.toml"), "--out", run]) == 0
    capsys.readouterr()
    assert main(["plan", file, "--like", run, "--json"]) == 0
    own, *_ = json.loads(capsys.readouterr().out)["alternatives"]
    assert own["seconds"] > 0
    machines = own["dollars"]["machines"]
    assert machines == pytest.approx(2 * 36.0 * own["seconds"] / 3600)
    path = tmp_path / "deployments" / "fed" / forecast.SPEEDS
    assert forecast.load_speeds(path).sites
    assert main(["plan", file, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["alternatives"][0] == own
    assert main(["plan", file, "--like", run, "--speeds", str(path)]) == 2
    assert "give one of --speeds and --like" in capsys.readouterr().err


def test_json_has_the_notices(tmp_path: Path, planned: Plan):
    """And the day of the prices; each notice is told once."""
    file = deployed(tmp_path)
    table = tomllib.loads((ROOT / "deploy/examples/two-clouds.toml").read_text())
    for index, site in enumerate(table["sites"]):
        site["name"] = f"site-{index}"
    file.write_text(tomli_w.dumps(table | {"job": "job.toml"}))
    text = prices.PACKAGED.read_text()
    (tmp_path / "p.toml").write_text(
        text.replace("2026-06-17", "2025-06-17").replace("spot = 0.0396, ", "")
    )
    found, err = planned(file, "--prices", str(tmp_path / "p.toml"))
    assert found["prices_of"] == "2025-06-17"
    assert any("days old" in notice for notice in found["notices"])
    assert any("dollars_per_hour" in notice for notice in found["notices"])
    assert all(err.count(notice) == 1 for notice in found["notices"])


def test_an_error_leaves_no_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Half a document would be taken for the whole one."""
    file = deployed(tmp_path, "site-0", "site-1")
    assert main(["plan", str(file), "--json", "--plot", "x.svg"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "--plot: " in err
