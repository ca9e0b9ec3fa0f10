"""Write the study's page and pictures from the rows that were measured.

    python studies/thin_lines/report.py [--loss FILE ...] [--warm FILE ...]
        [--baselines FILE ...] [--utilisation FILE ...] [--to FOLDER] [--measure]

`--measure` first runs `measure.py`, `baselines.py` and `utilisation.py`, which add to
the files under `runs` what they lack. Without it nothing is run: rows come from the
files that are given, or else from `studies/thin_lines/measured`. Rows of longer runs
(`--warm`) take hours: they are never run here and always come from files. The page is
`docs/explanation/thin-lines.md`, the pictures are `docs/images/thin-lines-*.svg`;
`--to` writes both to another folder, in which they have the same places.

Every figure of the page is of a row. A part without rows says which command adds them.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]

import pictures  # noqa: E402 -- beside this script
import results  # noqa: E402
import warm_model  # noqa: E402
from claims import best_rows, timed  # noqa: E402
from results import Result, table_line  # noqa: E402

PAGE = Path("docs/explanation/thin-lines.md")
IMAGES = Path("docs/images")
_CLOCK = "../images/thin-lines-wall-clock.svg"
SCRIPTS = {
    "loss": "measure.py",
    "baselines": "baselines.py",
    "utilisation": "utilisation.py",
}
_RUNS = {
    "loss": "runs/thin-lines.jsonl",
    "baselines": "runs/thin-lines-baselines.jsonl",
    "utilisation": "runs/thin-lines-utilisation.jsonl",
}
_WARM = "warm"
_PARTS = (*SCRIPTS, _WARM)
_MEGA, _KILO = 1e6, 1e3
# Widths of lines, in Mbit/s, that tables of computed rows have; pictures have all.
_TABLED = (10.0, 100.0, 1000.0)

_INTRODUCTION = """# Loss, bytes and waiting on thin lines

This page compares how training methods use thin lines (slow network links): loss
against bytes, bytes by formula and as network interfaces counted them, and the share of
time in which sites train. `python studies/thin_lines/report.py` generates it from the
rows in `studies/thin_lines/measured`, and with `--measure` adds missing rows;
[the study](../../studies/thin_lines/README.md) documents what each script measures.

