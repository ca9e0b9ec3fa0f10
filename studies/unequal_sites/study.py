"""Sites of different speed: time and loss of the ways to schedule them.

In virtual time, with real training of a linear model on handwritten digits. Each run
ends with the round in which as many local steps have counted as in static rounds of all
sites, so that times, dollars and losses can be compared::

    python studies/unequal_sites/study.py             # all of it, 5 seeds
    python studies/unequal_sites/study.py --parts ways --seeds 1 --rounds 6
    python studies/unequal_sites/study.py --table     # runs nothing

``ways``: four sites, six ways, with data alike and unlike, one that comes and goes, and
one that stalls, which also have the ways of ``TROUBLED``. The time to the loss that
static has after 90 % of its rounds is interpolated between the ends of two rounds.
``sites``: rounds of 2 to 10,000 sites whose speeds are drawn. ``data``: data that stays
at four sites, or moves, and when the second is as good.

Rows are JSON lines in `studies/unequal_sites/measured.jsonl` or `--out`; rows in it are
not run again. Prints tables in Markdown: medians over seeds, and ranges; and draws
`docs/images/unequal-sites.svg` and `more-sites.svg` below `--to`.
"""

import argparse
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
_QUORUM = {"minimum_sites": 3}
_GRACE = {**_QUORUM, "grace": 0.25}
# By default a round needs all sites, for up to ten minutes.
WAYS: Mapping[str, Mapping[str, Any]] = {
    "static": {},
    "static, 30 s": {"round_deadline_seconds": 30.0},
    "static, quorum": _QUORUM,
    "static, grace": _GRACE,
    "static, learnt": {**_QUORUM, "grace": "learnt"},
    "capacity": {"allocation": "capacity"},
    "capacity, quorum": {"allocation": "capacity", **_QUORUM},
    "capacity, grace": {"allocation": "capacity", **_GRACE},
    "buffered, 2 updates": {"mode": "buffered", "buffer_size": 2},
    "buffered, capacity": {
        "mode": "buffered",
        "buffer_size": 2,
        "allocation": "capacity",
    },
}
TROUBLED = ("static, 30 s", "static, quorum", "static, learnt", "capacity, quorum")
_MOST = 2  # Times the rounds without trouble, after which a way gives up.
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
    size = WAYS[way].get("buffer_size", len(sites))
    troubled = sites[-2]
    machines = [
        {"site": site, "examples_per_second": base * speed, "dollars_per_hour": speed}
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
            "schedule": {**WAYS[way], "max_lost_rounds": _MOST * rounds},
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
            if way in TROUBLED and not CASES[name].trouble:
                continue
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
    case, rounds = CASES[decides["case"]], decides["rounds"]
    job = job_of(decides["way"], case, rounds=rounds, seed=decides["seed"])
    never = replace(job.evaluation, every=0)
    job = replace(job, rounds=_MOST * job.rounds, evaluation=never)
    work = rounds * len(case.speeds) * STEPS
    run, losses = run_and_losses(job, work)
    if run.steps < work:
        raise ValueError(
            f"{decides}: {run.steps} of {work} steps counted in all rounds"
        )
    if target is None:
        made = [one for one in run.rounds if one.status == "completed"]
        target = losses[made[math.ceil(TARGET * rounds) - 1].round_index]
    return {
        "seconds": run.round_seconds,
        "target": target,
        "reached": reached_at(run, losses, target),
        "loss": losses[run.rounds[-1].round_index],
        "steps": run.steps,
        "busy": run.busy,
        "bytes": run.bytes_sent,
        "dollars": run.dollars,
    }


def reached_at(
    run: virtual_runs.VirtualRun, losses: Mapping[int, float], target: float
) -> float | None:
    """Find when a loss is reached, in a straight line between two models."""
    at, loss = 0.0, math.inf
    for end in run.rounds:
        after = losses.get(end.round_index, loss)
        if after <= target:
            part = (loss - target) / (loss - after) if loss < math.inf else 1.0
            return at + part * (end.at - at)
        at, loss = end.at, after
    return None


def run_and_losses(
    job: JobSpec, steps: int | None = None
) -> tuple[virtual_runs.VirtualRun, dict[int, float]]:
    """Run a job, and evaluate the model of each round, which takes no virtual time.

    Args:
        job: What to run.
        steps: Local steps that count, after which the run ends.
    """
    _, held_out = digits()
    assert held_out.targets is not None
    inputs = held_out.inputs.reshape(len(held_out.inputs), -1)
    losses = {}
    with TemporaryDirectory() as place:
        run = virtual_runs.run(job, Path(place) / "run", steps=steps)
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
    """Yield the lines of both tables; ratios are of runs with the same seed."""
    heads = (
        *("Sites", "Way", "Time, of static", "To the target", "Of quorum's"),
        *("Time, of the bound", "Loss, of static", "Training", "Steps", "MB", "$"),
    )
    yield table_line(*heads)
    yield table_line(*["---"] * len(heads))
    found = of_ways(rows)
    for (name, way), those in found.items():
        static = found[name, "static"]
        quorum = found.get((name, "static, quorum"), [])
        speed = BASE * sum(CASES[name].speeds)
        bounds = [
            {"seed": one["seed"], "seconds": one["steps"] * BATCH / speed}
            for one in those
        ]
        yield table_line(
            name,
            way,
            _ratios("seconds", those, static),
            _ratios("reached", those, static),
            _ratios("reached", those, quorum),
            _ratios("seconds", those, bounds),
            _ratios("loss", those, static, digits=3),
            f"{median(one['busy'] for one in those):.0%}",
            f"{median(one['steps'] for one in those):.0f}",
            f"{median(one['bytes'] for one in those) / 1e6:.1f}",
            f"{median(one['dollars'] for one in those):.2f}",
        )
    yield ""
    yield table_line("Sites", "Way", "Seconds of a round", "Training")
    yield table_line(*["---"] * 4)
    for way, points in by_number(rows).items():
        for number, (seconds, busy) in points.items():
            yield table_line(f"{number}", way, f"{seconds:.2f}", f"{busy:.0%}")


def _ratios(
    key: str, rows: Sequence[Result], base: Sequence[Result], *, digits: int = 2
) -> str:
    """Median and range of what rows are of others with the same seed."""
    if not base or any(one[key] is None for one in base):
        return "-"
    if any(one[key] is None for one in rows):
        return "never"
    found = of_each(key, rows, base)
    low, middle, high = (
        f"{each:.{digits}f}" for each in (found[0], median(found), found[-1])
    )
    return middle if low == high else f"{middle} ({low} to {high})"


def of_each(
    key: str, rows: Iterable[Result], base: Iterable[Result]
) -> Sequence[float]:
    """What each row is of the other with the same seed, sorted."""
    others = {one["seed"]: one[key] for one in base}
    return sorted(one[key] / others[one["seed"]] for one in rows)


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
            parts = of_each("seconds", found, ways_[name, "static"])
            groups.setdefault(name, {})[way] = 100 * median(parts)
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
