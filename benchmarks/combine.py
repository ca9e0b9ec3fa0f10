"""Combining updates: ours against Flower's FedAvg and plain loops on the same bytes.

    python benchmarks/combine.py [--values 20000000] [--sites 4 16]
        [--threads 1] [--repetitions 5]

JSON lines on stdout, one per measurement, the machine first; a table on stderr.
All contenders of a row run in turn, several times, in this process; ratios are
medians of the ratios within a turn. The plain loops know the weights' sum before
they start; ours learns it as updates land. Flower's time is its aggregation only:
messages are built before.

Ours and the plain loops are given one update after another, each in memory of its own
that they may write to and that they let go, as the round loop gives it. Filling that
memory is not counted. ``ours`` is given updates that it may only read, and must still
check; its ``ours_read_only`` are the very bytes that Flower's arrays hold.

The last line of a row is the most that a check in a pass of its own can leave of the
best plain loop, if it only reads, at the fastest that was found (CPU time).
"""

import argparse
import json
import logging
import statistics
import sys
import time
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
PLAIN = ("numpy_whole", "numpy_chunked", "torch_add", "torch_first_kept")


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


class Landing:
    """Hands updates over one by one, each in fresh memory that is filled off the clock.

    Attributes:
        wall: Seconds that filling took.
        cpu: Of the process.
    """

    def __init__(self, inputs: Inputs) -> None:
        self.wall = self.cpu = 0.0
        self._inputs = inputs

    def deltas(self) -> Iterator[tuple[Vector, float]]:
        """Each with its share."""
        for delta_d, share in zip(
            self._inputs.deltas, self._inputs.shares, strict=True
        ):
            wall, cpu = time.perf_counter(), time.process_time()
            fresh_d = delta_d.copy()
            self.wall += time.perf_counter() - wall
            self.cpu += time.process_time() - cpu
            yield fresh_d, share
            del fresh_d

    def updates(self) -> Iterator[WeightedUpdate]:
        """Those that the rule may write to."""
        weights = self._inputs.weights
        for i, (delta_d, _) in enumerate(self.deltas()):
            yield WeightedUpdate(
                site=SiteId(f"site-{i}"),
                delta_d=delta_d,
                weight=weights[i],
                handed_over=True,
            )
            del delta_d

    def read_only(self) -> Iterator[WeightedUpdate]:
        """Those that it may only read: where Flower's arrays hold them."""
        for i, weight in enumerate(self._inputs.weights):
            delta_d = self._inputs.deltas[i]
            yield WeightedUpdate(
                site=SiteId(f"site-{i}"), delta_d=delta_d, weight=weight
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
    parser.add_argument("--values", type=int, default=20_000_000)
    parser.add_argument("--sites", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
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


def _flower(inputs: Inputs, _: Landing) -> Vector:
    arrays, _ = FedAvg().aggregate_train(1, inputs.replies)
    # Its values stay in Flower's serialised form; decoding them is not counted.
    assert arrays is not None
    return arrays["delta"]


def _flower_inner(inputs: Inputs, _: Landing) -> Vector:
    contents = [reply.content for reply in inputs.replies]
    return aggregate_arrayrecords(contents, WEIGHT_KEY)["delta"]


def _numpy_whole(inputs: Inputs, landing: Landing) -> Vector:
    out_d, tmp_d, is_first = inputs.out_d, inputs.tmp_d, True
    for delta_d, share in landing.deltas():
        if is_first:
            np.multiply(delta_d, np.float32(share), out=out_d)
        else:
            np.multiply(delta_d, np.float32(share), out=tmp_d)
            np.add(out_d, tmp_d, out=out_d)
        is_first = False
        del delta_d
    return out_d


def _numpy_chunked(inputs: Inputs, landing: Landing) -> Vector:
    out_d, tmp_c, is_first = inputs.out_d, inputs.tmp_d[: 2 * CHUNK_VALUES], True
    for delta_d, share in landing.deltas():
        if is_first:
            np.multiply(delta_d, np.float32(share), out=out_d)
        else:
            for piece in chunks(out_d.size, tmp_c.size):
                scaled_c = tmp_c[: piece.stop - piece.start]
                np.multiply(delta_d[piece], np.float32(share), out=scaled_c)
                np.add(out_d[piece], scaled_c, out=out_d[piece])
        is_first = False
        del delta_d
    return out_d


def _torch_add(inputs: Inputs, landing: Landing) -> Vector:
    out, is_first = torch.from_numpy(inputs.out_d), True
    for delta_d, share in landing.deltas():
        if is_first:
            torch.mul(torch.from_numpy(delta_d), share, out=out)
        else:
            out.add_(torch.from_numpy(delta_d), alpha=share)
        is_first = False
        del delta_d
    return inputs.out_d


def _torch_first_kept(_inputs: Inputs, landing: Landing) -> Vector:
    """As ``_torch_add``, but the sum is in the memory of the first update."""
    out_d: Vector | None = None
    for delta_d, share in landing.deltas():
        if out_d is None:
            out_d = delta_d
            torch.from_numpy(out_d).mul_(share)
        else:
            torch.from_numpy(out_d).add_(torch.from_numpy(delta_d), alpha=share)
        del delta_d
    assert out_d is not None
    return out_d


def _ours(inputs: Inputs, landing: Landing) -> Vector:
    return weighted_mean(landing.updates(), inputs.out_d)


def _ours_read_only(inputs: Inputs, landing: Landing) -> Vector:
    return weighted_mean(landing.read_only(), inputs.out_d)


def _check_only(inputs: Inputs, _: Landing) -> bool:
    return all(is_finite(delta_d) for delta_d in inputs.deltas)


def _read_once(inputs: Inputs, _: Landing) -> None:
    """Read every update, two places at once, on one thread and without a verdict."""
    for delta_d in inputs.deltas:
        for piece in chunks(delta_d.size, 1 << 20):
            part_c = delta_d[piece]
            num_rows = part_c.size // 8192  # Less than a row is left out.
            first, second = part_c[: num_rows * 8192].reshape(2, -1, 4096)
            np.vecdot(first, second)


CONTENDERS: dict[str, Callable[[Inputs, Landing], object]] = {
    "flower_fedavg": _flower,
    "flower_inner": _flower_inner,
    "numpy_whole": _numpy_whole,
    "numpy_chunked": _numpy_chunked,
    "torch_add": _torch_add,
    "torch_first_kept": _torch_first_kept,
    "ours": _ours,
    "ours_read_only": _ours_read_only,
    "check_only": _check_only,
    "read_once": _read_once,
}


def timed(name: str, inputs: Inputs) -> tuple[float, float]:
    """Wall and CPU seconds of a contender, without those of filling its updates."""
    landing = Landing(inputs)
    wall, cpu = time.perf_counter(), time.process_time()
    result = CONTENDERS[name](inputs, landing)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    del result
    return wall - landing.wall, cpu - landing.cpu


def _measure(inputs: Inputs, threads: int, repetitions: int) -> list[dict[str, object]]:
    walls = {name: list[float]() for name in CONTENDERS}
    cpus = {name: list[float]() for name in CONTENDERS}
    for turn in range(repetitions + 1):
        for name in CONTENDERS:
            wall, cpu = timed(name, inputs)
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
            "ours_cpu": _ratio(plain_cpu, cpus["ours"]),
            "read_only_cpu": _ratio(plain_cpu, cpus["ours_read_only"]),
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
            "times_best_plain_cpu": _ratio(plain_cpu, cpus[name]),
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
        weighted_mean(Landing(inputs).updates(), np.empty_like(inputs.out_d))

    model_bytes = 4 * inputs.out_d.size
    num_sites = len(inputs.deltas)
    rows = []
    for name, call, held in (
        ("flower_fedavg", lambda: _flower(inputs, Landing(inputs)), num_sites),
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
        "sites threads contender          wall s   cpu s   GB/s  x flower (cpu)"
        "  x plain (cpu)"
    )
    print(head, file=sys.stderr)
    for r in rows:
        if r["measure"] == "time":
            print(
                f"{r['sites']:5} {r['threads']:7} {r['contender']:18}"
                f" {r['wall_seconds']:7.3f} {r['cpu_seconds']:7.3f}"
                f" {r['gigabytes_per_second']:6.1f} {r['times_flower_wall']:8.2f}"
                f" {r['times_flower_cpu']:6.2f} {r['times_best_plain']:8.2f}"
                f" {r['times_best_plain_cpu']:6.2f}",
                file=sys.stderr,
            )
    for r in rows:
        if r["measure"] == "ceiling":
            print(
                f"{r['sites']:5} {r['threads']:7} by CPU time, ours has "
                f"{r['ours_cpu']:.2f} of the best plain loop; read only "
                f"{r['read_only_cpu']:.2f}, of which {r['ceiling']:.2f} is the most",
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
