"""How exact a secure sum is: relative Euclidean error of the weighted mean.

Updates of normally distributed values, weights from 0.4 to 1, rounded as sites round
them and summed in the ring. Without masks, which change no sum. The error of one run
is within a percent of any other's.
"""

import argparse
import json
import sys

import machine
import numpy as np

from federation.vectors import Vector
from privacy.secagg.arithmetic.accumulator import MaskedSum
from privacy.secagg.arithmetic.ring import MAX_SITES_OF_16_BITS, RingSpec
from privacy.secagg.arithmetic.seal import encode_

STD = 1e-3


def main() -> None:
    args = _arguments()
    print(json.dumps(machine.facts("precision", **vars(args))), flush=True)
    just_above = 1.01 * STD * args.values**0.5
    for bits in (32, 24, 16):
        for num_sites in args.sites:
            if bits == 16 and num_sites > MAX_SITES_OF_16_BITS:
                continue
            for clip_norm, bound in [
                (just_above, None),
                (10.0, None),
                *((just_above, factor * STD) for factor in args.bounds),
            ]:
                spec = RingSpec(
                    bits=bits,
                    num_sites=num_sites,
                    clip_norm=clip_norm,
                    element_bound=bound,
                )
                row = {
                    "bits": bits,
                    "sites": num_sites,
                    "values": args.values,
                    "clip_norm": clip_norm,
                    "element_bound": bound,
                    "relative_error": _error(spec, args.values),
                }
                print(json.dumps(row), flush=True)
                print(*row.values(), sep="\t", file=sys.stderr)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--values", type=int, default=1_000_000)
    parser.add_argument("--sites", type=int, nargs="+", default=[2, 4, 16, 64])
    parser.add_argument(
        "--bounds",
        type=float,
        nargs="*",
        default=[10.0, 50.0],
        help="element bounds, in standard deviations of an element",
    )
    return parser.parse_args()


def _update(site: int, size: int) -> Vector:
    rng = np.random.default_rng(site)
    return np.float32(STD) * rng.standard_normal(size, dtype=np.float32)


def _error(spec: RingSpec, size: int) -> float:
    weights_n = np.linspace(0.4, 1.0, spec.num_sites)
    total, exact_d = MaskedSum(size, spec), np.zeros(size)
    for site, weight in enumerate(weights_n.tolist()):
        update_d = _update(site, size)
        exact_d += weight * update_d.astype(np.float64)
        key = bytes([site]) * 32  # Repeatable; a site takes a fresh one.
        total.fold_(encode_(update_d, spec, weight=weight, rounding_key=key).words_w)
    exact_d /= weights_n.sum()
    difference_d = total.decode(divisor=float(weights_n.sum())) - exact_d
    return float(np.linalg.norm(difference_d) / np.linalg.norm(exact_d))


if __name__ == "__main__":
    main()
