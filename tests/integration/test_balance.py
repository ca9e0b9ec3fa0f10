"""From the speeds that a run measured to shares that are even."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from support.small_jobs import small_job

from deploy import exit_codes
from deploy.cli import commands as cli
from federation.job import job_file

pytestmark = pytest.mark.slow


def test_from_a_run_to_a_job_that_is_even(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """The line that is printed can be put into the job, which is sound."""
    partition: dict[str, Any] = {"kind": "proportional", "speeds": [1, 4]}
    data: dict[str, Any] = {
        "source": "support.small_jobs:blobs",
        "partition": partition,
    }
    job = small_job(num_sites=2, rounds=2, data=data, training={"local_epochs": 2})
    path, run = tmp_path / "job.toml", str(tmp_path / "run")
    path.write_text(tomli_w.dumps(job_file.document(job)), encoding="utf-8")
    assert (
        cli.main(["simulate", str(path), "--out", run, "--no-report"])
        == exit_codes.DONE
    )
    capsys.readouterr()

    assert cli.main(["data", "balance", run]) == exit_codes.DONE
    text = capsys.readouterr().out
    assert "as it was: an epoch takes" in text
    assert "by speed: an epoch takes" in text
    assert "local_steps" not in text
    (line,) = (row for row in text.splitlines() if row.startswith("partition"))

    assert cli.main(["data", "balance", run, "--json"]) == exit_codes.DONE
    found = json.loads(capsys.readouterr().out)
    assert [site["examples"] for site in found["now"]["sites"]] == [12, 48]
    assert found["speeds"] == [site["speed"] for site in found["now"]["sites"]]
    assert (
        line == f'partition = {{ kind = "proportional", speeds = {found["speeds"]} }}'
    )

    # Nothing is trained with them: what this machine measures may be anything.
    even = [site["examples"] for site in found["proportional"]["sites"]]
    assert sum(even) == 60
    partition["speeds"] = found["speeds"]
    data["partition"] = tomllib.loads(line)["partition"]
    assert data["partition"] == partition
    small_job(num_sites=2, data=data)


def test_no_such_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """One line, without a traceback."""
    command = ["data", "balance", "none", "--root", str(tmp_path)]
    assert cli.main(command) == exit_codes.BAD_JOB
    assert "there is no run 'none'" in capsys.readouterr().err
