"""Every figure of the documents that the project grew from, run again here.

    python studies/seeds/study.py                # all cases, 5 seeds: 15 minutes
    python studies/seeds/study.py --only all     # one case
    python studies/seeds/study.py --page         # only writes page and pictures
    python studies/seeds/study.py --smoke        # seconds; its figures do not count

Rows are JSON lines, in `studies/seeds/measured.jsonl` or `--out`; rows in it are not
run again. From them, and from those of the study of thin lines, follow
`docs/explanation/claims.md` and its pictures; `--to` writes them to another folder, in
which they have the same places.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
THIN_LINES = HERE.parent / "thin_lines"
sys.path[:0] = [str(HERE.parent), str(THIN_LINES), str(REPOSITORY / "benchmarks")]

import machine  # noqa: E402 -- beside the benchmarks
import pictures  # noqa: E402 -- of the study of thin lines
import report  # noqa: E402
import results  # noqa: E402
from results import Result, table_line  # noqa: E402
from seeds import scenarios, verdicts  # noqa: E402

PAGE = Path("docs/explanation/claims.md")
IMAGES = Path("docs/images")

_INTRODUCTION = """# What the first documents claim, and what crossfed measures

crossfed grew from four documents about training in clouds. This page puts every figure
that they state beside ours. `python studies/seeds/study.py` runs it again and writes
this page; `--only CASE` in the last column runs one part, and links lead to other
commands.

*Reproduced* means that ours is at least as good, or within 10 % as a ratio. No document
states a model, its data, a line and a scheduler together, and their hardware is not
here. So a perceptron on handwritten digits is trained for real, in
[virtual time](../howto/virtual-time.md): its steps and messages last as long as those
of ResNet-50 would on the machines of Huang's section 5.1.1. Where seeds matter, figures
are medians of five, with their range. Assumed is:
"""
_AFTER = """## What crossfed does without

- **HDFS:** data stay at their sites, so nothing needs a file system that sites share;
  mount it at a site, or read it in
  [your own source](../howto/own-model-and-data.md).
- **TPU:** PyTorch reaches one only through XLA, on which we could test neither private
  steps nor exact resume; use `cuda` or `cpu`.
- **FPGA** (and quantum processors): PyTorch has no device for training on one; wrap it
  in a module with gradients of your own.
- **Horovod:** it averages gradients at every step, which thin lines cannot carry;
  inside a site, [`compute.ranks`](../howto/several-gpus.md) does that with DDP.
- **TensorFlow:** privacy, resume and export are exact for one framework only; a
  TensorFlow model can take part as an
  [existing Flower app](../howto/existing-flower-app.md), without privacy.
"""


def measure(
    cases: Iterable[str], seeds: int, rounds: int, out: Path
) -> Iterator[Result]:
    """Run cases of which a file has no rows of this length yet, and add them."""
    for case in cases:
        key = results.key_of(case=case, seeds=seeds, rounds=rounds)
        known = {row["of"] for row in results.finished(out).values()}
        if key in known:
            continue
        rows = list(scenarios.rows_of(case, seeds, rounds))
        for number, row in enumerate(rows):
            results.add(out, {"key": f"{key}-{number}", "of": key, **row})
        yield from rows


def page(found: Sequence[tuple[str, verdicts.Verdict]]) -> str:
    """Write the page."""
    lines = [_INTRODUCTION]
    lines += [f"- {what}: {text}" for what, text in scenarios.ASSUMED.items()]
    words = (verdicts.REPRODUCED, verdicts.REFUTED, verdicts.NEITHER)
    has = [{word for word in words if word in one.verdict} for _, one in found]
    lines.append(
        f"\nOf {len(found)} rows, {has.count({words[0]})} reproduce their claim, "
        f"{has.count({words[1]})} refute it, {has.count(set(words[:2]))} do either, "
        f"depending on a condition, and {has.count({words[2]})} cannot be compared."
    )
    for document, rows in groupby(found, key=lambda each: each[0]):
        lines += ["", f"## {document.partition(',')[0]}", "", f"{document}.", ""]
        lines += [table_line("place", "claim", "here", "verdict", "command")]
        lines += [table_line(*["---"] * 5)]
        lines += _table(verdict for _, verdict in rows)
        lines += ["", _ALL] if document == verdicts.HUANG else []
    lines += ["", _ARTICLE, _AFTER]
    return "\n".join(lines)


def _table(rows: Iterable[verdicts.Verdict]) -> Iterator[str]:
    """Write rows; what the row above says too is not repeated."""
    before = verdicts.Verdict("", "", "", "", "")
    for row in rows:
        shown = row
        if (row.place, row.claim) == (before.place, before.claim):
            shown = shown._replace(place="", claim="")
        if row.here == before.here:
            shown = shown._replace(here="as above")
        yield table_line(*shown)
        before = row


_ARTICLE = """## The article

