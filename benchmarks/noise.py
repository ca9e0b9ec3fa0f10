"""Noise: samples per second and core, against generators that are no secret.

    python benchmarks/noise.py [--values 10000000] [--repetitions 7]

JSON lines on stdout, one per measurement, the machine first; a table on stderr. All
contenders run in turn, in this process and one thread, into memory that is touched
beforehand; times are CPU time, ratios medians of the ratios within a turn.

Ours is exact and from AES. ``torch.normal`` (float32) and NumPy's ``normal`` (float64,
the generator that Flower's mechanisms use) are neither; they say what noise costs
where nobody minds. ``release`` is the whole mechanism: rounding, noise, scaling.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable

import machine
import numpy as np
import torch

from privacy.dp import noise
from privacy.dp.mechanism import GaussianMechanism
from privacy.dp.noise import RoundedGaussian
from privacy.dp.poisson import poisson_indices
from privacy.keystream import open_keystream

SIGMAS = (4.0, 64.0, 682.0, 4096.0, 1.0e5, 2.0**26)
CHUNK = 1 << 16


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--values", type=int, default=10_000_000)
    parser.add_argument("--repetitions", type=int, default=7)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(machine.facts("noise", **vars(chosen))))
    for sigma in SIGMAS:
        row = {"measure": "table", "sigma": sigma, "cpu_seconds": _build(sigma)}
        print(json.dumps(row))
        print(f"tables of {sigma:12.0f} {row['cpu_seconds']:.3f} s", file=sys.stderr)
    contenders = _contenders(chosen.values)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(chosen.repetitions):
        for name, work in contenders.items():
            start = time.process_time()
            work()
            times[name].append(time.process_time() - start)
    for name, seconds in times.items():
        _report(name, seconds, times["torch.normal"], chosen.values)


def _build(sigma: float) -> float:
    noise._table.cache_clear()  # noqa: SLF001  # Building is what is measured.
    start = time.process_time()
    _ = RoundedGaussian(sigma=sigma).largest
    return time.process_time() - start


def _contenders(values: int) -> dict[str, Callable[[], object]]:
    integers_d = np.zeros(values, np.int32)
    floats_d = np.zeros(values, np.float32)
    doubles_d = np.zeros(CHUNK)
    tensor_d = torch.zeros(values)
    rng = np.random.default_rng(1)
    old = np.random.RandomState(1)
    mechanism = GaussianMechanism(clip_norm=1.0, noise_multiplier=1.0, size=values)

    def ours(sigma: float) -> Callable[[], object]:
        gaussian = RoundedGaussian(sigma=sigma)
        num_bytes = values * gaussian.bytes_per_draw
        return lambda: gaussian.add_(
            integers_d, open_keystream(os.urandom(32), num_bytes=num_bytes)
        )

    def generator() -> None:
        for _ in range(0, values, CHUNK):
            rng.standard_normal(out=doubles_d)

    def flowers() -> None:
        for _ in range(0, values, CHUNK):
            old.normal(0, 1.0, CHUNK)

    def poisson() -> object:
        stream = open_keystream(os.urandom(32), num_bytes=8 * values)
        return poisson_indices(values, 0.01, stream)

    return {
        **{f"ours {sigma:.0f}": ours(sigma) for sigma in SIGMAS},
        "release": lambda: mechanism.release_(floats_d),
        "poisson": poisson,
        "torch.normal": lambda: tensor_d.normal_(0, 1.0),
        "Generator.standard_normal": generator,
        "RandomState.normal": flowers,
    }


def _report(
    name: str, seconds: list[float], reference: list[float], values: int
) -> None:
    ratio = statistics.median(r / s for r, s in zip(reference, seconds, strict=True))
    speed = values / statistics.median(seconds)
    row = {"measure": "speed", "contender": name, "values_per_second": speed}
    print(json.dumps(row | {"times_torch": ratio}))
    print(f"{name:26} {speed / 1e6:7.1f} M/s {ratio:6.2f}", file=sys.stderr)


if __name__ == "__main__":
    main()
