"""What a step of DP-SGD costs: a private step over one without privacy.

    python benchmarks/dp_sgd.py [--repetitions 9] [--kinds cnn,gpt]

The same model and examples, AdamW, one thread. A private step is what a site does
with a batch: gradients by record, clipping, the Gaussian mechanism's noise, the
optimiser. `hooks` and `ghost` are the two ways of `privacy.dp_sgd.clipping`; `noise`
is the mechanism's share of the step with hooks. Contenders take turns, and the ratio
is the median of the turns' ratios, because machines are shared.

JSON lines on stdout, the machine first; a table on stderr.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable

import machine
import torch
from torch import nn

from clients import models
from clients.models.objectives import OBJECTIVES, Objective
from privacy.dp.mechanism import GaussianMechanism
from privacy.dp_sgd.clipping import ClippedSum

CNN_BATCHES, GPT_BATCHES = (32, 64, 128, 256), (8, 32)
CLIP_NORM, CONTEXT = 1.0, 128

Step = Callable[[], float]


def steps(
    model: nn.Module,
    objective: Objective,
    inputs: torch.Tensor,
    targets: torch.Tensor | None,
) -> dict[str, Step]:
    """The contenders; each returns the seconds of its noise."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    size = len(inputs)

    def loss() -> torch.Tensor:
        found = objective(model, inputs, targets)
        return found.total / (found.count / size)

    def finish() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def plain() -> float:
        (loss() / size).backward()
        finish()
        return 0.0

    def private(clipping: str) -> Step:
        total = ClippedSum(
            model, clip_norm=CLIP_NORM, clipping=clipping, batch_size=size
        )
        mechanism = GaussianMechanism(
            clip_norm=CLIP_NORM, noise_multiplier=1.0, size=total.sum_d.numel()
        )

        def step() -> float:
            total.sum_d.zero_()
            total.add_(loss, size)
            begin = time.perf_counter()
            mechanism.release_(total.sum_d.numpy())
            seconds = time.perf_counter() - begin
            total.write_gradients(size)
            finish()
            return seconds

        return step

    return {"plain": plain, "hooks": private("hooks"), "ghost": private("ghost")}


def measure(contenders: dict[str, Step], repetitions: int) -> dict[str, float]:
    for step in contenders.values():
        step()
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    noise: list[float] = []
    for _ in range(repetitions):
        for name, step in contenders.items():
            begin = time.perf_counter()
            noise_seconds = step()
            seconds[name].append(time.perf_counter() - begin)
            if name == "hooks":
                noise.append(noise_seconds / seconds[name][-1])

    def ratio(name: str) -> float:
        pairs = zip(seconds[name], seconds["plain"], strict=True)
        return statistics.median(mine / plain for mine, plain in pairs)

    return {
        "plain_seconds": statistics.median(seconds["plain"]),
        "hooks": ratio("hooks"),
        "ghost": ratio("ghost"),
        "noise_share": statistics.median(noise),
    }


def cases(kinds: list[str]) -> dict[str, Callable[[], dict[str, Step]]]:
    found: dict[str, Callable[[], dict[str, Step]]] = {}
    for size in CNN_BATCHES if "cnn" in kinds else ():

        def cnn(size: int = size) -> dict[str, Step]:
            images = torch.randn(size, 1, 8, 8)
            labels = torch.randint(0, 10, (size,))
            model = models.digits_cnn()
            return steps(model, OBJECTIVES["classification"], images, labels)

        found[f"cnn {size}"] = cnn
    for size in GPT_BATCHES if "gpt" in kinds else ():

        def gpt(size: int = size) -> dict[str, Step]:
            tokens = torch.randint(0, 256, (size, CONTEXT + 1))
            return steps(models.gpt(layers=5), OBJECTIVES["causal_lm"], tokens, None)

        found[f"gpt {size}"] = gpt
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--kinds", default="cnn,gpt")
    args = parser.parse_args()
    torch.set_num_threads(1)
    settings = {"repetitions": args.repetitions, "threads": 1}
    print(json.dumps(machine.facts("dp_sgd", **settings)), flush=True)
    for name, make in cases(args.kinds.split(",")).items():
        torch.manual_seed(0)
        contenders = make()
        row = measure(contenders, args.repetitions)
        print(json.dumps({"case": name, **row}), flush=True)
        print(
            f"{name:8} plain {1e3 * row['plain_seconds']:7.1f} ms  "
            f"hooks {row['hooks']:.2f}x  ghost {row['ghost']:.2f}x  "
            f"noise {row['noise_share']:.0%}",
            file=sys.stderr,
        )


if __name__ == "__main__":
    main()
