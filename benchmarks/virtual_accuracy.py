"""How close virtual time comes to a federation that runs: the same job both ways.

    python benchmarks/virtual_accuracy.py [--only static capacity ...] [--rounds 6]
        [--step-seconds 0.8] [--smoke]

Four sites on this machine, six for `groups`, each a process in a network of its own,
behind a line of a stated width and delay. Sites share its cores, so their speed is not
that of a processor: each step lasts as long as stated, by waiting, unless its work
alone takes longer. The same job runs in virtual time with these speeds and lines, and
with nothing measured (`stated`). Since looking for messages and handling them take time
as well, `beside` states the seconds that a short run of rounds of four steps took
longer than its own virtual ones (`simulation.combine_seconds`). Compared are the
seconds of all rounds after the first, in which programs begin.

With --smoke nothing is brought up: the jobs run in virtual time alone.

JSON lines on stdout, the machine first; a table on stderr.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import machine
import tomli_w

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support import network, programs
from support.deployment import deployed
from support.line import Line

from deploy.wiring.simulation import simulate
from federation.events import Event, RoundFinished, RunStarted
from federation.job import code_files, job_file
from federation.job.spec import JobSpec
from monitoring.runs.run_folder import RunFolder

Row = dict[str, Any]

CROSSFED = (sys.executable, "-m", "crossfed")
SITES = ("a", "b", "c", "d", "e", "f")
SPEEDS = (1, 1, 2, 4, 1, 4)
MBITS = (20.0, 50.0, 50.0, 100.0, 20.0, 100.0)
DELAYS = (0.04, 0.02, 0.01, 0.005, 0.04, 0.005)
_FEW = 4  # Of them in all ways but one.
GROUPS = "groups"
STEPS, BATCH, HIDDEN = 24, 8, 3_000
# Its step ends when its time is over, also if work took part of it.
MODEL = """
import os
import time

import torch
from torch import nn


class Paced(nn.Linear):
    due = 0.0

    def train(self, mode=True):
        self.due = 0.0
        return super().train(mode)

    def forward(self, inputs):
        if self.training and torch.is_grad_enabled():
            seconds, now = float(os.environ.get("STEP_SECONDS", "0")), time.monotonic()
            begin = max(now - seconds, self.due) if self.due else now
            self.due = begin + seconds
            time.sleep(max(0.0, self.due - now))
        return super().forward(inputs.flatten(1))


def paced(hidden):
    return nn.Sequential(Paced(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))
