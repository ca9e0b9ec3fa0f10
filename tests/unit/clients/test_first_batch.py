"""What a look at the first batches of each site finds."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.small_jobs import blobs, small_job

from clients.data.datasets import as_dataset
from clients.methods.guest import NotFinite
from clients.models.model_pool import ModelPool
from clients.training.first_batch import check_first_batches
from clients.training.local_federation import Federation
from clients.training.trainer import TorchTrainer
from clients.training.update import prepare
from federation.errors import SiteError
from federation.ids import SiteId
from federation.job.spec import DataSpec

LINEAR = {"in_features": 4, "out_features": 1}
SITES = ("site-0", "site-1")


def federation(*of_sites: Any) -> Federation:
    """Two sites with data of their own."""
    job = small_job(num_sites=2)
    datasets = [as_dataset(data, name="train") for data in of_sites]
    site_data = {
        SiteId(name): (data, data) for name, data in zip(SITES, datasets, strict=True)
    }
    return Federation(job=job, pool=ModelPool(job), site_data=site_data)


def arrays() -> tuple[Any, Any]:
    train, _ = blobs()
    return train.inputs, train.targets


def test_sound_sites_pass():
    check_first_batches(federation(arrays(), arrays()))


def test_sites_whose_data_moves_pass():
    """Their tasks say which part of the data a round takes, and here is no task."""
    sound = federation(arrays(), arrays())
    data, training = sound.job.data, sound.job.training
    assert data is not None
    by_epochs = replace(training, local_steps=None, local_epochs=1)
    moves = replace(data, placement="dynamic")
    job = replace(sound.job, data=moves, training=by_epochs)
    check_first_batches(replace(sound, job=job))


@pytest.mark.parametrize("label", [-100, -1, 3])
def test_labels_out_of_range_are_found_wherever_they_are(label: int):
    """Also the one that torch would leave out of the loss, and count all the same."""
    inputs, targets = arrays()
    wrong = targets.copy()
    wrong[-1] = label
    with pytest.raises(SiteError, match=r"must be from 0 to 2: renumber them") as found:
        check_first_batches(federation((inputs, targets), (inputs, wrong)))
    assert "site-1" in str(found.value)


def test_columns_that_differ_by_site_are_named():
    inputs, targets = arrays()
    named = {"values": inputs, "labels": targets}
    with pytest.raises(SiteError, match="the same columns") as found:
        check_first_batches(federation((inputs, targets), named))
    assert "{values: float32}, and those of site 'site-0' are float32" in str(
        found.value
    )
    halves = targets.astype(np.float32)
    with pytest.raises(SiteError, match="targets are float32, and those of"):
        check_first_batches(federation((inputs, targets), (inputs, halves)))
    nested = ({"a": inputs, "b": (inputs, inputs)}, targets)
    with pytest.raises(SiteError, match=r"a: float32, b: \(float32, float32\)"):
        check_first_batches(federation((inputs, targets), nested))


def test_labels_that_only_items_have_are_read_too():
    """A dataset of a user's own has no array of all labels, and no order."""
    inputs, targets = arrays()
    wrong = targets.copy()
    wrong[-1] = 3
    sound, bad = (list(zip(inputs, all_, strict=True)) for all_ in (targets, wrong))
    check_first_batches(federation(sound, sound))
    with pytest.raises(SiteError, match=r"site-1'.* must be from 0 to 2: renumber"):
        check_first_batches(federation(sound, bad))


def test_a_site_with_more_records_than_a_secure_sum_allows_is_named():
    """It would decline every round; the limit counts in steps of the grid of counts."""
    inputs, targets = arrays()
    few = inputs[:50], targets[:50]

    def check(most: int, weights: str = "examples") -> None:
        secure = {"enabled": True, "max_examples": most, "two_sites_waiver": True}
        job = small_job(
            num_sites=2,
            privacy={"secure_aggregation": {"clip_norm": 1.0, **secure}},
            aggregation={"weights": weights},
        )
        check_first_batches(replace(federation(few, (inputs, targets)), job=job))

    with pytest.raises(SiteError, match=r"site-1'.*60 training records, .* allows 56"):
        check(52)
    check(58)
    check(9, "uniform")


def test_records_without_any_label_are_named():
    """As a mask of prompts that covers the answers makes them."""
    pixels, classes = np.ones((4, 3, 2, 2), np.float32), np.zeros((4, 2, 2), np.int64)
    job = small_job(
        num_sites=2,
        model={
            "factory": "torch.nn:Conv2d",
            "options": {"in_channels": 3, "out_channels": 2, "kernel_size": 1},
        },
        training={"task": "segmentation", "local_steps": 1},
    )

    def check(of_second: Any) -> None:
        found = federation((pixels, classes), (pixels, of_second))
        second = replace(job.sites[1], data=DataSpec(source="x:y"))
        sites = (job.sites[0], second)
        named = replace(job, sites=sites)
        check_first_batches(replace(found, job=named, pool=ModelPool(named)))

    check(classes)
    with pytest.raises(SiteError, match=r"site-1'.*none of the first 4 held-out"):
        check(np.full_like(classes, -100))


