"""Buffers: momentum of the server, and secure sums of groups at their own pace.

As ``unequal_sites/study.py``: virtual time, a linear model on digits, equal work in all
rows of a table::

    python studies/buffers.py              # both tables, 5 seeds
    python studies/buffers.py --seeds 1 --rounds 6     # a quick look

The first has the loss of buffers of one update at four sites, with plain steps of the
server, with Nesterov momentum at every buffer, and with its delayed form. The second
has six sites in two groups, three of them four times as fast.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from statistics import median
from typing import Any
from unittest import mock

import virtual_runs
from unequal_sites.study import ALIKE, BATCH, STEPS, UNLIKE, Case, job_of

from deploy.wiring.simulation import simulate
from federation.events import Event, ModelEvaluated, RunFinished, SiteAnswered
from federation.job import job_file
from federation.job.spec import JobSpec

SPEEDS = (1, 1, 2, 4)
BASE = 400.0  # Examples per second of the slowest site.
BUFFER: dict[str, Any] = {"mode": "buffered", "buffer_size": 1}
NESTEROV: dict[str, Any] = {"name": "nesterov", "momentum": 0.9}
SITES = [f"site-{i}" for i in range(6)]
GROUPED: Mapping[str, Mapping[str, Any]] = {
    "static": {},
    "capacity": {"allocation": "capacity"},
    "buffered, groups by speed": {
        "mode": "buffered",
        "groups": [SITES[:3], SITES[3:]],
        "max_staleness": 20,
    },
    "buffered, mixed groups": {
        "mode": "buffered",
        "groups": [SITES[::2], SITES[1::2]],
        "max_staleness": 20,
    },
}


def changed(job: JobSpec, *, rounds: int, **tables: Mapping[str, Any]) -> JobSpec:
    """Return a job with other rounds, and some keys of its tables replaced."""
    document = job_file.document(job) | {"rounds": rounds}
    for name, keys in tables.items():
        document[name] = document[name] | keys
    return job_file.parse(document)


def momentum_rows(rounds: int, seeds: int) -> Iterator[str]:
    """Yield the lines of the first table."""
    yield "| Data | Rates of sites, server | Rounds | SGD | at every buffer | delayed |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for data, alpha in (("alike", ALIKE), ("unlike", UNLIKE)):
        for local, server in ((0.02, 0.7), (0.2, 0.7), (0.2, 2.0), (0.2, 4.0)):
            about: dict[str, Any] = {
                "alpha": alpha,
                "rates": (local, server),
                "rounds": rounds,
            }
            of_buffers = partial(loss, BUFFER, NESTEROV, **about)
            whole = spread(partial(loss, {}, NESTEROV, **about), seeds)
            plain = spread(partial(loss, BUFFER, {"name": "average"}, **about), seeds)
            delayed = spread(of_buffers, seeds)
            with mock.patch.object(JobSpec, "models_per_round", 1):
                naive = spread(of_buffers, seeds)
            yield (
                f"| {data} | {local:g}, {server:g} | {whole} | {plain} | {naive} "
                f"| {delayed} |"
            )


def loss(
    schedule: dict[str, Any],
    step: dict[str, Any],
    seed: int,
    *,
    alpha: float,
    rates: tuple[float, float],
    rounds: int,
) -> float:
    """Run one job of four sites; the loss of its last model."""
    case = Case(SPEEDS, alpha)
    job = changed(
        job_of("static", case, rounds=rounds, seed=seed, base=BASE),
        rounds=rounds * len(SPEEDS) // schedule.get("buffer_size", len(SPEEDS)),
        schedule=schedule,
        training={"optimizer": {"name": "sgd", "lr": rates[0]}},
        aggregation={"server_optimizer": step | {"lr": rates[1]}},
    )
    return virtual_runs.run(job).loss


def spread(of_seed: Callable[[int], float], seeds: int) -> str:
    """Median and range over seeds."""
    found = sorted(map(of_seed, range(seeds)))
    return f"{median(found):.3f} ({found[0]:.3f} to {found[-1]:.3f})"


def grouped_rows(rounds: int, seeds: int) -> Iterator[str]:
    """Yield the lines of the second table."""
    yield "| Schedule | Time, of static | Training | Loss |"
    yield "| --- | --- | --- | --- |"
    static = 0.0
    for way, schedule in GROUPED.items():
        found = [grouped(schedule, rounds, seed) for seed in range(seeds)]
        seconds, busy, losses = (list(each) for each in zip(*found, strict=True))
        static = static or median(seconds)
        losses.sort()
        yield (
            f"| {way} | {median(seconds) / static:.2f} | {median(busy):.0%} "
            f"| {median(losses):.3f} ({losses[0]:.3f} to {losses[-1]:.3f}) |"
        )


def grouped(
    schedule: Mapping[str, Any], rounds: int, seed: int
) -> tuple[float, float, float]:
    """Run one job of secure sums: its seconds, the share of training, the loss."""
    speeds = (1, 1, 1, 4, 4, 4)
    case = Case(speeds, ALIKE)
    job = changed(
        job_of("static", case, rounds=rounds, seed=seed, base=BASE),
        rounds=rounds * (2 if "groups" in schedule else 1),
        schedule=schedule,
        privacy={"secure_aggregation": {"enabled": True}},
    )
    events: list[Event] = []
    simulate(job, engine="virtual", listeners=[events.append], report=False)
    (end,) = (event for event in events if isinstance(event, RunFinished))
    last = [event for event in events if isinstance(event, ModelEvaluated)][-1]
    counts = Counter(e.site for e in events if isinstance(e, SiteAnswered))
    work = {
        site: counts[site] * STEPS * BATCH / (BASE * speed)
        for site, speed in zip(SITES, speeds, strict=True)
    }
    if "allocation" in schedule:
        # Steps are not shown: all are taken, by sites that end together.
        total = rounds * len(SITES) * STEPS * BATCH
        work = {"all": total / (BASE * sum(speeds)) * len(SITES)}
    busy = sum(work.values()) / end.seconds / len(SITES)
    return end.seconds, busy, last.pooled.loss_sum / last.pooled.count


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    for rows in (momentum_rows, grouped_rows):
        for line in rows(options.rounds, options.seeds):
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
        sys.stdout.write("\n")


if __name__ == "__main__":
    main()
