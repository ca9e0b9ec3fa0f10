"""How close `crossfed plan` comes: five jobs, predicted and then run on this machine.

    python benchmarks/plan_accuracy.py [--only secure large] [--repeats 1]
        [--rounds 8] [--calibration 4] [--rate-mbit 20] [--smoke]

A local federation of four sites is brought up once, each in a network of its own if
this user may make some. Then, for each job in turn: a short run of it, from which
`plan --like` takes speeds, and the run itself. Printed are
seconds and payload bytes, predicted and actual, the bytes that the sites' interfaces
counted, and dollars, which are also computed here from prices and measured units.

With `--only ways` the sites' lines are made narrow, and six ways of running one job are
ranked, by prediction and by measurement. The default is two of the five jobs; `--only
plain secure record large many ways` is all there is.

With --smoke nothing is brought up: one job is predicted and simulated.

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
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import machine
import tomli_w

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support import network
from support.deployment import deployed

from deploy.aggregator_host import run_queue
from deploy.cli import job_check
from deploy.fleet import forecast, spec
from deploy.fleet.plan import changed
from deploy.fleet.spec import DeploymentPlan
from deploy.wiring.simulation import simulate
from federation.clock import SystemClock
from federation.events import Event
from federation.job import code_files, job_file
from federation.job.spec import JobSpec
from federation.rounds import cost
from federation.rounds.cost import Speeds
from monitoring.runs.run_folder import RunFolder
from monitoring.views import run_plan
from monitoring.views.run_fold import fold
from monitoring.views.run_view import RunView

Row = dict[str, Any]

SITES = ("a", "b", "c", "d")
PER_HOUR, PER_GIGABYTE = 36.0, 90.0
CROSSFED = (sys.executable, "-m", "crossfed")  # The package is installed.
CLOCK = SystemClock()
SIZES = partial(job_check.sizes_of, clock=CLOCK)
MODEL = """
from torch import nn


def wide():
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(),
        nn.Linear(512, 10),
    )
