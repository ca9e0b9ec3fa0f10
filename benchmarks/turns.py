"""What changed between two commits, in turns: CPU time, memory, and deployed rounds.

    python benchmarks/turns.py [OLD] [NEW] [--cases 'secure-*' ...] [--pairs 15]
        [--starts 3]

OLD and NEW are commits or folders with a checkout; by default the last commit and the
working folder. Commits are checked out as worktrees of git into a temporary folder,
which is removed. Both run with this interpreter and its packages, each in a virtual
environment that holds its checkout only.

For each case of ``turn_cases.py`` a process per side does one unit of work for each
pair, one after the other; the two sides begin in turn. The first unit of a process is
not counted. Some processes are slower than others for as long as they live: so new
ones start after each part of the pairs. Times are CPU times of the process but where
the measure says otherwise. The ratio, new over old, is the median of the pairs' ratios,
because machines are shared; its quartiles stand beside it. ``peak_mib`` is the most
memory that a process of each side took (``ru_maxrss``).

The default is three cases of a minute; ``--cases '*'`` is all of them, for hours.

JSON lines on stdout, the machine first; a table on stderr.
"""

import argparse
import contextlib
import fnmatch
import json
import os
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Self

import machine
import turn_cases

HERE = Path(__file__).resolve().parent

SHORT = ("secure-5", "rounds-100", "encrypted-read-small")

Row = dict[str, Any]
Sides = tuple["Checkout", "Checkout"]


@dataclass(frozen=True, kw_only=True)
class Checkout:
    """One side: its files, and a Python that imports them."""

    name: str
    folder: Path
    python: Path


@contextlib.contextmanager
def checkout(what: str, place: Path) -> Iterator[Checkout]:
    """A folder as it is, or a commit in a worktree that is removed."""
    if Path(what).is_dir():
        folder = Path(what).resolve()
        yield Checkout(name=what, folder=folder, python=environment(folder, place))
        return
    git = ["git", "-C", str(HERE)]
    done = subprocess.run(
        [*git, "rev-parse", "--short", f"{what}^{{commit}}"],
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"turns.py: {what!r} is neither a folder nor a commit here")
    folder = place / "checkout"
    subprocess.run(
        [*git, "worktree", "add", "--quiet", "--detach", str(folder), what], check=True
    )
    try:
        python = environment(folder, place)
        yield Checkout(name=done.stdout.strip(), folder=folder, python=python)
    finally:
        subprocess.run([*git, "worktree", "remove", "--force", str(folder)], check=True)


def environment(folder: Path, place: Path) -> Path:
    """A virtual environment with this one's packages and a checkout's own.

    ``PYTHONPATH`` would not do: services start with ``-I``, which ignores it.
    """
    venv.EnvBuilder(symlinks=True).create(place / "venv")
    paths = {"base": str(place / "venv"), "platbase": str(place / "venv")}
    packages = Path(sysconfig.get_path("purelib", "venv", paths))
    # Only as folders: the files in them that add an editable checkout are not read.
    shared = [path for path in sys.path if path.endswith("-packages")]
    (packages / "checkout.pth").write_text("\n".join([str(folder), *shared]))
    scripts = Path(sysconfig.get_path("scripts", "venv", paths))
    python = scripts / "python"
    for script in entry_points(group="console_scripts"):
        # Checkouts before the package `crossfed` have this module alone.
        module = script.module.replace("crossfed.__main__", "deploy.cli")
        if module.split(".")[0] in {"deploy", "flwr"}:
            call = f"sys.exit({script.attr}())"
            (scripts / script.name).write_text(
                f"#!{python}\nimport sys\nfrom {module} import {script.attr}\n{call}\n"
            )
            (scripts / script.name).chmod(0o755)
    return python


