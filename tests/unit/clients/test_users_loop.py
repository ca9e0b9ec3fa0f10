"""What a round of a user's loop begins with."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from clients.training.users_loop import _fresh
from federation.errors import SiteError, outside_of


class Counting:
    """A callback that refers to what it works on, and counts."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.layer = trainer, trainer.model[0]
        self.bias = trainer.model[0].bias
        self.counts = [0]


class Locked:
    """A callback that cannot be copied."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


def trainer() -> Any:
    """What a callback may refer to, of a Trainer of transformers."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    return SimpleNamespace(model=model, train_dataset=[1], eval_dataset=[2])


def test_callbacks_begin_each_round_anew_with_the_same_trainer_and_model():
    """A copy of the model would be changed, and read, in place of the model."""
    ours = trainer()
    before = Counting(ours)
    (copied,) = _fresh([before], ours)
    assert copied is not before
    assert copied.counts == [0]
    assert copied.counts is not before.counts
    assert copied.trainer is ours
    assert copied.layer is ours.model[0]
    assert copied.bias is ours.model[0].bias


def test_a_callback_that_cannot_be_copied_is_named_with_what_to_do():
    with pytest.raises(SiteError, match=r"Locked cannot .*on_train_begin") as e:
        _fresh([Locked()], trainer())
    assert "pickle" not in outside_of(e.value)
