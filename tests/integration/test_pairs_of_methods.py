"""Every pair of methods that no rule refuses: a run that is stopped and resumed.

Keys here switch methods on in one small job. What is refused, and why, is in
``tests/unit/federation/test_methods.py``.
"""

import functools
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import toy
from support.small_jobs import small_job
from support.without_report import simulate

from federation.errors import JobError
from federation.events import Event, RoundFinished
from federation.job.spec import JobSpec
from federation.methods.method import Thing
from federation.methods.registry import METHODS

pytestmark = pytest.mark.slow

ROUNDS, STOP_AFTER = 4, 2
SITES = [f"site-{i}" for i in range(3)]
MACHINES = [
    {"site": site, "examples_per_second": 100.0, "up_mbit": 0.01} for site in SITES
]
MOMENTUM = {"name": "sgd", "lr": 0.1, "momentum": 0.9}
# Not here: what needs a model or data of its own, and masks, which no run repeats.
ON: Mapping[str, Mapping[str, Any]] = {
    Thing.PROXIMAL: {"training": {"proximal_mu": 0.1}},
    Thing.NORMALIZED: {"training": {"local_epochs": 1, "normalized_steps": 2}},
    "control variates": {"training": {"control_variates": True}},
    "FedDyn": {
        "training": {"dynamic_alpha": 0.1},
        "aggregation": {"server_optimizer": {"name": "running_sum"}},
    },
    Thing.OVERLAP: {"training": {"overlap_steps": 1}},
    Thing.CHOSEN_STEPS: {"schedule": {"local_work": "auto", "max_local_steps": 9}},
    Thing.LARGER_STEPS: {"training": {"accumulate_from": [[2, 2]]}},
    Thing.FLOAT16: {"training": {"precision": "fp16"}},
    Thing.KEPT_OPTIMIZER: {"training": {"optimizer": MOMENTUM | {"state": "keep"}}},
    Thing.PERSONAL: {"model": {"personal": ["*bias"]}},
    Thing.RELAYS: {
        "relays": [{"name": "relay", "sites": SITES[:2]}],
        "schedule": {"minimum_sites": 1},
    },
    Thing.CODECS: {"communication": {"codec": {"name": "top_k", "fraction": 0.5}}},
    Thing.CLIPPED_STEPS: {"training": {"clip_grad_norm": 0.5}},
    Thing.NOT_WHOLE: {
        "communication": {"down_content": "change", "down_codec": {"name": "int8"}}
    },
    Thing.OTHER_MODEL: {"selection": {"model": "ema"}},
}


def job_of(*names: str) -> JobSpec:
    base: dict[str, Any] = {
        "rounds": ROUNDS,
        "model": {
            "factory": "clients.models:logistic_regression",
            "options": {"inputs": 4, "classes": 3},
        },
        "training": {"local_steps": 3, "batch_size": 8, "optimizer": {"lr": 0.1}},
        "simulation": {"machines": MACHINES},
    }
    tables = functools.reduce(toy.merged, (ON[name] for name in names), base)
    if "local_epochs" in tables["training"]:
        del tables["training"]["local_steps"]
    return small_job(num_sites=len(SITES), **tables)


def is_refused(*names: str) -> bool:
    try:
        job_of(*names)
    except JobError:
        return True
    return False


PAIRS = [pair for pair in combinations(ON, 2) if not is_refused(*pair)]


def test_most_methods_are_here_and_each_runs_with_another():
    assert len(PAIRS) > len(ON)
    assert {name for pair in PAIRS for name in pair} == ON.keys()
    assert len({method.name for method in METHODS} & ON.keys()) == len(METHODS) - 6


@pytest.mark.parametrize("pair", PAIRS, ids=" and ".join)
def test_a_resumed_run_has_the_same_bits(pair: tuple[str, str], tmp_path: Path):
    job = job_of(*pair)
    rounds = 0

    def count(event: Event) -> None:
        nonlocal rounds
        rounds += isinstance(event, RoundFinished)

    how: dict[str, Any] = {"engine": "virtual"}
    whole = simulate(job, **how)
    how["folder"] = tmp_path / "run"
    simulate(job, listeners=[count], stop_requested=lambda: rounds >= STOP_AFTER, **how)
    again = simulate(job, resume=True, **how)
    assert rounds == STOP_AFTER
    assert whole.weights.keys() == again.weights.keys()
    for name, values in whole.weights.items():
        assert np.isfinite(values).all(), name
        np.testing.assert_array_equal(values, again.weights[name])
