"""Runs whose coordinator is killed end with the same bits, whatever they keep.

A method that keeps something between rounds is a row; ``test_pairs_of_methods`` stops
and resumes it with every other.
"""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.killed_runs import kill_at
from support.small_jobs import small_job
from support.toy import merged
from support.without_report import simulate

pytestmark = pytest.mark.slow

ROUNDS = 6
USUAL: Mapping[str, Any] = {
    "num_sites": 4,
    "rounds": ROUNDS,
    "data": {
        "source": "support.small_jobs:blobs",
        "partition": {"kind": "dirichlet", "alpha": 0.3},
    },
    "training": {"local_steps": 4, "batch_size": 8, "optimizer": {"lr": 0.1}},
}
ADAM = {"name": "adam", "lr": 0.05, "state": "keep"}
MUON = {"name": "muon", "lr": 0.02, "momentum": 0.95, "state": "keep"}
SMALL = {
    "factory": "clients.models:mlp",
    "options": {"inputs": 4, "classes": 3, "hidden": [16, 8]},
}
WIDE = merged(SMALL, {"options": {"hidden": [256, 64]}})
CODECS: Mapping[str, Mapping[str, Any]] = {
    "int8": {"name": "int8"},
    "int4": {"name": "int4", "block": 64},
    "fp4": {"name": "fp4"},
    "top_k": {"name": "top_k", "fraction": 0.05},
    "subset": {"name": "subset", "fraction": 0.25, "order": "cyclic"},
}
CHANGES = {"down_codec": CODECS["int4"], "down_content": "change"}


def training(**keys: Any) -> dict[str, Any]:
    return {"training": keys}


def feddyn(**keys: Any) -> dict[str, Any]:
    summed = {"aggregation": {"server_optimizer": {"name": "running_sum"}}}
    return summed | training(dynamic_alpha=0.3, **keys)


def coded(codec: str, *, down: bool) -> dict[str, Any]:
    """Residuals of both sides, what was sent, and whose updates counted."""
    faults = [
        {"site": "site-1", "kind": "silent", "rounds": [2]},
        {"site": "site-2", "kind": "wrong_length", "rounds": [3]},
        # With changes, a site that restarts misses a round that a resumed run has not.
        {"site": "site-3", "kind": "leave" if down else "restart", "rounds": [4]},
        *({"site": f"site-{i}", "kind": "nan", "rounds": [5]} for i in range(3)),
    ]
    return {
        "model": WIDE,
        "communication": {"codec": CODECS[codec]} | (CHANGES if down else {}),
        "aggregation": {"server_optimizer": {"name": "nesterov", "lr": 0.3}},
        "simulation": {"faults": faults},
        "schedule": {"minimum_sites": 3},
    }


ANSWERED = ("SiteAnswered", 3)  # A site has kept its third round, the run has not.
# What is killed, and at which event of which round.
KILLED: dict[str, tuple[Mapping[str, Any], tuple[str, int]]] = {
    "control variates": (training(control_variates=True), ANSWERED),
    "FedDyn": (feddyn(), ANSWERED),
    "FedDyn, epochs": (feddyn(local_steps=None, local_epochs=1), ANSWERED),
    "FedDyn, fp16": (feddyn(precision="fp16", clip_grad_norm=1.0), ANSWERED),
    "FedDyn, kept AdamW": (feddyn(optimizer=ADAM | {"name": "adamw"}), ANSWERED),
    "FedDyn, accumulated": (feddyn(accumulate=2), ANSWERED),
    "kept Muon": (training(optimizer=MUON) | {"model": SMALL}, ANSWERED),
    **{
        f"kept Adam, {event} {index}": (training(optimizer=ADAM), (event, index))
        for event, index in (
            ANSWERED,
            ("RoundFinished", 3),
            ("CheckpointSaved", 2),
            ("RoundStarted", 1),
        )
    },
}
CODED = {
    f"{codec}, {event} {index}, {down}": (coded(codec, down=down), (event, index))
    for codec in CODECS
    for event, index, down in (
        (*ANSWERED, True),
        ("RoundFinished", 4, True),
        ("RoundFinished", 4, False),
    )
}


@pytest.mark.parametrize(
    "case",
    [
        *KILLED,
        # Each codec and each moment once; all pairs of them in `make test-long`.
        *(
            pytest.param(case, marks=[pytest.mark.long] * ((i // 3 - i) % 3 != 0))
            for i, case in enumerate(CODED)
        ),
    ],
)
def test_a_killed_run_ends_with_the_same_model(case: str, tmp_path: Path):
    """What every side keeps comes back as it was when the round began."""
    tables, moment = (KILLED | CODED)[case]
    job = functools.reduce(merged, (USUAL, tables))
    job["training"] = {k: v for k, v in job["training"].items() if v is not None}
    expected = simulate(small_job(**job))
    kill_at(job, tmp_path / "run", *moment)
    found = simulate(small_job(**job), folder=tmp_path / "run", resume=True)
    assert found.rounds_now < ROUNDS or moment[1] == 1
    assert expected.weights.keys() == found.weights.keys()
    for name, values in expected.weights.items():
        assert values.tobytes() == found.weights[name].tobytes(), name
