"""What the engine costs: a round's time less what the sites spend on training.

    python benchmarks/overhead.py [--job jobs/text-gpt.toml] [--rounds 2] [--set K=V]

Sites work one after another, so that their times add up to the round's but for the
engine: asking, checking answers, combining, the server's step, the checkpoint on
disk, events. Site time is what each site measures around training and evaluation.
Also the start: from the call of `crossfed simulate` to the first round, and how much
of that is the import of torch, measured in the same run.

JSON lines on stdout, the machine first; a table on stderr.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import machine

from deploy.wiring.simulation import simulate
from federation.events import CheckpointSaved, Event, RoundFinished, SiteAnswered
from federation.job import job_file


def rounds(
    job_path: Path, num_rounds: int, settings: Sequence[str]
) -> list[dict[str, float]]:
    """Split each round's time into the sites' and the engine's."""
    found: list[dict[str, float]] = []
    at_sites = 0.0

    def listen(event: Event) -> None:
        nonlocal at_sites
        if isinstance(event, SiteAnswered):
            at_sites += sum(phase.seconds for phase in event.phases)
        if isinstance(event, RoundFinished):
            phases = {f"{p.name}_seconds": p.seconds for p in event.phases}
            found.append(
                {"round": event.round_index, "seconds": event.seconds} | phases
            )
        if isinstance(event, CheckpointSaved) and found:
            row = found[-1]
            row["checkpoint_seconds"] = event.seconds
            row["seconds"] += event.seconds
            row["engine_seconds"] = row["seconds"] - at_sites
            row["engine_share"] = row["engine_seconds"] / row["seconds"]
            at_sites = 0.0

    alone = (f"rounds={num_rounds}", "simulation.workers=1")
    job = job_file.load(job_path, [*alone, *settings])
    with tempfile.TemporaryDirectory() as folder:
        simulate(job, folder=Path(folder) / "run", listeners=[listen])
    return found


def start_seconds(job_path: Path) -> dict[str, float]:
    """Time from the call of the command to its first round."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    torch = time.perf_counter() - begin
    command = [
        *(str(Path(sys.executable).with_name("crossfed")), "simulate", str(job_path)),
        *("--set", "storage.url=memory://", "--set", "rounds=1"),
    ]
    begin = time.perf_counter()
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stderr is not None
        process.stderr.readline()
        first = time.perf_counter() - begin
        process.kill()
    return {"torch_import": torch, "to_first_round": first, "beyond": first - torch}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--job", type=Path, default=Path("jobs/text-gpt.toml"))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    settings = {"job": str(args.job), "rounds": args.rounds, "set": args.set}
    print(json.dumps(machine.facts("overhead", **settings)), flush=True)
    start = start_seconds(Path("jobs/quickstart.toml"))
    print(json.dumps({"start": start}))
    print(
        f"start: {start['to_first_round']:.2f} s to the first round, of which torch "
        f"takes {start['torch_import']:.2f} s",
        file=sys.stderr,
    )
    for row in rounds(args.job, args.rounds, args.set):
        print(json.dumps(row))
        print(
            f"round {row['round']:.0f}: {row['seconds']:.2f} s, engine "
            f"{1e3 * row['engine_seconds']:.0f} ms = {row['engine_share']:.2%}",
            file=sys.stderr,
        )


if __name__ == "__main__":
    main()
