"""Combining updates: ours against Flower's FedAvg and plain loops on the same bytes.

    python benchmarks/combine.py [--values 100000000] [--sites 4 16]

JSON lines on stdout, one per measurement, the machine first; a table on stderr.
All contenders of a row run in turn, several times, in this process; ratios are
medians of the ratios within a turn. The plain loops know the weights' sum before
they start; ours learns it as updates land. Flower's time is its aggregation only:
messages are built before. Ours reads the very bytes that Flower's arrays hold.

The last line of a row is the most that a check in a pass of its own can leave of the
best plain loop, if it only reads, at the fastest that was found (CPU time).
"""

import argparse
import json
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import machine
import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords
from flwr.supercore.task_identity import TaskIdentity

from aggregator.combine import weighted_mean
from federation.ids import SiteId
from federation.protocols import WeightedUpdate
from federation.vectors import CHUNK_VALUES, Vector, chunks, is_finite

WEIGHT_KEY = "num-examples"
PLAIN = ("numpy_whole", "numpy_chunked", "torch_add")


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The same updates in Flower's form and in ours."""

    replies: list[Message]
    deltas: list[Vector]
    weights: list[float]
    out_d: Vector
    tmp_d: Vector

    @property
    def shares(self) -> list[float]:
        return [w / sum(self.weights) for w in self.weights]

    def updates(self, *, copied: bool = False) -> Iterator[WeightedUpdate]:
        """Hand updates over one by one; copied, as if each came off the wire."""
        for i, weight in enumerate(self.weights):
            delta_d = self.deltas[i]
            yield WeightedUpdate(
                site=SiteId(f"site-{i}"),
                delta_d=delta_d.copy() if copied else delta_d,
                weight=weight,
            )


