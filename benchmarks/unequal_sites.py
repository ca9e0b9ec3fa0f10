"""What sites of different speed do with their time, in a federation that runs.

    python benchmarks/unequal_sites.py [--only buffered frozen ...] [--smoke]

An aggregator behind nginx, and agents whose steps last as long as stated, by waiting.

- ``buffered``: four sites of 1 : 1 : 2 : 4, a model for every update: the share of its
  time that each site trains, from its first answer to its last.
- ``frozen``: the same, while the first of them is stopped for a minute: the share of
  that minute that the others train.
- ``groups``: secure sums of two groups, three sites four times as fast as four others.
- ``goodput``: work by capacity, a quorum and `grace`, and a site that fails in a fifth
  of its rounds: of the steps that sites could take while they did not fail, the share
  that counted.
- ``runs``: two runs at once, in the time of both one after the other; then two owners
  of weights 2 and 1 who take turns: Jain's index of rounds divided by weights.
- ``many``: seconds that a round of 20 sites takes beside its steps.

With --smoke each part is as short as it can be, and its figures say nothing.

JSON lines on stdout, the machine first; a table on stderr.
"""

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import machine
import tomli_w

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.deployment import (
    Deployment,
    crossfed_here,
    deployed,
    descendants,
    wait_for,
)

from federation.job import code_files

Row = dict[str, Any]
Speeds = Mapping[str, float]

STEPS = 24
FOUR: Speeds = {"a": 1, "b": 1, "c": 2, "d": 4}
GROUPS = (("a", "b", "c"), ("d", "e", "f", "g"))
GROUPED: Speeds = {site: 4 - 3 * index for index in (0, 1) for site in GROUPS[index]}
FAILING, FAIL_RATE = "c", 0.009  # A step; a fifth of the rounds of 24.
WEIGHTS = {"ann": 2, "bob": 1}
MODEL = """
import os
import random
import time

import torch
from torch import nn

PACE, FAILS = (float(os.environ.get(name, "0")) for name in ("PACE", "FAILS"))
DRAW = random.Random(5)


class Paced(nn.Linear):
    def forward(self, inputs):
        if self.training and torch.is_grad_enabled() and PACE:
            time.sleep(PACE)
            if DRAW.random() < FAILS:
                raise RuntimeError("rehearsed failure")
        return super().forward(inputs.flatten(1))


def net():
    return Paced(64, 10)
"""
POLICY: Mapping[str, Any] = {
    "privacy": "none",
    "secure_aggregation": False,
    "accept_two_sites": True,
    "functions": ["./model.py:net", "clients.data:*"],
}
SECURE_POLICY = {
    **POLICY,
    "secure_aggregation": True,
    "min_sites": 3,
    "min_group": 3,
    "accept_dropouts": True,
}