"""
POLICY = {
    "privacy": "none",
    "secure_aggregation": False,
    "min_group": 1,
    "max_epsilon": 1000.0,
    "total_epsilon": 1e6,
    "functions": ["./model.py:wide", "clients.models:*", "clients.data:*"],
}
RECORD = {
    "unit": "record",
    "target_epsilon": 8.0,
    "clip_norm": 0.5,
}
SECURE = {"enabled": True, "clip_norm": 4.0, "max_examples": 1500}


def job_of(name: str, rounds: int, num_sites: int, **tables: Any) -> JobSpec:
    """A job on handwritten digits."""
    document = {
        "name": name,
        "seed": 7,
        "rounds": rounds,
        "model": {"factory": "clients.models:digits_cnn"},
        "data": {"source": "clients.data:digits"},
        "training": {
            "local_steps": 20,
            "batch_size": 32,
            "optimizer": {"name": "adamw", "lr": 2e-3},
        },
        "sites": [{"name": site} for site in SITES[:num_sites]],
        **tables,
    }
    return job_file.parse(document)


def jobs(rounds: int) -> Iterator[JobSpec]:
    """The five."""
    yield job_of("plain", rounds, 2)
    yield job_of("secure", rounds, 3, privacy={"secure_aggregation": SECURE})
    yield job_of(
        "record",
        rounds,
        2,
        privacy={"differential_privacy": RECORD},
        aggregation={"weights": "uniform"},
        training={
            "local_steps": 4,
            "batch_size": 64,
            "optimizer": {"name": "sgd", "lr": 0.5},
        },
        evaluation={"every": 0},
    )
    yield job_of("large", rounds, 2, model={"factory": "./model.py:wide"})
    yield job_of("many", rounds, 4)


# Six ways of running one job, by the keys that they change.
WAYS: Mapping[str, Mapping[str, Any]] = {
    "as it is": {},
    "updates in bf16": {"communication.codec.name": "bf16"},
    "16 bits both ways": {
        "communication.codec.name": "bf16",
        "communication.down_codec.name": "bf16",
    },
    "half the rounds": {"rounds": 3, "training.local_steps": 40},
    "half the rounds, 16 bits": {
        "rounds": 3,
        "training.local_steps": 40,
        "communication.codec.name": "bf16",
        "communication.down_codec.name": "bf16",
    },
    "twice the steps": {"training.local_steps": 40},
}


@dataclass(kw_only=True)
class Local:
    """A deployment, which ``up`` brings up; its files are those of ``crossfed up``."""

    folder: Path
    stack: ExitStack = field(default_factory=ExitStack)
    rate_mbit: float = 0.0
    hosts: network.Network | None = None

    @property
    def aggregator(self) -> Path:
        """Its folder."""
        return self.folder / "aggregator"

    def file(self, job: JobSpec) -> Path:
        """Write the deployment file of a job with the sites that it has."""
        sites = [
            {
                "name": site.name,
                "dollars_per_hour": PER_HOUR,
                "dollars_per_gigabyte": PER_GIGABYTE,
                "policy": POLICY,
            }
            for site in job.sites
        ]
        (self.folder / "model.py").write_text(MODEL)
        job_path = self.folder / f"{job.name}.toml"
        job_path.write_text(tomli_w.dumps(job_file.document(job)))
        path = self.folder / f"{job.name}-{len(sites)}.fed.toml"
        table = {"name": "bench", "job": job_path.name, "folder": ".", "sites": sites}
        path.write_text(tomli_w.dumps(table))
        return path

    def plan(self, job: JobSpec) -> DeploymentPlan:
        """The same, read."""
        return spec.load(self.file(job))

    def call(self, *words: str) -> str:
        """Run a command of crossfed."""
        done = subprocess.run(
            [*CROSSFED, *words], capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(f"{' '.join(words)}: {done.stderr}")
        return done.stdout

    def up(self) -> None:
        """Start aggregator and sites, each in a network of its own if it may."""
        self.plan(job_of("start", 2, len(SITES)))  # It writes the model.
        host, namespaces = "127.0.0.1", {}
        if not network.refusal():
            self.hosts = self.stack.enter_context(network.network(SITES))
            host, namespaces = self.hosts.address, self.hosts.namespaces
        self.stack.enter_context(
            deployed(
                self.folder,
                tomli_w.dumps(POLICY),
                host=host,
                namespaces=namespaces,
                environment={code_files.FOLDERS: str(self.folder)},
                sites=SITES,
                forked=False,
            )
        )

    def narrow(self, rate_mbit: float) -> None:
        """Make the sites' lines narrow, where they have lines."""
        if self.hosts is not None:
            self.rate_mbit = rate_mbit
            for site in SITES:
                self.hosts.narrow(site, rate_mbit)

    def run(self, job: JobSpec, **settings: int) -> RunFolder:
        """Run a job to its end."""
        path = self.folder / f"{job.name}.toml"
        path.write_text(tomli_w.dumps(job_file.document(job)))
        words = ["run", str(path), "--json"]
        words += ["--aggregator", str(self.aggregator / "aggregator.toml")]
        for key, value in settings.items():
            words += ["--set", f"{key}={value}"]
        result = json.loads(self.call(*words))
        return RunFolder(self.aggregator / "runs" / job.name / result["run_id"])

    def interface_bytes(self, job: JobSpec) -> int | None:
        """What interfaces of a job's sites have counted; None without networks."""
        if self.hosts is None:
            return None
        return sum(self.hosts.num_bytes(site.name) for site in job.sites)

    def speeds(
        self, plan: DeploymentPlan, job: JobSpec, view: RunView, at: float | None = None
    ) -> Speeds:
        """Speeds as `plan --like` takes them, with lines as wide as they are."""
        traffic = SIZES(forecast.federation_of(plan, job))
        assert traffic is not None
        found = forecast.measured_speeds(view, traffic, submitted=at)
        if not self.rate_mbit:
            return found
        rate = self.rate_mbit * 125_000
        sites = [
            replace(each, down_bytes_per_second=rate, up_bytes_per_second=rate)
            for each in found.sites
        ]
        return forecast.measured_speeds(view, traffic, submitted=at, sites=sites)


