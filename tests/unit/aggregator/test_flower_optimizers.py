"""Adaptive server optimisers beside Flower's, as the page on Flower's apps says."""

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cloud_adapters.flower import simulation as flower_simulation
from federation.job.spec import ServerOptimizerSpec
from federation.rounds.server_optimizer import server_optimizer

if importlib.util.find_spec("flwr") is None:
    pytest.skip("the flower extra is not installed", allow_module_level=True)
flower_simulation.import_flower()

from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict  # noqa: E402
from flwr.serverapp import strategy  # noqa: E402
from flwr.serverapp.strategy.fedopt import FedOpt  # noqa: E402
from flwr.supercore.task_identity import TaskIdentity  # noqa: E402

pytestmark = [pytest.mark.flower, pytest.mark.slow]

PAGE = Path(__file__).parents[3] / "docs" / "howto" / "existing-flower-app.md"
UPDATE, LR, TAU, ROUNDS = np.float32(0.01), 0.1, 1e-3, 3
BETAS = {"beta_1": 0.9, "beta_2": 0.99}


def ours(name: str) -> list[float]:
    """The step that each round's update becomes."""
    optimizer = server_optimizer(ServerOptimizerSpec(name=name, lr=LR, tau=TAU))
    state, steps = optimizer.init(1), []
    for _ in range(ROUNDS):
        step = np.array([UPDATE])
        optimizer.step(state, step)
        steps.append(float(step[0]))
    return steps


def flowers(flower: FedOpt) -> list[float]:
    """The same of Flower, which is given whole models."""
    weights, steps = np.zeros(1, np.float32), []
    for index in range(1, ROUNDS + 1):
        flower.current_arrays = {"w": weights}
        arrays = ArrayRecord({"w": Array(weights + UPDATE)})
        metrics = MetricRecord({"num-examples": 1})
        answer = Message(
            RecordDict({"arrays": arrays, "metrics": metrics}),
            dst_node_id=1,
            message_type="train",
        )
        combined, _ = flower.aggregate_train(index, [answer])
        assert combined is not None
        steps.append(float((combined["w"].numpy() - weights)[0]))
        weights = combined["w"].numpy()
    return steps


def row(name: str) -> list[str]:
    """Numbers of a row of the page's table."""
    (line,) = re.findall(rf"^\| {name} .*$", PAGE.read_text("utf-8"), re.MULTILINE)
    return re.findall(r"\d\.\d{4}", line)


@pytest.mark.parametrize(
    ("name", "flower"),
    [
        ("adagrad", lambda: strategy.FedAdagrad(eta=LR, tau=TAU)),
        ("adam", lambda: strategy.FedAdam(eta=LR, tau=TAU, **BETAS)),
        ("yogi", lambda: strategy.FedYogi(eta=LR, tau=TAU, **BETAS)),
    ],
)
def test_table_tells_the_steps_of_both(
    monkeypatch: pytest.MonkeyPatch, name: str, flower: Callable[[], FedOpt]
):
    for identity in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, identity, 1)
    found = [*ours(name), *flowers(flower())]
    assert [f"{step:.4f}" for step in found] == row(name)
