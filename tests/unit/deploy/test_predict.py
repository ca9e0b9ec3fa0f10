"""Records of several parts of a data source, in one file of predictions."""

import csv
import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.small_jobs import small_job

from deploy.tools.predict import _csv, numbered, source_of
from federation.errors import JobError, SiteError
from monitoring.runs.run_folder import RunFolder


def test_records_say_which_part_they_are_from_and_their_number_there():
    """Numbers go on from batch to batch."""
    batches = [{"output": np.zeros((2, 3))}, {"output": np.zeros((1, 3))}]
    first, last = numbered("held_out", iter(batches))
    assert first["part"].tolist() == ["held_out"] * 2
    assert first["record_of_part"].tolist() == [0, 1]
    assert last["record_of_part"].tolist() == [2]
    assert last["output"].shape == (1, 3)
    with pytest.raises(SiteError, match="the model returns 'part'"):
        next(numbered("train", iter([{"part": np.zeros(2)}])))


def test_a_spreadsheet_opens_predictions():
    """A column for each probability; NaN is empty, and other lists are JSON."""
    first = {
        "prediction": np.array(["healthy", 'a "b", c']),
        "probabilities": np.array([[0.75, 0.25], [np.nan, 1.0]]),
        "tokens": np.array([[1, 2], [3, 4]]),
    }
    last = {name: values[:1] for name, values in first.items()}
    text = b"".join(_csv(iter([first, last]))).decode()
    assert list(csv.DictReader(io.StringIO(text))) == [
        {
            "record": str(number),
            "prediction": said,
            "probabilities_0": low,
            "probabilities_1": high,
            "tokens": tokens,
        }
        for number, said, low, high, tokens in (
            (0, "healthy", "0.75", "0.25", "[1, 2]"),
            (1, 'a "b", c', "", "1.0", "[3, 4]"),
            (2, "healthy", "0.75", "0.25", "[1, 2]"),
        )
    ]
    longer = {**last, "probabilities": np.ones((1, 3))}
    with pytest.raises(JobError, match=r"different shapes: write .jsonl"):
        list(_csv(iter([first, longer])))


def test_a_source_of_a_site_is_named_where_the_job_has_none(tmp_path: Path):
    """With its options, as a shell takes them."""
    blobs = "support.small_jobs:blobs"
    sites = [{"name": "a", "data": {"source": blobs, "options": {"has": ["x"]}}}]
    run = RunFolder(tmp_path)
    run.write_job(replace(small_job(sites=sites), data=None))
    with pytest.raises(JobError) as caught:
        source_of(run, "job", {})
    assert f"site 'a': {blobs} --option 'has=[\"x\"]'" in str(caught.value)


def test_another_tokenizer_than_the_jobs_is_refused(tmp_path: Path):
    """Its numbers mean other words; a source that loads none may hold numbers."""
    ours, theirs = "a" * 64, "b" * 64
    run, source = RunFolder(tmp_path), "support.small_jobs:tokenized"
    model = {"factory": "clients.models:mlp", "tokenizers": [ours]}
    run.write_job(small_job(model=model))
    for loaded in ([ours], []):
        assert len(source_of(run, source, {"digests": loaded})) == 2
    with pytest.raises(JobError, match=f"{source} has loaded {theirs}"):
        source_of(run, source, {"digests": [theirs]})
