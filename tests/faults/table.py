"""Results for people: a line each, and the tables of ``RESULTS.md``."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from faults.cells import MATRIX, Cell, Deed, Mode, Victim
from faults.trial import Result

BEGIN, END = "<!-- results: make test-faults -->", "<!-- end of results -->"
Row = Mapping[str, Any]  # A result, as it is in the file of results.


def line(result: Result) -> str:
    """A result in one line, and what is wrong below it."""
    head = (
        f"{'BAD ' if result.faults else 'ok  '} {result.name:32} "
        f"{result.outcome:16} lost {_ranges(result.lost) or '-'}; "
        f"reduced {_ranges(result.reduced) or '-'}; {result.seconds:.0f} s"
    )
    return "\n".join([head, *(f"     {fault}" for fault in result.faults)])


def fill_in(page: str, results: Iterable[str]) -> str:
    """Replace the tables of a page by the newest results of a file."""
    rows = {row["cell"]: row for row in map(json.loads, results)}
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    tables = "\n\n".join(_table(mode, rows) for mode in Mode)
    return f"{before}{BEGIN}\n\n{_summary(rows)}\n\n{tables}\n\n{END}{after}"


def row_of(result: Result, date: str) -> Row:
    """A result for the file of results."""
    return {
        "cell": result.name,
        "date": date,
        "outcome": result.outcome,
        "faults": list(result.faults),
        "lost": list(result.lost),
        "reduced": list(result.reduced),
        "seconds": round(result.seconds, 1),
    }


def _summary(rows: Mapping[str, Row]) -> str:
    cells = [cell for cell in MATRIX if not cell.senseless]
    done = [rows[cell.name] for cell in cells if cell.name in rows]
    good = sum(not row["faults"] for row in done)
    dates = sorted({row["date"] for row in done}) or ["never"]
    when = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    return (
        f"`make test-faults`, {when}: {len(done)} of {len(cells)} cells were run, "
        f"and {good} passed."
    )


def _table(mode: Mode, rows: Mapping[str, Row]) -> str:
    head = ["", *Deed]
    body = [
        [
            f"**{victim}**",
            *(_entry(Cell(victim=victim, deed=deed, mode=mode), rows) for deed in Deed),
        ]
        for victim in Victim
    ]
    lines = [head, ["---"] * len(head), *body]
    return "\n".join([f"### {mode}\n", *(f"| {' | '.join(each)} |" for each in lines)])


def _entry(cell: Cell, rows: Mapping[str, Row]) -> str:
    if cell.senseless:
        return ""
    row = rows.get(cell.name)
    if row is None:
        return "not run"
    words = ["**BAD**"] if row["faults"] else []
    if row["outcome"] != "completed":
        words.append(row["outcome"])
    if row["lost"]:
        words.append(f"lost {_ranges(row['lost'])}")
    if row["reduced"]:
        words.append(f"without it {_ranges(row['reduced'])}")
    return ", ".join(words) or "none"


def _ranges(rounds: Sequence[int]) -> str:
    """Round numbers, neighbours together: ``3, 7-9``."""
    found: list[list[int]] = []
    for index in sorted(rounds):
        if found and found[-1][-1] == index - 1:
            found[-1].append(index)
        else:
            found.append([index])
    return ", ".join(
        str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in found
    )
