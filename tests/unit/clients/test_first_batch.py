"""What a look at the first batches of each site finds."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.small_jobs import blobs, small_job

from clients.data.datasets import as_dataset
from clients.models.model_pool import ModelPool
from clients.training.first_batch import check_first_batches
from clients.training.local_federation import Federation
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
