"""Sites of different speed: time and loss of the ways to schedule them.

In virtual time, with real training of a linear model on handwritten digits. All ways of
a case take the same number of local steps, so that final losses can be compared::

    python studies/unequal_sites/study.py             # all of it, 5 seeds
    python studies/unequal_sites/study.py --parts ways --seeds 1 --rounds 6
    python studies/unequal_sites/study.py --table     # runs nothing

``ways``: four sites, six ways, with data alike and unlike, one that comes and goes, and
one that stalls; also the time until the loss that static has after 90 % of its rounds.
``sites``: rounds of 2 to 10,000 sites whose speeds are drawn. ``data``: data that stays
at four sites, or moves, and when the second is as good.

Rows are JSON lines in `studies/unequal_sites/measured.jsonl` or `--out`; rows in it are
not run again. Prints tables in Markdown: medians over seeds, and the range of final
losses; and draws `docs/images/unequal-sites.svg` and `more-sites.svg` below `--to`.
"""

import argparse
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "thin_lines")]

import pictures  # noqa: E402 -- of the study of thin lines
import results  # noqa: E402
import virtual_runs  # noqa: E402 -- beside this folder
from results import Result, table_line  # noqa: E402

from clients.data import digits  # noqa: E402
from federation.job import job_file  # noqa: E402
from federation.job.spec import JobSpec  # noqa: E402

# The loss to reach is that of ``static`` after this part of its rounds.
TARGET = 0.9
STEPS, BATCH, BASE = 24, 16, 40.0  # BASE: examples per second of the slowest site.
SPEEDS: Mapping[str, Sequence[float]] = {
    "1:1:1:1": (1, 1, 1, 1),
    "1:1:2:4": (1, 1, 2, 4),
    "1:2:4:8": (1, 2, 4, 8),
}
ALIKE, UNLIKE = 100.0, 0.3  # Of the Dirichlet distribution of classes over sites.
# A site is away for a fifth of the time, for two slow rounds on average.
AWAY = {"away_share": 0.2, "away_seconds": 2 * STEPS * BATCH / BASE}
# A site stops for a minute in every tenth of its rounds, and then answers.
STALLS = {"kind": "hang", "seconds": 60.0, "probability": 0.1}
_GRACE = {"minimum_sites": 3, "grace": 0.25}
WAYS: Mapping[str, Mapping[str, Any]] = {
    "static": {},
    "static, grace": _GRACE,
    "capacity": {"allocation": "capacity"},
    "capacity, grace": {"allocation": "capacity", **_GRACE},
    "buffered, 2 updates": {"mode": "buffered", "buffer_size": 2},
    "buffered, capacity": {
        "mode": "buffered",
        "buffer_size": 2,
        "allocation": "capacity",
    },
}
PICTURED = ("1:1:2:4", "1:2:4:8", "1:1:2:4, one comes and goes", "1:1:2:4, one stalls")
# 19 of 20 sites are within this factor of the median speed.
SPREAD, MANY = 4.0, (2, 4, 10, 30, 100, 300, 1_000, 10_000)
_FEW_STEPS, _FEW_ROUNDS, _SETTLED = 4, 5, 4


@dataclass(frozen=True, slots=True)
class Case:
    """What a way is tried on.

    Attributes:
        speeds: Of the sites, relative to the slowest.
        alpha: How alike their data are.
        trouble: ``leaves`` if one site comes and goes, ``stalls`` if one stops for a
            minute now and then.
    """

    speeds: Sequence[float]
    alpha: float = ALIKE
    trouble: str = ""


CASES: Mapping[str, Case] = {
    "1:1:1:1": Case(SPEEDS["1:1:1:1"]),
    **{
        f"{speeds}{text}": Case(SPEEDS[speeds], alpha, trouble)
        for speeds in ("1:1:2:4", "1:2:4:8")
        for text, alpha, trouble in (
            ("", ALIKE, ""),
            (", unlike data", UNLIKE, ""),
            (", one comes and goes", ALIKE, "leaves"),
            (", one stalls", ALIKE, "stalls"),
        )
        if speeds == "1:1:2:4" or not text
    },
}