class Worker:
    """A process that does a unit of a case's work whenever it is asked to."""

    def __init__(self, side: Checkout, case: str) -> None:
        without = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
        self.peak_mib = 0.0
        self._what = f"{case} of {side.name}"
        self._process = subprocess.Popen(
            [
                *(side.python, "-P", HERE / "turn_cases.py"),
                *("--worker", side.folder, case),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=side.folder,
            env={name: os.environ[name] for name in os.environ.keys() - without},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def unit(self) -> dict[str, float]:
        """Do one unit; what it took, by the name of the measure."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"turns.py: {self._what} ended before its last turn")
        answer = json.loads(line)
        self.peak_mib = answer["peak_mib"]
        return dict(answer["seconds"])


def measure(sides: Sides, case: str, pairs: int, starts: int) -> Iterator[Row]:
    """A row for each measure of a case."""
    found: list[tuple[dict[str, float], dict[str, float]]] = []
    loads, peaks = [], [0.0, 0.0]
    for number in range(min(starts, pairs)):
        with Worker(sides[0], case) as old, Worker(sides[1], case) as new:
            old.unit()  # Imports, and what else only the first unit does.
            new.unit()
            while len(found) < pairs * (number + 1) // min(starts, pairs):
                if len(found) % 2:
                    second = new.unit()
                    found.append((old.unit(), second))
                else:
                    found.append((old.unit(), new.unit()))
                loads.append(os.getloadavg()[0])
            peaks = [max(peaks[0], old.peak_mib), max(peaks[1], new.peak_mib)]
    for name in found[0][0]:
        olds, news = [[turn[side][name] for turn in found] for side in (0, 1)]
        ratios = [mine / theirs for theirs, mine in zip(olds, news, strict=True)]
        yield {
            "case": case,
            "measure": name,
            "pairs": pairs,
            "starts": min(starts, pairs),
            "load": round(statistics.median(loads), 1),
            "old": spread(olds),
            "new": spread(news),
            "ratio": round(statistics.median(ratios), 3),
            "quartiles": quartiles(ratios),
            "ratio_of_minima": round(min(news) / min(olds), 3),
            "peak_mib": [round(peak, 1) for peak in peaks],
        }


def spread(seconds: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(seconds), "minimum": min(seconds)}


def quartiles(ratios: Sequence[float]) -> list[float]:
    if len(ratios) == 1:
        return [round(ratios[0], 3)] * 2
    cuts = statistics.quantiles(ratios, n=4, method="inclusive")
    return [round(cuts[0], 3), round(cuts[-1], 3)]


def line_of(row: Row) -> str:
    def text(seconds: dict[str, float]) -> str:
        return f"{1e3 * seconds['median']:9.2f} ms ({1e3 * seconds['minimum']:.2f})"

    low, high = row["quartiles"]
    old_mib, new_mib = row["peak_mib"]
    what = (
        row["case"] if row["measure"] == "CPU" else f"{row['case']}, {row['measure']}"
    )
    return (
        f"{what:34} {row['pairs']:>3} {row['load']:>5} {text(row['old']):>23} "
        f"{text(row['new']):>23} {row['ratio']:6.2f} ({low:.2f} to {high:.2f})"
        f"  {old_mib:.0f}, {new_mib:.0f} MiB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", nargs="?", default="HEAD")
    parser.add_argument("new", nargs="?", default=str(HERE.parent))
    parser.add_argument("--cases", nargs="+", default=SHORT, metavar="CASE")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--starts", type=int, default=3, help="of the two processes")
    args = parser.parse_args()
    if args.pairs < 1 or args.starts < 1:
        parser.error("--pairs and --starts are 1 at least")
    cases = [
        name
        for name in turn_cases.CASES
        if any(fnmatch.fnmatch(name, pattern) for pattern in args.cases)
    ]
    if not cases:
        parser.error(f"no such case; there are {', '.join(turn_cases.CASES)}")
    # So that the worktrees are removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with contextlib.ExitStack() as stack:
        places = [
            Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in range(2)
        ]
        old = stack.enter_context(checkout(args.old, places[0]))
        new = stack.enter_context(checkout(args.new, places[1]))
        facts = machine.facts("turns", old=old.name, new=new.name)
        print(json.dumps(facts), flush=True)
        print(
            f"{'case':34} pairs load {'old (minimum)':>23} {'new (minimum)':>23}"
            "  ratio (quartiles)  peak of memory",
            file=sys.stderr,
        )
        for case in cases:
            for row in measure((old, new), case, args.pairs, args.starts):
                print(json.dumps(row), flush=True)
                print(line_of(row), file=sys.stderr)


if __name__ == "__main__":
    main()