Four sites train a byte-level GPT on the sources of Python's standard library, each on
different packages. All methods start from the same model. Unless a row says otherwise,
they take the same number of steps and read the same batches. The machine is small and
shared: compare ratios in these tables, not seconds. H is the number of local steps in
a round. [Claims of others](claims.md) has what the rows say of two papers.
"""


def main() -> None:
    options = _options()
    if options.measure:
        for script in SCRIPTS.values():
            subprocess.run([sys.executable, str(HERE / script)], check=True)  # noqa: S603 -- ours
    files = {name: getattr(options, name) or _default(name) for name in _PARTS}
    if options.measure:
        files |= {name: [Path(path)] for name, path in _RUNS.items()}
    rows = {name: _rows(paths) for name, paths in files.items()}
    (options.to / PAGE).parent.mkdir(parents=True, exist_ok=True)
    (options.to / IMAGES).mkdir(parents=True, exist_ok=True)
    for name, text in drawings(rows).items():
        (options.to / IMAGES / f"thin-lines-{name}.svg").write_text(text)
    (options.to / PAGE).write_text(page(rows))
    print(options.to / PAGE)


def _default(name: str) -> list[Path]:
    names = ("warm", "10M", "large", "late") if name == _WARM else (name,)
    return [HERE / "measured" / f"{each}.jsonl" for each in names]


def _rows(paths: Iterable[Path]) -> list[Result]:
    return [row for path in paths for row in results.finished(path).values()]


def drawings(rows: Mapping[str, Sequence[Result]]) -> Mapping[str, str]:
    """Draw what there are rows for: SVG text by name."""
    found = {}
    if rows["loss"]:
        found["loss"] = pictures.loss_by_bytes(
            {
                name: [((row["bytes_up"] + row["bytes_down"]) / _MEGA, row["loss"])]
                for name, row in best_rows(rows["loss"]).items()
            }
        )
    if by_width := warm_model.panels(rows[_WARM]):
        found["wall-clock"] = pictures.loss_by_minutes(by_width)
    if rows["utilisation"]:
        for part in ("virtual", "billion"):
            computed = _by_way(_shown(rows["utilisation"], part))
            measured = _by_way(_shown(rows["utilisation"], "measured"))
            if computed:
                found[f"utilisation-{part}"] = pictures.share_by_bandwidth(
                    computed, measured if part == "virtual" else {}
                )
    return found


def _shown(rows: Sequence[Result], part: str) -> list[Result]:
    """Rows of a picture: those whose steps take as long as the measured ones do.

    Of the large model, those of a step of one second.
    """
    found = [row for row in rows if row["part"] == part]
    paces = {row["step_seconds"] for row in rows if row["part"] == "measured"}
    if part == "billion":
        paces = {1.0}
    return [row for row in found if not paces or row["step_seconds"] in paces]


def _by_way(rows: Iterable[Result]) -> dict[str, list[tuple[float, float]]]:
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        found.setdefault(_way(row), []).append((row["mbit"], row["utilisation"]))
    return found


def _way(row: Result) -> str:
    steps = f", H = {row['local_steps']}" if row["local_steps"] > 1 else ""
    overlap = f", overlap {row['overlap_steps']}" if row["overlap_steps"] else ""
    return f"{row['way']}{steps}{overlap}"


def _paced(row: Result) -> str:
    """The way, and how long a step takes where that is not a second."""
    pace = row["step_seconds"]
    return _way(row) + ("" if pace == 1 else f", steps of {pace:g} s")


def page(rows: Mapping[str, Sequence[Result]]) -> str:
    """Write the page."""
    utilisation = with_dense(rows)
    parts = [
        _INTRODUCTION,
        "\n".join(_loss(rows["loss"])),
        "\n".join(warm_model.text(rows[_WARM], _CLOCK)),
        "\n".join(_baselines(rows["baselines"])),
        "\n".join(_utilisation(utilisation)),
    ]
    return "\n".join(parts)


def with_dense(rows: Mapping[str, Sequence[Result]]) -> list[Result]:
    """Rows of ``utilisation``, and those of DDP beside its measured ones."""
    return [*rows["utilisation"], *_dense(rows)]


def _dense(rows: Mapping[str, Sequence[Result]]) -> Iterator[Result]:
    """Rows of DDP on the lines and model of the product's measured rows."""
    sizes = {
        (row["mbit"], row["parameters"], row["step_seconds"])
        for row in rows["utilisation"]
        if row["part"] == "measured"
    }
    for row in rows["baselines"]:
        place = (row["mbit"], row["parameters"], row["pace"])
        if row["method"] == "DDP" and place in sizes:
            line = row["mbit"] * 1e6 / 8
            predicted = row["pace"] + row["formula_each_way"] / line
            yield {
                "part": "measured",
                "way": "DDP",
                "mbit": row["mbit"],
                "parameters": row["parameters"],
                "local_steps": 1,
                "overlap_steps": 0,
                "step_seconds": row["pace"],
                "round_seconds": row["seconds_a_step"],
                "utilisation": row["trains"],
                "predicted": predicted,
                "error": predicted / row["seconds_a_step"] - 1,
                "bytes_up_a_step": row["interface_up"],
                "bytes_down_a_step": row["interface_down"],
            }


def _missing(name: str) -> str:
    return f"No rows yet: `python studies/thin_lines/{SCRIPTS[name]}` measures them."


def _loss(rows: Sequence[Result]) -> Iterator[str]:
    yield "## Loss by bytes\n"
    if not rows:
        yield _missing("loss") + "\n"
        return
    yield "![Held-out loss against bytes](../images/thin-lines-loss.svg)\n"
    yield (
        "Each row uses the best of the learning rates that were tried with the first "
        'seed. "Fewer" compares bytes in\nboth directions with float32 gradients at '
        "every step.\n"
    )
    yield table_line("row", "loss", "MB up", "MB down", "fewer", "rate")
    yield table_line(*["---"] * 6)
    best = best_rows(rows)
    for name in sorted(best, key=lambda each: best[each]["loss"]):
        row = best[name]
        yield table_line(
            name,
            f"{row['loss']:.3f}",
            f"{row['bytes_up'] / _MEGA:,.1f}",
            f"{row['bytes_down'] / _MEGA:,.1f}",
            f"{row['x_both']:.1f}",
            f"{row['learning_rate']:g}",
        )
    yield ""


