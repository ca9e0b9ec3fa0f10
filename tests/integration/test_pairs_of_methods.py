"""Every pair of methods that no rule refuses: a run that is stopped and resumed.

Keys here switch methods on in one small job. What is refused, and why, is in
``tests/unit/federation/test_methods.py``.
"""

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import toy
from support.small_jobs import small_job
from support.without_report import simulate

from federation.errors import JobError
from federation.events import Event, RoundFinished, SiteAnswered, SiteFailed
from federation.job.method_checks import things
from federation.job.spec import JobSpec
from federation.messages import FailureKind
from federation.methods.method import Thing
from federation.methods.registry import METHODS
from monitoring.runs.run_result import RunResult

pytestmark = pytest.mark.slow

ROUNDS, STOP_AFTER = 4, 2
_OFTEN = 1  # Pairs of a method in `make test`; the rest are long.
SITES = [f"site-{i}" for i in range(3)]
MACHINES = [
    {"site": site, "examples_per_second": 100.0, "up_mbit": 0.01} for site in SITES
]
MOMENTUM = {"name": "sgd", "lr": 0.1, "momentum": 0.9}
# Those that need a model, data or sites of their own, or that a row below stands for.
NOT_HERE = {
    *(Thing.KEPT_ZEROS, Thing.FEWER_RANKS, Thing.CLUSTERS, Thing.TRAINER),
    *(Thing.FLOWER_APPS, Thing.GROUPS, "noise for persons", "noised statistics"),
    *(Thing.PRIVACY, "an adaptive clip norm", "an equal average of models"),
    *("early stopping", Thing.ELEMENT_BOUND, Thing.REMEMBERING, Thing.STATISTICS),
    # It changes nothing in a simulation.
    "sites that join",
    # A resumed run has lost the tasks that were open.
    *(Thing.BUFFERED, "sums of groups at their own pace"),
}
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
    Thing.SAMPLES: {"schedule": {"sites_per_round": 2, "minimum_sites": 1}},
    Thing.FAIR: {
        "schedule": {"sites_per_round": 2, "minimum_sites": 1, "sampling": "fair"}
    },
    Thing.UTILITY: {
        "schedule": {"sites_per_round": 2, "minimum_sites": 1, "sampling": "utility"}
    },
    Thing.OVER_SELECTION: {
        "schedule": {"sites_per_round": 2, "minimum_sites": 1, "over_selection": 1.5}
    },
    Thing.REPLICAS: {"schedule": {"replicas": [SITES[:2]]}},
    Thing.CAPACITY: {"schedule": {"allocation": "capacity"}},
    Thing.PLACEMENT: {
        "training": {"local_epochs": 1},
        "data": {"source": "support.small_jobs:blobs", "placement": "dynamic"},
    },
    Thing.CODECS_UP: {"communication": {"codec": {"name": "top_k", "fraction": 0.5}}},
    Thing.CLIPPED_STEPS: {"training": {"clip_grad_norm": 0.5}},
    Thing.DYNAMIC_WEIGHTS: {"aggregation": {"weights": "dynamic"}},
    Thing.ROBUST: {"aggregation": {"combine": "median", "weights": "uniform"}},
    Thing.CHANGES: {
        "communication": {"down_content": "change", "down_codec": {"name": "int8"}}
    },
    "selection of the best model": {"selection": {"model": "best"}},
    "a moving average of models": {"selection": {"model": "ema"}},
}


def private(unit: str) -> dict[str, Any]:
    """A unit of privacy, and a secure sum if its noise is in one."""
    return {
        "aggregation": {"weights": "uniform"},
        "evaluation": {"every": 0},
        "training": {"local_steps": 1} if unit == "joint" else {},
        "simulation": {"vouch_for_sources": True},
        "privacy": {
            "differential_privacy": {
                "unit": unit,
                "target_epsilon": 50.0,
                "accept_low_signal": unit == "site",
            },
            "secure_aggregation": {"enabled": unit != "record"},
        },
    }


# No run repeats the masks, the rounding and the noise of these.
SECRET: Mapping[str, Mapping[str, Any]] = {
    Thing.SECURE: {"privacy": {"secure_aggregation": {"enabled": True}}},
    Thing.LEVELS: {"privacy": {"secure_aggregation": {"enabled": True, "levels": 16}}},
    "noise for records": private("record"),
    Thing.JOINT: private("joint"),
    Thing.WHOLE_SITES: private("site"),
}


