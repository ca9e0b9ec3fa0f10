"""What is written of what a model returns."""

from typing import Any

import numpy as np
import pytest
import torch

from clients.training.predictions import check_scores, columns_of
from federation.errors import SiteError
from federation.job.spec import TrainingSpec

LOGITS = torch.tensor([[0.0, 1.0, -1.0], [2.0, 0.0, 0.0]])


def columns(task: str, outputs: Any, **keys: Any) -> dict[str, list[Any]]:
    """Columns as lists."""
    found = columns_of(TrainingSpec(task=task, **keys), outputs)
    return {name: values.tolist() for name, values in found.items()}


def test_classes_have_their_names():
    """And probabilities that add up to 1."""
    found = columns("classification", LOGITS, classes=("a", "b", "c"))
    assert found["prediction"] == ["b", "a"]
    np.testing.assert_allclose(np.sum(found["probabilities"], axis=1), 1, rtol=1e-6)
    assert columns("classification", LOGITS)["prediction"] == [1, 0]


@pytest.mark.parametrize(
    ("outputs", "names"),
    [
        (LOGITS.bfloat16(), ["output"]),
        ((LOGITS, LOGITS), ["output_0", "output_1"]),
        ({"score": LOGITS, "hidden": None}, ["score"]),
    ],
)
def test_other_outputs_are_written_as_they_are(outputs: Any, names: list[str]):
    """Of an objective of the user's own."""
    assert list(columns("mine:loss", outputs)) == names


def test_outputs_without_a_tensor_are_refused():
    """There is nothing to write."""
    with pytest.raises(SiteError, match="returned a str"):
        columns("mine:loss", "text")


NAN = float("nan")


def test_a_record_whose_scores_are_nan_has_no_class():
    """The first class would be the largest; the record is named by its number."""
    inputs = torch.tensor([[1.0], [NAN], [2.0]])
    for outputs in (inputs * LOGITS[:1], {"logits": (inputs * LOGITS[:1])[:, None]}):
        with pytest.raises(SiteError, match="record 41 of train holds NaN or inf"):
            check_scores(outputs, {"x": inputs}, 40, "train")
    check_scores(inputs[:1] * LOGITS[:1], inputs[:1], 40, "train")


def test_a_model_that_has_diverged_is_told_from_records_that_hold_nan():
    """Infinite scores have an order, and other outputs are written as they are."""
    inputs = torch.ones(2, 1)
    with pytest.raises(
        SiteError, match="NaN for record 0 of held_out, whose values are all"
    ):
        check_scores(LOGITS * NAN, inputs, 0, "held_out")
    check_scores(LOGITS + float("inf"), inputs, 0, "held_out")
    check_scores((LOGITS, LOGITS), inputs, 0, "held_out")
