"""Four sites of different speed: time and loss of five ways to schedule them.

In virtual time, with real training of a linear model on handwritten digits. Every way
takes the same number of local steps in all, so that final losses can be compared::

    python studies/unequal_sites/study.py             # the table of the page, 5 seeds
    python studies/unequal_sites/study.py --seeds 1 --rounds 6   # a quick look

Prints a table in Markdown: medians over seeds, and the range of final losses.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from deploy.wiring.simulation import simulate
from federation.events import Event, ModelEvaluated, RunFinished, SiteAnswered
from federation.job import job_file
from federation.job.spec import JobSpec

STEPS, BATCH, BASE = 24, 16, 400.0  # BASE: examples per second of the slowest site.
SPEEDS: Mapping[str, Sequence[float]] = {
    "1:1:1:1": (1, 1, 1, 1),
    "1:1:2:4": (1, 1, 2, 4),
    "1:2:4:8": (1, 2, 4, 8),
}
ALIKE, UNLIKE = 100.0, 0.3  # Of the Dirichlet distribution of classes over sites.
# A site is away for a fifth of the time, for two slow rounds on average.
AWAY = {"away_share": 0.2, "away_seconds": 2 * STEPS * BATCH / BASE}
WAYS: Mapping[str, Mapping[str, Any]] = {
    "static": {},
    "static, grace": {"schedule": {"minimum_sites": 3, "grace": 0.25}},
    "capacity": {"schedule": {"allocation": "capacity"}},
    "capacity, grace": {
        "schedule": {"allocation": "capacity", "minimum_sites": 3, "grace": 0.25}
    },
    "buffered, 2 updates": {"schedule": {"mode": "buffered", "buffer_size": 2}},
    "buffered, capacity": {
        "schedule": {"mode": "buffered", "buffer_size": 2, "allocation": "capacity"}
    },
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run led to.

    Attributes:
        seconds: Virtual time of the run.
        loss: Of the last model on all held-out data, in nats.
        steps: Local steps of updates that counted.
        busy: Share of the time that sites trained, on average.
    """

    seconds: float
    loss: float
    steps: int
    busy: float


@dataclass(frozen=True, slots=True)
class Case:
    """What a way is tried on.

    Attributes:
        speeds: Of the sites, relative to the slowest.
        alpha: How alike their data are.
        leaves: Whether one site comes and goes.
    """

    speeds: Sequence[float]
    alpha: float
    leaves: bool


def job_of(way: str, case: Case, *, rounds: int, seed: int) -> JobSpec:
    """Describe one run; ``rounds`` is for updates of all sites."""
    sites = [f"site-{index}" for index in range(len(case.speeds))]
    schedule = dict(WAYS[way].get("schedule", {}))
    size = schedule.get("buffer_size", len(sites))
    if case.leaves and size == len(sites):
        schedule["minimum_sites"] = len(sites) - 1
    machines = [
        {"site": site, "examples_per_second": BASE * speed}
        | (AWAY if case.leaves and site == sites[-2] else {})
        for site, speed in zip(sites, case.speeds, strict=True)
    ]
    return job_file.parse(
        {
            "name": "unequal-sites",
            "rounds": rounds * len(sites) // size,
            "seed": seed,
            "model": {
                "factory": "clients.models:logistic_regression",
                "options": {"inputs": 64, "classes": 10},
            },
            "data": {
                "source": "clients.data:digits",
                "partition": {"kind": "dirichlet", "alpha": case.alpha},
            },
            "training": {
                "local_steps": STEPS,
                "batch_size": BATCH,
                "optimizer": {"name": "sgd", "lr": 0.02},
            },
            "evaluation": {"every": 1000},  # The first and the last model only.
            "aggregation": {"weights": "uniform"},
            "schedule": schedule | {"max_lost_rounds": rounds},
            "sites": [{"name": site} for site in sites],
            "simulation": {"machines": machines},
        }
    )


def outcome(job: JobSpec) -> Outcome:
    """Run a job in virtual time."""
    events: list[Event] = []
    simulate(job, engine="virtual", listeners=[events.append], report=False)
    (end,) = (event for event in events if isinstance(event, RunFinished))
    last = [event for event in events if isinstance(event, ModelEvaluated)][-1]
    answers = [event for event in events if isinstance(event, SiteAnswered)]
    trained = sum(
        phase.seconds
        for answer in answers
        for phase in answer.phases
        if phase.name == "train"
    )
    return Outcome(
        seconds=end.seconds,
        loss=last.pooled.loss_sum / last.pooled.count,
        steps=sum(answer.num_steps or 0 for answer in answers),
        busy=trained / end.seconds / len(job.sites),
    )


def rows(cases: Mapping[str, Case], rounds: int, seeds: int) -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| Sites | Way | Time, of static | Of the bound | Training | Loss | Steps |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for name, case in cases.items():
        static = 0.0
        for way in WAYS:
            jobs = [
                job_of(way, case, rounds=rounds, seed=seed) for seed in range(seeds)
            ]
            found = [outcome(job) for job in jobs]
            seconds = median(one.seconds for one in found)
            static = static or seconds
            bounds = [one.steps * BATCH / (BASE * sum(case.speeds)) for one in found]
            losses = sorted(one.loss for one in found)
            yield (
                f"| {name} | {way} | {seconds / static:.2f} "
                f"| {seconds / median(bounds):.2f} "
                f"| {median(one.busy for one in found):.0%} "
                f"| {median(losses):.3f} ({losses[0]:.3f} to {losses[-1]:.3f}) "
                f"| {median(one.steps for one in found):.0f} |"
            )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    cases = {"1:1:1:1": Case(SPEEDS["1:1:1:1"], ALIKE, leaves=False)}
    for name in ("1:1:2:4", "1:2:4:8"):
        cases[name] = Case(SPEEDS[name], ALIKE, leaves=False)
        cases[f"{name}, unlike data"] = Case(SPEEDS[name], UNLIKE, leaves=False)
        cases[f"{name}, one comes and goes"] = Case(SPEEDS[name], ALIKE, leaves=True)
    for line in rows(cases, options.rounds, options.seeds):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
