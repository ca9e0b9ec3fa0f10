"""``crossfed plan``, as it is typed: what it refuses, names and prints."""

import json
from pathlib import Path

import pytest
import tomli_w
from support.small_jobs import small_job

from deploy.cli import main
from deploy.fleet import forecast
from federation.job import job_file


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


def test_an_error_leaves_no_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Half a document would be taken for the whole one."""
    file = deployed(tmp_path, "site-0", "site-1")
    assert main(["plan", str(file), "--json", "--plot", "x.svg"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "--plot: " in err
