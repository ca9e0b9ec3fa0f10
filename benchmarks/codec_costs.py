"""What a codec costs and leaves out: bytes, time per value, relative error.

    python benchmarks/codec_costs.py [--values 10000000] [--repetitions 5]

JSON lines on stdout, the machine first, then one for each codec with its defaults; a
table on stderr. Updates have normally distributed values. ``encode`` adds a residual,
encodes in the update's own memory and leaves the new residual, as a site does;
``check`` reads the words of a stranger, ``fold`` decodes them into a running mean, as
the aggregator does. Times are CPU time of one thread, the smallest of some repetitions,
in nanoseconds for each value of the model. ``error`` is the norm of what one encoding
leaves out, by that of the update; ``after_rounds`` the same of the sum of as many
rounds with error feedback, of which every update is the same one.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import machine
import numpy as np
import torch

from aggregator.combine import weighted_mean
from federation.compression.choice import NAMES, codec_of, feedback_of
from federation.compression.codec import Codec, decoded, encoded_over
from federation.ids import SiteId
from federation.protocols import WeightedUpdate
from federation.vectors import Vector

STD = 1e-3
_T = TypeVar("_T")


def main() -> None:
    args = _arguments()
    torch.set_num_threads(1)
    print(json.dumps(machine.facts("codec_costs", **vars(args))), flush=True)
    for name in NAMES:
        row = _row(codec_of(name), args)
        print(json.dumps(row), flush=True)
        print(*row.values(), sep="\t", file=sys.stderr)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--values", type=int, default=10_000_000)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--smoke", action="store_true", help="few values, once")
    args = parser.parse_args()
    if args.smoke:
        args.values, args.repetitions, args.rounds = 100_000, 1, 2
    return args


def _row(codec: Codec, args: argparse.Namespace) -> dict[str, object]:
    update_d = _update(args.values)
    room_d, residual_d = np.empty_like(update_d), np.zeros_like(update_d)
    out_d = np.zeros_like(update_d)
    encode, check, fold = [], [], []
    for _ in range(args.repetitions):
        np.copyto(room_d, update_d)
        words, seconds = _timed(
            lambda: encoded_over(codec, room_d, residual_d=residual_d, seed=1)
        )
        encode.append(seconds)
        check.append(_timed(partial(codec.fault, words, args.values))[1])
        fold.append(_timed(partial(_fold, codec, words, out_d))[1])
    nanoseconds = 1e9 / args.values
    return {
        "codec": codec.name,
        "bits_per_value": codec.bits_per_value(),
        "bytes": words.nbytes,
        "times_fewer": round(4 * args.values / words.nbytes, 2),
        "encode_ns": round(min(encode) * nanoseconds, 2),
        "check_ns": round(min(check) * nanoseconds, 2),
        "fold_ns": round(min(fold) * nanoseconds, 2),
        "error": _error(codec, args.values, rounds=1),
        "after_rounds": _error(codec, args.values, rounds=args.rounds),
    }


def _timed(act: Callable[[], _T]) -> tuple[_T, float]:
    start = time.process_time()
    found = act()
    return found, time.process_time() - start


def _fold(codec: Codec, words: np.ndarray, out_d: Vector) -> Vector:
    """Make a mean of one update: it is looked at for NaN, and copied."""
    values = codec.values(words, size=out_d.size, seed=1)
    update = WeightedUpdate(site=SiteId("a"), delta_d=values, weight=1.0)
    return weighted_mean([update], out_d)


def _update(size: int) -> Vector:
    rng = np.random.default_rng(0)
    return np.float32(STD) * rng.standard_normal(size, dtype=np.float32)


def _error(codec: Codec, size: int, *, rounds: int) -> float:
    """Norm of what has not arrived after rounds of one update, by all of it."""
    update_d, sent_d = _update(size), np.zeros(size)
    residual_d = np.zeros(size, np.float32)
    for index in range(rounds):
        residual_d *= np.float32(feedback_of(codec.name))
        words = codec.encode(update_d, residual_d=residual_d, seed=index)
        sent_d += decoded(codec, words, size, seed=index)
    whole_d = rounds * update_d.astype(np.float64)
    return float(np.linalg.norm(whole_d - sent_d) / np.linalg.norm(whole_d))


if __name__ == "__main__":
    main()
