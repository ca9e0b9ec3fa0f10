"""Parts of a secure sum that only some sites train: they hold few updates."""

from typing import Any

import pytest
from support.small_jobs import blobs, small_job

from clients.data.datasets import as_dataset
from clients.models.model_pool import ModelPool
from clients.training.trainer import TorchTrainer
from federation.errors import SiteError
from federation.ids import SiteId
from federation.protocols import LocalWeights

SECRET = {"secure_aggregation": {"enabled": True, "clip_norm": 8.0}}
NOISED = {
    "secure_aggregation": {"enabled": True},
    "differential_privacy": {
        "unit": "site",
        "target_epsilon": 8.0,
        "held_out": "public",
    },
}


def fit(privacy: dict[str, Any], **model: Any) -> Any:
    """A round at a site whose records use one of the model's two parts."""
    job = small_job(
        num_sites=3,
        model={"factory": "support.users_module:with_spare_part", **model},
        training={"local_steps": 2, "batch_size": 8, "optimizer": {"lr": 0.5}},
        aggregation={"weights": "uniform"},
        privacy=privacy,
    )
    pool = ModelPool(job)
    train, held_out = (as_dataset(part, name="blobs") for part in blobs())
    site = TorchTrainer(
        job, SiteId("site-0"), pool=pool, train=train, held_out=held_out
    )
    return site.fit(*pool.initial_weights(), round_index=1)


def test_a_site_declines_an_open_sum_of_which_it_trains_a_part_alone():
    """Another site may fill the rest alone; the aggregator can see to that."""
    with pytest.raises(SiteError, match=r"no gradient of 'spare.* \(of 2 tensors\)"):
        fit(SECRET)


@pytest.mark.parametrize(
    ("privacy", "model"),
    [
        ({}, {}),
        (NOISED, {}),
        (SECRET, {"frozen": ["spare.*"]}),
        (SECRET, {"personal": ["spare.*"]}),
        # A gradient of zeros: as of an adapter's first factor in the first step.
        (SECRET, {"options": {"scale": 0.0}}),
    ],
    ids=["in the open", "with noise", "frozen", "personal", "zeros"],
)
def test_other_sums_hold_no_part_of_few_sites(
    privacy: dict[str, Any], model: dict[str, Any]
):
    assert isinstance(fit(privacy, **model), LocalWeights)
