"""Error of averaging the two factors of adapters, against the mean of their products.

    python benchmarks/adapters.py [--steps 1 10 50] [--sites 2 4 8] [--smoke]

JSON lines on stdout, one per method, number of local steps and of sites, the machine
first. Needs the extra huggingface. Each site trains rank-4 adapters of a small GPT-2
with Adam for a round, on sequences that count upwards by a step of its own. Then B and
A are averaged, as the aggregator does. The error is the Frobenius norm of
mean(B) mean(A) - mean(B A) over that of mean(B A), all layers together. Of the same
factors, `fedex` adds what is missing in float32, and `svd` takes the best product of
rank 4.
"""

import argparse
import json
import math
import warnings

import machine
import torch

from clients.models import hugging_face

CONFIG = {
    "model_type": "gpt2",
    "vocab_size": 32,
    "n_positions": 16,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
Factors = list[tuple[torch.Tensor, torch.Tensor]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 10, 50])
    parser.add_argument("--sites", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--smoke", action="store_true", help="two sites, two steps")
    chosen = parser.parse_args()
    if chosen.smoke:
        chosen.steps, chosen.sites = [2], [2]
    torch.set_num_threads(1)
    print(json.dumps(machine.facts("adapters", **vars(chosen))))
    for method in ("ffa", "plain"):
        for steps in chosen.steps:
            most = max(chosen.sites)
            trained = [_train(method, steps, site) for site in range(most)]
            for num_sites in chosen.sites:
                ways = ("plain", "fedex", "svd") if method == "plain" else (method,)
                for way in ways:
                    row = {"method": way, "local_steps": steps, "sites": num_sites}
                    error = _error(trained[:num_sites], way)
                    print(json.dumps({**row, "relative_error": error}))


def _train(method: str, steps: int, site: int) -> Factors:
    torch.manual_seed(0)  # All sites begin with the same model.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model = hugging_face(config=CONFIG, lora={"rank": 4, "method": method})
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=1e-2)
    generator = torch.Generator().manual_seed(site)
    for _ in range(steps):
        start = torch.randint(0, 32, (16, 1), generator=generator)
        tokens = (start + (1 + site) * torch.arange(12)) % 32
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    named = {n: p.detach().double() for n, p in model.named_parameters()}
    return [
        (factor, named[name.replace("lora_A", "lora_B")])
        for name, factor in named.items()
        if "lora_A" in name
    ]


def _error(sites: list[Factors], way: str) -> float:
    wrong = exact = 0.0
    for layer in zip(*sites, strict=True):
        a, b = (torch.stack(factors).mean(0) for factors in zip(*layer, strict=True))
        mean = torch.stack([b_k @ a_k for a_k, b_k in layer]).mean(0)
        found = b @ a
        if way == "fedex":
            found = found + (mean - found).float().double()
        if way == "svd":
            u, s, vt = torch.linalg.svd(mean, full_matrices=False)
            found = u[:, : len(a)] * s[: len(a)] @ vt[: len(a)]
        wrong += float((found - mean).square().sum())
        exact += float(mean.square().sum())
    return math.sqrt(wrong / exact)


if __name__ == "__main__":
    main()
