"""CPU time of a step of Muon that orthogonalises in bfloat16, and in float32.

    python benchmarks/muon.py [--turns 10] [--width 160] [--layers 4] [--smoke]

JSON lines on stdout, the machine first. A step is the forward and backward pass of a
byte-level GPT on 8 windows of 128 bytes, and the optimisers of `name = "muon"`. Both
take a step in each turn; the first turn does not count. `gradients` is a step without
optimisers. `bfloat16_is_fast` is which of the two crossfed takes on this processor.
"""

import argparse
import json
import statistics
import time

import machine
import torch
from torch.nn import functional

from clients.float32_muon import Float32Muon
from clients.models import gpt, hidden_matrices
from clients.sixteen_bits import multiplies_bfloat16
from federation.job.spec import OptimizerSpec

_LR = 1e-3
_CONTEXT = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--width", type=int, default=160)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--smoke", action="store_true", help="a small model, one turn")
    chosen = parser.parse_args()
    if chosen.smoke:
        chosen.turns, chosen.width, chosen.layers = 1, 16, 1
    torch.set_num_threads(1)
    print(json.dumps(machine.facts("muon", **vars(chosen))))
    model = gpt(context=_CONTEXT, layers=chosen.layers, width=chosen.width)
    spec = OptimizerSpec(name="muon", lr=_LR, momentum=0.95)
    matrices = list(hidden_matrices.hidden_matrices(model, spec).values())
    optimizers: dict[str, torch.optim.Optimizer | None] = {
        "gradients": None,
        "bfloat16": torch.optim.Muon(
            matrices, lr=_LR, momentum=0.95, adjust_lr_fn="match_rms_adamw"
        ),
        "float32": Float32Muon(matrices, lr=_LR, momentum=0.95, weight_decay=0.1),
    }
    seconds: dict[str, list[float]] = {name: [] for name in optimizers}
    tokens = torch.randint(0, 256, (8, _CONTEXT))
    for turn in range(chosen.turns + 1):
        for name, optimizer in optimizers.items():
            took = _step(model, tokens, optimizer)
            if turn:
                seconds[name].append(took)
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    row = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "bfloat16_is_fast": multiplies_bfloat16(torch.device("cpu")),
        "step_ms": {name: round(1e3 * each, 2) for name, each in medians.items()},
        "ratio": round(medians["bfloat16"] / medians["float32"], 2),
    }
    print(json.dumps(row))


def _step(
    model: torch.nn.Module,
    tokens: torch.Tensor,
    optimizer: torch.optim.Optimizer | None,
) -> float:
    """CPU seconds of a step."""
    begin = time.process_time()
    logits = model(tokens).flatten(0, 1)
    loss = functional.cross_entropy(logits, tokens.flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    if optimizer is not None:
        optimizer.step()
    model.zero_grad(set_to_none=True)
    return time.process_time() - begin


if __name__ == "__main__":
    main()
