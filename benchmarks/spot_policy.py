"""Spot machines under a deadline: the policy of `crossfed up` against hindsight.

    python benchmarks/spot_policy.py [--traces 200] [--first-seed 0] [--processes N]
        [--recorded FOLDER] [--only POLICY ...]

Each of the generators in `spot_traces.py` draws the same number of traces. A policy
sees the present and the past; the optimum knows the whole trace. Seeds below 100000 are
for these figures; all tuning was done on seeds from 100000 on.

Policies: `policy` is `deploy.fleet.choosing.choice` with all that can be known of the
past: seven days of prices and of capacity in every zone. `as deployed` is the same rule
with what `crossfed up --keep` knows: published prices, and capacity only where it had a
machine or was refused one. `second run` and `third run` are `as deployed` after one and
two runs of the same length in that week, each a day before the next: a deployment keeps
what it has seen. `on demand` uses nothing else; `spot until forced` stays on a spot
machine while there is one, waits while there is none, and finishes on demand;
`uniform progress` is that of Wu et al., NSDI 2024, which also uses machines on demand
while it is behind an even pace, with the cheapest zone as its spot machine.

With `--recorded FOLDER`, availability is that of recorded traces (files of
github.com/skypilot-org/spot-traces), of which each seed draws zones and a begin.

JSON lines on stdout, the machine first; a table on stderr.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import machine
import numpy as np
import spot_traces
from spot_traces import SLOT_HOURS, WAIT, Outcome, Policy, Position, Trace

from cloud_adapters.compute.machine_types import SpotPrice
from cloud_adapters.compute.pool import Market
from deploy.fleet.choosing.choice import MachineOffer, Situation, decide
from deploy.fleet.choosing.outlook import Left, MarketHistory, Outlook, foresee
from deploy.fleet.choosing.spot_history import (
    RestOfWork,
    Sighting,
    history,
    is_believed,
    situation,
)

# The outlook is computed again after so many slots, from as many of the newest.
EVERY, WINDOW = 25, spot_traces.HISTORY_SLOTS
# With what `--keep` knows, also after so many more refusals and losses.
REFUSALS = 6
# Slots between the runs of one deployment: a day.
BETWEEN = round(24 / SLOT_HOURS)
TUNED_FROM = 100_000
# Whole seconds: a zone that was refused a slot ago may be asked again.
SLOT_SECONDS = round(SLOT_HOURS * 3600.0)
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


def spot_until_forced(trace: Trace, at: Position) -> int:
    return guarded(trace, at, _spot(trace, at))


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


class Ours:
    """`decide`, with an outlook that is renewed from time to time."""

    def __init__(self) -> None:
        self._outlook: Outlook | None = None

    def __call__(self, trace: Trace, at: Position) -> int:
        if self._outlook is None or (at.slot - trace.start) % EVERY == 0:
            seen = slice(max(0, at.slot + 1 - WINDOW), at.slot + 1)
            history = MarketHistory(
                names=[offer.name for offer in _offers(trace, at)[:-1]],
                prices_zt=trace.prices_zt[:, seen] * SLOT_HOURS,
                available_zt=trace.available_zt[:, seen],
            )
            self._outlook = foresee(
                history,
                Left(slots=at.left, work=at.work),
                boot=trace.boot,
                on_demand=trace.on_demand * SLOT_HOURS,
            )
        offers = _offers(trace, at)
        situation = Situation(
            work_hours=at.work * SLOT_HOURS,
            deadline=at.left * SLOT_HOURS * 3600.0,
            boot_hours=trace.boot * SLOT_HOURS,
            slot_hours=SLOT_HOURS,
            current="" if at.place == WAIT else offers[at.place].name,
            boot_left_hours=at.boot * SLOT_HOURS,
            outlook=self._outlook,
        )
        offer = decide(situation, offers, 0.0).offer
        return WAIT if offer is None else offers.index(offer)


class AsDeployed:
    """`decide` with the knowledge of `deploy.fleet.keeping.moves`.

    A zone without capacity refuses a launch, which costs nothing; the rule then decides
    again without it.
    """

    def __init__(self) -> None:
        self._sightings: list[Sighting] = []
        self._situation: Situation | None = None
        self._foreseen = (0, 0)
        self._published: Sequence[Sequence[SpotPrice]] = ()
        self._place = WAIT
        self._now = 0

    def end_run(self, trace: Trace) -> None:
        """Note that the machine of the last decision was ended with its run."""
        if 0 <= self._place < trace.zones:
            offer = _offers(trace, _begin(trace))[self._place]
            self._see(offer, self._now, has_capacity=True, is_given_up=True)
        self._situation, self._place = None, WAIT

    def __call__(self, trace: Trace, at: Position) -> int:
        self._published = self._published or _published(trace)
        self._now = now = at.slot * SLOT_SECONDS
        offers = _offers(trace, at)
        if 0 <= self._place < trace.zones and at.place == WAIT:
            self._see(offers[self._place], now, has_capacity=False)
        while True:
            wanted = self._wanted(trace, at, offers, now)
            if wanted == WAIT:
                wanted = at.place  # A machine that works is not given up to wait.
            if wanted in {at.place, trace.zones}:
                break
            has_capacity = bool(trace.available_zt[wanted, at.slot])
            self._see(offers[wanted], now, has_capacity=has_capacity)
            if has_capacity:
                break
        if 0 <= at.place < trace.zones and wanted != at.place:
            self._see(offers[at.place], now, has_capacity=True, is_given_up=True)
        self._place = wanted
        return wanted

    def _see(
        self,
        offer: MachineOffer,
        now: float,
        *,
        has_capacity: bool,
        is_given_up: bool = False,
    ) -> None:
        seen = Sighting(
            zone=offer.zone,
            at=now,
            has_capacity=has_capacity,
            is_given_up=is_given_up,
        )
        self._sightings.append(seen)

    def _wanted(
        self, trace: Trace, at: Position, every: Sequence[MachineOffer], now: float
    ) -> int:
        *spots, reserve = every
        current = "" if at.place == WAIT else every[at.place].name
        spots = [
            replace(
                offer,
                is_available=offer.name == current
                or is_believed(offer, self._sightings, now=now, slot_hours=SLOT_HOURS),
            )
            for offer in spots
        ]
        offers = [*spots, reserve]
        rest = RestOfWork(
            work_hours=at.work * SLOT_HOURS,
            left_hours=at.left * SLOT_HOURS,
            boot_hours=trace.boot * SLOT_HOURS,
            slot_hours=SLOT_HOURS,
            current=current,
            boot_left_hours=at.boot * SLOT_HOURS,
        )
        # The product foresees with every decision; here, when enough is new.
        refusals = sum(not each.has_capacity for each in self._sightings)
        due = (at.slot - trace.start) // EVERY, refusals // REFUSALS
        if self._situation is None or due != self._foreseen:
            self._foreseen = due
            seen = slice(max(0, at.slot + 1 - WINDOW), at.slot + 1)
            known = history(
                spots,
                [each for slot in self._published[seen] for each in slot],
                self._sightings,
                now=now,
                slot_hours=SLOT_HOURS,
            )
            self._situation = situation(rest, known, offers, now=now)
        found = replace(
            self._situation,
            work_hours=rest.work_hours,
            deadline=now + rest.left_hours * 3600.0,
            current=rest.current,
            boot_left_hours=rest.boot_left_hours,
        )
        offer = decide(found, offers, now).offer
        names = [each.name for each in every]
        return WAIT if offer is None else names.index(offer.name)


def _published(trace: Trace) -> Sequence[Sequence[SpotPrice]]:
    """Prices of each slot, as a cloud lists them."""
    names = [offer.zone for offer in _offers(trace, _begin(trace))[:-1]]
    return [
        [
            SpotPrice(
                zone=name,
                at=slot * SLOT_SECONDS,
                dollars_per_hour=float(price),
            )
            for name, price in zip(names, prices_z, strict=True)
        ]
        for slot, prices_z in enumerate(trace.prices_zt.T)
    ]


def _begin(trace: Trace) -> Position:
    return Position(
        slot=trace.start, place=WAIT, boot=0, work=trace.work, left=trace.deadline
    )


def _offers(trace: Trace, at: Position) -> Sequence[MachineOffer]:
    """One of each zone, and one on demand."""
    spots = [
        MachineOffer(
            provider="aws",
            region=f"region-{region}",
            zone=f"region-{region}{'abcdef'[zone]}",
            machine="g5.xlarge",
            market=Market.SPOT,
            dollars_per_hour=float(trace.prices_zt[zone, at.slot]),
            moving_dollars=float(trace.moving_z[zone]),
            is_available=bool(trace.available_zt[zone, at.slot]),
        )
        for zone, region in enumerate(trace.region_z)
    ]
    reserve = MachineOffer(
        provider="aws",
        region="region-0",
        machine="g5.xlarge",
        market=Market.ON_DEMAND,
        dollars_per_hour=trace.on_demand,
    )
    return [*spots, reserve]


def after_runs(trace: Trace, runs: int) -> AsDeployed:
    """A policy that has seen what earlier runs on the same market have seen."""
    policy = AsDeployed()
    for number in range(runs, 0, -1):
        begin = trace.start - number * (trace.deadline + BETWEEN)
        spot_traces.replay(replace(trace, start=begin), policy)
        policy.end_run(trace)
    return policy


# What makes one of each, without memory of another trace.
POLICIES: Mapping[str, Callable[[Trace], Policy]] = {
    "policy": lambda _: Ours(),
    "as deployed": lambda trace: after_runs(trace, 0),
    "second run": lambda trace: after_runs(trace, 1),
    "third run": lambda trace: after_runs(trace, 2),
    "uniform progress": lambda _: uniform_progress,
    "spot until forced": lambda _: spot_until_forced,
    "on demand": lambda _: on_demand,
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
        name: spot_traces.replay(trace, made(trace))
        for name, made in POLICIES.items()
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
    is_held_out = seeds.stop <= TUNED_FROM
    settings = {"num_traces": args.traces, "held_out": is_held_out}
    print(json.dumps(machine.facts("spot_policy", **settings)), flush=True)
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
