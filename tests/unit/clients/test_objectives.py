"""What local training minimises."""

import math

import pytest
import torch
from support.small_jobs import small_job
from torch import nn

from clients.models.applying import apply_model
from clients.models.objectives import (
    OBJECTIVES,
    causal_lm,
    classification,
    objective_of,
)
from federation.errors import SiteError


class Fixed(nn.Module):
    """Gives the same output whatever comes in."""

    def __init__(self, output: object) -> None:
        super().__init__()
        self.output = output

    def forward(self, _: torch.Tensor) -> object:
        return self.output


INPUTS = torch.zeros(2, 3)
LABELS = torch.tensor([0, 1])
TOKENS = torch.tensor([[0, 1, 0], [1, 1, 1]])


def test_classification_sums_over_examples():
    """Loss by hand: -log softmax of the label, added up."""
    logits = torch.tensor([[2.0, 0.0, 0.0], [3.0, 1.0, 0.0]])
    loss = classification(Fixed(logits), INPUTS, LABELS)
    expected = -2 + math.log(math.exp(2) + 2)
    expected += -1 + math.log(math.exp(3) + math.e + 1)
    assert loss.total.item() == pytest.approx(expected)
    assert (loss.count, loss.metrics["correct"].item()) == (2, 1)


def test_evaluation_counts_predictions_by_label():
    """Row by row: label, then prediction. Training does not pay for it."""
    job = small_job(training={"local_steps": 1, "classes": ["a", "b", "c"]})
    logits = torch.eye(3)[torch.tensor([0, 2, 1, 1])].requires_grad_()
    labels = torch.tensor([0, 0, 1, 2])
    objective = objective_of(job.training)
    with torch.no_grad():
        found = objective(Fixed(logits), INPUTS, labels).metrics["confusion"]
    assert found.tolist() == [1, 0, 1, 0, 1, 0, 0, 1, 0]
    assert set(objective(Fixed(logits), INPUTS, labels).metrics) == {"correct"}


def test_class_without_a_name_is_refused():
    job = small_job(training={"local_steps": 1, "classes": ["a", "b"]})
    objective = objective_of(job.training)
    with pytest.raises(SiteError, match="names 2, and the model has 3 outputs"):
        objective(Fixed(torch.zeros(2, 3)), INPUTS, LABELS)


def test_causal_lm_sums_over_next_tokens():
    """Each position predicts the token after it."""
    logits = torch.zeros(2, 2, 4)
    logits[0, 0, 1] = 5.0
    loss = causal_lm(Fixed(logits), TOKENS, None)
    expected = 3 * math.log(4) + math.log(math.exp(5) + 3) - 5
    assert loss.total.item() == pytest.approx(expected)
    assert (loss.count, loss.metrics["correct"].item()) == (4, 2)


def test_record_of_more_tokens_than_the_job_allows_is_refused():
    """It would count for more than a sum over sites believes."""
    model, job = Fixed(torch.zeros(2, 2, 4)), {"task": "causal_lm", "local_steps": 1}
    allowed, short = (
        objective_of(small_job(training=job | {"max_tokens": most}).training)
        for most in (2, 1)
    )
    assert allowed(model, TOKENS, None).count == 4
    with pytest.raises(SiteError, match=r"job's 1: .*training.max_tokens; it has 2"):
        short(model, TOKENS, None)


def test_causal_lm_hides_the_last_token():
    """The model sees all tokens but the last."""
    seen = []

    class Watcher(nn.Module):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            seen.append(tokens.clone())
            return torch.zeros(*tokens.shape, 2)

    causal_lm(Watcher(), TOKENS, None)
    assert seen[0].tolist() == TOKENS[:, :-1].tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_loss_of_half_precision_logits_is_float32(dtype: torch.dtype):
    """Sums over many predictions need the digits."""
    logits = torch.zeros(2, 3, dtype=dtype)
    assert classification(Fixed(logits), INPUTS, LABELS).total.dtype is torch.float32


