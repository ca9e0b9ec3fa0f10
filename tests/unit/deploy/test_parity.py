"""Whether two models compute the same."""

import numpy as np
import pytest
import torch

from clients.data.datasets import Examples, as_dataset
from deploy.tools import formats
from deploy.tools.parity import check_parity, outputs_of
from federation.errors import ParityFailed, SiteError

LOGITS = torch.tensor([[3.0, 4.0], [0.0, 0.0]])


def test_the_error_is_relative_to_the_outputs():
    """A difference of norm 0.5 on outputs of norm 5."""
    other = LOGITS.clone()
    other[1, 1] = 0.5
    parity = check_parity([LOGITS], [other.numpy()], tolerance=0.11)
    assert parity.error == pytest.approx(0.1)
    assert parity.records == 2
    assert parity.agreement == 0.5
    assert "relative error 1.0e-01 on 2 records" in str(parity)


@pytest.mark.parametrize(
    "other", [LOGITS + 1, LOGITS * np.nan, LOGITS[:1], LOGITS[:, :1]]
)
def test_other_outputs_are_refused(other: torch.Tensor):
    """Too far apart, not a number, or of another shape."""
    with pytest.raises(ParityFailed, match=r"[Nn]othing was written"):
        check_parity([LOGITS], [other], tolerance=0.1)


def test_logits_stand_for_all_outputs():
    """And no tensor is no output."""
    found = outputs_of(lambda _: {"logits": LOGITS, "state": LOGITS}, LOGITS)  # type: ignore[arg-type]
    assert len(found) == 1
    with pytest.raises(SiteError, match="no tensor"):
        outputs_of(lambda _: ["text"], LOGITS)  # type: ignore[arg-type]


def test_a_model_gets_records_as_its_task_gives_them():
    """Windows without the token that is only predicted; one record of a pair."""
    windows = np.arange(15).reshape(3, 5)
    tokens = as_dataset(Examples(inputs=windows), name="tokens")
    pairs = as_dataset(((np.ones((3, 2)), np.zeros((3, 2))), None), name="pairs")
    model = torch.nn.Linear(2, 1)
    found = formats.records_of(model, tokens, task="causal_lm")
    assert isinstance(found, torch.Tensor)
    assert found.tolist() == windows[:, :-1].tolist()
    items = [([np.ones(2), np.zeros(2)], 0)] * 3  # A list, as collate gives it back.
    listed = as_dataset(items, name="items")
    for each in (pairs, listed):
        better = formats.records_of(model, each, task="ranking")
        assert isinstance(better, torch.Tensor)
        assert better.tolist() == [[1, 1]] * 3
    plain = formats.records_of(model, tokens, task="masked_lm")
    assert isinstance(plain, torch.Tensor)
    assert plain.shape == (3, 5)


def test_records_of_another_model_are_named_as_such():
    """And no unexpected error."""
    with pytest.raises(SiteError, match="applied to these records"):
        formats.reference_outputs(torch.nn.Linear(2, 1), torch.ones(4, 3))
