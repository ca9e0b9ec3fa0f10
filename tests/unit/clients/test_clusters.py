"""Models of which each site trains the one that fits it best."""

from typing import Any

import numpy as np
import pytest
import torch
from support.small_jobs import blobs, small_job
from torch import nn

from clients.data.datasets import as_dataset
from clients.models.clusters import Clusters, best_cluster, clusters
from clients.models.model_pool import ModelPool
from clients.training.trainer import TorchTrainer
from federation.errors import JobError
from federation.ids import SiteId
from federation.protocols import LocalWeights

INPUTS, LABELS = torch.eye(3), torch.tensor([0, 1, 2])


class Fixed(nn.Module):
    """Logits for one class, whatever the input is."""

    def __init__(self, label: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(4.0))
        self.label = label

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.scale * nn.functional.one_hot(
            torch.full((len(inputs),), self.label), 3
        )


def fixed(*typical: float) -> Clusters:
    """Three models, one for each class; the mean over the sites has arrived."""
    model = Clusters([Fixed(label) for label in range(3)])
    model.typical.copy_(torch.tensor(typical))
    return model


def step(model: nn.Module, label: int) -> Any:
    """A training batch with records of one class."""
    return best_cluster(model.train(), INPUTS[:2], torch.full((2,), label))


def test_a_site_trains_the_model_that_fits_its_records():
    """The others get no gradient, and so no update."""
    model = fixed(1.0, 1.0, 1.0)
    values = step(model, 2)
    assert values["accuracy"].tolist() == [1.0, 1.0]
    values["loss"].mean().backward()
    gradients = [member.scale.grad for member in model.members]  # type: ignore[union-attr]
    assert gradients[:2] == [None, None]
    assert gradients[2] != 0
    assert model.chosen() is model.members[2]


def test_losses_are_compared_with_those_of_all_sites():
    """A model that is better everywhere is not everybody's choice."""
    model = fixed(4.0, 4.0, 0.01)
    step(model, 2)
    assert model.chosen() is model.members[2]
    model = fixed(5.0, 0.5, 4.0)
    model.choice.note(torch.tensor([1.0, 0.4, 4.0]))
    assert model.chosen() is model.members[0]


def test_the_first_round_measures_and_trains_nothing():
    """What it leaves for the mean over the sites is this site's losses."""
    model = fixed(0.0, 0.0, 0.0)
    for _ in range(2):
        step(model, 1)["loss"].mean().backward()
    assert all(not member.scale.grad for member in model.members)  # type: ignore[union-attr]
    np.testing.assert_array_equal(model.typical, model.choice.losses)
    assert model.typical.argmin() == 1


def test_the_only_site_of_the_first_round_trains_in_the_next():
    """Then the mean over the sites is what this site has measured."""
    job = small_job(
        model={
            "factory": "clients.models.clusters:clusters",
            "options": {
                "number": 2,
                "factory": "clients.models:mlp",
                "options": {"inputs": 4, "classes": 3, "hidden": [3]},
            },
            "personal": ["choice.*"],
        },
        training={
            "task": "clients.models.clusters:best_cluster",
            "metrics": {"loss": [0.0, 9.0], "accuracy": [0.0, 1.0]},
            "local_steps": 2,
        },
    )
    pool = ModelPool(job)
    train, held_out = (as_dataset(part, name="blobs") for part in blobs())
    trainer = TorchTrainer(
        job, SiteId("site-0"), pool=pool, train=train, held_out=held_out
    )
    start_d, integers_m = pool.initial_weights()
    first = trainer.fit(start_d, integers_m, round_index=1)
    assert isinstance(first, LocalWeights)
    assert np.count_nonzero(first.weights_d != start_d) == 2  # The mean losses.
    second = trainer.fit(first.weights_d, integers_m, round_index=2, kept=first.kept)
    assert isinstance(second, LocalWeights)
    assert np.count_nonzero(second.weights_d != first.weights_d) > 2


def test_held_out_records_choose_nothing():
    """The labels to predict must not decide which model predicts them."""
    model = fixed(1.0, 1.0, 1.0)
    step(model, 0)
    before = model.choice.losses.clone()
    values = best_cluster(model.eval(), INPUTS, torch.full((3,), 2))
    assert values["accuracy"].tolist() == [0.0, 0.0, 0.0]
    torch.testing.assert_close(model.choice.losses, before)


def test_other_tasks_have_clusters_too():
    """Those with a value for each record."""
    model = clusters(2, "torch.nn:Linear", {"in_features": 3, "out_features": 1})
    values = best_cluster(model, INPUTS, torch.zeros(3, 1), task="regression")
    assert values.keys() == {"loss", "absolute_error", "squared_error"}


@pytest.mark.parametrize(
    ("call", "key", "message"),
    [
        (lambda: clusters(1, "torch.nn:Flatten"), "model.options.number", "at least 2"),
        (
            lambda: clusters(
                2,
                "clients.models:logistic_regression",
                {"inputs": 2, "classes": 2},
            ),
            "model.options.factory",
            "makes equal models",
        ),
        (
            lambda: best_cluster(nn.Linear(3, 3), INPUTS, LABELS),
            "model.factory",
            "use that",
        ),
        (
            lambda: best_cluster(fixed(1, 1, 1), INPUTS, LABELS, task="sft"),
            "training.options.task",
            "'sft' cannot be used here",
        ),
    ],
)
def test_what_cannot_be_chosen_from_is_refused(call: Any, key: str, message: str):
    """With the key of the job."""
    with pytest.raises(JobError, match=message) as caught:
        call()
    assert caught.value.key == key