@pytest.mark.parametrize(
    ("output", "labels", "message"),
    [
        (torch.zeros(2, 3), None, "needs targets"),
        (torch.zeros(2), LABELS, "for 2 examples"),
        (torch.zeros(3, 3), LABELS, r"returned \(3, 3\)"),
        (torch.zeros(2, 3), LABELS.float(), "integer class"),
        (torch.zeros(2, 3), LABELS[:, None], "integer class per example"),
        ((torch.zeros(2, 3), None), LABELS, "returned a tuple"),
        (torch.zeros(2, 2), LABELS + 1, "has 2 outputs, so .* from 0 to 1: .* 1 to 2"),
        (torch.zeros(2, 1), LABELS, "has a single output, .* give it two"),
    ],
)
def test_classification_explains_what_it_needs(
    output: object, labels: torch.Tensor | None, message: str
):
    """Wrong labels and wrong outputs are errors that name their shapes."""
    with pytest.raises(SiteError, match=message):
        classification(Fixed(output), INPUTS, labels)


@pytest.mark.parametrize("records", [1, 2])
def test_batch_norm_of_one_record_says_what_to_change(records: int):
    """The last batch of an epoch may have a single one."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, records))
    with pytest.raises((ValueError, SiteError)) as caught:
        classification(model, INPUTS[:records], LABELS[:records] + 9)
    notes = "".join(getattr(caught.value, "__notes__", []))
    assert ("training.batch_size" in notes) == (records == 1)


@pytest.mark.parametrize(
    ("output", "tokens", "message"),
    [
        (torch.zeros(2, 3, 4), TOKENS, r"for \(2, 2\) predictions"),
        (torch.zeros(2, 4), TOKENS, r"returned \(2, 4\)"),
        ({"hidden": torch.zeros(2, 2, 4)}, TOKENS, "returned a dict"),
        (torch.zeros(2, 0, 4), TOKENS[:, :1], "at least two"),
        (torch.zeros(2, 2, 4), TOKENS.float(), "integer tokens"),
        (torch.zeros(2, 2, 4), TOKENS[0], "windows"),
    ],
)
def test_causal_lm_explains_what_it_needs(
    output: object, tokens: torch.Tensor, message: str
):
    """So do wrong windows of tokens."""
    with pytest.raises(SiteError, match=message):
        causal_lm(Fixed(output), tokens, None)


def returned(found: object) -> str:
    """What leaves a site where an objective returns something; its log has all."""
    own = {"task": f"{__name__}:own", "metrics": {"error": [0, 1]}, "local_steps": 1}
    objective = objective_of(small_job(training=own).training)
    with pytest.raises(SiteError) as caught:
        objective(Fixed(found), INPUTS, None)
    assert caught.value.outside in str(caught.value)
    return caught.value.outside


def own(model: nn.Module, inputs: torch.Tensor, _: object):
    """Whatever the test wants."""
    return model(inputs)


LOSS = torch.zeros(2, requires_grad=True)


def test_what_an_objective_returned_stays_at_the_site():
    """Names of its values may quote a record, their shape may count records."""
    names = returned({"loss": LOSS, "record 17 of J. Doe": LOSS})
    assert names.endswith("name its metrics in training.metrics")
    shape = returned({"loss": LOSS, "error": LOSS[:1]})
    assert shape.endswith("do not call mean() or sum() over the records")
    assert "test_objectives:own must return 'error' as a tensor" in shape
    for error in (SiteError("record 17 of J. Doe"), KeyError("record 17 of J. Doe")):
        assert "Doe" not in returned_by(error)


def returned_by(error: Exception) -> str:
    """The same where it raises."""

    class Raises(Fixed):
        def forward(self, _: torch.Tensor) -> object:
            raise error

    job = {"task": f"{__name__}:own", "local_steps": 1}
    with pytest.raises(SiteError) as caught:
        objective_of(small_job(training=job).training)(Raises(0), INPUTS, None)
    return caught.value.outside


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_metrics_are_refused_by_name(dtype: torch.dtype):
    """Their imaginary part would be lost without a word."""
    said = returned({"loss": LOSS, "error": torch.zeros(2, dtype=dtype)})
    assert "test_objectives:own returned 'error' as complex numbers" in said
    assert "'loss' as complex numbers" in returned(
        {"loss": LOSS.to(dtype), "error": LOSS}
    )


def test_every_task_has_an_objective():
    """The names are those of the job file."""
    assert {"classification", "causal_lm"} == set(OBJECTIVES)


def test_a_label_of_minus_100_is_not_left_out_of_the_loss():
    """As torch does by default, while it still counts as a prediction."""
    inputs, labels = torch.zeros(2, 4), torch.tensor([0, -100])
    with pytest.raises(SiteError, match=r"must be from 0 to 2.* but no record: leave"):
        classification(torch.nn.Linear(4, 3), inputs, labels)


@pytest.mark.parametrize("for_nan", [0.0, 1.0])
def test_nan_counts_as_the_worse_bound_of_a_metric(for_nan: float):
    """And as the upper bound of the loss; infinity as the bound that it is beyond."""
    metrics = {"loss": [0.0, 9.0], "error": [0.0, 1.0]}
    training = {"task": f"{__name__}:own", "metrics": metrics, "local_steps": 1}
    objective = objective_of(small_job(training=training).training, {"error": for_nan})
    nan, infinite = torch.full((2,), math.nan), torch.tensor([math.inf, -math.inf])
    with torch.no_grad():
        found = objective(Fixed({"loss": nan, "error": nan}), INPUTS, None)
        beyond = objective(Fixed({"loss": nan, "error": infinite}), INPUTS, None)
    assert (float(found.loss), float(found.metrics["error"])) == (18.0, 2 * for_nan)
    assert float(beyond.metrics["error"]) == 1.0


@pytest.mark.parametrize("for_nan", [0.0, 0.1])
def test_a_bound_holds_for_values_of_less_precision(for_nan: float):
    """0.1 of type float32 is above 0.1, and what noise is for holds the exact bound."""
    metrics = {"loss": [0.0, 9.0], "error": [0.0, 0.1]}
    training = {"task": f"{__name__}:own", "metrics": metrics, "local_steps": 1}
    objective = objective_of(small_job(training=training).training, {"error": for_nan})
    values = {"loss": torch.ones(2), "error": torch.full((2,), 0.1)}
    with torch.no_grad():
        found = objective(Fixed(values), INPUTS, None)
    assert float(found.metrics["error"]) == 0.2
    assert values["error"][0].item() > 0.1  # And what the user holds stays as it is.


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ([[1, 9]], "from 1 to 9, with up to 2 in a record, and '0' has 9 rows: use"),
        ([[-1, 2]], "from -1 to 2, with up to 2 in a record, and '0' has 9 rows: use"),
    ],
)
def test_tokens_without_a_row_are_explained(tokens: list[list[int]], said: str):
    """They are often those of another tokeniser."""
    model = nn.Sequential(nn.Embedding(9, 3), nn.Flatten())
    with pytest.raises(IndexError) as caught:
        apply_model(model, torch.tensor(tokens))
    (note,) = caught.value.__notes__
    assert said in note
    assert "images" not in note


def test_an_index_error_of_something_else_shows_the_inputs():
    """Even if the model has an embedding with too few rows for the inputs."""

    class Picks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kinds = nn.Embedding(2, 3)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return tokens[:, [7]]

    for inputs in (torch.full((2, 3), 9), torch.zeros(2, 3)):
        with pytest.raises(IndexError) as caught:
            apply_model(Picks(), inputs)
        assert "received inputs torch" in "".join(caught.value.__notes__)