Yuanjie Computing, *How can companies maximize the use of their computing resources?*,
lists seventeen methods and no figure;
[each is measured or refused](seventeen-methods.md).
"""
_ALL = """Everything off is synchronous training: one step a round, in float32, with
static work. All rows take as many steps:

![Virtual time of each combination, of all off](../images/claims-all.svg)

Dynamic allocation saves what the sites' speeds differ by:

![Time of dynamic allocation by ratio of speeds](../images/claims-dynamic.svg)

![Share of training by number of nodes](../images/claims-nodes.svg)
"""


def drawings(rows: Sequence[Result]) -> Mapping[str, str]:
    """Draw the pictures: SVG text by name."""
    table = verdicts.Rows(rows)
    less = [
        (
            ratio,
            100
            * table.ratio(
                "seconds", "heterogeneity", "static", "capacity", ratio=ratio
            ),
        )
        for ratio in scenarios.RATIOS
    ]
    nodes: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row["case"] == "nodes":
            point = (row["nodes"], 100 * row["trains"])
            nodes.setdefault(row["variant"], []).append(point)
    bars: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["case"] == "all":
            line = f"{row['mbit'] / 1000:g} Gbit/s"
            bars.setdefault(line, {})[row["variant"]] = 100 * table.ratio(
                "seconds", "all", scenarios.OFF, row["variant"], mbit=row["mbit"]
            )
    claim = [(ratio, 75.0) for ratio in scenarios.RATIOS]
    return {
        "dynamic": pictures.curves(
            {"measured, virtual time": less, "claimed": claim},
            ("speed of the fast sites, of the slow ones", "time, % of static"),
        ),
        "nodes": pictures.curves(
            nodes, ("nodes", "share of time that nodes train, %"), log=True
        ),
        "all": pictures.bars(bars, "virtual time, % of all off"),
    }


def write(rows: Sequence[Result], to: Path) -> None:
    """Write the page and its pictures below a folder."""
    thin = {
        name: [
            row
            for file in files
            for row in results.finished(THIN_LINES / "measured" / file).values()
        ]
        for name, files in {
            "loss": ["loss.jsonl"],
            "warm": ["10M.jsonl"],
            "baselines": ["baselines.jsonl"],
            "utilisation": ["utilisation.jsonl"],
        }.items()
    }
    thin["utilisation"] = report.with_dense(thin)
    many = results.finished(HERE.parent / "unequal_sites" / "measured.jsonl")
    most: dict[str, int] = {}
    for row in many.values():
        if row["part"] == "sites":
            most[row["way"]] = max(row["sites"], most.get(row["way"], 0))
    found = list(verdicts.verdicts(verdicts.Rows(rows), thin, min(most.values())))
    for folder in (PAGE.parent, IMAGES):
        (to / folder).mkdir(parents=True, exist_ok=True)
    (to / PAGE).write_text(page(found))
    for name, text in drawings(rows).items():
        (to / IMAGES / f"claims-{name}.svg").write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--only", nargs="+", choices=scenarios.CASES, default=scenarios.CASES
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=scenarios.ROUNDS)
    parser.add_argument("--out", type=Path, default=HERE / "measured.jsonl")
    parser.add_argument("--to", type=Path, default=REPOSITORY)
    parser.add_argument("--page", action="store_true", help="run nothing")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    if options.smoke:
        options.seeds, options.rounds = 1, 4  # In fewer, capacity does less work.
    if not options.page:
        print(json.dumps(machine.facts("claims")), flush=True)
        for _ in measure(options.only, options.seeds, options.rounds, options.out):
            pass
    rows = list(results.finished(options.out).values())
    if {row["case"] for row in rows} == {*scenarios.CASES}:
        write(rows, options.to)
        print(options.to / PAGE, file=sys.stderr)


if __name__ == "__main__":
    main()
