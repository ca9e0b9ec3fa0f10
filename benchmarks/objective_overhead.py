"""What an objective by function adds to a step, beside the built-in one.

    python benchmarks/objective_overhead.py [--turns 1000] [--steps 2] [--smoke]

JSON lines on stdout, one per model, the machine first. Both objectives compute the same
cross-entropy and the same number of correct predictions of the same model and batch;
one is `classification`, the other a function named by `training.task`, which returns
values by record. A step is forward and backward pass, sums of metrics, and SGD.

The speed of a shared machine changes by more than what is measured. So each turn takes
a few steps with each objective, in random order, and the difference within the turn is
what counts: its mean over the turns, without the lowest and the highest tenth, with its
standard error. The built-in objective takes part twice; `same` is its difference from
itself, which shows what this method can tell apart. Times are CPU time of one thread.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Mapping

import machine
import numpy as np
import torch
from torch.nn import functional

from clients.models import digits_cnn, mlp
from clients.models.objectives import Objective, RecordObjective, classification
from clients.ranks.peers import NO_PEERS, Sums
from federation.job.metrics import CORRECT
from federation.job.spec import TrainingSpec

_SPEC = TrainingSpec(
    task="benchmarks:by_record",
    metrics={"loss": (0.0, 32.0), "correct": (0.0, 1.0)},
    local_steps=1,
)


def by_record(
    model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor
) -> Mapping[str, torch.Tensor]:
    logits = model(inputs)
    loss = functional.cross_entropy(logits, targets, reduction="none")
    return {"loss": loss, "correct": (logits.argmax(1) == targets).float()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--turns", type=int, default=1000)
    parser.add_argument("--smoke", action="store_true", help="a step, twice")
    chosen = parser.parse_args()
    if chosen.smoke:
        chosen.steps, chosen.turns = 1, 2
    torch.set_num_threads(1)
    print(json.dumps(machine.facts("objective_overhead", **vars(chosen))))
    images, labels = torch.rand(32, 1, 8, 8), torch.randint(0, 10, (32,))
    cases = {
        "digits_cnn, 32 images": (digits_cnn(), images),
        "mlp of 1.1M values, 32 records": (
            mlp(784, 10, hidden=(1024, 256)),
            torch.rand(32, 784),
        ),
    }
    objectives: dict[str, Objective] = {
        "built-in": classification,
        "same": classification,
        "by function": RecordObjective(_SPEC, by_record),
    }
    for name, (model, inputs) in cases.items():
        seconds: dict[str, list[float]] = {each: [] for each in objectives}
        for turn in range(chosen.turns + 1):
            for each in random.sample(list(objectives), len(objectives)):
                batch = inputs, labels
                took = _steps(model, objectives[each], batch, chosen.steps)
                if turn:  # The first one warms up.
                    seconds[each].append(took)
        step = statistics.median(seconds["built-in"])
        row: dict[str, object] = {"model": name, "step_ms": round(1e3 * step, 3)}
        for each in ("same", "by function"):
            mean, error = _difference(seconds[each], seconds["built-in"])
            row[each] = {
                "added_us": round(1e6 * mean, 1),
                "standard_error_us": round(1e6 * error, 1),
                "added_percent": round(100 * mean / step, 2),
            }
        print(json.dumps(row))


def _difference(ours: list[float], theirs: list[float]) -> tuple[float, float]:
    """Mean over the turns without the outer fifth, and its standard error.

    The error of a trimmed mean is that of the values drawn in to the outermost kept
    (Tukey and McLaughlin, 1963).
    """
    difference = np.sort(np.subtract(ours, theirs))
    cut = len(difference) // 10
    kept = difference[cut : len(difference) - cut]
    drawn_in = np.clip(difference, kept[0], kept[-1])
    error = drawn_in.std(ddof=1) / (0.8 * np.sqrt(len(difference)))
    return float(kept.mean()), float(error)


def _steps(
    model: torch.nn.Module,
    objective: Objective,
    batch: tuple[torch.Tensor, torch.Tensor],
    steps: int,
) -> float:
    """CPU seconds of a step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    sums = Sums(torch.device("cpu"), NO_PEERS, CORRECT)
    begin = time.process_time()
    for _ in range(steps):
        loss = objective(model, *batch)
        (loss.total / loss.count).backward()  # type: ignore[no-untyped-call]
        sums.add(loss.loss, loss.count, loss.metrics)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    sums.metrics()
    return (time.process_time() - begin) / steps


if __name__ == "__main__":
    main()
