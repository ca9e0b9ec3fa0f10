"""``crossfed find-rate``."""

import json
from pathlib import Path

import pytest

from deploy.cli.commands import main
from deploy.exit_codes import DONE, FAILED

JOB = """
name = "small"
rounds = 1
model.factory = "clients.models:logistic_regression"
model.options = { inputs = 4, classes = 3 }
data.source = "support.small_jobs:blobs"
training = { local_steps = 1, batch_size = 8 }
sites = [{ name = "a" }, { name = "b" }]
"""


@pytest.fixture
def job(tmp_path: Path) -> str:
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return str(path)


def test_a_rate_and_a_noise_scale_are_printed(
    job: str, capsys: pytest.CaptureFixture[str]
):
    """Of the site that is named; the whole test as JSON."""
    words = ["find-rate", job, "--site", "b", "--low", "1e-2", "--steps", "30"]
    assert main([*words, "--high", "1e3"]) == DONE
    said = capsys.readouterr().out
    assert "the loss falls fastest" in said
    assert "gradient noise scale" in said
    assert main([*words, "--high", "1e3", "--json"]) == DONE
    found = json.loads(capsys.readouterr().out)
    assert found["site"] == "b"
    assert f"fastest at {found['rate']:.2e}" in said
    assert len(found["rates"]) == len(found["losses"]) == len(found["smoothed"])


def test_a_search_without_a_result_fails(job: str, capsys: pytest.CaptureFixture[str]):
    """A loss that only grows; values that are not finite are null."""
    words = ["find-rate", job, "--low", "1e30", "--high", "1e38"]
    assert main([*words, "--json"]) == FAILED
    assert json.loads(capsys.readouterr().out)["rate"] is None
    assert main(words) == FAILED
    assert "falls at no rate" in capsys.readouterr().out


def test_a_site_must_be_one_of_the_job(job: str, capsys: pytest.CaptureFixture[str]):
    assert main(["find-rate", job, "--site", "c"]) == 2
    assert "sites are a, b" in capsys.readouterr().err
