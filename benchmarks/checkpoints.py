"""Checkpoints of a large model: memory, time and bytes, in ratios.

Each step is a process of its own, so that its peak of resident memory is its own too;
memory that was there before the step is taken off. Held against it: one pass of SHA-256
over the model, and the safetensors library's own file, written and flushed.
"""

import argparse
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import safetensors.numpy
from machine import facts

from aggregator.checkpoint import RunCheckpoints
from cloud_adapters.storage.disk.store import LocalStore
from federation.clock import SystemClock
from federation.protocols import RunState
from federation.vectors import IntegerVector, Layout, Role, Vector

NUM_TENSORS = 64
STEPS = ("digest", "library", "library_load", "save", "delta", "load")
ONE_PER_CENT = 100


def main() -> None:
    """Run every step, or one of them in this process."""
    parser = argparse.ArgumentParser(description="Measure checkpoints.")
    parser.add_argument("--megabytes", type=int, default=1000, help="of the model")
    parser.add_argument("--folder", type=Path, help="on the disk to measure")
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step:
        print(json.dumps(measure(options.step, options.folder, options.megabytes)))
        return
    print(json.dumps(facts("checkpoints", megabytes=options.megabytes)))
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        rows = {name: run_step(name, folder, options.megabytes) for name in STEPS}
    finally:
        shutil.rmtree(folder)
    for name, row in rows.items():
        row["seconds_per_digest"] = row["seconds"] / rows["digest"]["seconds"]
        print(json.dumps({"step": name, **row}))
        print(
            f"{name:<13} {row['seconds']:7.2f} s  {row['seconds_per_digest']:5.2f} "
            f"digests  memory {row['memory_per_model']:5.3f} models  written "
            f"{row['written_per_model']:5.3f} models",
            file=sys.stderr,
        )


def run_step(name: str, folder: Path, megabytes: int) -> dict[str, float]:
    """Measure a step in a process of its own."""
    words = [sys.executable, __file__, "--step", name, "--folder", str(folder)]
    words += ["--megabytes", str(megabytes)]
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def measure(name: str, folder: Path, megabytes: int) -> dict[str, float]:
    """Time a step, and say by how much it raised the peak of memory."""
    values = megabytes * 1_000_000 // (4 * NUM_TENSORS)
    layout = Layout.build(
        [(f"x{i}", (values,), "float32", Role.PARAMETER) for i in range(NUM_TENSORS)]
    )
    model_bytes = 4 * layout.size
    checkpoints = RunCheckpoints(
        store=LocalStore(folder / "run"),
        prefix="checkpoints/",
        run_id="run",
        job={},
        layout=layout,
        keep=3,
        emit=lambda _: None,
        clock=SystemClock(),
    )
    if name == "delta":
        state = checkpoints.load_latest()
        assert state is not None
        state.weights_d[: layout.size // ONE_PER_CENT] += 1
        weights_d, integers_m = state.weights_d, state.integers_m
    elif name.endswith("load"):
        weights_d, integers_m = np.zeros(0, np.float32), np.zeros(0, np.int64)
    else:
        weights_d = np.random.default_rng(0).random(layout.size, dtype=np.float32)
        integers_m = np.zeros(0, np.int64)
    act = step(name, folder, checkpoints, layout, (weights_d, integers_m))
    clock = SystemClock()
    before, start = _peak_bytes(), clock.monotonic()
    written = act()
    seconds = clock.monotonic() - start
    return {
        "seconds": seconds,
        "memory_per_model": (_peak_bytes() - before) / model_bytes,
        "written_per_model": written / model_bytes,
    }


def step(
    name: str,
    folder: Path,
    checkpoints: RunCheckpoints,
    layout: Layout,
    vectors: tuple[Vector, IntegerVector],
) -> Callable[[], int]:
    """What a step does; it returns the bytes that it has written."""
    weights_d, integers_m = vectors
    file = folder / "library.safetensors"

    def digest() -> int:
        hashlib.sha256(weights_d.data).digest()
        return 0

    def library() -> int:
        tensors = {spec.name: part for spec, part in layout.float_views(weights_d)}
        safetensors.numpy.save_file(tensors, file)
        with file.open("rb") as written:
            os.fsync(written.fileno())
        return file.stat().st_size

    def library_load() -> int:
        safetensors.numpy.load_file(file)
        return 0

    def save() -> int:
        return checkpoints.save(
            RunState(
                round_index=2 if name == "delta" else 1,
                weights_d=weights_d,
                integers_m=integers_m,
                optimizer={},
                rounds_completed=1,
                lost_in_a_row=0,
            )
        )

    def load() -> int:
        assert checkpoints.load_latest() is not None
        return 0

    acts = (digest, library, library_load, save, save, load)
    return dict(zip(STEPS, acts, strict=True))[name]


def _peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    main()
