"""Memory of an aggregator's round: the model in memory, and in files.

    python benchmarks/server_memory.py [--values 50000000] [--sites 3] [--smoke]

Each way runs in a process of its own. A round folds updates that only map files, as
they come out of a store, takes a step of Nesterov momentum and saves a checkpoint. Two
rounds are run; the digest shows that both ways make the same model. Memory is the
process's resident set, in models of four bytes a value, beyond that of before there was
a model: its peak, and what stays afterwards. The kernel's cache of files is not part
of it.

JSON lines on stdout, the machine first; a table on stderr.
"""

import argparse
import hashlib
import json
import mmap
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import machine
import numpy as np

from aggregator.checkpoint import RunCheckpoints
from aggregator.combine import weighted_mean
from cloud_adapters.storage.disk.scratch import ScratchVectors
from cloud_adapters.storage.disk.store import LocalStore
from federation.clock import SystemClock
from federation.ids import SiteId
from federation.job.spec import ServerOptimizerSpec
from federation.protocols import RunState, WeightedUpdate
from federation.rounds.server_optimizer import server_optimizer, take_step
from federation.vectors import Layout, Role, Vector, in_memory, is_finite, norm, place

WAYS, ROUNDS, FLOAT_BYTES, KIB = ("memory", "disk"), 2, 4, 1024
_PIECE = 1 << 20


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--values", type=int, default=50_000_000)
    parser.add_argument("--sites", type=int, default=3)
    parser.add_argument("--smoke", action="store_true", help="a small model")
    parser.add_argument("--way", choices=WAYS, help="run one, in this process")
    asked = parser.parse_args(arguments)
    values = 1_000_000 if asked.smoke else asked.values
    if asked.way:
        print(json.dumps(measured(asked.way, values, asked.sites)))
        return
    print(json.dumps(machine.facts("server_memory", values=values, sites=asked.sites)))
    print("way     peak  after  seconds  (models of memory)", file=sys.stderr)
    for way in WAYS:
        size = ["--values", str(values), "--sites", str(asked.sites)]
        command = [sys.executable, __file__, *size, "--way", way]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout)
        print(json.dumps(found))
        print(
            f"{way:6} {found['peak_models']:5.2f} {found['after_models']:6.2f} "
            f"{found['seconds']:8.1f}",
            file=sys.stderr,
        )


def measured(way: str, values: int, sites: int) -> dict[str, object]:
    """Run two rounds."""
    layout = Layout.build([("weight", (values,), "float32", Role.PARAMETER)])
    optimizer = server_optimizer(ServerOptimizerSpec(name="nesterov", lr=0.7))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        updates = [_on_disk(folder / f"{site}", values, site) for site in range(sites)]
        allocate = ScratchVectors(folder=folder) if way == "disk" else in_memory
        checkpoints = RunCheckpoints(
            store=LocalStore(folder / "store"),
            prefix="checkpoints/",
            run_id="run",
            job={},
            layout=layout,
            keep=2,
            emit=lambda _event: None,
            clock=SystemClock(),
            allocate=allocate,
        )
        before = _kib("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # The peak begins here.
        start = time.perf_counter()
        theta_d, spare_d = allocate(values), allocate(values)
        moments = {
            key: place(moment_d, allocate)
            for key, moment_d in optimizer.init(values).items()
        }
        for index in range(1, ROUNDS + 1):
            delta_d = weighted_mean(_landing(updates), spare_d)
            norm(delta_d)
            new_d = take_step(
                optimizer, layout, weights_d=theta_d, moments=moments, delta_f=delta_d
            )
            theta_d, spare_d = new_d, theta_d
            assert all(map(is_finite, (theta_d, *moments.values())))
            state = RunState(
                round_index=index,
                weights_d=theta_d,
                integers_m=np.zeros(0, np.int64),
                optimizer=moments,
                rounds_completed=index,
                lost_in_a_row=0,
            )
            checkpoints.save(state)
        seconds = time.perf_counter() - start
        peak, after = _kib("VmHWM"), _kib("VmRSS")
        digest = hashlib.sha256(theta_d.data).hexdigest()
    model_kib = FLOAT_BYTES * values / KIB
    return {
        "way": way,
        "peak_models": (peak - before) / model_kib,
        "after_models": (after - before) / model_kib,
        "seconds": seconds,
        "model": digest[:16],
    }


def _on_disk(path: Path, values: int, seed: int) -> Vector:
    """An update that only maps a file."""
    rng = np.random.default_rng(seed)
    with path.open("w+b") as file:
        for start in range(0, values, _PIECE):
            size = min(_PIECE, values - start)
            file.write(rng.standard_normal(size, np.float32).tobytes())
        file.flush()
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return np.frombuffer(mapped, np.float32)


def _landing(updates: Sequence[Vector]) -> Iterator[WeightedUpdate]:
    for number, delta_d in enumerate(updates):
        site = SiteId(f"site-{number}")
        yield WeightedUpdate(site=site, delta_d=delta_d, weight=1.0 + number)


def _kib(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (found,) = (line for line in lines if line.startswith(f"{name}:"))
    return int(found.split()[1])


if __name__ == "__main__":
    main()
