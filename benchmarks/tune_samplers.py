"""What a search finds with TPE, and with values drawn at random, at equal trials.

    python benchmarks/tune_samplers.py [--trials 25] [--seeds 1] [--jobs digits tumours]
        [--smoke]

Needs the extra ``tune``. JSON lines on stdout, one per search, the machine first; a
table on stderr. Two jobs of a second in which several keys decide together; the loss
of the best trial counts, so smaller is better. Both samplers get the same seeds. A
search's first trials are random with either.
"""

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path

import machine
import torch

from deploy.tuning import space
from deploy.tuning.search import Search
from federation.clock import SystemClock

SAMPLERS = ("random", "tpe")
# Each of few rounds, so that settings matter, and a job file with a space.
JOBS: Mapping[str, tuple[str, str]] = {
    "digits": (
        """
name = "digits"
rounds = 3
seed = 1
model.factory = "clients.models:mlp"
model.options = { inputs = 64, classes = 10, hidden = [32] }
data = { source = "clients.data:digits" }
evaluation.every = 3
training = { local_steps = 8, batch_size = 32, optimizer = { name = "sgd", lr = 0.1 } }
sites = [{ name = "a" }, { name = "b" }]
""",
        """
training.optimizer.lr = { low = 1e-4, high = 10.0, log = true }
training.optimizer.momentum = { low = 0.0, high = 0.99 }
training.optimizer.weight_decay = { low = 1e-6, high = 1.0, log = true }
training.clip_grad_norm = { low = 0.01, high = 10.0, log = true }
aggregation.server_optimizer.lr = { low = 0.1, high = 10.0, log = true }
""",
    ),
    "tumours": (
        """
name = "tumours"
rounds = 4
seed = 1
model.factory = "clients.models:mlp"
model.options = { inputs = 30, classes = 2, hidden = [16] }
data = { source = "clients.data:breast_cancer" }
evaluation.every = 4
training = { local_steps = 5, batch_size = 16, optimizer = { name = "adamw" } }
aggregation.server_optimizer = { name = "adam", lr = 0.1 }
sites = [{ name = "a" }, { name = "b" }]
""",
        """
training.optimizer.lr = { low = 1e-5, high = 1.0, log = true }
training.optimizer.weight_decay = { low = 1e-6, high = 10.0, log = true }
training.local_steps = { low = 1, high = 20 }
training.batch_size = { low = 4, high = 64, log = true }
aggregation.server_optimizer.lr = { low = 1e-4, high = 1.0, log = true }
aggregation.server_optimizer.beta1 = { low = 0.0, high = 0.99 }
""",
    ),
}


def best_so_far(
    job: str, sampler: str, seed: int, trials: int, folder: Path
) -> list[float]:
    """Search, and return the lowest loss after each trial; infinite if it failed."""
    text, keys = JOBS[job]
    folder.mkdir()
    (folder / "job.toml").write_text(text)
    head = f'job = "job.toml"\ntrials = {trials}\nsampler = "{sampler}"\nseed = {seed}'
    path = folder / "space.toml"
    path.write_text(f"{head}\n[space]\n{keys}")
    # A trial whose weights left the finite numbers has failed, and counts as a trial.
    search = Search(
        space=space.load(path),
        folder=folder / "search",
        say=lambda _line: None,
        clock=SystemClock(),
    )
    search.folder.mkdir()
    losses = (trial.value for trial in search.run().trials)
    values = (math.inf if loss is None else loss for loss in losses)
    return list(accumulate(values, min))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=25)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--jobs", nargs="+", default=[*JOBS], choices=[*JOBS])
    parser.add_argument("--smoke", action="store_true", help="a few trials of one job")
    chosen = parser.parse_args()
    if chosen.smoke:
        chosen.trials, chosen.seeds, chosen.jobs = 2, 1, ["tumours"]
    torch.set_num_threads(1)
    print(json.dumps(machine.facts("tune_samplers", **vars(chosen))), flush=True)
    rows = []
    with tempfile.TemporaryDirectory() as place:
        for job in chosen.jobs:
            for seed in range(chosen.seeds):
                found = {}
                for sampler in SAMPLERS:
                    start = time.process_time()
                    folder = Path(place) / f"{job}-{sampler}-{seed}"
                    best = best_so_far(job, sampler, seed, chosen.trials, folder)
                    found[sampler] = best[-1]
                    row = {"job": job, "seed": seed, "sampler": sampler, "best": best}
                    row["cpu_seconds"] = time.process_time() - start
                    print(json.dumps(row), flush=True)
                rows.append((job, seed, found))
    print(table(rows), file=sys.stderr)


def table(rows: list[tuple[str, int, dict[str, float]]]) -> str:
    """A row for each job and seed."""
    lines = [
        "| job | seed | random | tpe | better |",
        "| --- | --- | --- | --- | --- |",
    ]
    for job, seed, found in rows:
        better = min(SAMPLERS, key=found.__getitem__)
        better = better if len({*found.values()}) > 1 else "neither"
        random, tpe = (f"{found[sampler]:.4f}" for sampler in SAMPLERS)
        lines.append(f"| {job} | {seed} | {random} | {tpe} | {better} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