def test_values_beyond_their_bounds_are_noted(caplog: pytest.LogCaptureFixture):
    """They would be reported as the nearest bound; the values themselves are not."""
    inputs, _ = arrays()
    targets = np.array([[0.5]] * 11 + [[40.0]], np.float32)
    names = ("loss", "absolute_error", "squared_error")

    def notes(high: float) -> list[str]:
        training = {"task": "regression", "batch_size": 16, "local_steps": 1}
        job = small_job(
            num_sites=2,
            model={"factory": "torch.nn:Linear", "options": LINEAR},
            training={**training, "metrics": {name: [0, high] for name in names}},
        )
        data = inputs[:12], targets
        found = replace(federation(data, data), job=job, pool=ModelPool(job))
        caplog.clear()
        check_first_batches(found)
        return [record.getMessage() for record in caplog.records]

    assert notes(1e6) == []
    said = "held-out records have values beyond [0, 100], which count"
    assert [text for text in notes(100) if said in text] == [
        f"training.metrics.{name}: 1 of 12 {said} as the nearest bound in all results: "
        "widen the bounds"
        for name in ("loss", "squared_error")
    ]


class Imputing(torch.nn.Linear):
    """Puts 0 in the place of missing inputs, in a way whose gradient may be NaN."""

    def __init__(self, way: str) -> None:
        super().__init__(4, 3)
        self.way = way
        self.scale = torch.nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "before":
            x = x.nan_to_num() * self.scale
        elif self.way == "after":  # The gradient of the branch not taken is 0 * NaN.
            x = torch.where(x.isnan(), 0.0, x * self.scale)
        else:
            x = x * self.scale
        return super().forward(x)


@pytest.mark.parametrize("way", ["before", "after", "not at all"])
@pytest.mark.parametrize("row", [3, 59])
def test_nan_counts_as_missing_if_the_model_handles_it(way: str, row: int):
    """Also beyond the first batch, and only if gradients are finite too."""
    inputs, targets = arrays()
    holes = inputs.copy()
    holes[row, 1] = np.nan
    model = {"factory": f"{__name__}:Imputing", "options": {"way": way}}
    job = small_job(num_sites=2, model=model)
    found = federation((inputs, targets), (holes, targets))
    found = replace(found, job=job, pool=ModelPool(job))
    if way == "before":
        check_first_batches(found)
        return
    with pytest.raises(SiteError, match=f"site-1'.* training record {row} holds NaN"):
        check_first_batches(found)


@pytest.mark.parametrize(("way", "is_blamed"), [("before", False), ("after", True)])
def test_divergence_is_blamed_on_nan_only_if_it_does_harm(way: str, *, is_blamed: bool):
    inputs, targets = arrays()
    inputs = inputs.copy()
    inputs[7, 1] = np.nan
    job = small_job(
        model={"factory": f"{__name__}:Imputing", "options": {"way": way}},
        training={"local_epochs": 3, "optimizer": {"lr": 1e30}},
    )
    pool, data = ModelPool(job), as_dataset((inputs, targets), name="train")
    trainer = TorchTrainer(job, SiteId("site-0"), pool=pool, train=data, held_out=data)
    start = pool.initial_weights()
    with pytest.raises(NotFinite) as caught:
        prepare(start[0], trainer.fit(*start, round_index=1))
    assert ("training record 7 holds NaN" in str(caught.value)) == is_blamed
    assert ("learning rate" in str(caught.value)) != is_blamed


def test_records_that_were_looked_at_are_counted():
    """The rest may hold NaN; the first 1,024 of each part are read."""
    inputs, targets = arrays()
    many = np.tile(inputs, (20, 1)), np.tile(targets, 20)
    many[0][1100] = np.nan
    read = check_first_batches(federation((inputs, targets), many))
    assert read == (2 * 60 + 2 * 1024, 2 * 60 + 2 * 1200)


def sigmoid(*, functional: bool) -> torch.nn.Module:
    last = torch.nn.Flatten(0) if functional else torch.nn.Sigmoid()
    linear = torch.nn.Linear(4, 1)
    if functional:
        linear.register_forward_hook(lambda *call: torch.sigmoid(call[2])[:, 0])
    return torch.nn.Sequential(linear, last)


@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize("task", ["binary", "multi_label"])
def test_a_sigmoid_at_the_end_is_found(task: str, *, functional: bool):
    inputs, targets = arrays()
    data = inputs, (targets == 0).astype(np.int64)
    job = small_job(
        num_sites=2,
        model={"factory": f"{__name__}:sigmoid", "options": {"functional": functional}},
        training={"task": task, "local_steps": 1},
    )
    found = replace(federation(data, data), job=job, pool=ModelPool(job))
    with pytest.raises(SiteError, match="remove the sigmoid"):
        check_first_batches(found)


