"""What privacy costs: accuracy for each epsilon, and the time of a whole run.

    python benchmarks/privacy_utility.py [--job jobs/private.toml] [--runs 1]
        [--epsilons 1,2,4,8,inf] [--repetitions 2]

Accuracy is that of the final model on all held-out records, computed here: what the
sites tell of theirs has noise of its own. Runs differ by the job's seed, which deals
the records out, and by the noise, which has no seed. Infinity is the job without
differential privacy and with the learning rate of `--plain-lr`, since gradients that
are not clipped are larger by as much; secure aggregation stays on.

For time the job is run as it is and with both protections off, as the command that a
person types, in turns. `run` is from the first event to the last, `round` the median
round, `start` the rest: the interpreter, imports, calibration of the noise, the
report. The ratio is the median of the turns' ratios, because machines are shared.

JSON lines on stdout, the machine first; a table on stderr.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import machine
import torch

from clients import data
from clients.factories import call_factory, import_factory
from deploy.wiring.simulation import simulate
from federation.event_log import read_events
from federation.events import RoundFinished, RunFinished
from federation.job import job_file
from federation.job.spec import JobSpec
from monitoring.runs.run_result import RunResult

TARGET = "privacy.differential_privacy.target_epsilon"
WITHOUT_NOISE = (
    "privacy.differential_privacy=",  # Takes the table out.
    "privacy.secure_aggregation.two_sites_waiver=true",
)
WITHOUT_PROTECTION = ("privacy=",)
PARTS = ("run", "round", "start", "command")


def accuracy(job: JobSpec, result: RunResult) -> float:
    """Of the run's model on all held-out records, without anybody's noise."""
    _, held_out = data.load(job.data.source, job.data.options)
    factory = import_factory(job.model.factory, key="model.factory")
    model = call_factory(factory, job.model.options, key="model.options")
    model.load_state_dict(result.state_dict(), strict=False)
    inputs, targets = held_out.batch(torch.arange(len(held_out)).numpy())
    with torch.no_grad():
        return float((model(inputs).argmax(1) == targets).float().mean())


def utility(
    path: Path, epsilon: float, runs: int, plain: tuple[str, ...]
) -> dict[str, object]:
    """Accuracies of runs with other seeds than the job file's, and what they spent."""
    overrides = (f"{TARGET}={epsilon}",) if math.isfinite(epsilon) else plain
    found, spent = [], []
    for seed in range(1, runs + 1):
        job = job_file.load(path, [*overrides, f"seed={seed}"])
        result = simulate(job)
        found.append(accuracy(job, result))
        told = [s.spent.epsilon for s in result.view.sites if s.spent is not None]
        spent.append(max(told, default=0.0))
    return {
        "epsilon": epsilon if math.isfinite(epsilon) else "inf",
        "mean": statistics.fmean(found),
        "low": min(found),
        "high": max(found),
        "spent": max(spent) if math.isfinite(epsilon) else None,
        "runs": runs,
    }


def seconds(path: Path, overrides: tuple[str, ...]) -> dict[str, float]:
    """Run the command once, in a process and a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [str(Path(sys.executable).with_name("crossfed")), "simulate"]
        command += [str(path), "--out", str(out)]
        for override in overrides:
            command += ["--set", override]
        begin = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        wall = time.perf_counter() - begin
        events = read_events(out / "events.jsonl")
    (finished,) = [event for event in events if isinstance(event, RunFinished)]
    rounds = [event.seconds for event in events if isinstance(event, RoundFinished)]
    return {
        "run": finished.seconds,
        "round": statistics.median(rounds),
        "start": wall - finished.seconds,
        "command": wall,
    }


def cost(path: Path, plain: tuple[str, ...], repetitions: int) -> dict[str, object]:
    """Seconds with and without protection, and their ratio within each turn."""
    turns = [(seconds(path, ()), seconds(path, plain)) for _ in range(repetitions)]
    row: dict[str, object] = {}
    for part in PARTS:
        row[f"{part}_private"] = statistics.median(mine[part] for mine, _ in turns)
        row[f"{part}_plain"] = statistics.median(bare[part] for _, bare in turns)
        ratios = [mine[part] / bare[part] for mine, bare in turns]
        row[f"{part}_ratio"] = statistics.median(ratios)
        row[f"{part}_worst"] = max(ratios)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--job", type=Path, default=Path("jobs/private.toml"))
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--epsilons", default="1,2,4,8,inf")
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--plain-lr", type=float, default=20.0)
    args = parser.parse_args()
    settings = {"job": str(args.job), "plain_lr": args.plain_lr}
    print(json.dumps(machine.facts("privacy_utility", **settings)), flush=True)
    rate = f"training.optimizer.lr={args.plain_lr}"
    for text in args.epsilons.split(",") if args.runs else ():
        row = utility(args.job, float(text), args.runs, (*WITHOUT_NOISE, rate))
        print(json.dumps(row), flush=True)
        print(
            f"epsilon {row['epsilon']:<4} accuracy {row['mean']:.1%} "
            f"({row['low']:.1%} to {row['high']:.1%}, {args.runs} runs)",
            file=sys.stderr,
        )
    if args.repetitions:
        row = cost(args.job, (*WITHOUT_PROTECTION, rate), args.repetitions)
        print(json.dumps({"cost": row}), flush=True)
        for part in PARTS:
            print(
                f"{part:8} {row[f'{part}_private']:.3f} s private, "
                f"{row[f'{part}_plain']:.3f} s plain, {row[f'{part}_ratio']:.2f}x "
                f"(worst turn {row[f'{part}_worst']:.2f}x)",
                file=sys.stderr,
            )


if __name__ == "__main__":
    main()
