"""What an objective by function adds to a step, beside the built-in one.

    python benchmarks/objective_overhead.py [--steps 40] [--turns 9] [--smoke]

JSON lines on stdout, one per model, the machine first. Both objectives compute the same
cross-entropy and the same number of correct predictions of the same model and batch;
one is `classification`, the other a function named by `training.task`, which returns
values by record. A step is forward and backward pass, sums of metrics, and SGD. Both
take turns in one process and thread; times are CPU time, the median of the turns, and
the overhead is the median of the ratios of neighbouring turns.
"""

import argparse
import json
import statistics
import time
from collections.abc import Mapping

import machine
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
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--smoke", action="store_true", help="a step, once")
    chosen = parser.parse_args()
    if chosen.smoke:
        chosen.steps = chosen.turns = 1
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
        "by function": RecordObjective(_SPEC, by_record),
    }
    for name, (model, inputs) in cases.items():
        seconds: dict[str, list[float]] = {each: [] for each in objectives}
        for turn in range(chosen.turns + 1):
            for each, objective in objectives.items():
                took = _steps(model, objective, (inputs, labels), chosen.steps)
                if turn:  # The first one warms up.
                    seconds[each].append(took)
        ratios = [ours / theirs for theirs, ours in zip(*seconds.values(), strict=True)]
        medians = {e: 1e3 * statistics.median(s) for e, s in seconds.items()}
        overhead = 100 * (statistics.median(ratios) - 1)
        row = {"model": name, "step_ms": medians, "overhead_percent": overhead}
        print(json.dumps(row))


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
