"""Few levels: nanoseconds per value and core, beside words of 32 bits.

    python benchmarks/few_levels.py [--values 8000000] [--levels 4] [--sites 4]
        [--repetitions 7] [--smoke]

JSON lines on stdout, one per contender, the machine first; a table on stderr. All run
in turn in one process and one thread, into memory that is touched beforehand; times are
CPU time, the best and the median of the turns.

`encode` is what a site does after training, from an update whose norm is known to words
that may leave: error feedback, rotation, rounding, packing, and the masks of all pairs.
`decode` is the sum from words to the mean. Rows of `part` are steps of these alone.
"""

import argparse
import json
import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import statistics
import sys
import time
from collections.abc import Callable, Sequence

import machine
import numpy as np

from federation.compression.rotation import (
    BLOCK_VALUES,
    Rotation,
    num_blocks,
    padded,
)
from privacy.keystream import Mask, apply_masks_
from privacy.secagg.arithmetic.accumulator import MaskedSum
from privacy.secagg.arithmetic.digits import Digits
from privacy.secagg.arithmetic.level_sum import LevelSum, rotation_of
from privacy.secagg.arithmetic.levels import LevelSite, next_plan
from privacy.secagg.arithmetic.measurement import measure
from privacy.secagg.arithmetic.ring import RingSpec
from privacy.secagg.arithmetic.seal import seal_

NANOSECONDS = 1e9
Contenders = dict[str, tuple[Callable[[], object], Callable[[], object]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--values", type=int, default=8_000_000)
    parser.add_argument("--levels", type=int, default=4)
    parser.add_argument("--sites", type=int, default=4)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--smoke", action="store_true", help="20,000 values, once")
    chosen = parser.parse_args()
    if chosen.smoke:
        chosen.values, chosen.repetitions = 20_000, 1
    print(json.dumps(machine.facts("few_levels", **vars(chosen))))
    contenders = _contenders(chosen.values, chosen.levels, chosen.sites)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(chosen.repetitions):
        for name, (before, work) in contenders.items():
            before()
            start = time.process_time()
            work()
            times[name].append(time.process_time() - start)
    for name, seconds in times.items():
        kind, contender = name.split(": ")
        best, middle = (
            NANOSECONDS * found / chosen.values
            for found in (min(seconds), statistics.median(seconds))
        )
        row = {"measure": kind, "contender": contender, "ns_per_value": middle}
        print(json.dumps(row | {"best_ns_per_value": best}))
        print(f"{name:34} {middle:6.2f} ns (best {best:.2f})", file=sys.stderr)


def _nothing() -> None:
    """Prepare nothing."""


def _contenders(size: int, levels: int, num_sites: int) -> Contenders:
    """Pairs of what prepares a turn, untimed, and what is timed."""
    rng = np.random.default_rng(1)
    update_d = rng.standard_normal(size, dtype=np.float32)
    measured = measure(update_d)
    clip_norm = 1.01 * measured.norm
    masks = [Mask(key=os.urandom(32), sign=1) for _ in range(num_sites - 1)]
    plan = next_plan(
        levels,
        energies_b=np.ones(num_blocks(size)),
        variance=measured.norm**2 / padded(size),
    )
    assert plan is not None  # Of a sum that is not 0.
    digits = Digits(levels=levels, num_sites=num_sites)
    rotation = rotation_of("run-1")
    site = LevelSite(plan=plan, digits=digits, rotation=rotation, clip_norm=clip_norm)
    residual_d = np.zeros(padded(size), np.float32)
    ring = RingSpec(bits=32, num_sites=num_sites, clip_norm=clip_norm)
    copy_d = update_d.copy()

    def encode_ring() -> object:
        key = os.urandom(32)
        return seal_(
            copy_d, ring, weight=1.0, masks=masks, rounding_key=key, measured=measured
        )

    def encode_levels() -> object:
        return site.seal_(
            update_d, weight=1.0, residual_d=residual_d, masks=masks, measured=measured
        )

    few = LevelSum(
        size, plan, num_sites=num_sites, rotation=rotation, clip_norm=clip_norm
    )
    sealed = site.seal_(
        update_d, weight=1.0, residual_d=np.zeros_like(residual_d), masks=()
    )
    many = MaskedSum(size, ring)
    key = os.urandom(32)
    words = seal_(copy_d, ring, weight=1.0, masks=(), rounding_key=key).words_w.copy()
    for _ in range(num_sites):
        few.fold_(sealed.words_w.view(np.uint8))
        many.fold_(words)
    total = float(num_sites)
    return {
        f"encode: {levels} levels": (_nothing, encode_levels),
        "encode: 32 bits": (lambda: np.copyto(copy_d, update_d), encode_ring),
        f"decode: {levels} levels": (
            _nothing,
            lambda: few.decode(divisor=total, weight=total),
        ),
        "decode: 32 bits": (
            _decodable(many),
            lambda: many.decode(divisor=total, weight=total),
        ),
        **_parts(size, digits, rotation, masks),
    }


def _parts(
    size: int, digits: Digits, rotation: Rotation, masks: Sequence[Mask]
) -> Contenders:
    """The steps of which encoding is made."""
    whole_d = np.zeros(padded(size), np.float32)
    out_d = np.empty_like(whole_d)
    lanes_w = np.zeros(digits.num_words(size), np.uint64)
    words_w = np.zeros(size, np.uint32)
    drawn = np.random.default_rng(2).integers(0, digits.levels, padded(size))
    numbers_d = drawn.astype(np.float32)

    def rotate() -> None:
        step = digits.per_word * BLOCK_VALUES
        for begin in range(0, whole_d.size, step):
            part = slice(begin, begin + step)
            rotation.forward(whole_d[part], out=out_d[part])

    def pack() -> None:
        for group in digits.groups(size):
            digits.pack(
                numbers_d[group.begin : group.end], lanes_w[group.first : group.last]
            )

    return {
        "part: rotate": (_nothing, rotate),
        "part: pack": (_nothing, pack),
        "part: mask digits": (_nothing, lambda: apply_masks_(lanes_w, masks)),
        "part: mask 32 bits": (_nothing, lambda: apply_masks_(words_w, masks)),
    }


def _decodable(total: MaskedSum) -> Callable[[], object]:
    """Put a sum's words back, since decoding writes the mean over them."""
    words = total._sum_d.copy()  # noqa: SLF001  # What the product never needs again.

    def put_back() -> None:
        total._sum_d[:] = words  # noqa: SLF001
        total._decoded = False  # noqa: SLF001

    return put_back


if __name__ == "__main__":
    main()