def job_of(
    way: str, case: Case, *, rounds: int, seed: int, base: float = BASE
) -> JobSpec:
    """Describe one run; ``rounds`` is for updates of all sites."""
    sites = [f"site-{index}" for index in range(len(case.speeds))]
    schedule = dict(WAYS[way])
    size = schedule.get("buffer_size", len(sites))
    if case.trouble == "leaves" and size == len(sites):
        schedule["minimum_sites"] = len(sites) - 1
    troubled = sites[-2]
    machines = [
        {"site": site, "examples_per_second": base * speed}
        | (AWAY if case.trouble == "leaves" and site == troubled else {})
        for site, speed in zip(sites, case.speeds, strict=True)
    ]
    faults = [{"site": troubled, **STALLS}] if case.trouble == "stalls" else []
    return job_file.parse(
        {
            **_common(seed, case.alpha),
            "rounds": rounds * len(sites) // size,
            "training": {
                "local_steps": STEPS,
                "batch_size": BATCH,
                "optimizer": {"name": "sgd", "lr": 0.02},
            },
            "schedule": schedule | {"max_lost_rounds": rounds},
            "sites": [{"name": site} for site in sites],
            "simulation": {"machines": machines, "faults": faults},
        }
    )


def placed_job(placement: str, rounds: int, seed: int) -> JobSpec:
    """Describe epochs at four sites of 1:1:2:4."""
    machines = [
        {"site": f"site-{i}", "examples_per_second": BASE * speed}
        for i, speed in enumerate(SPEEDS["1:1:2:4"])
    ]
    optimizer = {"name": "sgd", "lr": 0.02}
    return job_file.parse(
        {
            **_common(seed, ALIKE),
            "rounds": rounds,
            "data": {"source": "clients.data:digits", "placement": placement},
            "training": {
                "local_epochs": 1,
                "batch_size": BATCH,
                "optimizer": optimizer,
            },
            "evaluation": {"every": 1},
            "aggregation": {"weights": "examples"},
            "sites": [{"name": machine["site"]} for machine in machines],
            "simulation": {"machines": machines},
        }
    )