def submitted(run: RunFolder) -> float:
    """When a run was submitted."""
    handed = run_queue.read(run)
    assert handed is not None
    return handed.request.at


def like(local: Local, plan: DeploymentPlan, run: RunFolder) -> Speeds:
    """Speeds that a run has shown."""
    return local.speeds(plan, run.read_spec(), run.view(), submitted(run))


def predicted(
    plan: DeploymentPlan, job: JobSpec, speeds: Speeds, at: float
) -> run_plan.RunPlan:
    """The prediction of a run that is submitted at a time."""
    found = forecast.forecast(
        plan, job, sizes_of=SIZES, speeds=speeds, clock=CLOCK, warn=print
    )
    kept = forecast.run_plan(found, submitted=at)
    assert kept is not None
    return kept


def compare(plan: run_plan.RunPlan, view: RunView) -> Row:
    """Totals of a prediction and of the run; dollars are computed here once more."""
    totals = {
        f"{row.unit} {row.what}": row
        for row in run_plan.rows(plan, view)
        if row.is_total
    }
    seconds, dollars = totals["seconds all"], totals["dollars all"]
    sites = len(view.started.sites)
    units = seconds.actual / 3600 * sites * PER_HOUR
    units += view.bytes_up / 1e9 * PER_GIGABYTE
    payload = [totals[f"bytes {way}, all"] for way in ("down", "up")]
    return {
        "seconds": [round(seconds.predicted[1], 2), round(seconds.actual, 2)],
        "seconds_error": round(seconds.error or 0.0, 3),
        "payload_bytes": [
            [int(sum(row.predicted[end] for row in payload)) for end in (0, 1)],
            int(sum(row.actual for row in payload)),
        ],
        "payload_exact": all(row.error == 0 for row in payload),
        "dollars": [round(dollars.predicted[1], 4), round(dollars.actual, 4)],
        "dollars_from_units": round(units, 4),
        "to_the_cent": abs(units - dollars.actual) < 0.005,
    }


def interleaved(
    local: Local, plan: DeploymentPlan, job: JobSpec, view: RunView
) -> list[float]:
    """Seconds of a run's even rounds, predicted from its odd ones, and as they were.

    Both see the same load, which short runs before and after do not.
    """
    traffic = SIZES(forecast.federation_of(plan, job))
    assert traffic is not None
    odd = replace(view, rounds=tuple(row for row in view.rounds if row.index % 2))
    speeds = local.speeds(plan, job, odd)
    even = [row for row in view.rounds if row.index % 2 == 0]
    expected = sum(cost.round_seconds(traffic, row.index, speeds) for row in even)
    actual = sum(row.length for row in even)
    return [round(expected, 2), round(actual, 2), round(expected / actual - 1, 3)]


def measure(local: Local, job: JobSpec, calibration: int) -> Row:
    """Run a job between two short runs of it, and predict it.

    The load of the machine changes: `plan --like` predicts from either short run, and
    the mean of both counts.
    """
    plan = local.plan(job)
    speeds = [like(local, plan, local.run(job, rounds=calibration))]
    before = local.interface_bytes(job)
    run = local.run(job)
    after = local.interface_bytes(job)
    speeds.append(like(local, plan, local.run(job, rounds=calibration)))
    view, at = run.view(), submitted(run)
    rows = [compare(predicted(plan, job, each, at), view) for each in speeds]
    actual = rows[0]["seconds"][1]
    by_like = statistics.mean(row["seconds"][0] for row in rows)
    found: Row = {
        "job": job.name,
        "rounds": job.rounds,
        "load": round(os.getloadavg()[0], 1),
        **rows[0],
        "seconds": [round(by_like, 2), actual],
        "seconds_error": round(by_like / actual - 1, 3),
        "dollars": [
            round(statistics.mean(row["dollars"][0] for row in rows), 4),
            rows[0]["dollars"][1],
        ],
        "of_each_short_run": [row["seconds"][0] for row in rows],
        "even_rounds_from_odd": interleaved(local, plan, job, view),
    }
    if before is not None and after is not None:
        expected = cost.on_interface(
            rows[0]["payload_bytes"][1], actual, len(job.sites)
        )
        found["interface_bytes"] = [round(expected), after - before]
        found["interface_error"] = round(expected / (after - before) - 1, 4)
    return found


