"""Parts of the page about rows of longer runs, from models that are past their start.

The later the start, the less local steps and few levels cost. There is one table of
losses and minutes for each size that was measured.
"""

import math
import statistics
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import wall_clock
from claims import best_rows
from results import Result, table_line
from scipy.special import stdtrit

# Seconds of a site's step, as in the page's tables of the share of training.
STEP_SECONDS = 0.25
MBITS = (10.0, 100.0, 1000.0)
_MINUTE = 60
_USUAL = ", outer 1.0 / 0.6, secure, 4 levels"
_FEWEST_SEEDS = 2
_MANY = 3
# Sizes of rows.toml for processors without bfloat16 end with this.
_FLOAT32 = "-float32"
_ROWS = Path(__file__).resolve().parent / "rows.toml"


def by_size(rows: Sequence[Result]) -> Mapping[str, list[Result]]:
    """Rows of each size, the largest model first, whatever the precision of a seed."""
    found: dict[str, list[Result]] = {}
    for row in sorted(rows, key=lambda each: -each["parameters"]):
        found.setdefault(row["size"].removesuffix(_FLOAT32), []).append(row)
    return found


def panels(rows: Sequence[Result]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Minutes and training loss by width of line: of the largest model with many rows.

    Without one, of the largest.
    """
    sizes = [best_rows(own) for own in by_size(rows).values()]
    many = (best for best in sizes if len(best) >= _MANY)
    best = next(many, sizes[0] if sizes else {})
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for mbit in MBITS:
        for name, row in best.items():
            course = wall_clock.course(row, mbit=mbit, step_seconds=STEP_SECONDS)
            if course:
                points = [(seconds / _MINUTE, loss) for seconds, loss in course]
                found.setdefault(f"{mbit:g} Mbit/s", {})[name] = points
    return found


def text(rows: Sequence[Result], picture: str) -> Iterator[str]:
    """Write both parts.

    Args:
        rows: Of ``measure.py``, of sizes with long runs.
        picture: Where ``panels`` are drawn.
    """
    yield "## From a model that is past its start\n"
    if not rows:
        command = "python studies/thin_lines/measure.py --size warm"
        yield f"No rows yet: `{command}` measures them.\n"
        return
    yield (
        "All rows of a size start from the same model, trained synchronously with "
        "AdamW. Tables have the synchronous rows and those\nthat no row with as many "
        "steps beats in both loss and bytes. Rows with more steps are compared with "
        "the bytes of the same\nsynchronous run. With one seed, differences of about "
        "0.01 are not significant. A * stands for an outer\nlearning rate of 1.0 and "
        "momentum of 0.6, and secure aggregation in 4 levels.\n"
    )
    yield (
        "These rows show *the same loss or lower, with four times the local steps*. "
        "How much lower depends on the corpus: on C\nheaders, a GPT of 0.37M "
        "parameters ended no lower than with synchronous Muon (1.538 and 1.537), at "
        "179 times fewer bytes up,\nand 15 % higher with as many steps. The rows of "
        "that comparison are not in this study.\n"
    )
    sizes = by_size(rows).values()
    for own in sizes:
        yield from _losses(own)
    if lines := [line for own in sizes for line in _paired(own)]:
        heads = "size", "row", "seeds", "mean loss", "synchronous"
        yield "Differences from the best synchronous row, in pairs of several seeds:\n"
        yield table_line(*heads, "difference", "95 % interval")
        yield table_line(*["---"] * (len(heads) + 2))
        yield from lines
        yield ""
    yield "## Loss by wall-clock\n"
    yield (
        "The minutes above are computed, not measured: from the bytes of the rows, "
        f"with steps of {STEP_SECONDS:g} s at every site. A\nsynchronous run exchanges "
        "in a ring at each step; in a round a site receives, trains and sends, one "
        "after another. Latency,\nencoding and masking are excluded, and nothing "
        "overlaps.\n"
    )
    if panels(rows):
        yield (
            f"![Training loss against minutes]({picture})\n\nEach point is the mean "
            "training loss of a round with the sites' own models, or of the same "
            "number of synchronous steps.\n"
        )


def _heading(rows: Sequence[Result]) -> str:
    row = rows[0]
    size = tomllib.loads(_ROWS.read_text())["sizes"].get(row["size"], {})
    before = size.get("warm_up_steps", "some")
    names = " and ".join(
        f"`--size {each}`" for each in sorted({r["size"] for r in rows})
    )
    return (
        f"{row['parameters']:,} parameters, {_steps(row)} steps at each site after "
        f"{before} synchronous ones ({names}):\n"
    )


def _name(row: Result) -> str:
    """The row's name, with a sign for the settings that most of them share."""
    return str(row["row"]).replace(_USUAL, "*")


def _work(row: Result) -> int:
    """How many times the steps of its size a row takes; older rows do not tell."""
    return int(row.get("work", 1))


def _steps(row: Result) -> int:
    """Steps of the size."""
    return int(row["steps"]) // _work(row)


def _losses(rows: Sequence[Result]) -> Iterator[str]:
    heads = (
        "row",
        "loss",
        "above the best synchronous",
        "fewer up",
        "fewer both",
        *(f"min at {each:g} Mbit/s" for each in MBITS),
    )
    yield _heading(rows)
    yield table_line(*heads)
    yield table_line(*["---"] * len(heads))
    best = sorted(best_rows(rows).values(), key=lambda each: each["loss"])
    dense = [row["loss"] for row in best if row["bytes_from"] == "formula"]
    fewest: dict[int, float] = {}
    for row in best:
        beaten = row["x_both"] <= fewest.get(_work(row), 0.0)
        if beaten and row["bytes_from"] != "formula":
            continue
        fewest[_work(row)] = max(fewest.get(_work(row), 0.0), row["x_both"])
        yield table_line(
            _name(row),
            f"{row['loss']:.3f}",
            f"{row['loss'] / min(dense) - 1:+.1%}" if dense else "-",
            f"{row['x_up']:.0f}",
            f"{row['x_both']:.0f}",
            *(f"{_minutes(row, mbit):.1f}" for mbit in MBITS),
        )
    yield ""


def _minutes(row: Result, mbit: float) -> float:
    seconds = wall_clock.seconds(row, mbit=mbit, step_seconds=STEP_SECONDS)
    return seconds / _MINUTE


def _paired(rows: Sequence[Result]) -> Iterator[str]:
    """Write how far rows of several seeds are from the best synchronous one.

    Seed by seed, as model and batches of a seed are the same for all rows; the interval
    is Student's.
    """
    best = best_rows(rows)
    dense = [row for row in best.values() if row["bytes_from"] == "formula"]
    if not dense:
        return
    reference = min(dense, key=lambda each: each["loss"])
    of_reference = _by_seed(rows, reference)
    for row in sorted(best.values(), key=lambda each: each["loss"]):
        own = _by_seed(rows, row)
        seeds = sorted(own.keys() & of_reference.keys())
        if row is reference or len(seeds) < _FEWEST_SEEDS:
            continue
        shares = [own[seed] / of_reference[seed] - 1 for seed in seeds]
        scale = statistics.stdev(shares) / math.sqrt(len(seeds))
        half = float(stdtrit(len(seeds) - 1, 0.975)) * scale
        middle = statistics.mean(shares)
        yield table_line(
            str(row["size"]),
            _name(row),
            str(len(seeds)),
            f"{statistics.mean(own[seed] for seed in seeds):.3f}",
            f"{statistics.mean(of_reference[seed] for seed in seeds):.3f}",
            f"{middle:+.1%}",
            f"{middle - half:+.1%} to {middle + half:+.1%}",
        )


def _by_seed(rows: Sequence[Result], like: Result) -> Mapping[int, float]:
    """Losses of a row at the rate of one of its results."""
    same = ("row", "learning_rate")
    return {
        row["seed"]: row["loss"]
        for row in rows
        if all(row[key] == like[key] for key in same)
    }
