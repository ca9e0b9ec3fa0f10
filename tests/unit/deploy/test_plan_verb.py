"""``crossfed plan``, as it is typed: what it refuses, names and prints."""

from pathlib import Path

import pytest
import tomli_w
from support.small_jobs import small_job

from deploy.cli import main
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
    """Its price would be ignored, and the recommendation wrong."""
    assert main(["plan", str(deployed(tmp_path, "site-0", "site-7"))]) == 2
    err = capsys.readouterr().err
    assert "sites[1].name" in err
    assert "'site-7'" in err


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "1e999", "much"])
@pytest.mark.parametrize("option", ["--month-gb", "--budget", "--deadline"])
def test_amounts_are_finite(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
):
    """Each would pass every comparison, or none."""
    with pytest.raises(SystemExit) as end:
        main(["plan", "fed.toml", f"{option}={value}"])
    assert end.value.code == 2
    err = capsys.readouterr().err
    assert f"argument {option}:" in err
    assert "finite" in err
    assert repr(value) in err


def test_only_traffic_may_be_nothing(capsys: pytest.CaptureFixture[str]):
    """Nothing fits a budget or a deadline of 0."""
    for option in ("--budget", "--deadline"):
        with pytest.raises(SystemExit):
            main(["plan", "fed.toml", option, "0"])
        assert "above 0, not '0'" in capsys.readouterr().err
    assert main(["plan", "there-is-no.toml", "--month-gb", "0"]) == 2
    assert "--month-gb" not in capsys.readouterr().err
