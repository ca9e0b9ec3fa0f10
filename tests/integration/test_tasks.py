"""Runs of the built-in tasks, with data as torch's loaders give it."""

from typing import Any

import numpy as np
import pytest
import torch
from support import task_models
from support.small_jobs import small_job
from support.without_report import simulate

from clients.training.local_steps import LocalOptimizer
from federation.errors import JobError
from federation.job.metrics import BUILT_IN
from federation.job.spec import JobSpec

TASKS = sorted(BUILT_IN.keys() - {"classification", "causal_lm", "statistics"})
OPTIONS = {"segmentation": {"ignore_index": 255}}
BOUNDS = {"loss": [0.0, 9.0], "absolute_error": [0.0, 3.0], "squared_error": [0.0, 9.0]}
SECURE = {"enabled": True, "clip_norm": 5.0, "max_examples": 100}


def job(task: str, *, rounds: int = 6, **tables: Any) -> JobSpec:
    training = {
        "task": task,
        "options": OPTIONS.get(task, {}),
        "metrics": BOUNDS if task == "regression" else {},
        "local_steps": 5,
        "batch_size": 16,
        "optimizer": {"name": "adam", "lr": 0.05},
        "max_tokens": 32,
    }
    return small_job(
        num_sites=3,
        model={"factory": "support.task_models:model", "options": {"task": task}},
        data={"source": "support.task_models:data", "options": {"task": task}},
        rounds=rounds,
        **{"training": training | tables.pop("training", {}), **tables},
    )


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_task_trains_and_secure_sums_agree(task: str):
    """The loss falls, and comes out of the masks as the sites report it."""
    measures = {"binary": ["auc", "calibration"], "contrastive": ["recall_at_3"]}
    training = {"measures": measures.get(task, [])}
    plain = simulate(job(task, training=training))
    first = plain.view.initial
    assert first is not None
    assert plain.loss is not None
    assert plain.loss < 0.9 * first.pooled.loss
    secure = simulate(
        job(task, training=training, privacy={"secure_aggregation": SECURE})
    )
    assert secure.loss == pytest.approx(plain.loss, rel=0.02, abs=1e-3)
    assert secure.metrics.keys() == plain.metrics.keys()
    wanted = {"binary": "auc", "contrastive": "recall_at_3", "regression": "rmse"}
    if task in wanted:
        assert wanted[task] in plain.metrics
    assert secure.metrics == pytest.approx(plain.metrics, rel=0.1, abs=0.03)


@pytest.mark.slow
def test_masked_tokens_with_record_level_privacy():
    """Each record counts by its own mean, and results are public ones."""
    private = {
        "unit": "record",
        "target_epsilon": 8.0,
        "delta": 1e-5,
        "held_out": "public",
    }
    training = {"optimizer": {"name": "rmsprop", "lr": 0.01}}
    result = simulate(
        job(
            "masked_lm",
            rounds=1,
            training=training,
            privacy={"differential_privacy": private},
            aggregation={"weights": "uniform"},
            simulation={"vouch_for_sources": True},
        )
    )
    assert result.status == "completed"
    assert result.loss is not None


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("adadelta", {"rho": 0.8}),
        ("adafactor", {}),
        ("adagrad", {}),
        ("adamax", {"betas": [0.8, 0.9]}),
        ("asgd", {}),
        ("nadam", {}),
        ("radam", {}),
        ("rmsprop", {"alpha": 0.9, "momentum": 0.5}),
        ("rprop", {}),
    ],
)
def test_optimizers_of_torch(name: str, options: dict[str, Any]):
    """Three steps of each are those of torch, also where the state is kept between."""
    spec = job(
        "regression",
        training={
            "optimizer": {"name": name, "lr": 0.1, "options": options, "state": "keep"}
        },
    )
    kind = next(n for n in dir(torch.optim) if n.lower() == name)
    weights = [torch.nn.Linear(3, 1) for _ in range(2)]
    weights[1].load_state_dict(weights[0].state_dict())
    theirs = getattr(torch.optim, kind)(weights[1].parameters(), lr=0.1, **options)
    kept: Any = {}
    for number in range(3):
        for model in weights:
            model.zero_grad()
            model(torch.full((2, 3), number + 1.0)).square().sum().backward()
        ours = LocalOptimizer(weights[0], spec, kept)
        ours.step(number)
        kept = ours.kept()
        theirs.step()
    for one, other in zip(*(m.parameters() for m in weights), strict=True):
        np.testing.assert_array_equal(one.detach(), other.detach())


def own(name: str, **options: Any) -> JobSpec:
    spec = {"name": f"support.task_models:{name}", "lr": 0.1, "options": options}
    return job("regression", training={"optimizer": spec})


def test_own_optimizer_keeps_the_rates_of_its_groups():
    """The schedule scales each by the same factor."""
    schedule = {"name": "support.task_models:halves", "options": {"after": 1}}
    optimizer = {
        "name": "support.task_models:two_groups",
        "lr": 0.1,
        "options": {"bias_lr": 0.01},
    }
    spec = job(
        "regression", training={"optimizer": optimizer, "learning_rate": schedule}
    )
    model = torch.nn.Linear(1, 1)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    ours = LocalOptimizer(model, spec)
    for number in range(2):
        model.weight.grad = torch.ones(1, 1)
        model.bias.grad = torch.ones(1)
        ours.step(number)
    assert model.weight.item() == pytest.approx(-0.15)
    assert model.bias.item() == pytest.approx(-0.015)


@pytest.mark.parametrize(
    ("spec", "key", "text"),
    [
        (own("two_groups"), "training.optimizer.options", "bias_lr"),
        (own("half_of_them"), "training.optimizer.name", "it received 2"),
        (own("padded"), "training.optimizer.options", "its options are"),
    ],
)
def test_own_optimizer_is_checked(spec: JobSpec, key: str, text: str):
    with pytest.raises(JobError, match=text) as caught:
        LocalOptimizer(task_models.model("regression"), spec)
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        ({"name": "rmsprob"}, "did you mean 'rmsprop'"),
        ({"name": "lbfgs"}, "is not a choice"),
        ({"name": "sgd", "options": {"momentum": 0.9}}, "keys of its own"),
        ({"name": "x:y", "weight_decay": 0.1}, "give it in options"),
    ],
)
def test_wrong_optimizer_is_refused(optimizer: dict[str, Any], text: str):
    with pytest.raises(JobError, match=text):
        job("regression", training={"optimizer": optimizer})
