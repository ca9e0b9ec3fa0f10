"""What privacy of records, or of whole sites, costs where only adapters are trained.

    python benchmarks/adapter_privacy.py [--epsilons inf,1] [--runs 1]
        [--units record joint site] [--smoke]

JSON lines on stdout, one for each unit, epsilon and run, the machine first. Needs the
extra huggingface. A small GPT-2 learns here to predict sequences that count upwards, by
steps of 1, 2, 3 or 5: the public model. Eight sites with 250 records each then train
FFA-LoRA of rank 4 and a new head to tell the step of a sequence with a tenth of its
tokens replaced. Accuracy is that of the final model on 400 other sequences, which count
as public. Settings are the same for every epsilon and were not searched for.
"""

import argparse
import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

import machine
import numpy as np
import torch

from clients.models import hugging_face
from clients.models.pretrained import folder_digest
from deploy.wiring.simulation import simulate
from federation.errors import JobError
from federation.job import job_file
from federation.job.spec import JobSpec

CONFIG = {
    "model_type": "gpt2",
    "vocab_size": 32,
    "n_positions": 16,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "num_labels": 4,
}
STEPS = np.array([1, 2, 3, 5])
NUM_SITES, RECORDS, LENGTH = 8, 2000, 12
# Of each unit: rounds, local steps, learning rate, and what else a job needs.
UNITS: dict[str, dict[str, Any]] = {
    "record": {"rounds": 10, "local_steps": 4, "lr": 2.0},
    "joint": {"rounds": 40, "local_steps": 1, "lr": 2.0},
    # Gradients of records are not clipped, only the update.
    "site": {"rounds": 5, "local_steps": 40, "lr": 0.2},
}


def sequences(records: int = RECORDS, seed: int = 0) -> tuple[Any, Any]:
    """Sequences with noise, and the number of their step."""
    found: list[tuple[dict[str, Any], Any]] = []
    for size, stream in ((records, seed), (400, seed + 1000)):
        rng = np.random.default_rng(stream)
        labels = rng.integers(0, len(STEPS), size)
        first = rng.integers(1, 32, (size, 1))
        ids = (first + STEPS[labels][:, None] * np.arange(LENGTH)) % 31 + 1
        noise = rng.random(ids.shape) < 0.1
        ids = np.where(noise, rng.integers(1, 32, ids.shape), ids)
        found.append(({"input_ids": ids}, labels))
    train, held_out = found
    return train, held_out


sequences.preprocessing = "public"  # type: ignore[attr-defined]


def pretrain(folder: Path, steps: int) -> str:
    """Train the public model and return the digest of its folder."""
    torch.manual_seed(0)
    model: Any = hugging_face(config=CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rng = np.random.default_rng(7)
    for _ in range(steps):
        step = STEPS[rng.integers(0, len(STEPS), (64, 1))]
        ids = (rng.integers(1, 32, (64, 1)) + step * np.arange(LENGTH)) % 31 + 1
        tokens = torch.from_numpy(ids)
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    return folder_digest(folder, tokenizer=False)


def job(unit: str, epsilon: float, seed: int, model: dict[str, Any]) -> JobSpec:
    """The job of a row."""
    settings = UNITS[unit]
    document: dict[str, Any] = {
        "name": "adapters",
        "rounds": settings["rounds"],
        "seed": seed,
        "model": {"factory": "clients.models:hugging_face", "options": model},
        "data": {"source": "adapter_privacy:sequences", "options": {"seed": seed}},
        "training": {
            "local_steps": settings["local_steps"],
            "batch_size": 64,
            "optimizer": {"lr": settings["lr"]},
        },
        "aggregation": {"weights": "uniform"},
        "evaluation": {"every": settings["rounds"]},
        "sites": [{"name": f"site-{i}"} for i in range(NUM_SITES)],
    }
    if np.isfinite(epsilon):
        clip = 0.5
        document["privacy"] = {
            "differential_privacy": {
                "unit": unit,
                "target_epsilon": epsilon,
                "delta": 1e-4,
                "clip_norm": clip,
                "held_out": "public",
            },
        }
        if unit != "record":
            document["privacy"]["secure_aggregation"] = {
                "enabled": True,
                "ring_bits": 32,
                "max_examples": 1000,
            }
    else:
        # Gradients that are not clipped are larger, and steps as much smaller.
        document["training"]["optimizer"]["lr"] = 0.2
    return job_file.parse(document)


def measured(spec: JobSpec) -> dict[str, Any]:
    """Run a job; one whose result would be almost only noise is refused."""
    try:
        result = simulate(spec, report=False)
    except JobError as error:
        return {"refused": str(error)}
    return {"accuracy": result.accuracy, "loss": result.loss}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epsilons", default="inf,1")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--units", nargs="+", default=[*UNITS], choices=[*UNITS])
    parser.add_argument("--smoke", action="store_true", help="one short run")
    chosen = parser.parse_args()
    epsilons = [float(text) for text in chosen.epsilons.split(",")]
    if chosen.smoke:
        epsilons, chosen.runs, chosen.units = [16.0], 1, ["record"]
        UNITS["record"] |= {"rounds": 1, "local_steps": 1}
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(json.dumps(machine.facts("adapter_privacy", **vars(chosen))), flush=True)
    with tempfile.TemporaryDirectory() as place:
        sha256 = pretrain(Path(place), 1 if chosen.smoke else 600)
        model = {
            "auto": "AutoModelForSequenceClassification",
            "folder": place,
            "sha256": sha256,
            "lora": {"rank": 4, "train": ["score"]},
        }
        for unit in chosen.units:
            for epsilon in epsilons:
                for run in range(1, chosen.runs + 1):
                    row = {"unit": unit, "epsilon": epsilon, "run": run}
                    row |= measured(job(unit, epsilon, run, model))
                    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