def many_job(way: str, sites: int, seed: int) -> JobSpec:
    """Describe a few rounds of many sites, of eight digits each or more."""
    fleet = {"sites": sites, "examples_per_second": BASE, "spread": SPREAD}
    job = {
        **_common(seed, ALIKE),
        "rounds": _FEW_ROUNDS,
        "training": {
            "local_steps": _FEW_STEPS,
            "batch_size": 4,
            "optimizer": {"name": "sgd", "lr": 0.02},
        },
        "schedule": WAYS[way],
        "evaluation": {"every": 0},
        "simulation": {"fleet": fleet},
    }
    job["data"] = {
        "source": "virtual_runs:digits_again",
        "options": {"times": 1 + 8 * sites // 900},
    }
    return job_file.parse(job)


def _common(seed: int, alpha: float) -> dict[str, Any]:
    return {
        "name": "unequal-sites",
        "seed": seed,
        "model": {
            "factory": "clients.models:logistic_regression",
            "options": {"inputs": 64, "classes": 10},
        },
        "data": {
            "source": "clients.data:digits",
            "partition": {"kind": "dirichlet", "alpha": alpha},
        },
        "evaluation": {"every": 1000},  # The first and the last model only.
        "aggregation": {"weights": "uniform"},
        "storage": {"keep_checkpoints": 1000},
    }


def ways(
    cases: Sequence[str], seeds: int, rounds: int
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield what decides each row of four sites."""
    for name in cases:
        for way in WAYS:
            for seed in range(seeds):
                yield "ways", {"case": name, "way": way, "seed": seed, "rounds": rounds}


def sites(most: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield what decides each row of many sites; three seeds for up to a hundred."""
    for number in MANY:
        for way in ("static", "capacity"):
            for seed in range(3 if number <= 100 else 1):  # noqa: PLR2004
                if number <= most:
                    yield "sites", {"sites": number, "way": way, "seed": seed}


def measured(part: str, decides: Mapping[str, Any], target: float | None) -> Result:
    """Run what a row is of.

    Args:
        part: One of the parts of the study.
        decides: What decides the row.
        target: A loss to reach; None for a way that sets it.
    """
    if part == "sites":
        job = many_job(decides["way"], decides["sites"], decides["seed"])
        run = virtual_runs.run(job)
        later = [one.seconds for one in run.rounds[_SETTLED:]]
        return {"round_seconds": median(later), "steps": run.steps, "busy": run.busy}
    if part == "data":
        stays, moves = (
            virtual_runs.run(placed_job(how, decides["rounds"], decides["seed"]))
            for how in ("static", "dynamic")
        )
        seconds = {one.round_index: one.at for one in moves.rounds}
        reached = next(
            seconds[one.round_index]
            for one in moves.evaluations
            if one.round_index and one.pooled.loss <= stays.loss
        )
        return {
            "static": stays.rounds[-1].at,
            "dynamic": moves.rounds[-1].at,
            "reached": reached,
            "losses": [stays.loss, moves.loss],
        }
    case = CASES[decides["case"]]
    job = job_of(decides["way"], case, rounds=decides["rounds"], seed=decides["seed"])
    run, losses = run_and_losses(job)
    if target is None:
        target = losses[math.ceil(TARGET * decides["rounds"])]
    times = (
        run.seconds_until(end)
        for end in run.rounds
        if losses.get(end.round_index, math.inf) <= target
    )
    return {
        "seconds": run.round_seconds,
        "target": target,
        "reached": next(times, None),
        "loss": run.loss,
        "steps": run.steps,
        "busy": run.busy,
        "bytes": run.bytes_sent,
    }


def run_and_losses(job: JobSpec) -> tuple[virtual_runs.VirtualRun, dict[int, float]]:
    """Run a job, and evaluate the model of each round, which takes no virtual time."""
    _, held_out = digits()
    assert held_out.targets is not None
    inputs = held_out.inputs.reshape(len(held_out.inputs), -1)
    losses = {}
    with TemporaryDirectory() as place:
        run = virtual_runs.run(job, Path(place) / "run")
        for round_index, model in virtual_runs.models(Path(place) / "run"):
            scores = inputs @ model["1.weight"].T + model["1.bias"]
            right = np.take_along_axis(scores, held_out.targets[:, None], axis=1)
            likely = np.log(np.exp(scores).sum(axis=1)) - right[:, 0]
            losses[round_index] = float(likely.mean())
    return run, losses


def _target(rows: Iterable[Result], decides: Mapping[str, Any]) -> float | None:
    """The loss that the row of ``static`` of the same case and seed states."""
    same = {**decides, "way": "static"}
    found = (row for row in rows if all(row.get(k) == v for k, v in same.items()))
    return next((row["target"] for row in found if "target" in row), None)


def of_ways(rows: Sequence[Result]) -> Mapping[tuple[str, str], list[Result]]:
    """Rows of four sites, by case and way."""
    found: dict[tuple[str, str], list[Result]] = {}
    for row in rows:
        if row["part"] == "ways":
            found.setdefault((row["case"], row["way"]), []).append(row)
    return found


def tables(rows: Sequence[Result]) -> Iterator[str]:
    """Yield the lines of both tables."""
    heads = ("Sites", "Way", "Time, of static", "To the target", "Of the bound")
    yield table_line(*heads, "Training", "Loss", "Steps", "MB")
    yield table_line(*["---"] * 9)
    static = static_reached = 0.0
    for (name, way), found in of_ways(rows).items():
        seconds = median(one["seconds"] for one in found)
        times = [one["reached"] for one in found if one["reached"] is not None]
        reached = median(times) if len(times) == len(found) else math.inf
        if way == "static":
            static, static_reached = seconds, reached
        total = BASE * sum(CASES[name].speeds)
        bound = median(one["steps"] * BATCH / total for one in found)
        losses = sorted(one["loss"] for one in found)
        yield table_line(
            name,
            way,
            f"{seconds / static:.2f}",
            f"{reached / static_reached:.2f}" if reached < math.inf else "never",
            f"{seconds / bound:.2f}",
            f"{median(one['busy'] for one in found):.0%}",
            f"{median(losses):.3f} ({losses[0]:.3f} to {losses[-1]:.3f})",
            f"{median(one['steps'] for one in found):.0f}",
            f"{median(one['bytes'] for one in found) / 1e6:.1f}",
        )
    yield ""
    yield table_line("Sites", "Way", "Seconds of a round", "Training")
    yield table_line(*["---"] * 4)
    for way, points in by_number(rows).items():
        for number, (seconds, busy) in points.items():
            yield table_line(f"{number}", way, f"{seconds:.2f}", f"{busy:.0%}")


def of_data(rows: Sequence[Result]) -> Iterator[str]:
    """Yield the lines of the table of placed data: of the time of a static split."""
    heads = ("Seed", "All rounds", "Until the loss of static", "Static", "Dynamic")
    yield table_line(*heads)
    yield table_line(*["---"] * len(heads))
    for row in (one for one in rows if one["part"] == "data"):
        parts = [f"{row[name] / row['static']:.2f}" for name in ("dynamic", "reached")]
        losses = [f"{loss:.3f}" for loss in row["losses"]]
        yield table_line(f"{row['seed']}", *parts, *losses)


def by_number(rows: Sequence[Result]) -> Mapping[str, dict[int, tuple[float, float]]]:
    """Seconds of a round and share of training, by way and number of sites."""
    found: dict[str, dict[int, list[Result]]] = {}
    for row in rows:
        if row["part"] == "sites":
            here = found.setdefault(row["way"], {})
            here.setdefault(row["sites"], []).append(row)
    return {
        way: {
            number: (
                median(each["round_seconds"] for each in here),
                median(each["busy"] for each in here),
            )
            for number, here in numbers.items()
        }
        for way, numbers in found.items()
    }


def draw(rows: Sequence[Result], to: Path) -> None:
    """Draw both pictures below a folder."""
    groups: dict[str, dict[str, float]] = {}
    ways_ = of_ways(rows)
    for (name, way), found in ways_.items():
        if name in PICTURED:
            static = median(one["seconds"] for one in ways_[name, "static"])
            part = 100 * median(one["seconds"] for one in found) / static
            groups.setdefault(name, {})[way] = part
    lines = {
        way: [(float(number), seconds) for number, (seconds, _) in points.items()]
        for way, points in by_number(rows).items()
    }
    folder = to / "docs/images"
    folder.mkdir(parents=True, exist_ok=True)
    if groups:
        text = pictures.bars(groups, "virtual time, % of static")
        (folder / "unequal-sites.svg").write_text(text)
    if lines:
        labels = ("sites", "virtual seconds of a round")
        text = pictures.curves(lines, labels, log=True)
        (folder / "more-sites.svg").write_text(text)


def main() -> None:
    """Add what lacks, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=("ways", "sites", "data"))
    parser.add_argument("--cases", nargs="+", choices=[*CASES], default=[*CASES])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--most", type=int, default=10_000, help="sites")
    parser.add_argument("--out", type=Path, default=HERE / "measured.jsonl")
    parser.add_argument("--to", type=Path, default=REPOSITORY)
    parser.add_argument("--table", action="store_true", help="run nothing")
    options = parser.parse_args()
    parts = options.parts or ("ways", "sites", "data")
    plans = {
        "data": (
            ("data", {"seed": seed, "rounds": options.rounds})
            for seed in range(options.seeds)
        ),
        "ways": ways(options.cases, options.seeds, options.rounds),
        "sites": sites(options.most),
    }
    for part, decides in (each for name in parts for each in plans[name]):
        key = results.key_of(part=part, **decides)
        if not options.table and key not in results.finished(options.out):
            target = _target(results.finished(options.out).values(), decides)
            found = measured(part, decides, target)
            found = {
                k: round(v, 6) if isinstance(v, float) else v for k, v in found.items()
            }
            row = {"key": key, "part": part, **decides, **found}
            results.add(options.out, row)
    rows = list(results.finished(options.out).values())
    draw(rows, options.to)
    print("\n".join([*tables(rows), "", *of_data(rows)]), file=sys.stderr)


if __name__ == "__main__":
    main()