@contextmanager
def federation(
    speeds: Speeds,
    pace: float,
    *,
    policy: Mapping[str, Any] = POLICY,
    queue: str = "",
    fails: Mapping[str, float] | None = None,
) -> Iterator[Deployment]:
    """Have an aggregator and its sites; a step of speed 1 lasts ``pace`` seconds."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "federation"
        folder.mkdir(mode=0o700)
        (folder / "model.py").write_text(MODEL)
        with deployed(
            folder,
            tomli_w.dumps(policy),
            environment={code_files.FOLDERS: str(folder), "OMP_NUM_THREADS": "1"},
            sites=[*speeds],
            started=False,
        ) as made:
            (folder / "aggregator" / "model.py").write_text(MODEL)
            if queue:
                config = Path(made.config)
                config.write_text(f"{config.read_text()}\n[queue]\n{queue}")
                made.end("aggregator")
                made.start_aggregator()
            for site, speed in speeds.items():
                (folder / site / "model.py").write_text(MODEL)
                failing = str((fails or {}).get(site, 0))
                config = folder / site / "site.toml"
                config.write_text(f"max_runs = 2\n{config.read_text()}")
                made.start_site(site, PACE=str(pace / speed), FAILS=failing)
            yield made


def write(made: Deployment, name: str, sites: Sequence[str], **tables: Any) -> Path:
    """Write a job of these sites."""
    path = made.folder / f"{name}.toml"
    job = {
        "name": name,
        "model": {"factory": "./model.py:net"},
        "data": {"source": "clients.data:digits"},
        "training": {
            "local_steps": STEPS,
            "batch_size": 8,
            "optimizer": {"lr": 0.05},
        },
        "aggregation": {"weights": "uniform"},
        "evaluation": {"every": 0},
        "sites": [{"name": site} for site in sites],
        **tables,
    }
    path.write_text(tomli_w.dumps(job))
    return path


def finished(made: Deployment, path: Path) -> None:
    """Run a job to its end."""
    out, err = made.run(path).communicate()
    if json.loads(out or "{}").get("status") != "completed":
        sys.exit(f"{path.stem} did not complete: {err}")


def shares(answers: Sequence[Row], speeds: Speeds, pace: float) -> dict[str, float]:
    """The share of time that each site trained, from its first answer to its last."""
    found = {}
    for site, speed in speeds.items():
        times = [event["at"] for event in answers if event["site"] == site]
        if len(times) > 1:
            worked = (len(times) - 1) * STEPS * pace / speed
            found[site] = round(worked / (times[-1] - times[0]), 3)
    return found


def buffered(pace: float, rounds: int) -> Row:
    schedule = {"mode": "buffered", "buffer_size": 1, "max_staleness": 50}
    with federation(FOUR, pace) as made:
        path = write(made, "buffered", [*FOUR], rounds=8 * rounds, schedule=schedule)
        finished(made, path)
        return {"training": shares(made.events("SiteAnswered"), FOUR, pace)}


def frozen(pace: float, rounds: int) -> Row:
    schedule = {"mode": "buffered", "buffer_size": 1, "max_staleness": 500}
    first, seconds = next(iter(FOUR)), 60.0 if rounds > 1 else 3.0
    others = {site: speed for site, speed in FOUR.items() if site != first}
    with federation(FOUR, pace) as made:
        path = write(made, "frozen", [*FOUR], rounds=10_000, schedule=schedule)
        made.run(path)
        wait_for(lambda: made.rounds() >= len(FOUR), "models are made")
        agent = made.processes[first].pid
        family = [agent, *descendants(agent)]
        for pid in family:
            os.kill(pid, signal.SIGSTOP)
        began = time.time()
        time.sleep(seconds)
        ended = time.time()
        for pid in family:
            os.kill(pid, signal.SIGCONT)
        during = [e for e in made.events("SiteAnswered") if began <= e["at"] <= ended]
    return {"training": shares(during, others, pace), "stopped_seconds": seconds}


def groups(pace: float, rounds: int) -> Row:
    schedule = {"mode": "buffered", "groups": [*map(list, GROUPS)], "max_staleness": 50}
    privacy = {"secure_aggregation": {"enabled": True}}
    with federation(GROUPED, pace, policy=SECURE_POLICY) as made:
        path = write(
            made,
            "groups",
            [*GROUPED],
            rounds=5 * rounds,
            schedule=schedule,
            privacy=privacy,
        )
        finished(made, path)
        return {"training": shares(made.events("SiteAnswered"), GROUPED, pace)}


def goodput(pace: float, rounds: int) -> Row:
    schedule = {"allocation": "capacity", "minimum_sites": 3, "grace": 0.25}
    with federation(FOUR, pace, fails={FAILING: FAIL_RATE}) as made:
        path = write(made, "goodput", [*FOUR], rounds=2 * rounds, schedule=schedule)
        finished(made, path)
        possible, failed, total = 0.0, 0, sum(FOUR.values())
        for event in made.events("RoundFinished"):
            is_missing = FAILING not in event["answered"]
            failed += is_missing
            working = total - FOUR[FAILING] * is_missing
            possible += event["seconds"] * working / pace
        counted = sum(event["num_steps"] for event in made.events("SiteAnswered"))
    return {"goodput": round(counted / possible, 3), "rounds_failed": failed}


def runs(pace: float, rounds: int) -> Row:
    return {**_at_once(pace, rounds), **_in_turns(pace, rounds)}


def _ends(folder: Path) -> list[float]:
    """When the rounds of a run ended."""
    path = folder / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    events = [json.loads(line) for line in lines if '"RoundFinished"' in line]
    return [event["at"] for event in events]


def _submit(made: Deployment, path: Path, *words: str) -> Path:
    command = ["run", str(path), "--aggregator", made.config, "--detach", "--json"]
    return Path(json.loads(crossfed_here(*command, *words).stdout)["folder"])


def _await(*folders: Path) -> None:
    for folder in folders:
        wait_for((folder / "outcome.json").exists, f"the end of {folder.name}", 1200)


def _at_once(pace: float, rounds: int) -> Row:
    """Two runs of sites of 1 : 4 and 4 : 1, which leave half of the time to others."""
    speeds = {"a": 1.0, "b": 4.0}
    with federation(speeds, pace, queue="max_runs = 2\n") as made:
        paths = [write(made, f"run{n}", [*speeds], rounds=rounds) for n in (1, 2, 3, 4)]
        took = []
        for together in ((paths[0],), (paths[1],), paths[2:]):
            began = time.monotonic()
            _await(*[_submit(made, path) for path in together])
            took.append(time.monotonic() - began)
    one, two, both = took
    return {"at_once": round(both / (one + two), 3)}


def _in_turns(pace: float, rounds: int) -> Row:
    """Rounds that each owner had when the first of their runs ended."""
    queue = f"max_runs = 1\nslice_seconds = {2 * STEPS * pace}\n"
    with federation({"a": 1.0, "b": 1.0}, pace, queue=queue) as made:
        at = ["--config", made.config]
        folders = {}
        for owner, weight in WEIGHTS.items():
            words = ["aggregator", "owners", "add", owner, "--weight", str(weight)]
            crossfed_here(*words, *at)
            path = write(made, owner, ["a", "b"], rounds=6 * rounds)
            folders[owner] = _submit(made, path, "--owner", owner)
        _await(*folders.values())
        ends = {owner: _ends(folder) for owner, folder in folders.items()}
    first = min(times[-1] for times in ends.values())
    had = Counter({o: sum(t <= first for t in times) for o, times in ends.items()})
    each = [had[owner] / weight for owner, weight in WEIGHTS.items()]
    jain = sum(each) ** 2 / (len(each) * sum(value**2 for value in each))
    return {"rounds_by_owner": dict(had), "jain": round(jain, 3)}


def many(pace: float, rounds: int) -> Row:
    names = [f"s{index:02}" for index in range(20 if rounds > 1 else 3)]
    training = {"local_steps": 1, "batch_size": 8, "optimizer": {"lr": 0.05}}
    # One long step: the work of many would take this host's cores.
    with federation(dict.fromkeys(names, 1 / STEPS), pace) as made:
        path = write(made, "many", names, rounds=3 * rounds, training=training)
        finished(made, path)
        seconds = [event["seconds"] for event in made.events("RoundFinished")][1:]
    beside = statistics.median(seconds or [0.0]) - STEPS * pace
    return {"sites": len(names), "beside_seconds": round(beside, 2)}


PARTS: Mapping[str, Callable[[float, int], Row]] = {
    part.__name__: part for part in (buffered, frozen, groups, goodput, runs, many)
}


def main() -> None:
    """Measure each part."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=[*PARTS], default=[*PARTS])
    parser.add_argument("--step-seconds", type=float, default=0.2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    pace, rounds = (0.01, 1) if args.smoke else (args.step_seconds, args.rounds)
    print(json.dumps(machine.facts("unequal_sites", step_seconds=pace, rounds=rounds)))
    for name in args.only:
        row = {"part": name, "load": round(os.getloadavg()[0], 1)}
        row |= PARTS[name](pace, rounds)
        print(json.dumps(row), flush=True)
        print("  ".join(f"{k} {v}" for k, v in row.items()), file=sys.stderr)


if __name__ == "__main__":
    main()