def job_of(*names: str, **changes: Any) -> JobSpec:
    base: dict[str, Any] = {
        "rounds": ROUNDS,
        "model": {
            "factory": "clients.models:logistic_regression",
            "options": {"inputs": 4, "classes": 3},
        },
        "training": {"local_steps": 3, "batch_size": 8, "optimizer": {"lr": 0.1}},
        "simulation": {"machines": MACHINES},
    }
    asked = [(ON | SECRET)[name] for name in names]
    tables = functools.reduce(toy.merged, (*asked, changes), base)
    if "local_epochs" in tables["training"]:
        del tables["training"]["local_steps"]
    return small_job(num_sites=len(SITES), **tables)


def runs(*names: str) -> bool:
    """Whether a job may have all these, none of which takes another's place."""
    try:
        asked = things(job_of(*names))
    except JobError:
        return False
    return all(asked[name] for name in names)


BUFFERED = {"schedule": {"mode": "buffered", "buffer_size": 1}}


def buffers(name: str) -> bool:
    """Whether a buffered job may have a method."""
    try:
        job_of(name, **BUFFERED)
    except JobError:
        return False
    return True


PAIRS = [pair for pair in combinations(ON, 2) if runs(*pair)]
SECRET_PAIRS = [
    pair
    for pair in combinations({**ON, **SECRET}, 2)
    if SECRET.keys() & set(pair) and runs(*pair)
]


def each(pairs: Sequence[tuple[str, str]]) -> pytest.MarkDecorator:
    """All pairs; those of ``make test`` are some of every method."""
    often: Counter[str] = Counter()
    found = []
    for pair in pairs:
        is_rare = min(often[name] for name in pair) < _OFTEN
        often.update(pair if is_rare else ())
        marks = () if is_rare else (pytest.mark.long,)
        found.append(pytest.param(pair, id=" and ".join(pair), marks=marks))
    return pytest.mark.parametrize("pair", found)


def test_most_methods_are_here_and_each_runs_with_another():
    assert len(PAIRS) > len(ON)
    assert {name for pair in PAIRS + SECRET_PAIRS for name in pair} == {*ON, *SECRET}
    assert {method.name for method in METHODS} - {*ON, *SECRET} == NOT_HERE


def resumed(job: JobSpec, folder: Path) -> RunResult:
    """Stop a run in its middle, and continue it."""
    rounds = 0

    def count(event: Event) -> None:
        nonlocal rounds
        rounds += isinstance(event, RoundFinished)

    how: dict[str, Any] = {"engine": "virtual", "folder": folder}
    simulate(job, listeners=[count], stop_requested=lambda: rounds >= STOP_AFTER, **how)
    assert rounds == STOP_AFTER
    return simulate(job, resume=True, **how)


@each(PAIRS)
def test_a_resumed_run_has_the_same_bits(pair: tuple[str, str], tmp_path: Path):
    job = job_of(*pair)
    whole, again = simulate(job, engine="virtual"), resumed(job, tmp_path / "run")
    assert whole.weights.keys() == again.weights.keys()
    for name, values in whole.weights.items():
        assert np.isfinite(values).all(), name
        np.testing.assert_array_equal(values, again.weights[name])


@each(SECRET_PAIRS)
def test_a_resumed_run_without_repetition_ends(pair: tuple[str, str], tmp_path: Path):
    for name, values in resumed(job_of(*pair), tmp_path / "run").weights.items():
        assert np.isfinite(values).all(), name


@pytest.mark.parametrize("name", [name for name in ON if buffers(name)])
def test_a_buffered_run_of_unequal_sites_loses_no_answer(name: str):
    """What sites keep between rounds fits, whatever round they were last asked in."""
    machines = [
        {**machine, "examples_per_second": 100.0 * speed}
        for machine, speed in zip(MACHINES, (1, 3, 5), strict=True)
    ]
    changes = {**BUFFERED, "rounds": 12, "simulation": {"machines": machines}}
    told: list[Event] = []
    ran = simulate(job_of(name, **changes), engine="virtual", listeners=[told.append])
    for values in ran.weights.values():
        assert np.isfinite(values).all()
    stale = [e.staleness for e in told if isinstance(e, SiteAnswered)]
    assert max(stale) > 1
    # When the last model is made, other tasks are open and no longer needed.
    kinds = {e.kind for e in told if isinstance(e, SiteFailed)}
    assert kinds <= {FailureKind.SURPLUS}
