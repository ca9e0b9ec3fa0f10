"""What commands say."""

import argparse
import json
import math

import pytest

from deploy.cli import terminal
from federation.errors import JobError
from federation.typed_json import refuse_constant


def test_json_has_no_nan(capsys: pytest.CaptureFixture[str]):
    """Nor an infinity, however deep: no other program could read it."""
    terminal.say_json({"rows": [{"loss": math.nan}, (math.inf, 1.0)]})
    found = json.loads(capsys.readouterr().out, parse_constant=refuse_constant)
    assert found == {"rows": [{"loss": "NaN"}, ["Infinity", 1.0]]}


def test_an_error_names_one_file(capsys: pytest.CaptureFixture[str]):
    """The job's file stands before an error, unless that names another file."""
    options = argparse.Namespace(verbose=False, job="job.toml", speeds="speeds.toml")
    terminal.complain(JobError("is 0", key="speeds.toml: combine_seconds"), options)
    terminal.complain(JobError("is 0", key="rounds"), options)
    told = capsys.readouterr().err
    assert "job.toml: rounds: is 0" in told
    assert "job.toml: speeds.toml" not in told