def main() -> None:
    args = _arguments()
    logging.getLogger("flwr").setLevel(logging.WARNING)
    print(json.dumps(machine.facts("combine", **vars(args))), flush=True)
    rows = []
    for num_sites in args.sites:
        inputs = _inputs(num_sites, args.values)
        for threads in args.threads:
            torch.set_num_threads(threads)
            rows += _measure(inputs, threads, args.repetitions)
        rows += _memory(inputs)
        del inputs
    for row in rows:
        print(json.dumps(row))
    _table(rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--values", type=int, default=100_000_000)
    parser.add_argument("--sites", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repetitions", type=int, default=5)
    return parser.parse_args()


def _inputs(num_sites: int, values: int) -> Inputs:
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    rng = np.random.default_rng(0)
    replies, deltas = [], []
    weights = [float(w) for w in rng.integers(1_000, 50_000, num_sites)]
    for i, weight in enumerate(weights):
        array = Array(rng.standard_normal(values, dtype=np.float32))
        # An .npy file in memory: ten bytes and a header before the values.
        start = 10 + int.from_bytes(array.data[8:10], "little")
        deltas.append(np.frombuffer(array.data, np.float32, offset=start))
        content = RecordDict(
            {
                "arrays": ArrayRecord({"delta": array}),
                "metrics": MetricRecord({WEIGHT_KEY: int(weight)}),
            }
        )
        task = Message(RecordDict(), dst_node_id=i + 1, message_type="train")
        replies.append(Message(content, reply_to=task))
    return Inputs(
        replies=replies,
        deltas=deltas,
        weights=weights,
        out_d=np.zeros(values, np.float32),
        tmp_d=np.zeros(values, np.float32),
    )


def _flower(inputs: Inputs) -> Vector:
    arrays, _ = FedAvg().aggregate_train(1, inputs.replies)
    # Its values stay in Flower's serialised form; decoding them is not counted.
    assert arrays is not None
    return arrays["delta"]


def _flower_inner(inputs: Inputs) -> Vector:
    contents = [reply.content for reply in inputs.replies]
    return aggregate_arrayrecords(contents, WEIGHT_KEY)["delta"]


def _numpy_whole(inputs: Inputs) -> Vector:
    out_d, tmp_d = inputs.out_d, inputs.tmp_d
    np.multiply(inputs.deltas[0], np.float32(inputs.shares[0]), out=out_d)
    for delta_d, share in zip(inputs.deltas[1:], inputs.shares[1:], strict=True):
        np.multiply(delta_d, np.float32(share), out=tmp_d)
        np.add(out_d, tmp_d, out=out_d)
    return out_d


def _numpy_chunked(inputs: Inputs) -> Vector:
    out_d, tmp_c = inputs.out_d, inputs.tmp_d[: 2 * CHUNK_VALUES]
    np.multiply(inputs.deltas[0], np.float32(inputs.shares[0]), out=out_d)
    for delta_d, share in zip(inputs.deltas[1:], inputs.shares[1:], strict=True):
        for piece in chunks(out_d.size, tmp_c.size):
            scaled_c = tmp_c[: piece.stop - piece.start]
            np.multiply(delta_d[piece], np.float32(share), out=scaled_c)
            np.add(out_d[piece], scaled_c, out=out_d[piece])
    return out_d


def _torch_add(inputs: Inputs) -> Vector:
    out = torch.from_numpy(inputs.out_d)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # Read-only, and only read.
        deltas = [torch.from_numpy(delta_d) for delta_d in inputs.deltas]
    torch.mul(deltas[0], inputs.shares[0], out=out)
    for delta, share in zip(deltas[1:], inputs.shares[1:], strict=True):
        out.add_(delta, alpha=share)
    return inputs.out_d


def _ours(inputs: Inputs) -> Vector:
    return weighted_mean(inputs.updates(), inputs.out_d)


def _ours_checked(inputs: Inputs) -> Vector:
    finite = (u for u in inputs.updates() if is_finite(u.delta_d))
    return weighted_mean(finite, inputs.out_d)


def _check_only(inputs: Inputs) -> bool:
    return all(is_finite(delta_d) for delta_d in inputs.deltas)


def _read_once(inputs: Inputs) -> None:
    """Read every update, two places at once, on one thread and without a verdict."""
    for delta_d in inputs.deltas:
        for piece in chunks(delta_d.size, 1 << 20):
            part_c = delta_d[piece]
            num_rows = part_c.size // 8192  # Less than a row is left out.
            first, second = part_c[: num_rows * 8192].reshape(2, -1, 4096)
            np.vecdot(first, second)


CONTENDERS: dict[str, Callable[[Inputs], object]] = {
    "flower_fedavg": _flower,
    "flower_inner": _flower_inner,
    "numpy_whole": _numpy_whole,
    "numpy_chunked": _numpy_chunked,
    "torch_add": _torch_add,
    "ours": _ours,
    "ours_checked": _ours_checked,
    "check_only": _check_only,
    "read_once": _read_once,
}


def _measure(inputs: Inputs, threads: int, repetitions: int) -> list[dict[str, object]]:
    walls = {name: list[float]() for name in CONTENDERS}
    cpus = {name: list[float]() for name in CONTENDERS}
    for turn in range(repetitions + 1):
        for name, contender in CONTENDERS.items():
            wall, cpu = time.perf_counter(), time.process_time()
            result = contender(inputs)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            del result
            if turn:  # The first turn warms up.
                walls[name].append(wall)
                cpus[name].append(cpu)
    best_plain = [min(turn) for turn in zip(*(walls[n] for n in PLAIN), strict=True)]
    num_bytes = 4 * inputs.out_d.size * len(inputs.deltas)
    plain_cpu = [min(turn) for turn in zip(*(cpus[n] for n in PLAIN), strict=True)]
    reads = zip(plain_cpu, cpus["read_once"], strict=True)
    return [
        {
            "measure": "ceiling",
            "sites": len(inputs.deltas),
            "threads": threads,
            "check_only_to_read_once": _ratio(cpus["check_only"], cpus["read_once"]),
            "checked_cpu": _ratio(plain_cpu, cpus["ours_checked"]),
            "ceiling": statistics.median(p / (p + r) for p, r in reads),
        }
    ] + [
        {
            "measure": "time",
            "contender": name,
            "sites": len(inputs.deltas),
            "threads": threads,
            "wall_seconds": statistics.median(walls[name]),
            "cpu_seconds": statistics.median(cpus[name]),
            "gigabytes_per_second": num_bytes / statistics.median(walls[name]) / 1e9,
            "times_flower_wall": _ratio(walls["flower_fedavg"], walls[name]),
            "times_flower_cpu": _ratio(cpus["flower_fedavg"], cpus[name]),
            "times_best_plain": _ratio(best_plain, walls[name]),
        }
        for name in CONTENDERS
    ]


def _ratio(theirs: list[float], mine: list[float]) -> float:
    return statistics.median(t / m for t, m in zip(theirs, mine, strict=True))


def _memory(inputs: Inputs) -> list[dict[str, object]]:
    """Peak memory beyond the inputs, in models of 4 d bytes.

    Flower needs all N updates at the same time, which are counted to it. Ours gets
    a fresh copy of each update when it asks for it, and a fresh array to fill.
    """

    def stream() -> None:
        out_d = np.empty_like(inputs.out_d)
        weighted_mean(inputs.updates(copied=True), out_d)

    model_bytes = 4 * inputs.out_d.size
    num_sites = len(inputs.deltas)
    rows = []
    for name, call, held in (
        ("flower_fedavg", lambda: _flower(inputs), num_sites),
        ("ours", stream, 0),
    ):
        peak_bytes = _extra_peak_bytes(call)
        rows.append(
            {
                "measure": "memory",
                "contender": name,
                "sites": num_sites,
                "extra_peak_bytes": peak_bytes,
                "peak_models": round(held + peak_bytes / model_bytes, 2),
            }
        )
    return rows


def _extra_peak_bytes(call: Callable[[], object]) -> int:
    """Peak of resident memory above where it stood (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _status_bytes("VmRSS")
    result = call()
    peak = _status_bytes("VmHWM")
    del result
    return peak - before


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return 1024 * int(line.split()[1])
    raise KeyError(field)


def _table(rows: list[dict[str, object]]) -> None:
    head = (
        "sites threads contender       wall s   cpu s   GB/s  x flower (cpu)  x plain"
    )
    print(head, file=sys.stderr)
    for r in rows:
        if r["measure"] == "time":
            print(
                f"{r['sites']:5} {r['threads']:7} {r['contender']:15}"
                f" {r['wall_seconds']:7.3f} {r['cpu_seconds']:7.3f}"
                f" {r['gigabytes_per_second']:6.1f} {r['times_flower_wall']:8.2f}"
                f" {r['times_flower_cpu']:6.2f} {r['times_best_plain']:8.2f}",
                file=sys.stderr,
            )
    for r in rows:
        if r["measure"] == "ceiling":
            print(
                f"{r['sites']:5} {r['threads']:7} checked: {r['checked_cpu']:.2f} of "
                f"the best plain loop by CPU time, at most {r['ceiling']:.2f}",
                file=sys.stderr,
            )
        if r["measure"] == "memory":
            print(
                f"{r['sites']:5} sites: {r['contender']} held at most "
                f"{r['peak_models']} models",
                file=sys.stderr,
            )


if __name__ == "__main__":
    main()
