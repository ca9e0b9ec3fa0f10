"""A run's model on new data."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.small_jobs import blobs, small_job
from support.without_report import simulate

from clients.data.datasets import Examples
from clients.models import logistic_regression
from deploy.cli.commands import main
from deploy.tools.predict import predict
from federation.errors import JobError, ObjectExists, RunNotFound, SiteError
from monitoring.runs.run_folder import RunFolder

pytestmark = [pytest.mark.slow]


def unlabelled() -> tuple[Examples, Examples]:
    """The records of ``blobs`` without their classes."""
    train, held_out = (Examples(inputs=part.inputs, targets=None) for part in blobs())
    return train, held_out


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A finished run of two rounds."""
    found = RunFolder(tmp_path_factory.mktemp("predict") / "run")
    simulate(small_job(num_sites=2, rounds=2), folder=found.path)
    return found


def rows(path: Path) -> list[dict[str, Any]]:
    """Lines of JSON."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_predictions_and_metrics_are_those_of_the_run(
    run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The held-out loss of the last round, by the job's own source."""
    out = tmp_path / "out.jsonl"
    words = ["predict", str(run.path), "job", "--out", str(out), "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    result = json.loads(run.result.read_text())["final"]
    assert found["metrics"]["loss"] == pytest.approx(result["loss"], rel=1e-6)
    assert found["metrics"]["accuracy"] == result["accuracy"]
    written = rows(out)
    assert [row["record"] for row in written] == [*range(12)]
    hits = [
        r["prediction"] == c for r, c in zip(written, blobs()[1].targets, strict=True)
    ]
    assert np.mean(hits) == result["accuracy"]
    # An export has the model and the job, which is all that predictions need.
    given, again = tmp_path / "given", tmp_path / "again.jsonl"
    assert main(["export", str(run.path), "--to", f"file://{given}"]) == 0
    assert main(["predict", str(given), "job", "--out", str(again)]) == 0
    assert again.read_bytes() == out.read_bytes()


def test_a_damaged_model_is_refused_by_whatever_reads_it(
    run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One changed byte, in a run and in an export of it."""
    folder, given = tmp_path / "run", tmp_path / "given"
    shutil.copytree(run.path, folder)
    assert main(["export", str(folder), "--to", f"file://{given}"]) == 0
    for path in (folder / "model.safetensors", given / "model.safetensors"):
        data = bytearray(path.read_bytes())
        data[-2] ^= 1
        path.write_bytes(data)
    out = str(tmp_path / "out.jsonl")
    for words in (
        ["predict", str(folder), "job", "--out", out],
        ["predict", str(given), "job", "--out", out],
        ["export", str(folder), "--to", f"file://{tmp_path / 'second'}"],
        ["prune", str(folder), "--fraction", "0.5", "--out", out],
    ):
        capsys.readouterr()
        assert main(words) != 0
        said = capsys.readouterr().err
        assert "model.safetensors" in said
        assert "damaged" in said
    assert not Path(out).exists()
    assert not (tmp_path / "second").exists()
    for text in (b"rounds = = 2", b"name = '\xff'"):
        (folder / "job.toml").write_bytes(text)
        assert main(["predict", str(folder), "job", "--out", out]) != 0
        said = capsys.readouterr().err
        assert str(folder / "job.toml") in said
        assert "unexpected" not in said


def test_records_without_labels_have_predictions_alone(
    run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same ones, in three formats."""
    source = f"{__name__}:unlabelled"
    outs = [tmp_path / f"out.{end}" for end in ("jsonl", "npz", "parquet")]
    for out in outs:
        done = predict(run, source, {}, out=out, split="all")
        assert (done.records, done.metrics) == (72, {})
    from pyarrow import parquet  # noqa: PLC0415 -- an extra

    lines, arrays = rows(outs[0]), np.load(outs[1])
    table = parquet.read_table(outs[2]).to_pylist()
    assert [row["prediction"] for row in lines] == arrays["prediction"].tolist()
    parts = [*["train"] * 60, *["held_out"] * 12]
    for names in ([row["part"] for row in lines], arrays["part"].tolist()):
        assert names == parts
    assert [row["record"] for row in lines] == [*range(72)]
    assert [row["record_of_part"] for row in table] == [*range(60), *range(12)]
    assert [row["probabilities"] for row in table] == [
        row["probabilities"] for row in lines
    ]


def test_options_of_the_jobs_source_can_be_replaced(
    run: RunFolder, tmp_path: Path
) -> None:
    """As many records as they say."""
    done = predict(run, "job", {"num_held_out": 3}, out=tmp_path / "a.jsonl")
    assert done.records == 3


def test_what_cannot_be_done_is_refused_before_the_model_is_built(
    run: RunFolder, tmp_path: Path
) -> None:
    """With what to do."""
    with pytest.raises(JobError, match=r"must end in \.jsonl"):
        predict(run, "job", {}, out=tmp_path / "a.txt")
    (tmp_path / "a.npz").touch()
    with pytest.raises(ObjectExists, match="choose another file"):
        predict(run, "job", {}, out=tmp_path / "a.npz")
    with pytest.raises(RunNotFound, match="no model yet"):
        predict(RunFolder(tmp_path), "job", {}, out=tmp_path / "b.npz")


def test_raw_records_of_standardising_sites_are_refused(tmp_path: Path) -> None:
    """The model has never seen any; each site keeps its statistics."""
    bounds = {"low": [0.0], "high": [1.0]}
    private = {"unit": "record", "target_epsilon": 8.0, "clip_norm": 1.0}
    run = RunFolder(tmp_path)
    run.write_job(
        small_job(
            num_sites=2,
            evaluation={"every": 0},
            aggregation={"weights": "uniform"},
            privacy={
                "secure_aggregation": {"enabled": True, "two_sites_waiver": True},
                "differential_privacy": {**private, "standardise": bounds},
            },
        )
    )
    run.model.touch()
    with pytest.raises(JobError, match="standardised its records"):
        predict(run, "job", {}, out=tmp_path / "a.jsonl")


def own_objective(model: Any, inputs: Any, targets: Any) -> Any:
    """Cross-entropy of each record."""
    loss = torch.nn.functional.cross_entropy(model(inputs), targets, reduction="none")
    return {"loss": loss}


def badly_labelled() -> tuple[Examples, Examples]:
    """Classes that the model does not have."""
    train, held_out = (
        Examples(inputs=part.inputs, targets=part.targets + 9) for part in blobs()
    )
    return train, held_out


class TwoOutputs(torch.nn.Linear):
    """Returns a row for each record, and one number for all."""

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        """Logits, and their mean."""
        found = super().forward(inputs)
        return found, found.mean()


def two_outputs() -> torch.nn.Module:
    """From four features."""
    return TwoOutputs(4, 3)


def test_an_output_without_rows_is_refused_by_name(tmp_path: Path) -> None:
    """It has no length to compare."""
    run = RunFolder(tmp_path)
    run.write_job(small_job(model={"factory": f"{__name__}:two_outputs"}))
    save_file(two_outputs().state_dict(), run.model)
    with pytest.raises(SiteError, match=r"'output_1' of shape \[\]"):
        predict(run, f"{__name__}:unlabelled", {}, out=tmp_path / "a.jsonl")
    assert not (tmp_path / "a.jsonl").exists()


def test_an_own_objective_predicts_without_labels(tmp_path: Path) -> None:
    """It fails where it compares; what the model returned is what was asked for."""
    run = RunFolder(tmp_path)
    objective = {"task": f"{__name__}:own_objective", "metrics": {"loss": []}}
    run.write_job(small_job(training={"local_steps": 1, **objective}))
    model = logistic_regression(inputs=4, classes=3)
    save_file(model.state_dict(), run.model)
    done = predict(run, f"{__name__}:unlabelled", {}, out=tmp_path / "a.jsonl")
    assert (done.records, done.metrics) == (12, {})
    first = unlabelled()[1].inputs[:1]
    with torch.no_grad():
        expected = model(torch.as_tensor(first)).tolist()
    assert [rows(tmp_path / "a.jsonl")[0]["output"]] == expected
    with pytest.raises(SiteError, match="own_objective failed"):
        predict(run, f"{__name__}:badly_labelled", {}, out=tmp_path / "b.jsonl")


def wide() -> tuple[Examples, Examples]:
    """Records with twice as many features."""
    train, held_out = (
        Examples(inputs=np.tile(part.inputs, (1, 2)), targets=None) for part in blobs()
    )
    return train, held_out


def test_records_that_do_not_fit_the_model_are_refused(
    run: RunFolder, tmp_path: Path
) -> None:
    """With the shape that the model received."""
    with pytest.raises(SiteError, match=r"cannot be applied .* \(12, 8\)"):
        predict(run, f"{__name__}:wide", {}, out=tmp_path / "a.jsonl")