"""
POLICY = {
    "privacy": "none",
    "secure_aggregation": False,
    "min_group": 1,
    "max_clip_norm": 100.0,
    "functions": ["./model.py:paced", "clients.data:*"],
}
_SECURE: Mapping[str, Any] = {
    "privacy": {"secure_aggregation": {"enabled": True, "threshold": 3}}
}
WAYS: Mapping[str, Mapping[str, Any]] = {
    "static": {},
    "capacity": {"schedule": {"allocation": "capacity"}},
    "grace": {"schedule": {"minimum_sites": 3, "grace": 0.25}},
    "buffered": {"schedule": {"mode": "buffered", "buffer_size": 2}},
    "8 bits": {
        "communication": {
            "codec": {"name": "int8"},
            "down_codec": {"name": "int8"},
            "down_content": "change",
        }
    },
    "secure": _SECURE,
    GROUPS: {
        "privacy": {"secure_aggregation": {"enabled": True}},
        "schedule": {"mode": "buffered", "groups": [["a", "b", "e"], ["c", "d", "f"]]},
    },
}


def job_of(way: str, rounds: int, step_seconds: float) -> JobSpec:
    """The job of a way, with the speeds and lines that the sites will have."""
    names = SITES if way == GROUPS else SITES[:_FEW]
    machines = [
        {
            "site": site,
            "examples_per_second": BATCH * speed / step_seconds,
            "down_mbit": mbit,
            "up_mbit": mbit,
            "latency_seconds": delay,
        }
        for site, speed, mbit, delay in zip(names, SPEEDS, MBITS, DELAYS, strict=False)
    ]
    return job_file.parse(
        {
            "name": way.replace(" ", "-"),
            "seed": 7,
            "rounds": rounds * 2 if way in {"buffered", GROUPS} else rounds,
            "model": {"factory": "./model.py:paced", "options": {"hidden": HIDDEN}},
            "data": {"source": "clients.data:digits"},
            "training": {
                "local_steps": STEPS,
                "batch_size": BATCH,
                "optimizer": {"name": "sgd", "lr": 0.1},
            },
            "evaluation": {"every": 0},
            "aggregation": {"weights": "uniform"},
            "sites": [{"name": site} for site in names],
            "simulation": {"machines": machines},
            **WAYS[way],
        }
    )


def ends_of(events: Sequence[Event]) -> list[float]:
    """The start of the run, and the end of each round."""
    begin = next(event.at for event in events if isinstance(event, RunStarted))
    return [begin, *(e.at for e in events if isinstance(e, RoundFinished))]


def virtual(job: JobSpec) -> list[float]:
    """Seconds of each round in virtual time."""
    events: list[Event] = []
    simulate(job, engine="virtual", listeners=[events.append], report=False)
    return lengths(ends_of(events))


def lengths(ends: Sequence[float]) -> list[float]:
    """Seconds between ends."""
    return [after - before for before, after in itertools.pairwise(ends)]


def real(folder: Path, job: JobSpec) -> list[float]:
    """Seconds of each round on the federation in a folder."""
    path = folder / f"{job.name}.toml"
    path.write_text(tomli_w.dumps(job_file.document(job)))
    words = ["run", str(path), "--json"]
    words += ["--aggregator", str(folder / "aggregator" / "aggregator.toml")]
    done = subprocess.run(
        [*CROSSFED, *words], capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(words)}: {done.stdout} {done.stderr}")
    run_id = json.loads(done.stdout)["run_id"]
    run = RunFolder(folder / "aggregator" / "runs" / job.name / run_id)
    return lengths(ends_of(run.read_events()))


def compared(way: str, job: JobSpec, took: Sequence[float], beside: float) -> Row:
    """A row: rounds after the first."""
    stated = virtual(job)
    simulation = replace(job.simulation, combine_seconds=beside)
    with_beside = virtual(replace(job, simulation=simulation))
    later = [sum(each[1:]) for each in (stated, took, with_beside)]
    return {
        "way": way,
        "load": round(os.getloadavg()[0], 1),
        "round": round(statistics.mean(took[1:]), 2),
        "stated": round(later[0] / later[1] - 1, 3),
        "with_beside": round(later[2] / later[1] - 1, 3),
        "rounds": [[round(each, 3) for each in both] for both in (stated, took)],
    }


def beside_of(folder: Path, step_seconds: float) -> float:
    """Seconds of a round that neither its work nor its lines explain."""
    job = job_of("static", 6, step_seconds)
    few = replace(job, name="few", training=replace(job.training, local_steps=4))
    took, stated = real(folder, few), virtual(few)
    return statistics.median(took[1:]) - statistics.median(stated[1:])


def measures(args: argparse.Namespace) -> Iterator[Row]:
    """A row for each way."""
    jobs = {way: job_of(way, args.rounds, args.step_seconds) for way in args.only}
    why = "" if args.smoke else network.refusal() or programs.missing("nginx")
    if why:
        print(f"nothing is deployed: {why}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.chdir(folder)
        code_files.look_in(folder)  # Whatever folders the caller's environment names.
        (folder / "model.py").write_text(MODEL)
        if args.smoke or why:
            for way, job in jobs.items():
                predicted = virtual(job)
                yield {"way": way, "rounds": [predicted]}
            return
        with network.network(SITES, distant=SITES) as hosts:
            for site, mbit, delay in zip(SITES, MBITS, DELAYS, strict=True):
                line = Line(delay_seconds=delay, bits_per_second=mbit * 1e6)
                hosts.shape(site, line)
            with deployed(
                folder,
                tomli_w.dumps(POLICY),
                host=hosts.address,
                namespaces=hosts.namespaces,
                environment={code_files.FOLDERS: name, "OMP_NUM_THREADS": "1"},
                sites=SITES,
                forked=False,
                started=False,
            ) as made:
                for place in ("aggregator", *SITES):
                    (folder / place / "model.py").write_text(MODEL)
                for site, speed in zip(SITES, SPEEDS, strict=True):
                    made.start_site(site, STEP_SECONDS=str(args.step_seconds / speed))
                beside = beside_of(folder, args.step_seconds)
                yield {"beside_seconds": round(beside, 3)}
                for way, job in jobs.items():
                    yield compared(way, job, real(folder, job), beside)
        os.chdir("/")


def main() -> None:
    """Compare, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=[*WAYS], default=[*WAYS][:2])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--step-seconds", type=float, default=0.8)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    print(json.dumps(machine.facts("virtual_accuracy", rounds=args.rounds)), flush=True)
    for row in measures(args):
        print(json.dumps(row), flush=True)
        shown = {k: v for k, v in row.items() if k != "rounds"}
        print("  ".join(f"{k} {v}" for k, v in shown.items()), file=sys.stderr)


if __name__ == "__main__":
    main()
