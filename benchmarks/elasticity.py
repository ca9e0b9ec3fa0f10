"""Elastic sites: what utilisation and cost become when machines follow the load.

    python benchmarks/elasticity.py [--rounds 100] [--seeds 20]

The claim to test: utilisation of GPUs from 75 to 90 %, and 25 % less cost. Virtual
time. A federation has sites with unequal shares of the data, all on equal machines with
4 GPUs. `deploy.fleet.sizes` may give each site 1, 2, 4, 8 or 16 GPUs
between rounds; a move lasts ten minutes, in which all wait. Twice the GPUs are 1.8
times as fast. A GPU costs the same in every machine. A round is ten minutes of the
largest site plus 30 s of exchange; seconds vary by 5 % from round to round. Utilisation
is GPU time at work by GPU time paid for.

`oracle` starts with the sizes that cost least without longer rounds, and never moves.
`bound` is 1 - before/after of the utilisations: with equal prices, and scaling without
loss, that is all that utilisation can save.

JSON lines on stdout, the machine first; a table on stderr.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import machine
import numpy as np

from deploy.fleet.sizes import (
    FederationLoad,
    MachineSize,
    MeasuredSite,
    resize,
)

GPU_DOLLARS = 1.25  # An hour.
ROUND_SECONDS, OTHER_SECONDS, MOVE_SECONDS = 600.0, 30.0, 600.0
NOISE = 0.05
SCALING = 0.9  # What is left of the speed of twice the GPUs.
SIZES = tuple(
    MachineSize(
        machine=f"{2**power} GPUs",
        speed=float((2 * SCALING) ** (power - 2)),
        dollars_per_hour=GPU_DOLLARS * 2**power,
    )
    for power in range(5)
)
START = SIZES[2]

FEDERATIONS: Mapping[str, Sequence[float]] = {
    "equal": (1, 1, 1, 1),
    "75 % busy": (1, 0.8, 0.75, 0.45),
    "one straggler": (1, 0.5, 0.5, 0.5),
    "one small": (1, 1, 1, 0.25),
    "unequal": (1, 0.5, 0.25, 0.125),
    "sixteen": tuple(1 - 0.06 * index for index in range(16)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticRun:
    """What a run of a federation cost."""

    dollars: float
    seconds: float
    utilisation: float
    moves: int


def run(
    shares: Sequence[float],
    sizes: Sequence[MachineSize],
    rng: np.random.Generator,
    *,
    rounds: int,
    is_elastic: bool,
) -> ElasticRun:
    """Virtual time: every round with its machines, then perhaps moves."""
    load = FederationLoad(
        sites=[
            MeasuredSite(name=f"site-{at}", busy_seconds=(), size=size, sizes=SIZES)
            for at, size in enumerate(sizes)
        ],
        other_seconds=OTHER_SECONDS,
        rounds_left=rounds,
        change_seconds=MOVE_SECONDS,
    )
    dollars = seconds = worked = paid = 0.0
    moves = 0
    for done in range(rounds):
        busy = [
            ROUND_SECONDS * share / site.size.speed * rng.lognormal(0.0, NOISE)
            for share, site in zip(shares, load.sites, strict=True)
        ]
        sites = [
            replace(site, busy_seconds=(*site.busy_seconds, own))
            for site, own in zip(load.sites, busy, strict=True)
        ]
        load = replace(load, sites=sites, rounds_left=rounds - done - 1)
        gpus = [site.size.dollars_per_hour / GPU_DOLLARS for site in sites]
        took = max(busy) + OTHER_SECONDS
        changes = resize(load) if is_elastic else ()
        if changes:
            took += MOVE_SECONDS
            moves += len(changes)
            new = {change.site: change.size for change in changes}
            sites = [
                replace(s, busy_seconds=(), size=new.get(s.name, s.size))
                for s in load.sites
            ]
            load = replace(load, sites=sites)
        seconds += took
        dollars += took / 3600 * sum(gpus) * GPU_DOLLARS
        paid += took * sum(gpus)
        worked += sum(own * each for own, each in zip(busy, gpus, strict=True))
    return ElasticRun(
        dollars=dollars, seconds=seconds, utilisation=worked / paid, moves=moves
    )


def cheapest(shares: Sequence[float]) -> Sequence[MachineSize]:
    """The sizes that cost least without longer rounds than now, and without noise."""
    best: tuple[float, Sequence[MachineSize]] = (np.inf, ())
    longest = {ROUND_SECONDS * s / z.speed for s, z in itertools.product(shares, SIZES)}
    for limit in longest:
        if limit > ROUND_SECONDS * max(shares) / START.speed:
            continue
        found = []
        for share in shares:
            enough = [z for z in SIZES if ROUND_SECONDS * share / z.speed <= limit]
            if not enough:
                break
            found.append(min(enough, key=lambda size: size.dollars_per_hour))
        else:
            dollars = (limit + OTHER_SECONDS) * sum(z.dollars_per_hour for z in found)
            best = min(best, (dollars, found), key=lambda each: each[0])
    return best[1]


def compare(name: str, rounds: int, seeds: int) -> dict[str, object]:
    shares = FEDERATIONS[name]
    start = [START] * len(shares)
    ideal = cheapest(shares)
    kinds = {
        "fixed": (start, False),
        "elastic": (start, True),
        "oracle": (ideal, False),
    }
    runs = {
        kind: [
            run(
                shares,
                sizes,
                np.random.default_rng(seed),
                rounds=rounds,
                is_elastic=is_elastic,
            )
            for seed in range(seeds)
        ]
        for kind, (sizes, is_elastic) in kinds.items()
    }

    def mean(kind: str, field: str) -> float:
        return float(np.mean([getattr(each, field) for each in runs[kind]]))

    before, after = mean("fixed", "utilisation"), mean("elastic", "utilisation")
    fixed = mean("fixed", "dollars")
    return {
        "federation": name,
        "utilisation_fixed": before,
        "utilisation_elastic": after,
        "dollars_saved": 1 - mean("elastic", "dollars") / fixed,
        "dollars_saved_oracle": 1 - mean("oracle", "dollars") / fixed,
        "bound": 1 - before / after,
        "time": mean("elastic", "seconds") / mean("fixed", "seconds"),
        "moves": mean("elastic", "moves"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=20)
    args = parser.parse_args()
    settings = {"rounds": args.rounds, "seeds": args.seeds}
    print(json.dumps(machine.facts("elasticity", **settings)), flush=True)
    for name in FEDERATIONS:
        row = compare(name, args.rounds, args.seeds)
        print(json.dumps(row), flush=True)
        print(
            f"{name:14} utilisation {row['utilisation_fixed']:.0%} to "
            f"{row['utilisation_elastic']:.0%}, cost -{row['dollars_saved']:.1%} "
            f"(oracle -{row['dollars_saved_oracle']:.1%}, bound -{row['bound']:.1%}), "
            f"time {row['time']:.2f}x, {row['moves']:.1f} moves",
            file=sys.stderr,
        )


if __name__ == "__main__":
    main()
