"""A pruned model that is trained on keeps its zeros."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.small_jobs import small_job
from support.without_report import simulate

from deploy.cli.commands import main
from deploy.tools.prune import prune
from federation.errors import ObjectExists
from federation.job.spec import JobSpec
from monitoring.runs.run_folder import RunFolder

pytestmark = [pytest.mark.slow]


def job_of(**model: Any) -> JobSpec:
    """Logistic regression, whose one layer has 12 weights."""
    options = {"inputs": 4, "classes": 3}
    factory = "clients.models:logistic_regression"
    return small_job(
        num_sites=2,
        rounds=3,
        model={"factory": factory, "options": options, **model},
        privacy={"secure_aggregation": {"enabled": True, "two_sites_waiver": True}},
    )


def zeros(path: Path) -> np.ndarray:
    """Which weights of the layer are zero."""
    (matrix,) = (a for a in load_file(path).values() if a.ndim == 2)
    return matrix == 0


def test_zeros_stay_and_the_rest_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also in a secure sum."""
    first, out = RunFolder(tmp_path / "first"), tmp_path / "pruned.safetensors"
    simulate(job_of(), folder=first.path)
    words = ["prune", str(first.path), "--fraction", "0.5", "--out", str(out)]
    assert main([*words, "--json"]) == 0
    (layer,) = json.loads(capsys.readouterr().out)["layers"]
    assert (layer["zeros"], layer["weights"]) == (6, 12)
    second = RunFolder(tmp_path / "second")
    done = simulate(job_of(weights=str(out), keep_zeros=True), folder=second.path)
    assert done.rounds_completed == 3
    assert np.array_equal(zeros(second.model), zeros(out))
    assert zeros(out).sum() == 6
    assert all(
        not np.array_equal(array, load_file(out)[name])
        for name, array in load_file(second.model).items()
    )
    with pytest.raises(ObjectExists, match="choose another file"):
        prune(first, 0.5, kind="value", out=out)
