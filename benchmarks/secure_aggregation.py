"""Secure sums: ours against Flower's SecAgg+ and the speed of AES, on the same vectors.

    python benchmarks/secure_aggregation.py [--values 10000000]
        [--sites 2 4 16] [--bits 32 16] [--memory-values 100000000]

JSON lines on stdout, one per measurement, the machine first; a table on stderr.
All contenders of a row run in turn, in this process and one thread; times are CPU
time, ratios are medians of the ratios within a turn.

A site: N masks (N - 1 pairwise, one of its own). Ours clips, weights, rounds and
masks in place. Flower's is ``_collect_masked_vectors`` as its mod calls it, which
does not clip by norm; ``flower_arithmetic`` leaves out its key agreement,
decryption and serialisation. The floor is AES-256 in counter mode for N words and
one byte of rounding per parameter, at the speed of the same turn. The same stream
comes faster from inside GCM where the processor has vector AES, so ours may cost
less than the floor; ``ours_plain_ctr`` is ours without that.

The aggregator, per site: adding its vector and removing its own mask.
"""

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

os.environ["OPENBLAS_NUM_THREADS"] = "1"

import machine
import numpy as np
from flwr.app import ConfigRecord
from flwr.common import (
    bytes_to_ndarray,
    ndarray_to_bytes,
    ndarrays_to_parameters,
)
from flwr.common.secure_aggregation import ndarrays_arithmetic as arithmetic
from flwr.common.secure_aggregation.crypto import symmetric_encryption as crypto
from flwr.common.secure_aggregation.quantization import quantize
from flwr.common.secure_aggregation.secaggplus_constants import Key
from flwr.common.secure_aggregation.secaggplus_utils import (
    pseudo_rand_gen,
    share_keys_plaintext_concat,
)
from flwr.supercore.primitives import asymmetric

from federation.vectors import Vector
from privacy import keystream as prg
from privacy.keystream import (
    CHUNK_WORDS,
    SPARE_BYTES,
    FrontKeystream,
    Keystream,
    Mask,
    aligned,
)
from privacy.secagg.arithmetic.accumulator import MaskedSum
from privacy.secagg.arithmetic.measurement import measure
from privacy.secagg.arithmetic.ring import RingSpec
from privacy.secagg.arithmetic.seal import seal_

# By its full name: the package hides the module behind a function called like it.
flower = importlib.import_module("flwr.client.mod.secure_aggregation.secaggplus_mod")

Row = dict[str, object]

WEIGHT = 0.7
FLOOR_BYTES = 1 << 30
# Flower's defaults: see SecAggPlusWorkflow.
CLIPPING_RANGE, TARGET_RANGE, MODULUS, MAX_WEIGHT = 8.0, 1 << 22, 1 << 32, 1000.0


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """An update and what both sides mask it with."""

    num_sites: int
    update_d: Vector
    work_d: Vector  # written over in every turn
    masks: list[Mask] = field(repr=False)
    spec: RingSpec

    @property
    def values(self) -> int:
        return self.update_d.size


