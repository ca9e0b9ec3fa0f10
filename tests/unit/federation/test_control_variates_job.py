"""Jobs in which sites could not follow the mean of their control variates."""

from typing import Any

import pytest
from support import toy

from federation.errors import JobError
from federation.job import job_file
from federation.job.personal_checks import CLUSTERS

STEPS = {"local_steps": 4, "control_variates": True}
SECURE = {"enabled": True, "two_sites_waiver": True}


def parse(training: dict[str, Any], **tables: Any):
    return job_file.parse(toy.document() | {"training": STEPS | training} | tables)


@pytest.mark.parametrize(
    ("training", "tables", "reason"),
    [
        ({"local_epochs": 1, "local_steps": None}, {}, "use local_steps"),
        ({"optimizer": {"name": "adam"}}, {}, "plain sgd"),
        ({"optimizer": {"momentum": 0.9}}, {}, "plain sgd"),
        ({"clip_grad_norm": 1.0}, {}, "clip_grad_norm"),
        ({"proximal_mu": 0.1}, {}, "proximal_mu"),
        ({"overlap_steps": 2}, {}, "overlap_steps"),
        ({"precision": "fp16"}, {}, "fp32 or bf16"),
        ({}, {"schedule": {"minimum_sites": 1}}, "minimum_sites"),
        ({}, {"relays": [{"name": "r", "sites": ["a"]}]}, r"\[\[relays\]\]"),
        ({}, {"aggregation": {"combine": "median", "weights": "uniform"}}, "combine"),
        ({}, {"aggregation": {"weights": "dynamic"}}, "weights"),
        ({}, {"aggregation": {"server_optimizer": {"lr": 0.5}}}, "server_optimizer"),
        ({}, {"communication": {"codec": {"name": "int8"}}}, "codec"),
        ({}, {"communication": {"down_codec": {"name": "bf16"}}}, "codec"),
        ({}, {"privacy": {"secure_aggregation": SECURE | {"ring_bits": 16}}}, "24"),
        (
            {},
            {
                "privacy": {
                    "secure_aggregation": SECURE
                    | {"element_bound": 0.1, "clip_elements": True}
                }
            },
            "clip_elements",
        ),
        (
            {"task": CLUSTERS},
            {"model": {"factory": "toy:net", "personal": ["choice.*"]}},
            "cluster",
        ),
    ],
)
def test_variates_that_would_not_cancel(
    training: dict[str, Any], tables: dict[str, Any], reason: str
):
    parse({})  # Is not refused.
    known = {key: value for key, value in training.items() if value is not None}
    document = toy.document() | {"training": STEPS | known} | tables
    for key in training.keys() - known.keys():
        del document["training"][key]
    with pytest.raises(JobError, match=reason) as caught:
        job_file.parse(document)
    assert caught.value.key == "training.control_variates"


def test_record_privacy_has_no_mean_gradients():
    private = {
        "unit": "record",
        "clip_norm": 1.0,
        "delta": 1e-5,
        "target_epsilon": 8.0,
    }
    with pytest.raises(JobError, match="differential privacy") as caught:
        parse(
            {},
            privacy={"differential_privacy": private},
            aggregation={"weights": "uniform"},
        )
    assert caught.value.key == "training.control_variates"
