"""Memory of a round at an aggregator and a site: vectors in memory, or in files.

    python benchmarks/model_memory.py [--values 50000000] [--sites 3] [--smoke]

Each row runs in a process of its own. Memory is the process's resident set, in models
of four bytes a value. The kernel's cache of files is not part of it. The digests show
that both ways give the same bits.

An aggregator folds updates that only map files, as they come out of a store, takes a
step of Nesterov momentum and saves a checkpoint, in each of two rounds. Memory counts
from before there was a model: its peak, and what stays between rounds.

A site encodes an update in four bits with error feedback, and stores what that leaves
out, in each of three rounds. Memory counts beyond the update and the model that
training holds: its peak, and what the residual takes while the site trains.

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
from itertools import product
from pathlib import Path

import machine
import numpy as np

from aggregator.checkpoint import RunCheckpoints
from aggregator.combine import weighted_mean
from clients.training.error_feedback import ErrorFeedback
from clients.training.site_state import SiteState
from cloud_adapters.storage.disk.scratch import ScratchVectors
from cloud_adapters.storage.disk.store import LocalStore
from federation.clock import SystemClock
from federation.compression.choice import codec_of
from federation.compression.codec import Links
from federation.ids import RunId, SiteId
from federation.job.spec import ServerOptimizerSpec
from federation.mapped import give_back
from federation.messages import RoundTask, TaskKind
from federation.protocols import LocalUpdate, RunState, WeightedUpdate
from federation.rounds.server_optimizer import server_optimizer, take_step
from federation.vectors import (
    Layout,
    Role,
    Vector,
    chunks,
    in_memory,
    is_finite,
    norm,
    place,
)

PARTIES, WAYS = ("aggregator", "site"), ("memory", "disk")
ROUNDS, SITE_ROUNDS, FLOAT_BYTES, KIB = 2, 3, 4, 1024
_PIECE = 1 << 20


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--values", type=int, default=50_000_000)
    parser.add_argument("--sites", type=int, default=3)
    parser.add_argument("--smoke", action="store_true", help="a small model")
    parser.add_argument("--party", choices=PARTIES, help="run one, in this process")
    parser.add_argument("--way", choices=WAYS, default=WAYS[0], help="of that")
    asked = parser.parse_args(arguments)
    values = 1_000_000 if asked.smoke else asked.values
    if asked.party == PARTIES[0]:
        print(json.dumps(aggregator(asked.way, values, asked.sites)))
        return
    if asked.party:
        print(json.dumps(site(asked.way, values)))
        return
    print(json.dumps(machine.facts("model_memory", values=values, sites=asked.sites)))
    print("party      way     peak  between  seconds  (models)", file=sys.stderr)
    for party, way in product(PARTIES, WAYS):
        size = ["--values", str(values), "--sites", str(asked.sites)]
        row = ["--party", party, "--way", way]
        command = [sys.executable, __file__, *size, *row]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout)
        print(json.dumps(found))
        print(
            f"{party:10} {way:6} {found['peak_models']:5.2f} "
            f"{found['between_models']:8.2f} {found['seconds']:8.1f}",
            file=sys.stderr,
        )


def aggregator(way: str, values: int, sites: int) -> dict[str, object]:
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
        "party": "aggregator",
        "way": way,
        "peak_models": (peak - before) / model_kib,
        "between_models": (after - before) / model_kib,
        "seconds": seconds,
        "digest": digest[:16],
    }


def site(way: str, values: int) -> dict[str, object]:
    """Run three rounds: the first has no residual yet."""
    layout = Layout.build([("weight", (values,), "float32", Role.PARAMETER)])
    links, name, run = Links(up=codec_of("int4"), feedback=1.0), SiteId("a"), RunId("r")
    words = hashlib.sha256()
    with tempfile.TemporaryDirectory() as place_:
        folder = Path(place_)
        theta_d = _on_disk(folder / "theta", values, 0)
        update_d, between = np.empty(values, np.float32), 0
        state = SiteState(
            name,
            layout,
            LocalStore(folder / "store"),
            codec="int4",
            allocate=ScratchVectors(folder=folder) if way == "disk" else in_memory,
        )
        update_d[:] = 0.0
        before = _kib("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # The peak begins here.
        start = time.perf_counter()
        for index in range(1, SITE_ROUNDS + 1):
            feedback = ErrorFeedback(links, _task(run, name, index, theta_d))
            feedback.begin(state.before(run, index), values)
            for piece in chunks(values):  # It trains.
                update_d[piece] = theta_d[piece] * np.float32(index)
                give_back(theta_d[piece])
            between = _kib("VmRSS")
            update = LocalUpdate(
                update_d=update_d,
                integers_m=np.zeros(0, np.int64),
                num_examples=1,
                num_steps=1,
                training=None,
            )
            words.update(feedback.encode(theta_d, update).data)
            state.keep(run, index, *feedback.left())
            del feedback
        seconds, peak = time.perf_counter() - start, _kib("VmHWM")
    model_kib = FLOAT_BYTES * values / KIB
    return {
        "party": "site",
        "way": way,
        "peak_models": (peak - before) / model_kib,
        "between_models": (between - before) / model_kib,
        "seconds": seconds,
        "digest": words.hexdigest()[:16],
    }


def _task(run: RunId, site: SiteId, index: int, theta_d: Vector) -> RoundTask:
    return RoundTask(
        run_id=run,
        round_index=index,
        site=site,
        kind=TaskKind.TRAIN,
        layout_digest="0" * 64,
        weights_d=theta_d,
        integers_m=np.zeros(0, np.int64),
        evaluate=False,
        evaluate_after=False,
        counted=index - 1,
    )


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