def main() -> None:
    args = _arguments()
    if args.memory_child:
        print(json.dumps(_memory_row(args.memory_child)))
        return
    print(json.dumps(machine.facts("secure_aggregation", **vars(args))), flush=True)
    rows: list[Row] = []
    for values in args.values:
        update_d = np.random.default_rng(0).standard_normal(values, dtype=np.float32)
        update_d *= np.float32(1e-3)
        work_d = np.zeros_like(update_d)
        for num_sites in args.sites:
            for bits in args.bits:
                inputs = _inputs(update_d, work_d, num_sites, bits)
                flower_too = bits == args.bits[0] and not (
                    values > args.flower_values and num_sites > args.flower_sites
                )
                rows += _site_rows(inputs, args.repetitions, flower_too=flower_too)
        rows += _aggregator_rows(
            _inputs(update_d, work_d, 64, args.bits[0]), args.repetitions
        )
        del update_d, work_d
    rows += [_in_child(values) for values in args.memory_values]
    for row in rows:
        print(json.dumps(row))
    _table(rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--values", type=int, nargs="+", default=[10_000_000])
    parser.add_argument("--sites", type=int, nargs="+", default=[2, 4, 16])
    parser.add_argument("--bits", type=int, nargs="+", default=[32, 16])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--memory-values", type=int, nargs="*", default=[100_000_000])
    parser.add_argument("--memory-child", type=int, help=argparse.SUPPRESS)
    # Beyond both, Flower is left out: 14 s and 3.2 GB for 1e8 values and 16 sites.
    parser.add_argument("--flower-values", type=int, default=10_000_000)
    parser.add_argument("--flower-sites", type=int, default=4)
    return parser.parse_args()


def _inputs(update_d: Vector, work_d: Vector, num_sites: int, bits: int) -> Inputs:
    norm = measure(update_d).norm
    return Inputs(
        num_sites=num_sites,
        update_d=update_d,
        work_d=work_d,
        masks=[
            Mask(key=bytes([i + 1]) * 32, sign=1 if i % 2 else -1)
            for i in range(num_sites)
        ],
        spec=RingSpec(bits=bits, num_sites=num_sites, clip_norm=0.9 * norm),
    )


def _site_rows(inputs: Inputs, repetitions: int, *, flower_too: bool) -> list[Row]:
    measured = measure(inputs.update_d)

    def ours() -> None:
        seal_(
            inputs.work_d,
            inputs.spec,
            weight=WEIGHT,
            masks=inputs.masks,
            rounding_key=os.urandom(32),
        )

    def ours_measured() -> None:
        seal_(
            inputs.work_d,
            inputs.spec,
            weight=WEIGHT,
            masks=inputs.masks,
            rounding_key=os.urandom(32),
            measured=measured,
        )

    contenders: dict[str, Callable[[], object]] = {
        "ours": ours,
        "ours_norm_known": ours_measured,
        "ours_plain_ctr": lambda: _in_plain_counter_mode(ours),
        "ours_plain_ctr_norm_known": lambda: _in_plain_counter_mode(ours_measured),
    }
    if flower_too:
        contenders["flower"] = _flower_site(inputs)
        contenders["flower_arithmetic"] = lambda: _flower_arithmetic(inputs)
    stream_bytes = inputs.num_sites * inputs.spec.word_bytes + 1
    floors, cpus = _turns(inputs, contenders, repetitions)
    gcm = _seconds_per_byte(FrontKeystream(bytes(32)))
    return [
        _row("site", name, inputs)
        | {
            "cpu_ns_per_value": statistics.median(seconds) / inputs.values * 1e9,
            "aes_gigabytes_per_second": 1 / statistics.median(floors) / 1e9,
            "gcm_gigabytes_per_second": 1 / gcm / 1e9,
            "floor_ns_per_value": stream_bytes * statistics.median(floors) * 1e9,
            "part_of_aes_speed": _ratio(
                [stream_bytes * inputs.values * floor for floor in floors], seconds
            ),
            "times_flower": _ratio(cpus["flower"], seconds) if flower_too else None,
            "flower": "same run" if flower_too else "left out: time and memory",
        }
        for name, seconds in cpus.items()
    ]


def _turns(
    inputs: Inputs, contenders: dict[str, Callable[[], object]], repetitions: int
) -> tuple[list[float], dict[str, list[float]]]:
    """Seconds per byte of AES and seconds of each contender, turn by turn."""
    floors, cpus = [], {name: list[float]() for name in contenders}
    for turn in range(repetitions + 1):
        floor = _seconds_per_byte(Keystream(bytes(32)))
        if turn:  # The first turn warms up.
            floors.append(floor)
        for name, contender in contenders.items():
            if turn == 0 and name.startswith("flower"):
                continue  # It is too slow to be warmed up, and gains nothing by it.
            np.copyto(inputs.work_d, inputs.update_d)
            seconds = _cpu_seconds(contender)
            if turn:
                cpus[name].append(seconds)
    return floors, cpus


def _seconds_per_byte(stream: Keystream) -> float:
    num_bytes = 4 * CHUNK_WORDS
    buffer = aligned(num_bytes + SPARE_BYTES, np.uint8)

    def run() -> None:
        for _ in range(FLOOR_BYTES // num_bytes):
            stream.read_into(buffer, num_bytes)

    return _cpu_seconds(run) / FLOOR_BYTES


def _cpu_seconds(call: Callable[[], object]) -> float:
    start = time.process_time()
    result = call()
    seconds = time.process_time() - start
    del result
    return seconds


def _in_plain_counter_mode(run: Callable[[], None]) -> None:
    """Run as on a processor whose GCM is no faster than its counter mode."""
    choice, prg._gcm_is_faster = prg._gcm_is_faster, lambda: False  # type: ignore[assignment]  # noqa: SLF001
    try:
        run()
    finally:
        prg._gcm_is_faster = choice  # noqa: SLF001


def _flower_site(inputs: Inputs) -> Callable[[], object]:
    """Prepare the stage of Flower's mod that masks, with real keys and shares."""
    keys = [
        [asymmetric.generate_key_pairs() for _ in range(2)]
        for _ in range(inputs.num_sites)
    ]
    private = [[asymmetric.private_key_to_bytes(k[0]) for k in pair] for pair in keys]
    public = [[asymmetric.public_key_to_bytes(k[1]) for k in pair] for pair in keys]
    peers = range(1, inputs.num_sites)
    secrets = {
        i: crypto.generate_shared_key(keys[0][1][0], keys[i][1][1]) for i in peers
    }
    plain = {i: share_keys_plaintext_concat(i, 0, b"b" * 40, b"s" * 40) for i in peers}
    configs = ConfigRecord(
        {
            Key.SOURCE_LIST: list(peers),
            Key.CIPHERTEXT_LIST: [crypto.encrypt(secrets[i], plain[i]) for i in peers],
        }
    )
    parameters = ndarrays_to_parameters([inputs.update_d])

    def run() -> object:
        state = flower.SecAggPlusState(
            nid=0,
            threshold=inputs.num_sites,
            clipping_range=CLIPPING_RANGE,
            target_range=TARGET_RANGE,
            mod_range=MODULUS,
            max_weight=MAX_WEIGHT,
            sk1=private[0][0],
            rd_seed=bytes(range(32)),
        )
        state.rd_seed_share_dict, state.sk1_share_dict = {}, {}
        state.ss2_dict = secrets
        state.public_keys_dict = {i: tuple(public[i]) for i in peers}
        return flower._collect_masked_vectors(  # noqa: SLF001
            state, configs, int(WEIGHT * MAX_WEIGHT), parameters
        )

    return run


def _flower_arithmetic(inputs: Inputs) -> object:
    """The same steps of ``_collect_masked_vectors`` on arrays, and nothing else."""
    ratio = round(WEIGHT * TARGET_RANGE)
    vector = arithmetic.parameters_multiply([inputs.work_d], ratio / TARGET_RANGE)
    vector = quantize(vector, CLIPPING_RANGE, TARGET_RANGE)
    vector = arithmetic.factor_combine(ratio, vector)
    shapes = [a.shape for a in vector]
    for index, mask in enumerate(inputs.masks):
        stream = pseudo_rand_gen(mask.key, MODULUS, shapes)
        add_or_take = (
            arithmetic.parameters_subtraction
            if index % 2
            else arithmetic.parameters_addition
        )
        vector = add_or_take(vector, stream)
    return arithmetic.parameters_mod(vector, MODULUS)


def _aggregator_rows(inputs: Inputs, repetitions: int) -> list[Row]:
    """One fold and one self mask, as each site costs."""
    words = seal_(
        inputs.update_d.copy(),
        inputs.spec,
        weight=WEIGHT,
        masks=inputs.masks[:1],
        rounding_key=bytes(32),
    ).words_w
    total = MaskedSum(inputs.values, inputs.spec)
    flower_sum = [np.zeros(inputs.values, np.int64)]
    flower_bytes = ndarray_to_bytes(np.zeros(inputs.values, np.int64))

    def ours() -> None:
        total.fold_(words)
        total.apply_masks_(inputs.masks[:1])

    def flower_server() -> object:
        vector = [bytes_to_ndarray(flower_bytes)]
        vector = arithmetic.parameters_addition(flower_sum, vector)
        mask = pseudo_rand_gen(
            bytes(range(32)), MODULUS, arithmetic.get_parameters_shape(vector)
        )
        return arithmetic.parameters_subtraction(vector, mask)

    floors, cpus = _turns(inputs, {"ours": ours, "flower": flower_server}, repetitions)
    word_bytes = inputs.spec.word_bytes
    return [
        _row("aggregator", name, inputs)
        | {
            "cpu_ns_per_value": statistics.median(seconds) / inputs.values * 1e9,
            "floor_ns_per_value": word_bytes * statistics.median(floors) * 1e9,
            "times_flower": _ratio(cpus["flower"], seconds),
        }
        for name, seconds in cpus.items()
    ]


def _in_child(values: int) -> Row:
    """Measure in a process of its own: freed memory of this one would be reused."""
    command = [sys.executable, __file__, "--memory-child", str(values)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return dict(json.loads(done.stdout))


def _memory_row(values: int) -> Row:
    """Peak of resident memory above the update itself (Linux)."""
    update_d = np.full(values, 1e-3, np.float32)
    spec = RingSpec(bits=32, num_sites=2, clip_norm=1e3)
    masks = [Mask(key=bytes([i]) * 32, sign=1) for i in range(2)]
    Path("/proc/self/clear_refs").write_text("5")
    before = _status_bytes("VmRSS")
    start = time.process_time()
    seal_(update_d, spec, weight=WEIGHT, masks=masks, rounding_key=os.urandom(32))
    return {
        "measure": "memory",
        "contender": "ours",
        "values": values,
        "sites": 2,
        "bits": 32,
        "extra_peak_bytes": _status_bytes("VmHWM") - before,
        "cpu_seconds": time.process_time() - start,
    }


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return 1024 * int(line.split()[1])
    raise KeyError(name)


def _row(measured: str, contender: str, inputs: Inputs) -> Row:
    return {
        "measure": measured,
        "contender": contender,
        "values": inputs.values,
        "sites": inputs.num_sites,
        "bits": 64 if contender.startswith("flower") else inputs.spec.bits,
    }


def _ratio(theirs: list[float], mine: list[float]) -> float:
    return statistics.median(t / m for t, m in zip(theirs, mine, strict=True))


def _table(rows: list[Row]) -> None:
    head = (
        "measure    contender                     values sites bits  ns/value  floor"
        "  of AES  x"
    )
    print(head, file=sys.stderr)
    for r in rows:
        if r["measure"] == "memory":
            print(
                f"memory     {r['contender']:26} {r['values']:10} "
                f"{r['extra_peak_bytes'] / 1e6:.1f} MB more at the peak",
                file=sys.stderr,
            )
            continue
        part, times = r.get("part_of_aes_speed"), r["times_flower"]
        print(
            f"{r['measure']:10} {r['contender']:26} {r['values']:10} {r['sites']:3}"
            f" {r['bits']:4} {r['cpu_ns_per_value']:9.2f}"
            f" {r['floor_ns_per_value']:6.2f}"
            f" {'-' if part is None else f'{part:.0%}':>6}"
            f" {'-' if times is None else f'{times:.1f}':>6}",
            file=sys.stderr,
        )


if __name__ == "__main__":
    main()
