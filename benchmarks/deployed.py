"""What a deployed federation's way costs: rounds over a real SuperLink, without work.

    python benchmarks/deployed.py [--only tiny] [--mb 100] [--rounds 2]
        [--tiny-rounds 30] [--flower-rounds 2] [--many 2 4] [--many-mb 100]

A SuperLink with TLS, node keys and SQLite, a ServerApp with our grid, and sites in
processes of their own that answer with the model that they got; all on this machine.

- Large: one site, a model of so many MB through a store in a folder, and back. Peaks of
  memory are of a process's own pages (``own``), and of these and mapped files together
  (``resident``), which the kernel can take back. Then the same model with all that is
  Flower's own, whose state is kept in memory: with SQLite it fails at 1 GB. Even so a
  busy machine can end it: a database that is locked for seconds is an error 500.
- Tiny: two sites, a model of ten values: what is left is overhead. The same in turn
  with Flower's own SuperNodes, grid and FedAvg at such a SuperLink, with apps that
  import nothing and that import torch.
- Killed: two sites, one of which is killed while it works: until that is known.
- Many: the aggregator's memory with more and more sites.

JSON lines on stdout, the machine first; a table on stderr.
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Self

import machine

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path.insert(0, str(TESTS))

# Flower reads them when it is imported, here and in the sites' processes.
_QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
os.environ.update(_QUIET)

from support import exchange_app, superlink  # noqa: E402
from support.mirror_site import DEAF  # noqa: E402

from federation.clock import SystemClock  # noqa: E402
from privacy.membership.certificates import key_pem, new_key  # noqa: E402

Row = dict[str, Any]

MB, FLOAT_BYTES = 1_000_000, 4
LOOK_SECONDS = 0.05


class Peaks:
    """The most memory that processes use in its context, by looking again and again."""

    def __init__(self, processes: dict[str, int]) -> None:
        self._processes = processes
        self._ended = threading.Event()
        self.own: dict[str, float] = {}
        self.resident: dict[str, float] = {}
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            for name, pid in self._processes.items():
                found = exchange_app.memory(str(pid))
                self.own[name] = max(self.own.get(name, 0.0), found["own_mb"])
                self.resident[name] = found["peak_mb"]


def cpu_seconds(processes: dict[str, int]) -> dict[str, float]:
    """What processes have used of the processor so far."""
    found = {}
    for name, pid in processes.items():
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        found[name] = sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
    return found


@contextlib.contextmanager
def federation(
    names: list[str], num_floats: int, *, with_store: bool
) -> Iterator[tuple[superlink.SuperLink, Path, dict[str, int]]]:
    """Start everything; yields the SuperLink, the folder and the processes."""
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.ExitStack() as stack,
        superlink.serve(Path(folder)) as server,
    ):
        place = Path(folder)
        store = str(place / "store") if with_store else ""
        processes = {
            "superlink": server.pid,
            "serverapp": server.ask("call", function="support.exchange_app:process"),
        }
        for name in names:
            key = new_key()
            (place / f"{name}.pem").write_bytes(key_pem(key))
            (place / f"{name}.pem").chmod(0o600)
            server.register(key)
            started = subprocess.Popen(
                [
                    *(sys.executable, "-m", "support.mirror_site", name),
                    *(str(num_floats), server.address, str(place), store),
                ],
                cwd=TESTS,
                stdin=subprocess.PIPE,
            )
            stack.callback(started.wait)
            stack.callback(started.kill)
            processes[name] = started.pid
        yield server, place, processes


def large(num_mb: int, num_rounds: int) -> Row:
    """Time a large model's way to one site and back."""
    num_floats = num_mb * MB // FLOAT_BYTES
    with federation(["one"], num_floats, with_store=True) as parts:
        server, place, processes = parts
        before = cpu_seconds(processes)
        seconds, wrong = [], []
        with Peaks(processes) as peaks:
            for _ in range(num_rounds):
                found = server.ask(
                    "call",
                    function="support.exchange_app:rounds",
                    sites=["one"],
                    num_floats=num_floats,
                    num_rounds=1,
                    folder=str(place),
                )
                seconds += found["seconds"]
                wrong += found["wrong"]
        after = cpu_seconds(processes)
    return {
        "model_mb": num_mb,
        "seconds": [round(each, 2) for each in seconds],
        "wrong": wrong,
        "cpu_seconds_a_round": {
            name: round((after[name] - before[name]) / num_rounds, 2) for name in after
        },
        "own_peak_mb": {name: round(peak) for name, peak in peaks.own.items()},
        "resident_peak_mb": {n: round(peak) for n, peak in peaks.resident.items()},
    }


def tiny(num_rounds: int) -> Row:
    """Time rounds of two sites with next to nothing to send."""
    names = ["one", "two"]
    with federation(names, 10, with_store=False) as (server, _, processes):
        ask = partial(
            server.ask,
            "call",
            function="support.exchange_app:rounds",
            sites=names,
            num_floats=10,
            folder="",
        )
        ask(num_rounds=1)  # Connects, and imports what is not there yet.
        before = cpu_seconds(processes)
        found = ask(num_rounds=num_rounds)
        after = cpu_seconds(processes)
    return spread("ours", found["seconds"]) | {
        "wrong": found["wrong"],
        "superlink_cpu_seconds_a_round": round(
            (after["superlink"] - before["superlink"]) / num_rounds, 3
        ),
    }


@contextlib.contextmanager
def flowers(
    names: list[str], *, database: str = "state.db", imports: str = ""
) -> Iterator[superlink.SuperLink]:
    """Start a SuperLink and Flower's own nodes, whose apps import a module."""
    with (
        tempfile.TemporaryDirectory() as folder,
        superlink.serve(Path(folder), database=database) as server,
    ):
        for name in names:
            server.start_flower_node(name, new_key(), CLIENT_IMPORTS=imports)
        superlink.wait_for(
            lambda: len(server.online()) == len(names), "nodes are there"
        )
        yield server


