"""Spot machines under a deadline: the policy of `crossfed up` against hindsight.

    python benchmarks/spot_policy.py [--traces 200] [--first-seed 0] [--processes N]
        [--recorded FOLDER] [--only POLICY ...]

Each of the generators in `spot_traces.py` draws the same number of traces. A policy
sees the present; the optimum knows the whole trace.

Policies: `up --keep` is the rule of `deploy.fleet.placement`: the cheapest spot
machine that there is, until the latest time from which one on demand still finishes
the job after a loss. `on demand` uses nothing else; `uniform progress` is that of Wu
et al., NSDI 2024, which also uses machines on demand while it is behind an even pace,
with the cheapest zone as its spot machine.

With `--recorded FOLDER`, availability is that of recorded traces (files of
github.com/skypilot-org/spot-traces), of which each seed draws zones and a begin.

JSON lines on stdout, the machine first; a table on stderr.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import machine
import numpy as np
import spot_traces
from spot_traces import SLOT_HOURS, WAIT, Outcome, Policy, Position, Trace

from cloud_adapters.compute.pool import Market
from deploy.fleet.placement import market_now

# A 1 in a recorded trace means capacity, or none.
INVERTED = "ones are outages"
RECORDED = ("ones are capacity", INVERTED)


def guarded(trace: Trace, at: Position, wanted: int) -> int:
    """Change to on demand when anything else could miss the deadline."""
    spare = at.left - at.work - trace.boot
    works = wanted == at.place and at.boot == 0
    is_safe = spare >= (0 if works and wanted != WAIT else 1)
    return wanted if is_safe or wanted == trace.zones else trace.zones


def on_demand(trace: Trace, _: Position) -> int:
    return trace.zones


def _spot(trace: Trace, at: Position) -> int:
    """The present spot machine; otherwise the cheapest that there is."""
    if 0 <= at.place < trace.zones:
        return at.place
    found = np.flatnonzero(trace.available_zt[:, at.slot])
    if not found.size:
        return WAIT
    return int(found[trace.prices_zt[found, at.slot].argmin()])


def up_keep(trace: Trace, at: Position) -> int:
    """The product's rule, with a slot for its round."""
    if at.place == trace.zones:
        return at.place
    market = market_now(
        left_hours=at.left * SLOT_HOURS,
        work_hours=at.work * SLOT_HOURS,
        round_hours=SLOT_HOURS,
        boot_hours=trace.boot * SLOT_HOURS,
        boot_left_hours=(trace.boot if at.place == WAIT else at.boot) * SLOT_HOURS,
    )
    return trace.zones if market is Market.ON_DEMAND else _spot(trace, at)


def uniform_progress(trace: Trace, at: Position) -> int:
    done, elapsed = trace.work - at.work, trace.deadline - at.left
    pace = trace.work / trace.deadline
    spot = _spot(trace, at)
    if at.place == trace.zones:
        # Their hysteresis: on demand until two starts ahead.
        is_ahead = done >= (elapsed + 2 * trace.boot) * pace
        return guarded(trace, at, spot if is_ahead and spot != WAIT else trace.zones)
    if spot == WAIT and done < elapsed * pace:
        return trace.zones
    return guarded(trace, at, spot)


POLICIES: Mapping[str, Policy] = {
    "up --keep": up_keep,
    "uniform progress": uniform_progress,
    "on demand": on_demand,
}


def compare(
    kind: str,
    seed: int,
    recorded: Path | None = None,
    only: Sequence[str] = (),
) -> tuple[str, Mapping[str, tuple[float, Outcome]]]:
    """Ratio of each policy's dollars to the optimum's, in one trace."""
    trace = (
        spot_traces.generate(kind, seed)
        if recorded is None
        else spot_traces.recorded(recorded, seed, is_inverted=kind == INVERTED)
    )
    best = spot_traces.optimum(trace)
    found = {
        name: spot_traces.replay(trace, policy)
        for name, policy in POLICIES.items()
        if not only or name in only
    }
    return kind, {name: (each.dollars / best, each) for name, each in found.items()}


def row(
    policy: str, kind: str, found: Sequence[tuple[float, Outcome]]
) -> dict[str, object]:
    ratios = [ratio for ratio, _ in found]
    return {
        "policy": policy,
        "traces": kind,
        "num_traces": len(found),
        "mean": float(np.mean(ratios)),
        "standard_error": float(np.std(ratios) / np.sqrt(len(ratios))),
        "median": float(np.median(ratios)),
        "p95": float(np.quantile(ratios, 0.95)),
        "worst": max(ratios),
        "deadline_kept": float(np.mean([not each.is_late for _, each in found])),
        "launches": float(np.mean([each.launches for _, each in found])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", type=int, default=200)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--recorded", type=Path)
    parser.add_argument("--only", nargs="+", choices=tuple(POLICIES), default=())
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    args = parser.parse_args()
    each = max(1, args.traces // len(spot_traces.MARKETS))
    seeds = range(args.first_seed, args.first_seed + each)
    print(json.dumps(machine.facts("spot_policy", num_traces=args.traces)), flush=True)
    begin = time.perf_counter()
    kinds = RECORDED if args.recorded else tuple(spot_traces.MARKETS)
    cases = [(kind, seed, args.recorded, args.only) for kind in kinds for seed in seeds]
    columns = list(zip(*cases, strict=True))
    if args.processes == 1:
        found = list(map(compare, *columns))
    else:
        with ProcessPoolExecutor(args.processes) as pool:
            found = list(pool.map(compare, *columns, chunksize=5))
    seconds = time.perf_counter() - begin
    for policy in args.only or POLICIES:
        for kind in ("all", *kinds):
            some = [by[policy] for of, by in found if kind in {"all", of}]
            line = row(policy, kind, some)
            print(json.dumps(line), flush=True)
            print(
                f"{policy:18} {kind:9} mean {line['mean']:.3f} median "
                f"{line['median']:.3f} p95 {line['p95']:.2f} worst {line['worst']:.2f} "
                f"deadline kept {line['deadline_kept']:.1%}",
                file=sys.stderr,
            )
    print(f"{len(cases)} traces in {seconds:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