def rank(local: Local, rounds: int) -> Iterator[Row]:
    """Rank ways of running a job, by prediction from one short run and by measuring."""
    job = replace(
        job_of("ways", 6, 2, model={"factory": "./model.py:wide"}), rounds=rounds
    )
    plan = local.plan(job)
    speeds = like(local, plan, local.run(job, rounds=3))
    found: dict[str, Row] = {}
    for name, changes in WAYS.items():
        way = changed(job, changes)
        run = local.run(way)
        found[name] = compare(predicted(plan, way, speeds, submitted(run)), run.view())
        yield {"way": name, "load": round(os.getloadavg()[0], 1), **found[name]}
    for unit in ("seconds", "dollars"):
        both = {name: row[unit] for name, row in found.items()}
        orders = [sorted(both, key=lambda name: both[name][side]) for side in (0, 1)]
        pairs = [
            (one[0] < other[0]) == (one[1] < other[1])
            for one, other in itertools.combinations(both.values(), 2)
        ]
        yield {
            "ranked_by": unit,
            "predicted": orders[0],
            "measured": orders[1],
            "pairs_in_order": f"{sum(pairs)} of {len(pairs)}",
        }


def smoke() -> Iterator[Row]:
    """Predict a simulation from a shorter one, with the same functions."""
    job = job_of("smoke", 3, 2)
    views = []
    for rounds in (2, 3):
        seen: list[Event] = []
        begin = CLOCK.now()
        simulate(replace(job, rounds=rounds), listeners=[seen.append])
        views.append((begin, fold(seen)))
    with tempfile.TemporaryDirectory() as folder:
        plan = Local(folder=Path(folder)).plan(job)
        traffic = SIZES(forecast.federation_of(plan, replace(job, rounds=2)))
        assert traffic is not None
        (began, short), (at, view) = views
        speeds = forecast.measured_speeds(short, traffic, submitted=began)
        yield {"job": "smoke", **compare(predicted(plan, job, speeds, at), view)}


def measures(args: argparse.Namespace) -> Iterator[Row]:
    """Everything that was asked for."""
    if args.smoke:
        yield from smoke()
        return
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        local = Local(folder=Path(name), stack=stack)
        stack.callback(os.chdir, "/")
        os.chdir(name)  # The model's file is found from there.
        local.up()
        for _ in range(args.repeats):
            for job in jobs(args.rounds):
                if job.name in args.only:
                    yield measure(local, job, args.calibration)
        if "ways" in args.only:
            local.narrow(args.rate_mbit)
            yield from rank(local, 6)


def main() -> None:
    """Measure, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only",
        nargs="+",
        choices=("plain", "secure", "record", "large", "many", "ways"),
        default=("secure", "large"),
    )
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--calibration", type=int, default=4)
    parser.add_argument("--rate-mbit", type=float, default=20.0)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    print(json.dumps(machine.facts("plan_accuracy", rounds=args.rounds)), flush=True)
    for row in measures(args):
        print(json.dumps(row), flush=True)
        shown = {k: v for k, v in row.items() if k != "payload_bytes"}
        print("  ".join(f"{k} {v}" for k, v in shown.items()), file=sys.stderr)


if __name__ == "__main__":
    main()