@pytest.mark.parametrize(
    ("training", "evaluation", "is_sound"),
    [
        ({"local_epochs": 1, "batch_size": 59}, {}, False),
        ({"local_epochs": 1, "batch_size": 58}, {}, True),
        ({"local_steps": 2, "batch_size": 59}, {}, True),
        ({"local_steps": 2, "batch_size": 1}, {}, False),
        ({"local_steps": 2}, {"batch_size": 59}, True),  # It has running averages.
    ],
)
def test_a_last_batch_of_one_record_is_tried(
    training: dict[str, Any], evaluation: dict[str, Any], *, is_sound: bool
):
    """Batch normalisation cannot train on it."""
    tables = {"training": training, "evaluation": evaluation}
    job = small_job(
        num_sites=2, model={"factory": "support.small_jobs:normalised"}, **tables
    )
    found = federation(arrays(), arrays())
    found = replace(found, job=job, pool=ModelPool(job))
    if is_sound:
        check_first_batches(found)
        return
    with pytest.raises(SiteError, match=r"batch normalisation.*training.batch_size"):
        check_first_batches(found)


def test_a_last_held_out_batch_of_one_record_is_tried():
    """``squeeze()`` takes the axis of records from it."""
    inputs, targets = arrays()
    data = inputs, (targets == 0).astype(np.int64)

    def check(batch_size: int) -> None:
        job = small_job(
            num_sites=2,
            model={"factory": f"{__name__}:squeezed"},
            training={"task": "binary", "local_steps": 1},
            evaluation={"batch_size": batch_size},
        )
        check_first_batches(
            replace(federation(data, data), job=job, pool=ModelPool(job))
        )

    check(58)
    with pytest.raises(SiteError, match=r"one row per record|shape of the targets"):
        check(59)


def squeezed() -> torch.nn.Module:
    linear = torch.nn.Linear(4, 1)
    linear.register_forward_hook(lambda *call: call[2].squeeze())
    return linear


@pytest.mark.parametrize("kind", ["statistics", "targets"])
def test_a_step_beyond_the_clip_norm_is_noted(
    kind: str, caplog: pytest.LogCaptureFixture
):
    """With the tensor that changes most, the norm, the bound and what to do."""
    inputs, classes = arrays()
    training: dict[str, Any] = {"batch_size": 16, "local_steps": 1}
    model: dict[str, Any]
    if kind == "statistics":
        model = {"factory": "support.small_jobs:normalised"}
        data, most = (inputs * 1e4, classes), "1.running_var"
    else:
        model = {"factory": "torch.nn:Linear", "options": LINEAR}
        data, most = (inputs, 1e6 * inputs[:, :1]), "weight"
        names = ("loss", "absolute_error", "squared_error")
        training |= {"task": "regression", "metrics": {n: [0, 1e15] for n in names}}

    def notes(**privacy: Any) -> list[str]:
        job = small_job(
            num_sites=2,
            model=model,
            training=training,
            privacy=privacy,
            aggregation={"weights": "uniform"},
        )
        found = replace(federation(data, data), job=job, pool=ModelPool(job))
        caplog.clear()
        check_first_batches(found)
        return [record.getMessage() for record in caplog.records]

    secure = {"enabled": True, "two_sites_waiver": True}
    (text,) = notes(secure_aggregation=secure)
    for said in (repr(most), "down to 10,", "clip_norm; or", "normalise", "personal"):
        assert said in text
    assert notes() == []
    assert notes(secure_aggregation=secure | {"clip_norm": 1e12}) == []


@pytest.mark.parametrize("private", [False, True])
def test_a_part_that_is_not_trained_is_found_before_an_open_secure_sum(
    *, private: bool
):
    """Every round would be declined; with noise in the sum, none."""
    inputs, classes = arrays()
    noise = {"unit": "site", "target_epsilon": 8.0, "held_out": "public"}
    job = small_job(
        num_sites=2,
        model={"factory": "support.users_module:with_spare_part"},
        training={"batch_size": 16, "local_steps": 2},
        privacy={
            "secure_aggregation": {"enabled": True, "two_sites_waiver": True},
            "differential_privacy": noise if private else {},
        },
        aggregation={"weights": "uniform"},
    )
    data = (inputs, classes)
    found = replace(federation(data, data), job=job, pool=ModelPool(job))
    if private:
        check_first_batches(found)
        return
    spare = r'\["spare.weight", "spare.bias"\]'
    with pytest.raises(SiteError, match=rf"'site-0'.* add {spare} to model.frozen"):
        check_first_batches(found)