def _baselines(rows: Sequence[Result]) -> Iterator[str]:
    yield "## What people would use instead\n"
    if not rows:
        yield _missing("baselines") + "\n"
        return
    yield (
        "Each site is a network namespace with a shaped link; a parameter server's "
        "own link is not shaped. A step waits for\nthe stated seconds, as if each site "
        "had its own device, and takes longer only if sites wait for each other or for "
        "this\nmachine's cores. Kilobytes are those of one site in one step, in each "
        "direction; interfaces also count headers. Losses\nare from complete runs on "
        "loopback.\n"
    )
    heads = (
        "method",
        "parameters",
        "Mbit/s",
        "seconds of a step",
        "took",
        "sites train",
        "kB by formula",
        "kB up",
        "kB down",
    )
    yield table_line(*heads)
    yield table_line(*["---"] * len(heads))
    for row in rows:
        if row["interface_up"] is None or row["pace"] == 1:
            continue  # Rows of DDP with steps of a second are in "Measured".
        sent = (row["formula_each_way"], row["interface_up"], row["interface_down"])
        yield table_line(
            row["method"],
            f"{row['parameters']:,}",
            f"{row['mbit']:g}",
            f"{row['pace']:g}",
            f"{row['seconds_a_step']:.2f}",
            f"{row['trains']:.0%}",
            *(f"{each / _KILO:,.0f}" for each in sent),
        )
    yield ""
    whole = [row for row in rows if row["loss"] is not None]
    if whole:
        found = (
            f"{row['method']} {row['loss']:.3f} ({row['steps']} steps, rate "
            f"{row['learning_rate']:g})"
            for row in whole
        )
        yield f"Losses: {'; '.join(found)}.\n"
    zero = timed(rows).get("ZeRO-3 (FSDP2)")
    if zero is not None:
        formula = zero["formula_each_way"] / _KILO
        yield (
            f"FSDP's interfaces count {zero['interface_up'] / _KILO:,.0f} kB, while "
            f"the formula of ZeRO-3 gives {formula:,.0f}. A\nreduce-scatter of gloo "
            "that sends as much as an all-reduce, which would be "
            f"{formula * 4 / 3:,.0f}, fits this. Compression at every step\n"
            "sends to all other sites, so its bytes grow with their number.\n"
        )


def _utilisation(rows: Sequence[Result]) -> Iterator[str]:
    yield "## The share of time in which sites train\n"
    if not rows:
        yield _missing("utilisation") + "\n"
        return
    yield "### Computed\n"
    yield (
        "Steps take one second. 1.3M parameters: the product's virtual engine sends "
        "every message. 1B parameters: the same message\nsizes and time model, without "
        "training. Both exclude the time for encoding, masking and adding. DDP "
        "(distributed data\nparallel) is computed as a ring. Points are measured "
        "(below).\n"
    )
    for part, name in (("virtual", "1.3M parameters"), ("billion", "1B parameters")):
        if _shown(rows, part):
            picture = f"../images/thin-lines-utilisation-{part}.svg"
            yield f"![Share of training by bandwidth, {name}]({picture})\n"
    mbits = _TABLED
    yield table_line("parameters", "exchange", *(f"{each:g} Mbit/s" for each in mbits))
    yield table_line(*["---"] * (2 + len(mbits)))
    table: dict[tuple[str, str], dict[float, float]] = {}
    for row in [*_shown(rows, "virtual"), *_shown(rows, "billion")]:
        if "backward" not in row["way"]:
            place = (f"{row['parameters']:,}", _paced(row))
            table.setdefault(place, {})[row["mbit"]] = row["utilisation"]
    for (values, way), shares in table.items():
        cells = [f"{shares[each]:.1%}" if each in shares else "-" for each in mbits]
        yield table_line(values, way, *cells)
    yield ""
    yield from _measured([row for row in rows if row["part"] == "measured"])


def _measured(rows: Sequence[Result]) -> Iterator[str]:
    yield "### Measured\n"
    if not rows:
        yield _missing("utilisation") + "\n"
        return
    yield (
        "The product on this machine, with four sites in their own networks, and DDP "
        "on links of the same bandwidth. The time\nmodel has one constant for each "
        "kind of update, the fixed time of messages, which is calibrated by the rows\n"
        "marked *c*. DDP is predicted as a ring, without a constant. A step waits for "
        "one second; delays of messages on the\nbusy machine are part of the rounds. "
        "The loss due to overlap is not measured here.\n"
    )
    heads = (
        "exchange",
        "Mbit/s",
        "sites train",
        "round, s",
        "predicted, s",
        "error",
    )
    yield table_line(*heads)
    yield table_line(*["---"] * len(heads))
    errors = []
    for row in rows:
        predicted, error = row.get("predicted"), row.get("error")
        if error is not None:
            errors.append(abs(error))
        yield table_line(
            _paced(row),
            f"{row['mbit']:g}",
            f"{row['utilisation']:.1%}",
            f"{row['round_seconds']:.2f}",
            ("c" if row.get("calibrates") else "-")
            if predicted is None
            else f"{predicted:.2f}",
            "-" if error is None else f"{error:+.1%}",
        )
    yield ""
    if errors:
        near = sum(error <= 0.1 for error in errors)  # noqa: PLR2004 -- as asked for
        yield (
            f"{near} of {len(errors)} predictions are within 10 %; the largest error "
            f"is {max(errors):.1%}.\n"
        )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in _PARTS:
        parser.add_argument(f"--{name}", nargs="*", type=Path)
    parser.add_argument("--to", type=Path, default=REPOSITORY)
    parser.add_argument("--measure", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