def tiny_of_flower(num_rounds: int, imports: str) -> Row:
    """Time the same with all that is Flower's own; its apps import a module."""
    with flowers(["one", "two"], imports=imports) as server:
        found = server.ask(
            "call",
            function="support.exchange_app:fedavg",
            num_floats=10,
            num_rounds=num_rounds,
        )
    return spread(f"Flower's own, {imports or 'numpy'}", found["seconds"])


def large_of_flower(num_mb: int, num_rounds: int) -> Row:
    """Time the same with all that is Flower's own."""
    with flowers(["one"], database=":flwr-in-memory:") as server:
        app = server.ask("call", function="support.exchange_app:process")
        seconds = []
        with Peaks({"superlink": server.pid, "serverapp": app}) as peaks:
            for _ in range(num_rounds):
                found = server.ask(
                    "call",
                    function="support.exchange_app:fedavg",
                    num_floats=num_mb * MB // FLOAT_BYTES,
                    num_rounds=1,
                )
                seconds += found["seconds"]
    return {
        "Flower's own, model_mb": num_mb,
        "seconds": [round(each, 2) for each in seconds],
        "own_peak_mb": {name: round(peak) for name, peak in peaks.own.items()},
    }


def large_beside_flower(num_mb: int, num_rounds: int) -> Iterator[Row]:
    """Ours, and Flower's own."""
    ours = large(num_mb, num_rounds)
    yield ours
    theirs = large_of_flower(num_mb, num_rounds)
    yield theirs
    times = [statistics.median(row["seconds"]) for row in (theirs, ours)]
    yield {"large: Flower's median over ours": round(times[0] / times[1], 1)}


def spread(what: str, seconds: list[float]) -> Row:
    """Describe the times of rounds."""
    cuts = statistics.quantiles(seconds, n=20, method="inclusive")
    return {
        "tiny": what,
        "rounds": len(seconds),
        "median_seconds": round(statistics.median(seconds), 3),
        "p95_seconds": round(cuts[-1], 3),
        "max_seconds": round(max(seconds), 3),
    }


def beside_flower(num_rounds: int, num_flower_rounds: int) -> Iterator[Row]:
    """Ours, Flower's own, and ours again: the load may change meanwhile."""
    ours = [tiny(num_rounds)]
    yield ours[0]
    if not num_flower_rounds:
        return
    theirs = [tiny_of_flower(num_flower_rounds, name) for name in ("", "torch")]
    yield from theirs
    ours.append(tiny(num_rounds))
    yield ours[1]
    median = statistics.mean(row["median_seconds"] for row in ours)
    yield {
        "tiny": "Flower's median over ours",
        **{row["tiny"]: round(row["median_seconds"] / median, 1) for row in theirs},
    }


def killed() -> Row:
    """Time how long it takes to know that a site was killed."""
    names = ["one", DEAF]
    with federation(names, 10, with_store=False) as (server, place, processes):
        times: list[float] = []

        def kill() -> None:
            superlink.wait_for((place / DEAF).exists, "it works")
            os.kill(processes[DEAF], signal.SIGKILL)
            times.append(SystemClock().now())

        killer = threading.Thread(target=kill)
        killer.start()
        found = server.ask(
            "call", function="support.exchange_app:detect", sites=names, deaf=DEAF
        )
        killer.join()
    return {"killed site known after seconds": round(found - times[0], 1)}


def many(num_sites: int, num_mb: int) -> Row:
    """Look at the aggregator's memory while many sites answer at once."""
    names = [f"site-{index}" for index in range(num_sites)]
    num_floats = num_mb * MB // FLOAT_BYTES
    with federation(names, num_floats, with_store=True) as parts:
        server, place, processes = parts
        aggregator = {name: processes[name] for name in ("superlink", "serverapp")}
        with Peaks(aggregator) as peaks:
            found = server.ask(
                "call",
                function="support.exchange_app:rounds",
                sites=names,
                num_floats=num_floats,
                num_rounds=2,
                folder=str(place),
            )
    return {
        "sites": num_sites,
        "model_mb": num_mb,
        "wrong": found["wrong"],
        "seconds": [round(each, 2) for each in found["seconds"]],
        "own_peak_mb": {name: round(peak) for name, peak in peaks.own.items()},
    }


def measures(args: argparse.Namespace) -> Iterator[Row]:
    """Everything that was asked for."""
    if args.only in ("", "tiny"):
        yield from beside_flower(args.tiny_rounds, args.flower_rounds)
    if args.only in ("", "killed"):
        yield killed()
    if args.only in ("", "many"):
        for num_sites in args.many:
            yield many(num_sites, args.many_mb)
    if args.only in ("", "large"):
        yield from large_beside_flower(args.mb, args.rounds)


def main() -> None:
    """Measure, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", default="", choices=["tiny", "killed", "many", "large"]
    )
    parser.add_argument("--mb", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tiny-rounds", type=int, default=30)
    parser.add_argument("--flower-rounds", type=int, default=2, help="0 for ours alone")
    parser.add_argument("--many", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--many-mb", type=int, default=100)
    args = parser.parse_args()
    print(json.dumps(machine.facts("deployed")))
    for found in measures(args):
        row = found | {"load": round(os.getloadavg()[0], 1)}
        print(json.dumps(row), flush=True)
        for name, value in row.items():
            print(f"{name:32} {value}", file=sys.stderr)


if __name__ == "__main__":
    main()
